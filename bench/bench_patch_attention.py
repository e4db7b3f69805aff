"""patch_attention on the CPU against the usual way and batched products on preallocated buffers.

``python bench/bench_patch_attention.py`` prints the tables and writes them to bench/results/ as JSON;
``--short`` leaves the largest grid out.
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
from ceilings import measure_ceilings
from torch import Tensor

import continuum_ops as co

OP = "patch_attention"
HEADS, CHANNELS, PATCHES = 8, 16, 13  # patches along each of two axes
SIDES = (208, 416)
BOUND = 1e-5  # largest error allowed, relative to the largest entry
# Products of P x (points x channels); the backward has four more.
PRODUCTS = {"forward": 2, "forward + backward": 6}
# Tensors of query's size that are read or written at least once.
TENSORS = {"forward": 4, "forward + backward": 11}


@dataclass(frozen=True)
class Inputs:
    query: Tensor  # (B, n, n, H, D)
    key: Tensor
    value: Tensor
    grad_out: Tensor
    patch: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def requiring_grad(self) -> Inputs:
        query, key, value = (t.detach().requires_grad_() for t in self.tensors())
        return replace(self, query=query, key=key, value=value)


def make_inputs(side: int, patches: int = PATCHES, batch: int = 1) -> Inputs:
    g = torch.Generator().manual_seed(side)
    shape = (batch, side, side, HEADS, CHANNELS)
    query, key, value, grad_out = (torch.randn(shape, generator=g) for _ in range(4))
    # Scores of the order of 1: an inner product of noise is as large as the root of its number of terms.
    return Inputs(query * side, key, value, grad_out, side // patches)


def exact(x: Inputs, *, backward: bool) -> dict[str, Tensor]:
    """out and the gradients of query, key and value in float64, head by head.

    With a the probabilities and g the gradient of out: dv_j = sum_p a_pj g_p, ds = a (g . v - sum a g . v),
    dq_p = scale sum_j ds_pj k_j, dk_j = scale sum_p ds_pj q_p.
    """
    scale = 1.0 / (x.query.shape[1] * x.query.shape[2])
    names = ["out", "query", "key", "value"] if backward else ["out"]
    result = {name: torch.empty(x.query.shape, dtype=torch.float64) for name in names}
    for h in range(HEADS):
        q, k, v, g = (
            rearrange(t[..., h : h + 1, :].detach().double(), x) for t in (*x.tensors(), x.grad_out)
        )
        a = (scale * q @ k.mT).softmax(-1)
        rows = {"out": a @ v}
        if backward:
            da = g @ v.mT
            ds = scale * a * (da - (a * da).sum(-1, keepdim=True))
            rows |= {"query": ds @ k, "key": ds.mT @ q, "value": a.mT @ g}
        for name, matrix in rows.items():
            result[name][..., h : h + 1, :] = assemble(matrix, x, 1)
    return result


def rearrange(t: Tensor, x: Inputs) -> Tensor:
    """(B, n, n, H, D) as (B, H, P, points D)."""
    batch, side, _, heads, channels = t.shape
    m, p = side // x.patch, x.patch
    split = t.reshape(batch, m, p, m, p, heads, channels).permute(0, 5, 1, 3, 2, 4, 6)
    return split.reshape(batch, heads, m * m, p * p * channels)


def assemble(rows: Tensor, x: Inputs, heads: int = HEADS) -> Tensor:
    batch, side = x.query.shape[:2]
    m, p = side // x.patch, x.patch
    joined = rows.reshape(batch, heads, m, m, p, p, CHANNELS).permute(0, 2, 4, 3, 5, 1, 6)
    return joined.reshape(batch, side, side, heads, CHANNELS)


# --- the forms ------------------------------------------------------------------------------------


def ours(x: Inputs) -> Tensor:
    out = co.patch_attention(*x.tensors(), x.patch)
    assert isinstance(out, Tensor)
    return out


def plain(x: Inputs) -> Tensor:
    q, k, v = (rearrange(t, x) for t in x.tensors())
    scores = torch.einsum("bhpx,bhjx->bhpj", q, k) / (x.query.shape[1] * x.query.shape[2])
    return assemble(torch.einsum("bhpj,bhjx->bhpx", scores.softmax(-1), v), x)


class Preallocated:
    """The same products into buffers that are there: nothing is allocated, MKL or oneDNN multiplies."""

    def __init__(self, x: Inputs, onednn: bool) -> None:
        self.x, self.onednn = x, onednn
        self.rows = [torch.empty_like(rearrange(t, x)) for t in x.tensors()]
        self.mixed, self.out = torch.empty_like(self.rows[0]), torch.empty_like(x.query)
        patches = self.rows[0].shape[2]
        self.scores = torch.empty(*self.rows[0].shape[:2], patches, patches)

    def __call__(self) -> Tensor:
        x, scale = self.x, 1.0 / (self.x.query.shape[1] * self.x.query.shape[2])
        batch, side = x.query.shape[:2]
        m, p = side // x.patch, x.patch
        for rows, t in zip(self.rows, x.tensors(), strict=True):
            split = t.view(batch, m, p, m, p, HEADS, CHANNELS).permute(0, 5, 1, 3, 2, 4, 6)
            rows.view(split.shape).copy_(split)
        q, k, v = (rows.flatten(0, 1) for rows in self.rows)
        scores, mixed = self.scores.flatten(0, 1), self.mixed.flatten(0, 1)
        linear = torch.ops.mkldnn._linear_pointwise
        if self.onednn:
            for h in range(scores.shape[0]):
                scores[h] = linear(q[h], k[h], None, "none", [], "")
        else:
            torch.bmm(q, k.mT, out=scores)
        torch.softmax(scores.mul_(scale), -1, out=scores)
        if self.onednn:
            for h in range(scores.shape[0]):
                mixed[h] = linear(scores[h], v[h].mT, None, "none", [], "")
        else:
            torch.bmm(scores, v, out=mixed)
        joined = self.mixed.view(batch, HEADS, m, m, p, p, CHANNELS).permute(0, 2, 4, 3, 5, 1, 6)
        self.out.view(batch, m, p, m, p, HEADS, CHANNELS).copy_(joined)
        return self.out


PLAIN, MKL, ONEDNN = "(a) rearrange, einsum", "(b) bmm, preallocated", "(c) oneDNN per head, preallocated"
FORMS = [OP, PLAIN, MKL, ONEDNN]


def make_run(form: str, x: Inputs, passes: str) -> Callable[[], tuple[Tensor, ...]]:
    if form in (MKL, ONEDNN):
        products = Preallocated(x, form == ONEDNN)
        return lambda: (products(),)
    attend = ours if form == OP else plain

    def forward_backward() -> tuple[Tensor, ...]:
        out = attend(x)
        return (out.detach(), *torch.autograd.grad(out, x.tensors(), x.grad_out))

    return (lambda: (attend(x),)) if passes == "forward" else forward_backward


def make_candidate(form: str, x: Inputs, passes: str, reference: dict[str, Tensor]) -> harness.Candidate:
    names = ["out"] if passes == "forward" else ["out", "query", "key", "value"]
    return harness.Candidate(form, make_run(form, x, passes), [reference[k] for k in names], BOUND)


def time_all(args: argparse.Namespace, allocator: str) -> list[dict[str, Any]]:
    rows = []
    for side in args.sides:
        for passes in PRODUCTS:
            harness.progress(f"grid {side} x {side}, {passes}, {allocator} memory")
            x = make_inputs(side)
            reference = exact(x, backward=passes != "forward")
            x = x if passes == "forward" else x.requiring_grad()
            forms = FORMS if passes == "forward" else FORMS[:2]
            candidates = [make_candidate(form, x, passes, reference) for form in forms]
            label = {
                "table": f"{passes}, float32",
                "passes": passes,
                "case": {"grid": f"{side} x {side}", "patch": x.patch},
                "allocator": allocator,
            }
            rows += [{**label, **row} for row in harness.time_interleaved(candidates, rounds=args.rounds)]
    return rows


def memory_row(form: str, passes: str, side: int) -> dict[str, Any]:
    """Peak memory of one call beyond its inputs and outputs, in a process of its own."""
    make_run(form, make_inputs(PATCHES * 2).requiring_grad(), passes)()
    x = make_inputs(side)
    x = x if passes == "forward" else x.requiring_grad()
    growth, outputs = harness.peak_growth(make_run(form, x, passes))
    inputs = [*x.tensors(), *([x.grad_out] if passes != "forward" else [])]
    fields = harness.memory_fields(inputs, growth, outputs, 4.0 * HEADS * PATCHES**4)
    return {"candidate": form, "pass": passes, "shape": f"{side} x {side} points", **fields}


def finish_rows(rows: list[dict[str, Any]], ceilings: dict[str, float] | None) -> None:
    """Add time over our time, GFLOP/s, GB/s if each tensor is moved once, and the share of the ceiling."""
    first: dict[tuple[Any, ...], float] = {}
    for row in rows:
        key = (row["table"], *row["case"].values(), row["allocator"])
        row["speedup"] = row["ms"] / first.setdefault(key, row["ms"])
        points = (row["case"]["patch"] * PATCHES) ** 2
        flops = 2 * PRODUCTS[row["passes"]] * PATCHES**2 * points * HEADS * CHANNELS
        row["gflops"] = flops / row["ms"] * 1e-6
        row["gb_per_s"] = TENSORS[row["passes"]] * 4 * points * HEADS * CHANNELS / row["ms"] * 1e-6
        if ceilings is not None:
            row["ceiling_fraction"] = row["gflops"] / ceilings["fma_gflops"]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help="208 x 208 and 3 rounds, not the published protocol"
    )
    parser.add_argument("--sides", type=int, nargs="+", help=f"points per axis (default: {SIDES})")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and BLAS (default: 2)")
    parser.add_argument("--rounds", type=int, help="clean samples per candidate (default: 7, short: 3)")
    parser.add_argument("--no-ceilings", action="store_true", help="leave the fraction of the ceiling out")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/OP-MACHINE.json)")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.sides is None:
        args.sides = list(SIDES[:1] if args.short else SIDES)
    if args.rounds is None:
        args.rounds = 3 if args.short else 7
    if any(n < PATCHES or n % PATCHES for n in args.sides):
        parser.error(f"--sides must be multiples of {PATCHES}, the patches along an axis, got {args.sides}")
    for name in ("rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    if args.worker is not None:
        harness.start_worker(args.threads)
        task = args.worker
        rows = memory_row(**task["memory"]) if "memory" in task else time_all(args, task["allocator"])
        return json.dump(rows, sys.stdout)

    def worker(task: dict[str, Any], allocator: str) -> Any:
        arguments = [*argv, "--worker", json.dumps(task)]
        return harness.run_worker(__file__, arguments, threads=args.threads, allocator=allocator)

    settings = {"threads": args.threads, "B": 1, "H": HEADS, "D": CHANNELS, "patches": PATCHES**2}
    document = harness.new_document(OP, {**settings, "rounds": args.rounds, "short": args.short})
    ceilings = None if args.no_ceilings else measure_ceilings([args.threads])
    document["ceilings"] = ceilings
    document["rows"] = [row for a in harness.ALLOCATORS for row in worker({"allocator": a}, a)]
    finish_rows(document["rows"], ceilings and ceilings["threads"][str(args.threads)])
    document["memory"] = [
        worker({"memory": {"form": form, "passes": passes, "side": max(args.sides)}}, "default")
        for passes in PRODUCTS
        for form in FORMS[:2]
    ]
    harness.publish(document, harness.result_path(OP, document, args.out, "-short" if args.short else ""))


if __name__ == "__main__":
    main(sys.argv[1:])
