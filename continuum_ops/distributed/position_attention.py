"""Position attention over meshes that are spread over ranks: keys go to the ranks that they can reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import _checks as shared
from ..ops import _position_attention_checks as checks
from ..ops import position_attention as one_process
from ..ops._continuum_attention_chunked import accumulation_dtype
from ._attend import Block, Reduced, attend
from ._group import Group, check_values, link, wanted
from ._replicated import merged_over_ranks
from ._routes import Direct

OP = "distributed.position_attention"


@torch.compiler.disable
def position_attention(
    query_pos: Tensor,
    key_pos: Tensor,
    value: Tensor,
    rate: Tensor,
    weights: Tensor | None = None,
    group: Group = None,
    *,
    radius: Tensor | float | None = None,
    period: Sequence[float] | None = None,
    return_lse: bool = False,
    query_replicated: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""``continuum_ops.position_attention`` with the points spread over the ranks of a process group.

    .. math::
        out_i = \frac{\sum_k w_k e^{s_{ik}} v_k}{\sum_k w_k e^{s_{ik}}}, \qquad
        s_{ik} = -rate_h \, |x_i - y_k|^2

    where k runs over the keys of all ranks (Chen, Wu, "Positional Knowledge is All You Need", equations 5, 9,
    10 and 22). The keys of a rank go to those ranks only whose queries they can reach: a bounding box of keys
    that is farther from a box of queries than the radius is not sent, nor one so far away that, at these
    rates, all its keys together are below the rounding of what nearer ranks contribute. Parts that are
    compact in space (:func:`continuum_ops.distributed.shard`) make most pairs of ranks such ones.

    Args:
        query_pos: points x of this rank, (N_r, d) or (B, N_r, d).
        key_pos: points y of this rank, (M_r, d) or (B, M_r, d).
        value: (B, M_r, C), shared by the heads, or (B, H, M_r, C); float64, float32, bfloat16 or float16.
            N_r and M_r are each rank's own, 0 too; the other sizes, the dtypes and which of the tensors
            require a gradient are the same on all ranks.
        rate: (H,), >= 0, the same on all ranks.
        weights: quadrature weights >= 0 and finite, (M_r,) or (B, M_r); on all ranks or on none.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
        radius: a number, (N_r,) or (B, N_r), >= 0. Not differentiable.
        period: d numbers, the lengths of a periodic domain (inf: not periodic along that axis).
        return_lse: return (out, lse).
        query_replicated: query_pos and radius are the same on all ranks (a latent mesh), and so is the
            result: two all-reduces of the queries' size, and no keys are sent.

    Returns:
        out (B, H, N_r, C) in value's dtype; with ``return_lse`` also lse (B, H, N_r), float32 (float64 for a
        float64 value). They are what one process gives, to rounding; the same number of ranks gives the same
        bits.

    Gradients exist for query_pos, key_pos, value, rate and weights, through out and lse, by the rule of this
    package (see ``continuum_ops.distributed``): the gradient of rate is the part that comes from this
    rank's queries. The backward pass computes each block once more. There are no second derivatives (but for
    ``query_replicated``). The other rules are those of ``continuum_ops.position_attention``, the errors those
    of :func:`continuum_ops.distributed.continuum_attention`. Grids are passed as their points.
    """
    at = link(OP, group)
    if isinstance(value, Tensor):
        (value,) = shared.autocast(value)

    def look() -> Any:
        _check(query_pos, key_pos, value, rate, weights, radius, period)
        given = (query_pos, key_pos, value, weights)
        common = (
            ("the sizes other than the points' of query_pos, key_pos, value and weights", _common(*given)),
            (
                "the dtypes of query_pos, key_pos, value and weights",
                tuple(None if t is None else str(t.dtype) for t in given),
            ),
            ("rate", rate.detach().double().tolist()),
            ("period", None if period is None else tuple(period)),
            ("whether radius is given", radius is not None),
            ("query_replicated", query_replicated),
            (
                "which of query_pos, key_pos, value, rate and weights require a gradient",
                wanted(query_pos, key_pos, value, rate, weights),
            ),
            ("the number of queries", query_pos.shape[-2] if query_replicated else None),
        )
        sizes = [tuple(t.shape) for t in (key_pos, value, weights) if t is not None]
        place = None if query_replicated else _Place.of(query_pos, key_pos, weights, radius)
        return sizes, common, place

    seen = at.agree(look)
    for i, (what, _) in enumerate(seen[0][1]):
        at.same(what, [common[i][1] for _, common, _ in seen])
    dtype = accumulation_dtype(value.dtype)
    own = [key_pos, value] if weights is None else [key_pos, value, weights.to(dtype)]
    if query_replicated:
        with torch.autocast(value.device.type, enabled=False):
            wide = [key_pos, value.to(dtype), *own[2:]]
            out, lse = one_process(
                query_pos,
                wide[0],
                wide[1],
                rate,
                *wide[2:],
                radius=radius,
                period=period,
                return_lse=True,
            )
            out, lse = merged_over_ranks(out, lse, at)
        out = out.to(value.dtype)
    else:
        rates = seen[0][1][2][1]
        places = [place for _, _, place in seen]
        needed = [[_needs(query, key, places, rates, period, dtype) for key in places] for query in places]
        form = _Positions(rate.shape[0], radius, period)
        out, lse = attend(form, Direct(at, [sizes for sizes, _, _ in seen], needed), [query_pos, rate], own)
    return (out, lse) if return_lse else out


