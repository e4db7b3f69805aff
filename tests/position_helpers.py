"""An independent computation of position attention in long arithmetic, held against the error budget."""

from __future__ import annotations

import importlib
import math

import numpy as np
import torch
from helpers import _long, _sum_to, assert_results, draw, lse_dtype
from numpy.typing import NDArray
from torch import Tensor

import continuum_ops as co
from continuum_ops import reference

position_module = importlib.import_module("continuum_ops.ops.position_attention")
position_chunked = importlib.import_module("continuum_ops.ops._position_attention_chunked")
NAMES = ("query_pos", "key_pos", "value", "rate", "weights")


def points(shape, dtype=torch.float32, seed=0, offset=0.0) -> Tensor:
    """Seeded points in the unit cube, (..., N, d), moved by `offset` along every axis."""
    generator = torch.Generator().manual_seed(seed * 31 + 7 * len(shape) + shape[-1])
    return (torch.rand(shape, generator=generator, dtype=torch.float64) + offset).to(dtype)


def scene(
    n, m, d, *, batch=2, heads=2, channels=3, value_heads=None, dtype=torch.float32, per_sample=False, **kw
):
    """query_pos, key_pos, value, rate: what most tests begin with."""
    geometry = lse_dtype(dtype) if kw.get("geometry") is None else kw["geometry"]
    seed, offset = kw.get("seed", 0), kw.get("offset", 0.0)
    lead = (batch,) if per_sample else ()
    shape = (batch, m, channels) if value_heads is None else (batch, value_heads, m, channels)
    rate = torch.logspace(0.5, 2.0, heads, dtype=torch.float64) if kw.get("rate") is None else kw["rate"]
    return (
        points((*lead, n, d), geometry, seed + 1, offset),
        points((*lead, m, d), geometry, seed + 2, offset),
        draw(shape, dtype, seed + 3),
        rate.to(lse_dtype(dtype)),
    )


def _differences(x: NDArray, y: NDArray, period) -> NDArray:
    z = x[..., :, None, :] - y[..., None, :, :]
    for axis, length in enumerate(period or ()):
        if math.isfinite(length):
            z[..., axis] -= length * np.rint(z[..., axis] / length)
    return z


def exact(
    query_pos, key_pos, value, rate, weights=None, *, radius=None, period=None, grad_out=None, grad_lse=None
):
    """The formula and its derivative, written out in numpy: every array (B, H, N, M)."""
    x, y, v, r = (_long(t) for t in (query_pos, key_pos, value, rate))
    v = v if v.ndim == 4 else v[:, None]
    batch, heads, m = v.shape[0], r.shape[0], v.shape[2]
    w = np.ones(m, v.dtype) if weights is None else _long(weights).astype(v.dtype)
    w = np.broadcast_to(w, (batch, m))[:, None, None, :]
    dead_rows = np.swapaxes(w == 0, -1, -2)
    v = np.where(dead_rows, 0, v)
    lead = (batch,) + (1,) * 0
    x = np.broadcast_to(x, (*lead, *x.shape[-2:])).astype(v.dtype)
    y = np.where(dead_rows[:, 0], 0, np.broadcast_to(y, (*lead, *y.shape[-2:])).astype(v.dtype))
    z = _differences(x, y, period)[:, None]  # (B, 1, N, M, d)
    d2 = (z**2).sum(-1)
    keep = np.broadcast_to(w > 0, (batch, heads, *d2.shape[-2:])).copy()
    if radius is not None:
        reach = _long(radius) if isinstance(radius, Tensor) else np.asarray(float(radius))
        reach = np.broadcast_to(reach, (batch, x.shape[-2]))[:, None, :, None]
        # The rule's eps is that of the dtype computed in, float32 at least.
        keep &= ~(d2 > reach**2 * (1 + 8 * torch.finfo(lse_dtype(value.dtype)).eps))
    with np.errstate(all="ignore"):
        s = -r[:, None, None] * d2
        top = np.where(keep, s + np.log(w), -np.inf).max(-1, keepdims=True, initial=-np.inf)
        top = np.where(top == -np.inf, 0, top)
        e = np.where(keep, np.exp(s - top), 0)
        total = (w * e).sum(-1, keepdims=True)
        alive = total != 0
        total = np.where(alive, total, 1)
        p = w * e / total
        result = {"out": p @ v, "lse": np.where(alive, top + np.log(total), -np.inf)[..., 0]}
        if grad_out is None:
            return result
        g = np.where(alive, _long(grad_out), 0)
        gl = np.where(alive, 0 if grad_lse is None else _long(grad_lse)[..., None], 0)
        gp = g @ np.swapaxes(v, -1, -2)
        row = (p * gp).sum(-1, keepdims=True)
        gs = p * (gp - row + gl)
        size = p * (np.abs(gp) + np.abs(row) + np.abs(gl))
        per_weight = np.where(w > 0, 1 / np.where(w > 0, w, 1), 0)
        rr = r[:, None, None, None]

        def sums(gs, z, d2, g):
            return {
                "query_pos": (-2 * rr * gs[..., None] * z).sum(-2),
                "key_pos": (2 * rr * gs[..., None] * z).sum(-3),
                "value": np.swapaxes(p, -1, -2) @ g,
                "rate": -(gs * d2).sum((-1, -2)),
                "weights": (gs * per_weight).sum(-2),
            }

        def shrink(parts):
            tensors = dict(zip(NAMES, (query_pos, key_pos, value, rate, weights), strict=True))
            shrunk = {}
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                part = parts[name] if name in ("value", "rate") else parts[name].sum(1)
                shape = tuple(tensor.shape)
                if name == "value" and len(shape) == 3:
                    part = part.sum(1)
                shrunk[name] = _sum_to(part, shape)
            return shrunk

        result |= shrink(sums(gs, z, d2, g))
        # The same sums over absolute values: what their terms amount to before they cancel.
        result["terms"] = {k: np.abs(t) for k, t in shrink(sums(-size, -np.abs(z), d2, np.abs(g))).items()}
        result["terms"]["key_pos"] = np.abs(shrink(sums(size, np.abs(z), d2, np.abs(g)))["key_pos"])
    return result


