"""What each operator allocates: the formulas of docs/memory.md, and the measured growth of the resident peak.

Prints a JSON row for each operator, two shapes, forward and forward + backward; with --grids instead what
position_attention takes through a grid, which is measured only. Linux only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT)]

import torch  # noqa: E402
from harness import peak_growth  # noqa: E402
from torch import Tensor  # noqa: E402

import continuum_ops as co  # noqa: E402
from continuum_ops.backends import extension  # noqa: E402

B, H, D = 1, 4, 32
PATCHES = 8
SHAPES = ((32_768, 128), (128, 32_768))  # queries, keys
PASSES = ("forward", "backward")
GRID_POINTS, GRID_COLUMNS, GRID_RATES = 32_768, 64, (1.0, 100.0)  # queries and keys each
OPS = ("continuum_attention", "position_attention", "patch_attention", "galerkin_attention")


def inputs(op: str, n: int, m: int) -> list[Tensor]:
    torch.manual_seed(0)
    if op == "position_attention":
        return [torch.rand(n, 2), torch.rand(m, 2), torch.randn(B, m, D), torch.ones(H), torch.rand(m)]
    if op == "patch_attention":
        return [torch.randn(B, rows, H, D) for rows in (n, m, m)]
    return [torch.randn(B, H, rows, D) for rows in (n, m, m)] + [torch.rand(m)]


def call(op: str, n: int, m: int) -> Callable[..., Tensor]:
    if op == "patch_attention":
        size = min(n, m) // PATCHES
        return lambda q, k, v: co.patch_attention(q, k, v, size)
    return getattr(co, op)


def formula(op: str, n: int, m: int) -> dict[str, int]:
    """Bytes of a call beyond its inputs as in docs/memory.md, float32: forward, and forward + backward."""
    queries, keys = B * H * n * D, B * H * m * D
    if op == "continuum_attention":
        forward = queries + 3 * B * H * n
        backward = forward + queries + 2 * keys
    elif op == "position_attention":
        forward = queries + 3 * H * n + B * m * D + 6 * (n + m)
        backward = 2 * queries + 7 * H * n + 2 * B * m * D + 12 * (n + m)
    elif op == "patch_attention":
        scores = B * H * PATCHES * max(n, m) // (min(n, m) // PATCHES)
        forward = queries + 5 * scores
        backward = 2 * queries + 2 * keys + 8 * scores
    else:
        forward = queries + keys
        backward = 2 * queries + 4 * keys
    return {"forward": 4 * forward, "backward": 4 * backward}


def measure(op: str, n: int, m: int, which: str) -> int:
    """Growth of the resident peak of one call in this process, outputs included, after one on few points."""
    torch.set_num_threads(1)

    def run(n: int, m: int) -> Callable[[], list[Tensor]]:
        leaves = [t.requires_grad_(which == "backward") for t in inputs(op, n, m)]
        function = call(op, n, m)
        grad_out = torch.ones(B, n, H, D) if op == "patch_attention" else torch.ones(B, H, n, D)
        return once(function, leaves, grad_out, which)

    run(256, 256)()
    return peak_growth(run(n, m))[0]


def once(
    function: Callable[..., Tensor], leaves: list[Tensor], grad_out: Tensor, which: str
) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        out = function(*leaves)
        return [out] if which == "forward" else [out, *torch.autograd.grad(out, leaves, grad_out)]

    return run


def measure_grid(n: int, columns: int, rate: float, which: str) -> int:
    """The same of position_attention where every head goes through a grid; RuntimeError if one does not."""
    torch.set_num_threads(1)
    kernels = extension()[0]
    if kernels is None:
        raise RuntimeError("needs the C++ kernels")

    def run(n: int) -> Callable[[], list[Tensor]]:
        torch.manual_seed(0)
        points, weights = torch.rand(2, n, 2), 0.5 + torch.rand(n)
        leaves = [*points.unbind(), torch.randn(B, n, columns), torch.full((H,), rate), weights]
        leaves = [t.clone().requires_grad_(which == "backward") for t in leaves]
        return once(co.position_attention, leaves, torch.ones(B, H, n, columns), which)

    run(256)()
    call, before = run(n), kernels.heads_through_grids()
    growth = peak_growth(call)[0]
    through = kernels.heads_through_grids() - before
    if through != H * (1 if which == "forward" else 2):
        raise RuntimeError(f"{through} of the {H} heads' passes went through a grid")
    return growth


def in_a_child(measured: Callable[..., int], *arguments: Any) -> int:
    """What is measured in a fork of this process, which has allocated nothing that could be used again."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(measured(*arguments)).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError(f"{arguments}: the measurement failed")
    return int(text)


def table() -> list[dict[str, Any]]:
    """The rows, measured in a fresh process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).resolve())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grids", action="store_true")
    if parser.parse_args().grids:
        for rate, which in itertools.product(GRID_RATES, PASSES):
            row = {
                "op": "position_attention, grid",
                "points": GRID_POINTS,
                "columns": GRID_COLUMNS,
                "rate": rate,
            }
            measured = in_a_child(measure_grid, GRID_POINTS, GRID_COLUMNS, rate, which) / 2**20
            print(json.dumps({**row, "pass": which, "measured_mib": round(measured, 2)}), flush=True)
        return
    for op, (n, m), which in itertools.product(OPS, SHAPES, PASSES):
        row = {"op": op, "queries": n, "keys": m, "pass": which}
        row["formula_mib"] = round(formula(op, n, m)[which] / 2**20, 2)
        row["measured_mib"] = round(in_a_child(measure, op, n, m, which) / 2**20, 2)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