def _check(
    query_pos: Any, key_pos: Any, value: Any, rate: Any, weights: Any, radius: Any, period: Any
) -> None:
    checks.check_value(value)
    checks.check_rate(rate, value)
    checks.check_positions(query_pos, key_pos, value)
    check_values(OP, "rate", rate)
    if weights is not None:
        checks.check_weights(weights, value)
        check_values(OP, "weights", weights)
    if radius is not None:
        checks.check_radius(radius, value, query_pos.shape[-2])
        if isinstance(radius, Tensor):
            check_values(OP, "radius", radius, finite=False)
    if period is not None:
        shared.check_period(checks.OP, period, query_pos.shape[-1])


def _common(
    query_pos: Tensor, key_pos: Tensor, value: Tensor, weights: Tensor | None
) -> tuple[tuple[int, ...] | None, ...]:
    points = ((*t.shape[:-2], t.shape[-1]) for t in (query_pos, key_pos, value))
    return (*points, None if weights is None else tuple(weights.shape[:-1]))


class _Place(NamedTuple):
    """Where a rank's points are: bounding boxes ((lo, hi) per axis, None without points), the sum of the
    weights of its keys (least and largest over the batch) and its largest radius."""

    queries: list[tuple[float, float]] | None
    keys: list[tuple[float, float]] | None
    least: float
    most: float
    radius: float | None

    @classmethod
    def of(
        cls, query_pos: Tensor, key_pos: Tensor, weights: Tensor | None, radius: Tensor | float | None
    ) -> _Place:
        mass = [float(key_pos.shape[-2])]
        if weights is not None:
            mass = weights.detach().double().sum(-1).reshape(-1).tolist()
        if isinstance(radius, Tensor):
            radius = radius.detach().double().amax().item() if radius.numel() else 0.0
        least, most = (min(mass), max(mass)) if mass else (0.0, 0.0)
        return cls(_box(query_pos), _box(key_pos), least, most, radius)


def _box(points: Tensor) -> list[tuple[float, float]] | None:
    flat = points.detach().double().reshape(-1, points.shape[-1])
    if flat.shape[0] == 0:
        return None
    return list(zip(flat.amin(0).tolist(), flat.amax(0).tolist(), strict=True))


def _needs(
    at: _Place,
    of: _Place,
    everyone: Sequence[_Place],
    rates: Sequence[float],
    period: Sequence[float] | None,
    dtype: torch.dtype,
) -> bool:
    """Whether the keys `of` one rank change anything for the queries `at` one, beyond rounding."""
    if at.queries is None or of.keys is None:
        return False
    near = _distance2(at.queries, of.keys, period, nearest=True)
    if at.radius is not None:
        # A margin for the rounding of squared distances.
        return not near > at.radius**2 * (1.0 + 1e-3)
    if of.most == 0.0:
        return False
    negligible = math.log(torch.finfo(dtype).eps / (8.0 * len(everyone)))
    for other in everyone:
        if other.keys is None or not other.least > 0.0:
            continue
        far = _distance2(at.queries, other.keys, period, nearest=False)
        ratio = math.log(of.most) - math.log(other.least)
        if all(rate * (far - near) + ratio < negligible for rate in rates):
            return False
    return True


def _distance2(
    a: Sequence[tuple[float, float]],
    b: Sequence[tuple[float, float]],
    period: Sequence[float] | None,
    nearest: bool,
) -> float:
    """The least or the largest squared distance of a point of one box to a point of the other."""
    total = 0.0
    for axis, ((a_lo, a_hi), (b_lo, b_hi)) in enumerate(zip(a, b, strict=True)):
        apart = abs((a_lo + a_hi) - (b_lo + b_hi)) / 2
        half = ((a_hi - a_lo) + (b_hi - b_lo)) / 2
        length = math.inf if period is None else period[axis]
        if math.isfinite(length) and math.isfinite(apart):
            apart = abs(apart - length * round(apart / length))
        if nearest:
            total += max(0.0, apart - half) ** 2
        else:
            total += min(apart + half, length / 2) ** 2
    return total


class _Positions(Reduced):
    value_at = 1

    def __init__(self, heads: int, radius: Tensor | float | None, period: Sequence[float] | None) -> None:
        self.heads, self.radius, self.period = heads, radius, period

    def out_shape(self, local: Block, own: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows = (own[1].shape[0], self.heads, local[0].shape[-2])
        return (*rows, own[1].shape[-1]), rows

    def empty(self, local: Block, block: Block) -> bool:
        return 0 in (block[1].shape[0], self.heads, local[0].shape[-2], block[0].shape[-2])

    def attend(self, local: Block, block: Block) -> tuple[Tensor, Tensor]:
        query_pos, rate = local
        key_pos, value, *weights = block
        out, lse = one_process(
            query_pos,
            key_pos,
            value,
            rate,
            *weights,
            radius=self.radius,
            period=self.period,
            return_lse=True,
        )
        return out, lse
