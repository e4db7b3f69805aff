"""Continuum attention on CUDA tensors: Triton kernels, chunked PyTorch for what they do not take."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..backends import triton_kernels, warn_without_triton
from ._continuum_attention_autograd import _backward, _forward
from ._library import LIBRARY


def _serves(query: Tensor, value: Tensor, seed: Tensor | None) -> bool:
    if not triton_kernels()[0]:
        warn_without_triton()
        return False
    if seed is not None and seed.numel() > 1:  # the kernels drop by the places 0, 1, 2, ...
        return False
    from ..kernels import continuum_attention as kernel

    return kernel.serves(query, value)


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not _serves(args[0], args[2], args[9]):
        return _forward(*args)
    from ..kernels import continuum_attention as kernel

    return kernel.forward(*args)


def backward(*args: Any) -> tuple[Tensor, ...]:
    if not _serves(args[2], args[4], args[11]):
        return _backward(*args)
    from ..kernels import continuum_attention as kernel

    return kernel.backward(*args)


LIBRARY.impl("continuum_attention_forward", forward, "CUDA")
LIBRARY.impl("continuum_attention_backward", backward, "CUDA")
