"""Position attention of CUDA tensors: the registered operators call the CUDA library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import cuda_library
from ._library import LIBRARY

_ops = torch.ops.continuum_ops


def _tf32() -> bool:
    """Whether a float32 product may be a TF32 one; the library's default is three of them, as accurate."""
    return torch.get_float32_matmul_precision() != "highest"


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _ops.position_attention_cuda_forward(*args, _tf32())


def _backward(*args: Any) -> tuple[Tensor, ...]:
    return _ops.position_attention_cuda_backward(*args, _tf32())


if cuda_library()[0]:
    LIBRARY.impl("position_attention_forward", _forward, "CUDA")
    LIBRARY.impl("position_attention_backward", _backward, "CUDA")
