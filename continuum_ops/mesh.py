"""Meshes: the points where functions are sampled, with their quadrature weights.

Whatever takes a mesh reads ``points`` and ``weights`` of a :class:`Mesh`; :class:`Grid` and
:class:`PointCloud` are the two kinds, and :func:`as_mesh` makes a mesh of a plain tensor. Coordinates and
weights are float64 unless the input is of another float dtype; weights are computed in float64, then
rounded, and never kept in less than float32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from . import quadrature
from ._axis_arguments import AxisWeights, per_axis_weights, read_box, read_kinds
from .quadrature import ArrayLike, Device

__all__ = ["Grid", "Mesh", "PointCloud", "as_mesh"]


class Mesh(ABC):
    """Points with quadrature weights; what every function that takes a mesh may rely on."""

    @property
    @abstractmethod
    def points(self) -> Tensor:
        """(N, d) coordinates, or (B, N, d) with one mesh per sample."""

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """(N,) or (B, N) quadrature weights >= 0, at least float32."""

    @abstractmethod
    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> Mesh:
        """The mesh on another device or in another float dtype; None keeps what is."""

    @property
    def ndim(self) -> int:
        """Dimension d of the domain."""
        return self.points.shape[-1]

    @property
    def volume(self) -> Tensor:
        """Sum of the weights: () or (B,)."""
        return self.weights.sum(-1)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the points."""
        return self.points.dtype

    @property
    def device(self) -> torch.device:
        return self.points.device

    def __len__(self) -> int:
        """Number of points N (of one sample)."""
        return self.points.shape[-2]


