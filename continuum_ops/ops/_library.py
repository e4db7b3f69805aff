"""The registered operators of ``torch.ops.continuum_ops``: every schema, in one place.

``*_forward`` / ``*_backward`` have a kernel for each device; ``*_chunked`` is PyTorch on every device.
Leading dimensions are equal (expanded by the public function); strides are free; outputs are contiguous.
"""

from __future__ import annotations

from torch.library import Library

from ..backends import extension

LIBRARY = Library("continuum_ops", "FRAGMENT")

# The inputs of every operator, in one order: the eight that have gradients, then the others. query, key
# and value have equal leading dimensions (expanded). Positions (*L, 1, N, d), rate (*L, H), radius (*L, 1, N)
# and, of the chunked operator, attn_mask keep their own sizes, 1 or full in every leading dimension: their
# gradients have those sizes, and shared geometry is evaluated once. Weights, positions, rate and radius have
# the accumulation dtype; the chunked operator takes positions and radius in float64 too.
_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? weights, Tensor? attn_mask, Tensor? query_pos, "
    "Tensor? key_pos, Tensor? rate, Tensor? radius, Tensor? seed, float[]? period, "
    "float scale, float dropout_p, bool is_causal"
)
# stats is the kernel's own record of each row (a shift and the denominator relative to it), from which the
# backward recomputes probabilities to full relative accuracy; lse alone is too coarse for logits of 1e4.
LIBRARY.define(f"continuum_attention_forward({_INPUTS}) -> (Tensor out, Tensor lse, Tensor stats)")
# Most users hold weights, positions and rate constant: their gradients are computed only if wanted, and
# of shape (0,) otherwise.
LIBRARY.define(
    "continuum_attention_backward(Tensor grad_out, Tensor? grad_lse, "
    + _INPUTS.replace("Tensor? seed,", "Tensor? seed, Tensor out, Tensor stats,")
    + ", bool weights_grad, bool positions_grad, bool rate_grad) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weights, Tensor grad_query_pos, "
    "Tensor grad_key_pos, Tensor grad_rate)"
)
LIBRARY.define(f"continuum_attention_chunked({_INPUTS}) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    f"continuum_attention_chunked_backward(Tensor grad_out, Tensor? grad_lse, {_INPUTS}, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weights, Tensor grad_attn_mask, "
    "Tensor grad_query_pos, Tensor grad_key_pos, Tensor grad_rate)"
)

extension()  # imports the kernels, whose registrations need the schemas above
