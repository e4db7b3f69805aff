"""Galerkin attention: softmax-free attention whose sum over the keys is a quadrature rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks as checks
from . import _direct as direct
from ._galerkin_attention_autograd import apply_small, small_op

_operator = torch.ops.continuum_ops.galerkin_attention.default

# Up to so many multiplications, and rows in a sum, one kernel is faster than the calls of BLAS.
SMALL_PRODUCTS, SMALL_ROWS = 2**18, 512


def galerkin_attention(query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Attention without softmax: every value function is projected on the query functions.

    .. math::
        out = q \, (k^T W v), \qquad W = \mathrm{diag}(w), \qquad
        out_{ij} = \sum_l q_{il} \sum_m w_m k_{ml} v_{mj}

    The inner sum is the quadrature of :math:`\int k_l v_j`; the columns of q, k, v are functions on the
    mesh (Cao, "Choose a Transformer: Fourier or Galerkin", eq. 6, 13, 14, with the rule of the mesh where
    the paper has 1/n). Cost O((N + M) D Dv), memory O(N + M): nothing of size N x M exists.

    Args:
        query: (..., H, N, D), float64, float32, bfloat16 or float16.
        key: (..., H, M, D), query's dtype.
        value: (..., H, M, Dv), query's dtype. Leading dimensions are any number, equal or broadcastable;
            strides are free.
        weights: quadrature weights >= 0 and finite, broadcastable to (..., H, M), so that (B, M) weights of
            a batch are passed as ``weights[:, None]``; any floating dtype, used as float32 (float64 for
            float64 queries). The output is linear in them. A weight of 0 removes its key. None: 1 / M.

    Returns:
        (..., H, N, Dv) in query's dtype; 0 where M = 0 or all weights are 0.

    A key of weight 0 has no effect even if its row is NaN; its key, value and weight gradients are 0. NaN in
    a live row comes out. 16-bit inputs are widened to float32, accumulated there, and the output is rounded
    once.

    It is made of torch's own products, so derivatives of any order, forward mode, ``torch.func`` and
    ``torch.compile`` work as for those. Under autocast query, key and value take the autocast dtype (unless
    they are float64); weights and products stay float32.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape or device; on the CPU also a negative, NaN or infinite weight (elsewhere,
            where a look at the values would wait for the device, the affected outputs become NaN).

    Example:
        >>> x, w = co.quadrature.gauss_legendre(64, 0.0, 1.0)
        >>> q, k, v = torch.randn(3, 2, 4, 64, 16)  # batch 2, heads 4
        >>> co.galerkin_attention(q, k, v, w).shape
        torch.Size([2, 4, 64, 16])
    """
    return linear_attention("galerkin_attention", query, key, value, weights)


def linear_attention(op: str, query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None) -> Tensor:
    """Checks and the registered operator, for both names of q (k^T W v)."""
    out = _small_attention(query, key, value, weights)
    if out is not None:
        return out
    checks.check_tensor(op, "query", query)
    query, key, value = checks.autocast(query, key, value)
    leads = checks.check_qkv(op, query, key, value)
    if weights is not None:
        checks.check_weights(op, weights, query, (*leads, key.shape[-2]))
    return _operator(query, key, value, weights)


def _small_attention(query: Any, key: Any, value: Any, weights: Any) -> Tensor | None:
    """The kernel's own answer for small problems; None where it refuses, or something has to be prepared."""
    recorded = direct.plain(query, key, value, weights)
    if recorded is None:
        return None
    try:
        shape, dtype = query.shape, query.dtype
        if shape == key.shape == value.shape:
            rows, products = shape[-2], 2 * query.numel() * shape[-1]
        elif shape[:-2] == key.shape[:-2] == value.shape[:-2]:
            rows = max(shape[-2], key.shape[-2])
            products = (query.numel() + key.numel()) * value.shape[-1]
        else:
            return None
        if rows > SMALL_ROWS or products > SMALL_PRODUCTS or dtype not in direct.WIDE:
            return None
        if weights is not None and weights.dtype is not dtype:
            return None
        run = apply_small if recorded else small_op
        return run(query, key, value, weights)  # type: ignore[no-any-return]
    except direct.REFUSALS:  # the checks of the ordinary way say what is wrong
        return None
