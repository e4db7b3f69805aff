"""continuum_attention with its points spread over local gloo ranks, beside one process with as many threads.

    python bench/bench_distributed.py                # 1, 2 and 4 ranks; prints the table, writes the results
    python bench/bench_distributed.py --points 4096 --rounds 1 --ranks 2 --out /tmp/short.json

B = 1, float32, quadrature weights, N = M points in even parts, forward + backward with the gradients of
query, key and value. Every rank has one thread; "one process" has as many threads as there are ranks and
does the same work. Before anything is timed, the ranks' outputs and gradients are compared with float64 at
600 points. The memory of a rank is the growth of its resident peak in the first call, less what the call
returns; times are medians of the slowest rank. bench/scaling.md says what is expected.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import continuum_ops as co

PARITY_POINTS = 600
PARITY = 1e-5


def drawn(points: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """query, key, value, the gradient of the output, and weights."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(heads, points, dim, generator=generator, dtype=torch.float64) for _ in range(4)]
    return [t.to(dtype) for t in (*tensors, torch.rand(points, generator=generator, dtype=torch.float64))]


def step(function: Any, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    q, k, v, g, w = tensors
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = function(*leaves, w, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def mine(tensors: list[Tensor], rank: int, ranks: int) -> list[Tensor]:
    *fields, w = tensors
    return [*(t.tensor_split(ranks, -2)[rank].contiguous() for t in fields), w.tensor_split(ranks)[rank]]


def parity(rank: int, ranks: int, heads: int, dim: int) -> float:
    full = drawn(PARITY_POINTS, heads, dim, torch.float64)
    true = step(co.continuum_attention, full)
    found = step(
        co.distributed.continuum_attention,
        mine([t.float() for t in full], rank, ranks),
    )
    error = max(
        ((x.double() - t.tensor_split(ranks, -2)[rank]).abs().max() / t.abs().max()).item()
        for x, t in zip(found, true, strict=True)
    )
    if not error <= PARITY:
        raise harness.ParityError(
            f"rank {rank} is off from float64 by {error:.2e}, the bound is {PARITY:.0e}"
        )
    return error


def worker(rank: int, ranks: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    error = parity(rank, ranks, options.heads, options.dim)
    tensors = mine(drawn(options.points, options.heads, options.dim, torch.float32), rank, ranks)

    def run() -> list[Tensor]:
        return step(co.distributed.continuum_attention, tensors)

    growth, outputs = harness.peak_growth(run)
    seconds = []
    for _ in range(options.rounds):
        dist.barrier()
        start = time.perf_counter()
        run()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    inputs = sum(t.numel() * t.element_size() for t in tensors)
    row = {
        "error": error,
        "seconds": seconds,
        "extra_mib": (growth - outputs) / harness.MIB,
        "inputs_outputs_mib": (inputs + outputs) / harness.MIB,
    }
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def over_ranks(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (ranks, options, folder), nprocs=ranks)
        rows = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return {
        "ranks": ranks,
        "error": max(row["error"] for row in rows),
        "seconds": statistics.median(map(max, zip(*(row["seconds"] for row in rows), strict=True))),
        "extra_mib": max(row["extra_mib"] for row in rows),
        "inputs_outputs_mib": max(row["inputs_outputs_mib"] for row in rows),
    }


def one_process(threads: int, options: argparse.Namespace) -> float:
    torch.set_num_threads(threads)
    tensors = drawn(options.points, options.heads, options.dim, torch.float32)
    step(co.continuum_attention, tensors)
    samples = [
        harness.take_sample(lambda: step(co.continuum_attention, tensors), 0.0) for _ in range(options.rounds)
    ]
    return statistics.median(sample.seconds for sample in samples)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, help="result file; default: bench/results/distributed-<machine>.json"
    )
    options = parser.parse_args()
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    document = harness.new_document("distributed", settings)
    document["rows"] = []
    for ranks in options.ranks:
        harness.progress(f"{ranks} ranks")
        row = over_ranks(ranks, options)
        row["one_process_seconds"] = one_process(ranks, options)
        document["rows"].append(row)
    path = harness.result_path("distributed", document, options.out)
    harness.write_json(path, document)
    print(render(document))
    print(f"wrote {path}")


def render(document: dict[str, Any]) -> str:
    lines = [
        "| ranks | ring, s | one process, s | ratio | beyond inputs and outputs, MiB a rank | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        ratio = row["seconds"] / row["one_process_seconds"]
        lines.append(
            f"| {row['ranks']} | {row['seconds']:.2f} | {row['one_process_seconds']:.2f} | {ratio:.2f} | "
            f"{row['extra_mib']:.1f} | {row['error']:.1e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
