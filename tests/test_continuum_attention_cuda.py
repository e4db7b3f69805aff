"""Edge rules of continuum attention on CUDA tensors.

Marked gpu. The same file runs under Triton's interpreter on CPU tensors: see test_triton_interpreter.py.
"""

from __future__ import annotations

import math

import helpers
import numpy as np
import pytest
import torch
from helpers import assert_near, draw, exact, lse_dtype, qkv
from triton_support import INTERPRETED, interpret, kernels

import continuum_ops as co
from continuum_ops.ops._philox import dropout_keep

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
LIBRARY = interpret() if INTERPRETED else None
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
on_gpu_only = pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Place(torch.autograd.Function):
    """To the device with storage and strides as they are: slices, expanded and permuted tensors stay such."""

    @staticmethod
    def forward(ctx, tensor):
        storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        moved = storage.to(DEVICE)
        return moved.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    @staticmethod
    def backward(ctx, grad):
        return grad.cpu()


def place(value):
    return Place.apply(value) if isinstance(value, torch.Tensor) and DEVICE.type != "cpu" else value


def attend(*args, **options):
    out, lse = co.continuum_attention(
        *map(place, args), **{name: place(v) for name, v in options.items()}, return_lse=True
    )
    return out.cpu(), lse.cpu()


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr(helpers, "attend", attend)
    launches = []
    if INTERPRETED:  # the kernels, not the chunked path, are what is tested here
        kernel = kernels()
        for name in ("forward", "backward"):
            original = getattr(kernel, name)
            monkeypatch.setattr(kernel, name, lambda *a, f=original, n=name: (launches.append(n), f(*a))[1])
    return launches


def check(*args, **options):
    return helpers.check(*args, **options)


def results(query, key, value, weights=None, **options):
    """Outputs and gradients for fixed cotangents."""
    leads = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    grad_out = draw((*leads, query.shape[-2], value.shape[-1]), query.dtype, 21)
    grad_lse = draw((*leads, query.shape[-2]), lse_dtype(query.dtype), 22)
    mask = options.pop("attn_mask", None)
    distance = [options.pop(name, None) for name in ("query_pos", "key_pos", "rate")]
    tensors = [query, key, value, weights, mask, *distance]
    return helpers.run(attend, tensors, grad_out, grad_lse, **options)


def assert_same(a, b):
    for name, value in a.items():
        torch.testing.assert_close(
            value, b[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


# --- values and gradients ------------------------------------------------------------------------


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


@pytest.mark.xfail(
    INTERPRETED,
    reason="the backward kernels sum q . k in another order than the forward: at logits of thousands the "
    "float32 probabilities of a saturated row do not add up to 1 and the gradient of lse shows it",
    strict=True,
)
def test_gradients_where_one_key_dominates():
    q, k, v = qkv((2,), 100, 150, 16, 8)
    k[0, 140] *= 1000
    check(q, k, v)


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


# --- keys and rows that do not exist -------------------------------------------------------------


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
        monkeypatch.setattr(kernels(), "BOUNDED_FROM", bounded_from)
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


# --- NaN -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounded_from", [0, 2**22])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_nan_query_row(dtype, bounded_from, monkeypatch):
    """CASES 19."""
    monkeypatch.setattr(kernels(), "BOUNDED_FROM", bounded_from)
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
    monkeypatch.setattr(kernels(), "BOUNDED_FROM", bounded_from)
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


# --- layouts -------------------------------------------------------------------------------------


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


# --- dropout, repeats, transformations -----------------------------------------------------------


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


# --- the distance term ---------------------------------------------------------------------------


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


# --- large, on a GPU only ------------------------------------------------------------------------


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