class Grid(Mesh):
    """Tensor-product grid; its weights are the products of one rule per axis.

    The kind says what the coordinates of an axis are:

    * "endpoint": nodes, both ends of the interval included; trapezoid weights.
    * "periodic": nodes of one period without the repeated end; rectangle rule, half of the gap on both sides.
    * "cell": cell centres; midpoint rule, the cell widths. Edges lie halfway between the centres and the end
      cells are symmetric about theirs; for other cells pass ``weights=quadrature.midpoint(edges)``.

    Args:
        axes: one (n_i,) tensor of strictly increasing coordinates per axis. At least 2, or 1 on a periodic
            axis with a period; fewer need ``weights``.
        kind: one name for all axes or one per axis.
        weights: None for the rules above; a function of an axis, such as ``quadrature.simpson``, for all
            axes; or a sequence with one entry per axis, each a (n_i,) tensor of weights >= 0, such a
            function, or None. A 1-D grid also takes the tensor itself.
        period: length of the periodic axes; one number for all of them, or one entry per axis (None or inf
            on the others). None on an evenly spaced axis means n times the spacing; an uneven one must be
            told.

    Raises:
        TypeError: an axis that does not hold real numbers.
        ValueError: no axes, an axis that is not 1-D, finite and strictly increasing, axes on several
            devices, an unknown kind, weights of another length or negative, a period that is missing, too
            short, or given to an axis that is not periodic.
    """

    def __init__(
        self,
        *axes: ArrayLike,
        kind: str | Sequence[str] = "endpoint",
        weights: AxisWeights | Sequence[AxisWeights] = None,
        period: float | Sequence[float | None] | None = None,
    ) -> None:
        if not axes:
            raise ValueError("axes must be at least one 1-D tensor of coordinates, got none")
        given = [_floating(axis, f"axes[{i}]") for i, axis in enumerate(axes)]
        _require_same_device(given, "axes")
        dtype = reduce(torch.promote_types, (axis.dtype for axis in given))
        for i, axis in enumerate(given):
            if axis.ndim == 0:
                raise ValueError(
                    f"axes[{i}] must be 1-D coordinates, got the number {axes[i]}; "
                    "sizes go to Grid.uniform((n_1, ..., n_d))"
                )
            quadrature._nodes(axis, f"axes[{i}]", 1)
        self._axes = tuple(axis.to(dtype) for axis in given)
        self._cache: dict[str, Tensor] = {}
        self._kind = read_kinds(kind, len(axes))
        # Periods and weights come from the coordinates as given, before a common dtype rounds anything.
        self._period = _periods(period, self._kind, given)
        rules = per_axis_weights(weights, len(axes))
        recipes = list(zip(given, self._kind, self._period, rules, strict=True))
        self._axis_weights = tuple(
            _axis_weights(i, *recipe).to(_at_least_float32(dtype)) for i, recipe in enumerate(recipes)
        )
        # Weights of axes that receive gradients are computed at each use: a backward pass frees their graph.
        self._recipes = {
            i: recipe
            for i, recipe in enumerate(recipes)
            if recipe[0].requires_grad and (recipe[-1] is None or callable(recipe[-1]))
        }

    @classmethod
    def uniform(
        cls,
        shape: int | Sequence[int],
        bounds: Sequence[Any] | None = None,
        kind: str | Sequence[str] = "endpoint",
        *,
        dtype: torch.dtype = torch.float64,
        device: Device = None,
    ) -> Grid:
        """Evenly spaced grid on a box.

        On [lo, hi] with n points and h = (hi - lo) / n: "endpoint" is lo, ..., hi with both ends (n >= 2),
        "periodic" is lo + i h with period hi - lo, "cell" is lo + (i + 1/2) h with weights h.

        Args:
            shape: number of points per axis; an int makes a 1-D grid.
            bounds: (lo, hi) per axis, on one axis also (lo, hi) alone; None for the unit cube.
            kind: one name for all axes or one per axis.
            dtype: dtype of points and weights (these at least float32).
            device: None for the CPU.

        Raises:
            ValueError: too few points, or bounds that do not fit the shape or are not finite with lo < hi.
        """
        counts = (shape,) if isinstance(shape, int) else tuple(shape)
        if bounds is not None and not isinstance(bounds, Sequence):
            raise TypeError(
                f"bounds must be (lo, hi) for each axis, got {bounds!r}; sizes go in a tuple: (8, 8)"
            )
        kinds = read_kinds(kind, len(counts))
        box = [(0.0, 1.0)] * len(counts) if bounds is None else read_box(bounds)
        if len(box) != len(counts):
            raise ValueError(f"bounds must be (lo, hi) for each of {len(counts)} axes, got {len(box)}")
        axes, weights, period = [], [], []
        for i, (n, (lo, hi), name) in enumerate(zip(counts, box, kinds, strict=True)):
            least = 2 if name == "endpoint" else 1
            if n < least:
                raise ValueError(f'shape[{i}] must be at least {least} on an axis of kind "{name}", got {n}')
            if not (math.isfinite(lo) and math.isfinite(hi) and lo < hi):
                raise ValueError(f"bounds[{i}] must be finite with lo < hi, got ({lo}, {hi})")
            if name == "endpoint":
                axes.append(torch.linspace(lo, hi, n, dtype=torch.float64))
            else:
                at = torch.arange(n, dtype=torch.float64) + (0.5 if name == "cell" else 0.0)
                axes.append(lo + (hi - lo) * at / n)
            weights.append(
                None if name == "endpoint" else torch.full((n,), (hi - lo) / n, dtype=torch.float64)
            )
            period.append(hi - lo if name == "periodic" else None)
        return cls(*axes, kind=kinds, weights=weights, period=period).to(device, dtype)

    @property
    def axes(self) -> tuple[Tensor, ...]:
        """d tensors (n_i,) of coordinates."""
        return self._axes

    @property
    def axis_weights(self) -> tuple[Tensor, ...]:
        """d tensors (n_i,) of weights; the weights of the grid are their outer product."""
        if not self._recipes:
            return self._axis_weights
        return tuple(
            _axis_weights(i, *self._recipes[i]).to(w.dtype) if i in self._recipes else w
            for i, w in enumerate(self._axis_weights)
        )

    @property
    def kind(self) -> tuple[str, ...]:
        """Kind of each axis."""
        return self._kind

    @property
    def period(self) -> tuple[float, ...]:
        """Period of each axis, inf where it is not periodic."""
        return self._period

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of points of each axis."""
        return tuple(axis.numel() for axis in self._axes)

    @property
    def points(self) -> Tensor:
        """(N, d) coordinates in C order, the last axis fastest: ``points.view(*shape, d)``."""
        return self._kept("points", self._axes, _outer_points)

    @property
    def weights(self) -> Tensor:
        """(N,) weights in the order of the points."""
        return self._kept("weights", self.axis_weights, product_weights)

    def _kept(
        self, name: str, axes: tuple[Tensor, ...], make: Callable[[tuple[Tensor, ...]], Tensor]
    ) -> Tensor:
        """Computed once, unless it is part of a graph, which the first backward pass frees.

        Nor is it kept inside a transform of torch.func, which what is computed there cannot leave.
        """
        if name in self._cache:
            return self._cache[name]
        value = make(axes)
        transformed = torch._C._are_functorch_transforms_active()
        if not (transformed or any(axis.requires_grad for axis in (*self._axes, *axes))):
            self._cache[name] = value
        return value

    @property
    def ndim(self) -> int:
        return len(self._axes)

    @property
    def volume(self) -> Tensor:
        return torch.stack([w.sum() for w in self.axis_weights]).prod()

    @property
    def dtype(self) -> torch.dtype:
        return self._axes[0].dtype

    @property
    def device(self) -> torch.device:
        return self._axes[0].device

    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> Grid:
        """The grid on another device or in another float dtype; None keeps what is.

        Weights and periods are kept, not computed anew from rounded coordinates.

        Raises:
            ValueError: coordinates that the dtype cannot tell apart.
        """
        _require_float_dtype(dtype)
        axes = [axis.to(device=device, dtype=dtype) for axis in self._axes]
        weights = [w.to(device=device, dtype=_weights_dtype(w, dtype)) for w in self.axis_weights]
        return Grid(*axes, kind=self._kind, weights=weights, period=self._period)

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"Grid(shape={self.shape}, kind={self._kind}, dtype={self.dtype}, device={self.device})"


def _outer_points(axes: tuple[Tensor, ...]) -> Tensor:
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def product_weights(axes: Sequence[Tensor]) -> Tensor:
    """(N,) weights of a grid from those of its axes, in C order."""
    return reduce(lambda w, axis: (w[:, None] * axis).flatten(), axes)


def scaled_product_weights(axes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(N,) weights over the product of the axes' largest, in float64, and the logarithm of that product.

    A product of small or large weights of axes need not be a number of their dtype; what attention takes of
    weights is their ratios.
    """
    scaled, logarithms = [], []
    for axis in axes:
        w = axis.double()
        top = w.detach().amax() if w.numel() else w.new_ones(())
        top = torch.where((top > 0) & top.isfinite(), top, 1.0)
        scaled.append(w / top)
        logarithms.append(top.log())
    return product_weights(scaled), torch.stack(logarithms).sum()


