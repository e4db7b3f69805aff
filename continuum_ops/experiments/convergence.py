"""The operators against the integrals they stand for, as the mesh is refined.

For each operator and quadrature rule: the error in the norm of the theorems, the largest over the points x,
with random points in expectation; and the order that is observed. All in float64, on smooth functions.

============================  ============================================================================
continuum attention, self     CA Theorem 6 (there with Monte Carlo points)
continuum attention, cross    CA Theorem 12, queries on one domain and keys on another
position attention            PiT Theorem 2.1 (there with equal weights, against the density of the points)
Galerkin, Fourier attention   GT eq. 6 and 5 with the rule's weights in place of 1/n
patch attention               CA definitions 13 to 18, the patches sampled more finely
============================  ============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .. import quadrature
from ..ops.continuum_attention import continuum_attention
from ..ops.fourier_attention import fourier_attention
from ..ops.galerkin_attention import galerkin_attention
from ..ops.patch_attention import patch_attention
from ..ops.position_attention import position_attention
from ..training import atomic_write, write_json
from ..training.progress import progress_bar, require
from ..training.table import aligned

Array = NDArray[np.float64]

# Errors below it are those of float64's rounding, not of the rule, and do not enter the order.
FLOOR = 1e-13
HEADS, CHANNELS = 2, 2
RATES = np.array([4.0, 25.0])
PATCHES = 3


class Rule(NamedTuple):
    """Points and weights on the unit cube of some dimension, and what is known of their error.

    nodes: of (n, generator), the points of an axis, or all N = n^d of scattered ones, -> (N, d), (N,); no
        weights are those that the operator has by default. order: p of an error O(N^(-p / d)), None for one
        that falls exponentially. density: equal weights integrate against the density of the points.
    """

    name: str
    nodes: Callable[[int, np.random.Generator], tuple[Array, Array | None]]
    order: float | None
    random: bool = False
    density: bool = False


class Report(NamedTuple):
    """The result as plain data (convergence.json), the same as text, and the files that were written."""

    result: dict[str, Any]
    text: str
    files: list[Path]


def convergence(out: str | Path, *, small: bool = False, seed: int = 0, plot: bool = True) -> Report:
    """Measure every operator with every rule; write convergence.json, convergence.txt and convergence.png.

    Args:
        out: the folder; made if it is not there.
        small: fewer and coarser meshes, a few seconds.
        seed: of the random points, >= 0.
        plot: needs matplotlib.

    Raises:
        ImportError: a package of ``continuum_ops[train]`` is missing.
        OSError: a file cannot be written.
    """
    require("the convergence report", "tqdm", "scipy", *(("matplotlib",) if plot else ()))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"seed": seed, "small": small, "rows": measure(small, seed)}
    text = as_text(result)
    files = [write_json(folder / "convergence.json", result)]
    with atomic_write(folder / "convergence.txt") as file:
        file.write(text.encode())
    files.append(folder / "convergence.txt")
    if plot:
        from .plots import write_convergence

        files.append(write_convergence(folder / "convergence.png", result["rows"]))
    return Report(result, text, files)


def measure(small: bool, seed: int) -> list[dict[str, Any]]:
    """A row for each operator, dimension and rule: numbers of points, errors, observed order."""
    rows: list[dict[str, Any]] = []
    with progress_bar(sum(len(rules(d)) for d in (1, 2)), "convergence", "rule") as bar:
        for d in (1, 2):
            operators, sizes = _operators(d), _sizes(d, small)
            for rule in rules(d):
                truths = [operator.exact(d, rule.density) for operator in operators]
                errors = np.zeros((len(sizes), len(operators)))
                draws = (8 if small else 32) if rule.random else 1
                for i, n in enumerate(sizes):
                    for draw in range(draws):
                        points, w = rule.nodes(n, np.random.default_rng([seed, n, draw]))
                        for j, (operator, truth) in enumerate(zip(operators, truths, strict=True)):
                            difference = np.abs(operator.quadrature(points, w) - truth).max()
                            errors[i, j] += difference / np.abs(truth).max() / draws
                for operator, found in zip(operators, errors.T.tolist(), strict=True):
                    rows.append(
                        {
                            "operator": operator.name,
                            "source": operator.source,
                            "dimension": d,
                            "rule": rule.name,
                            "points": [n**d for n in sizes],
                            "errors": found,
                            "order": observed_order(sizes, found, rule.random),
                            "expected": rule.order,
                        }
                    )
                bar.update()
    places = {operator.name: i for i, operator in enumerate(_operators(1))}
    return sorted(rows, key=lambda row: (row["dimension"], places[row["operator"]]))


def observed_order(sizes: Sequence[float], errors: Sequence[float], fit: bool) -> float | None:
    """p of error ~ size^-p, of those above the rounding: of the last two, or by least squares through all.

    None for fewer than two.
    """
    kept = [(math.log(n), math.log(e)) for n, e in zip(sizes, errors, strict=True) if e > FLOOR]
    if len(kept) < 2:
        return None
    x, y = np.array(kept if fit else kept[-2:]).T
    return float(-np.polyfit(x, y, 1)[0])


def as_text(result: dict[str, Any]) -> str:
    """The table of a result."""
    table: list[tuple[str, ...]] = [
        ("operator", "d", "rule", "points", "error", "points", "error", "order", "theory")
    ]
    for row in result["rows"]:
        first, last = ((f"{row['points'][i]:,}", f"{row['errors'][i]:.1e}") for i in (0, -1))
        order = "" if row["order"] is None else f"{row['order']:.2f}"
        theory = "exponential" if row["expected"] is None else f"{row['expected']:g}"
        table.append((row["operator"], str(row["dimension"]), row["rule"], *first, *last, order, theory))
    lines, rule = aligned(table, left=(0, 2))
    sources = dict.fromkeys(f"{row['operator']}: {row['source']}" for row in result["rows"])
    return "\n".join(
        [
            "Largest error over the points x against the integral, relative to its largest value; with",
            "random points the mean of it over draws. Order: p of error ~ N^(-p/d), N points in d dimensions",
            "on the two finest meshes, with random points on all.",
            "",
            lines[0],
            rule,
            *lines[1:],
            "",
            *sources,
            "",
        ]
    )


def rules(d: int) -> list[Rule]:
    """The quadrature rules on the unit interval (d = 1) and the unit square (d = 2)."""
    return _LINE if d == 1 else _SQUARE


def _sizes(d: int, small: bool) -> list[int]:
    if d == 1:
        return [8, 16, 32, 64] if small else [8, 16, 32, 64, 128, 256, 512]
    return [6, 12, 24] if small else [6, 12, 24, 48]


# A smooth map of [0, 1] onto itself that puts more points at the left: slope 0.31 there, 2.31 at the right.
_STEEPNESS = 2.0


def _grade(s: Array) -> Array:
    return np.expm1(_STEEPNESS * s) / math.expm1(_STEEPNESS)


def _density(y: Array) -> Array:
    """Of points grade(s), s uniform: 1 / grade'(s)."""
    span = math.expm1(_STEEPNESS)
    return (span / _STEEPNESS / (1 + span * y)).prod(-1)


