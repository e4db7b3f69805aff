"""Values and derivatives of continuum attention against an independent computation in longer arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import check, chunked_module, draw, exact, lse_dtype, qkv
from hypothesis import given
from hypothesis import strategies as st

import continuum_ops as co
from continuum_ops import reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 15, 17, 127, 129]


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize(
    "n, m", [(a, b) for a in SIZES for b in SIZES if a + b in (2, 3, 30, 32, 144, 256, 258)]
)
def test_odd_lengths(path, dtype, n, m):
    q, k, v = qkv((2, 3), n, m, 20, 12, dtype, seed=n + m)
    check(q, k, v, draw((2, 1, m), lse_dtype(dtype), positive=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize(
    "d, dv", [(d, d) for d in (1, 15, 16, 17, 31, 33, 64, 65, 129, 146, 147, 256)] + [(3, 1)]
)
def test_feature_sizes(path, dtype, d, dv):
    q, k, v = qkv((2,), 37, 41, d, dv, dtype, seed=d)
    check(q, k, v, draw((41,), positive=True))


@pytest.mark.parametrize("d, dv", [(32, 384), (64, 3), (0, 5), (5, 0), (256, 1)])
def test_value_width_differs(path, d, dv):
    q, k, v = qkv((1, 2), 33, 35, d, dv)
    check(q, k, v, draw((2, 35), positive=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_without_weights_is_scaled_dot_product_attention(path, dtype):
    q, k, v = qkv((2, 4), 50, 70, 16, 16, dtype)
    check(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    out = co.continuum_attention(q, k, v)
    torch.testing.assert_close(
        out.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps * v.abs().max().item()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("n, m", [(65, 65), (40, 90), (90, 40)])
def test_causal(path, dtype, n, m):
    q, k, v = qkv((2,), n, m, 16, 16, dtype)
    check(q, k, v, draw((m,), positive=True), is_causal=True)


@pytest.mark.parametrize("shape", [(2, 3, 33, 47), (3, 33, 47), (33, 47), (2, 1, 1, 47), (33, 1), (1, 1)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_broadcast(path, shape, kind):
    mask = draw(shape, seed=5)
    mask = mask > -0.7 if kind == "bool" else mask
    mask[..., 0] = (
        True if kind == "bool" else 1.0
    )  # no empty row here: the plain implementation has no answer
    q, k, v = qkv((2, 3), 33, 47, 16, 8)
    check(q, k, v, draw((47,), positive=True), attn_mask=mask)


def test_float_mask_of_minus_infinity_removes_the_key(path):
    q, k, v = qkv((2,), 9, 11, 4, 4, torch.float64)
    keep = draw((9, 11), seed=4) > 0
    keep[:, 3] = True
    bias = torch.zeros(9, 11, dtype=torch.float64).masked_fill(~keep, -math.inf).requires_grad_()
    out = co.continuum_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(out, co.continuum_attention(q, k, v, attn_mask=keep), rtol=0, atol=1e-15)
    (grad,) = torch.autograd.grad(out.sum(), bias)
    assert bool((grad[~keep] == 0).all())


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 3])
def test_scale_is_honoured(path, scale):
    q, k, v = qkv((2,), 20, 30, 8, 8)
    check(q, k, v, draw((30,), positive=True), scale=scale)


def test_scale_zero_is_the_weighted_mean(path):
    q, k, v = qkv((2,), 5, 30, 8, 3, torch.float64)
    w = draw((30,), torch.float64, positive=True)
    mean = (w[:, None] * v).sum(-2, keepdim=True) / w.sum()
    torch.testing.assert_close(
        co.continuum_attention(q, k, v, w, scale=0.0), mean.expand(2, 5, 3), rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=names)
def test_constant_factor_of_the_weights(path, dtype):
    q, k, v = qkv((2, 2), 30, 40, 16, 16, dtype)
    w = draw((40,), dtype, positive=True)
    out, lse = co.continuum_attention(q, k, v, w, return_lse=True)
    for c in (2.0**-20, 1e-30, 1e30):
        scaled, shifted = co.continuum_attention(q, k, v, c * w, return_lse=True)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(scaled, out, rtol=0, atol=8 * eps * v.abs().max().item())
        torch.testing.assert_close(shifted, lse + math.log(c), rtol=0, atol=8 * eps * (abs(math.log(c)) + 10))


def test_integral_does_not_depend_on_the_mesh(path):
    """int e^s v dy / int e^s dy on [0, 1] for s = y and v = y^2: (e - 2) / (e - 1), with lse log(e - 1)."""
    nodes, w = np.polynomial.legendre.leggauss(20)
    y = torch.from_numpy((nodes + 1) / 2)[:, None]
    out, lse = co.continuum_attention(
        torch.ones(1, 1).double(), y, y**2, torch.from_numpy(w / 2), scale=1.0, return_lse=True
    )
    assert out.item() == pytest.approx((math.e - 2) / (math.e - 1), rel=1e-14)
    assert lse.item() == pytest.approx(math.log(math.e - 1), rel=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_logits_of_1e4(path, dtype):
    q, k, v = qkv((2,), 33, 300, 16, 16, dtype)
    k[:, -1] *= 8  # the maximum arrives last for about half of the rows
    check(q * 50, k * 10, v, draw((300,), positive=True))


@pytest.mark.parametrize("leads", [(), (3,), (2, 3), (2, 1, 3, 2)])
def test_any_number_of_leading_dimensions(path, leads):
    q, k, v = qkv(leads, 6, 7, 4, 5, torch.float64)
    check(q, k, v, draw((*leads, 7), torch.float64, positive=True))


def test_leading_dimensions_broadcast(path):
    q = draw((2, 1, 3, 6, 4), torch.float64)
    k, v = draw((4, 1, 7, 4), torch.float64, 1), draw((1, 3, 7, 5), torch.float64, 2)
    check(q, k, v, draw((4, 1, 7), torch.float64, positive=True))


@pytest.mark.parametrize("shape", [(9,), (2, 1, 9), (2, 3, 9)])
def test_weights_from_a_graph(path, shape):
    """CASES 18: the weights are softplus of parameters, and only some inputs require gradients."""
    q, k, v = qkv((2, 3), 6, 9, 4, 4, torch.float64)
    p = draw(shape, torch.float64, 7).requires_grad_()
    factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    grad_out = draw((2, 3, 6, 4), torch.float64, 9)
    w = factor * torch.nn.functional.softplus(p)
    out = co.continuum_attention(q, k, v, w)
    grads = torch.autograd.grad(out, (p, factor), grad_out)
    true = exact(q, k, v, w, grad_out=grad_out)["weights"].astype(float)
    chain = torch.sigmoid(p.detach()).numpy() * factor.item() * true
    np.testing.assert_allclose(grads[0].numpy(), chain, rtol=1e-12, atol=1e-14)
    # A common factor of the weights changes nothing, so its derivative is zero.
    assert abs(grads[1].item()) < 1e-13
    (only_key,) = torch.autograd.grad(
        co.continuum_attention(q, k.requires_grad_(), v, w.detach()), k, grad_out
    )
    np.testing.assert_allclose(
        only_key, exact(q, k, v, w, grad_out=grad_out)["key"].astype(float), atol=1e-14
    )


@pytest.mark.parametrize("weight_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_keep_float32(path, weight_dtype):
    q, k, v = qkv((2,), 20, 30, 8, 8, torch.bfloat16)
    w = draw((30,), weight_dtype, positive=True).requires_grad_()
    out, lse = co.continuum_attention(q, k, v, w, return_lse=True)
    true = exact(q, k, v, w)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    np.testing.assert_allclose(lse.detach(), true["lse"], atol=2e-6)
    (grad,) = torch.autograd.grad(lse.sum(), w)
    assert grad.dtype == weight_dtype


# --- derivatives ---------------------------------------------------------------------------------


def _small(*leads):
    q, k, v = qkv(leads, 3, 4, 2, 2, torch.float64)
    w = draw((4,), torch.float64, positive=True)
    return [t.requires_grad_() for t in (q, k, v, w)]


def _both(*args, **options):
    return co.continuum_attention(*args, return_lse=True, **options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_first_and_second_derivatives(path, is_causal):
    inputs = _small(2)
    assert torch.autograd.gradcheck(lambda *a: _both(*a, is_causal=is_causal), inputs)
    assert torch.autograd.gradgradcheck(lambda *a: _both(*a, is_causal=is_causal), inputs)


def test_second_derivatives_with_bool_mask(path):
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert torch.autograd.gradgradcheck(lambda *a: _both(*a[:3], attn_mask=mask)[0], _small(2)[:3])


def test_second_derivatives_without_weights(path):
    assert torch.autograd.gradgradcheck(_both, _small()[:3])


def test_second_derivative_of_lse_alone(path):
    assert torch.autograd.gradgradcheck(lambda *a: _both(*a)[1], _small())


def test_second_derivatives_in_blocks(path, monkeypatch):
    """Several blocks of queries give what one block gives."""
    inputs = [
        t.requires_grad_()
        for t in (*qkv((2,), 13, 11, 3, 4, torch.float64), draw((11,), torch.float64, positive=True))
    ]

    def penalty():
        out, lse = _both(*inputs)
        grads = torch.autograd.grad((out.sin().sum(), lse.cos().sum()), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)

    monkeypatch.setattr(chunked_module, "CHUNK_SCORES", 2**20)
    whole = penalty()
    monkeypatch.setattr(chunked_module, "CHUNK_SCORES", 60)
    for a, b in zip(penalty(), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_third_derivative_raises(path):
    q, k, v, w = _small()
    (first,) = torch.autograd.grad(co.continuum_attention(q, k, v, w).sin().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivatives are not implemented"):
        torch.autograd.grad(second.sum(), q)


# --- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_reference_agrees_with_the_formula(is_causal):
    q, k, v = qkv((2, 3), 12, 14, 4, 4, torch.float64)
    w = draw((3, 14), torch.float64, positive=True)
    w[0, :14] = 0
    true = exact(q, k, v, w, is_causal=is_causal)
    out, lse = reference.continuum_attention(q, k, v, w, is_causal=is_causal, return_lse=True)
    np.testing.assert_allclose(out, true["out"].astype(float), atol=1e-14)
    np.testing.assert_allclose(lse, true["lse"].astype(float), atol=1e-14)


# --- drawn inputs --------------------------------------------------------------------------------


@st.composite
def problems(draw_from):
    integers = st.integers
    leads = tuple(draw_from(st.lists(integers(1, 3), max_size=3)))
    n, m = draw_from(integers(0, 70)), draw_from(integers(0, 70))
    d, dv = draw_from(integers(0, 40)), draw_from(integers(0, 40))
    dtype = draw_from(st.sampled_from(DTYPES))
    seed = draw_from(integers(0, 1000))
    tensors = []
    for index, (rows, width) in enumerate([(n, d), (m, d), (m, dv)]):
        layout = draw_from(st.sampled_from(["contiguous", "heads last", "sliced", "expanded", "transposed"]))
        tensors.append(_laid_out(leads, rows, width, dtype, seed + index, layout))
    kind = draw_from(st.sampled_from(["none", "ones", "graded", "zeros", "one"]))
    w = None
    if kind != "none":
        w = draw(((*leads, m)), lse_dtype(dtype), seed + 5, positive=True)
        if kind == "ones":
            w = torch.ones_like(w)
        elif kind == "one":
            w = w[(0,) * len(leads)] if 0 not in leads else w
        elif kind == "zeros":
            w = w * (draw(w.shape, seed=seed + 6) > 0)
    return (*tensors, w), draw_from(st.booleans())


def _laid_out(leads, rows, width, dtype, seed, layout):
    if layout == "heads last" and leads:
        return draw((rows, *leads, width), dtype, seed).movedim(0, -2)
    if layout == "sliced":
        return draw((*leads, rows + 3, width + 2), dtype, seed)[..., 2 : rows + 2, 1 : width + 1]
    if layout == "expanded" and leads:
        return draw((*leads[:-1], 1, rows, width), dtype, seed).expand(*leads, rows, width)
    if layout == "transposed":
        return draw((*leads, width, rows), dtype, seed).mT
    return draw((*leads, rows, width), dtype, seed)


@given(problems())
def test_drawn_problems(problem):
    tensors, is_causal = problem
    check(*tensors, is_causal=is_causal)
