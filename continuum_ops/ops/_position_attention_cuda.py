"""Position attention on CUDA tensors: the C++ library, Triton without it, chunked PyTorch for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backends import cuda_library, triton_kernels, warn_without_triton
from ._library import LIBRARY

_ops = torch.ops.continuum_ops


def _tf32() -> bool:
    """Whether a float32 product may be a TF32 one; else it is three of them, which are as accurate."""
    return torch.get_float32_matmul_precision() != "highest"


def _triton_serves(value: Tensor) -> bool:
    if not triton_kernels()[0]:
        warn_without_triton()
        return False
    from ..kernels import position_attention as kernel

    return kernel.serves(value)


def register(chunked_forward: Callable[..., Any], chunked_backward: Callable[..., Any]) -> None:
    """Register what serves CUDA tensors; the arguments are the operators in PyTorch."""

    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        if cuda_library()[0]:
            return _ops.position_attention_cuda_forward(*args, _tf32())
        if not _triton_serves(args[2]):
            return chunked_forward(*args)
        from ..kernels import position_attention as kernel

        return kernel.forward(*args)

    def backward(*args: Any) -> tuple[Tensor, ...]:
        if cuda_library()[0]:
            return _ops.position_attention_cuda_backward(*args, _tf32())
        if not _triton_serves(args[4]):
            return chunked_backward(*args)
        from ..kernels import position_attention as kernel

        return kernel.backward(*args)

    LIBRARY.impl("position_attention_forward", forward, "CUDA")
    LIBRARY.impl("position_attention_backward", backward, "CUDA")
