"""Fourier attention: the integral transform with kernel q(x) . k(y), in linear time."""

from __future__ import annotations

from torch import Tensor

from .galerkin_attention import linear_attention


def fourier_attention(query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Attention without softmax: an integral transform with the kernel :math:`q(x) \cdot k(y)`.

    .. math::
        out = (q k^T) \, W v, \qquad W = \mathrm{diag}(w), \qquad
        out_i = \sum_m w_m (q_i \cdot k_m) \, v_m

    The sum is the quadrature of :math:`\int (q(x) \cdot k(y)) v(y) dy` (Cao, "Choose a Transformer: Fourier
    or Galerkin", eq. 5, 8, with the rule of the mesh where the paper has 1/n). No softmax stands between the
    products, so they are taken in the order q (k^T W v): the same numbers to rounding in O((N + M) D Dv),
    where the order of the formula costs O(N M) and holds an N x M matrix. The two attentions differ in what
    is normalised before the products, which is the layer's concern.

    Arguments, result, derivatives and errors are those of :func:`continuum_ops.galerkin_attention`.

    Example:
        >>> q, k, v = torch.randn(3, 8192, 96)
        >>> co.fourier_attention(q, k, v).shape
        torch.Size([8192, 96])
    """
    return linear_attention("fourier_attention", query, key, value, weights)
