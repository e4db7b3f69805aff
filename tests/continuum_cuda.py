"""What the tests of continuum attention's CUDA kernels share.

Marked gpu; under Triton's interpreter the same tests run on CPU tensors (test_triton_interpreter.py).
"""

from __future__ import annotations

import importlib

import helpers
import pytest
import torch
from helpers import draw, lse_dtype
from triton_support import INTERPRETED, interpret, kernels

import continuum_ops as co

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
LIBRARY = interpret() if INTERPRETED else None
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
on_gpu_only = pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Place(torch.autograd.Function):
    """To the device with storage and strides as they are: slices, expanded and permuted tensors stay such."""

    @staticmethod
    def forward(ctx, tensor):
        storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        moved = storage.to(DEVICE)
        return moved.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    @staticmethod
    def backward(ctx, grad):
        return grad.cpu()


def place(value):
    return Place.apply(value) if isinstance(value, torch.Tensor) and DEVICE.type != "cpu" else value


def attend(*args, **options):
    out, lse = co.continuum_attention(
        *map(place, args), **{name: place(v) for name, v in options.items()}, return_lse=True
    )
    return out.cpu(), lse.cpu()


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr(helpers, "attend", attend)
    monkeypatch.setattr(kernels(), "SPLIT_FROM", 0)  # float32 by parts, however small the problem
    launches = []
    if INTERPRETED:  # the kernels, not the chunked path, are what is tested here
        monkeypatch.setattr(importlib.import_module("triton_interpreter"), "tf32_parts", True)
        kernel = kernels()
        for name in ("forward", "backward"):
            original = getattr(kernel, name)
            monkeypatch.setattr(kernel, name, lambda *a, f=original, n=name: (launches.append(n), f(*a))[1])
    return launches


def check(*args, **options):
    return helpers.check(*args, **options)


def results(query, key, value, weights=None, **options):
    """Outputs and gradients for fixed cotangents."""
    leads = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    grad_out = draw((*leads, query.shape[-2], value.shape[-1]), query.dtype, 21)
    grad_lse = draw((*leads, query.shape[-2]), lse_dtype(query.dtype), 22)
    mask = options.pop("attn_mask", None)
    distance = [options.pop(name, None) for name in ("query_pos", "key_pos", "rate")]
    tensors = [query, key, value, weights, mask, *distance]
    return helpers.run(attend, tensors, grad_out, grad_lse, **options)


def assert_same(a, b):
    for name, value in a.items():
        torch.testing.assert_close(
            value, b[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