def _on_axis(x: Any, w: Any) -> tuple[Array, Array]:
    return np.asarray(x).reshape(-1, 1), np.asarray(w)


def _graded(n: int, _: np.random.Generator) -> tuple[Array, Array]:
    x = _grade(np.linspace(0, 1, n))
    return _on_axis(x, quadrature.trapezoid(x))


def _trapezoid(n: int, _: np.random.Generator) -> tuple[Array, Array]:
    x = np.linspace(0, 1, n)
    return _on_axis(x, quadrature.trapezoid(x))


def _midpoint(n: int, _: np.random.Generator) -> tuple[Array, Array]:
    edges = np.linspace(0, 1, n + 1)
    return _on_axis((edges[1:] + edges[:-1]) / 2, quadrature.midpoint(edges))


def _gauss(n: int, _: np.random.Generator) -> tuple[Array, Array]:
    return _on_axis(*quadrature.gauss_legendre(n, 0.0, 1.0))


def _clenshaw_curtis(n: int, _: np.random.Generator) -> tuple[Array, Array]:
    return _on_axis(*quadrature.clenshaw_curtis(n, 0.0, 1.0))


def _monte_carlo(d: int) -> Callable[[int, np.random.Generator], tuple[Array, Array]]:
    return lambda n, generator: (generator.random((n**d, d)), quadrature.monte_carlo(n**d).numpy())


def _voronoi(d: int) -> Callable[[int, np.random.Generator], tuple[Array, Array]]:
    def nodes(n: int, generator: np.random.Generator) -> tuple[Array, Array]:
        points = _grade(generator.random((n**d, d)))
        if d == 1:
            points.sort(axis=0)
        return points, quadrature.voronoi(points, [[0.0, 1.0]] * d).numpy()

    return nodes


