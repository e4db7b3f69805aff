"""Values and gradients of continuum attention on CUDA tensors.

Marked gpu. The same file runs under Triton's interpreter on CPU tensors: see test_triton_interpreter.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from continuum_cuda import (
    DEVICE,
    DTYPES,
    assert_same,
    attend,
    check,
    names,
    on_device,
    on_gpu_only,
    place,
    pytestmark,
    results,
)
from helpers import assert_near, draw, exact, qkv
from triton_support import INTERPRETED, kernels

import continuum_ops as co
from continuum_ops.ops._philox import dropout_keep

__all__ = ["on_device", "pytestmark"]  # a fixture and the marks, for pytest to find


# --- values and gradients --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind", ["plain", "weights", "causal", "mask", "key mask", "negative scale", "zero scale"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_values(dtype, kind, on_device):
    q, k, v = qkv((2,), 70, 90, 16, 8, dtype)
    w = None if kind == "plain" else draw((2, 90), positive=True)
    options = {
        "causal": {"is_causal": True},
        "mask": {"attn_mask": draw((70, 90)) > 0},
        "key mask": {"attn_mask": draw((2, 1, 90)) > 0},
        "negative scale": {"scale": -0.3},
        "zero scale": {"scale": 0.0},
    }.get(kind, {})
    check(q, k, v, w, **options)
    assert INTERPRETED is (on_device == ["forward", "backward"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_bounded_scores_need_no_shift(dtype, causal, monkeypatch):
    monkeypatch.setattr(kernels(), "BOUNDED_FROM", 0)
    monkeypatch.setattr(kernels(), "SPLIT_FROM", math.inf)
    q, k, v = qkv((2,), 100, 150, 16, 8, dtype)
    check(q, k, v, draw((150,), positive=True), is_causal=causal)
    k[0, 140] *= 10  # no bound in the first lead
    check(q, k, v)
    w = torch.logspace(-30, 0, 150)  # nor with weights that span a range like this
    check(q, k, v, w, is_causal=causal)


@pytest.mark.parametrize(
    "d, dv", [(1, 1), (15, 17), (16, 3), (31, 33), (65, 64), (129, 5), (8, 147), (256, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_widths(dtype, d, dv):
    """CASES 17, 23: widths that are no powers of two, and D != Dv."""
    q, k, v = qkv((2,), 33, 47, d, dv, dtype, seed=d)
    check(q, k, v, draw((47,), positive=True))


def test_no_features_is_the_weighted_mean():
    q, k, v = qkv((2,), 3, 40, 0, 4)
    check(q, k, v, draw((40,), positive=True))


def test_wide_values_and_float64_take_the_chunked_path(on_device):
    """CASES 23: d = 32, dv = 384."""
    q, k, v = qkv((2,), 5, 9, 32, 384)
    check(q, k, v, draw((9,), positive=True))
    check(*qkv((2,), 5, 9, 4, 3, torch.float64), draw((9,), torch.float64, positive=True))
    assert on_device == []


@pytest.mark.parametrize("n, m", [(1, 1), (2, 15), (15, 2), (17, 127), (127, 17), (129, 129)])
def test_lengths(n, m):
    q, k, v = qkv((1, 2), n, m, 8, 8)
    check(q, k, v, draw((m,), positive=True))
    check(q, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=names)
def test_odd_length_backward(dtype):
    """CASES 6."""
    n = 129 if INTERPRETED else 1025
    q, k, v = qkv((1,), n, n, 64, 64, dtype)
    result = check(q, k, v, draw((n,), positive=True))
    assert all(bool(t.isfinite().all()) for t in result.values())


@pytest.mark.parametrize("precision, allowed", [("highest", 1e-5), ("high", 5e-3)])
def test_matmul_precision(precision, allowed):
    """CASES 15: float32 at the default precision is accurate; "high" is TF32."""
    q, k, v = qkv((1,), 128, 128, 32, 32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        result = results(q, k, v)
    finally:
        torch.set_float32_matmul_precision(before)
    true = exact(q, k, v)["out"]
    error = np.abs(result["out"].numpy() - true).max()
    assert error < allowed, error
    assert precision == "highest" or error > 1e-5, "TF32 was not used"


@pytest.mark.parametrize("deviation", [2.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_maximum_arrives_late(dtype, deviation):
    """CASES 13."""
    m = 230 if INTERPRETED else 1030
    q, k, v = qkv((1,), 9, m, 8, 8, torch.float64)
    q[..., 0], k[..., 0] = 1.0, torch.linspace(-deviation, deviation, m, dtype=torch.float64) * 8**0.5
    check(q.to(dtype), k.to(dtype), v.to(dtype), draw((m,), positive=True))


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_of_ten_thousand(sign):
    q, k, v = qkv((1,), 20, 150, 4, 4)
    q[..., 0], k[..., 0] = sign * 100.0, 100.0
    check(q, k, v, draw((150,), positive=True), scale=1.0)


@pytest.mark.parametrize("factor", [30, 1000])
def test_gradients_where_one_key_dominates(factor):
    """Within what the rounding of the scores allows, which is more than the budget.

    The backward kernels sum q . k in another order than the forward ones, so that a probability is off by
    the rounding of its score, relative to it, and of what should cancel in a saturated row, g . v - D, that
    share remains.
    """
    q, k, v = qkv((2,), 100, 150, 16, 8)
    k[0, 140] *= factor
    found = results(q, k, v)
    grad_out, grad_lse = draw((2, 100, 8), q.dtype, 21), draw((2, 100), torch.float32, 22)
    true = exact(q, k, v, None, grad_out=grad_out, grad_lse=grad_lse)
    q, k, v, g = (x.double().abs() for x in (q, k, v, grad_out))
    share = 16 * 2.0**-23 * (q @ k.mT).max().item() / 4  # 16 products in a score
    per_score = share * ((g @ v.mT).max().item() + grad_lse.abs().max().item()) / 4
    bounds = {
        "out": share * v.max().item(),
        "lse": share,
        "query": per_score * k.max().item(),
        "key": per_score * q.sum(-2).max().item(),
        "value": share * g.sum(-2).max().item(),
    }
    assert bounds.keys() == found.keys()
    for name, bound in bounds.items():
        error = np.abs(found[name].double().numpy() - true[name]).max()
        assert error <= bound, (name, error, bound)


def test_graded_weights_do_not_hide_the_maximum():
    q, k, v = qkv((1,), 5, 60, 4, 4)
    w = torch.ones(60)
    k[0, 7] = 40 * q[0, 0]
    w[7] = 1e-36
    check(q, k, v, w)


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_a_common_factor_of_the_weights_moves_the_lse_only(factor):
    q, k, v = qkv((1,), 20, 50, 8, 8)
    w = draw((50,), positive=True)
    out, lse = attend(q, k, v, w)
    out2, lse2 = attend(q, k, v, w * factor)
    torch.testing.assert_close(out2, out, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse2, lse + math.log(factor), rtol=1e-6, atol=1e-6)


# --- dropout, repeats, transformations -------------------------------------------------------------
@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_dropout_is_that_of_the_cpu(dtype, dropout_p):
    """The same mask for the same seed."""
    q, k, v = qkv((2, 2), 70, 101, 16, 8, dtype)
    w = draw((101,), positive=True)
    seed = torch.tensor([0x0123456789ABCDEF])
    keep = dropout_keep(seed, dropout_p, (2, 2), 0, 70, 101)
    factor = keep.double() / (1 - dropout_p) if dropout_p < 1 else keep.double()
    leaves = [t.requires_grad_() for t in (q, k, v, w)]
    on_device = [place(t) for t in (*leaves[:3], leaves[3].expand(2, 2, 101))]
    terms = (None, None, None, None, None, place(seed), None, 0.25, dropout_p, False)
    out, lse, _ = torch.ops.continuum_ops.continuum_attention_forward(*on_device, *terms)
    grad_out, grad_lse = draw(out.shape, dtype, 1), draw(lse.shape, seed=2)
    grads = torch.autograd.grad([out, lse], leaves, [grad_out.to(DEVICE), grad_lse.to(DEVICE)])
    true = exact(q, k, v, w, scale=0.25, factor=factor, grad_out=grad_out, grad_lse=grad_lse)
    eps = 8 * torch.finfo(dtype).eps
    for name, actual in zip(
        ("out", "lse", "query", "key", "value", "weights"), (out, lse, *grads), strict=True
    ):
        size = max(np.abs(true[name]).max(), true["terms"][name].max() if name in true["terms"] else 0)
        np.testing.assert_allclose(actual.detach().float().cpu(), true[name], rtol=0, atol=eps * max(1, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_same_bits_every_time(dtype):
    """CASES 14."""
    q, k, v = qkv((2, 2), 130, 140, 16, 16, dtype)
    w = draw((140,), positive=True)
    first = results(q, k, v, w)
    for _ in range(1 if INTERPRETED else 29):
        assert_same(results(q, k, v, w), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=names)
def test_autocast(dtype):
    """CASES 21."""
    q, k, v = (t.requires_grad_() for t in qkv((2,), 20, 30, 8, 8))
    w = draw((30,), positive=True).requires_grad_()
    x, y, rate = draw((20, 2)), draw((30, 2), seed=1), torch.ones(2)
    with torch.autocast(DEVICE.type, dtype=dtype):
        out, lse = attend(q, k, v, w, query_pos=x, key_pos=y, rate=rate)
    assert out.dtype == dtype and lse.dtype == torch.float32
    grads = torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v, w))
    assert all(g.dtype == torch.float32 and bool(g.isfinite().all()) for g in grads)


def test_second_derivatives():
    q, k, v = (t.requires_grad_() for t in qkv((1,), 5, 6, 4, 3, torch.float32))

    def gradient(*tensors):
        return torch.autograd.grad(attend(*tensors)[0].sin().sum(), tensors, create_graph=True)

    second = torch.autograd.grad(sum(g.square().sum() for g in gradient(q, k, v)), (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    true = torch.autograd.grad(
        sum(
            g.square().sum()
            for g in torch.autograd.grad(
                ((wide[0] @ wide[1].mT * 0.5).softmax(-1) @ wide[2]).sin().sum(), wide, create_graph=True
            )
        ),
        wide,
    )
    for a, b in zip(second, true, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


# --- the distance term -----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["rate", "period", "radius", "batch", "1 axis", "3 axes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_distance(dtype, kind):
    q, k, v = qkv((2, 3), 37, 70, 16, 8, dtype)
    axes = {"1 axis": 1, "3 axes": 3}.get(kind, 2)
    batch = (2,) if kind == "batch" else ()
    options = {
        "query_pos": draw((*batch, 37, axes), seed=5),
        "key_pos": draw((*batch, 70, axes), seed=6),
        "rate": torch.tensor([0.0, 0.5, 2.0]),
    }
    if kind == "period":
        options["period"] = (3.0, math.inf)
    if kind == "radius":
        options["radius"] = 1.5
    check(q, k, v, draw((70,), positive=True), **options)


def test_distance_with_everything_else():
    q, k, v = qkv((2,), 40, 70, 16, 8)
    w = draw((70,), positive=True)
    w[::3] = 0
    y = draw((70, 2), seed=6)
    options = {"query_pos": draw((40, 2), seed=5), "rate": torch.tensor([0.5, 3.0]), "radius": 2.0}
    clean = check(q, k, v, w, key_pos=y, is_causal=True, **options)
    mask = torch.ones(40, 70, dtype=torch.bool).tril()
    assert_near(check(q, k, v, w, key_pos=y, attn_mask=mask, **options), clean)
    assert bool((clean["key_pos"][::3] == 0).all())
    y = y.clone()
    y[::3] = math.nan
    assert_same(
        results(q, k, v, w, key_pos=y, is_causal=True, **options),
        results(q, k, v, w, key_pos=torch.where(y.isnan(), 0.0, y), is_causal=True, **options),
    )


def test_distances_are_direct_differences():
    """CASES 16: coordinates far from 0, coincident points, rate 1e5."""
    q, k, v = qkv((1,), 2, 3, 4, 4)
    x = torch.tensor([[512_695.0], [512_804.0]])
    y = torch.tensor([[512_804.0], [512_695.0], [512_804.0]])
    _, lse = attend(q, k, v, query_pos=x, key_pos=y, rate=torch.tensor([1e-3]), scale=0.0)
    far = math.exp(-1e-3 * 109**2)
    true = torch.tensor([[1 + 2 * far, 2 + far]], dtype=torch.float64).log().float()
    torch.testing.assert_close(lse, true, rtol=1e-6, atol=1e-6)
    result = results(q, k, v, query_pos=x, key_pos=y, rate=torch.tensor([1e5]))
    assert all(bool(t.isfinite().all()) for t in result.values())


def test_a_bad_rate_or_radius_makes_rows_nan():
    q, k, v = qkv((2,), 20, 30, 4, 4)
    x, y = draw((20, 2)), draw((30, 2), seed=1)
    out, _ = attend(q, k, v, query_pos=x, key_pos=y, rate=torch.tensor([-1.0, 1.0]))
    assert bool(out[0].isnan().all()) and bool(out[1].isfinite().all())
    radius = torch.full((20,), 1.0)
    radius[3], radius[4] = math.nan, -1.0
    out, _ = attend(q, k, v, query_pos=x, key_pos=y, radius=radius)
    assert bool(out[:, 3:5].isnan().all()) and bool(out[:, 5:].isfinite().all())


# --- large, on a GPU only --------------------------------------------------------------------------
@on_gpu_only
@pytest.mark.parametrize("n", [65_537, 73_728])
def test_large_n_forward(n):
    """CASES 1."""
    q, k, v = qkv((1,), n, n, 16, 16)
    w = torch.logspace(-3, 1, n)
    out, lse = attend(q, k, v, w)
    true = exact(q[:, -8:], k, v, w)
    np.testing.assert_allclose(out[:, -8:], true["out"], rtol=0, atol=2e-6 * v.abs().max().item())
    np.testing.assert_allclose(lse[:, -8:], true["lse"], rtol=0, atol=1e-5)


@on_gpu_only
def test_large_n_backward():
    """CASES 2: the gradients of eight rows of key and value, by chunks of float64 on the device."""
    n = 46_342
    q, k, v = (t.to(DEVICE).requires_grad_() for t in qkv((1,), n, n, 16, 16))
    w, grad_out = torch.logspace(-3, 1, n, device=DEVICE), draw((1, n, 16), seed=5).to(DEVICE)
    _, grad_key, grad_value = torch.autograd.grad(co.continuum_attention(q, k, v, w), (q, k, v), grad_out)
    q64, k64, v64, g64, w64 = (t.detach().double().squeeze(0) for t in (q, k, v, grad_out, w))
    true_key, true_value = (
        torch.zeros(8, 16, device=DEVICE).double(),
        torch.zeros(8, 16, device=DEVICE).double(),
    )
    for rows in torch.arange(n, device=DEVICE).split(2048):
        p = torch.softmax(0.25 * q64[rows] @ k64.T + w64.log(), -1)
        row = ((p @ v64) * g64[rows]).sum(-1, keepdim=True)
        tail = p[:, -8:]
        true_value += tail.T @ g64[rows]
        true_key += 0.25 * (tail * (g64[rows] @ v64[-8:].T - row)).T @ q64[rows]
    for actual, true in ((grad_key, true_key), (grad_value, true_value)):
        torch.testing.assert_close(actual[0, -8:].double(), true, rtol=0, atol=2e-5 * true.abs().max().item())


@on_gpu_only
def test_many_small_problems():
    """CASES 11."""
    q, k, v = qkv((8200, 8), 16, 16, 4, 4)
    check(q, k, v, draw((8200, 8, 16), positive=True))


@on_gpu_only
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_maximum_arrives_late_among_many_keys(dtype):
    """CASES 13: M = 131,072."""
    m = 131_072
    q, k, v = qkv((1,), 9, m, 8, 8)
    q[..., 0], k[..., 0] = 1.0, torch.linspace(-30, 30, m) * 8**0.5
    check(q.to(dtype), k.to(dtype), v.to(dtype), draw((m,), positive=True))


@on_gpu_only
def test_opcheck_and_compile():
    q, k, v = (t.to(DEVICE).requires_grad_() for t in qkv((2, 3), 20, 30, 16, 8))
    w = draw((30,), positive=True).to(DEVICE).expand(2, 3, 30).contiguous().requires_grad_()
    arguments = (q, k, v, w, None, None, None, None, None, None, None, 0.25, 0.0, False)
    torch.library.opcheck(torch.ops.continuum_ops.continuum_attention_forward, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(co.continuum_attention, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, w), co.continuum_attention(q, k, v, w))


@on_gpu_only
def test_backends_name_triton():
    assert co.backends()["cuda"].startswith("Triton")
