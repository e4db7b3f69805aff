"""What each attention layer of a model looks at from one point of the domain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..mesh import Grid, Mesh
from ..models.patch_layer import ExtendedAttention
from ..models.pit_layer import SelfAttention
from ..nn import (
    FourierPatchAttention,
    GalerkinAttention,
    MultiheadAttention,
    PatchAttention,
    PositionAttention,
)
from ..nn.position_attention import mesh_period
from ..ops.continuum_attention import continuum_attention
from ..ops.patch_attention import patch_attention
from ..ops.position_attention import position_attention
from ..ops.quantile_radius import quantile_radius
from .operator import Operator
from .sources import Samples


class LayerAttention(NamedTuple):
    """The attention of one point in one layer.

    name: of the layer's module. query: (d,), the point of the layer's mesh that is nearest to the asked one.
    points: (M, d) of the keys. density: (H, M), for each head what a key gets relative to its share of the
    quadrature weights, 1 everywhere if all get the same; of softmax-free attention the kernel
    q(x) . k(y), which may be negative. Attention between patches is the same at all points of a patch.
    """

    name: str
    query: Tensor
    points: Tensor
    density: Tensor


def attention_of(
    operator: Operator, samples: Samples, point: Sequence[float] | None = None, weights: str = "mesh"
) -> list[LayerAttention]:
    """The attention of a point in every layer, in the order in which the layers are called.

    Args:
        operator: in evaluation mode, on the CPU.
        samples: one sample.
        point: (d,) coordinates; None: the middle of the box around the mesh.
        weights: "mesh" or "equal", as the operator was trained.

    Raises:
        ValueError: a point that has not d coordinates.
    """
    mesh = samples.mesh
    box = _points(mesh)
    if point is None:
        place = (box.amin(0) + box.amax(0)) / 2
    else:
        place = torch.tensor([float(x) for x in point], dtype=box.dtype)
        if len(place) != mesh.ndim:
            raise ValueError(f"point must have {mesh.ndim} coordinates, was {list(point)}")
    calls: list[tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]] = []
    handles = []
    kinds: tuple[type[nn.Module], ...] = tuple(_ROWS)
    for name, module in operator.model.named_modules():
        if isinstance(module, kinds):

            def keep(
                layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name
            ) -> None:
                calls.append((name, layer, args, kwargs))

            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        with torch.no_grad():
            operator(samples, weights)
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for name, layer, args, kwargs in calls:
        row = next(function for kind, function in _ROWS.items() if isinstance(layer, kind))
        found.append(LayerAttention(name, *row(layer, mesh, place, *args, **kwargs)))
    return found


Row = tuple[Tensor, Tensor, Tensor]


def _multihead(
    layer: MultiheadAttention,
    mesh: Mesh,
    place: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **options: Any,
) -> Row:
    y = _points(mesh)
    i = _nearest(y, place)
    options = {**options, "need_weights": True, "average_attn_weights": False}
    with torch.no_grad():
        _, found = layer(query[:, i : i + 1], key, value, **options)
    assert found is not None
    return y[i], y, _density(found[0, :, 0], options.get("weights"))


def _position(
    layer: PositionAttention,
    mesh: Mesh,
    place: Tensor,
    value: Tensor,
    query_pos: Mesh | Tensor,
    key_pos: Mesh | Tensor | None = None,
    *,
    weights: Any = "mesh",
    radius: Tensor | float | None = None,
    period: Sequence[float] | None = None,
    **_: Any,
) -> Row:
    key_pos = query_pos if key_pos is None else key_pos
    x, y, w = _points(query_pos), _points(key_pos), _weights(weights, key_pos)
    i = _nearest(x, place)
    period = mesh_period(query_pos, key_pos) if period is None else period
    if radius is None and layer.quantile is not None:
        radius = quantile_radius(x[i : i + 1], y, layer.quantile, period=period)
    elif isinstance(radius, Tensor) and radius.dim() > 0:
        radius = radius[..., i : i + 1]

    def attend(v: Tensor) -> Tensor:
        return position_attention(x[i : i + 1], y, v, layer.rate, w, radius=radius, period=period)  # type: ignore

    found = _row(attend, (1, layer.num_heads, len(y), 1), value.dtype)
    return x[i], y, _density(found[0, :, :, 0], w)


def _content(layer: SelfAttention, mesh: Mesh, place: Tensor, u: Tensor, pair: Any, weights: str) -> Row:
    y, w = _points(pair.key), _weights(weights, pair.key)
    i = _nearest(y, place)
    q, k = (
        linear(x).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2).detach()
        for linear, x in ((layer.query_proj, u[:, i : i + 1]), (layer.key_proj, u))
    )
    options: dict[str, Any] = {}
    if layer.position is not None:
        options = {"query_pos": y[i : i + 1], "key_pos": y, "period": pair.period}
        options["rate"] = layer.position.rate.detach()

    def attend(v: Tensor) -> Tensor:
        return continuum_attention(q, k, v, w, **options)  # type: ignore[return-value]

    found = _row(attend, (1, layer.num_heads, len(y), 1), u.dtype)
    return y[i], y, _density(found[0, :, :, 0], w)


def _linear(
    layer: GalerkinAttention,
    mesh: Mesh,
    place: Tensor,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    query_pos: Tensor | None = None,
    key_pos: Tensor | None = None,
    *,
    weights: Any = None,
    **_: Any,
) -> Row:
    key, key_pos = query if key is None else key, query_pos if key_pos is None else key_pos
    # A model on a coarser grid gives its points, with or without coordinates in its heads.
    y = _points(mesh if key_pos is None else key_pos)
    i = _nearest(y, place)
    at = None if query_pos is None else query_pos[..., i : i + 1, :]
    with torch.no_grad():
        q = layer._heads(layer.q_norm(layer._split(layer.q_proj(query[:, i : i + 1]))), at, "query_pos")
        k = layer._heads(layer.k_norm(layer._split(layer.k_proj(key))), key_pos, "key_pos")
    w = weights.weights if isinstance(weights, Mesh) else weights
    found = _row(lambda v: layer._attend(q, k, v, w), (1, layer.num_heads, len(y), 1), k.dtype)[0, :, :, 0]
    if layer.attention_type == "softmax":
        return y[i], y, _density(found, w)
    return y[i], y, found * len(y) if w is None else _quotient(found, w)


class _PatchCall(TorchDispatchMode):
    """The arguments of the last call of patch attention."""

    args: tuple[Any, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.continuum_ops.patch_attention_forward.default:
            self.args = args
        return func(*args, **(kwargs or {}))


def _patch(
    layer: PatchAttention | FourierPatchAttention | ExtendedAttention,
    mesh: Mesh,
    place: Tensor,
    u: Tensor,
    weights: Tensor | None = None,
    **_: Any,
) -> Row:
    assert isinstance(mesh, Grid)
    grid = u.shape[1:-1]
    if weights is None and isinstance(layer, FourierPatchAttention):
        # With weights it works in space, where the operator shows what it is given.
        weights = u.new_ones(grid) if layer.scale is not None else u.new_full(grid, 1 / grid.numel())
    with torch.no_grad(), _PatchCall() as call:
        layer(u, weights=weights)
    q, k, _value, w, sizes, scale = call.args
    scale = 1 / grid.numel() if scale is None else scale
    index = [int((axis - x).abs().argmin()) for axis, x in zip(mesh.axes, place, strict=True)]
    own = tuple(slice(i // s * s, i // s * s + s) for i, s in zip(index, sizes, strict=True))
    query = q[(slice(None), *own)]
    shared = None if w is None else w[(slice(None), *own)]

    def attend(v: Tensor) -> Tensor:
        out = patch_attention(query, k, v, list(sizes), shared, scale=scale)
        assert isinstance(out, Tensor)
        return out[(slice(None), *(slice(0, 1) for _ in sizes))]

    found = _row(attend, (1, *grid, layer.num_heads, 1), q.dtype)[0, ..., 0]
    found = found[tuple(slice(None, None, s) for s in sizes)]
    density = found * found.shape[:-1].numel()
    for axis, s in enumerate(sizes):
        density = density.repeat_interleave(s, axis)
    density = density[tuple(slice(0, n) for n in mesh.shape)]  # without what a model padded
    at = torch.stack([axis[i] for axis, i in zip(mesh.axes, index, strict=True)])
    return at, mesh.points, density.flatten(0, -2).mT


_ROWS: dict[type[nn.Module], Callable[..., Row]] = {
    MultiheadAttention: _multihead,
    PositionAttention: _position,
    SelfAttention: _content,
    GalerkinAttention: _linear,
    PatchAttention: _patch,
    FourierPatchAttention: _patch,
    ExtendedAttention: _patch,
}


def _row(attend: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of an output that is linear in the values: what each value is multiplied by."""
    value = torch.zeros(shape, dtype=dtype, requires_grad=True)
    with torch.enable_grad():
        (found,) = torch.autograd.grad(attend(value).sum(), value)
    return found


def _density(attention: Tensor, w: Any) -> Tensor:
    """(H, M) of sum 1, relative to the weights' shares; NaN at points of weight 0, which do not exist."""
    w = w.weights if isinstance(w, Mesh) else w
    if w is None:
        return attention * attention.shape[-1]
    return _quotient(attention, w / w.sum(-1, keepdim=True))


def _quotient(a: Tensor, w: Tensor) -> Tensor:
    return (a / w.reshape(-1, w.shape[-1])[:1]).detach()


def _weights(weights: Any, mesh: Mesh | Tensor) -> Tensor | None:
    """(M,), of the first sample where each has its own mesh; None: equal."""
    if not isinstance(weights, Tensor):
        if weights != "mesh" or not isinstance(mesh, Mesh):
            return None
        weights = mesh.weights
    return weights[0] if weights.dim() == 2 else weights


def _points(mesh: Mesh | Tensor) -> Tensor:
    """(M, d), likewise."""
    points = mesh.points if isinstance(mesh, Mesh) else mesh
    return points[0] if points.dim() == 3 else points


def _nearest(points: Tensor, place: Tensor) -> int:
    return int((points - place.to(points.dtype)).square().sum(-1).argmin())
