"""What a quadrature block calls in place of torch's attention functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention.bias import CausalBias

from ..ops.continuum_attention import continuum_attention
from ._quadrature_blocks import Block
from .multihead_attention import MultiheadAttention


def scaled_dot_product_attention(
    block: Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional's function of this name, by continuum attention if a block has the length."""
    if query.is_nested or key.is_nested or value.is_nested:
        raise ValueError(
            "nested tensors have no one length that quadrature weights could fit: pad them and give "
            "quadrature(weights, mask), or run this model outside of the block"
        )
    w = block.match(key.shape[-2]) if key.dim() >= 2 else None
    if w is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if isinstance(attn_mask, CausalBias):
        raise TypeError(
            "attn_mask must be a bool or float tensor inside a quadrature block, got a CausalBias: pass "
            "is_causal=True, or the mask as a tensor"
        )
    if enable_gqa:
        key, value = _repeat_heads(key, query, "key"), _repeat_heads(value, query, "value")
    w = _fit(w, query, key)
    out = continuum_attention(
        query, key, value, w, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )
    assert isinstance(out, Tensor)
    return out


def _repeat_heads(x: Tensor, query: Tensor, name: str) -> Tensor:
    """Grouped-query attention: consecutive query heads share a head of x."""
    heads, wanted = (t.shape[-3] if t.dim() >= 3 else 1 for t in (x, query))
    if heads == 0 or wanted % heads:
        raise ValueError(f"{name} must have a number of heads that divides query's, {wanted}, got {heads}")
    return x if heads == wanted else x.repeat_interleave(wanted // heads, dim=-3)


def _fit(w: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Weights (M,), (B, M) or (B, H, M) as the operator takes them for such a query and key."""
    leads = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    if w.dim() == 1:
        return w
    # B is the first dimension, H the one before the points; (B, H, M) has no place for dimensions between.
    fits = len(leads) == 2 if w.dim() == 3 else len(leads) >= 1
    own = leads if w.dim() == 3 else leads[:1]
    if not fits or not all(a in (1, b) for a, b in zip(w.shape[:-1], own, strict=True)):
        raise ValueError(
            f"weights of shape {tuple(w.shape)} must be {'(B, M)' if w.dim() == 2 else '(B, H, M)'} of the "
            f"attention call, whose query is {tuple(query.shape)} and key {tuple(key.shape)}"
        )
    return w if w.dim() == 3 else w.view(w.shape[0], *(1,) * (len(leads) - 1), w.shape[1])


class _Layer:
    """What MultiheadAttention.forward reads of its module, over parameters that are arguments of a call."""

    forward: Any = MultiheadAttention.forward
    _check_inputs = MultiheadAttention._check_inputs
    _check_sharded = MultiheadAttention._check_sharded
    _project = MultiheadAttention._project
    _split_heads = MultiheadAttention._split_heads
    _merge_heads = MultiheadAttention._merge_heads
    _canonical_weights = MultiheadAttention._canonical_weights
    _append_keys = MultiheadAttention._append_keys

    def __init__(self, given: dict[str, Any]) -> None:
        self.embed_dim = given["embed_dim_to_check"]
        self.num_heads = given["num_heads"]
        self.head_dim = self.embed_dim // self.num_heads
        self.kdim, self.vdim = given["key"].shape[-1], given["value"].shape[-1]
        self.batch_first = False  # the function, unlike the module, knows one layout
        self._qkv_same_embed_dim = not given["use_separate_proj_weight"]
        self.in_proj_weight, self.in_proj_bias = given["in_proj_weight"], given["in_proj_bias"]
        self.q_proj_weight = given["q_proj_weight"]
        self.k_proj_weight, self.v_proj_weight = given["k_proj_weight"], given["v_proj_weight"]
        self.bias_k, self.bias_v = given["bias_k"], given["bias_v"]
        self.add_zero_attn = given["add_zero_attn"]
        self.dropout, self.training = given["dropout_p"], given["training"]
        self._out_proj = given["out_proj_weight"], given["out_proj_bias"]

    def out_proj(self, x: Tensor) -> Tensor:
        return F.linear(x, *self._out_proj)


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def multi_head_attention_forward(block: Block, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """torch.nn.functional's function of this name, by this package's layer if a block has the length.

    Torch's own would call scaled_dot_product_attention with the appended keys already there, and with
    need_weights=True not at all.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    w = block.match(given["key"].shape[0])
    if w is None:
        return F.multi_head_attention_forward(*args, **kwargs)
    for name in ("static_k", "static_v"):
        if given[name] is not None:
            raise ValueError(f"{name} must be None inside a quadrature block of the length of key")
    passed_on = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    return _Layer(given).forward(
        given["query"], given["key"], given["value"], weights=w, **{name: given[name] for name in passed_on}
    )


def _backward(
    block: Block,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """torch.autograd.backward with the block on the stack, for checkpointed layers that run again there.

    Gradient edges instead of tensors, since torch does not pass a call without tensors to modes: it would
    take the block off the stack for the time of the call.
    """
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
    edges = _edges(tensors)
    if inputs is not None or edges is None:
        torch.autograd.backward(tensors, grad_tensors, **options)
        return
    with block:
        torch.autograd.backward(edges, grad_tensors, **options)


def _tensor_backward(
    block: Block,
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    _backward(block, tensor, gradient, retain_graph, create_graph, inputs)


def _grad(block: Block, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad likewise."""
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    starts, ends = _edges(outputs), _edges(inputs)
    if starts is None or ends is None or kwargs.get("materialize_grads", False):
        return torch.autograd.grad(outputs, inputs, *args, **kwargs)
    with block:
        return torch.autograd.grad(starts, ends, *args, **kwargs)


def _edges(tensors: Sequence[Any]) -> list[GradientEdge] | None:
    """None where there is no such edge, which torch then says in its own words."""
    if any(isinstance(t, Tensor) and not t.requires_grad for t in tensors):
        return None
    return [get_gradient_edge(t) if isinstance(t, Tensor) else t for t in tensors]


ANSWERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.multi_head_attention_forward: multi_head_attention_forward,
    torch.autograd.backward: _backward,
    Tensor.backward: _tensor_backward,
    torch.autograd.grad: _grad,
}
"""What a quadrature block calls in place of which function of torch."""
