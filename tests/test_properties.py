"""What holds for attention as an integral holds for every operator on every backend, gradients too.

Two calls that must agree are both within the error budget (8 eps of the size of the terms that are summed) of
one number, so they may differ by twice that. `make properties-long` draws far more, differently each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import draw, lse_dtype
from hypothesis import strategies as st
from operator_cases import CASES, SERVED_BY_TRITON, Case, Sizes, backend, backends, part
from property_helpers import assert_agree, drawn, of_keys, on, shuffled
from torch import Tensor
from triton_support import INTERPRETED

import continuum_ops as co

OPS = [op for op in CASES if not INTERPRETED or op in SERVED_BY_TRITON]
SOFTMAX_OVER_KEYS = [op for op in OPS if op in SERVED_BY_TRITON]
OVER_KEYS = [op for op in OPS if op != "patch_attention"]


@on(OVER_KEYS)
def test_the_order_of_the_keys_does_not_matter(served: str, op: str, data: st.DataObject) -> None:
    case = drawn(data, op)
    order, g = shuffled(data, case.count), case.cotangents()
    with backend(served):
        results, permuted = case.results(g), case.gathered(order).results(g)
    expected = of_keys(case, results, lambda t, axis: t.index_select(axis, order))
    assert_agree(permuted, expected, case.budget(g))


@on(OVER_KEYS)
def test_a_point_is_two_of_half_its_weight(served: str, op: str, data: st.DataObject) -> None:
    case = drawn(data, op)
    copies = torch.tensor(data.draw(st.lists(st.integers(1, 3), min_size=case.count, max_size=case.count)))
    index, g = torch.arange(case.count).repeat_interleave(copies), case.cotangents()
    split = case.gathered(index)
    split = split.with_tensors(weights=split.tensors["weights"] / copies[index].to(split.tensors["weights"]))
    with backend(served):
        results, halves = case.results(g), split.results(g)

    def joined(t: Tensor, axis: int) -> Tensor:
        shape = list(t.shape)
        shape[axis] = case.count
        return torch.zeros(shape, dtype=torch.float64).index_add_(axis, index, t.double()).to(t.dtype)

    weights = halves.pop("d_weights")
    halves = of_keys(case, halves, joined)
    budget = case.budget(g)
    assert_agree({"d_weights": weights}, {"d_weights": results.pop("d_weights")[..., index]}, budget)
    assert_agree(halves, results, budget)


@on(OPS)
def test_a_factor_of_the_weights(served: str, op: str, data: st.DataObject) -> None:
    """Softmax sees it in lse only; the linear operators are linear in it; for patches scale takes it."""
    case, factor = drawn(data, op), data.draw(st.sampled_from([0.125, 0.3, 7.0]), "factor")
    g, options = case.cotangents(), dict(case.options)
    if case.patches:
        options["scale"] /= factor
    scaled = Case(op, case.tensors | {"weights": case.tensors["weights"] * factor}, options)
    with backend(served):
        results, again = case.results(g), scaled.results(g)
    again["d_weights"] = again["d_weights"] * factor
    if case.linear:
        again = {name: (t.double() / factor).to(t.dtype) for name, t in again.items()}
    elif not case.patches:
        again["lse"] = again["lse"] - math.log(factor)
    assert_agree(again, results, case.budget(g))


@on(OVER_KEYS)
def test_a_point_without_weight_does_not_exist(served: str, op: str, data: st.DataObject) -> None:
    case = drawn(data, op)
    at = data.draw(st.integers(0, case.count), "at")
    index = torch.cat([torch.arange(at), torch.tensor([0]), torch.arange(at, case.count)])
    more = case.gathered(index)
    for name, axis in case.keys.items():
        junk = 0.0 if name == "weights" else data.draw(st.sampled_from([0.0, math.nan, math.inf]), name)
        more.tensors[name].select(axis, at).fill_(junk)
    g = case.cotangents()
    with backend(served):
        results, again = case.results(g), more.results(g)
    for name, axis in case.keys.items():
        assert (again[f"d_{name}"].select(axis, at) == 0).all(), name
    live = torch.cat([torch.arange(at), torch.arange(at + 1, case.count + 1)])
    again = of_keys(case, again, lambda t, axis: t.index_select(axis, live))
    assert_agree(again, results, case.budget(g))


@on(SOFTMAX_OVER_KEYS)
def test_positions_can_be_moved_and_turned(served: str, op: str, data: st.DataObject) -> None:
    """By what binary fractions hold exactly: whole numbers, exchanged axes and reflections."""
    case = drawn(data, op)
    if "query_pos" not in case.tensors:
        case = CASES[op](Sizes(), case.dtype, 5)
    dims, g = case.tensors["query_pos"].shape[-1], case.cotangents()
    offset = torch.tensor(
        data.draw(st.lists(st.integers(-1000, 1000), min_size=dims, max_size=dims), "offset")
    )
    axes = torch.tensor(data.draw(st.permutations(range(dims)), "axes"))
    signs = torch.tensor(data.draw(st.lists(st.sampled_from([-1, 1]), min_size=dims, max_size=dims), "signs"))
    names = ("query_pos", "key_pos")
    moved = case.with_tensors(**{n: case.tensors[n][..., axes] * signs + offset for n in names})
    with backend(served):
        results, again = case.results(g), moved.results(g)
    turned = {f"d_{n}": results[f"d_{n}"][..., axes] * signs for n in names}
    assert_agree(again, results | turned, case.budget(g))


@on(SOFTMAX_OVER_KEYS)
def test_positions_can_be_turned_by_any_angle(served: str, op: str, data: st.DataObject) -> None:
    case = drawn(data, op, [torch.float32, torch.float64])
    if case.tensors.get("query_pos", torch.empty(0, 1)).shape[-1] < 2:
        case = CASES[op](Sizes(), case.dtype, 13)
    dims, dtype = case.tensors["query_pos"].shape[-1], case.dtype
    angle = data.draw(st.floats(0.0, 2 * math.pi), "angle")
    turn = torch.eye(dims, dtype=torch.float64)
    turn[0, 0] = turn[1, 1] = math.cos(angle)
    turn[0, 1], turn[1, 0] = -math.sin(angle), math.sin(angle)
    names = ("query_pos", "key_pos")
    turned = case.with_tensors(**{n: (case.tensors[n].double() @ turn).to(dtype) for n in names})
    g = case.cotangents()
    with backend(served):
        out, again = case.call(case.tensors)["out"], turned.call(turned.tensors)["out"]
    # A coordinate below 2 is rounded by eps, a squared distance thereby by 4 dims eps times the distance.
    rounded = 4 * dims * torch.finfo(dtype).eps * 2 * dims**0.5 * float(case.tensors["rate"].max())
    budget = case.budget(g)["out"] + rounded * float(case.tensors["value"].abs().max())
    assert_agree({"out": again}, {"out": out}, {"out": budget})


@on(OPS)
def test_linear_in_value(served: str, op: str, data: st.DataObject) -> None:
    case = drawn(data, op, [torch.float32, torch.float64])
    other = draw(case.tensors["value"].shape, case.dtype, 77)
    a, b = data.draw(st.sampled_from([(1.0, -1.0), (0.3, 2.0), (-5.0, 0.1)]), "factors")
    cases = [
        case,
        case.with_tensors(value=other),
        case.with_tensors(value=a * case.tensors["value"] + b * other),
    ]
    with backend(served):
        first, second, both = (c.call(c.tensors)["out"] for c in cases)
    g = case.cotangents()
    sizes = [c.budget(g)["out"] for c in cases]
    allowed = abs(a) * sizes[0] + abs(b) * sizes[1] + sizes[2]
    assert (both - (a * first + b * second)).abs().max().item() <= allowed


@on(OPS)
def test_of_the_constant_one(served: str, op: str, data: st.DataObject) -> None:
    """Softmax gives 1; the linear operators the integral of q . k."""
    case = drawn(data, op)
    case = case.with_tensors(value=torch.ones_like(case.tensors["value"]))
    g = case.cotangents()
    with backend(served):
        out = case.call(case.tensors)["out"].double()
    expected = torch.ones_like(out)
    if case.linear:
        q, k, w = (case.tensors[name].double() for name in ("query", "key", "weights"))
        expected = (q * (w[..., None] * k).sum(-2, keepdim=True)).sum(-1, keepdim=True).expand_as(out)
    assert (out - expected).abs().max().item() <= case.budget(g)["out"]


@on(OPS)
def test_batch_entries_and_heads_do_not_see_each_other(served: str, op: str, data: st.DataObject) -> None:
    case = drawn(data, op)
    g = case.cotangents()
    b = data.draw(st.integers(0, g["out"].shape[0] - 1), "entry")
    h = data.draw(
        st.integers(0, case.tensors["query" if "query" in case.tensors else "rate"].shape[_heads(case)] - 1)
    )
    alone, places = part(case, b, h)
    with backend(served):
        results = case.results(g)
        single = alone.results({name: t[places[name]] for name, t in g.items()})
    expected = {name: results[name][at] for name, at in places.items() if name in results}
    assert_agree({name: single[name] for name in expected}, expected, case.budget(g))


def _heads(case: Case) -> int:
    return {"patch_attention": -2, "position_attention": 0}.get(case.op, 1)


@on(OPS)
def test_the_dtype_is_rounding(served: str, op: str, data: st.DataObject) -> None:
    """Inputs of 16 and 32 bits give what the formula makes of them in 64, to the last but three bits."""
    case = drawn(data, op, [torch.float32, torch.bfloat16, torch.float16])
    g = case.cotangents()
    true, size = case.exact(g)
    with backend(served):
        results = case.results(g)
    assert results.keys() == true.keys()
    for name, allowed in case.budget(g).items():
        like = case.tensors.get(name.removeprefix("d_"))
        assert results[name].dtype == (
            like.dtype if like is not None else lse_dtype(case.dtype) if name == "lse" else case.dtype
        )
        error = np.abs(results[name].double().numpy() - true[name]).max()
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e} ({size[name]:.3e})"


@on(OPS)
def test_gradients_are_differences(served: str, op: str, data: st.DataObject) -> None:
    """Along a drawn direction of each input, by differences of the formula in long arithmetic."""
    case = drawn(data, op)
    g = case.cotangents()
    with backend(served):
        results = case.results(g)
    wide = Case(op, {name: t.double() for name, t in case.tensors.items()}, case.options)
    wide_g = {name: t.double() for name, t in g.items()}
    size, eps, step = case.exact(g)[1], torch.finfo(case.dtype).eps, 1e-6

    def objective(name: str, shift: Tensor) -> np.longdouble:
        true, _ = wide.with_tensors(**{name: wide.tensors[name] + shift}).exact(wide_g)
        return sum((true[n] * t.numpy().astype(np.longdouble)).sum() for n, t in wide_g.items())

    for name, tensor in wide.tensors.items():
        direction = draw(tensor.shape, torch.float64, 55) * (tensor if name == "weights" else 1.0)
        slope = (objective(name, step * direction) - objective(name, -step * direction)) / (2 * step)
        actual = (results[f"d_{name}"].double() * direction).sum().item()
        total = float(direction.abs().sum())
        allowed = (8 * eps + 1e-9) * size[f"d_{name}"] * total
        assert abs(actual - float(slope)) <= allowed, (
            f"d_{name}: {actual:.9g}, differences give {float(slope):.9g}"
        )


# --- refinement -------------------------------------------------------------------------------------


def uniform_nodes(n: int) -> Tensor:
    return torch.linspace(0.0, 1.0, n + 1, dtype=torch.float64)


def graded_nodes(n: int) -> Tensor:
    return uniform_nodes(n) ** 2


def midpoints(n: int) -> tuple[Tensor, Tensor]:
    edges = graded_nodes(n)
    return (edges[1:] + edges[:-1]) / 2, co.quadrature.midpoint(edges)


# Points and weights of a rule with n cells or nodes on [0, 1], and the power of 1 / n that its error is.
RULES: dict[str, tuple[Callable[[int], tuple[Tensor, Tensor]], float]] = {
    "trapezoid": (lambda n: (uniform_nodes(n), co.quadrature.trapezoid(uniform_nodes(n))), 2),
    "graded": (lambda n: (graded_nodes(n), co.quadrature.trapezoid(graded_nodes(n))), 2),
    "midpoint": (midpoints, 2),
    "simpson": (lambda n: (uniform_nodes(n), co.quadrature.simpson(uniform_nodes(n))), 4),
    "gauss_legendre": (lambda n: co.quadrature.gauss_legendre(n, 0.0, 1.0), math.inf),
    "clenshaw_curtis": (lambda n: co.quadrature.clenshaw_curtis(n, 0.0, 1.0), math.inf),
}


def sampled(op: str, y: Tensor, w: Tensor) -> Case:
    """Fixed smooth functions on [0, 1] at y; for patches, three patches each of which is [0, 1]."""

    def functions(*f: Tensor) -> Tensor:
        return torch.stack(f, -1)[None, None]

    if op == "patch_attention":

        def on_patches(*f: Callable[[Tensor, int], Tensor]) -> Tensor:
            return torch.cat([torch.stack([one(y, p) for one in f], -1) for p in range(3)])[None, :, None]

        tensors = {
            "query": on_patches(lambda y, p: (y * (p + 1)).sin(), lambda y, p: (y + p).cos()),
            "key": on_patches(lambda y, p: (y - p).exp(), lambda y, p: y**2 + p),
            "value": on_patches(lambda y, p: y + p),
            "weights": w.repeat(3),
        }
        return Case(op, tensors, {"patch_size": [len(y)]})
    if op == "position_attention":
        tensors = {
            "query_pos": torch.tensor([[0.1], [0.5], [1.2]], dtype=torch.float64),
            "key_pos": y[:, None],
            "value": functions((3 * y).exp(), (5 * y).sin())[0],
            "rate": torch.tensor([1.0, 6.0], dtype=torch.float64),
            "weights": w,
        }
        return Case(op, tensors)
    query = torch.tensor([[[[0.3, -1.0], [1.0, 0.5], [-2.0, 1.5]]]], dtype=torch.float64)
    key, value = functions((2 * y).sin(), y.exp()), functions((3 * y).exp(), (5 * y).sin())
    return Case(op, {"query": query, "key": key, "value": value, "weights": w})


def error_of_rule(op: str, rule: str, n: int) -> float:
    y, w = (t.to(torch.float64) for t in RULES[rule][0](n))
    nodes, heights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(60))
    fine = sampled(op, (nodes + 1) / 2, heights / 2)
    name = "lse" if op == "patch_attention" else "out"
    true = fine.exact(fine.cotangents())[0][name]
    case = sampled(op, y, w)
    if INTERPRETED:
        case = Case(op, {n: t.float() for n, t in case.tensors.items()})
    return float(np.abs(case.call(case.tensors)[name].double().numpy() - true).max() / np.abs(true).max())


@pytest.mark.parametrize("served", backends())
@pytest.mark.parametrize("rule", [rule for rule in RULES if not INTERPRETED or rule != "simpson"])  # float32
@pytest.mark.parametrize("op", OPS)
def test_refining_the_mesh_converges_at_the_order_of_the_rule(op: str, rule: str, served: str) -> None:
    order = RULES[rule][1]
    with backend(served):
        if order == math.inf:
            assert error_of_rule(op, rule, 24) < (1e-6 if INTERPRETED else 1e-13)
            return
        n = 32 if INTERPRETED or order > 2 else 128
        observed = math.log2(error_of_rule(op, rule, n) / error_of_rule(op, rule, 2 * n))
    assert observed == pytest.approx(order, abs=0.1)
