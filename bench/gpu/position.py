"""position_attention: this package, SDPA with the distance as channels, FlexAttention with it as score_mod.

Scattered points of the unit square, one mesh for a batch of four; gradients of value and rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import continuum_ops as co

from .attention import compiled
from .case import BACKWARD, FORWARD, OURS, PRECISIONS, Case
from .timing import Candidate

NAME = "position_attention"
BATCH, HEADS = 4, 8
SIZES = (4096, 16384, 65536)
CHANNELS = (16, 64)
PARITY_ROWS = 128
PEER_BOUND = (
    1e-3  # float32: |x|^2 - 2 x y + |y|^2 cancels, which is the peers' affair; their errors are shown
)

EFFICIENT = "SDPA efficient, distance channels"
FLEX = "FlexAttention, distance score_mod"


def cases() -> list[Case]:
    main = ("float32", "bfloat16")
    order = [(p, b, 16, 16384) for p in main for b in (FORWARD, BACKWARD)]
    order += [
        (p, b, c, n)
        for n in (65536, 4096, 16384)
        for c in CHANNELS
        for p in main
        for b in (FORWARD, BACKWARD)
    ]
    return [Case(NAME, *fields) for fields in dict.fromkeys(order)]


def names(case: Case) -> list[str]:
    return [OURS, FLEX] if case.precision == "bfloat16" else [OURS, EFFICIENT, FLEX]


def flops(case: Case) -> float:
    """p v for each of the batch; the backward makes p^T g and g v^T besides. Distances are no product."""
    return (2 if case.passes == FORWARD else 6) * case.dim * BATCH


@dataclass(frozen=True)
class Inputs:
    """x, y (N, 2), value (B, H, N, C), rate (H,), weights (N,), grad_out (B, H, N, C); parity rows."""

    x: Tensor
    y: Tensor
    value: Tensor
    rate: Tensor
    weights: Tensor
    grad_out: Tensor
    rows: Tensor


@dataclass(frozen=True)
class CaseInputs:
    x: Inputs
    exact: dict[str, Tensor]


def make_inputs(n: int, channels: int, dtype: torch.dtype, device: torch.device, rows: int) -> Inputs:
    """Rates from 1 to 64 by head: e^-1 is reached at distances of 1 to 1/8, and few tiles are negligible."""
    g = torch.Generator(device).manual_seed(1000 * channels + n)
    x, y = (torch.rand(n, 2, generator=g, device=device) for _ in range(2))
    value, grad_out = (
        torch.randn(BATCH, HEADS, n, channels, generator=g, device=device).to(dtype) for _ in range(2)
    )
    rate = torch.logspace(0, 6, HEADS, base=2.0, device=device)
    weights = (0.5 + torch.rand(n, generator=g, device=device)) / n
    sample = torch.randperm(n, generator=g, device=device)[:rows].sort().values
    return Inputs(x, y, value, rate, weights, grad_out, sample)


def parity_grad_out(x: Inputs) -> Tensor:
    """grad_out, zero outside x.rows."""
    grad_out = torch.zeros_like(x.grad_out)
    grad_out[..., x.rows, :] = x.grad_out[..., x.rows, :]
    return grad_out


def exact(x: Inputs) -> dict[str, Tensor]:
    """out at x.rows and, for parity_grad_out, the gradients of value and rate, in float64, head by head."""
    points, y, log_w = x.x[x.rows].double(), x.y.double(), x.weights.double().log()
    d2 = (points[:, None] - y).square().sum(-1)
    value, grad = x.value.detach().double(), x.grad_out[..., x.rows, :].double()
    out, dvalue = torch.empty_like(grad), torch.empty_like(value)
    drate = torch.empty(HEADS, dtype=torch.float64, device=d2.device)
    for head, rate in enumerate(x.rate.detach().double()):
        p = torch.softmax(log_w - rate * d2, -1)
        out[:, head] = p @ value[:, head]
        dvalue[:, head] = p.T @ grad[:, head]
        delta = (grad[:, head] * out[:, head]).sum(-1, keepdim=True)
        ds = p * (grad[:, head] @ value[:, head].transpose(-1, -2) - delta)
        drate[head] = -(ds * d2).sum()
    return {"out": out, "value": dvalue, "rate": drate}


def inputs(case: Case, device: torch.device) -> CaseInputs:
    x = make_inputs(case.n, case.dim, PRECISIONS[case.precision].dtype, device, PARITY_ROWS)
    found = exact(x)
    if case.passes == FORWARD:
        return CaseInputs(x, {"out": found["out"]})
    return CaseInputs(replace(x, value=x.value.requires_grad_(), rate=x.rate.requires_grad_()), found)


def candidate(name: str, case: Case, inputs: CaseInputs) -> Candidate:
    x, attend = inputs.x, ATTEND[name]

    def call(grad_out: Tensor) -> tuple[Tensor, ...]:
        out = attend(x.x, x.y, x.value, x.rate, x.weights)
        if case.passes == FORWARD:
            return (out,)
        return (out.detach(), *torch.autograd.grad(out, (x.value, x.rate), grad_out))

    def parity() -> dict[str, Tensor]:
        out, *gradients = call(parity_grad_out(x))
        return dict(zip(inputs.exact, (out[..., x.rows, :], *gradients), strict=True))

    bound = PRECISIONS[case.precision].bound
    return Candidate(
        name,
        lambda: call(x.grad_out),
        parity,
        inputs.exact,
        bound if name == OURS else max(bound, PEER_BOUND),
    )


def efficient(x: Tensor, y: Tensor, value: Tensor, rate: Tensor, weights: Tensor) -> Tensor:
    """[2 rate x, 1] . [y, log w - rate |y|^2], the square's centre as origin; rate |x|^2 drops out."""
    x, y = x - 0.5, y - 0.5
    by_head = rate[:, None, None]
    bias = weights.log()[:, None] - by_head * y.square().sum(-1, keepdim=True)  # (H, M, 1)
    query = torch.cat([2 * by_head * x, torch.ones_like(bias)], -1)
    key = torch.cat([y.expand(HEADS, -1, -1), bias], -1)
    query, key = (F.pad(t, (0, 5)).expand(BATCH, -1, -1, -1) for t in (query, key))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, scale=1.0)


