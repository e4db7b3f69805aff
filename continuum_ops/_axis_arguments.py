"""Arguments of a grid that are one value for all axes or one value each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .quadrature import ArrayLike

KINDS = ("endpoint", "periodic", "cell")
Rule = Callable[[Tensor], Tensor]
AxisWeights = ArrayLike | Rule | None


def read_box(bounds: Sequence[Any]) -> list[tuple[float, float]]:
    pairs = [bounds] if len(bounds) == 2 and all(isinstance(b, (int, float)) for b in bounds) else bounds
    try:
        return [(float(lo), float(hi)) for lo, hi in pairs]
    except (TypeError, ValueError):
        raise ValueError(f"bounds must be (lo, hi) for each axis, got {bounds!r}") from None


def read_kinds(kind: str | Sequence[str], d: int) -> tuple[str, ...]:
    kinds = (kind,) * d if isinstance(kind, str) else tuple(kind)
    if len(kinds) != d:
        raise ValueError(f"kind must be one name or one per axis ({d}), got {len(kinds)}")
    for name in kinds:
        if name not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {name!r}")
    return kinds


def per_axis_weights(weights: AxisWeights | Sequence[AxisWeights], d: int) -> list[AxisWeights]:
    if weights is None or callable(weights):
        return [weights] * d
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence):
        if d == 1:
            return [weights]
        raise ValueError(f"weights must be one entry per axis ({d}), got a {type(weights).__name__}")
    if len(weights) != d:
        raise ValueError(f"weights must be one entry per axis ({d}), got {len(weights)}")
    return list(weights)
