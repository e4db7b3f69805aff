"""Continuum attention: softmax attention whose sum over keys is a quadrature rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks as shared
from . import _continuum_attention_checks as checks
from . import _continuum_attention_cuda  # noqa: F401  (registers the operators)
from . import _direct as direct
from ._continuum_attention_autograd import apply_plain, forward_op, plain_op
from ._continuum_attention_chunked import accumulation_dtype
from ._continuum_attention_functorch import attend_in_transforms
from ._functorch import transforms_active

_ops = torch.ops.continuum_ops


def continuum_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    query_pos: Tensor | None = None,
    key_pos: Tensor | None = None,
    rate: Tensor | float | None = None,
    period: Sequence[float] | None = None,
    radius: Tensor | float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Softmax attention as an integral over the domain, with quadrature weights for the keys.

    .. math::
        out_i = \frac{\sum_k w_k e^{s_{ik}} v_k}{\sum_k w_k e^{s_{ik}}}, \qquad
        s_{ik} = scale \; q_i \cdot k_k

    With weights :math:`w_k` that integrate over the domain, the sums converge to the integrals of Calvello,
    Kovachki, Levine, Stuart, "Continuum Attention for Neural Operators", definition 5 (self-attention) and
    definition 11 (cross-attention), whatever the mesh; with trapezoid weights they are its equations (58),
    (59). With equal weights this is ``torch.nn.functional.scaled_dot_product_attention``. The N x M scores
    are never held at once: memory is O(N + M) in a kernel, O(N * chunk) in PyTorch.

    Args:
        query: (..., H, N, D), float64, float32, bfloat16 or float16.
        key: (..., H, M, D), query's dtype.
        value: (..., H, M, Dv), query's dtype. Leading dimensions are any number, equal or broadcastable;
            strided and expanded tensors are read in place.
        weights: quadrature weights >= 0 and finite, broadcastable to (..., H, M), so that (B, M) weights of a
            batch are passed as ``weights[:, None]``; any floating dtype, used as float32 (float64 for
            float64 queries; what float32 rounds to 0, below about 1e-45, counts as 0). A weight of 0 removes
            its key. A constant factor leaves the output as it is. None: ones.
        attn_mask: broadcastable to (..., H, N, M): bool (True = attend) or floating, which is added to the
            scores (-inf removes a key) and receives a gradient.
        dropout_p: probability in [0, 1] with which a normalised attention weight is set to 0, the others
            being multiplied by 1 / (1 - dropout_p). Applied whenever it is not 0, like the function of
            torch; the lse does not see it. The mask follows from the generator of query's device
            (``torch.manual_seed``).
        is_causal: query i attends to the keys k <= i. Not together with attn_mask.
        scale: factor of q . k, at most 1e38 in magnitude (1e307 for float64). None: 1 / sqrt(D). Where the
            scores overflow, NaN comes out.
        return_lse: return (out, lse).
        query_pos: (N, d), or (..., N, d) with leading dimensions that broadcast to those of query before H.
        key_pos: (M, d) or (..., M, d). Positions in one of query's dtypes, used in float32 or wider.
        rate: (H,) or a number, >= 0: adds -rate_h |x_i - y_k|^2 to the scores, for query_pos x and key_pos y
            (Chen, Wu, "Positional Knowledge is All You Need", equation 12). Distances are taken from
            differences, so that an offset of the coordinates does no harm.
        period: d numbers, the lengths of a periodic domain (inf: not periodic along that axis); distances
            are those of the nearest images.
        radius: a number, (N,) or (..., N), >= 0: keys farther than radius from query i do not count. A key
            counts if d^2 <= r^2 (1 + 8 eps).

    Returns:
        out (..., H, N, Dv) in query's dtype; with ``return_lse`` also lse (..., H, N), the logarithm of
        :math:`\sum_k w_k e^{s_{ik}}`, float32 (float64 for float64 queries).

    A query with nothing to attend to (M = 0, all weights 0, everything masked, no key within radius) gives
    0, lse -inf and zero gradients. A key of weight 0 has no effect even if its row is NaN; its key, value
    and weight gradients are 0. NaN in a live row comes out, as from torch's function also for queries that a
    mask of their own, or is_causal, keeps from that row: weights of 0 and masks that are the same for every
    query remove a key entirely. Computation is in float32 or wider and rounds
    to a 16-bit dtype once.

    Gradients exist for query, key, value, weights, a floating attn_mask, query_pos, key_pos and rate,
    through out and lse, and so do second derivatives; third derivatives in reverse mode raise. Forward mode
    (``torch.func.jvp``, ``jacfwd``, ``torch.autograd.forward_ad``) has derivatives of any order, in PyTorch
    with O(N * chunk) memory where all are forward ones; not with dropout. Under ``torch.func.vmap`` the batch
    becomes a leading dimension of the same kernels. Under autocast, query, key and value take the autocast
    dtype (unless they are float64) and nothing else does.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value; on the CPU also a negative, NaN or infinite weight and a
            negative or NaN rate or radius (elsewhere, where a look at the values would wait for the device,
            the affected rows become NaN).

    Example:
        >>> x = co.quadrature.gauss_legendre(64, 0.0, 1.0)
        >>> q, k, v = torch.randn(3, 2, 4, 64, 16)  # batch 2, heads 4
        >>> co.continuum_attention(q, k, v, x[1]).shape
        torch.Size([2, 4, 64, 16])
    """
    if (
        attn_mask is query_pos is key_pos is rate is period is radius is None
        and type(dropout_p) is float
        and dropout_p == 0.0
        and not return_lse
    ):
        out = _plain(query, key, value, weights, scale, is_causal)
        if out is not None:
            return out
    shared.check_tensor(checks.OP, "query", query)
    query, key, value = shared.autocast(query, key, value)
    leads = shared.check_qkv(checks.OP, query, key, value)
    checks.check_numbers(dropout_p, scale, query.dtype)
    rows, keys = query.shape[-2], key.shape[-2]
    if weights is not None:
        checks.check_weights(weights, query, (*leads, keys))
        dtype = accumulation_dtype(query.dtype)
        weights = weights if weights.dtype == dtype else weights.to(dtype)
        weights = weights.expand(*leads, keys)
    if attn_mask is not None:
        checks.check_mask(attn_mask, query, (*leads, rows, keys), is_causal)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] > 0 else 1.0
    seed = _draw_seed(query) if dropout_p > 0.0 else None
    query, key, value = _expand(query, leads), _expand(key, leads), _expand(value, leads)
    options = (float(scale), float(dropout_p), bool(is_causal))

    given = query_pos is not None or key_pos is not None
    if given or rate is not None or period is not None or radius is not None:
        query_pos, key_pos, rate, radius = _distance_terms(
            query, keys, leads, query_pos, key_pos, rate, period, radius
        )
    serves = _kernel_serves(query, attn_mask, query_pos)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*leads, rows, keys) if serves else _with_leads(attn_mask, leads, 2)
    inputs = (query, key, value, weights, attn_mask, query_pos, key_pos, rate, radius, seed, period, *options)
    if transforms_active():
        out, lse = attend_in_transforms(inputs, serves)
    elif serves:
        out, lse, _ = forward_op(*inputs)
    else:
        out, lse = _ops.continuum_attention_chunked(*inputs)
    return (out, lse) if return_lse else out


