"""float32 products by float16 parts in continuum attention on CUDA tensors: what the scales must survive.

Marked gpu. The same file runs under Triton's interpreter on CPU tensors: see test_triton_interpreter.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from continuum_cuda import attend, check, on_device, pytestmark, results
from helpers import draw, exact, qkv
from triton_support import kernels

__all__ = ["on_device", "pytestmark"]  # a fixture and the marks, for pytest to find


@pytest.fixture
def served(monkeypatch):
    """What became of each block of queries: 1 where the kernel of float16 parts served it."""
    flags, new_empty = [], torch.Tensor.new_empty

    def noted(self, *size, dtype=None, **options):
        tensor = new_empty(self, *size, dtype=dtype, **options)
        if dtype == torch.int8:
            flags.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", noted)
    config = kernels("_continuum_attention_configs").Config(64, 64, 4, 2)
    monkeypatch.setattr(kernels(), "split_config", lambda width, capability, distance: config)
    return lambda: [int(x) for tensor in flags for x in tensor]


def within_rows(query, key, value, weights=None, **options):
    """Every row of the output against the size of its own terms: 16 eps of sum_k p |v|, and of 1 for lse."""
    out, lse = attend(query, key, value, weights, **options)
    true = exact(query, key, value, weights, **options)
    terms = exact(query, key, value.abs(), weights, **options)["out"].max(-1, keepdims=True)
    eps = torch.finfo(torch.float32).eps
    with np.errstate(invalid="ignore"):
        error = np.where(true["out"] == out.numpy(), 0, np.abs(true["out"] - out.numpy()))
    assert (error <= 16 * eps * terms).all(), (error / np.maximum(terms, 1e-300)).max()
    np.testing.assert_allclose(lse, true["lse"], rtol=8 * eps, atol=8 * eps)


def with_range(factors, of):
    """q, k, v of which the channels of key and query, or the columns of value, are multiplied."""
    q, k, v = qkv((2,), 70, 90, 16, 16)
    factors = torch.tensor(factors).repeat(16 // len(factors))
    if of == "channels":
        return q / factors, k * factors, v
    return q, k, v * factors


# --- all options, without the parts ----------------------------------------------------------------
@pytest.mark.parametrize("kind", ["plain", "weights", "causal", "mask", "negative scale", "distance"])
def test_products_of_tf32_serve_small_problems(kind, served, monkeypatch):
    monkeypatch.setattr(kernels(), "SPLIT_FROM", math.inf)
    q, k, v = qkv((2,), 70, 90, 16, 8)
    options = {
        "causal": {"is_causal": True},
        "mask": {"attn_mask": draw((70, 90)) > 0},
        "negative scale": {"scale": -0.3},
        "distance": {"query_pos": draw((70, 2)), "key_pos": draw((90, 2), seed=1), "rate": torch.ones(2)},
    }.get(kind, {})
    check(q, k, v, None if kind == "plain" else draw((2, 90), positive=True), **options)
    assert served() == []


def test_only_the_highest_precision_is_split(served, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    attend(*qkv((2,), 20, 30, 8, 8))
    assert served() == []


@pytest.mark.parametrize("shape", ["shared key", "shared value", "weights of a batch", "no feature"])
def test_parts_of_shared_keys(shape, served):
    """Leading dimensions are split once where key, value and weights share them."""
    q, k, v = draw((2, 3, 20, 8)), draw((2, 3, 30, 8), seed=1), draw((2, 3, 30, 4), seed=2)
    w = draw((2, 1, 30), positive=True)
    if shape == "shared key":
        k = k[:1, :1]
    if shape == "shared value":
        v = v[:, :1]
    if shape == "weights of a batch":
        k, v = k[:1, :1], v[:1, :1]
    if shape == "no feature":
        q, k = q[..., :0], k[..., :0]
    check(q, k, v, w)
    assert served() == [1] * 6


# --- ranges ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("of", ["channels", "columns"])
@pytest.mark.parametrize("factors", [[1e-30, 1e30], [1.0, 1e-12, 1e12, 1e20], [1e-36, 1e-36], [3e37, 1.0]])
def test_channels_and_columns_of_any_size(factors, of, served):
    """Each column is held to its own size."""
    q, k, v = with_range(factors, of)
    w = draw((90,), positive=True)
    out, lse = attend(q, k, v, w)
    true = exact(q, k, v, w)
    size = 8 * torch.finfo(torch.float32).eps * v.double().abs().amax(-2, keepdim=True).numpy()
    assert (np.abs(out.double().numpy() - true["out"]) <= size).all()
    np.testing.assert_allclose(lse, true["lse"], rtol=1e-6, atol=1e-6)
    assert served() == [1] * 4


@pytest.mark.parametrize("size", [1e-30, 1e-36, 1e30])
@pytest.mark.parametrize("of", ["query", "key", "value", "weights"])
def test_a_common_size(size, of, served):
    q, k, v = qkv((2,), 70, 90, 16, 16)
    w = draw((90,), positive=True)
    scale = 0.25
    if of in ("query", "key"):
        scale /= size
        q, k = (q * size, k) if of == "query" else (q, k * size)
    v, w = v * size if of == "value" else v, w * size if of == "weights" else w
    within_rows(q, k, v, w, scale=scale)
    assert served() == [1] * 4


@pytest.mark.parametrize("of", ["query", "key", "value"])
def test_subnormal_numbers(of):
    """The scale, at most 2^126, is all that a float32 product is off by."""
    q, k, v = qkv((2,), 40, 50, 8, 8)
    if of == "value":
        v = v * 1e-41
    else:
        q, k = (q * 1e-41, k) if of == "query" else (q, k * 1e-41)
    out, _ = attend(q, k, v)
    true = exact(q, k, v)["out"]
    least = 2.0**-149 if of == "value" else 0.0
    assert np.abs(out.double().numpy() - true).max() <= 8 * 2.0**-23 * v.abs().max().item() + 2 * least


@pytest.mark.parametrize("kind", ["query", "key", "value"])
def test_zeros(kind, served):
    q, k, v = qkv((2,), 40, 50, 8, 8)
    {"query": q, "key": k, "value": v}[kind][..., 3:].zero_()
    {"query": q, "key": k, "value": v}[kind][0].zero_()
    check(q, k, v)
    assert served() == [1, 1]


@pytest.mark.parametrize("factor", [1000.0, 1e5, 1e30])
@pytest.mark.parametrize("of", ["key", "value"])
def test_an_outlier_takes_no_digits_from_rows_that_do_not_see_it(of, factor):
    """Masked, later in a causal order, or next to nothing by its weight: as if it were not there."""
    q, k, v = qkv((2,), 70, 90, 16, 16)
    (k if of == "key" else v)[:, 60] *= factor
    mask = torch.ones(70, 90, dtype=torch.bool)
    mask[:, 60] = False
    within_rows(q, k, v, attn_mask=mask)
    within_rows(q[:, :60], k, v, is_causal=True)
    w = torch.ones(90)
    w[60] = 0.0
    within_rows(q, k, v, w)


def test_a_channel_of_additive_masks(served):
    """q = (q, 1), k = (k, -1e9 or a bias): the bias must not be rounded at the size of the 1e9."""
    q, k, v = qkv((2,), 70, 90, 15, 16)
    bias = draw((2, 90, 1), seed=9)
    bias[:, ::7] = -1e9
    q, k = torch.cat([q, torch.ones(2, 70, 1)], -1), torch.cat([k, bias], -1)
    within_rows(q, k, v, scale=1.0)
    assert served() == [0] * 4


def test_small_rows_of_value(served):
    """A row that attends to small rows of value alone is as exact as any."""
    q, k, v = qkv((2,), 70, 90, 16, 16)
    v[0, :45] *= 1e-8
    mask = (torch.arange(90) < 45).expand(70, 90) == (torch.arange(70) % 2 == 0)[:, None]
    within_rows(q, k, v, attn_mask=mask)
    assert served() == [0, 0, 1, 1]


@pytest.mark.parametrize("size", [1.0, 30.0, 1e3, 1e5])
def test_scores_of_any_size(size, served):
    """As exact as four roundings of a score allow, whichever kernel serves it."""
    q, k, v = qkv((2,), 70, 90, 16, 16)
    q *= size
    w = draw((90,), positive=True)
    out, lse = attend(q, k, v, w)
    true = exact(q, k, v, w)
    share = 4 * 2.0**-23 * max(1.0, 0.25 * (q.double().abs() @ k.double().abs().mT).max().item())
    assert np.abs(out.double().numpy() - true["out"]).max() <= share * v.abs().max().item()
    assert np.abs(lse.double().numpy() - true["lse"]).max() <= share
    assert served() == [int(size <= 30.0)] * 4


@pytest.mark.parametrize("width", [16, 64])
def test_blocks_of_queries_are_judged_by_themselves(width, served):
    q, k, v = qkv((2,), 140, 90, width, 16)
    q[1, 70] *= 1e6
    out, lse = attend(q, k, v)
    assert served() == [1, 1, 1, 1, 0, 1]
    keep = torch.ones(2, 140, dtype=torch.bool)
    keep[1, 70] = False
    true = exact(q, k, v)
    assert np.abs(out.numpy() - true["out"])[keep].max() <= 8 * 2.0**-23 * v.abs().max().item()
    assert np.abs(lse.numpy() - true["lse"])[keep].max() <= 2e-6


# --- inf and NaN -----------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("of", ["query", "key", "value"])
def test_what_is_not_finite_comes_out_as_without_parts(of, bad, monkeypatch, served):
    q, k, v = qkv((2,), 70, 90, 16, 16)
    {"query": q, "key": k, "value": v}[of][1, 66, 3] = bad
    w = draw((90,), positive=True)
    found = results(q, k, v, w)
    assert served() == [1, 1, 1 if of == "query" else 0, 0]
    monkeypatch.setattr(kernels(), "SPLIT_FROM", math.inf)
    without = results(q, k, v, w)
    for name in ("out", "lse"):
        torch.testing.assert_close(found[name], without[name], rtol=2e-6, atol=2e-6, equal_nan=True)


def test_small_gradients_keep_their_digits():
    q, k, v = qkv((2,), 40, 50, 8, 8)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, _ = attend(q, k, v)
    grad_out = draw(out.shape, seed=3)
    true = exact(q, k, v, grad_out=grad_out)
    grads = torch.autograd.grad(out, (q, k, v), grad_out * 1e-33)
    for grad, name in zip(grads, ("query", "key", "value"), strict=True):
        allowed = 8 * 2.0**-23 * 1e-33 * true["terms"][name].max()
        assert np.abs(grad.double().numpy() - 1e-33 * true[name]).max() <= allowed
