"""Position attention between grids within a radius: blocks of queries against the box of keys around them.

The keys within the radius of a block of queries (a box of indices) lie in a box too, found axis by axis by
bisection. Each pair of boxes is a dense problem: O(N * window) work, memory for one block at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mesh import Grid
from ._functorch import one_by_one
from ._grid_product import check_nonnegative
from ._library import LIBRARY
from ._position_attention_blocks import Block, Inputs, blocks


def window_attention(
    query_grid: Grid,
    key_grid: Grid,
    value: Tensor,
    rate: Tensor,
    weights: Tensor | None,
    radius: Tensor | float,
    period: Sequence[float] | None,
) -> tuple[Tensor, Tensor]:
    """out (B, H, N, C) and lse (B, H, N) of position attention within a radius.

    Args:
        query_grid: grid of N points.
        key_grid: grid of M points.
        value: (B, H or 1, M, C).
        rate: (H,).
        weights: (M,) or None.
        radius: a number or (N,). A key counts if d^2 <= r^2 (1 + 8 eps), with eps of the least precise among
            the coordinates, a radius tensor and the computation (float32, or float64 for float64 values):
            a radius that was rounded to float32 still reaches the key that it was computed from.
        period: None or d numbers.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    eps = max(torch.finfo(t).eps for t in (dtype, query_grid.dtype, key_grid.dtype))
    if isinstance(radius, Tensor):
        eps = max(eps, torch.finfo(radius.dtype).eps)
        radius = radius.detach()
    else:
        radius = torch.full((), radius, dtype=torch.float64, device=value.device)
    out, lse = torch.ops.continuum_ops.window_attention(
        value,
        list(query_grid.axes),
        list(key_grid.axes),
        rate,
        weights,
        radius,
        [math.inf] * key_grid.ndim if period is None else [float(p) for p in period],
        eps,
    )
    return out, lse


def _gather(x: Inputs, fields: Tensor, block: Block) -> list[Tensor | None]:
    """Of each input what a block takes: values (H, W, B C), rate, weights (W,), coordinates by axis."""
    w = None if x.weights is None else x.weights.index_select(0, block.columns).to(x.dtype)
    indices = (*block.queries, *block.keys)
    axes = [a.index_select(0, i).double() for a, i in zip(x.axes, indices, strict=True)]
    return [fields.index_select(1, block.columns), x.rate.to(x.dtype), w, *axes]


def _variables(x: Inputs, fields: Tensor, block: Block) -> list[Tensor | None]:
    """What the results of a block depend on."""
    v, rate, w, *axes = _gather(x, fields, block)
    if v is not None and w is not None:
        v = v.masked_fill((w == 0)[:, None], 0.0)  # may hold NaN
    return [v, rate, w, *axes]


class _Terms(NamedTuple):
    """Of a block: axis differences (T_i, W_i), d2 (T, W), w e^{s - shift} (H, T, W), its sum and shift.

    The sum is 1 and the shift -inf for a row without a key.
    """

    differences: list[Tensor]
    d2: Tensor
    terms: Tensor
    total: Tensor
    shift: Tensor


def _terms(x: Inputs, block: Block, variables: Sequence[Tensor | None]) -> _Terms:
    _, rate, w, *axes = variables
    assert rate is not None
    d = len(x.query_axes)
    differences = []
    d2 = rate.new_zeros(())
    for i, (a, b, period) in enumerate(zip(axes[:d], axes[d:], x.period, strict=True)):
        assert a is not None and b is not None
        difference = a[:, None] - b  # direct, in float64; only the sum over the axes is in x.dtype
        if math.isfinite(period):
            difference = difference - period * (difference / period).round()
        shape = [1] * (2 * d)
        shape[i], shape[d + i] = difference.shape
        d2 = d2 + difference.square().to(x.dtype).view(shape)
        differences.append(difference)
    d2 = d2.reshape(block.rows.numel(), block.columns.numel())
    reach = x.radius if x.radius.dim() == 0 else x.radius[block.rows][:, None]
    outside = d2.detach() > (reach.double().square() * (1 + 8 * x.eps)).to(x.dtype)
    if w is not None:
        outside = outside | (w == 0)
    scores = (-rate[:, None, None] * d2).masked_fill(outside, -math.inf)
    logits, scale = scores.detach(), rate.new_ones(())
    if w is not None:
        # Logarithms of weights near 1 are small, and so is their rounding.
        scale = w.detach().amax()
        scale = torch.where(scale > 0, scale, 1.0)
        w = w / scale
        logits = logits + w.detach().log()
    # The largest term becomes 1 whatever the weights are; a constant of the row, so it has no derivative.
    shift = logits.amax(-1, keepdim=True)
    empty = shift == -math.inf
    terms = (scores - shift.masked_fill(empty, 0.0)).exp()
    if w is not None:
        terms = terms * w
    total = torch.where(empty, 1.0, terms.sum(-1, keepdim=True))
    return _Terms(differences, d2, terms, total, shift + scale.log())


