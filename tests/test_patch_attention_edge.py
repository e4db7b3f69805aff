"""Edge rules of patch attention and the inputs that broke other kernels."""

from __future__ import annotations

import math

import numpy as np
import patch_helpers
import pytest
import torch
from helpers import _long, draw
from patch_helpers import attend, check, chunked, cotangents, run, scene

import continuum_ops as co
from continuum_ops import reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@ALL_DTYPES
def test_all_weights_zero_give_equal_attention(dtype):
    q, k, v, _ = scene((4, 6), (6, 6), dtype=dtype)
    result = check([q, k, v, torch.zeros(4, 6)], (2, 3))
    torch.testing.assert_close(result["lse"], torch.full_like(result["lse"], math.log(6)))
    for name in ("query", "key", "weights"):
        assert not result[name].any()


@ALL_DTYPES
def test_a_point_of_weight_zero_keeps_its_value(dtype):
    """It leaves the inner product, forward and backward; its value is mixed all the same."""
    q, k, v, _ = scene((4, 6), dtype=dtype)
    w = draw((4, 6), seed=3, positive=True)
    w[::2, ::3] = 0
    result = check([q, k, v, w], (2, 3))
    assert not result["query"][:, ::2, ::3].any() and not result["weights"][::2, ::3].any()
    assert result["out"][:, ::2, ::3].abs().min() > 0 and result["value"][:, ::2, ::3].abs().min() > 0
    assert not result["key"][:, ::2, ::3].any()  # no patch of queries sees those points


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("form", ["kernel", "chunked"])
def test_points_of_weight_zero_are_not_looked_at(bad, form):
    """NaN in query there, or in key where every patch has weight 0, changes nothing."""
    q, k, v, _ = scene((4, 6))
    w = draw((4, 6), seed=3, positive=True)
    w[::2, ::3] = 0
    dirty_q, dirty_k = q.clone(), k.clone()
    dirty_q[:, ::2, ::3] = bad
    dirty_k[:, ::2, ::3] = bad
    grad_out, grad_lse = cotangents(q, v, [2, 3])

    def attend_chunked(query, key, value, weights, sizes):
        return patch_helpers._Chunked.apply(query, key, value, weights[None], sizes, 1.0)[:2]

    function = attend if form == "kernel" else attend_chunked
    clean = run(function, [q, k, v, w], [2, 3], grad_out, grad_lse)
    dirty = run(function, [dirty_q, dirty_k, v, w], [2, 3], grad_out, grad_lse)
    for name, value in clean.items():
        assert torch.equal(value, dirty[name]), name


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_key_is_seen_by_the_patches_whose_weight_is_not_zero(bad):
    q, k, v, _ = scene((4, 4), batch=1, heads=1)
    w = torch.ones(4, 4)
    w[0, 1] = 0  # local point 1 of the first of four patches
    k[0, 2, 3, 0, 0] = bad  # local point 1 of the last patch
    out = co.patch_attention(q, k, v, 2, w)
    assert out[0, :2, :2].isfinite().all()
    clean = k.clone()
    clean[0, 2, 3] = 0  # what the first patch does not see
    assert torch.equal(out[0, :2, :2], co.patch_attention(q, clean, v, 2, w)[0, :2, :2])
    assert out[0, 2:].isnan().all() and out[0, :2, 2:].isnan().all()


def test_nan_comes_out():
    """CASES 19: of a query its own patch, of a key all patches, of a value the same point of all patches."""
    q, k, v, _ = scene((4, 4), batch=1)
    q[0, 0, 0, 0, 0] = math.nan
    out = co.patch_attention(q, k, v, 2)
    assert (
        out[0, :2, :2, 0].isnan().all() and out[0, 2:].isfinite().all() and out[:, :, :, 1].isfinite().all()
    )
    q, k, v, _ = scene((4, 4), batch=1)
    k[0, 3, 3, 1, 0] = math.nan
    out = co.patch_attention(q, k, v, 2)
    assert out[..., 1, :].isnan().all() and out[..., 0, :].isfinite().all()
    q, k, v, _ = scene((4, 4), batch=1)
    v[0, 0, 1, 0, 0] = math.nan
    wrong = co.patch_attention(q, k, v, 2).isnan()
    assert wrong[0, ::2, 1::2, 0, 0].all() and wrong.sum() == 4


