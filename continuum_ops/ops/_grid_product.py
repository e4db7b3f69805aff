"""A Kronecker product of one matrix per axis, applied to values on a grid; a registered operator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import extension
from . import _functorch
from ._library import LIBRARY

# Values handled at a time. On the CPU few enough to stay in the cache between two axes, elsewhere enough to
# fill the device; one sample and head at least.
BLOCK_CPU = 2**18
BLOCK_DEVICE = 2**26


def grid_product(value: Tensor, matrices: list[Tensor], rate: Tensor, weights: list[Tensor] | None) -> Tensor:
    """out_h = (A_h1 x ... x A_hd) v_h for axis matrices A_hi, with keys of weight 0 taken as absent.

    Args:
        value: (B, H or 1, M, C) with M = prod n_i.
        matrices: one (H, m_i, n_i) for each axis, in value's dtype but at least float32.
        rate: (H,), only checked (on the CPU, >= 0).
        weights: one (n_i,) for each axis, checked, and where 0 the value is not looked at; None for ones.

    Returns:
        (B, H, prod m_i, C) in value's dtype.
    """
    if _functorch.transforms_active():
        return _in_transforms(value, matrices, rate, weights or [])
    return torch.ops.continuum_ops.grid_product(value, matrices, rate, weights or [])


def _in_transforms(value: Tensor, matrices: list[Tensor], rate: Tensor, weights: list[Tensor]) -> Tensor:
    """In torch's own operators: the fields of each axis are all that derivatives keep."""
    _functorch.check_nonnegative(rate, "position_attention", "rate", finite=False)
    for i, w in enumerate(weights):
        _functorch.check_nonnegative(w, "position_attention", f"weights[{i}]", finite=True)
    return _compose(value, matrices, weights, look=False)


def check_nonnegative(name: str, tensor: Tensor, *, finite: bool = False) -> None:
    """On the CPU only: elsewhere a look at the values would wait for the device, and NaN comes out."""
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return
    t = tensor.detach()
    if not bool((t >= 0).all()):
        raise ValueError(
            f"position_attention: {name} must be >= 0 and not NaN, got a smallest value of {t.min().item()}"
        )
    if finite and bool(t.isinf().any()):
        raise ValueError(f"position_attention: {name} must be >= 0 and finite, got inf")


def axis_order(matrices: Sequence[Tensor]) -> list[int]:
    """The order of axes with the least work: by 1/n - 1/m, so that axes which shrink come first.

    Axis i (n -> m points) before j costs m_i + m_i m_j / n_i, after it m_j + m_i m_j / n_j, in units of the
    present size; dividing by m_i m_j separates the two.
    """
    return sorted(range(len(matrices)), key=lambda i: 1 / matrices[i].shape[-1] - 1 / matrices[i].shape[-2])


def _compiled(x: Tensor) -> bool:
    return x.device.type == "cpu" and extension()[0] is not None


def _apply(matrix: Tensor, x: Tensor, axis: int, out: Tensor | None = None) -> Tensor:
    """matrix (m, n) times x (b, n_1, ..., n_d, C), contiguous, along one axis: products on views of x."""
    before, columns = math.prod(x.shape[: axis + 1]), math.prod(x.shape[axis + 2 :])
    shape = (*x.shape[: axis + 1], matrix.shape[0], *x.shape[axis + 2 :])
    flat = (before, matrix.shape[0], columns)
    if _compiled(x):
        y = x.new_empty(flat) if out is None else out.view(flat)
        torch.ops.continuum_ops.axis_product(matrix, x.view(before, -1, columns), y)
    elif before == 1:
        y = torch.mm(matrix, x.view(-1, columns), out=None if out is None else out.view(flat[1:]))
    else:
        x = x.view(before, -1, columns)
        y = torch.bmm(matrix.expand(before, *matrix.shape), x, out=None if out is None else out.view(flat))
    return y.view(shape)


def _contract(grad: Tensor, x: Tensor, axis: int) -> Tensor:
    """The gradient of matrix in y = _apply(matrix, x, axis): grad x^T over everything but the axis."""
    if _compiled(x):
        before, columns = math.prod(x.shape[: axis + 1]), math.prod(x.shape[axis + 2 :])
        fields = [t.contiguous().view(before, t.shape[axis + 1], columns) for t in (grad, x)]
        return torch.ops.continuum_ops.axis_contraction(*fields)
    rows = [t.movedim(axis + 1, 0).reshape(t.shape[axis + 1], -1) for t in (grad, x)]
    return rows[0] @ rows[1].mT


