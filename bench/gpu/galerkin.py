"""Norms and products of nn.GalerkinAttention: layer norms and BLAS, the default, or the fused Triton kernels.

B = 1, 8 heads of 32 or 128 channels and two coordinates on n points with quadrature weights; q, k and v are
views of the projections, (B, N, H, D) in memory. The whole output and the gradients of q, k and v are
compared. What ``CONTINUUM_OPS_FUSED_GALERKIN=1`` switches on should be the default if it is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import continuum_ops as co
from continuum_ops.ops import _galerkin_attention_fused as fused

from .case import BACKWARD, FORWARD, OURS, PRECISIONS, Case
from .timing import Candidate

NAME = "galerkin_attention"
HEADS, COORDINATES, EPS = 8, 2, 1e-5
SIZES = (65536, 8192)
DIMS = (32, 128)

FUSED = "fused Triton kernels"


def cases() -> list[Case]:
    main, both = ("float32", "bfloat16", "tf32"), (FORWARD, BACKWARD)
    return [Case(NAME, p, b, d, n) for n in SIZES for d in DIMS for p in main for b in both]


def names(case: Case) -> list[str]:
    return [OURS, FUSED]


def floors(case: Case, rates: Mapping[str, float]) -> dict[str, float]:
    """Bytes that have to be moved over the bandwidth measured, and the products' time; in ms.

    Forward: query, key, value are read, out is written. The backward reads query, key, value, out's gradient
    and writes three gradients.
    """
    bytes_each = HEADS * case.dim * case.n * PRECISIONS[case.precision].dtype.itemsize
    tensors = 4 if case.passes == FORWARD else 11
    found = {}
    if "bytes_per_s" in rates:
        found["memory_floor_ms"] = tensors * bytes_each / rates["bytes_per_s"] * 1e3
    if {"float32_flops", "tf32_flops"} <= rates.keys():
        exact32 = max(rates["float32_flops"], rates["tf32_flops"] / 3)
        speed = exact32 if case.precision == "float32" else rates["tf32_flops"]
        found["matrix_floor_ms"] = flops(case) / speed * 1e3
    return found


def flops(case: Case) -> float:
    """Of all products: two forward, with the backward four more."""
    products, width = (2 if case.passes == FORWARD else 6), case.dim + COORDINATES
    return products * 2.0 * HEADS * case.n * width * width


@dataclass(frozen=True)
class Inputs:
    """query, key, value (1, H, n, D), grad_out (1, H, n, P + D), pos (1, n, P), weights (1, 1, n)."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    pos: Tensor
    weights: Tensor
    key_norm: fused.Norm
    value_norm: fused.Norm


@dataclass(frozen=True)
class CaseInputs:
    x: Inputs
    exact: dict[str, Tensor]


def make_inputs(n: int, dim: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Weights of a mesh with cells of different size, their sum 1."""
    g = torch.Generator(device).manual_seed(1000 * dim + n)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    q, k, v = (random(1, n, HEADS, dim).to(dtype).transpose(1, 2) for _ in range(3))
    grad_out = random(1, n, HEADS, COORDINATES + dim).to(dtype).transpose(1, 2)
    pos = torch.rand(1, n, COORDINATES, generator=g, device=device)
    weights = 0.5 + torch.rand(1, 1, n, generator=g, device=device)
    norms = [fused.Norm(1.0 + 0.1 * random(HEADS, dim), 0.1 * random(HEADS, dim)) for _ in range(2)]
    return Inputs(q, k, v, grad_out, pos, weights / weights.sum(), *norms)


def with_coordinates(x: Inputs, rows: Tensor) -> Tensor:
    pos = x.pos.to(rows.dtype).unsqueeze(1).expand(*rows.shape[:-1], -1)
    return torch.cat([pos, rows], -1)


def normalised(rows: Tensor, norm: fused.Norm) -> Tensor:
    """As nn.GalerkinAttention's HeadNorm: on (B, N, H, D)."""
    assert norm.scale is not None and norm.shift is not None
    scale, shift = norm.scale.to(rows.dtype), norm.shift.to(rows.dtype)
    return (F.layer_norm(rows.transpose(1, 2), rows.shape[-1:], eps=EPS) * scale + shift).transpose(1, 2)


def by_blas(x: Inputs, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    k, v = normalised(key, x.key_norm), normalised(value, x.value_norm)
    rows = (with_coordinates(x, t) for t in (query, k, v))
    return co.galerkin_attention(*rows, x.weights)


def by_kernel(x: Inputs, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q = with_coordinates(x, query)
    return fused.attention(q, key, value, x.pos, x.weights, x.key_norm, x.value_norm, EPS, 0.0)


ATTEND: dict[str, Callable[[Inputs, Tensor, Tensor, Tensor], Tensor]] = {OURS: by_blas, FUSED: by_kernel}


def exact(x: Inputs, passes: str) -> dict[str, Tensor]:
    """out and the gradients of query, key and value in float64."""
    leaves = [t.detach().double().requires_grad_(passes == BACKWARD) for t in (x.query, x.key, x.value)]
    rows = []
    for t, norm in zip(leaves, (None, x.key_norm, x.value_norm), strict=True):
        if norm is not None:
            assert norm.scale is not None and norm.shift is not None
            apart = t - t.mean(-1, keepdim=True)
            t = apart / (apart.square().mean(-1, keepdim=True) + EPS).sqrt()
            t = t * norm.scale.double()[:, None] + norm.shift.double()[:, None]
        rows.append(with_coordinates(x, t))
    q, k, v = rows
    out = q @ ((k * x.weights.double()[..., None]).mT @ v)
    if passes == FORWARD:
        return {"out": out}
    grads = torch.autograd.grad(out, leaves, x.grad_out.double())
    return {"out": out.detach(), **dict(zip(("query", "key", "value"), grads, strict=True))}


def inputs(case: Case, device: torch.device) -> CaseInputs:
    x = make_inputs(case.n, case.dim, PRECISIONS[case.precision].dtype, device)
    found = exact(x, case.passes)
    if case.passes == FORWARD:
        return CaseInputs(x, found)
    wanted = {name: getattr(x, name).requires_grad_() for name in ("query", "key", "value")}
    return CaseInputs(replace(x, **wanted), found)


def candidate(name: str, case: Case, inputs: CaseInputs) -> Candidate:
    x, attend = inputs.x, ATTEND[name]

    def call() -> tuple[Tensor, ...]:
        out = attend(x, x.query, x.key, x.value)
        if case.passes == FORWARD:
            return (out,)
        return (out.detach(), *torch.autograd.grad(out, (x.query, x.key, x.value), x.grad_out))

    def parity() -> dict[str, Tensor]:
        return dict(zip(inputs.exact, call(), strict=True))

    return Candidate(name, call, parity, inputs.exact, PRECISIONS[case.precision].bound)


def small(device: torch.device) -> None:
    """Each dtype, widths that fill a block, do not, and need four; two weights are zero."""
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (16, 5, 130):
            x = make_inputs(300, dim, dtype, device)
            x.weights[..., :2] = 0.0
            wanted = [t.detach().requires_grad_() for t in (x.query, x.key, x.value)]
            out = by_kernel(x, *wanted)
            gradients = torch.autograd.grad(out.float().square().sum(), wanted)
            if not all(t.isfinite().all() for t in (out, *gradients)):
                raise ArithmeticError(f"{NAME}: not finite, {dim} channels, {dtype}")