def _equal(n: int, _: np.random.Generator) -> tuple[Array, None]:
    return _grade((np.arange(n) + 0.5) / n)[:, None], None


def _equal_square(n: int, generator: np.random.Generator) -> tuple[Array, None]:
    return _product(_equal(n, generator)[0], None)[0], None


def _square(
    rule: Callable[[int, np.random.Generator], tuple[Array, Array]],
) -> Callable[[int, np.random.Generator], tuple[Array, Array | None]]:
    return lambda n, generator: _product(*rule(n, generator))


def _product(x: Array, w: Array | None) -> tuple[Array, Array | None]:
    points = np.stack(np.meshgrid(x[:, 0], x[:, 0], indexing="ij"), -1).reshape(-1, 2)
    return points, None if w is None else np.outer(w, w).ravel()


_LINE = [
    Rule("trapezoid", _trapezoid, 2.0),
    Rule("trapezoid, uneven points", _graded, 2.0),
    Rule("midpoint", _midpoint, 2.0),
    Rule("Gauss-Legendre", _gauss, None),
    Rule("Clenshaw-Curtis", _clenshaw_curtis, None),
    Rule("Monte Carlo", _monte_carlo(1), 0.5, random=True),
    Rule("Voronoi, scattered points", _voronoi(1), 2.0, random=True),
    Rule("equal weights, uneven points", _equal, 0.0),
    Rule("the same against their density", _equal, 2.0, density=True),
]
# Voronoi: at least 1 in general; with random points the errors of the cells cancel in part.
_SQUARE = [
    Rule("trapezoid", _square(_trapezoid), 2.0),
    Rule("Gauss-Legendre", _square(_gauss), None),
    Rule("Clenshaw-Curtis", _square(_clenshaw_curtis), None),
    Rule("Monte Carlo", _monte_carlo(2), 1.0, random=True),
    Rule("Voronoi, scattered points", _voronoi(2), 1.0, random=True),
    Rule("equal weights, uneven points", _equal_square, 0.0),
    Rule("the same against their density", _equal_square, 2.0, density=True),
]


def _features() -> tuple[Array, Array, Array]:
    """Q, K and V of the theorems: (3, HEADS, CHANNELS) each."""
    q, k, v = np.random.default_rng(1).normal(size=(3, 3, HEADS, CHANNELS))
    return q, k, v


def _function(y: Array) -> Array:
    """u: (N, d) -> (N, 3), smooth."""
    along, across = y @ np.array([1.0, 0.7])[: y.shape[1]], y @ np.array([0.6, -1.0])[: y.shape[1]]
    return np.stack([np.sin(4 * along + 0.3), np.exp(-across), along * np.cos(3 * across)], -1)


def _project(matrix: Array, y: Array) -> Array:
    """(H, N, C), the heads of M u(y)."""
    return np.einsum("ni,ihc->hnc", _function(y), matrix)


def _fine(d: int) -> tuple[Array, Array]:
    """Points and weights of the integrals: 4 panels of Gauss-Legendre an axis, exact to the last digits."""
    nodes, w = np.polynomial.legendre.leggauss(40 if d == 1 else 16)
    x = np.concatenate([(nodes + 1 + 2 * i) / 8 for i in range(4)])
    points, weights = x[:, None], np.tile(w / 8, 4)
    return (points, weights) if d == 1 else _product(points, weights)  # type: ignore[return-value]


def _queries(d: int) -> Array:
    """The points x at which outputs are compared."""
    x = np.linspace(0, 1, 33 if d == 1 else 9)[:, None]
    return x if d == 1 else _product(x, None)[0]


def _tensor(a: Array | None) -> torch.Tensor | None:
    return None if a is None else torch.from_numpy(np.ascontiguousarray(a))


class Operator:
    """An operator on fixed smooth functions: by a rule, and as the integral."""

    name: str
    source: str

    def quadrature(self, points: Array, weights: Array | None) -> Array:
        """Outputs (H, N, C) of the operator for keys at the points (M, d) of the unit cube."""
        raise NotImplementedError

    def exact(self, d: int, density: bool) -> Array:
        """The same as integrals over the cube, or against the density of the uneven points; numpy alone."""
        raise NotImplementedError

    @staticmethod
    def _measure(d: int, density: bool) -> tuple[Array, Array]:
        points, w = _fine(d)
        return points, w * _density(points) if density else w