def test_weights_scale_the_logits():
    q, k, v, w = scene((4, 6), dtype=torch.float64, weights="grid")
    one = co.patch_attention(q, k, v, 2, 3 * w, return_lse=True)
    other = co.patch_attention(q, k, v, 2, w, scale=3.0, return_lse=True)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_default_scale():
    """1 / points of the query grid without weights, 1 with; 0 is not mistaken for none."""
    q, k, v, _ = scene((4, 6), (8, 6), dtype=torch.float64)
    equal = torch.full((4, 6), 1 / 24, dtype=torch.float64)
    torch.testing.assert_close(co.patch_attention(q, k, v, 2), co.patch_attention(q, k, v, 2, equal))
    out = co.patch_attention(q, k, v, 2, scale=0.0)
    mean = v.unflatten(2, (3, 2)).unflatten(1, (4, 2)).mean((1, 3))
    torch.testing.assert_close(out, mean.repeat(1, 2, 3, 1, 1))


@pytest.mark.parametrize("form", ["kernel", "chunked"])
@pytest.mark.parametrize(
    "batch, grid, kgrid", [(2, (4, 6), (0, 6)), (2, (0, 6), (4, 6)), (0, (4, 6), (4, 6)), (2, (0, 6), (0, 6))]
)
def test_nothing_to_attend_to(form, batch, grid, kgrid):
    """CASES 12."""
    q, k, v, _ = scene(grid, kgrid, batch=batch, d=4)
    w = torch.ones(grid)
    grad_out, grad_lse = cotangents(q, v, [2, 3])

    def attend_chunked(query, key, value, weights, sizes):
        return patch_helpers._Chunked.apply(query, key, value, weights[None], sizes, 1.0)[:2]

    result = run(attend if form == "kernel" else attend_chunked, [q, k, v, w], [2, 3], grad_out, grad_lse)
    assert result["out"].shape == (batch, *grid, 2, 4) and not result["out"].any()
    assert result["lse"].shape == (batch, 2, (grid[0] // 2) * 2)
    assert bool((result["lse"] == -math.inf).all()) or 0 in (batch, grid[0])
    for name, tensor in zip(patch_helpers.NAMES, (q, k, v, w), strict=True):
        assert result[name].shape == tensor.shape and not result[name].any()


@pytest.mark.parametrize("channels", [(0, 3), (3, 0)])
def test_no_channels(channels):
    """Without channels of query and key all scores are 0."""
    q, k, v, w = scene((4, 6), d=channels[0], dv=channels[1], weights="grid")
    out, lse = co.patch_attention(q, k, v, 2, w, return_lse=True)
    assert out.shape == (2, 4, 6, 2, channels[1]) and lse.isfinite().all()
    if channels[0] == 0:
        torch.testing.assert_close(out, reference.patch_attention(q, k, v, 2, scale=0.0))


@ALL_DTYPES
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_logits(dtype, size):
    """CASES 13: logits of +-1e4, rising along the keys."""
    q, k, v, _ = scene((8,), (64,), d=4, dtype=dtype)
    k = (k.double() * torch.linspace(0, 1, 64, dtype=torch.float64)[:, None, None]).to(dtype)
    check([q, k, v, None], 4, scale=size / 8)


def test_many_patches_with_late_maxima():
    """The scores of 300 keys rise: the largest comes last."""
    q = torch.ones(1, 4, 1, 2)
    k = (torch.arange(600.0) / 20)[None, :, None, None].expand(1, 600, 1, 2).contiguous()
    check([q, k, draw((1, 600, 1, 3)), None], 2, scale=1.0)


def test_sums_beyond_float16():
    """Scores and mixes that pass 65,504 on the way."""
    q = torch.full((1, 4096, 1, 4), 16.0, dtype=torch.float16)
    v = draw((1, 4096, 1, 2), torch.float16)
    out, lse = co.patch_attention(q, q, v, 2048, scale=2.0**-21, return_lse=True)
    assert lse.allclose(torch.tensor(1.0 + math.log(2)))
    assert out.isfinite().all()


def test_expanded_and_permuted_inputs():
    """CASES 7, 8, 20: stride 0, heads-first storage, storage offset 1; called with each in turn."""
    q, _, _, _ = scene((4, 6), batch=4)
    k, v = (draw((1, 4, 6, 2, 3), seed=s).expand(4, 4, 6, 2, 3) for s in (1, 2))
    w = draw((25,), seed=3, positive=True)[1:].view(4, 6)
    check([q, k, v, w], 2)
    heads_first = draw((4, 2, 4, 6, 3), seed=1).permute(0, 2, 3, 1, 4)
    check([q, heads_first, v[..., :-2], w], 2)
    check([q, k.contiguous(), v.contiguous(), w.expand(4, 4, 6)], 2)


def test_many_channels_at_a_stride():
    """More channels than are packed together, each far from the next."""
    q, k, v = (draw((1, 150, 4, 6, 2), seed=s).permute(0, 2, 3, 4, 1) for s in (1, 2, 3))
    check([q, k, v, draw((4, 6), seed=4, positive=True)], 2)


@pytest.mark.parametrize("how", ["cat", "expanded", "permuted"])
def test_strided_grad_output(how):
    """CASES 9."""
    tensors = scene((4, 6), d=3, dv=5, weights="grid")
    grad = {
        "cat": draw((2, 4, 6, 2, 10))[..., :5],
        "expanded": torch.ones(()).expand(2, 4, 6, 2, 5),
        "permuted": draw((2, 2, 5, 4, 6)).permute(0, 3, 4, 1, 2),
    }[how]
    check(tensors, 2, grad_out=grad)


def test_gradient_of_lse_alone():
    q, k, v, w = (t.double().requires_grad_() for t in scene((4, 6), weights="grid"))
    _, lse = co.patch_attention(q, k, v, 2, w, return_lse=True)
    grads = torch.autograd.grad(lse.sum(), (q, k, v, w))
    leaves = [t.detach().requires_grad_() for t in (q, k, v, w)]
    _, lse = reference.patch_attention(*leaves[:3], 2, leaves[3], return_lse=True)
    true = torch.autograd.grad(lse.sum(), leaves, materialize_grads=True)
    for a, b in zip(grads, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch, heads", [(8200, 8), (1, 65_600)])
def test_many_small_problems(batch, heads):
    """CASES 11: B * H = 65,600."""
    q, k, v, _ = scene((4,), batch=batch, heads=heads, d=2)
    out = co.patch_attention(q, k, v, 2)
    a, b, c = (_long(t).reshape(batch, 2, 2, heads, 2) for t in (q, k, v))
    s = np.einsum("bpxhd,bjxhd->bhpj", a, b) / 4
    p = np.exp(s - s.max(-1, keepdims=True))
    true = np.einsum("bhpj,bjxhc->bpxhc", p / p.sum(-1, keepdims=True), c).reshape(out.shape)
    np.testing.assert_allclose(out.numpy(), true, rtol=0, atol=4e-6)


def test_far_strides():
    """CASES 10: offsets past 2^31 elements, in a mapped buffer of which few pages are touched."""
    step = 2**30 + 16
    buffer = torch.empty(3 * step + 64, dtype=torch.float16)
    q, k, v, _ = scene((4,), batch=1, heads=2, d=3, dtype=torch.float16)

    def far(t, offset):
        view = buffer[offset:].as_strided((1, 4, 2, 3), (6, step, 3, 1))
        return view.copy_(t)

    tensors = [far(t, 16 * i) for i, t in enumerate((q, k, v))]
    near, there = check([q, k, v, None], 2), check([*tensors, None], 2)
    assert all(torch.equal(near[name], there[name]) for name in near)


def test_same_bits_twice_and_on_any_number_of_threads():
    """CASES 14."""
    tensors = scene((39, 26), batch=1, heads=3, d=8, weights="grid")
    grad_out, grad_lse = cotangents(tensors[0], tensors[2], [3, 2])
    first = run(attend, tensors, [3, 2], grad_out, grad_lse)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            again = run(attend, tensors, [3, 2], grad_out, grad_lse)
            assert all(torch.equal(first[name], again[name]) for name in first)
    finally:
        torch.set_num_threads(threads)


def test_matrix_precision_highest():
    """CASES 15."""
    q, k, v, _ = scene((128,), batch=1, heads=1, d=32)
    out = co.patch_attention(q, k, v, 8)
    true = reference.patch_attention(q.double(), k.double(), v.double(), 8)
    assert (out.double() - true).abs().max() < 1e-5


def test_patches_of_one_point_take_memory_of_points_only():
    """2304 x 2304 scores of 8 heads would take 170 MB; the probabilities are not kept."""
    q, k, v, _ = scene((48, 48), batch=1, heads=8, d=1)
    x = chunked.Inputs(q, k, v, None, [1, 1], 1.0)
    out, _, kept = torch.ops.continuum_ops.patch_attention_forward(*x)
    assert kept.shape == (0,) == x.kept()
    s = (q[0, 0, :2, 3, 0, None] * k[0].flatten(0, 1)[:, 3, 0]).double().softmax(-1)
    torch.testing.assert_close(
        out[0, 0, :2, 3, 0].double(), s @ v[0].flatten(0, 1)[:, 3, 0].double(), rtol=0, atol=2e-6
    )
