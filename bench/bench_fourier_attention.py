"""fourier_attention (linear time by associativity) against the quadratic product (q k^T) W v.

``python bench/bench_fourier_attention.py`` prints the table and writes it to bench/results/ as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

import continuum_ops as co

OP = "fourier_attention"
SIZE, DIM, BATCHES = 8192, 96, (1, 4)
BOUND = 1e-5


@dataclass(frozen=True)
class Inputs:
    """query, key, value, grad_out (B, 1, N, D); weights (N,) or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    weights: Tensor | None

    def requiring_grad(self) -> Inputs:
        q, k, v = (x.detach().requires_grad_() for x in (self.query, self.key, self.value))
        return replace(self, query=q, key=k, value=v)


def make_inputs(n: int, dim: int, batch: int, *, weighted: bool = False) -> Inputs:
    g = torch.Generator().manual_seed(1000 * dim + n)
    q, k, v, grad_out = (torch.randn(batch, 1, n, dim, generator=g) for _ in range(4))
    return Inputs(q, k, v, grad_out, (0.5 + torch.rand(n, generator=g)) / n if weighted else None)


def exact(x: Inputs, rows: int = 1024) -> dict[str, Tensor]:
    """out and the gradients of query, key, value in float64, of the quadratic product, chunks of rows."""
    q, k, v, g = (t.detach().double() for t in (x.query, x.key, x.value, x.grad_out))
    n = q.shape[-2]
    w = torch.full((n,), 1.0 / n, dtype=torch.float64) if x.weights is None else x.weights.double()
    out, dq, dk, dv = (torch.zeros_like(t) for t in (v, q, k, v))
    for b in range(q.shape[0]):
        key, value = k[b, 0], v[b, 0]
        for i in range(0, n, rows):
            at = (b, 0, slice(i, i + rows))
            p, back = (q[at] @ key.T) * w, (g[at] @ value.T) * w
            out[at], dq[at] = p @ value, back @ key
            dk[b, 0] += back.T @ q[at]
            dv[b, 0] += p.T @ g[at]
    return {"out": out, "query": dq, "key": dk, "value": dv}


def quadratic(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None) -> Tensor:
    """GT eq. (5) as written."""
    scores = q @ k.transpose(-2, -1)
    return (scores / k.shape[-2] if w is None else scores * w) @ v


FORMS: dict[str, Callable[..., Any]] = {OP: co.fourier_attention, "quadratic": quadratic}


def make_run(form: str, x: Inputs, passes: str) -> Callable[[], tuple[Tensor, ...]]:
    attend = FORMS[form]

    def forward() -> tuple[Tensor, ...]:
        return (attend(x.query, x.key, x.value, x.weights),)

    def forward_backward() -> tuple[Tensor, ...]:
        out = attend(x.query, x.key, x.value, x.weights)
        return (out.detach(), *torch.autograd.grad(out, (x.query, x.key, x.value), x.grad_out))

    return forward if passes == "forward" else forward_backward


def make_candidate(form: str, x: Inputs, passes: str, reference: dict[str, Tensor]) -> harness.Candidate:
    names = ["out"] if passes == "forward" else ["out", "query", "key", "value"]
    return harness.Candidate(form, make_run(form, x, passes), [reference[k] for k in names], BOUND)


def time_all(args: argparse.Namespace, allocator: str) -> list[dict[str, Any]]:
    rows = []
    for batch in args.batches:
        for weighted in (False, True):
            x = make_inputs(args.size, args.dim, batch, weighted=weighted)
            reference = exact(x)
            for passes in ("forward", "forward + backward"):
                harness.progress(f"{passes}, B = {batch}, weights: {weighted}, {allocator} memory")
                inputs = x if passes == "forward" else x.requiring_grad()
                candidates = [make_candidate(f, inputs, passes, reference) for f in FORMS]
                timed = harness.time_interleaved(candidates, rounds=args.rounds)
                ours = next(row["ms"] for row in timed if row["candidate"] == OP)
                case = {"N": args.size, "d": args.dim, "B": batch, "weights": "w" if weighted else "1/N"}
                label = {"table": f"{passes}, float32", "case": case, "allocator": allocator}
                rows += [{**label, **row, "speedup": row["ms"] / ours} for row in timed]
    return rows


def memory_row(form: str, passes: str, n: int, dim: int) -> dict[str, Any]:
    """Peak memory of one call beyond its inputs and outputs, B = 1."""

    def prepare(size: int) -> Inputs:
        x = make_inputs(size, dim, 1)
        return x if passes == "forward" else x.requiring_grad()

    make_run(form, prepare(min(n, 256)), passes)()
    x = prepare(n)
    growth, outputs = harness.peak_growth(make_run(form, x, passes))
    tensors = [x.query, x.key, x.value] + [x.grad_out] * (passes != "forward")
    return {
        "candidate": form,
        "pass": passes,
        "shape": f"N = M = {n}, d = {dim}, float32",
        **harness.memory_fields(tensors, growth, outputs, 4.0 * n * n),
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=SIZE, help=f"N = M (default: {SIZE})")
    parser.add_argument("--dim", type=int, default=DIM, help=f"channels (default: {DIM})")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help=f"(default: {BATCHES})")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch, OpenMP and BLAS")
    parser.add_argument("--rounds", type=int, default=7, help="clean samples per candidate")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/OP-MACHINE.json)")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("size", "dim", "threads", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    if min(args.batches) < 1:
        parser.error(f"--batches must be positive, got {args.batches}")
    return args


def work(args: argparse.Namespace) -> None:
    harness.start_worker(args.threads)
    task = args.worker
    result = memory_row(**task["memory"]) if "memory" in task else time_all(args, task["allocator"])
    json.dump(result, sys.stdout)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    if args.worker is not None:
        return work(args)

    def worker(task: dict[str, Any]) -> Any:
        arguments = [*argv, "--worker", json.dumps(task)]
        allocator = task.get("allocator", "default")
        return harness.run_worker(__file__, arguments, threads=args.threads, allocator=allocator)

    document = harness.new_document(OP, {"threads": args.threads, "H": 1, "rounds": args.rounds})
    size = {"n": args.size, "dim": args.dim}
    document["memory"] = [
        worker({"memory": {"form": form, "passes": passes, **size}})
        for form in FORMS
        for passes in ("forward", "forward + backward")
    ]
    document["rows"] = [row for allocator in harness.ALLOCATORS for row in worker({"allocator": allocator})]
    harness.publish(document, harness.result_path(OP, document, args.out))


if __name__ == "__main__":
    main(sys.argv[1:])
