"""Edge rules and layouts of continuum attention on CUDA tensors.

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
    place,
    pytestmark,
    results,
)
from helpers import assert_near, draw, exact, qkv
from triton_support import INTERPRETED, kernels

import continuum_ops as co

__all__ = ["on_device", "pytestmark"]  # a fixture and the marks, for pytest to find


def take_the_bound(monkeypatch, bounded_from):
    """Scores with a bound need no shift, from so many on; float32 by parts knows no bound."""
    monkeypatch.setattr(kernels(), "BOUNDED_FROM", bounded_from)
    monkeypatch.setattr(kernels(), "SPLIT_FROM", math.inf if bounded_from == 0 else 0)


# --- keys and rows that do not exist ---------------------------------------------------------------
@pytest.mark.parametrize("junk", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_dead_keys_have_no_effect(dtype, junk):
    m = 100
    q, k, v = qkv((2,), 21, m, 16, 8, dtype)
    w = draw((m,), positive=True)
    w[1::3] = 0
    clean = results(q, k, v, w)
    assert bool((clean["key"][..., 1::3, :] == 0).all()) and bool((clean["value"][..., 1::3, :] == 0).all())
    assert bool((clean["weights"][1::3] == 0).all())
    assert all(bool(t.isfinite().all()) for t in clean.values())
    check(q, k, v, w)
    k[..., 1::3, :], v[..., 1::3, :] = junk, junk
    assert_same(results(q, k, v, w), clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_first_tiles_dead(dtype, monkeypatch):
    """CASES 4."""
    m, dead = (250, 200) if INTERPRETED else (600, 512)
    for bounded_from in (0, 2**22):
        take_the_bound(monkeypatch, bounded_from)
        q, k, v = qkv((2,), 50, m, 16, 16, dtype)
        w = draw((m,), positive=True)
        w[:dead] = 0
        k[:, :dead], v[:, :dead] = math.nan, math.nan
        result = results(q, k, v, w)
        short = results(q, k[:, dead:], v[:, dead:], w[dead:])
        eps = 8 * torch.finfo(dtype).eps
        for name in ("out", "query"):
            torch.testing.assert_close(result[name], short[name], rtol=eps, atol=eps)
        for name in ("key", "value"):
            torch.testing.assert_close(result[name][:, dead:], short[name], rtol=eps, atol=eps)
            assert bool((result[name][:, :dead] == 0).all())


@pytest.mark.parametrize("kind", ["mask", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=names)
def test_rows_with_nothing_to_attend_to(dtype, kind):
    """CASES 3."""
    q, k, v = qkv((2, 2), 8, 8, 16, 4, dtype)
    w, options = draw((2, 1, 8), positive=True), {}
    empty = torch.zeros(2, 2, 8, dtype=torch.bool)
    if kind == "weights":
        w[1], empty[1] = 0, True
    else:
        mask = torch.ones(8, 8, dtype=torch.bool)
        mask[4:], empty[..., 4:] = False, True
        options["attn_mask"] = mask
    result = check(q, k, v, w, **options)
    assert bool((result["out"][empty] == 0).all()) and bool((result["lse"][empty] == -math.inf).all())
    assert bool((result["query"][empty] == 0).all()) and bool(result["lse"][~empty].isfinite().all())
    assert all(bool(t.isfinite().all()) for name, t in result.items() if name != "lse")


@pytest.mark.parametrize("grad", [1.0, math.inf, math.nan])
def test_gradients_of_an_empty_row_are_ignored(grad):
    q, k, v = (t.requires_grad_() for t in qkv((2,), 4, 6, 3, 3))
    w = torch.ones(2, 6)
    w[0] = 0
    w.requires_grad_()
    out, lse = attend(q, k, v, w)
    incoming = torch.tensor([[grad] * 4, [0.0] * 4])
    for g in torch.autograd.grad([out, lse], (q, k, v, w), [incoming[..., None].expand(2, 4, 3), incoming]):
        assert bool((g == 0).all())


@pytest.mark.parametrize("n, m, leads", [(3, 0, (2, 2)), (0, 3, (2, 2)), (3, 4, (0, 2)), (0, 0, ())])
def test_nothing_at_all(n, m, leads):
    """CASES 12."""
    q, k, v = qkv(leads, n, m, 4, 5)
    w = draw((*leads, m), positive=True)
    result = results(q, k, v, w)
    assert result["out"].shape == (*leads, n, 5) and bool((result["out"] == 0).all())
    assert result["lse"].shape == (*leads, n) and bool((result["lse"] == -math.inf).all())
    for name, tensor in zip(("query", "key", "value", "weights"), (q, k, v, w), strict=True):
        assert result[name].shape == tensor.shape and bool((result[name] == 0).all())


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_weights_make_their_rows_nan(bad):
    """No look at the values, which would wait for the device."""
    q, k, v = qkv((2,), 40, 50, 8, 8)
    w = draw((2, 50), positive=True)
    expected = attend(q, k, v, w, is_causal=True)
    w[0, 20] = bad
    if INTERPRETED:  # only the kernel: on the CPU the public function looks at the values
        w = w.clone()
    for actual, clean in zip(attend(q, k, v, w, is_causal=True), expected, strict=True):
        assert bool(actual[0, 20:].isnan().all())
        assert_near({"others": actual[1]}, {"others": clean[1]})
        assert bool(actual[0, :20].isfinite().all())


# --- NaN -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bounded_from", [0, 2**22])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_nan_query_row(dtype, bounded_from, monkeypatch):
    """CASES 19."""
    take_the_bound(monkeypatch, bounded_from)
    q, k, v = qkv((2,), 40, 70, 16, 8, dtype)
    w = draw((70,), positive=True)
    expected = attend(q, k, v, w)
    q[1, 17] = math.nan
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[1, 17] = False
    for actual, clean in zip(attend(q, k, v, w), expected, strict=True):
        assert bool(actual[1, 17].isnan().all())
        assert_near({"others": actual[keep]}, {"others": clean[keep]})


@pytest.mark.parametrize("bounded_from", [0, 2**22])
def test_nan_in_a_live_key_or_value(bounded_from, monkeypatch):
    take_the_bound(monkeypatch, bounded_from)
    q, k, v = qkv((2,), 20, 70, 16, 8)
    bad = k.clone()
    bad[0, 3, 2] = math.nan
    out, lse = attend(q, bad, v)
    assert bool(out[0].isnan().all()) and bool(lse[0].isnan().all()) and bool(out[1].isfinite().all())
    bad = v.clone()
    bad[0, 3, 2] = math.nan
    out, lse = attend(q, k, bad)
    assert bool(out[0, :, 2].isnan().all()) and bool(lse.isfinite().all())
    assert bool(out[0, :, :2].isfinite().all()) and bool(out[1].isfinite().all())


def test_dead_keys_get_no_gradient_from_a_nan_query():
    q, k, v = qkv((1,), 6, 8, 4, 4)
    w = torch.ones(8)
    w[2] = 0
    q[0, 1] = math.nan
    result = results(q, k, v, w)
    assert bool((result["key"][0, 2] == 0).all()) and bool((result["value"][0, 2] == 0).all())
    assert result["weights"][2] == 0


def test_scores_of_minus_infinity_count_as_nothing():
    q, v = torch.ones(1, 2, 1), draw((1, 9, 2), torch.float32, 4)
    k = torch.full((1, 9, 1), -math.inf)
    k[0, 6:] = torch.tensor([0.0, 1.0, 2.0])[:, None]
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(0) @ v[0, 6:]
    out, _ = attend(q, k, v, scale=1.0)
    torch.testing.assert_close(out, expected.expand(1, 2, 2), rtol=0, atol=1e-6)
    out, lse = attend(q, k[:, :6], v[:, :6], scale=1.0)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


# --- layouts ---------------------------------------------------------------------------------------
def inside(tensor):
    """As a slice of a buffer whose rest is NaN (or True)."""
    junk = math.nan if tensor.is_floating_point() else 1
    buffer = torch.full([size + 9 for size in tensor.shape], junk, dtype=tensor.dtype)
    view = buffer[tuple(slice(4, 4 + size) for size in tensor.shape)]
    return view.copy_(tensor)


@pytest.mark.parametrize("n, m", [(50, 77), (17, 129), (1, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_junk_behind_partial_tiles(dtype, n, m):
    """CASES 5."""
    q, k, v = qkv((2,), n, m, 20, 12, dtype)
    w, mask = draw((2, m), positive=True), draw((2, n, m)) > -1
    clean = results(q, k, v, w, attn_mask=mask)
    assert_near(results(inside(q), inside(k), inside(v), inside(w), attn_mask=inside(mask)), clean)
    assert_near(results(inside(q), inside(k), inside(v), inside(w)), results(q, k, v, w))


def test_outputs_do_not_leave_their_tensors(monkeypatch):
    """Nothing is written beside a tensor: zones around everything that is allocated stay as they were."""
    zones, new_empty = [], torch.Tensor.new_empty

    def guarded(self, *size, dtype=None, **options):
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        count, guard = math.prod(shape), 64
        buffer = new_empty(self, (count + 2 * guard,), dtype=dtype, **options).fill_(7)
        zones.extend([buffer[:guard], buffer[count + guard :]])
        return buffer[guard : count + guard].view(shape)

    q, k, v = qkv((2,), 50, 70, 20, 12)
    x, y, rate = draw((50, 2)), draw((70, 2), seed=1), torch.ones(2)
    clean = results(q, k, v, draw((2, 70), positive=True), query_pos=x, key_pos=y, rate=rate)
    monkeypatch.setattr(torch.Tensor, "new_empty", guarded)
    guarded_results = results(q, k, v, draw((2, 70), positive=True), query_pos=x, key_pos=y, rate=rate)
    monkeypatch.undo()
    assert len(zones) > 20 and all(bool((zone == 7).all()) for zone in zones)
    assert_same(guarded_results, clean)


@pytest.mark.parametrize("m", [33, 65])
def test_expanded_keys(m):
    """CASES 7."""
    q = draw((4, 2, 40, 16))
    k, v = draw((1, 2, m, 16), seed=1), draw((1, 2, m, 16), seed=2)
    w = draw((1, 1, m), positive=True)
    result = results(q, k, v, w)
    copies = results(q, k.repeat(4, 1, 1, 1), v.repeat(4, 1, 1, 1), w.repeat(4, 1, 1))
    assert torch.equal(result["out"], copies["out"])
    torch.testing.assert_close(result["key"], copies["key"].sum(0, keepdim=True))
    torch.testing.assert_close(result["weights"], copies["weights"].sum(0, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_strided_inputs_and_two_layouts_in_a_row(dtype):
    """CASES 8."""
    k, v = draw((2, 3, 200, 16), dtype, 1)[:, :, :-128], draw((2, 3, 200, 8), dtype, 2)[:, :, :-128]
    q = draw((2, 60, 3, 16), dtype).transpose(1, 2)
    w = draw((2, 72, 3), positive=True).transpose(1, 2)
    clean = results(*(t.contiguous() for t in (q, k, v, w)))
    assert_near(results(q, k, v, w), clean)
    backwards = draw((2, 3, 16, 60), dtype, 0).mT
    assert_near(results(backwards, k, v, w), results(backwards.contiguous(), k, v, w))


def test_leading_dimensions_that_do_not_merge():
    q = draw((3, 2, 2, 20, 8)).permute(1, 2, 0, 3, 4)
    k, v = draw((2, 1, 3, 25, 8), seed=1), draw((2, 2, 1, 25, 8), seed=2)
    w = draw((2, 1, 25), positive=True)
    check(q, k, v, w)
    check(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0], w[0, 0])


@pytest.mark.parametrize("loss", ["cat", "sum", "transpose", "slice"])
def test_strided_gradients(loss):
    """CASES 9."""
    q, k, v = (t.requires_grad_() for t in qkv((2, 3), 20, 30, 8, 8))
    w = draw((30,), positive=True).requires_grad_()
    out, lse = co.continuum_attention(*map(place, (q, k, v, w)), return_lse=True)
    z, pattern, long = draw((2, 3, 20, 8), seed=9), draw((2, 20, 3, 8), seed=10), draw((2, 6, 20, 8), seed=11)
    z, pattern, long = z.to(DEVICE), pattern.to(DEVICE), long.to(DEVICE)
    scalar = {
        "cat": lambda: (torch.cat([out, z], 1) * long).sum(),
        "sum": lambda: out.sum(),
        "transpose": lambda: (out.transpose(1, 2) * pattern).sum(),
        "slice": lambda: (out[..., ::2] * z[..., ::2]).sum(),
    }[loss]()
    cotangent = torch.autograd.grad(scalar, out, retain_graph=True)[0].contiguous().cpu()
    true = exact(q, k, v, w, grad_out=cotangent)
    grads = torch.autograd.grad(scalar + lse.sum() * 0, (q, k, v, w))
    for name, grad in zip(("query", "key", "value", "weights"), grads, strict=True):
        size = max(1.0, float(np.abs(true[name]).max()))
        np.testing.assert_allclose(grad, true[name].astype(float), rtol=0, atol=4e-6 * size)


def test_large_token_stride():
    """CASES 10: (N - 1) * stride passes 2^31; only the rows themselves are ever touched."""
    n, stride = 33, 2**26 + 64
    buffer = torch.empty((n - 1) * stride + 16, dtype=torch.bfloat16, device=DEVICE)
    assert (n - 1) * stride > 2**31
    q, k, v = (draw((1, n, 16), torch.bfloat16, s) for s in range(3))
    far = buffer.as_strided((1, n, 16), (0, stride, 1))
    for position in range(3):
        near = [t.to(DEVICE) for t in (q, k, v)]
        far.copy_(near[position])
        tensors = [*near[:position], far, *near[position + 1 :]]
        grads = [t.detach().requires_grad_() for t in tensors]
        out = co.continuum_attention(*grads)
        got = torch.autograd.grad(out.sum(), grads)
        leaves = [t.detach().requires_grad_() for t in near]
        expected = co.continuum_attention(*leaves)
        assert torch.equal(out, expected)
        for a, b in zip(got, torch.autograd.grad(expected.sum(), leaves), strict=True):
            assert torch.equal(a, b)


def test_unaligned_storage():
    """CASES 20."""
    _, k, v = qkv((2,), 30, 51, 16, 16)
    w = draw((52,), positive=True)[1:]
    flat = draw((2 * 30 * 16 + 1,), seed=5)[1:].view(2, 30, 16)
    assert_near(results(flat, k, v, w), results(flat.clone(), k, v, w.clone()))


@pytest.mark.parametrize("shape", [(), (40,), (2, 1, 40), (2, 3, 40)])
def test_weights_from_a_graph(shape):
    """CASES 18, and only some inputs require gradients."""
    q, k, v = qkv((2, 3), 20, 40, 8, 8)
    p = draw(shape).requires_grad_()
    w = torch.nn.functional.softplus(p).expand(shape if shape else (40,))
    out, lse = attend(q, k, v.requires_grad_(), w)
    grad_out, grad_lse = draw(out.shape, seed=1), draw(lse.shape, seed=2)
    grads = torch.autograd.grad([out, lse], [p, v], [grad_out, grad_lse])
    true = exact(q, k, v, w.detach(), grad_out=grad_out, grad_lse=grad_lse)
    slope = torch.sigmoid(p.detach().double()).numpy()
    expected = true["weights"].reshape(w.shape) * slope
    expected = expected.sum() if shape == () else expected
    np.testing.assert_allclose(grads[0], expected, rtol=0, atol=4e-6 * np.abs(expected).max() + 1e-6)
    np.testing.assert_allclose(grads[1], true["value"], rtol=0, atol=4e-6)