class _Problem:
    """Shapes, blocks and dead keys, shared by the forward and the backward."""

    def __init__(self, value: Tensor, matrices: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self.value, self.dtype = value, matrices[0].dtype
        self.matrices = [m.detach() for m in matrices]
        self.order = axis_order(matrices)
        self.key_shape = [m.shape[-1] for m in matrices]
        self.query_shape = [m.shape[-2] for m in matrices]
        self.heads = matrices[0].shape[0]
        self.dead = dead_keys(weights)

    def blocks(self) -> Iterator[tuple[int, int]]:
        batch, size = self.value.shape[0], max(math.prod(self.key_shape), math.prod(self.query_shape))
        room = BLOCK_CPU if self.value.device.type == "cpu" else BLOCK_DEVICE
        step = max(1, room // max(1, size * self.value.shape[-1]))
        return ((start, min(batch, start + step)) for start in range(0, batch, step))

    def empty(self) -> bool:
        return self.value.numel() == 0

    def field(self, start: int, stop: int, head: int) -> Tensor:
        """Values (b, n_1, ..., n_d, C) of a block and head, contiguous, without those of dead keys."""
        x = self.value[start:stop, head if self.value.shape[1] > 1 else 0].to(self.dtype)
        x = x.reshape(x.shape[0], *self.key_shape, x.shape[-1]).contiguous()
        return x if self.dead is None else x.masked_fill(self.dead, 0.0)


def dead_keys(weights: Sequence[Tensor], *, look: bool = True) -> Tensor | None:
    """(n_1, ..., n_d, 1), true where a weight is 0. None if none is, which only the CPU looks up."""
    if len(weights) == 0:
        return None
    zero = [w.detach() == 0 for w in weights]
    if look and weights[0].device.type == "cpu" and not any(bool(z.any()) for z in zero):
        return None
    dead = zero[0]
    for z in zero[1:]:
        dead = dead[..., None] | z
    return dead[..., None]


def _forward(value: Tensor, matrices: list[Tensor], rate: Tensor, weights: list[Tensor]) -> Tensor:
    check_nonnegative("rate", rate)
    for i, w in enumerate(weights):
        check_nonnegative(f"weights[{i}]", w, finite=True)
    p = _Problem(value, matrices, weights)
    out = value.new_zeros if p.empty() else value.new_empty
    result = out(value.shape[0], p.heads, math.prod(p.query_shape), value.shape[-1])
    if p.empty():
        return result
    with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
        for start, stop in p.blocks():
            for h in range(p.heads):
                x = p.field(start, stop, h)
                target = result[start:stop, h]
                for axis in p.order[:-1]:
                    x = _apply(p.matrices[axis][h], x, axis)
                last = p.matrices[p.order[-1]][h]
                if target.is_contiguous() and target.dtype == p.dtype:
                    _apply(last, x, p.order[-1], out=target)
                else:
                    target.copy_(_apply(last, x, p.order[-1]).view(target.shape))
    return result


def _backward(
    grad_out: Tensor,
    value: Tensor,
    matrices: list[Tensor],
    weights: list[Tensor],
    value_grad: bool,
    matrices_grad: bool,
) -> list[Tensor]:
    """Gradients of value and of each matrix; (0,) for those not asked for."""
    p = _Problem(value, matrices, weights)
    grads = [m.new_zeros(m.shape) if matrices_grad else m.new_empty(0) for m in matrices]
    if p.empty() or not value_grad:
        grad_value = value.new_zeros(value.shape if value_grad else 0)
    else:
        grad_value = value.new_empty(value.shape)
    if p.empty():
        return [grad_value, *grads]
    with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
        for start, stop in p.blocks():
            shared: Tensor | None = None
            for h in range(p.heads):
                g = grad_out[start:stop, h].to(p.dtype)
                g = g.reshape(stop - start, *p.query_shape, g.shape[-1]).contiguous()
                g = _block_backward(p, g, start, stop, h, grads, value_grad, matrices_grad)
                if not value_grad:
                    continue
                if p.dead is not None:
                    g = g.masked_fill(p.dead, 0.0)  # exactly 0 even where grad_out is NaN
                g = g.view(stop - start, -1, g.shape[-1])
                if value.shape[1] > 1:
                    grad_value[start:stop, h] = g
                else:
                    shared = g if shared is None else shared.add_(g)
            if shared is not None:
                grad_value[start:stop, 0] = shared
    return [grad_value, *grads]


def _block_backward(
    p: _Problem,
    g: Tensor,
    start: int,
    stop: int,
    h: int,
    grads: list[Tensor],
    value_grad: bool,
    matrices_grad: bool,
) -> Tensor:
    """Takes g back through the axes, adding the gradients of the matrices on the way."""
    stages: list[Tensor] = []
    if matrices_grad:
        stages.append(p.field(start, stop, h))
        for axis in p.order[:-1]:
            stages.append(_apply(p.matrices[axis][h], stages[-1], axis))
    for axis in reversed(p.order):
        if matrices_grad:
            grads[axis][h] += _contract(g, stages.pop(), axis)
        if value_grad or axis != p.order[0]:
            g = _apply(p.matrices[axis][h].mT, g, axis)
    return g


def _compose(
    value: Tensor, matrices: Sequence[Tensor], weights: Sequence[Tensor], *, look: bool = True
) -> Tensor:
    """The same product in differentiable steps, for second derivatives."""
    dead = dead_keys(weights, look=look)
    x = value.to(matrices[0].dtype).unflatten(2, [m.shape[-1] for m in matrices])
    if dead is not None:
        x = x.masked_fill(dead, 0.0)
    for axis in axis_order(matrices):
        shape = x.shape
        flat = x.reshape(
            *shape[:2], math.prod(shape[2 : axis + 2]), shape[axis + 2], math.prod(shape[axis + 3 :])
        )
        matrix = matrices[axis]
        flat = flat.expand(-1, matrix.shape[0], -1, -1, -1)
        x = torch.einsum("hmn,bhpns->bhpms", matrix, flat)
        x = x.reshape(shape[0], matrix.shape[0], *shape[2 : axis + 2], matrix.shape[1], *shape[axis + 3 :])
    return x.flatten(2, -2).to(value.dtype)


LIBRARY.impl("grid_product", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("grid_product_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("continuum_ops::grid_product", lib=LIBRARY)
def _(value: Tensor, matrices: list[Tensor], rate: Tensor, weights: list[Tensor]) -> Tensor:
    points = math.prod(m.shape[-2] for m in matrices)
    return value.new_empty(value.shape[0], matrices[0].shape[0], points, value.shape[-1])


@torch.library.register_fake("continuum_ops::grid_product_backward", lib=LIBRARY)
def _(
    grad_out: Tensor,
    value: Tensor,
    matrices: list[Tensor],
    weights: list[Tensor],
    value_grad: bool,
    matrices_grad: bool,
) -> list[Tensor]:
    grads = [m.new_empty(m.shape if matrices_grad else 0) for m in matrices]
    return [value.new_empty(value.shape if value_grad else 0), *grads]


@torch.library.register_fake("continuum_ops::axis_product", lib=LIBRARY)
def _(matrix: Tensor, x: Tensor, out: Tensor) -> None:
    return None


@torch.library.register_fake("continuum_ops::axis_contraction", lib=LIBRARY)
def _(grad: Tensor, x: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[1], x.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    value, matrices, _, weights = inputs
    ctx.save_for_backward(value, *matrices, *weights)
    ctx.axes = len(matrices)


def _derivative(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    value, *tensors = ctx.saved_tensors
    matrices, weights = tensors[: ctx.axes], tensors[ctx.axes :]
    needs = (ctx.needs_input_grad[0], any(ctx.needs_input_grad[1]))
    grads = torch.ops.continuum_ops.grid_product_backward(grad_out, value, matrices, weights, *needs)
    wanted = grads[1:] if needs[1] else [None] * ctx.axes
    return grads[0] if needs[0] else None, wanted, None, [None] * len(weights)


torch.library.register_autograd("continuum_ops::grid_product", _derivative, setup_context=_setup, lib=LIBRARY)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    grad_out, value, matrices, weights, *needs = inputs
    ctx.save_for_backward(grad_out, value, *matrices, *weights)
    ctx.axes, ctx.needs = len(matrices), needs


def _second_derivative(ctx: Any, grad_grads: list[Tensor | None]) -> tuple[Any, ...]:
    """Through `_compose`, under autograd: memory for a few fields, as the axes are done one by one."""
    saved = ctx.saved_tensors  # read once: activation checkpointing hands each out once
    constants = [None] * (len(saved) - 2 - ctx.axes)
    create_graph = torch.is_grad_enabled()  # a third derivative is then wanted, and is had in the same way
    with torch.enable_grad(), torch.autocast(saved[0].device.type, enabled=False):
        inputs = [partial(t) for t in saved[: 2 + ctx.axes]]
        grad_out, value, *matrices = inputs
        out = _compose(value, matrices, saved[2 + ctx.axes :])
        first = torch.autograd.grad(out, [value, *matrices], grad_out, create_graph=True)
        wanted = [ctx.needs[0]] + [ctx.needs[1]] * ctx.axes
        pairs = [
            (f, g) for f, g, want in zip(first, grad_grads, wanted, strict=True) if want and g is not None
        ]
        if not pairs:
            return None, None, [None] * ctx.axes, constants, None, None
        second = torch.autograd.grad(
            [f for f, _ in pairs],
            inputs,
            [g for _, g in pairs],
            allow_unused=True,
            create_graph=create_graph,
        )
    return second[0], second[1], list(second[2:]), constants, None, None


def partial(t: Tensor) -> Tensor:
    """t as a variable of its own: derivatives with respect to it do not see what t was computed from."""
    return t.view_as(t) if t.requires_grad else t.detach().requires_grad_()


torch.library.register_autograd(
    "continuum_ops::grid_product_backward", _second_derivative, setup_context=_setup_backward, lib=LIBRARY
)


# Inside transforms the public function takes torch's operators; these rules are for direct calls.
@torch.library.register_vmap("continuum_ops::grid_product", lib=LIBRARY)
def _(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return _functorch.one_by_one(torch.ops.continuum_ops.grid_product, info, in_dims, args)


@torch.library.register_vmap("continuum_ops::grid_product_backward", lib=LIBRARY)
def _(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return _functorch.one_by_one(torch.ops.continuum_ops.grid_product_backward, info, in_dims, args)