class _Softmax(Operator):
    def __init__(self, name: str, source: str, stretch: float) -> None:
        # The keys' domain is the cube stretched by this factor.
        self.name, self.source, self.stretch = name, source, stretch

    def quadrature(self, points: Array, weights: Array | None) -> Array:
        q, k, v = _features()
        x, y = _queries(points.shape[1]), self.stretch * points
        tensors = (_tensor(_project(m, p)) for m, p in ((q, x), (k, y), (v, y)))
        return continuum_attention(*tensors, _tensor(weights), scale=1.0).numpy()  # type: ignore

    def exact(self, d: int, density: bool) -> Array:
        q, k, v = _features()
        points, w = self._measure(d, density)
        y = self.stretch * points
        scores = np.exp(np.einsum("hnc,hmc->hnm", _project(q, _queries(d)), _project(k, y)))
        return scores * w @ _project(v, y) / (scores @ w)[..., None]


class _Position(Operator):
    name = "position attention"
    source = "PiT Theorem 2.1"

    def quadrature(self, points: Array, weights: Array | None) -> Array:
        value = _tensor(_project(_features()[2], points)[None])
        x, y = _tensor(_queries(points.shape[1])), _tensor(points)
        out = position_attention(x, y, value, torch.from_numpy(RATES), _tensor(weights))  # type: ignore
        return out[0].numpy()  # type: ignore[union-attr]

    def exact(self, d: int, density: bool) -> Array:
        points, w = self._measure(d, density)
        squares = ((_queries(d)[:, None] - points) ** 2).sum(-1)
        kernel = np.exp(-RATES[:, None, None] * squares)
        return kernel * w @ _project(_features()[2], points) / (kernel @ w)[..., None]


class _Linear(Operator):
    def __init__(self, name: str, source: str, attend: Callable[..., torch.Tensor]) -> None:
        self.name, self.source, self.attend = name, source, attend

    def quadrature(self, points: Array, weights: Array | None) -> Array:
        q, k, v = _features()
        x = _queries(points.shape[1])
        tensors = (_tensor(_project(m, p)) for m, p in ((q, x), (k, points), (v, points)))
        return self.attend(*tensors, _tensor(weights)).numpy()

    def exact(self, d: int, density: bool) -> Array:
        q, k, v = _features()
        points, w = self._measure(d, density)
        integral = np.einsum("m,hmc,hme->hce", w, _project(k, points), _project(v, points))
        return _project(q, _queries(d)) @ integral


class _Patches(Operator):
    """PATCHES patches of the interval, each sampled by the rule; compared at all points of a rule's patches.

    The output in a patch is sum_j a_j v_j(x); what converges are the a_j, so the values are those of fixed
    points: one-hot in j.
    """

    name = "patch attention"
    source = "CA definitions 13 to 18"

    def quadrature(self, points: Array, weights: Array | None) -> Array:
        q, k, _ = _features()
        n = len(points)
        at = np.concatenate([(points + p) / PATCHES for p in range(PATCHES)])
        query, key = (_tensor(_project(m, at).transpose(1, 0, 2)[None]) for m in (q, k))
        # (1, P n, H, P): the number of the patch.
        value = np.repeat(np.eye(PATCHES), n, 0)[None, :, None].repeat(HEADS, 2)
        w = None if weights is None else _tensor(np.tile(weights / PATCHES, PATCHES))
        out = patch_attention(query, key, _tensor(value), n, w)  # type: ignore[arg-type]
        assert isinstance(out, torch.Tensor)
        return out[0, ::n].numpy().transpose(1, 0, 2)

    def exact(self, d: int, density: bool) -> Array:
        q, k, _ = _features()
        points, w = self._measure(d, density)
        query, key = (
            np.stack([_project(m, (points + p) / PATCHES) for p in range(PATCHES)], 1) for m in (q, k)
        )
        scores = np.exp(np.einsum("hpmc,m,hjmc->hpj", query, w / PATCHES, key))
        return scores / scores.sum(-1, keepdims=True)


def _operators(d: int) -> list[Operator]:
    """On the interval (d = 1) and the square; patches, which need a grid, on the interval."""
    operators: list[Operator] = [
        _Softmax("continuum attention, self", "CA Theorem 6", 1.0),
        _Softmax("continuum attention, cross", "CA Theorem 12", 1.5),
        _Position(),
        _Linear("Galerkin attention", "GT eq. 6", galerkin_attention),
        _Linear("Fourier attention", "GT eq. 5", fourier_attention),
    ]
    return [*operators, _Patches()] if d == 1 else operators