def flex(x: Tensor, y: Tensor, value: Tensor, rate: Tensor, weights: Tensor) -> Tensor:
    """Query and key of zeros, 16 channels, the fewest it takes: their product is part of its time."""
    from torch.nn.attention.flex_attention import flex_attention

    log_w, x0, x1, y0, y1 = weights.log(), *x.unbind(-1), *y.unbind(-1)

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        a, b = x0[query] - y0[key], x1[query] - y1[key]
        return score + log_w[key] - rate[head] * (a * a + b * b)

    zeros = value.new_zeros(()).expand(BATCH, HEADS, x.shape[0], 16)
    return flex_attention(zeros.contiguous(), zeros.contiguous(), value, score_mod=score_mod)


ATTEND = {
    OURS: co.position_attention,
    EFFICIENT: efficient,
    FLEX: lambda *tensors: compiled(flex)(*tensors),
}


def small(device: torch.device) -> None:
    """N = 130, 16 and 40 channels, each dtype: forward and backward, two weights zero."""
    for dtype in (torch.float32, torch.bfloat16):
        for channels in (16, 40):
            x = make_inputs(130, channels, dtype, device, rows=130)
            weights = x.weights.index_fill(0, torch.tensor([0, 77], device=device), 0.0)
            wanted = [t.requires_grad_() for t in (x.x, x.y, x.value, x.rate, weights)]
            out, lse = co.position_attention(*wanted, return_lse=True)
            gradients = torch.autograd.grad((out.float() * x.grad_out.float()).sum() + lse.sum(), wanted)
            if not all(t.isfinite().all() for t in (out, lse, *gradients)):
                raise ArithmeticError(f"{NAME}: not finite at N = 130, {channels} channels, {dtype}")
