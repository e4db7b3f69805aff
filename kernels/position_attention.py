"""Position attention on NVIDIA GPUs where the CUDA C++ library is not built: launches of the Triton kernels.

``forward`` and ``backward`` have the arguments and results of ``continuum_ops::position_attention_forward``
and ``_backward`` (continuum_ops/ops/_library.py), float64 excepted. Nothing here waits for the device. Unlike
the C++ kernels these compute the probabilities anew for every block of columns and skip no tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ._position_attention_kernels import score_sums_kernel, weighted_sum_kernel

__all__ = ["backward", "forward", "serves"]


class Blocks(NamedTuple):
    rows: int
    others: int
    columns: int
    warps: int


def blocks(dtype: torch.dtype) -> Blocks:
    """Sizes of a tile at which ptxas spills nothing; three TF32 products need the most registers."""
    return Blocks(32, 32, 32, 8) if dtype == torch.float32 else Blocks(64, 32, 64, 8)


def serves(value: Tensor) -> bool:
    """Whether the kernels take this dtype and device: bfloat16 and TF32 products."""
    return value.dtype != torch.float64 and torch.cuda.get_device_capability(value.device) >= (8, 0)


def _packed(positions: Tensor) -> Tensor:
    """(P, d or 2 d, points): coordinate by coordinate; float64 as the sum of two float32 numbers."""
    high = positions.float()
    if positions.dtype == torch.float64:
        high = torch.cat([high, (positions - high.double()).float()], -1)
    return high.mT.contiguous()


class _Geometry(NamedTuple):
    """What both kernels read of the meshes. A step leads to the next batch entry, 0 where it is shared."""

    query: Tensor
    key: Tensor
    log_weights: Tensor  # (W, M) base 2, -inf: the key does not exist
    weighted: bool
    reach: Tensor | None  # (R, N) squared radius, rounding allowed for
    rate: Tensor
    period: Tensor | None
    groups: int
    batch: int
    d: int
    split: bool
    precision: str

    @property
    def entries(self) -> int:
        """Batch entries that stand side by side as columns."""
        return self.batch if self.groups == 1 else 1

    def sides(self, key_major: bool) -> tuple[Tensor, Tensor]:
        return (self.key, self.query) if key_major else (self.query, self.key)

    def steps(self, key_major: bool) -> tuple[int, ...]:
        tensors = (*self.sides(key_major), self.log_weights, self.reach)
        steps = [0 if t is None or t.shape[0] == 1 else t.stride(0) for t in tensors]
        return (*steps, 0 if self.groups == 1 else 1)


def _geometry(
    query_pos: Tensor,
    key_pos: Tensor,
    value: Tensor,
    rate: Tensor,
    weights: Tensor | None,
    radius: Tensor | None,
    period: Sequence[float] | None,
) -> _Geometry:
    sizes = [t.shape[0] for t in (query_pos, key_pos, weights, radius) if t is not None]
    batch, d = value.shape[0], query_pos.shape[-1]
    if weights is None:
        log_weights = value.new_zeros((1, key_pos.shape[-2]), dtype=torch.float32)
    else:  # log2 of a negative number is NaN, of 0 -inf
        log_weights = weights.log2().contiguous()
        # NaN there must not meet a product with 0.
        key_pos = key_pos.masked_fill((weights == 0)[..., None], 0.0)
    reach = None
    if radius is not None:
        radius = torch.where(radius >= 0, radius, math.nan)
        reach = (radius.square() * (1 + 8 * torch.finfo(torch.float32).eps)).contiguous()
    lengths = None
    if period is not None:
        finite = [p if math.isfinite(p) else 0.0 for p in period]
        lengths = torch.tensor(finite + [1 / p if p > 0 else 0.0 for p in finite], dtype=torch.float32)
        lengths = lengths.to(value.device, non_blocking=True)
    precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return _Geometry(
        _packed(query_pos),
        _packed(key_pos),
        log_weights,
        weights is not None,
        reach,
        rate.contiguous(),
        lengths,
        1 if all(size == 1 for size in sizes) else batch,
        batch,
        d,
        query_pos.dtype == torch.float64,
        "ieee" if value.dtype != torch.float32 else precision,
    )


def _sum(
    geometry: _Geometry,
    x: Tensor,
    out: Tensor,
    stats: Tensor | None,
    lse: Tensor | None,
    new_stats: Tensor | None,
) -> None:
    key_major = stats is not None
    row, other = geometry.sides(key_major)
    columns = geometry.entries * x.shape[-1]
    size = blocks(x.dtype)
    row_tiles = triton.cdiv(row.shape[-1], size.rows)
    column_blocks = max(1, triton.cdiv(columns, size.columns))
    programs = geometry.groups * out.shape[1] * row_tiles * column_blocks
    if programs == 0:
        return
    weighted_sum_kernel[(programs,)](
        row, other, x, geometry.log_weights, geometry.reach, geometry.rate, stats, geometry.period,
        out, lse, new_stats,
        row.shape[-1], other.shape[-1], columns, max(1, x.shape[-1]), geometry.rate.shape[0], x.shape[1],
        out.shape[1],
        *geometry.steps(key_major), *x.stride(), out.stride(0),
        D=geometry.d, SPLIT=geometry.split, KEY_MAJOR=key_major, WEIGHTED=geometry.weighted,
        PRECISION=geometry.precision, R=size.rows, OTHER=size.others, C=size.columns,
        num_warps=size.warps,
    )  # fmt: skip


def _score_sums(
    geometry: _Geometry,
    grad_out: Tensor,
    value: Tensor,
    stats: Tensor,
    centre: Tensor,
    key_major: bool,
    positions: bool,
) -> Tensor:
    """(G, H, rows, 2 + d)."""
    row, other = geometry.sides(key_major)
    heads, rows, width = geometry.rate.shape[0], row.shape[-1], triton.next_power_of_2(2 + geometry.d)
    sums = value.new_empty((geometry.groups, heads, rows, width), dtype=torch.float32)
    size = blocks(value.dtype)
    programs = geometry.groups * heads * triton.cdiv(rows, size.rows)
    if programs == 0:
        return sums
    score_sums_kernel[(programs,)](
        row, other, grad_out, value, geometry.log_weights, geometry.reach, geometry.rate, stats, centre,
        geometry.period, sums,
        rows, other.shape[-1], geometry.entries * value.shape[-1], max(1, value.shape[-1]), heads,
        value.shape[1],
        *geometry.steps(key_major), *grad_out.stride(), *value.stride(),
        D=geometry.d, SPLIT=geometry.split, KEY_MAJOR=key_major, PRECISION=geometry.precision,
        POSITIONS=positions, WIDTH=width, R=size.rows, OTHER=size.others, C=size.columns,
        num_warps=size.warps,
    )  # fmt: skip
    return sums


def forward(
    query_pos: Tensor,
    key_pos: Tensor,
    value: Tensor,
    rate: Tensor,
    weights: Tensor | None,
    radius: Tensor | None,
    period: Sequence[float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    geometry = _geometry(query_pos, key_pos, value, rate, weights, radius, period)
    heads, n = rate.shape[0], query_pos.shape[-2]
    out = value.new_empty((value.shape[0], heads, n, value.shape[-1]))
    lse = rate.new_empty((geometry.groups, heads, n))
    stats = rate.new_empty((geometry.groups, heads, n, 3))
    _sum(geometry, value, out, None, lse, stats)
    return out, lse, stats


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query_pos: Tensor,
    key_pos: Tensor,
    value: Tensor,
    rate: Tensor,
    weights: Tensor | None,
    out: Tensor,
    lse: Tensor,
    stats: Tensor,
    radius: Tensor | None,
    period: Sequence[float] | None,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Gradients of query_pos, key_pos, value, rate, weights; (0,) where not needed."""
    geometry = _geometry(query_pos, key_pos, value, rate, weights, radius, period)
    grads = [value.new_empty(0)] * 5
    if needs[2]:
        grads[2] = value.new_empty(value.shape)
        _sum(geometry, grad_out, grads[2], stats, None, None)
    if not any(needs[i] for i in (0, 1, 3, 4)):
        return tuple(grads)
    centre = -(grad_out.float() * out.float()).sum(-1)
    centre = centre.sum(0, keepdim=True) if geometry.groups == 1 else centre
    if grad_lse is not None:
        centre = centre + grad_lse
    centre = torch.where(stats[..., 2] == 0, 0.0, centre).contiguous()  # a row without keys has gradient 0

    speed = torch.where(rate >= 0, rate, math.nan)
    rows: Tensor | None = None
    if needs[0] or (needs[3] and not (needs[1] or needs[4])):
        rows = _score_sums(geometry, grad_out, value, stats, centre, False, needs[0])
        if needs[0]:
            moved = torch.einsum("ghnd,h->gnd", rows[..., 2 : 2 + geometry.d], -2 * speed)
            grads[0] = moved.sum_to_size(query_pos.shape).to(query_pos.dtype)
    if needs[1] or needs[4]:
        keys = _score_sums(geometry, grad_out, value, stats, centre, True, needs[1])
        rows = keys if rows is None else rows
        if needs[1]:
            moved = torch.einsum("ghmd,h->gmd", keys[..., 2 : 2 + geometry.d], 2 * speed)
            grads[1] = moved.sum_to_size(key_pos.shape).to(key_pos.dtype)
        if needs[4] and weights is not None:
            total = keys[..., 0].sum(1).sum_to_size(weights.shape)
            grads[4] = torch.where(weights == 0, 0.0, total / weights)
    if needs[3] and rows is not None:
        grads[3] = -rows[..., 1].sum((0, 2))
    return tuple(grads)
