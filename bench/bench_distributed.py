"""continuum_attention with its points spread over local gloo ranks: the memory of a rank, and the overhead of
the ring beside one process that does the same work on as many cores.

    python bench/bench_distributed.py                # prints the tables, writes the results
    python bench/bench_distributed.py --points 2048 --memory-points 4096 --rounds 1 --out /tmp/short.json

B = 1, float32, quadrature weights, N = M points in even parts, forward + backward with the gradients of
query, key and value. Before anything is measured, the ranks' outputs and gradients are compared with float64
at 600 points.

Memory: the growth of a rank's resident peak in its first call, less what the call returns; the largest of the
ranks. glibc returns freed memory at once (MALLOC_MMAP_THRESHOLD_), so that the peak is what was held.

Time: ranks have one thread each; the one process has as many threads as there are ranks, or cores if these
are fewer. Both wait for their turn in the same session, one sample of each a round, in alternating order; a
sample of the ring is the time of its slowest rank. Medians; bench/scaling.md says what is expected.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def drawn(points: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """query, key, value, the gradient of the output, and weights."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(heads, points, dim, generator=generator, dtype=dtype) for _ in range(4)]
    return [*tensors, torch.rand(points, generator=generator, dtype=dtype)]


def step(function: Any, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    q, k, v, g, w = tensors
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = function(*leaves, w, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def mine(tensors: list[Tensor], rank: int, ranks: int) -> list[Tensor]:
    """This rank's part, in memory of its own, so that the whole is free to go."""
    *fields, w = tensors
    parts = [*(t.tensor_split(ranks, -2)[rank] for t in fields), w.tensor_split(ranks)[rank]]
    return [t.clone(memory_format=torch.contiguous_format) for t in parts]


def parity(rank: int, ranks: int, heads: int, dim: int) -> float:
    full = drawn(PARITY_POINTS, heads, dim, torch.float64)
    true = step(co.continuum_attention, full)
    found = step(co.distributed.continuum_attention, mine([t.float() for t in full], rank, ranks))
    error = max(
        ((x.double() - t.tensor_split(ranks, -2)[rank]).abs().max() / t.abs().max()).item()
        for x, t in zip(found, true, strict=True)
    )
    if not error <= PARITY:
        raise harness.ParityError(
            f"rank {rank} is off from float64 by {error:.2e}, the bound is {PARITY:.0e}"
        )
    return error


def join(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


# --- memory ---------------------------------------------------------------------------------------


def memory_worker(rank: int, ranks: int, heads: int, dim: int, points: int, folder: str) -> None:
    join(rank, ranks, folder)
    error = parity(rank, ranks, heads, dim)
    tensors = mine(drawn(points, heads, dim, torch.float32), rank, ranks)
    growth, outputs = harness.peak_growth(lambda: step(co.distributed.continuum_attention, tensors))
    scores = 4.0 * heads * (points / ranks) * points
    row = {"error": error, **harness.memory_fields(tensors, growth, outputs, scores)}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def memory(ranks: int, heads: int, dim: int, points: int) -> dict[str, Any]:
    before = {name: os.environ.get(name) for name in RETURNED}
    os.environ.update(RETURNED)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(memory_worker, (ranks, heads, dim, points, folder), nprocs=ranks)
        rows = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value
    worst = {key: max(row[key] for row in rows) for key in rows[0]}
    return {"ranks": ranks, "points": points, **worst}


# --- time -----------------------------------------------------------------------------------------


def timed_worker(
    pipe: Any, rank: int, ranks: int, threads: int, settings: dict[str, int], folder: str
) -> None:
    """Waits for "go", answers with (wall seconds, CPU seconds) of one call; ranks = 0: one process."""
    heads, dim, points = settings["heads"], settings["dim"], settings["points"]
    if ranks == 0:
        torch.set_num_threads(threads)
        function, tensors = co.continuum_attention, drawn(points, heads, dim, torch.float32)
        error = 0.0
    else:
        join(rank, ranks, folder)
        error = parity(rank, ranks, heads, dim)
        function = co.distributed.continuum_attention
        tensors = mine(drawn(points, heads, dim, torch.float32), rank, ranks)
    pipe.send(error)
    while pipe.recv() == "go":
        if ranks:
            dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        step(function, tensors)
        if ranks:
            dist.barrier()
        pipe.send((time.perf_counter() - start, time.process_time() - cpu))
    if ranks:
        dist.destroy_process_group()


class Team:
    """Processes that make one call together when asked."""

    def __init__(self, ranks: int, threads: int, settings: dict[str, int], folder: str) -> None:
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(max(1, ranks)):
            here, there = context.Pipe()
            arguments = (there, rank, ranks, threads, settings, folder)
            process = context.Process(target=timed_worker, args=arguments, daemon=True)
            process.start()
            there.close()  # so that a worker that dies is an EOFError here, not a wait for ever
            self.pipes.append(here)
            self.processes.append(process)
        self.error = max(pipe.recv() for pipe in self.pipes)

    def sample(self) -> harness.Sample:
        machine, start = harness._machine_cpu_seconds(), time.perf_counter()
        for pipe in self.pipes:
            pipe.send("go")
        answers = [pipe.recv() for pipe in self.pipes]
        wall = time.perf_counter() - start
        others = harness._machine_cpu_seconds() - machine - sum(cpu for _, cpu in answers)
        return harness.Sample(max(seconds for seconds, _ in answers), max(0.0, others / wall))

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.send("stop")
        for process in self.processes:
            process.join()


@contextmanager
def teams(ranks: int, threads: int, settings: dict[str, int]) -> Iterator[list[Team]]:
    with tempfile.TemporaryDirectory() as folder:
        found = [Team(n, threads, settings, folder) for n in (ranks, 0)]
        yield found
        for team in found:
            team.stop()


def overhead(ranks: int, rounds: int, settings: dict[str, int]) -> dict[str, Any]:
    threads = min(ranks, os.cpu_count() or 1)
    with teams(ranks, threads, settings) as (ring, alone):
        timings = {"ring": harness.Timing(), "one_process": harness.Timing()}
        order = [(ring, timings["ring"]), (alone, timings["one_process"])]
        for team, _ in order:
            team.sample()  # warm-up
        for number in range(rounds):
            for team, timing in order[:: -1 if number % 2 else 1]:
                timing.samples.append(team.sample())
        error = ring.error
    rows = {name: timing.row() for name, timing in timings.items()}
    ratio = rows["ring"]["ms"] / rows["one_process"]["ms"]
    case = {"N": settings["points"], "ranks": ranks, "threads of one process": threads}
    where = {"table": "forward + backward", "case": case, "candidate": "ring", "allocator": "default"}
    return {**where, "error": error, "ratio": ratio, **rows}


# --- the whole ------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, nargs="+", default=[16384, 65536], help="of the times")
    parser.add_argument("--memory-points", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, help="result file; default: bench/results/distributed-<machine>.json"
    )
    options = parser.parse_args(argv)
    document = harness.new_document("distributed", {k: v for k, v in vars(options).items() if k != "out"})
    document["memory"], document["rows"] = [], []
    for ranks in options.ranks:
        harness.progress(f"memory, {ranks} ranks, {options.memory_points} points")
        document["memory"].append(memory(ranks, options.heads, options.dim, options.memory_points))
    for points in options.points:
        for ranks in (n for n in options.ranks if n > 1):
            harness.progress(f"time, {ranks} ranks, {points} points")
            settings = {"heads": options.heads, "dim": options.dim, "points": points}
            document["rows"].append(overhead(ranks, options.rounds, settings))
    path = harness.result_path("distributed", document, options.out)
    harness.write_json(path, document)
    print(render(document))
    print(f"wrote {path}")


def render(document: dict[str, Any]) -> str:
    lines = [
        "| N | ranks | inputs and outputs of a rank, MiB | beyond them, MiB | times the ranks, MiB |",
        "|---|---|---|---|---|",
    ]
    for row in document["memory"]:
        fields = row["inputs_mib"] + row["outputs_mib"]
        lines.append(
            f"| {row['points']:,} | {row['ranks']} | {fields:.1f} | {row['extra_mib']:.1f} | "
            f"{row['extra_mib'] * row['ranks']:.1f} |"
        )
    lines += [
        "",
        "| N | ranks | ring, s | threads of one process | one process, s | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        points, ranks, threads = row["case"].values()
        lines.append(
            f"| {points:,} | {ranks} | {row['ring']['ms'] / 1e3:.2f} | {threads} | "
            f"{row['one_process']['ms'] / 1e3:.2f} | {row['ratio']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