def _plain(query: Any, key: Any, value: Any, weights: Any, scale: Any, is_causal: Any) -> Tensor | None:
    """The kernel's own answer where nothing has to be prepared; None where it refuses, or something has."""
    recorded = direct.plain(query, key, value, weights)
    if (
        recorded is None
        or (scale is not None and not (type(scale) is float and abs(scale) <= 1e38))
        or (weights is not None and weights.dtype is not query.dtype)
    ):
        return None
    run = apply_plain if recorded else plain_op
    try:
        if scale is None and not is_causal:
            return run(query, key, value, weights)  # type: ignore[no-any-return]
        return run(query, key, value, weights, scale, bool(is_causal))  # type: ignore[no-any-return]
    except direct.REFUSALS:  # the checks of the ordinary way say what is wrong
        return None


def _kernel_serves(query: Tensor, attn_mask: Tensor | None, query_pos: Tensor | None) -> bool:
    """Not float masks, and not positions in a longer type than the kernel computes in."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        return False
    return query_pos is None or query_pos.dtype == accumulation_dtype(query.dtype)


def _draw_seed(query: Tensor) -> Tensor:
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=query.device)


def _expand(tensor: Tensor, leads: torch.Size) -> Tensor:
    return tensor if tensor.shape[:-2] == leads else tensor.expand(*leads, *tensor.shape[-2:])


def _with_leads(tensor: Tensor, leads: Sequence[int], trailing: int) -> Tensor:
    """View with all leading dimensions, new ones of size 1, so that gradients have the small shape."""
    missing = len(leads) + trailing - tensor.dim()
    return tensor[(None,) * missing] if missing > 0 else tensor


def _distance_terms(
    query: Tensor,
    keys: int,
    leads: torch.Size,
    query_pos: Tensor | None,
    key_pos: Tensor | None,
    rate: Tensor | float | None,
    period: Sequence[float] | None,
    radius: Tensor | float | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Positions, rate and radius, checked and with an axis for each leading dimension of query."""
    checks.check_positions(query_pos, key_pos, query, leads, keys)
    assert query_pos is not None and key_pos is not None
    if rate is None and radius is None:
        raise ValueError(f"{checks.OP}: rate or radius must be given with query_pos and key_pos, got neither")
    if period is not None:
        shared.check_period(checks.OP, period, query_pos.shape[-1])
    dtype = accumulation_dtype(query.dtype)
    if rate is not None:
        if isinstance(rate, (int, float)):
            rate = torch.full((), rate, dtype=dtype, device=query.device)
        checks.check_rate(rate, query, leads)
        rate = _with_leads(rate.to(dtype), leads, 0)
    # Positions keep a longer type than query's: far from 0 their differences would drown in its rounding.
    longer = torch.promote_types(torch.promote_types(query_pos.dtype, key_pos.dtype), dtype)
    if radius is not None:
        checks.check_radius(radius, query, leads)
        if not isinstance(radius, Tensor):
            radius = torch.full((1,), radius, dtype=longer, device=query.device)
        radius = _with_leads(_before_heads(radius.detach().to(longer), leads, 1), leads, 1)
        radius = radius.expand(*radius.shape[:-1], query.shape[-2])
    positions = [_with_leads(_before_heads(p.to(longer), leads, 2), leads, 2) for p in (query_pos, key_pos)]
    return positions[0], positions[1], rate, radius


def _before_heads(tensor: Tensor, leads: torch.Size, trailing: int) -> Tensor:
    """Insert an axis for the heads after the batch dimensions."""
    return tensor.unsqueeze(-1 - trailing) if len(leads) > 0 else tensor
