"""FANO attention of 13 x 13 patches of 32 x 32 points, 9 modes, d = 64: mode space against space.

``python bench/bench_fourier_patch_attention.py`` prints the tables and writes them to bench/results/ as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch
from torch import Tensor

from continuum_ops.nn import FourierPatchAttention

OP = "fourier_patch_attention"
PATCHES, POINTS, MODES, DIM, HEADS, BATCH = 13, 32, 9, 64, 8, 1
OURS, USUAL, TUNED = "mode space", "space: 3 rfft2, 3 irfft2, einsum", "space: 1 rfft2, bmm, 3 irfft2, bmm"
PASSES = ("forward", "forward + backward")
BOUND = 1e-5


class Case:
    """A layer, its input, and the same complex weights as the usual implementations hold them."""

    def __init__(self, patches: int, points: int, modes: int, dim: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.patches, self.points, self.modes = patches, points, modes
        self.layer = FourierPatchAttention(dim, HEADS, (points, points), modes)
        n = patches * points
        self.u = torch.randn(BATCH, n, n, dim).to(dtype).requires_grad_()
        self.grad_out = torch.randn(BATCH, n, n, dim).to(dtype)
        self.layer.to(dtype)
        pairs = self.layer.in_proj_weight.detach().movedim(-2, -1).contiguous()  # (3, 2m, m, E, C, 2)
        full = torch.view_as_complex(pairs).unflatten(3, (HEADS, -1)).permute(0, 5, 4, 1, 2, 3)
        # For Q, K, V and the two blocks of rows: (C, head_dim, m, m, H).
        self.blocks = [w.contiguous().requires_grad_() for part in full for w in part.chunk(2, dim=2)]

    def parameters(self, kind: str) -> list[Tensor]:
        return (
            list(self.layer.parameters())
            if kind == OURS
            else [*self.blocks, *self.layer.out_proj.parameters()]
        )

    def to_patches(self, x: Tensor) -> Tensor:
        """(B, X, Y, C) -> (B, P, C, points, points)."""
        x = x.unflatten(2, (self.patches, self.points)).unflatten(1, (self.patches, self.points))
        return x.permute(0, 1, 3, 5, 2, 4).flatten(1, 2)

    def from_patches(self, x: Tensor) -> Tensor:
        """(B, H, P, points, points, head_dim) -> (B, X, Y, H head_dim)."""
        x = x.unflatten(2, (self.patches, self.patches)).permute(0, 2, 4, 3, 5, 1, 6)
        return x.reshape(x.shape[0], self.patches * self.points, self.patches * self.points, -1)

    def convolve(self, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        m, n = self.modes, self.points
        spectrum = torch.fft.rfft2(x, norm="forward")
        out = spectrum.new_zeros(*x.shape[:2], low.shape[1], n, n // 2 + 1, HEADS)
        out[:, :, :, :m, :m] = torch.einsum("bpixy,ioxyh->bpoxyh", spectrum[..., :m, :m], low)
        out[:, :, :, -m:, :m] = torch.einsum("bpixy,ioxyh->bpoxyh", spectrum[..., -m:, :m], high)
        y = torch.fft.irfft2(out, s=(n, n), dim=(-3, -2), norm="forward")
        return y.permute(0, 5, 1, 3, 4, 2)

    def in_space(self, u: Tensor) -> Tensor:
        """CA eq. (68), (63) as they are written."""
        x = self.to_patches(u)
        q, k, v = (self.convolve(x, *self.blocks[i : i + 2]) for i in (0, 2, 4))
        scores = torch.einsum("bhpxyd,bhqxyd->bhpq", q, k) / (u.shape[1] * u.shape[2])
        out = torch.einsum("bhpq,bhqxyd->bhpxyd", scores.softmax(-1), v)
        return self.layer.out_proj(self.from_patches(out))

    def in_space_tuned(self, u: Tensor) -> Tensor:
        """One transform of u, one product per mode for Q, K and V, batched products of flat patches."""
        m, n = self.modes, self.points
        spectrum = torch.fft.rfft2(self.to_patches(u), norm="forward")
        z = torch.cat([spectrum[..., :m, :m], spectrum[..., -m:, :m]], -2).permute(3, 4, 0, 1, 2)
        rows = [torch.cat(self.blocks[i : i + 2], 2) for i in (0, 2, 4)]  # (C, head_dim, 2m, m, H)
        w = torch.stack(rows).permute(3, 4, 1, 0, 5, 2).flatten(3)
        qkv = (z.flatten(2, 3) @ w).view(2 * m, m, BATCH, -1, 3, HEADS, w.shape[-1] // (3 * HEADS))
        full = qkv.new_zeros(3, BATCH, HEADS, qkv.shape[3], n, n // 2 + 1, qkv.shape[-1])
        qkv = qkv.permute(4, 2, 5, 3, 0, 1, 6)
        full[..., :m, :m, :], full[..., -m:, :m, :] = qkv[..., :m, :, :], qkv[..., m:, :, :]
        y = torch.fft.irfft2(full, s=(n, n), dim=(-3, -2), norm="forward")
        q, k, v = y.flatten(-3)
        out = (q @ k.mT / (u.shape[1] * u.shape[2])).softmax(-1) @ v
        return self.layer.out_proj(self.from_patches(out.view(*out.shape[:3], n, n, -1)))

    def function(self, kind: str) -> Callable[[Tensor], Tensor]:
        return {OURS: self.layer, USUAL: self.in_space, TUNED: self.in_space_tuned}[kind]

    def make_run(self, kind: str, passes: str) -> Callable[[], tuple[Tensor, ...]]:
        """A call that returns (out,), with the backward (out, gradient of u)."""
        function, leaves = self.function(kind), self.parameters(kind)

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (function(self.u),)

        def forward_backward() -> tuple[Tensor, ...]:
            for leaf in (self.u, *leaves):
                leaf.grad = None
            out = function(self.u)
            out.backward(self.grad_out)
            assert self.u.grad is not None
            return out.detach(), self.u.grad

        return forward if passes == PASSES[0] else forward_backward


def make_case(patches: int, points: int, modes: int, dim: int, dtype: torch.dtype = torch.float32) -> Case:
    return Case(patches, points, modes, dim, dtype)


def reference(patches: int, points: int, modes: int, dim: int) -> tuple[Tensor, ...]:
    """The definition in float64, from the parameters and inputs of the float32 case."""
    case = Case(patches, points, modes, dim, torch.float32)
    exact = Case.__new__(Case)
    exact.patches, exact.points, exact.modes = patches, points, modes
    exact.layer = case.layer.double()
    exact.u = case.u.detach().double().requires_grad_()
    exact.grad_out = case.grad_out.double()
    exact.blocks = [w.detach().to(torch.complex128).requires_grad_() for w in case.blocks]
    return exact.make_run(USUAL, PASSES[1])()


def make_candidate(kind: str, case: Case, passes: str, exact: Sequence[Tensor]) -> harness.Candidate:
    expected = exact[:1] if passes == PASSES[0] else exact
    return harness.Candidate(kind, case.make_run(kind, passes), expected, BOUND)


def time_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    size = (args.patches, args.points, args.modes, args.dim)
    exact, case = reference(*size), make_case(*size)
    rows = []
    for passes in PASSES:
        harness.progress(f"{passes}, {args.worker['allocator']}")
        candidates = [make_candidate(kind, case, passes, exact) for kind in (OURS, USUAL, TUNED)]
        timed = harness.time_interleaved(candidates, rounds=args.rounds)
        ours = timed[0]["ms"]
        label = {"table": f"{passes}, float32", "case": describe(args), "allocator": args.worker["allocator"]}
        rows += [{**label, **row, "speedup": row["ms"] / ours} for row in timed]
    return rows


def describe(args: argparse.Namespace) -> dict[str, Any]:
    n = args.patches * args.points
    return {
        "grid": f"{n} x {n}",
        "patch": args.points,
        "modes": args.modes,
        "d": args.dim,
        "H": HEADS,
        "B": BATCH,
    }


def memory_row(kind: str, passes: str, patches: int, points: int, modes: int, dim: int) -> dict[str, Any]:
    """Peak memory of one call beyond its input, output and gradients."""
    make_case(2, points, modes, dim).make_run(kind, passes)()
    case = make_case(patches, points, modes, dim)
    run = case.make_run(kind, passes)
    growth, outputs = harness.peak_growth(run)
    if passes == PASSES[1]:
        outputs += sum(
            t.grad.numel() * t.grad.element_size() for t in case.parameters(kind) if t.grad is not None
        )
    n = patches * points
    return {
        "candidate": kind,
        "pass": passes,
        "shape": f"{n} x {n}, patch {points}, {modes} modes, d = {dim}, float32",
        **harness.memory_fields((case.u,), growth, outputs, 4.0 * BATCH * HEADS * patches**4),
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    return harness.parse_counts(
        __doc__.splitlines()[0],
        argv,
        ("patches", PATCHES, "patches along an axis"),
        ("points", POINTS, "points of a patch along an axis"),
        ("modes", MODES, "kept modes"),
        ("dim", DIM, "channels"),
        ("threads", 2, "threads of torch, OpenMP and BLAS"),
        ("rounds", 7, "clean samples per candidate"),
    )


def work(args: argparse.Namespace) -> None:
    harness.start_worker(args.threads)
    task = args.worker
    json.dump(memory_row(**task["memory"]) if "memory" in task else time_all(args), sys.stdout)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    if args.worker is not None:
        return work(args)

    def worker(task: dict[str, Any], allocator: str) -> Any:
        arguments = [*argv, "--worker", json.dumps(task)]
        return harness.run_worker(__file__, arguments, threads=args.threads, allocator=allocator)

    document = harness.new_document(OP, {"threads": args.threads, "rounds": args.rounds})
    size = {"patches": args.patches, "points": args.points, "modes": args.modes, "dim": args.dim}
    document["memory"] = [
        worker({"memory": {"kind": kind, "passes": passes, **size}}, "default")
        for kind in (OURS, USUAL, TUNED)
        for passes in PASSES
    ]
    document["rows"] = [row for name in harness.ALLOCATORS for row in worker({"allocator": name}, name)]
    harness.publish(document, harness.result_path(OP, document, args.out))


if __name__ == "__main__":
    main(sys.argv[1:])
