"""Galerkin attention on NVIDIA GPUs: launches of the kernels that normalise and sum in one pass, and back.

``forward`` and ``backward`` have the arguments and results of the registered operators
``continuum_ops::galerkin_gram`` and ``_backward`` (continuum_ops/ops/_library.py), float64 excepted. Nothing
here waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ._galerkin_attention_kernels import gram_backward_kernel, gram_kernel

__all__ = ["backward", "forward", "serves"]

MAX_WIDTH, MAX_COORDINATES = 256, 3
MIN_CAPABILITY = 80  # TF32 products
# A program sums so many points: short sums lose little (a tensor core truncates what it adds to), long ones
# write little. The short chunks are for problems that would leave the GPU idle otherwise.
POINTS, FEW_POINTS = 1024, 256
PROGRAMS = 512
BLOCK = 128  # columns of key and of value whose product a program of the forward keeps in registers


class Config(NamedTuple):
    tile: int  # points
    num_warps: int
    num_stages: int


# By the padded width of key or value, whichever is wider: forward, backward. Chosen by what ptxas spills
# (tests/test_triton_compile.py has the bounds); not measured on a GPU.
_CONFIGS = {
    16: (Config(32, 2, 2), Config(32, 4, 2)),
    32: (Config(16, 2, 2), Config(16, 4, 2)),
    64: (Config(16, 4, 2), Config(16, 4, 2)),
    128: (Config(16, 8, 2), Config(16, 8, 2)),
    256: (Config(16, 8, 2), Config(16, 8, 1)),
}


class Inputs(NamedTuple):
    """The inputs of the operators, in the order of the schema."""

    key: Tensor
    value: Tensor
    pos: Tensor | None
    weights: Tensor | None
    key_scale: Tensor | None
    key_shift: Tensor | None
    value_scale: Tensor | None
    value_shift: Tensor | None
    eps: float

    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """Batch, heads, points, D, Dv, coordinates."""
        p = 0 if self.pos is None else self.pos.shape[-1]
        return (*self.key.shape, self.value.shape[-1], p)


def serves(key: Tensor, value: Tensor, pos: Tensor | None) -> bool:
    """Whether the kernels take these dtypes, widths and this device."""
    if key.dtype == torch.float64 or max(key.shape[-1], value.shape[-1]) > MAX_WIDTH:
        return False
    if min(key.shape[-1], value.shape[-1]) == 0 or (pos is not None and pos.shape[-1] > MAX_COORDINATES):
        return False
    return capability(key) >= MIN_CAPABILITY


def capability(tensor: Tensor) -> int:
    """10 * major + minor of the device."""
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def points_per_program(leads: int, keys: int) -> int:
    """A function of the sizes alone: the order of a sum does not depend on the GPU."""
    return POINTS if leads * triton.cdiv(keys, POINTS) >= PROGRAMS else FEW_POINTS


def _precision(dtype: torch.dtype) -> str:
    """TF32 holds what 16 bits do, and of their norms more than these were rounded to."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "tf32x3"
    return "tf32"


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tensor.stride()


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _config(x: Inputs, backward: bool) -> Config:
    return _CONFIGS[max(_padded(x.key.shape[-1]), _padded(x.value.shape[-1]))][backward]


def _tensors(x: Inputs) -> tuple[Any, ...]:
    """Each tensor and its strides, coordinates and weights expanded to all leads."""
    batch, heads, keys, _, _, p = x.sizes()
    pos = None if x.pos is None or p == 0 else x.pos.unsqueeze(1).expand(batch, heads, keys, p)
    weights = None if x.weights is None else x.weights.expand(batch, heads, keys)
    tensors = (x.key, x.value, pos, weights, *x[4:8])
    return tuple(part for t in tensors for part in (t, _strides(t)))


def forward(*args: Any) -> Tensor:
    x = Inputs(*args)
    batch, heads, keys, d, dv, p = x.sizes()
    if 0 in (batch, heads, keys):
        return x.key.new_zeros((batch, heads, p + d, p + dv), dtype=torch.float32)
    points = points_per_program(batch * heads, keys)
    chunks = triton.cdiv(keys, points)
    sums = x.key.new_empty((chunks, batch, heads, p + d, p + dv), dtype=torch.float32)
    bd, bdv = min(BLOCK, _padded(d)), min(BLOCK, _padded(dv))
    parts, parts_v = triton.cdiv(d, bd), triton.cdiv(dv, bdv)
    config = _config(x, False)
    gram_kernel[(batch * heads * chunks * parts * parts_v,)](
        *_tensors(x), sums,
        batch * heads, heads, keys, points, chunks, 1.0 / keys if x.weights is None else 1.0, x.eps,
        D=d, DV=dv, P=p, BD=bd, BDV=bdv, PARTS=parts, PARTS_V=parts_v,
        PRECISION=_precision(x.key.dtype), TILE=config.tile,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return sums[0] if chunks == 1 else sums.sum(0)


def backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """A gradient for each tensor of the inputs; (0,) where it is not needed."""
    *inputs, needs = args
    x = Inputs(*inputs)
    batch, heads, keys, d, dv, p = x.sizes()

    def new(*shape: int) -> Tensor:
        return x.key.new_empty(shape, dtype=torch.float32)

    if 0 in (batch, heads, keys):
        return tuple(torch.zeros_like(t) if need else new(0) for t, need in zip(x[:8], needs, strict=True))
    grad_key, grad_value = torch.empty_like(x.key), torch.empty_like(x.value)
    points = points_per_program(batch * heads, keys)
    chunks = triton.cdiv(keys, points)
    grad_pos = new(batch, heads, keys, p) if needs[2] else None
    grad_weights = new(batch, heads, keys) if needs[3] else None
    key_sums = None if x.key_scale is None else new(chunks, batch, heads, 2, d)
    value_sums = None if x.value_scale is None else new(chunks, batch, heads, 2, dv)
    bd, bdv = _padded(d), _padded(dv)
    config = _config(x, True)
    gram_backward_kernel[(batch * heads * chunks,)](
        *_tensors(x), grad.float().contiguous(),
        grad_key, _strides(grad_key), grad_value, _strides(grad_value), grad_pos if p > 0 else None,
        grad_weights, key_sums, value_sums,
        batch * heads, heads, keys, points, chunks, 1.0 / keys if x.weights is None else 1.0, x.eps,
        D=d, DV=dv, P=p, BD=bd, BDV=bdv, SLICE=min(32, bd, bdv),
        PRECISION=_precision(x.key.dtype), TILE=config.tile,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    of_pos = None if grad_pos is None else grad_pos.sum(1)
    of_norms = [
        None if sums is None else sums[..., i, :].sum((0, 1))
        for sums in (key_sums, value_sums)
        for i in (0, 1)
    ]
    summed = [
        new(0) if g is None or t is None else g.sum_to_size(t.shape).to(t.dtype)
        for g, t in zip((of_pos, grad_weights, *of_norms), x[2:8], strict=True)
    ]
    grads = (grad_key, grad_value, *summed)
    return tuple(g if need else new(0) for g, need in zip(grads, needs, strict=True))
