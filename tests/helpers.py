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
NAMES = ("out", "lse", "query", "key", "value", "weights", "attn_mask", "query_pos", "key_pos", "rate")


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


def _differences(x, y, period, with_heads):
    """x_i - y_k, (..., [1,] N, M, d), of the nearest images."""
    z = x[..., :, None, :] - y[..., None, :, :]
    for axis, length in enumerate(period or ()):
        if math.isfinite(length):
            z[..., axis] -= length * np.rint(z[..., axis] / length)
    return z[..., None, :, :, :] if with_heads else z


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
    query_pos=None,
    key_pos=None,
    rate=None,
    period=None,
    radius=None,
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
    if query_pos is not None:
        apart = _differences(_long(query_pos), _long(key_pos), period, len(leads) > 0)
        apart = np.where(w[..., None] > 0, apart, 0)
        d2 = (apart * apart).sum(-1)
        r = np.zeros(()) if rate is None else _long(torch.as_tensor(rate, dtype=lse_dtype(query.dtype)))
        r = r[..., None, None]
        s = s - r * d2
        if radius is not None:
            reach = _long(torch.as_tensor(radius, dtype=lse_dtype(query.dtype))) ** 2
            reach = reach if reach.ndim == 0 else reach[..., None, :, None] if len(leads) else reach[:, None]
            keep &= d2 <= reach * (1 + 8 * torch.finfo(lse_dtype(query.dtype)).eps)
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
        if query_pos is not None:
            moment = 2 * (r * gs)[..., None] * apart
            result["query_pos"] = _sum_to(_without_heads(-moment.sum(-2), leads), query_pos.shape)
            result["key_pos"] = _sum_to(_without_heads(moment.sum(-3), leads), key_pos.shape)
        if isinstance(rate, Tensor):
            result["rate"] = _sum_to(-(gs * d2).sum((-2, -1)), rate.shape)
        # The same sums over absolute values: what their terms amount to before they cancel.
        gs = p * (np.abs(gp) + np.abs(row) + np.abs(gl))
        result["terms"] = {
            "query": abs(scale) * (gs @ np.abs(k)),
            "key": abs(scale) * (np.swapaxes(gs, -1, -2) @ np.abs(q)),
            "value": np.swapaxes(p * f, -1, -2) @ np.abs(g),
            "weights": (np.where(keep, gs / np.where(w > 0, w, 1), 0)).sum(-2),
            "attn_mask": gs,
        }
        if query_pos is not None:
            moment = np.abs(2 * (r * gs)[..., None] * apart)
            result["terms"]["query_pos"] = _without_heads(moment.sum(-2), leads)
            result["terms"]["key_pos"] = _without_heads(moment.sum(-3), leads)
            result["terms"]["rate"] = (gs * d2).sum((-2, -1))
    return result


def _without_heads(array: NDArray, leads) -> NDArray:
    return array.sum(-3) if len(leads) > 0 else array


def plain(
    query,
    key,
    value,
    weights=None,
    *,
    attn_mask=None,
    is_causal=False,
    scale=None,
    query_pos=None,
    key_pos=None,
    rate=None,
    period=None,
    radius=None,
):
    """What a user would write: softmax of the scores plus log w, all in the dtype of query."""
    scale = (1 / math.sqrt(query.shape[-1]) if query.shape[-1] > 0 else 1.0) if scale is None else scale
    scores = scale * (query @ key.mT)
    if query_pos is not None:
        z = query_pos[..., :, None, :] - key_pos[..., None, :, :]
        if period is not None:
            length = z.new_tensor([p if math.isfinite(p) else 1e30 for p in period])
            z = z - length * (z / length).round()
        d2 = z.square().sum(-1)
        d2 = d2[..., None, :, :] if query.dim() > 2 else d2
        if rate is not None:
            scores = scores - (torch.as_tensor(rate)[..., None, None] * d2).to(query.dtype)
        if radius is not None:
            r = torch.as_tensor(radius, dtype=d2.dtype)
            r = r if r.dim() == 0 else r[..., None, :, None] if query.dim() > 2 else r[:, None]
            scores = scores.masked_fill(d2 > r * r * (1 + 8 * torch.finfo(d2.dtype).eps), -math.inf)
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
    """Outputs of function and the gradient of every float input, tensors being NAMES[2:] or its beginning."""
    leaves = _leaves(tensors)
    named = {name: leaf for name, leaf in zip(NAMES[6:], leaves[4:], strict=False) if leaf is not None}
    out, lse = function(*leaves[:4], **named, **options)
    inputs = [t for t in leaves if t is not None and t.requires_grad]
    cotangents = [grad_out.to(out.dtype), grad_lse.to(lse.dtype)]
    grads = iter(torch.autograd.grad([out, lse], inputs, cotangents, materialize_grads=True))
    result = {"out": out.detach(), "lse": lse.detach()}
    for name, leaf in zip(NAMES[2:], leaves, strict=False):
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
    error = error_of(actual, true)
    allowed = max(
        2 * plain_error if math.isfinite(plain_error) else 0.0, 8 * torch.finfo(actual.dtype).eps * size
    )
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e} (plain {plain_error:.3e})"


def error_of(actual: Tensor, true: NDArray) -> float:
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


def check(
    query,
    key,
    value,
    weights=None,
    *,
    attn_mask=None,
    query_pos=None,
    key_pos=None,
    rate=None,
    seed=3,
    **options,
) -> dict[str, Tensor]:
    """Run the public function forward and backward and hold every result against the budget."""
    leads = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    grad_out = draw((*leads, query.shape[-2], value.shape[-1]), query.dtype, seed)
    grad_lse = draw((*leads, query.shape[-2]), lse_dtype(query.dtype), seed + 1)
    tensors = [query, key, value, weights, attn_mask, query_pos, key_pos, rate]
    result = run(attend, tensors, grad_out, grad_lse, **options)
    named = dict(zip(NAMES[6:], tensors[4:], strict=True))
    true = exact(*tensors[:4], **named, grad_out=grad_out, grad_lse=grad_lse, **options)
    terms = true.pop("terms")
    rough = run(plain, tensors, grad_out, grad_lse, **options)
    assert result.keys() == true.keys()
    for name, actual in result.items():
        expected_dtype = {"lse": lse_dtype(query.dtype), "out": query.dtype}.get(name)
        if expected_dtype is not None:
            assert actual.dtype == expected_dtype, f"{name}: dtype {actual.dtype}"
        size = _size(name, true, terms, value)
        assert_within_budget(actual, true[name], error_of(rough[name], true[name]), size, name)
    return result


def assert_results(
    result: dict[str, Tensor],
    true: dict[str, NDArray],
    rough: dict[str, Tensor],
    given: dict[str, Tensor | None],
    value: Tensor,
) -> None:
    """Results and gradients (of `given`) against the budget, as of `check`; pops "terms" of true.

    The eps of a gradient's budget is value's: what is computed from float32 values is not more exact where
    weights or positions are float64.
    """
    terms = true.pop("terms")
    assert result.keys() == true.keys()
    for name, actual in result.items():
        like = given.get(name)
        own = {"lse": lse_dtype(value.dtype), "out": value.dtype}.get(name)
        expected = own if like is None else like.dtype
        assert actual.dtype == expected, f"{name}: dtype {actual.dtype}, must be {expected}"
        size = _size(name, true, terms, value)
        if name not in ("out", "lse"):
            size *= torch.finfo(value.dtype).eps / torch.finfo(actual.dtype).eps
        assert_within_budget(actual, true[name], error_of(rough[name], true[name]), size, name)


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
