"""patch_attention: this package, the usual way (rearrange, einsum, softmax, einsum, rearrange), batched BLAS.

Square grids of 13 x 13 patches, B = 1, 8 heads of 16 channels: n points, with quadrature weights. The
whole output and every gradient are compared; the floor beside the times is that of the bytes to be moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import continuum_ops as co

from .case import BACKWARD, FORWARD, OURS, PRECISIONS, Case
from .timing import Candidate

NAME = "patch_attention"
HEADS = 8
PATCHES = 13  # along each axis
SIZES = (104, 208, 416, 832)  # points along each axis
DIMS = (16, 64)

EINSUM = "rearrange, einsum"
BLAS = "batched BLAS on rearranged inputs"


def cases() -> list[Case]:
    """The paper's size first."""
    main, both = ("float32", "bfloat16", "tf32"), (FORWARD, BACKWARD)
    order = [(p, b, 16, 416**2) for p in main for b in both]
    order += [(p, b, d, n * n) for d in DIMS for n in SIZES for p in main for b in both]
    return [Case(NAME, *fields) for fields in dict.fromkeys(order)]


def names(case: Case) -> list[str]:
    return [OURS, EINSUM, BLAS]


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
    if {"float32_flops", "tf32_flops", "bfloat16_flops"} <= rates.keys():
        exact32 = max(rates["float32_flops"], rates["tf32_flops"] / 3)
        speed = {"float32": exact32, "tf32": rates["tf32_flops"], "bfloat16": rates["bfloat16_flops"]}
        found["matrix_floor_ms"] = flops(case) / speed[case.precision] * 1e3
    return found


def flops(case: Case) -> float:
    """Of all products: two forward, with the backward four more."""
    products = 2 if case.passes == FORWARD else 6
    return products * 2.0 * HEADS * PATCHES**2 * case.n * case.dim


@dataclass(frozen=True)
class Inputs:
    """query, key, value, grad_out (1, n, n, H, D), weights (n, n), points of a patch along an axis."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    weights: Tensor
    patch: int


@dataclass(frozen=True)
class CaseInputs:
    x: Inputs
    exact: dict[str, Tensor]


def make_inputs(n: int, channels: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Weights of a mesh with cells of different size; scores of order one."""
    side = math.isqrt(n)
    g = torch.Generator(device).manual_seed(1000 * channels + n)
    shape = (1, side, side, HEADS, channels)
    query, key, value, grad_out = (torch.randn(shape, generator=g, device=device).to(dtype) for _ in range(4))
    patch = side // PATCHES
    scale = (patch * patch * channels) ** -0.5
    weights = scale * (0.5 + torch.rand(side, side, generator=g, device=device))
    return Inputs(query, key, value, grad_out, weights, patch)


def usual(x: Inputs, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As published codes have it: copies in patch order, products in the dtype of the inputs."""
    q, k, v = ((rearranged(t, x.patch)) for t in (query, key, value))
    w = rearranged(x.weights[None, ..., None, None].to(query.dtype), x.patch)
    a = torch.einsum("bphxc,bjhxc->bhpj", w * q, k).softmax(-1)
    return restored(torch.einsum("bhpj,bjhxc->bphxc", a, v), query.shape)


def blas(x: Inputs, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each patch and head one contiguous row; one batched product for the scores, one for the values."""
    q, k, v = (rearranged(t, x.patch).transpose(1, 2).flatten(3) for t in (query, key, value))
    w = rearranged(x.weights[None, ..., None, None].to(query.dtype), x.patch).transpose(1, 2)
    a = ((w * q.unflatten(-1, (-1, query.shape[-1]))).flatten(3) @ k.mT).softmax(-1)
    mixed = (a @ v).unflatten(-1, (-1, value.shape[-1])).transpose(1, 2)
    return restored(mixed, query.shape)


def rearranged(t: Tensor, patch: int) -> Tensor:
    """(B, n, n, H, C) as (B, patches, H, points, C), contiguous."""
    b, n, _, h, c = t.shape
    t = t.view(b, n // patch, patch, n // patch, patch, h, c)
    return t.permute(0, 1, 3, 5, 2, 4, 6).reshape(b, (n // patch) ** 2, h, patch**2, c)


def restored(t: Tensor, shape: torch.Size) -> Tensor:
    b, n, _, h, c = shape
    patch = math.isqrt(t.shape[3])
    count = n // patch
    t = t.reshape(b, count, count, h, patch, patch, c)
    return t.permute(0, 1, 4, 2, 5, 3, 6).reshape(b, n, n, h, c)


def ours(x: Inputs, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return co.patch_attention(query, key, value, x.patch, x.weights)


ATTEND: dict[str, Callable[[Inputs, Tensor, Tensor, Tensor], Tensor]] = {
    OURS: ours,
    EINSUM: usual,
    BLAS: blas,
}


def exact(x: Inputs, passes: str) -> dict[str, Tensor]:
    """out and the gradients of query, key and value in float64."""
    double = replace(x, weights=x.weights.double())
    leaves = [t.detach().double().requires_grad_(passes == BACKWARD) for t in (x.query, x.key, x.value)]
    patches = [rearranged(t, x.patch) for t in leaves]
    w = rearranged(double.weights[None, ..., None, None], x.patch)
    scores = torch.einsum("bphxc,bjhxc->bhpj", w * patches[0], patches[1])
    a = torch.softmax(scores, -1)
    out = restored(torch.einsum("bhpj,bjhxc->bphxc", a, patches[2]), x.query.shape)
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
    """Tiles of both sizes, each dtype, vectors and single channels; two weights are zero."""
    for dtype in (torch.float32, torch.bfloat16):
        for channels, count, patch in ((16, 3, 5), (5, 3, 5), (8, 9, 2)):
            g = torch.Generator(device).manual_seed(channels)
            shape = (1, count * patch, count * patch, 2, channels)
            q, k, v = (torch.randn(shape, generator=g, device=device).to(dtype) for _ in range(3))
            weights = torch.rand(shape[1:3], generator=g, device=device)
            weights[0, 1] = weights[3, 2] = 0.0
            wanted = [t.requires_grad_() for t in (q, k, v, weights)]
            out, lse = co.patch_attention(q, k, v, patch, weights, return_lse=True)
            gradients = torch.autograd.grad(out.float().square().sum() + lse.sum(), wanted)
            if not all(t.isfinite().all() for t in (out, lse, *gradients)):
                raise ArithmeticError(f"{NAME}: not finite, {channels} channels, {count**2} patches, {dtype}")
