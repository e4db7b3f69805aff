"""continuum_attention: this package, SDPA with log w as a mask or as channels, FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import bench_continuum_attention as script
import torch
import torch.nn.functional as F
from bench_continuum_attention import compiled
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import continuum_ops as co

from .case import BACKWARD, FORWARD, OURS, PRECISIONS, Case
from .timing import Candidate

NAME = "continuum_attention"
HEADS = 8
SIZES = (4096, 16384, 65536, 416 * 416)
DIMS = (16, 32, 64, 128)
PARITY_ROWS = 128

EFFICIENT = "SDPA efficient, log w mask"
FLASH = "SDPA flash, [k, hi, lo] channels"
CUDNN = "SDPA cuDNN, [k, hi, lo] channels"
FLEX = "FlexAttention, score_mod"


def cases() -> list[Case]:
    """d = 16 at 65,536 points first (after a smaller size that shows who is right, and how fast), then its
    largest forward; then the other d, TF32, the smaller sizes, and last the long runs at 173,056 points."""
    main, both, large = ("float32", "bfloat16"), (FORWARD, BACKWARD), SIZES[-1]
    order = [(p, b, 16, n) for n in (16384, 65536) for p in main for b in both]
    order += [(p, FORWARD, 16, large) for p in main]
    order += [(p, b, d, 65536) for b in both for d in (32, 64, 128) for p in main]
    order += [(p, BACKWARD, 16, large) for p in main] + [(p, FORWARD, 32, large) for p in main]
    order += [(p, b, 16, 4096) for p in main for b in both]
    order += [("tf32", b, d, 65536) for b in both for d in DIMS]
    order += [(p, b, d, n) for n in (4096, 16384) for p in (*main, "tf32") for d in DIMS for b in both]
    order += [(p, b, d, large) for d in DIMS for b in both for p in (*main, "tf32")]
    return [Case(NAME, *fields) for fields in dict.fromkeys(order)]


def names(case: Case) -> list[str]:
    if case.precision == "bfloat16":
        return [OURS, FLASH, CUDNN, FLEX]
    return [OURS, EFFICIENT, FLEX]


def flops(case: Case) -> float:
    """Two products forward; with the backward one recomputed and four more, seven in all."""
    return script.COST[case.passes][0] * case.dim


@dataclass(frozen=True)
class CaseInputs:
    x: script.Inputs
    exact: dict[str, Tensor]


def make_inputs(n: int, dim: int, dtype: torch.dtype, device: torch.device, rows: int) -> script.Inputs:
    """Normal query, key, value, grad_out; trapezoid weights of the graded mesh (i / (n - 1))^2, n >= 2."""
    g = torch.Generator(device).manual_seed(1000 * dim + n)
    shape = (1, HEADS, n, dim)
    q, k, v, grad_out = (torch.randn(shape, generator=g, device=device).to(dtype) for _ in range(4))
    points = torch.linspace(0, 1, n, dtype=torch.float64, device=device) ** 2
    count = min(n, rows)
    starts = torch.arange(count + 1, device=device) * n // count
    within = (torch.rand(count, generator=g, device=device) * starts.diff()).long()
    return script.Inputs(q, k, v, co.quadrature.trapezoid(points).float(), grad_out, starts[:-1] + within)


def inputs(case: Case, device: torch.device) -> CaseInputs:
    x = make_inputs(case.n, case.dim, PRECISIONS[case.precision].dtype, device, PARITY_ROWS)
    exact = script.exact(x, weighted=True, chunk_bytes=2**28)
    del exact["weights"]
    if case.passes == FORWARD:
        return CaseInputs(x, {"out": exact["out"]})
    return CaseInputs(x.requiring_grad(weights=False), exact)


def candidate(name: str, case: Case, inputs: CaseInputs) -> Candidate:
    x, attend = inputs.x, ATTEND[name]

    def call(grad_out: Tensor) -> tuple[Tensor, ...]:
        out = attend(x.query, x.key, x.value, x.weights)
        if case.passes == FORWARD:
            return (out,)
        return (out.detach(), *torch.autograd.grad(out, (x.query, x.key, x.value), grad_out))

    def parity() -> dict[str, Tensor]:
        out, *gradients = call(script.parity_grad_out(x))
        return dict(zip(inputs.exact, (out[..., x.rows, :], *gradients), strict=True))

    return Candidate(name, lambda: call(x.grad_out), parity, inputs.exact, PRECISIONS[case.precision].bound)


def efficient(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    mask = w.log().to(q.dtype)[None, None, None].expand(*q.shape[:-1], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, mask)


def channels(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """[q, 1, 1, 0..] . [k, hi, lo, 0..] with hi + lo = log w / scale to twice the digits of the dtype.

    One bfloat16 channel alone would put an error of 2^-9 |log w| into each score. Eight channels are added,
    not two: flash and cuDNN take multiples of eight, and equal head dimensions, so the value is padded too.
    """
    scale = q.shape[-1] ** -0.5
    log_w = (w.log() / scale)[:, None]
    hi = log_w.to(k.dtype)
    lo = (log_w - hi.float()).to(k.dtype)
    extra = torch.cat([hi, lo, torch.zeros_like(hi).expand(-1, 6)], -1).expand(*k.shape[:-1], 8)
    ones = F.pad(torch.ones_like(q[..., :2]), (0, 6))
    extended = torch.cat([q, ones], -1), torch.cat([k, extra], -1), F.pad(v, (0, 8))
    return F.scaled_dot_product_attention(*extended, scale=scale)[..., : v.shape[-1]]


def with_backend(backend: SDPBackend, attend: script.Attention) -> script.Attention:
    """SDPA through this backend alone: it raises where the backend does not take the inputs."""

    def restricted(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return attend(q, k, v, w)

    return restricted


def flex(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    log_w = w.log()

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + log_w[key]

    return flex_attention(q, k, v, score_mod=score_mod)


ATTEND: dict[str, Callable[..., Any]] = {
    OURS: co.continuum_attention,
    EFFICIENT: with_backend(SDPBackend.EFFICIENT_ATTENTION, efficient),
    FLASH: with_backend(SDPBackend.FLASH_ATTENTION, channels),
    CUDNN: with_backend(SDPBackend.CUDNN_ATTENTION, channels),
    FLEX: lambda *tensors: compiled(flex)(*tensors),
}


def small(device: torch.device) -> None:
    """N = 130, d = 16 and 40, each dtype: forward and backward, with weights of which some are zero."""
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (16, 40):
            x = make_inputs(130, dim, dtype, device, rows=130)
            weights = x.weights.index_fill(0, torch.tensor([0, 77], device=device), 0.0)
            x = replace(x.requiring_grad(weights=False), weights=weights.requires_grad_())
            out, lse = co.continuum_attention(x.query, x.key, x.value, x.weights, return_lse=True)
            loss = (out.float() * x.grad_out.float()).sum() + lse.sum()
            gradients = torch.autograd.grad(loss, (x.query, x.key, x.value, x.weights))
            if not all(t.isfinite().all() for t in (out, lse, *gradients)):
                raise ArithmeticError(f"{NAME}: not finite at N = 130, d = {dim}, {dtype}")
