"""Edge rules of continuum attention, and inputs of the kinds that are known to break attention kernels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import assert_near, attend, check, chunked_module, draw, exact, lse_dtype, qkv, run

import continuum_ops as co
from continuum_ops import reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def results(query, key, value, weights=None, attn_mask=None, **options):
    """Outputs and gradients for fixed cotangents."""
    leads = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    grad_out = draw((*leads, query.shape[-2], value.shape[-1]), query.dtype, 21)
    grad_lse = draw((*leads, query.shape[-2]), lse_dtype(query.dtype), 22)
    return run(attend, [query, key, value, weights, attn_mask], grad_out, grad_lse, **options)


def assert_same(a, b):
    for name, value in a.items():
        torch.testing.assert_close(
            value, b[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


# --- keys that do not exist ----------------------------------------------------------------------


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("m", [7, 40, 300])
def test_dead_keys_have_no_effect(path, dtype, m, junk):
    q, k, v = qkv((2, 3), 21, m, 16, 8, dtype)
    w = draw((m,), positive=True)
    w[1::3] = 0
    clean = results(q, k, v, w)
    assert bool((clean["key"][..., 1::3, :] == 0).all()) and bool((clean["value"][..., 1::3, :] == 0).all())
    assert bool((clean["weights"][1::3] == 0).all())
    assert all(bool(t.isfinite().all()) for t in clean.values())
    k[..., 1::3, :] = junk
    v[..., 1::3, :] = junk
    assert_same(results(q, k, v, w), clean)


def test_dead_keys_as_if_they_were_not_there(path):
    q, k, v = qkv((2, 3), 33, 90, 16, 8, torch.float64)
    w = draw((90,), torch.float64, positive=True)
    live = draw((90,), seed=30) > 0
    out, lse = attend(q, k, v, torch.where(live, w, 0.0))
    expected = attend(q, k[..., live, :], v[..., live, :], w[live])
    torch.testing.assert_close((out, lse), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_first_tiles_dead(path, dtype):
    """CASES 4: the first 512 of 600 keys do not exist."""
    q, k, v = qkv((2,), 50, 600, 16, 16, dtype)
    w = draw((600,), positive=True)
    w[:512] = 0
    k[:, :512], v[:, :512] = math.nan, math.nan
    result = results(q, k, v, w)
    short = results(q, k[:, 512:], v[:, 512:], w[512:])
    eps = 8 * torch.finfo(dtype).eps
    for name in ("out", "query"):
        torch.testing.assert_close(result[name], short[name], rtol=eps, atol=eps)
    for name in ("key", "value"):
        torch.testing.assert_close(result[name][:, 512:], short[name], rtol=eps, atol=eps)
        assert bool((result[name][:, :512] == 0).all())


@pytest.mark.parametrize("kind", ["bool", "float", "weights"])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_rows_with_nothing_to_attend_to(path, dtype, kind):
    """CASES 3: the last four rows masked, or all weights of one batch entry 0."""
    q, k, v = qkv((2, 2), 8, 8, 16, 4, dtype)
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[4:] = False
    w = draw((2, 1, 8), positive=True)
    options = {}
    empty = torch.zeros(2, 2, 8, dtype=torch.bool)
    if kind == "weights":
        w[1] = 0
        empty[1] = True
    else:
        empty[..., 4:] = True
        options["attn_mask"] = mask if kind == "bool" else torch.zeros(8, 8).masked_fill(~mask, -math.inf)
    result = check(q, k, v, w, **options)
    assert bool((result["out"][empty] == 0).all()) and bool((result["lse"][empty] == -math.inf).all())
    assert bool((result["query"][empty] == 0).all())
    assert bool(result["lse"][~empty].isfinite().all())
    assert all(bool(t.isfinite().all()) for name, t in result.items() if name != "lse")


@pytest.mark.parametrize("grad", [1.0, math.inf, -math.inf])
def test_gradient_of_lse_of_an_empty_row_is_ignored(path, grad):
    q, k, v = (t.requires_grad_() for t in qkv((2,), 4, 6, 3, 3))
    w = torch.ones(2, 6)
    w[0] = 0
    w.requires_grad_()
    _, lse = attend(q, k, v, w)
    grad_lse = torch.tensor([[grad] * 4, [0.0] * 4])
    for g in torch.autograd.grad(lse, (q, k, v, w), grad_lse):
        assert bool((g == 0).all())


@pytest.mark.parametrize(
    "n, m, leads", [(3, 0, (2, 2)), (0, 3, (2, 2)), (3, 4, (0, 2)), (3, 4, (2, 0)), (0, 0, ())]
)
@pytest.mark.parametrize("with_weights", [False, True])
def test_nothing_at_all(path, n, m, leads, with_weights):
    """CASES 12: M = 0, N = 0, B = 0."""
    q, k, v = qkv(leads, n, m, 4, 5)
    w = draw((*leads, m), positive=True) if with_weights else None
    result = results(q, k, v, w)
    assert result["out"].shape == (*leads, n, 5) and bool((result["out"] == 0).all())
    assert result["lse"].shape == (*leads, n) and bool((result["lse"] == -math.inf).all())
    for name, tensor in zip(("query", "key", "value", "weights"), (q, k, v, w), strict=True):
        if tensor is not None:
            assert result[name].shape == tensor.shape and bool((result[name] == 0).all())
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grads = torch.autograd.grad(attend(*leaves, w)[0].sum(), leaves, create_graph=True)
    assert all(bool((g == 0).all()) for g in torch.autograd.grad(sum(g.sum() for g in grads), leaves))


def test_no_features_is_the_weighted_mean(path):
    """D = 0: all scores are 0."""
    q, k, v = qkv((2,), 3, 40, 0, 4, torch.float64)
    w = draw((40,), torch.float64, positive=True)
    check(q, k, v, w)
    torch.testing.assert_close(attend(q, k, v, w)[1], w.sum().log().expand(2, 3), rtol=1e-14, atol=1e-14)


# --- NaN -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_nan_query_row(path, dtype):
    """CASES 19: that row is NaN, the others are right."""
    q, k, v = qkv((2,), 40, 50, 16, 8, dtype)
    w = draw((50,), positive=True)
    expected = attend(q, k, v, w)
    q[1, 17] = math.nan
    for actual, clean in zip(attend(q, k, v, w), expected, strict=True):
        assert bool(actual[1, 17].isnan().all())
        keep = torch.ones(2, 40, dtype=torch.bool)
        keep[1, 17] = False
        assert_near({"others": actual[keep]}, {"others": clean[keep]})


def test_nan_in_a_live_key_or_value(path):
    q, k, v = qkv((2,), 20, 50, 16, 8)
    bad = k.clone()
    bad[0, 3, 2] = math.nan
    out, lse = attend(q, bad, v)
    assert bool(out[0].isnan().all()) and bool(lse[0].isnan().all()) and bool(out[1].isfinite().all())
    bad = v.clone()
    bad[0, 3, 2] = math.nan
    out, lse = attend(q, k, bad)
    assert bool(out[0, :, 2].isnan().all()) and bool(lse.isfinite().all())
    assert bool(out[0, :, :2].isfinite().all()) and bool(out[1].isfinite().all())


def test_dead_keys_get_no_gradient_from_a_nan_query(path):
    q, k, v = qkv((1,), 6, 8, 4, 4)
    w = torch.ones(8)
    w[2] = 0
    q[0, 1] = math.nan
    result = results(q, k, v, w)
    assert bool((result["key"][0, 2] == 0).all()) and bool((result["value"][0, 2] == 0).all())
    assert result["weights"][2] == 0


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, m", [(50, 77), (17, 129), (1, 33)])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_junk_behind_partial_tiles(path, dtype, n, m):
    """CASES 5: the inputs are slices of buffers whose rest is NaN."""

    def inside(tensor):
        buffer = torch.full([size + 9 for size in tensor.shape], math.nan, dtype=tensor.dtype)
        view = buffer[tuple(slice(4, 4 + size) for size in tensor.shape)]
        return view.copy_(tensor)

    q, k, v = qkv((2,), n, m, 20, 12, dtype)
    w = draw((2, m), positive=True)
    clean = results(q, k, v, w)
    assert_near(results(inside(q), inside(k), inside(v), inside(w)), clean)
    assert all(bool(t.isfinite().all()) for t in clean.values())


@pytest.mark.parametrize("m", [33, 65, 97])
def test_expanded_keys(path, m):
    """CASES 7: key and value of batch 1 expanded to batch 4."""
    q = draw((4, 2, 40, 16))
    k, v = draw((1, 2, m, 16), seed=1), draw((1, 2, m, 16), seed=2)
    w = draw((1, 1, m), positive=True)
    result = results(q, k, v, w)
    copies = results(q, k.repeat(4, 1, 1, 1), v.repeat(4, 1, 1, 1), w.repeat(4, 1, 1))
    assert torch.equal(result["out"], copies["out"])
    torch.testing.assert_close(result["key"], copies["key"].sum(0, keepdim=True))
    torch.testing.assert_close(result["weights"], copies["weights"].sum(0, keepdim=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_strided_inputs_and_two_layouts_in_a_row(path, dtype):
    """CASES 8: sliced keys, and (B, N, H, D) storage seen as (B, H, N, D)."""
    k, v = draw((2, 3, 200, 16), dtype, 1)[:, :, :-128], draw((2, 3, 200, 8), dtype, 2)[:, :, :-128]
    q = draw((2, 60, 3, 16), dtype).transpose(1, 2)
    w = draw((2, 72, 3), positive=True).transpose(1, 2)
    clean = results(*(t.contiguous() for t in (q, k, v, w)))
    assert_near(results(q, k, v, w), clean)
    backwards = draw((2, 3, 16, 60), dtype, 0).mT
    assert_near(results(backwards, k, v, w), results(backwards.contiguous(), k, v, w))
    assert_near(results(q, k, v, w), clean)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_keys_and_values_by_columns(path, dtype):
    """A row of key or value is not contiguous: (B, D, M) storage seen as (B, M, D)."""
    q, w = draw((2, 20, 16), dtype), draw((2, 72), positive=True)
    k, v = draw((2, 16, 72), dtype, 1).mT, draw((2, 8, 72), dtype, 2).mT
    check(q, k, v, w)
    assert_near(results(q, k, v), results(q, k.contiguous(), v.contiguous()))


@pytest.mark.parametrize("loss", ["cat", "sum", "transpose", "slice"])
def test_strided_gradients(path, loss):
    """CASES 9: the gradient of the output arrives sliced, expanded or transposed."""
    q, k, v = (t.requires_grad_() for t in qkv((2, 3), 20, 30, 8, 8, torch.float64))
    w = draw((30,), torch.float64, positive=True).requires_grad_()
    out, lse = attend(q, k, v, w)
    z = draw((2, 3, 20, 8), torch.float64, 9)
    pattern = draw((2, 20, 3, 8), torch.float64, 10)
    scalar = {
        "cat": lambda: (torch.cat([out, z], 1) * draw((2, 6, 20, 8), torch.float64, 11)).sum(),
        "sum": lambda: out.sum(),
        "transpose": lambda: (out.transpose(1, 2) * pattern).sum(),
        "slice": lambda: (out[..., ::2] * z[..., ::2]).sum(),
    }[loss]()
    cotangent = torch.autograd.grad(scalar, out, retain_graph=True)[0].contiguous()
    true = exact(q, k, v, w, grad_out=cotangent)
    grads = torch.autograd.grad(scalar + lse.sum() * 0, (q, k, v, w))
    for name, grad in zip(("query", "key", "value", "weights"), grads, strict=True):
        np.testing.assert_allclose(grad, true[name].astype(float), rtol=0, atol=1e-13)


def test_unaligned_storage(path):
    """CASES 20: the weights start one element into their buffer."""
    _, k, v = qkv((2,), 30, 51, 16, 16)
    w = draw((52,), positive=True)[1:]
    flat = draw((2 * 30 * 16 + 1,), seed=5)[1:].view(2, 30, 16)
    assert_near(results(flat, k, v, w), results(flat.clone(), k, v, w.clone()))
    check(flat, k, v, w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=names)
def test_odd_length_backward(path, dtype):
    """CASES 6: N = 1025, d = 64, with weights."""
    q, k, v = qkv((1,), 1025, 1025, 64, 64, dtype)
    result = check(q, k, v, draw((1025,), positive=True))
    assert all(bool(t.isfinite().all()) for t in result.values())


def test_float32_is_accurate(path):
    """CASES 15: N = 128, d = 32, float32 at the default precision: error below 1e-5."""
    assert torch.get_float32_matmul_precision() == "highest"
    q, k, v = qkv((4,), 128, 128, 32, 32)
    np.testing.assert_allclose(co.continuum_attention(q, k, v), exact(q, k, v)["out"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_same_bits_every_time(path, dtype):
    """CASES 14: 30 repeats, forward and backward, on more than one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        q, k, v = qkv((2, 2), 130, 140, 16, 16, dtype)
        w = draw((140,), positive=True)
        first = results(q, k, v, w)
        for _ in range(29):
            assert_same(results(q, k, v, w), first)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("deviation", [2.0, 10.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_maximum_arrives_late(path, dtype, deviation):
    """CASES 13, small: scores that rise along the keys."""
    q, k, v = qkv((1,), 9, 1030, 8, 8, torch.float64)
    slope = torch.linspace(-deviation, deviation, 1030, dtype=torch.float64)
    q[..., 0], k[..., 0] = 1.0, slope * 8**0.5
    check(q.to(dtype), k.to(dtype), v.to(dtype), draw((1030,), positive=True))


@pytest.mark.parametrize("row", [0, 20, 40, 69])
def test_one_query_with_a_late_maximum(path, row):
    """Whichever vector of a block it is in: the scores of the others are all 0."""
    q, k, v = torch.zeros(1, 70, 4), torch.zeros(1, 130, 4), draw((1, 130, 4))
    q[0, row, 0] = 1.0
    k[0, :, 0] = torch.linspace(-300, 300, 130)
    check(q, k, v, scale=1.0)


@pytest.mark.parametrize("size", [30.0, 100.0, 300.0])
def test_logits_around_the_largest_exponents(path, size):
    """Many queries and keys, where a bound of the scores may replace their maximum."""
    q, k, v = qkv((1,), 20, 600, 4, 4)
    q, k = size * q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    check(q, k, v, scale=1.0)


def test_graded_weights_do_not_hide_the_maximum(path):
    """The largest score has a weight so small that the others decide."""
    q, k, v = qkv((1,), 5, 60, 4, 4)
    w = torch.ones(60)
    k[0, 7] = 40 * q[0, 0]
    w[7] = 1e-36
    check(q, k, v, w)


@pytest.mark.parametrize("factor", [1e-40, 1e-45, 1e-38])
def test_subnormal_weights(path, factor):
    """A common factor of the weights cancels where it leaves them a few bits only."""
    q, k, v = qkv((2,), 20, 30, 8, 8)
    w = torch.full((30,), factor)
    result, expected = results(3 * q, k, v, w), results(3 * q, k, v, torch.ones(30))
    for name in ("out", "query", "key", "value"):
        torch.testing.assert_close(result[name], expected[name], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        result["lse"], expected["lse"] + w[0].double().log().float(), rtol=0, atol=1e-4
    )


def test_one_key_of_subnormal_weight_decides(path):
    q, k, v = qkv((1,), 5, 60, 4, 4)
    w = torch.ones(60)
    k[0, 7] = 80 * q[0, 0]
    w[7] = 1e-40
    check(q, k, v, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=names)
def test_largest_scale(path, dtype):
    """Scores of 0 stay 0; scores that overflow give NaN, as in a plain implementation."""
    q, k, v = qkv((1,), 3, 30, 4, 4, dtype)
    q[0, 0] = 0
    out = co.continuum_attention(q, k, v, scale=1e38 if dtype == torch.float32 else 1e307)
    torch.testing.assert_close(out[0, 0], v[0].mean(0))
    out = co.continuum_attention(1e3 * q, k, v, scale=1e38 if dtype == torch.float32 else 1e307)
    assert bool(out[0, 1:].isnan().all())


def test_memory_of_the_chunked_path_is_bounded(monkeypatch):
    """No block of scores is larger than the budget, forward, backward and twice backward."""
    monkeypatch.setattr(chunked_module, "CHUNK_SCORES", 1000)
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(
                t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if hasattr(t, "numel")
            )
            return out

    leaves = [t.requires_grad_() for t in qkv((2,), 100, 90, 3, 3)]
    bias = torch.zeros(1, 90, requires_grad=True)
    with Watch():
        out = co.continuum_attention(*leaves, attn_mask=bias)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
    assert max(largest) <= 1000, max(largest)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=names)
@pytest.mark.parametrize("m", [1, 3, 5, 6, 63, 67])
@pytest.mark.parametrize("kind", ["causal", "mask"])
def test_a_hidden_key_does_not_set_the_scale(path, dtype, m, kind):
    # Scores that rise by 60 from key to key: the keys that a query must not see would drown the others.
    query, value = torch.ones(1, m, 1, dtype=dtype), draw((1, m, 3), dtype, 4)
    key = 60 * torch.arange(m, dtype=dtype)[None, :, None]
    triangle = torch.ones(m, m, dtype=torch.bool).tril()
    options = {"is_causal": True} if kind == "causal" else {"attn_mask": triangle}
    check(query, key, value, scale=1.0, **options)
    out, lse = attend(query, key, value, scale=1.0, **options)
    torch.testing.assert_close(out, value, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, key[..., 0], rtol=2e-7, atol=1e-6)


@pytest.mark.parametrize("path", ["kernel"], indirect=True)
def test_a_hidden_pair_has_no_gradient_whatever_its_value(path):
    """The queries that a mask keeps from a key of infinite value get the gradients of a finite one."""
    q, k, v = qkv((1,), 20, 30, 8, 4, torch.float64)
    mask = torch.ones(20, 30, dtype=torch.bool)
    mask[:10, 3] = False
    clean = results(q, k, v, None, mask)["query"]
    v[0, 3] = math.inf
    assert torch.equal(results(q, k, v, None, mask)["query"][0, :10], clean[0, :10])


def test_scores_of_minus_infinity_count_as_nothing(path):
    query, value = torch.ones(1, 2, 1), draw((1, 9, 2), torch.float32, 4)
    key = torch.full((1, 9, 1), -math.inf)
    key[0, 6:] = torch.tensor([0.0, 1.0, 2.0])[:, None]
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(0) @ value[0, 6:]
    out, _ = attend(query, key, value, scale=1.0)
    torch.testing.assert_close(out, expected.expand(1, 2, 2), rtol=0, atol=1e-6)
    out, lse = attend(query, key[:, :6], value[:, :6], scale=1.0)  # as a float mask of -inf: nothing is left
    assert (out == 0).all() and (lse == -math.inf).all()


def test_a_mask_without_queries_or_keys():
    for n, m in [(0, 5), (5, 0), (0, 0)]:
        q, k, v = qkv((2, 3), n, m, 4, 6, torch.float32)
        for rows in (1, n):
            out = co.continuum_attention(q, k, v, attn_mask=torch.ones(2, 1, rows, m, dtype=torch.bool))
            assert out.shape == (2, 3, n, 6)
            assert (out == 0).all()


def test_a_row_that_sees_only_a_key_of_tiny_weight(path):
    # Its sum is far below every other; gradients are divided by it.
    m = 600
    q, k, v = qkv((1,), m, m, 1, 3, torch.float32, seed=8)
    q, k = q.abs() / q.abs().max(), k.abs() / k.abs().max()
    q[0, 0], k[0, 0] = 1.0, -1.0
    w = torch.ones(m)
    w[0] = 2.0**-79.9
    leaves = [t.clone().requires_grad_() for t in (q, k, v, w)]
    out = co.continuum_attention(*leaves, is_causal=True, scale=27.0)
    grad_out = draw(out.shape, torch.float32, 3) * 1e4
    grads = torch.autograd.grad(out, leaves, grad_out)
    exact_leaves = [t.double().requires_grad_() for t in (q, k, v, w)]
    expected = reference.continuum_attention(*exact_leaves, is_causal=True, scale=27.0)
    exact_grads = torch.autograd.grad(
        expected, exact_leaves, draw(out.shape, torch.float32, 3).double() * 1e4
    )
    for name, grad, true in zip(("query", "key", "value"), grads, exact_grads, strict=False):
        torch.testing.assert_close(grad.double(), true, rtol=0, atol=2e-5 * true.abs().max().item(), msg=name)


@pytest.mark.parametrize("d", [129, 256])
def test_long_products_with_large_logits(path, d):
    q, k, v = qkv((4,), 17, 33, d, 5, torch.float32, seed=d)
    check(30 * q, k, v)


@pytest.mark.parametrize("m", [130, 300])
def test_causal_among_dead_keys(path, m):
    """The triangle goes by the places of keys, whatever keys before them do not exist."""
    q, k, v = qkv((2,), m, m, 8, 8)
    w = draw((m,), positive=True)
    w[1:60] = 0
    check(q, k, v, w, is_causal=True)


def test_maximum_rises_through_several_sums(path):
    """What was summed over the first thousand keys shrinks again and again."""
    q, k, v = qkv((1,), 9, 2300, 8, 8)
    q[..., 0], k[..., 0] = 1.0, torch.linspace(-40, 40, 2300) * 8**0.5
    v[:, :1100] += 1e6
    check(q, k, v, draw((2300,), positive=True))
