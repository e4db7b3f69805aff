"""What a call costs on tiny inputs: every operator beside scaled_dot_product_attention, N = M = 16, d = 16.

``python bench/bench_overhead.py`` prints the tables and writes them to bench/results/ as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor

import continuum_ops as co

OP = "overhead"
POINTS, DIM = 16, 16
GRID, PATCH = (4, 4), 2  # the 16 points of patch_attention
HEADS, THREADS = (1, 2, 4, 8), (1, 2)
PASSES = ("forward, no gradients", "forward with gradients", "forward + backward")
BASELINE = "sdpa"
BOUND = 1e-5

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A call, the formula that it must agree with, and the inputs of both, those with gradients first."""

    attend: Callable[..., Any]
    formula: Callable[..., Tensor]
    learned: Tensors
    fixed: Tensors


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, *w: Tensor) -> Tensor:
    scores = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    scores = scores * w[0] if w else scores
    return scores @ v / scores.sum(-1, keepdim=True)


def linear_product(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return (q @ k.mT * w) @ v


def gaussian_attention(value: Tensor, rate: Tensor, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    squares = (x[:, None] - y[None]).square().sum(-1)
    scores = (-rate[:, None, None] * squares).exp() * w
    return scores @ value / scores.sum(-1, keepdim=True)


def position_attention(value: Tensor, rate: Tensor, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return co.position_attention(x, y, value, rate, w)


def patches(t: Tensor) -> Tensor:
    """(B, *GRID, H, D) to (B, H, patches, points of a patch, D)."""
    b, rows, columns, heads, d = t.shape
    cut = t.reshape(b, rows // PATCH, PATCH, columns // PATCH, PATCH, heads, d).permute(0, 5, 1, 3, 2, 4, 6)
    return cut.reshape(b, heads, -1, PATCH * PATCH, d)


def patch_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhpxd,bhjxd->bhpj", patches(q), patches(k)) / POINTS
    out = torch.einsum("bhpj,bhjxd->bhpxd", scores.softmax(-1), patches(v))
    b, heads, _, _, d = out.shape
    out = out.reshape(b, heads, GRID[0] // PATCH, GRID[1] // PATCH, PATCH, PATCH, d)
    return out.permute(0, 2, 4, 3, 5, 1, 6).reshape(b, *GRID, heads, d)


def patch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return co.patch_attention(q, k, v, PATCH)  # type: ignore[attr-defined, no-any-return]


def make_cases(heads: int) -> dict[str, Case]:
    """Every operator on the same query, key and value; float32, B = 1."""
    g = torch.Generator().manual_seed(heads)
    qkv = tuple(torch.randn(1, heads, POINTS, DIM, generator=g) for _ in range(3))
    x, y = torch.rand(2, POINTS, 2, generator=g)
    weights = (0.5 + torch.rand(POINTS, generator=g)) / POINTS
    rate = 1.0 + torch.rand(heads, generator=g)
    cases = {
        BASELINE: Case(F.scaled_dot_product_attention, softmax_attention, qkv, ()),
        "continuum_attention": Case(co.continuum_attention, softmax_attention, qkv, (weights,)),
        "position_attention": Case(position_attention, gaussian_attention, (qkv[2], rate), (x, y, weights)),
        "galerkin_attention": Case(co.galerkin_attention, linear_product, qkv, (weights,)),
        "fourier_attention": Case(co.fourier_attention, linear_product, qkv, (weights,)),
    }
    if hasattr(co, "patch_attention"):
        points = tuple(torch.randn(1, *GRID, heads, DIM, generator=g) for _ in range(3))
        cases["patch_attention"] = Case(patch_attention, patch_formula, points, ())
    return cases


def make_candidate(name: str, case: Case, passes: str) -> harness.Candidate:
    exact_inputs = [t.double().requires_grad_() for t in case.learned]
    exact = case.formula(*exact_inputs, *(t.double() for t in case.fixed))
    # The gradient of |out|^2 / 2: of a rate at H = 1, which is one number, other ones may cancel.
    grad_out = exact.detach().float()
    reference = [exact.detach()]
    if passes == PASSES[2]:
        reference += torch.autograd.grad(exact, exact_inputs, grad_out.double())
    learned = tuple(t.clone().requires_grad_(passes != PASSES[0]) for t in case.learned)
    inputs, attend = (*learned, *case.fixed), case.attend

    def forward() -> Tensors:
        return (attend(*inputs),)

    def forward_backward() -> Tensors:
        out = attend(*inputs)
        return (out.detach(), *torch.autograd.grad(out, learned, grad_out))

    run = forward_backward if passes == PASSES[2] else forward
    return harness.Candidate(name, run, reference, BOUND)


def time_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for heads in args.heads:
        cases = make_cases(heads)
        for passes in PASSES:
            harness.progress(f"{passes}, H = {heads}, {torch.get_num_threads()} threads")
            candidates = [make_candidate(name, case, passes) for name, case in cases.items()]
            timed = harness.time_interleaved(candidates, rounds=args.rounds, min_seconds=0.02)
            base = next(row for row in timed if row["candidate"] == BASELINE)
            label = {
                "table": f"{passes}, float32, N = M = {POINTS}, d = {DIM}, B = 1",
                "case": {"threads": torch.get_num_threads(), "H": heads},
                "allocator": "default",
            }
            for row in timed:
                ratios = {"ratio": row["ms"] / base["ms"], "ratio_min": row["ms_min"] / base["ms_min"]}
                note = f"{ratios['ratio']:.2f} (min {ratios['ratio_min']:.2f}) x SDPA"
                rows.append({**label, **row, **ratios, "note": note})
    return rows


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=list(HEADS), help=f"(default: {HEADS})")
    parser.add_argument("--threads", type=int, nargs="+", default=list(THREADS), help=f"(default: {THREADS})")
    parser.add_argument("--rounds", type=int, default=15, help="clean samples per candidate (default: 15)")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/OP-MACHINE.json)")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("heads", "threads"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    if args.rounds < 1:
        parser.error(f"--rounds must be positive, got {args.rounds}")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    if args.worker is not None:
        harness.start_worker(args.worker)
        return json.dump(time_all(args), sys.stdout)
    document = harness.new_document(OP, {"rounds": args.rounds})
    document["rows"] = []
    for threads in args.threads:
        arguments = [*argv, "--worker", str(threads)]
        document["rows"] += harness.run_worker(__file__, arguments, threads=threads, allocator="default")
    harness.publish(document, harness.result_path(OP, document, args.out))


if __name__ == "__main__":
    main(sys.argv[1:])