class PointCloud(Mesh):
    """Scattered points with weights.

    Values (finite points, weights >= 0) are checked on the CPU only, so that making one on an accelerator
    does not wait for it.

    Args:
        points: (N, d) coordinates; (N,) counts as (N, 1); (B, N, d) gives each sample of a batch its own
            mesh.
        weights: (N,) or, with (B, N, d) points, also (B, N); >= 0. None for the Monte-Carlo rule on a
            domain of volume 1, that is 1 / N each: right for points drawn uniformly, wrong for any other
            density.

    Raises:
        TypeError: points or weights that are not real numbers.
        ValueError: wrong shape or device, no points and no weights, points that are not finite, weights
            that are negative or not finite.
    """

    def __init__(self, points: ArrayLike, weights: ArrayLike | None = None) -> None:
        x = _floating(points, "points")
        if x.ndim == 1:
            x = x[:, None]
        if x.ndim not in (2, 3) or x.shape[-1] < 1:
            raise ValueError(f"points must have shape (N,), (N, d) or (B, N, d), got {tuple(x.shape)}")
        if x.device.type == "cpu":
            quadrature._require_finite(x.detach(), "points")
        dtype = _at_least_float32(x.dtype)
        if weights is None:
            w = quadrature.monte_carlo(x.shape[-2], dtype=dtype, device=x.device)
        else:
            w = _floating(weights, "weights").to(dtype)
            _require_same_device([x, w], "points and weights")
            allowed = [tuple(x.shape[-2:-1]), tuple(x.shape[:-1])]
            if tuple(w.shape) not in allowed:
                shapes = " or ".join(map(str, dict.fromkeys(allowed)))
                raise ValueError(
                    f"weights must have shape {shapes} for points {tuple(x.shape)}, got {tuple(w.shape)}"
                )
            if w.device.type == "cpu":
                _require_nonnegative(w, "weights")
        self._points, self._weights = x, w

    @classmethod
    def voronoi(cls, points: ArrayLike, bounds: ArrayLike | None = None) -> PointCloud:
        """Points (N, d) weighted by their Voronoi cells in a box, d = 1, 2 or 3: ``quadrature.voronoi``."""
        x = _floating(points, "points")
        return cls(x, quadrature.voronoi(x, bounds))

    @classmethod
    def from_simplices(cls, points: ArrayLike, cells: ArrayLike) -> PointCloud:
        """Vertices (N, d) of cells (n_cells, d + 1), d = 1, 2 or 3: ``quadrature.simplices``."""
        x = _floating(points, "points")
        return cls(x, quadrature.simplices(x, cells))

    @property
    def points(self) -> Tensor:
        return self._points

    @property
    def weights(self) -> Tensor:
        return self._weights

    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> PointCloud:
        """The points on another device or in another float dtype; None keeps what is."""
        _require_float_dtype(dtype)
        weights = self._weights.to(device=device, dtype=_weights_dtype(self._weights, dtype))
        return PointCloud(self._points.to(device=device, dtype=dtype), weights)

    def __repr__(self) -> str:
        return (
            f"PointCloud(points={tuple(self._points.shape)}, weights={tuple(self._weights.shape)}, "
            f"dtype={self.dtype}, device={self.device})"
        )


