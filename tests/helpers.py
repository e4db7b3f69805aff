"""An independent computation of continuum attention in long arithmetic, and the error budget."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import continuum_ops as co

attention_module = importlib.import_module("continuum_ops.ops.continuum_attention")
chunked_module = importlib.import_module("continuum_ops.ops._continuum_attention_chunked")
NAMES = ("out", "lse", "query", "key", "value", "weights", "attn_mask")


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def draw(shape, dtype=torch.float32, seed=0, positive=False) -> Tensor:
    """Seeded normal numbers, or log-uniform ones between 1e-3 and 10 if positive."""
    generator = torch.Generator().manual_seed(seed * 7919 + len(shape))
    if positive:
        return (10 ** (4 * torch.rand(shape, generator=generator, dtype=torch.float64) - 3)).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(leads, n, m, d, dv, dtype=torch.float32, seed=0) -> tuple[Tensor, Tensor, Tensor]:
    return (
        draw((*leads, n, d), dtype, seed),
        draw((*leads, m, d), dtype, seed + 1),
        draw((*leads, m, dv), dtype, seed + 2),
    )


def _long(tensor: Tensor) -> NDArray:
    """As float64, or longer if the input is float64."""
    array = tensor.detach().to(torch.float64).numpy()
    return array.astype(np.longdouble) if tensor.dtype == torch.float64 else array


def _sum_to(array: NDArray, shape) -> NDArray:
    array = array.sum(tuple(range(array.ndim - len(shape))))
    shrunk = tuple(axis for axis, size in enumerate(shape) if size == 1 and array.shape[axis] != 1)
    return array.sum(shrunk, keepdims=True)


def exact(
    query,
    key,
    value,
    weights=None,
    *,
    attn_mask=None,
    is_causal=False,
    scale=None,
    factor=None,
    grad_out=None,
    grad_lse=None,
) -> dict[str, NDArray]:
    """The formula and its derivative, written out in numpy; `factor` (dropout) multiplies probabilities."""
    q, k, v = _long(query), _long(key), _long(value)
    n, m, d = q.shape[-2], k.shape[-2], q.shape[-1]
    leads = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    w = np.ones(m, q.dtype) if weights is None else _long(weights).astype(q.dtype)
    w = np.broadcast_to(w, (*leads, m))[..., None, :]
    keep = np.broadcast_to(w > 0, (*leads, n, m)).copy()
    k = np.where(np.swapaxes(w, -1, -2) > 0, k, 0)
    v = np.where(np.swapaxes(w, -1, -2) > 0, v, 0)
    scale = (1 / math.sqrt(d) if d > 0 else 1.0) if scale is None else scale
    s = scale * (q @ np.swapaxes(k, -1, -2))
    if is_causal:
        keep &= np.tri(n, m, dtype=bool)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        keep &= attn_mask.numpy()
    elif attn_mask is not None:
        s = s + _long(attn_mask)
        keep &= s != -np.inf
    with np.errstate(all="ignore"):
        top = np.where(keep, s + np.log(w), -np.inf).max(-1, keepdims=True, initial=-np.inf)
        top = np.where(top == -np.inf, 0, top)
        e = np.where(keep, np.exp(np.where(keep, s, 0) - top), 0)
        z = (w * e).sum(-1, keepdims=True)
        alive = z != 0
        z1 = np.where(alive, z, 1)
        f = 1.0 if factor is None else factor.to(torch.float64).numpy()
        p = w * e / z1
        result = {"out": (p * f) @ v, "lse": np.where(alive, top + np.log(z1), -np.inf)[..., 0]}
        if grad_out is None:
            return result
        g = _long(grad_out)
        gl = np.zeros((*leads, n)) if grad_lse is None else _long(grad_lse)
        gp = f * (g @ np.swapaxes(v, -1, -2))
        gl = np.where(alive, gl[..., None], 0)
        row = (p * gp).sum(-1, keepdims=True)
        centred = gp - row + gl
        gs = p * centred
        result["query"] = _sum_to(scale * (gs @ k), query.shape)
        result["key"] = _sum_to(scale * (np.swapaxes(gs, -1, -2) @ q), key.shape)
        result["value"] = _sum_to(np.swapaxes(p * f, -1, -2) @ g, value.shape)
        if weights is not None:
            gw = np.where(w[..., 0, :] > 0, (np.where(keep, e / z1 * centred, 0)).sum(-2), 0)
            result["weights"] = _sum_to(gw, weights.shape)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            result["attn_mask"] = _sum_to(gs, attn_mask.shape)
        # The same sums over absolute values: what their terms amount to before they cancel.
        gs = p * (np.abs(gp) + np.abs(row) + np.abs(gl))
        result["terms"] = {
            "query": abs(scale) * (gs @ np.abs(k)),
            "key": abs(scale) * (np.swapaxes(gs, -1, -2) @ np.abs(q)),
            "value": np.swapaxes(p * f, -1, -2) @ np.abs(g),
            "weights": (np.where(keep, gs / np.where(w > 0, w, 1), 0)).sum(-2),
            "attn_mask": gs,
        }
    return result


def plain(query, key, value, weights=None, *, attn_mask=None, is_causal=False, scale=None):
    """What a user would write: softmax of the scores plus log w, all in the dtype of query."""
    scale = (1 / math.sqrt(query.shape[-1]) if query.shape[-1] > 0 else 1.0) if scale is None else scale
    scores = scale * (query @ key.mT)
    if weights is not None:
        dead = weights == 0
        scores = scores + torch.where(dead, 1.0, weights).log()[..., None, :].to(query.dtype)
        scores = scores.masked_fill(dead[..., None, :], -math.inf)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.to(query.dtype)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], -math.inf)
    return scores.softmax(-1).masked_fill(empty, 0.0) @ value, lse


def _leaves(tensors):
    return [
        t
        if t is None or not t.is_floating_point()
        else t.detach().as_strided(t.shape, t.stride(), t.storage_offset()).requires_grad_()
        for t in tensors
    ]


def run(function, tensors, grad_out, grad_lse, **options) -> dict[str, Tensor]:
    """Outputs of function and the gradient of every float input (query, key, value, weights, attn_mask)."""
    leaves = _leaves(tensors)
    query, key, value, weights, attn_mask = leaves
    out, lse = function(query, key, value, weights, attn_mask=attn_mask, **options)
    inputs = [t for t in leaves if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad([out, lse], inputs, [grad_out.to(out.dtype), grad_lse.to(lse.dtype)]))
    result = {"out": out.detach(), "lse": lse.detach()}
    for name, leaf in zip(NAMES[2:], leaves, strict=True):
        if leaf is not None and leaf.requires_grad:
            result[name] = next(grads)
    return result


def attend(*args, **options):
    return co.continuum_attention(*args, return_lse=True, **options)


def assert_within_budget(actual: Tensor, true: NDArray, plain_error: float, size: float, what: str) -> None:
    """|error| <= max(2 * error of a plain implementation in the same dtype, 8 eps max|value|)."""
    assert actual.shape == true.shape, f"{what}: shape {tuple(actual.shape)}, must be {true.shape}"
    if actual.numel() == 0:
        return
    error = _error(actual, true)
    allowed = max(
        2 * plain_error if math.isfinite(plain_error) else 0.0, 8 * torch.finfo(actual.dtype).eps * size
    )
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e} (plain {plain_error:.3e})"


def _error(actual: Tensor, true: NDArray) -> float:
    value = _long(actual).astype(true.dtype)
    with np.errstate(invalid="ignore"):
        difference = np.where(value == true, 0, np.abs(value - true))  # -inf equals -inf
    return float(difference.max(initial=0.0)) if not np.isnan(difference).any() else math.inf


def _size(name: str, true: dict[str, NDArray], terms: dict[str, NDArray], value: Tensor) -> float:
    """What max|value| is in the budget: a bound of the terms that are summed, before they cancel.

    For the output that is the largest value; for a gradient, its sum over absolute values; for lse, a
    logarithm, 1 (the relative error of the sum) or |lse|.
    """
    if name == "out":
        return float(value.detach().double().nan_to_num(0, 0, 0).abs().max()) if value.numel() else 0.0
    if name == "lse":
        return float(np.abs(true[name][np.isfinite(true[name])]).max(initial=1.0))
    return float(_sum_to(terms[name], true[name].shape).max(initial=0.0))


def check(query, key, value, weights=None, *, attn_mask=None, seed=3, **options) -> dict[str, Tensor]:
    """Run the public function forward and backward and hold every result against the budget."""
    leads = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    grad_out = draw((*leads, query.shape[-2], value.shape[-1]), query.dtype, seed)
    grad_lse = draw((*leads, query.shape[-2]), lse_dtype(query.dtype), seed + 1)
    tensors = [query, key, value, weights, attn_mask]
    result = run(attend, tensors, grad_out, grad_lse, **options)
    true = exact(*tensors[:4], attn_mask=attn_mask, grad_out=grad_out, grad_lse=grad_lse, **options)
    terms = true.pop("terms")
    rough = run(plain, tensors, grad_out, grad_lse, **options)
    assert result.keys() == true.keys()
    for name, actual in result.items():
        expected_dtype = {"lse": lse_dtype(query.dtype), "out": query.dtype}.get(name)
        if expected_dtype is not None:
            assert actual.dtype == expected_dtype, f"{name}: dtype {actual.dtype}"
        size = _size(name, true, terms, value)
        assert_within_budget(actual, true[name], _error(rough[name], true[name]), size, name)
    return result


def assert_near(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Equal but for rounding: another order of the same sums, as BLAS takes for other strides."""
    for name, value in a.items():
        other = b[name]
        size = other[other.isfinite()].abs().amax().item() if other.isfinite().any() else 0.0
        atol = 8 * torch.finfo(value.dtype).eps * size
        torch.testing.assert_close(value, other, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@dataclass(frozen=True)
class Path:
    """A way through the package: the registered operator with its kernel, or chunked PyTorch."""

    name: str

    @property
    def compiled(self) -> bool:
        return self.name != "chunked" and co.backends()["cpu"].startswith("C++")
