"""Fourier attention at the size of the paper: the linear form is the quadratic one. The rest of its tests are
those of Galerkin attention, which is the same operator (test_galerkin_attention.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import draw, qkv

import continuum_ops as co

N, D = 8192, 96


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_equals_the_quadratic_product(dtype):
    """(q k^T) W v by rows, which is what O(n) memory must not change, at n = 8192, d = 96."""
    q, k, v = qkv((), N, N, D, D, dtype)
    w = draw((N,), torch.float64, seed=3, positive=True).to(dtype) / N
    out, uniform = co.fourier_attention(q, k, v, w), co.fourier_attention(q, k, v)
    rows = np.arange(0, N, 16)
    query, key, value, weights = (t.double().numpy() for t in (q[rows], k, v, w))
    scores, eps = query @ key.T, torch.finfo(dtype).eps
    for actual, factor in ((out, weights), (uniform, np.full(N, 1 / N))):
        true = (scores * factor) @ value
        terms = (np.abs(query) @ (np.abs(key).T * factor)) @ np.abs(value)
        assert np.abs(actual[rows].double().numpy() - true).max() <= 8 * eps * terms.max()


def test_gradients_equal_those_of_the_quadratic_product():
    tensors = [
        t.requires_grad_() for t in (*qkv((2,), 300, 200, 24, 16, torch.float64), torch.rand(200).double())
    ]
    g = draw((2, 300, 16), torch.float64, seed=9)
    linear = torch.autograd.grad(co.fourier_attention(*tensors), tensors, g)
    q, k, v, w = tensors
    quadratic = torch.autograd.grad((q @ k.mT * w) @ v, tensors, g)
    for a, b in zip(linear, quadratic, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_reference_in_the_order_of_the_formula():
    q, k, v = qkv((2, 3), 7, 9, 4, 5, torch.float64)
    w = torch.tensor([0.0, *range(1, 9)], dtype=torch.float64)
    k[..., 0, :] = torch.nan
    true = np.einsum("bhnd,bhmd,m,bhme->bhne", *(t.numpy() for t in (q, k[..., 1:, :], w[1:], v[..., 1:, :])))
    for function in (co.reference.fourier_attention, co.reference.galerkin_attention, co.fourier_attention):
        np.testing.assert_allclose(function(q, k, v, w).numpy(), true, rtol=0, atol=1e-11)
    uniform = np.einsum("bhnd,bhmd,bhme->bhne", *(t.numpy() for t in (q, k[..., 1:, :], v[..., 1:, :]))) / 8
    for function in (co.reference.fourier_attention, co.reference.galerkin_attention):
        np.testing.assert_allclose(
            function(q, k[..., 1:, :], v[..., 1:, :]).numpy(), uniform, rtol=0, atol=1e-12
        )
