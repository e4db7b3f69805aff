"""q (k^T W v) with the layer norms of k and v and the coordinates in every head as one operator.

On CUDA tensors Triton kernels read each of k and v once, forward and backward; for other tensors, what the
kernels do not take and second derivatives it is composed of torch's own operators. ``nn.GalerkinAttention``
comes here where CONTINUUM_OPS_FUSED_GALERKIN=1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import FUSED_GALERKIN, triton_kernels, warn_without_triton
from . import _checks as checks
from ._functorch import transforms_active
from ._galerkin_attention_autograd import gram
from ._library import LIBRARY

_ops = torch.ops.continuum_ops
DEVICES = ("cuda",) if FUSED_GALERKIN else ()


class Norm(NamedTuple):
    """Scale and shift (H, D) of a norm over the channels of each head; None for no norm."""

    scale: Tensor | None
    shift: Tensor | None


def no_autocast(tensor: Tensor) -> torch.autocast:
    """It would take the products back to 16 bits."""
    device = tensor.device.type
    return torch.autocast("cpu" if device == "meta" else device, enabled=False)


def chosen(key: Tensor) -> bool:
    """Whether the operator was asked for, and no transform is active that it does not know."""
    return key.device.type in DEVICES and not transforms_active()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pos: Tensor | None,
    weights: Tensor | None,
    key_norm: Norm,
    value_norm: Norm,
    eps: float,
    dropout_p: float,
) -> Tensor:
    """query (B, H, N, P + D), the others as of galerkin_gram but of any floating dtype -> (B, H, N, P + Dv).

    weights: broadcastable to (B, H, M). dropout_p: of the matrix k^T W v.
    """
    if weights is not None:
        checks.check_weights("galerkin_attention", weights, query, key.shape[:-1])
    dtype = torch.promote_types(key.dtype, torch.float32)
    (query,) = checks.autocast(query)
    pos = None if key_pos is None else key_pos.to(dtype)
    w = None if weights is None else weights.to(dtype).reshape((1,) * (3 - weights.dim()) + weights.shape)
    matrix = _ops.galerkin_gram(key, value, pos, w, *key_norm, *value_norm, eps)
    matrix = F.dropout(matrix, dropout_p) if dropout_p > 0.0 else matrix
    with no_autocast(query):
        return (query.to(dtype) @ matrix).to(query.dtype)


# --- in differentiable steps -----------------------------------------------------------------------


class _Rows(NamedTuple):
    """[pos, Ln x] of one side of the product, 0 where the weight is 0, and what its derivative needs."""

    rows: Tensor
    unit: Tensor | None  # (x - mean) / sqrt(variance + eps)
    slope: Tensor | None  # 1 / sqrt(variance + eps)
    scale: Tensor | None

    @staticmethod
    def of(x: Tensor, pos: Tensor | None, scale: Any, shift: Any, eps: float, dead: Tensor | None) -> _Rows:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if dead is not None:  # before the norm: its derivative at NaN would meet the gradient 0
            x = x.masked_fill(dead, 0.0)
        unit = slope = None
        if scale is not None:
            scale = scale.to(x.dtype).unsqueeze(1)
            apart = x - x.mean(-1, keepdim=True)
            slope = (apart.square().mean(-1, keepdim=True) + eps).rsqrt()
            unit = apart * slope
            x = unit * scale + shift.to(x.dtype).unsqueeze(1)
        if pos is not None:
            x = torch.cat([pos.unsqueeze(1).expand(*x.shape[:-1], -1), x], -1)
        return _Rows(x if dead is None else x.masked_fill(dead, 0.0), unit, slope, scale)

    def derivative(self, g: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of x, scale and shift from that of Ln x."""
        if self.unit is None or self.slope is None or self.scale is None:
            return g, None, None
        d = g * self.scale
        level, along = d.mean(-1, keepdim=True), (d * self.unit).mean(-1, keepdim=True)
        return (d - level - self.unit * along) * self.slope, (g * self.unit).sum((0, 2)), g.sum((0, 2))


def _sides(args: Sequence[Any]) -> tuple[_Rows, _Rows]:
    key, value, pos, weights, key_scale, key_shift, value_scale, value_shift, eps = args
    dead = None if weights is None else (weights == 0).unsqueeze(-1)
    k = _Rows.of(key, pos, key_scale, key_shift, eps, dead)
    return k, _Rows.of(value, pos, value_scale, value_shift, eps, dead)


