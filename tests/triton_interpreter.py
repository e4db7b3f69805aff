"""Triton's interpreter made fit for numerical tests: its bfloat16 computes on raw bits, and fp32 to bfloat16
truncates; TF32 operands are neither rounded nor split; triton 3.6 loops fail under numpy >= 2.4. Seen on
triton 3.6.0 and 3.9.0.

TRITON_INTERPRET=1 must be in the environment before triton is imported.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
# Whether "tf32x3" is three products of TF32 parts, as compiled, and not one of float32 numbers.
tf32_parts = False
TWO_OPERANDS = (
    "create_fadd", "create_fmul", "create_fdiv", "create_frem", "create_fsub", "create_minimumf",
    "create_minnumf",
    "create_maximumf", "create_maxnumf", "create_precise_divf",
)  # fmt: skip
ONE_OPERAND = (
    "create_exp", "create_exp2", "create_log", "create_log2", "create_sqrt", "create_rsqrt", "create_sin",
    "create_cos",
    "create_fabs", "create_floor", "create_ceil", "create_erf",
)  # fmt: skip


def _is_bfloat16(handle):
    return isinstance(handle, Handle) and handle.dtype.scalar == tl.bfloat16


def _widened(handle):
    if not _is_bfloat16(handle):
        return handle
    bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
    return Handle(bits.view(np.float32).reshape(handle.data.shape), tl.float32)


def _bfloat16_bits(array):
    """Rounded to nearest even, as the hardware does."""
    array = np.ascontiguousarray(array, dtype=np.float32)
    bits = array.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded).reshape(array.shape)


def _tf32(handle):
    """10 mantissa bits, nearest, as a tensor core reads fp32."""
    if not (isinstance(handle, Handle) and handle.dtype.scalar == tl.float32):
        return handle
    bits = np.ascontiguousarray(handle.data).view(np.uint32)
    rounded = (bits + 0x1000) & np.uint32(0xFFFFE000)
    data = np.where(np.isfinite(handle.data), rounded, bits).view(np.float32)
    return Handle(data.reshape(handle.data.shape), tl.float32)


def _tf32_parts(handle):
    """The nearest TF32 number, and the rest as a tensor core reads it: 10 mantissa bits, cut."""
    hi = _tf32(handle)
    with np.errstate(invalid="ignore"):
        rest = handle.data - hi.data
    cut = rest.view(np.uint32) & np.uint32(0xFFFFE000)
    return hi, Handle(np.where(np.isfinite(rest), cut.view(np.float32), rest), tl.float32)


def _wrap(builder, name, operands):
    original = getattr(builder, name, None)
    if original is None:
        return

    def create(self, *args, **options):
        if not any(_is_bfloat16(x) for x in args[:operands]):
            return original(self, *args, **options)
        result = original(self, *[_widened(x) for x in args[:operands]], *args[operands:], **options)
        if isinstance(result, Handle) and result.dtype.scalar == tl.float32:
            result = Handle(_bfloat16_bits(result.data), tl.bfloat16)
        return result

    setattr(builder, name, create)


def install():
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_bfloat16_installed", False):
        return
    builder._bfloat16_installed = True
    for name in [x for x in dir(builder) if x.startswith("create_")]:
        if name in TWO_OPERANDS or name.startswith("create_fcmp"):
            _wrap(builder, name, 2)
        elif name in ONE_OPERAND:
            _wrap(builder, name, 1)
    for name in ("create_fma", "create_clampf"):
        _wrap(builder, name, 3)

    patch_tensor, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl

    def patch_tensor_with_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def create_dot(self, a, b, acc, precision, *rest):
        a, b = _widened(a), _widened(b)
        if tf32_parts and str(precision).endswith("TF32x3") and a.dtype.scalar == tl.float32:
            (a, a_low), (b, b_low) = _tf32_parts(a), _tf32_parts(b)
            small = dot(self, a_low, b, Handle(np.zeros_like(acc.data), tl.float32), precision, *rest)
            small = dot(self, a, b_low, small, precision, *rest)
            acc = Handle(acc.data + np.where(np.isnan(small.data), np.float32(0), small.data), acc.dtype)
        if str(precision).endswith("TF32"):
            a, b = _tf32(a), _tf32(b)
        result = dot(self, a, b, _widened(acc), precision, *rest)
        return Handle(_bfloat16_bits(result.data), tl.bfloat16) if _is_bfloat16(acc) else result

    def cast_impl(self, source, destination):
        before, after = source.dtype.scalar, destination.scalar
        if before == tl.bfloat16 and after != tl.bfloat16:
            source = _widened(source)
            return source if after == tl.float32 else cast(self, source, destination)
        if after == tl.bfloat16 and before != tl.bfloat16:
            wide = source if before == tl.float32 else cast(self, source, tl.float32)
            return Handle(_bfloat16_bits(wide.data), tl.bfloat16)
        return cast(self, source, destination)

    interpreter._patch_lang_tensor = patch_tensor_with_index
    builder.create_dot, builder.cast_impl = create_dot, cast_impl
