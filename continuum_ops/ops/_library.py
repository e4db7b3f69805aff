"""The registered operators of ``torch.ops.continuum_ops``: every schema, in one place.

``*_forward`` / ``*_backward`` have a kernel for each device; ``*_chunked`` is PyTorch on every device.
Leading dimensions are equal (expanded by the public function); strides are free; outputs are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.library import Library, fallthrough_kernel

from ..backends import extension
from ._memory import explained


class _Explained(Library):
    """Implementations in PyTorch say what they were doing where memory runs out."""

    def impl(self, op_name: str, fn: Callable[..., Any], dispatch_key: str = "", **options: Any) -> None:  # type: ignore[override]
        if fn is not fallthrough_kernel:  # torch knows that one by its identity
            fn = explained(op_name, fn)
        super().impl(op_name, fn, dispatch_key, **options)


LIBRARY = _Explained("continuum_ops", "FRAGMENT")

# The inputs of every operator, in one order: the eight that have gradients, then the others. query, key
# and value have equal leading dimensions (expanded). Positions (*L, 1, N, d), rate (*L, H), radius (*L, 1, N)
# and, of the chunked operator, attn_mask keep their own sizes, 1 or full in every leading dimension: their
# gradients have those sizes, and shared geometry is evaluated once. Weights, positions, rate and radius have
# the accumulation dtype; the chunked operator takes positions and radius in float64 too. seed: int64 (1,), or
# of a part of the queries and keys (1 + N + M,): the seed, and the places in the whole that scores drop by.
_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? weights, Tensor? attn_mask, Tensor? query_pos, "
    "Tensor? key_pos, Tensor? rate, Tensor? radius, Tensor? seed, float[]? period, "
    "float scale, float dropout_p, bool is_causal"
)
# stats is the kernel's own record of each row (a shift and the denominator relative to it), from which the
# backward recomputes probabilities to full relative accuracy; lse alone is too coarse for logits of 1e4.
LIBRARY.define(f"continuum_attention_forward({_INPUTS}) -> (Tensor out, Tensor lse, Tensor stats)")
# *_plain: kernels of the CPU for arguments as users pass them (see _direct): forward without what only a
# derivative needs, forward, backward. Here leading dimensions broadcast, gradients have all of them, and no
# scale stands for 1 / sqrt(D).
_PLAIN = "Tensor query, Tensor key, Tensor value, Tensor? weights"
_DEFAULTS = "float? scale=None, bool is_causal=False"  # most calls save the time that an argument takes
LIBRARY.define(f"continuum_attention_plain({_PLAIN}, {_DEFAULTS}) -> Tensor")
LIBRARY.define(f"continuum_attention_plain_forward({_PLAIN}, {_DEFAULTS}) -> (Tensor out, Tensor stats)")
# The backward of each computes again what it is not given of the forward's results.
LIBRARY.define(
    f"continuum_attention_plain_backward(Tensor grad_out, {_PLAIN}, Tensor? out, Tensor? stats, "
    "float? scale, bool is_causal, bool weights_grad) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weights)"
)
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

# Positions (P, N, d) and (P, M, d), P = 1 or B, float32 or float64; value (B, HV, M, C), HV = 1 or H; rate
# (H,), weights (W, M), radius (R, N) in the accumulation dtype, W and R = 1 or B. out (B, H, N, C); lse
# (G, H, N) and stats (G, H, N, 2, on CUDA 3), G = 1 where positions, weights and radius are shared by the
# batch, else B. What stats holds is the backend's own affair: its backward reads it. Positions of float64
# beside a narrower value: their differences are as accurate as float32 can hold.
_POSITION = "Tensor query_pos, Tensor key_pos, Tensor value, Tensor rate, Tensor? weights"
_POSITION_GRADS = (
    "(Tensor grad_query_pos, Tensor grad_key_pos, Tensor grad_value, Tensor grad_rate, Tensor grad_weights)"
)
LIBRARY.define(
    f"position_attention_forward({_POSITION}, Tensor? radius, float[]? period) "
    "-> (Tensor out, Tensor lse, Tensor stats)"
)
# As users pass them: (N, d) and (M, d) or (B, N, d) and (B, M, d), (B, M, C) or (B, H, M, C), (H,), (M,) or
# (B, M).
LIBRARY.define(f"position_attention_plain({_POSITION}) -> Tensor")
LIBRARY.define(f"position_attention_plain_forward({_POSITION}) -> (Tensor out, Tensor stats)")
LIBRARY.define(
    f"position_attention_plain_backward(Tensor grad_out, {_POSITION}, Tensor? out, Tensor? stats, "
    f"bool[] needs) -> {_POSITION_GRADS}"
)
# needs: one for each of the first five inputs; gradients that are not needed have shape (0,).
LIBRARY.define(
    f"position_attention_backward(Tensor grad_out, Tensor? grad_lse, {_POSITION}, Tensor out, Tensor lse, "
    f"Tensor stats, Tensor? radius, float[]? period, bool[] needs) -> {_POSITION_GRADS}"
)
LIBRARY.define(
    f"position_attention_chunked({_POSITION}, Tensor? radius, float[]? period) -> (Tensor out, Tensor lse)"
)
LIBRARY.define(
    f"position_attention_chunked_backward(Tensor grad_out, Tensor? grad_lse, {_POSITION}, Tensor? radius, "
    f"float[]? period, bool[] needs) -> {_POSITION_GRADS}"
)
# The CUDA library's own: as the two above, with tf32, one TF32 product for float32 instead of three.
LIBRARY.define(
    f"position_attention_cuda_forward({_POSITION}, Tensor? radius, float[]? period, bool tf32) "
    "-> (Tensor out, Tensor lse, Tensor stats)"
)
LIBRARY.define(
    f"position_attention_cuda_backward(Tensor grad_out, Tensor? grad_lse, {_POSITION}, Tensor out, "
    "Tensor lse, Tensor stats, Tensor? radius, float[]? period, bool[] needs, bool tf32) "
    f"-> {_POSITION_GRADS}"
)
# A product of one matrix (H, m_i, n_i) per axis of a grid; a list of no weights stands for ones. The
# gradients are those of value and of each matrix.
LIBRARY.define("grid_product(Tensor value, Tensor[] matrices, Tensor rate, Tensor[] weights) -> Tensor")
LIBRARY.define(
    "grid_product_backward(Tensor grad_out, Tensor value, Tensor[] matrices, Tensor[] weights, "
    "bool value_grad, bool matrices_grad) -> Tensor[]"
)
# The compiled kernels of its steps (csrc/axis_product.h), without derivatives: matrix (m, n), of any strides,
# times x (before, n, columns), and the gradient of that matrix.
LIBRARY.define("axis_product(Tensor matrix, Tensor x, Tensor(a!) out) -> ()")
LIBRARY.define("axis_contraction(Tensor grad, Tensor x) -> Tensor")
# Position attention between grids within a radius; weights (M,), eps of the rule d^2 <= r^2 (1 + 8 eps). The
# gradients are those of value, rate, weights ((0,) for None) and each axis.
_WINDOW = (
    "Tensor value, Tensor[] query_axes, Tensor[] key_axes, Tensor rate, Tensor? weights, Tensor radius, "
    "float[] period, float eps"
)
LIBRARY.define(f"window_attention({_WINDOW}) -> (Tensor out, Tensor lse)")
LIBRARY.define(f"window_attention_backward(Tensor grad_out, Tensor grad_lse, {_WINDOW}) -> Tensor[]")
# query (B, *grid, H, D), key (B, *kgrid, H, D), value (B, *kgrid, H, Dv), grids of 1 to 3 axes that
# patch_size divides; weights (W, *grid), W = 1 or B, in the accumulation dtype. out (B, *grid, H, Dv), lse
# (B, H, P) for P patches of queries. probabilities (B, H, P, Pk), in the accumulation dtype, are kept for the
# backward where they have no more elements than query, else of shape (0,): the backward computes them again.
# No scale stands for 1 / (points of grid): a number made of symbolic sizes would be compiled as a constant.
_PATCH = "Tensor query, Tensor key, Tensor value, Tensor? weights"
LIBRARY.define(
    f"patch_attention_forward({_PATCH}, SymInt[] patch_size, float? scale) "
    "-> (Tensor out, Tensor lse, Tensor probabilities)"
)
# needs: one for each of the four inputs; gradients that are not needed have shape (0,).
LIBRARY.define(
    f"patch_attention_backward(Tensor grad_out, Tensor? grad_lse, {_PATCH}, Tensor lse, "
    "Tensor probabilities, SymInt[] patch_size, float? scale, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weights)"
)
# weights (*grid) or (B, *grid), no scale for 1 with weights. size: of a patch along the first axis, and along
# the others where theirs are 0; numbers, since a list of them takes longer than all the other arguments.
_PLAIN_PATCH = (
    "Tensor query, Tensor key, Tensor value, int size, Tensor? weights=None, float? scale=None, "
    "int second=0, int third=0"
)
LIBRARY.define(f"patch_attention_plain({_PLAIN_PATCH}) -> Tensor")
LIBRARY.define(f"patch_attention_plain_forward({_PLAIN_PATCH}) -> (Tensor out, Tensor probabilities)")
LIBRARY.define(
    "patch_attention_plain_backward(Tensor grad_out, Tensor? probabilities, bool[] needs, "
    f"{_PLAIN_PATCH}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weights)"
)
# The CUDA library's own: as patch_attention_forward and _backward, scale never None, with tf32, one TF32
# product for float32 instead of three.
LIBRARY.define(
    f"patch_attention_cuda_forward({_PATCH}, int[] patch_size, float scale, bool tf32) "
    "-> (Tensor out, Tensor lse, Tensor probabilities)"
)
LIBRARY.define(
    f"patch_attention_cuda_backward(Tensor grad_out, Tensor? grad_lse, {_PATCH}, Tensor lse, "
    "Tensor probabilities, int[] patch_size, float scale, bool[] needs, bool tf32) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weights)"
)
# Both linear operators: q (k^T W v) of torch's products. Its weights are looked at by an operator of its own.
LIBRARY.define("galerkin_attention(Tensor query, Tensor key, Tensor value, Tensor? weights) -> Tensor")
LIBRARY.define("check_weights(Tensor weights) -> Tensor")
# [x, Ln k]^T W [x, Ln v] of a layer, (B, H, P + D, P + Dv) in the accumulation dtype: key (B, H, M, D), value
# (B, H, M, Dv), pos (1 or B, M, P) or None, weights (1 or B, 1 or H, M) or None for 1 / M. scale and shift
# (H, D) are of a norm over the channels of a row, None for no norm; pos, weights in the accumulation dtype.
_GRAM = (
    "Tensor key, Tensor value, Tensor? pos, Tensor? weights, Tensor? key_scale, Tensor? key_shift, "
    "Tensor? value_scale, Tensor? value_shift, float eps"
)
LIBRARY.define(f"galerkin_gram({_GRAM}) -> Tensor")
# needs: one for each of the eight tensors; gradients that are not needed have shape (0,).
LIBRARY.define(
    f"galerkin_gram_backward(Tensor grad, {_GRAM}, bool[] needs) "
    "-> (Tensor grad_key, Tensor grad_value, Tensor grad_pos, Tensor grad_weights, Tensor grad_key_scale, "
    "Tensor grad_key_shift, Tensor grad_value_scale, Tensor grad_value_shift)"
)
# The same product in one kernel of the CPU, float32 or float64, leading dimensions and dtypes equal, weights
# that broadcast to (*L, M); its derivative is galerkin_attention's. grad_weights: (*L, M), or (0,) if not
# wanted.
LIBRARY.define("galerkin_attention_small(Tensor query, Tensor key, Tensor value, Tensor? weights) -> Tensor")
LIBRARY.define(
    "galerkin_attention_small_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor? weights, bool weights_grad) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weights)"
)
# A look at values from inside torch.func's transforms: zeros, or an error on the CPU and NaN elsewhere.
LIBRARY.define("check_nonnegative(Tensor values, str op, str name, bool finite) -> Tensor")
LIBRARY.define("quantile_radius(Tensor query_pos, Tensor key_pos, float quantile, float[] period) -> Tensor")
# The kept Fourier modes of each patch, (B, *grid, C) <-> (modes, 2, B, patches, C); see _fourier_patch_modes.
_PATCH_MODES = "SymInt[] patches, SymInt[] points, SymInt[] up, SymInt[] down, bool dense, bool mean"
LIBRARY.define(f"patch_analysis(Tensor u, {_PATCH_MODES}) -> Tensor")
LIBRARY.define(f"patch_synthesis(Tensor modes, {_PATCH_MODES}) -> Tensor")
# The compiled kernels of the two, by tables of cosines and sines (csrc/patch_dft.h); without derivatives.
_PATCH_DFT = "Tensor tables, int[] patches, int[] points, int[] rows"
LIBRARY.define(f"patch_dft(Tensor u, {_PATCH_DFT}) -> Tensor")
LIBRARY.define(f"patch_dft_inverse(Tensor modes, {_PATCH_DFT}) -> Tensor")

extension()  # imports the kernels, whose registrations need the schemas above