def _attend(x: Inputs, block: Block, variables: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Output (H, T, B C) and lse (H, T) of a block; differentiable as often as wanted."""
    _, _, terms, total, shift = _terms(x, block, variables)
    v = variables[0]
    assert v is not None
    return _product(terms, v) / total, (shift + total.log()).squeeze(-1)


def _attend_nonfinite(x: Inputs, block: Block, variables: Sequence[Tensor | None]) -> Tensor:
    """Output for values with NaN or Inf, which only the queries within reach may see: 0 * NaN is NaN."""
    v = variables[0]
    assert v is not None
    finite = v.isfinite()
    out, _ = _attend(x, block, [v.masked_fill(~finite, 0.0), *variables[1:]])
    counted = (_terms(x, block, variables).terms > 0).to(x.dtype)
    for kind, found in ((math.inf, v == math.inf), (-math.inf, v == -math.inf), (math.nan, v.isnan())):
        out = torch.where(_product(counted, found.to(x.dtype)) > 0, out + kind, out)
    return out


def _product(a: Tensor, b: Tensor) -> Tensor:
    """(H, T, K) @ (H or 1, K, L), the shared case as one product."""
    return (a.flatten(0, 1) @ b[0]).unflatten(0, a.shape[:2]) if b.shape[0] == 1 else a @ b


def _block_gradients(
    x: Inputs, block: Block, variables: Sequence[Tensor | None], grad_out: Tensor, grad_lse: Tensor
) -> list[Tensor]:
    """Gradients of the variables (without weights: the axes' come after a placeholder)."""
    differences, d2, terms, total, shift = _terms(x, block, variables)
    v, rate, w, *_ = variables
    assert v is not None and rate is not None
    p = terms / total
    grad_p = _product(grad_out, v.mT)
    row = (p * grad_p).sum(-1, keepdim=True)
    row = row - grad_lse[..., None].masked_fill(shift == -math.inf, 0.0)
    grad_scores = p * (grad_p - row)
    shared = v.shape[0] == 1
    grad_v = (p.flatten(0, 1).mT @ grad_out.flatten(0, 1))[None] if shared else p.mT @ grad_out
    grad_w = grad_v.new_empty(0)
    if w is not None:
        grad_w = torch.where(w == 0, 0.0, grad_scores.sum((0, 1)) / w)
    grad_rate = -(grad_scores * d2).sum((1, 2))
    grad_d2 = -(rate[:, None, None] * grad_scores).sum(0)
    grad_d2 = grad_d2.view([index.numel() for index in (*block.queries, *block.keys)])
    d = len(differences)
    moments = []
    for i, difference in enumerate(differences):
        others = [k for k in range(2 * d) if k not in (i, d + i)]
        moments.append(2 * difference * (grad_d2.sum(others) if others else grad_d2))
    return [grad_v, grad_rate, grad_w, *(m.sum(1) for m in moments), *(-m.sum(0) for m in moments)]


def _fields(t: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, H, P, C) as (H, P, B C), contiguous: a point's numbers of all samples side by side."""
    return t.to(dtype).permute(1, 2, 0, 3).flatten(2).contiguous()


def _unfields(t: Tensor, like: torch.Size, dtype: torch.dtype) -> Tensor:
    """Inverse of `_fields` for a tensor of batch and channels as in `like`."""
    x = t.view(*t.shape[:2], like[0], like[-1]).permute(2, 0, 1, 3)
    return torch.empty(x.shape, dtype=dtype, device=t.device).copy_(x)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    x = Inputs(*args)
    for name, tensor in (("rate", x.rate), ("radius", x.radius), ("weights", x.weights)):
        if tensor is not None:
            check_nonnegative(name, tensor, finite=name == "weights")
    rows, channels = math.prod(x.query_shape), x.value.shape[0] * x.value.shape[-1]
    out = x.value.new_zeros(x.rate.numel(), rows, channels, dtype=x.dtype)
    lse = x.value.new_full((x.rate.numel(), rows), -math.inf, dtype=x.dtype)
    with torch.no_grad(), torch.autocast(x.value.device.type, enabled=False):
        fields = _fields(x.value, x.dtype)
        for block in blocks(x):
            variables = _variables(x, fields, block)
            part, lse_part = _attend(x, block, variables)
            if part.device.type == "cpu" and not bool(part.sum().isfinite()):
                part = _attend_nonfinite(x, block, variables)
            out.index_copy_(1, block.rows, part)
            lse.index_copy_(1, block.rows, lse_part)
    lse = lse.expand(x.value.shape[0], *lse.shape).contiguous()
    return _unfields(out, x.value.shape, x.value.dtype), lse


class _Gradients:
    """Sums of the gradients of the blocks' variables, in the precision of the computation."""

    def __init__(self, x: Inputs) -> None:
        heads, batch, channels = x.value.shape[1], x.value.shape[0], x.value.shape[-1]
        self.x = x
        self.value = x.value.new_zeros(heads, math.prod(x.key_shape), batch * channels, dtype=x.dtype)
        self.rate = torch.zeros_like(x.rate, dtype=x.dtype)
        self.weights = None if x.weights is None else torch.zeros_like(x.weights, dtype=x.dtype)
        self.axes = [torch.zeros_like(a, dtype=torch.float64) for a in x.axes]

    def add(self, block: Block, parts: Sequence[Tensor | None]) -> None:
        v, rate, w, *axes = parts
        if v is not None:
            self.value.index_add_(1, block.columns, v)
        if rate is not None:
            self.rate += rate
        if w is not None and self.weights is not None:
            self.weights.index_add_(0, block.columns, w)
        for total, index, part in zip(self.axes, (*block.queries, *block.keys), axes, strict=True):
            if part is not None:
                total.index_add_(0, index, part)

    def result(self) -> list[Tensor]:
        """In the inputs' dtypes, those of keys of weight 0 exactly 0; (0,) for weights that are None."""
        x, w = self.x, self.weights
        if w is None or x.weights is None:
            weights = x.value.new_empty(0)
        else:
            dead = x.weights == 0
            weights = w.masked_fill(dead, 0.0).to(x.weights.dtype)
            self.value = self.value.masked_fill(dead[:, None], 0.0)
        value = _unfields(self.value, x.value.shape, x.value.dtype)
        axes = [g.to(a.dtype) for g, a in zip(self.axes, x.axes, strict=True)]
        return [value, self.rate.to(x.rate.dtype), weights, *axes]


def _cotangents(block: Block, grad_out: Tensor, grad_lse: Tensor) -> list[Tensor]:
    return [grad_out.index_select(1, block.rows), grad_lse.index_select(1, block.rows)]


def _backward(grad_out: Tensor, grad_lse: Tensor, *args: Any) -> list[Tensor]:
    """Gradients of value, rate, weights and each axis."""
    x = Inputs(*args)
    grads = _Gradients(x)
    with torch.no_grad(), torch.autocast(x.value.device.type, enabled=False):
        fields, g_out = _fields(x.value, x.dtype), _fields(grad_out, x.dtype)
        g_lse = grad_lse.to(x.dtype).sum(0)
        for block in blocks(x):
            variables = _variables(x, fields, block)
            grads.add(block, _block_gradients(x, block, variables, *_cotangents(block, g_out, g_lse)))
    return grads.result()


def _double_backward(
    x: Inputs, grad_out: Tensor, grad_lse: Tensor, grad_grads: Sequence[Tensor | None]
) -> list[Tensor]:
    """Gradients of what `_backward` returns with respect to grad_out, grad_lse and its other inputs.

    Each block is computed again and differentiated twice: the memory is that of one block.
    """
    grads = _Gradients(x)
    directions = _directions(x, grad_grads)
    with torch.no_grad(), torch.autocast(x.value.device.type, enabled=False):
        fields, direction_fields, g_out = (_fields(t, x.dtype) for t in (x.value, directions.value, grad_out))
        g_lse = grad_lse.to(x.dtype).sum(0)
        second_out, second_lse = torch.zeros_like(g_out), torch.zeros_like(g_lse)
        for block in blocks(x):
            variables = [
                None if t is None else t.detach().requires_grad_() for t in _variables(x, fields, block)
            ]
            leaves = [t for t in variables if t is not None]
            cotangents = [c.requires_grad_() for c in _cotangents(block, g_out, g_lse)]
            arriving = [d for d in _gather(directions, direction_fields, block) if d is not None]
            with torch.enable_grad():
                results = _attend(x, block, variables)
                first = torch.autograd.grad(results, leaves, cotangents, create_graph=True)
                second = torch.autograd.grad(first, leaves + cotangents, arriving, allow_unused=True)
            places = iter(second)
            grads.add(block, [None if t is None else next(places) for t in variables])
            for total, part in zip((second_out, second_lse), second[len(leaves) :], strict=True):
                if part is not None:
                    total.index_add_(1, block.rows, part)
    return [
        _unfields(second_out, grad_out.shape, grad_out.dtype),
        second_lse.to(grad_lse.dtype).expand(grad_lse.shape).contiguous(),
        *grads.result(),
    ]


def _directions(x: Inputs, grad_grads: Sequence[Tensor | None]) -> Inputs:
    """What arrives for each gradient, in the place of its input: 0 where nothing does."""

    def of(t: Tensor, g: Tensor | None) -> Tensor:
        return torch.zeros_like(t) if g is None else g

    value, rate, weights, *rest = grad_grads
    axes = [of(a, g) for a, g in zip(x.axes, rest, strict=True)]
    d = len(x.query_axes)
    return x._replace(
        value=of(x.value, value),
        rate=of(x.rate, rate),
        weights=None if x.weights is None else of(x.weights, weights),
        query_axes=axes[:d],
        key_axes=axes[d:],
    )


class _DoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Any) -> tuple[Tensor, ...]:
        x, count = options
        return tuple(_double_backward(x, tensors[0], tensors[1], tensors[-count:]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        raise RuntimeError(
            "position_attention with a radius has first and second derivatives; "
            "third derivatives are not implemented"
        )


LIBRARY.impl("window_attention", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("window_attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("continuum_ops::window_attention", lib=LIBRARY)
def _(*args: Any) -> tuple[Tensor, Tensor]:
    x = Inputs(*args)
    rows = (x.value.shape[0], x.rate.numel(), math.prod(x.query_shape))
    return x.value.new_empty(*rows, x.value.shape[-1]), x.value.new_empty(rows, dtype=x.dtype)


@torch.library.register_fake("continuum_ops::window_attention_backward", lib=LIBRARY)
def _(grad_out: Tensor, grad_lse: Tensor, *args: Any) -> list[Tensor]:
    x = Inputs(*args)
    weights = x.value.new_empty(0) if x.weights is None else x.weights.new_empty(x.weights.shape)
    return [t.new_empty(t.shape) for t in (x.value, x.rate, weights, *x.axes)]


def _saved(x: Inputs) -> list[Tensor | None]:
    return [x.value, x.rate, x.weights, x.radius, *x.axes]


def _restored(ctx: Any, tensors: Sequence[Any]) -> Inputs:
    value, rate, weights, radius, *axes = tensors
    d = len(axes) // 2
    return Inputs(value, axes[:d], axes[d:], rate, weights, radius, *ctx.options)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x = Inputs(*inputs)
    ctx.save_for_backward(*_saved(x))
    ctx.options = (x.period, x.eps)


def _derivative(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    x = _restored(ctx, ctx.saved_tensors)
    value, query_axes, key_axes, rate, weights = ctx.needs_input_grad[:5]
    needs = [value, rate, weights, any(query_axes) or any(key_axes)]
    grads = torch.ops.continuum_ops.window_attention_backward(grad_out, grad_lse, *x)
    d = len(x.query_axes)
    axes = (grads[3 : 3 + d], grads[3 + d :]) if needs[3] else ([None] * d, [None] * d)
    first = [g if need else None for g, need in zip(grads[:3], needs[:3], strict=True)]
    return (first[0], *axes, first[1], first[2], None, None, None)


torch.library.register_autograd(
    "continuum_ops::window_attention", _derivative, setup_context=_setup, lib=LIBRARY
)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    grad_out, grad_lse, *rest = inputs
    x = Inputs(*rest)
    ctx.save_for_backward(grad_out, grad_lse, *_saved(x))
    ctx.options = (x.period, x.eps)


def _second_derivative(ctx: Any, grad_grads: list[Tensor | None]) -> tuple[Any, ...]:
    grad_out, grad_lse, *tensors = ctx.saved_tensors
    x = _restored(ctx, tensors)
    result = _DoubleBackward.apply((x, len(grad_grads)), grad_out, grad_lse, *tensors, *grad_grads)
    first, second, value, rate, weights, *axes = result
    d = len(x.query_axes)
    weights = None if x.weights is None else weights
    return (first, second, value, axes[:d], axes[d:], rate, weights, None, None, None)


torch.library.register_autograd(
    "continuum_ops::window_attention_backward",
    _second_derivative,
    setup_context=_setup_backward,
    lib=LIBRARY,
)


# The blocks follow from the coordinates, which the entries of a batch need not share.
@torch.library.register_vmap("continuum_ops::window_attention", lib=LIBRARY)
def _(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return one_by_one(torch.ops.continuum_ops.window_attention, info, in_dims, args)


@torch.library.register_vmap("continuum_ops::window_attention_backward", lib=LIBRARY)
def _(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return one_by_one(torch.ops.continuum_ops.window_attention_backward, info, in_dims, args)
