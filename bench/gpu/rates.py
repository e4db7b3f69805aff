"""What the card allows: exponentials, products, bytes per second. Needs Triton and a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .timing import CudaClock

BLOCK, STEPS = 1024, 2048


@triton.jit
def exp2_kernel(x_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Chains of ex2 that stay near their fixed point, 8 of them a thread, so that none waits for itself."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    for _ in range(STEPS):
        x = tl.exp2(-x)
    tl.store(x_ptr + at, x)


def launch_exp2(x: torch.Tensor) -> None:
    exp2_kernel[(x.numel() // BLOCK,)](x, STEPS=STEPS, BLOCK=BLOCK, num_warps=4)


def exp2_rate(clock: CudaClock) -> float:
    x = torch.rand(132 * 64 * BLOCK, device="cuda")
    launch_exp2(x)
    return x.numel() * STEPS / min(clock.seconds(lambda: launch_exp2(x), 1) for _ in range(3))


def matmul_rate(clock: CudaClock, dtype: torch.dtype, setting: str, n: int) -> float:
    torch.set_float32_matmul_precision(setting)
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    c = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=c)

    clock.seconds(product, 2)
    rate = 2.0 * n**3 / min(clock.seconds(product, 4) for _ in range(3))
    torch.set_float32_matmul_precision("highest")
    return rate


def copy_rate(clock: CudaClock, size: int = 2**30) -> float:
    """Bytes read and written by a copy of 1 GiB."""
    a = torch.zeros(size, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    clock.seconds(lambda: b.copy_(a), 2)
    return 2.0 * size / min(clock.seconds(lambda: b.copy_(a), 4) for _ in range(3))


def measurements(clock: CudaClock) -> dict[str, Callable[[], float]]:
    """The best of three each: these are floors."""
    return {
        "ex2_per_s": lambda: exp2_rate(clock),
        "bytes_per_s": lambda: copy_rate(clock),
        "bfloat16_flops": lambda: matmul_rate(clock, torch.bfloat16, "highest", 8192),
        "tf32_flops": lambda: matmul_rate(clock, torch.float32, "high", 8192),
        "float32_flops": lambda: matmul_rate(clock, torch.float32, "highest", 4096),
    }