def attend(*args, **options):
    return co.position_attention(*args, return_lse=True, **options)


def plain(query_pos, key_pos, value, rate, weights=None, **options):
    out, lse = reference.position_attention(
        query_pos, key_pos, value, rate, weights, return_lse=True, **options
    )
    return out.to(value.dtype), lse


def run(function, tensors, grad_out, grad_lse, **options) -> dict[str, Tensor]:
    """Outputs of function and the gradients of query_pos, key_pos, value, rate and weights."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    out, lse = function(*leaves, **options)
    inputs = [t for t in leaves if t is not None]
    grad_lse = torch.where(lse == -math.inf, 0.0, grad_lse.to(lse.dtype))
    grads = iter(torch.autograd.grad([out, lse], inputs, [grad_out.to(out.dtype), grad_lse]))
    result = {"out": out.detach(), "lse": lse.detach()}
    for name, leaf in zip(NAMES, leaves, strict=True):
        if leaf is not None:
            result[name] = next(grads)
    return result


def results(query_pos, key_pos, value, rate, weights=None, *, seed=3, **options) -> dict[str, Tensor]:
    """Of the public function, for seeded gradients of out and lse."""
    batch, heads, n = value.shape[0], rate.shape[0], query_pos.shape[-2]
    grad_out = draw((batch, heads, n, value.shape[-1]), value.dtype, seed)
    grad_lse = draw((batch, heads, n), lse_dtype(value.dtype), seed + 1)
    return run(attend, [query_pos, key_pos, value, rate, weights], grad_out, grad_lse, **options)


def check(query_pos, key_pos, value, rate, weights=None, *, seed=3, **options) -> dict[str, Tensor]:
    """Run the public function forward and backward and hold every result against the budget."""
    tensors = [query_pos, key_pos, value, rate, weights]
    batch, heads, n = value.shape[0], rate.shape[0], query_pos.shape[-2]
    grad_out = draw((batch, heads, n, value.shape[-1]), value.dtype, seed)
    grad_lse = draw((batch, heads, n), lse_dtype(value.dtype), seed + 1)
    result = run(attend, tensors, grad_out, grad_lse, **options)
    true = exact(*tensors, grad_out=grad_out, grad_lse=grad_lse, **options)
    rough = run(plain, tensors, grad_out, grad_lse, **options)
    assert_results(result, true, rough, dict(zip(NAMES, tensors, strict=True)), value)
    return result
