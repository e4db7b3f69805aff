"""Patch attention on CUDA tensors: the C++ library, batched BLAS without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backends import cuda_library
from ._library import LIBRARY
from ._patch_attention_chunked import cell_volume

_ops = torch.ops.continuum_ops


def _tf32() -> bool:
    """Whether a float32 product may be a TF32 one; else it is three of them, which are as accurate."""
    return torch.get_float32_matmul_precision() != "highest"


def register(
    pytorch_forward: Callable[..., tuple[Tensor, ...]], pytorch_backward: Callable[..., tuple[Tensor, ...]]
) -> None:
    """Register what serves CUDA tensors; the arguments are the operators in PyTorch."""

    def forward(*args: Any) -> tuple[Tensor, ...]:
        if cuda_library()[0]:
            *inputs, scale = args
            scale = cell_volume(args[0]) if scale is None else scale
            return _ops.patch_attention_cuda_forward(*inputs, scale, _tf32())
        return pytorch_forward(*args)

    def backward(*args: Any) -> tuple[Tensor, ...]:
        if cuda_library()[0]:
            *inputs, scale, needs = args
            scale = cell_volume(args[2]) if scale is None else scale
            return _ops.patch_attention_cuda_backward(*inputs, scale, needs, _tf32())
        return pytorch_backward(*args)

    LIBRARY.impl("patch_attention_forward", forward, "CUDA")
    LIBRARY.impl("patch_attention_backward", backward, "CUDA")