def _composed(*args: Any) -> Tensor:
    with no_autocast(args[0]):
        k, v = _sides(args)
        return gram(k.rows, v.rows, args[3])


def _composed_derivative(grad: Tensor, *args: Any) -> list[Tensor | None]:
    """The gradient of each tensor, differentiable itself.

    With a, b the rows of both sides of a point and G = grad: da = w G b, db = w G^T a, dw = a . G b.
    """
    key, _, pos, weights = args[:4]
    with no_autocast(key):
        a, b = _sides(args)
        t, u = b.rows @ grad.mT, a.rows @ grad
        of_weights = None
        if weights is None:
            w = t.new_tensor(1.0 / max(key.shape[-2], 1))
        else:
            of_weights = (a.rows * t).sum(-1).sum_to_size(weights.shape)
            w = weights + _ops.check_weights(weights.detach())
            w = w.unsqueeze(-1)
        t, u = w * t, w * u
        p = 0 if pos is None else pos.shape[-1]
        of_pos = None if pos is None else (t[..., :p] + u[..., :p]).sum(1)
        of_key, *of_key_norm = a.derivative(t[..., p:])
        of_value, *of_value_norm = b.derivative(u[..., p:])
        grads = (of_key, of_value, of_pos, of_weights, *of_key_norm, *of_value_norm)
        return [
            None if g is None else g.sum_to_size(x.shape).to(x.dtype)
            for g, x in zip(grads, args[:8], strict=True)
        ]


def _composed_backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """With the strides of the fake."""
    *inputs, needs = args
    grads = _composed_derivative(grad, *inputs)
    return tuple(
        torch.empty_like(t).copy_(g) if need and g is not None else grad.new_empty(0)
        for g, t, need in zip(grads, inputs[:-1], needs, strict=True)
    )


# --- CUDA tensors ----------------------------------------------------------------------------------


def _kernel(key: Tensor, value: Tensor, pos: Tensor | None) -> Any:
    """The module of the kernels, or None where they do not serve."""
    if not triton_kernels()[0]:
        warn_without_triton()
        return None
    from ..kernels import galerkin_attention as kernel

    return kernel if kernel.serves(key, value, pos) else None


def cuda(*args: Any) -> Tensor:
    kernel = _kernel(*args[:3])
    return _composed(*args) if kernel is None else kernel.forward(*args)


def cuda_backward(*args: Any) -> tuple[Tensor, ...]:
    kernel = _kernel(*args[1:4])
    return _composed_backward(*args) if kernel is None else kernel.backward(*args)


LIBRARY.impl("galerkin_gram", _composed, "CompositeExplicitAutograd")
LIBRARY.impl("galerkin_gram_backward", _composed_backward, "CompositeExplicitAutograd")
LIBRARY.impl("galerkin_gram", cuda, "CUDA")
LIBRARY.impl("galerkin_gram_backward", cuda_backward, "CUDA")

# --- shapes and derivatives ------------------------------------------------------------------------


@torch.library.register_fake("continuum_ops::galerkin_gram", lib=LIBRARY)
def _(key: Tensor, value: Tensor, pos: Tensor | None, *rest: Any) -> Tensor:
    p = 0 if pos is None else pos.shape[-1]
    shape = (*key.shape[:2], p + key.shape[-1], p + value.shape[-1])
    return key.new_empty(shape, dtype=torch.promote_types(key.dtype, torch.float32))


@torch.library.register_fake("continuum_ops::galerkin_gram_backward", lib=LIBRARY)
def _(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *tensors, _, needs = args
    return tuple(
        torch.empty_like(t) if need else grad.new_empty(0) for t, need in zip(tensors, needs, strict=True)
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-1])
    ctx.eps = inputs[-1]


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Norms are taken anew, so that none is held from the forward to the backward pass."""
    tensors, needs = ctx.saved_tensors, list(ctx.needs_input_grad[:-1])
    if torch.is_grad_enabled():
        return (*_composed_derivative(grad, *tensors, ctx.eps), None)
    grads = _ops.galerkin_gram_backward(grad, *tensors, ctx.eps, needs)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None)


torch.library.register_autograd(
    "continuum_ops::galerkin_gram", _derivative, setup_context=_setup, lib=LIBRARY
)
