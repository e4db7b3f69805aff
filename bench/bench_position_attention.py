"""position_attention on the CPU against plain PyTorch, chunked torch.mm and KeOps, forward and with backward.

``python bench/bench_position_attention.py`` prints the tables and writes them to bench/results/ as JSON;
``--short`` stops at N = 4096 and leaves the largest grid out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from ceilings import measure_ceilings
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import continuum_ops as co
from continuum_ops.backends import extension

OP = "position_attention"
BATCH, HEADS, CHANNELS, DIMENSION = 8, 2, 64, 2
SIZES, GRIDS = (4096, 16384), (128, 416)
QUANTILE = 0.02  # of the keys are within the radius of the local cases
ROWS = 32  # of the outputs and of grad_value are compared with float64
CHUNK = 512  # query rows that the chunked form holds at a time
BOUND = 1e-5  # largest error allowed, relative to the largest entry
KEOPS_BOUND = 1e-4  # its float32 sum over all queries, the gradient of the rate, is off by 2e-5
# Flops per score, column and head, and exponentials per score and head. The backward has two more products.
COST = {"forward": (2, 1), "forward + backward": (6, 2)}

Attention = Callable[..., Tensor]  # (points, value, rate, radius) -> out (B, H, N, C)


@dataclass(frozen=True)
class Inputs:
    """One mesh for queries, keys and the whole batch; gradients of value and rate are asked for."""

    points: Tensor  # (N, d), uniform in the unit square, or the points of `grid`
    value: Tensor  # (B, N, C)
    rate: Tensor  # (H,)
    grad_out: Tensor  # (B, H, N, C)
    rows: Tensor  # of out and of grad_value, compared with float64
    radius: float | None = None
    grid: co.Grid | None = None

    def requiring_grad(self) -> Inputs:
        value, rate = (t.detach().requires_grad_() for t in (self.value, self.rate))
        return replace(self, value=value, rate=rate)


def make_inputs(n: int, *, side: int | None = None, batch: int = BATCH, local: bool = False) -> Inputs:
    """n points, or a grid of side x side."""
    g = torch.Generator().manual_seed(n)
    grid = None if side is None else co.Grid.uniform((side, side), kind="cell", dtype=torch.float32)
    points = torch.rand(n, DIMENSION, generator=g) if grid is None else grid.points
    count = points.shape[0]
    value = torch.randn(batch, count, CHANNELS, generator=g)
    grad_out = torch.randn(batch, HEADS, count, CHANNELS, generator=g)
    radius = math.sqrt(QUANTILE / math.pi) if local else None  # a disc of that area
    candidates = torch.arange(count) if radius is None else undisputed_rows(points, radius)
    places = torch.linspace(0, candidates.numel() - 1, min(candidates.numel(), ROWS)).round().long()
    rate = torch.tensor([10.0, 100.0])
    return Inputs(points, value, rate, grad_out, candidates[places], radius, grid)


def squared_reach(radius: float) -> float:
    """A key counts up to this squared distance, in float32."""
    return radius**2 * (1 + 8 * torch.finfo(torch.float32).eps)


def undisputed_rows(points: Tensor, radius: float) -> Tensor:
    """Points that see no key so near the radius that float32 decides, nor are seen by a point that does."""
    points, reach = points.double(), squared_reach(radius)
    doubtful = torch.zeros(points.shape[0], dtype=torch.bool)
    for rows in torch.arange(points.shape[0]).split(1024):
        d2 = (points[rows, None] - points).square().sum(-1)
        doubtful[rows] = ((d2 / reach - 1).abs() < 4 * torch.finfo(torch.float32).eps).any(-1)
    seen = (points[doubtful, None] - points).square().sum(-1) <= 1.001 * reach
    return (~(doubtful | seen.any(0))).nonzero()[:, 0]


def exact(x: Inputs, *, backward: bool, chunk_bytes: int = 2**26) -> dict[str, Tensor]:
    """Sampled rows of out, sampled rows of grad_value and grad_rate in float64, in chunks of query rows.

    With p the probabilities and g the gradient of out: dv_k = sum_i p_ik g_i and
    drate = -sum_ik p_ik (g_i . v_k - g_i . out_i) d2_ik, products over all batch entries and channels.
    """
    points, rate = x.points.double(), x.rate.detach().double()
    v = x.value.detach().double().permute(1, 0, 2).flatten(1)  # (N, B C)
    n, keep = points.shape[0], x.rows
    batch = x.value.shape[0]

    def probabilities(rows: Tensor) -> tuple[Tensor, Tensor]:
        d2 = (points[rows, None] - points).square().sum(-1)
        scores = -rate[:, None, None] * d2
        if x.radius is not None:
            scores = scores.masked_fill(d2 > squared_reach(x.radius), -math.inf)
        return d2, scores.softmax(-1)

    _, p = probabilities(keep)
    result = {"out": (p @ v).unflatten(-1, (batch, CHANNELS)).permute(2, 0, 1, 3)}
    if not backward:
        return result
    g = x.grad_out.double().permute(1, 2, 0, 3).flatten(2)  # (H, N, B C)
    grad_value, grad_rate = torch.zeros(keep.numel(), v.shape[1]).double(), torch.zeros(HEADS).double()
    step = max(1, chunk_bytes // (8 * n * HEADS))
    for start in range(0, n, step):
        rows = torch.arange(start, min(start + step, n))
        d2, p = probabilities(rows)
        grad_value += (p[:, :, keep].mT @ g[:, rows]).sum(0)
        gp = g[:, rows] @ v.T
        grad_rate -= (p * (gp - (p * gp).sum(-1, keepdim=True)) * d2).sum((1, 2))
    result["value"] = grad_value.unflatten(-1, (batch, CHANNELS)).permute(1, 0, 2)
    result["rate"] = grad_rate
    return result


# --- the forms ------------------------------------------------------------------------------------


def ours(x: Inputs, value: Tensor, rate: Tensor) -> Tensor:
    return co.position_attention(x.points, x.points, value, rate, radius=x.radius)


def ours_pair_by_pair(x: Inputs, value: Tensor, rate: Tensor) -> Tensor:
    """The same without a grid between the points: every probability is computed."""
    return ours(x, value, rate)


def ours_on_grid(x: Inputs, value: Tensor, rate: Tensor) -> Tensor:
    assert x.grid is not None
    return co.position_attention(x.grid, x.grid, value, rate, radius=x.radius)


def _softmax_rows(x: Inputs, rows: Tensor, rate: Tensor) -> Tensor:
    scores = -rate[:, None, None] * (rows[:, None] - x.points).square().sum(-1)
    return scores.softmax(-1)


def plain(x: Inputs, value: Tensor, rate: Tensor) -> Tensor:
    return torch.einsum("hnm,bmc->bhnc", _softmax_rows(x, x.points, rate), value)


def chunked_mm(x: Inputs, value: Tensor, rate: Tensor) -> Tensor:
    """One torch.mm for each chunk of rows and all batch entries; the backward recomputes each chunk."""
    columns = value.permute(1, 0, 2).flatten(1)

    def block(rows: Tensor, rate: Tensor, columns: Tensor) -> Tensor:
        return (_softmax_rows(x, rows, rate).flatten(0, 1) @ columns).view(
            rate.shape[0], -1, columns.shape[1]
        )

    def run(rows: Tensor) -> Tensor:
        if rate.requires_grad or value.requires_grad:
            return checkpoint(block, rows, rate, columns, use_reentrant=False)
        return block(rows, rate, columns)

    out = torch.cat([run(rows) for rows in x.points.split(CHUNK)], 1)
    return out.unflatten(-1, (value.shape[0], CHANNELS)).permute(2, 0, 1, 3)


def keops(x: Inputs, value: Tensor, rate: Tensor) -> Tensor:
    from pykeops.torch import LazyTensor

    d2 = ((LazyTensor(x.points[None, :, None]) - LazyTensor(x.points[None, None])) ** 2).sum(-1)
    v = LazyTensor(value[:, None].contiguous())
    heads = [(-r.view(1, 1, 1, 1) * d2).sumsoftmaxweight(v, axis=2) for r in rate]
    return torch.stack([h.view(value.shape[0], -1, CHANNELS) for h in heads], 1)


PLAIN, CHUNKED, KEOPS = "(a) plain PyTorch", "(b) chunked torch.mm", "(c) pykeops LazyTensor"
LOCAL, ON_GRID, DIRECT = f"{OP}, local", f"{OP}, Grid", f"{OP}, pair by pair"
FORMS: dict[str, Attention] = {
    OP: ours,
    DIRECT: ours_pair_by_pair,
    LOCAL: ours,
    ON_GRID: ours_on_grid,
    PLAIN: plain,
    CHUNKED: chunked_mm,
    KEOPS: keops,
}


def make_run(form: str, x: Inputs, passes: str) -> Callable[[], tuple[Tensor, ...]]:
    """A call that returns sampled rows of out, or of out and grad_value, and grad_rate."""
    attend, keep = FORMS[form], x.rows

    def forward() -> tuple[Tensor, ...]:
        return (attend(x, x.value, x.rate)[:, :, keep],)

    def forward_backward() -> tuple[Tensor, ...]:
        out = attend(x, x.value, x.rate)
        grad_value, grad_rate = torch.autograd.grad(out, (x.value, x.rate), x.grad_out)
        return out.detach()[:, :, keep], grad_value[:, keep], grad_rate

    run = forward if passes == "forward" else forward_backward
    kernels = extension()[0]
    if form != DIRECT or kernels is None:
        return run

    def pair_by_pair() -> tuple[Tensor, ...]:
        kernels.set_grids(kernels.Grids.never)
        try:
            return run()
        finally:
            kernels.set_grids(kernels.Grids.when_faster)

    return pair_by_pair


def make_candidate(form: str, x: Inputs, passes: str, reference: dict[str, Tensor]) -> harness.Candidate:
    names = ["out"] if passes == "forward" else ["out", "value", "rate"]
    bound = KEOPS_BOUND if form == KEOPS else BOUND
    return harness.Candidate(form, make_run(form, x, passes), [reference[k] for k in names], bound)


def plain_bytes(n: int, passes: str) -> int:
    """Differences, distances, scores and probabilities of all heads; with their gradients in the backward."""
    return 4 * n * n * (DIMENSION + 1 + 2 * HEADS + (2 * HEADS if passes != "forward" else 0))


def reason_to_skip(form: str, x: Inputs, passes: str, keops_size: int) -> str:
    if form == KEOPS and importlib.util.find_spec("pykeops") is None:
        return "not installed"
    if form == KEOPS and x.points.shape[0] > keops_size:
        return "not run"
    need, free = plain_bytes(x.points.shape[0], passes), harness.available_bytes()
    if form == PLAIN and need >= 0.8 * free:
        return f"would need {need / 1e9:.1f} GB of {free / 1e9:.1f}"
    return ""


def cases(args: argparse.Namespace, allocator: str) -> list[tuple[str, dict[str, Any], dict[str, Inputs]]]:
    """(table, case, inputs of each form); with kept memory only what allocates N x M, beside our op."""
    result: list[tuple[str, dict[str, Any], dict[str, Inputs]]] = []
    others = [PLAIN, CHUNKED, KEOPS] if allocator == "default" else [PLAIN, CHUNKED]
    for n in args.sizes:
        x = make_inputs(n)
        result.append(("points", {"N": n}, dict.fromkeys([OP, DIRECT, *others], x)))
    if allocator == "default":
        x, near = make_inputs(max(args.sizes)), make_inputs(max(args.sizes), local=True)
        result.append(
            (
                f"local (quantile {QUANTILE}) and global",
                {"N": max(args.sizes)},
                {LOCAL: near, DIRECT: x, OP: x},
            )
        )
    for side in args.grids:
        largest = side * side > max(SIZES)  # all-to-all there: nobody else's form ends in time or fits
        x = make_inputs(side * side, side=side, batch=1 if largest else BATCH)
        forms = [ON_GRID] if largest else [ON_GRID, PLAIN]
        if not largest or allocator == "default":
            case = {"grid": f"{side} x {side}", "B": x.value.shape[0]}
            result.append(("grid", case, dict.fromkeys(forms, x)))
    return result


def time_all(args: argparse.Namespace, allocator: str) -> list[dict[str, Any]]:
    rows = []
    for table, case, inputs in cases(args, allocator):
        for passes in COST:
            harness.progress(f"{table}, {case}, {passes}, {allocator} memory")
            label = {"table": f"{table}, {passes}, float32", "passes": passes, "case": case}
            candidates, skipped, references = [], [], {}
            for form, x in inputs.items():
                reason = reason_to_skip(form, x, passes, args.keops_size)
                if reason:
                    skipped.append({"candidate": form, "skipped": reason})
                    continue
                if id(x) not in references:
                    # At 416 x 416 the float64 gradients alone would take an hour: the output is compared.
                    complete = passes != "forward" and x.points.shape[0] <= max(SIZES)
                    references[id(x)] = exact(x, backward=complete)
                if passes == "forward":
                    candidates.append(make_candidate(form, x, passes, references[id(x)]))
                elif "rate" in references[id(x)]:
                    candidates.append(make_candidate(form, x.requiring_grad(), passes, references[id(x)]))
            if candidates:
                timed = harness.time_interleaved(candidates, rounds=args.rounds)
                rows += [{**label, "allocator": allocator, **row} for row in (*timed, *skipped)]
    return rows


def finish_rows(rows: list[dict[str, Any]], ceilings: dict[str, float] | None) -> None:
    """Add time over the time of the table's first form; where all pairs are computed GFLOP/s and ceiling."""
    first: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if "skipped" in row:
            continue
        key = (row["table"], *row["case"].values(), row["allocator"])
        row["speedup"] = row["ms"] / first.setdefault(key, row["ms"])
        if "N" not in row["case"] or row["candidate"] in (LOCAL, OP):  # neither computes all pairs
            continue
        flops, exps = (HEADS * row["case"]["N"] ** 2 * c for c in COST[row["passes"]])
        row["gflops"] = flops * BATCH * CHANNELS / row["ms"] * 1e-6
        if ceilings is not None:
            ideal = flops * BATCH * CHANNELS / ceilings["fma_gflops"] + exps / ceilings["exp2_giga_per_s"]
            row["ceiling_fraction"] = ideal * 1e-6 / row["ms"]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help="N <= 4096 and 3 rounds, not the published protocol"
    )
    parser.add_argument("--sizes", type=int, nargs="+", help=f"N = M (default: {SIZES})")
    parser.add_argument(
        "--grids", type=int, nargs="*", help=f"points per axis of 2-D grids (default: {GRIDS})"
    )
    parser.add_argument(
        "--keops-size",
        type=int,
        default=4096,
        help="largest N of KeOps, which takes minutes above (default: 4096)",
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of torch, OpenMP and BLAS (default: 2)"
    )
    parser.add_argument("--rounds", type=int, help="clean samples per candidate (default: 7, short: 3)")
    parser.add_argument("--no-ceilings", action="store_true", help="leave the fraction of the ceiling out")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/OP-MACHINE.json)")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.sizes is None:
        args.sizes = [n for n in SIZES if n <= 4096 or not args.short]
    if args.grids is None:
        args.grids = [n for n in GRIDS if n <= 128 or not args.short]
    if args.rounds is None:
        args.rounds = 3 if args.short else 7
    for name in ("sizes", "grids"):
        if any(n < 1 for n in getattr(args, name)):
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    for name in ("rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    if args.worker is not None:
        harness.start_worker(args.threads)
        return json.dump(time_all(args, args.worker["allocator"]), sys.stdout)

    def worker(allocator: str) -> Any:
        arguments = [*argv, "--worker", json.dumps({"allocator": allocator})]
        return harness.run_worker(__file__, arguments, threads=args.threads, allocator=allocator)

    settings = {"threads": args.threads, "B": BATCH, "H": HEADS, "C": CHANNELS, "d": DIMENSION}
    document = harness.new_document(OP, {**settings, "rounds": args.rounds, "short": args.short})
    ceilings = None if args.no_ceilings else measure_ceilings([args.threads])
    document["ceilings"] = ceilings
    document["rows"] = [row for allocator in harness.ALLOCATORS for row in worker(allocator)]
    finish_rows(document["rows"], ceilings and ceilings["threads"][str(args.threads)])
    suffix = "-short" if args.short else ""
    harness.publish(document, harness.result_path(OP, document, args.out, suffix))


if __name__ == "__main__":
    main(sys.argv[1:])
