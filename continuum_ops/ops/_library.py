"""The registered operators of ``torch.ops.continuum_ops``: every schema, in one place.

``*_forward`` / ``*_backward`` have a kernel for each device; ``*_chunked`` is PyTorch on every device.
Leading dimensions are equal (expanded by the public function); strides are free; outputs are contiguous.
"""

from __future__ import annotations

from torch.library import Library

from ..backends import extension

LIBRARY = Library("continuum_ops", "FRAGMENT")

# stats is the kernel's own record of each row (a shift and the denominator relative to it), from which the
# backward recomputes probabilities to full relative accuracy; lse alone is too coarse for logits of 1e4.
LIBRARY.define(
    "continuum_attention_forward("
    "Tensor query, Tensor key, Tensor value, Tensor? weights, Tensor? attn_mask, Tensor? seed, "
    "float scale, float dropout_p, bool is_causal) -> (Tensor out, Tensor lse, Tensor stats)"
)
# weights are constants for most users: their gradient, of shape (0,) otherwise, is computed if weights_grad.
LIBRARY.define(
    "continuum_attention_backward("
    "Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor? weights, "
    "Tensor? attn_mask, Tensor? seed, Tensor out, Tensor stats, "
    "float scale, float dropout_p, bool is_causal, bool weights_grad) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weights)"
)
# attn_mask, positions, rate and radius keep their own sizes (1 or full in every leading dimension): their
# gradients have those sizes, and shared geometry is evaluated once.
_CHUNKED = (
    "Tensor query, Tensor key, Tensor value, Tensor? weights, Tensor? attn_mask, Tensor? query_pos, "
    "Tensor? key_pos, Tensor? rate, Tensor? seed, Tensor? radius, float[]? period, "
    "float scale, float dropout_p, bool is_causal"
)
LIBRARY.define(f"continuum_attention_chunked({_CHUNKED}) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    f"continuum_attention_chunked_backward(Tensor grad_out, Tensor? grad_lse, {_CHUNKED}, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weights, Tensor grad_attn_mask, "
    "Tensor grad_query_pos, Tensor grad_key_pos, Tensor grad_rate)"
)

# Both linear operators: q (k^T W v) of torch's products. Its weights are looked at by an operator of its own.
LIBRARY.define("galerkin_attention(Tensor query, Tensor key, Tensor value, Tensor? weights) -> Tensor")
LIBRARY.define("check_weights(Tensor weights) -> Tensor")

extension()  # imports the kernels, whose registrations need the schemas above
