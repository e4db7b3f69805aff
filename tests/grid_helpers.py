"""Uneven grids, and the formula of position attention in numpy."""

from __future__ import annotations

import math

import numpy as np
import torch
from helpers import assert_within_budget, draw
from torch import Tensor

F64 = torch.float64
INF = math.inf
SHAPES = [((7,), (5,)), ((4, 6), (5, 3)), ((3, 2, 4), (2, 5, 3))]
PERIODS = {1: [1.1], 2: [1.3, INF], 3: [INF, 1.1, 0.9]}


def axes(shape, seed, dtype=F64, offset=0.0) -> list[Tensor]:
    """Uneven axes on [0, 1) + offset."""
    generator = torch.Generator().manual_seed(seed)
    steps = [torch.rand(n, dtype=F64, generator=generator) + 0.1 for n in shape]
    return [(offset + s.cumsum(0) / s.sum() * 0.9).to(dtype) for s in steps]


def positive(shape, seed) -> list[Tensor]:
    return [draw((n,), F64, seed + i).abs() + 0.1 for i, n in enumerate(shape)]


def outer(vectors) -> Tensor:
    product = vectors[0]
    for w in vectors[1:]:
        product = (product[:, None] * w).flatten()
    return product


def dense(query, key, value, rate, weights=None, *, radius=None, period=None):
    """The formula in numpy: out (B, H, N, C) and lse (B, H, N); in long arithmetic for float64 values."""
    real = np.longdouble if value.dtype == F64 else np.float64
    x, y, v, r = (t.detach().double().numpy().astype(real) for t in (query, key, value, rate))
    difference = x[:, None] - y[None]
    if period is not None:
        for axis, length in enumerate(period):
            if math.isfinite(length):
                difference[..., axis] -= length * np.rint(difference[..., axis] / length)
    d2 = (difference**2).sum(-1)
    w = np.ones(len(y), real) if weights is None else weights.detach().double().numpy().astype(real)
    keep = np.broadcast_to(w > 0, d2.shape)
    if radius is not None:
        reach = np.asarray(radius, real)
        reach = reach[:, None] if reach.ndim else reach
        keep = keep & (d2 <= reach**2 * (1 + 8 * np.finfo(np.float64).eps))
    v = np.where(w[:, None] > 0, v, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        logits = np.where(keep, -r[:, None, None] * d2 + np.log(w), -np.inf)
        top = logits.max(-1, keepdims=True)
        top = np.where(np.isinf(top), 0, top)
        e = np.exp(logits - top)
        total = e.sum(-1, keepdims=True)
        lse = np.where(total > 0, top + np.log(total), -np.inf)[..., 0]
        p = e / np.where(total > 0, total, 1)
    out = p @ v
    return out, np.broadcast_to(lse, out.shape[:-1])


def assert_right(result, true, rough, value) -> None:
    """Budget: twice the error of the dense reference in the dtype of the values, or 8 eps."""
    for what, actual, exact, plain in zip(("out", "lse"), result, true, rough, strict=True):
        finite = np.isfinite(exact)
        error = float(np.abs(plain.double().numpy()[finite] - exact[finite]).max(initial=0))
        size = max(1.0, np.abs(exact[np.isfinite(exact)]).max(initial=0))
        size = size if what == "lse" else float(value.double().nan_to_num().abs().max())
        assert_within_budget(actual, np.asarray(exact, np.float64), error, size, what)