def as_mesh(mesh: Mesh | ArrayLike) -> Mesh:
    """A mesh as it is; coordinates (N, d), (N,) or (B, N, d) as a PointCloud with equal weights 1 / N."""
    return mesh if isinstance(mesh, Mesh) else PointCloud(mesh)


def _floating(x: ArrayLike, name: str) -> Tensor:
    """x as a float tensor: float dtypes are kept, integers and Python numbers become float64."""
    t = quadrature._tensor(x, name)
    return t if t.is_floating_point() else t.to(torch.float64)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _weights_dtype(w: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return w.dtype if dtype is None else _at_least_float32(dtype)


def _require_float_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be a real float dtype, got {dtype}")


def _require_same_device(tensors: Sequence[Tensor], name: str) -> None:
    devices = list(dict.fromkeys(str(t.device) for t in tensors))
    if len(devices) > 1:
        raise ValueError(f"{name} must be on one device, got {', '.join(devices)}")


def _require_nonnegative(w: Tensor, name: str) -> None:
    values = w.detach()
    if values.is_meta:
        return
    quadrature._require_finite(values, name)
    if bool((values < 0).any()):
        raise ValueError(f"{name} must be >= 0, got {values.min().item():g}")


def _periods(
    period: float | Sequence[float | None] | None, kinds: tuple[str, ...], axes: Sequence[Tensor]
) -> tuple[float, ...]:
    d = len(axes)
    if period is None:
        per_axis: list[float | None] = [None] * d
    elif isinstance(period, Sequence):
        per_axis = list(period)
    else:
        if "periodic" not in kinds:
            raise ValueError(f"period must be None without a periodic axis, got {period} for kind {kinds}")
        per_axis = [period if name == "periodic" else None for name in kinds]
    if len(per_axis) != d:
        raise ValueError(f"period must be one number or one per axis ({d}), got {len(per_axis)}")
    result = []
    for i, (length, name, axis) in enumerate(zip(per_axis, kinds, axes, strict=True)):
        if name == "periodic":
            result.append(_even_period(axis, i) if length is None else float(length))
        elif length is None or length == math.inf:
            result.append(math.inf)
        else:
            raise ValueError(f'period[{i}] must be None or inf on an axis of kind "{name}", got {length}')
    return tuple(result)


def _even_period(axis: Tensor, i: int) -> float:
    x = axis.detach().to(torch.float64)
    n = x.numel()
    if n < 2:
        raise ValueError(f"period[{i}] must be given for a periodic axis of 1 point, got None")
    span = (x[-1] - x[0]).item()
    step = span / (n - 1)
    # Rounding of the coordinates in their own dtype is no unevenness.
    tolerance = 1e-6 * step + 4 * torch.finfo(axis.dtype).eps * x.abs().max().item()
    gaps = torch.diff(x)
    if (gaps - step).abs().max().item() > tolerance:
        raise ValueError(
            f"period[{i}] must be given for an unevenly spaced periodic axis, got None "
            f"with gaps from {gaps.min().item():g} to {gaps.max().item():g}"
        )
    return n * step


def _axis_weights(i: int, axis: Tensor, kind: str, period: float, rule: AxisWeights) -> Tensor:
    if rule is None:
        if kind == "periodic":
            return quadrature.periodic(axis, period)
        if axis.numel() < 2:
            raise ValueError(f'axes[{i}] must have at least 2 entries for kind "{kind}", got {axis.numel()}')
        return quadrature.trapezoid(axis) if kind == "endpoint" else _cell_widths(axis)
    name = f"weights[{i}]"
    if kind == "periodic":
        quadrature.periodic(axis, period)  # the period must hold the axis whatever its weights
    w = _floating(rule(axis) if callable(rule) else rule, name)
    if w.shape != axis.shape:
        raise ValueError(f"{name} must have shape {tuple(axis.shape)} like axes[{i}], got {tuple(w.shape)}")
    _require_same_device([axis, w], f"axes[{i}] and {name}")
    _require_nonnegative(w, name)
    return w


def _cell_widths(centres: Tensor) -> Tensor:
    x = centres.to(torch.float64)
    middle = (x[1:] + x[:-1]) / 2
    return quadrature.midpoint(torch.cat([2 * x[:1] - middle[:1], middle, 2 * x[-1:] - middle[-1:]]))
