"""One head of pointwise attention on a fine grid, in a process of its own, which has a memory of its own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

from .. import continuum_attention
from ..mesh import Grid
from ..training.progress import progress_bar
from .machine import PeakMemory
from .settings import Settings

# The child looks for the package where this process found it.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from continuum_ops.demo.large_grid import measure; "
    "print(json.dumps(measure(*map(int, sys.argv[2:]))))"
)
CHECKED_ROWS = 16


def measure_in_child(settings: Settings) -> dict[str, Any]:
    """`measure` in a fresh interpreter; Ctrl-C ends it at once, though one call to the kernel takes seconds.

    Raises:
        RuntimeError: the child failed; its own message is on stderr.
    """
    numbers = (settings.grid_side, settings.grid_head_dim, settings.seed, settings.threads)
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), *map(str, numbers)]
    name = f"attention on {settings.grid_side} x {settings.grid_side}"
    with (
        progress_bar(None, name, "s", bar_format="{desc}: {elapsed}") as bar,
        # A session of its own: Ctrl-C reaches this process alone, which then ends the child.
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child,
    ):
        try:
            while True:
                try:
                    output, _ = child.communicate(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    bar.update()
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        raise RuntimeError(f"{name} failed: its process ended with code {child.returncode}")
    return json.loads(output.splitlines()[-1])


@torch.no_grad()
def measure(side: int, head_dim: int, seed: int, threads: int) -> dict[str, Any]:
    """Time, memory and accuracy of one head of self-attention on a side x side grid of the unit square.

    Query, key and value are head_dim smooth functions each, cos(omega . x + phase) with components of omega
    from N(0, (2 pi)^2); weights are the grid's (trapezoid). The error is the largest of `CHECKED_ROWS` rows
    against float64, relative to the largest |value|.
    """
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    mesh = Grid.uniform((side, side)).to(dtype=torch.float32)
    query, key, value = (_functions(mesh.points, head_dim, generator) for _ in range(3))
    weights = mesh.weights
    few = query[:, :64]
    continuum_attention(few, few, few)  # starts the threads before anything is measured

    with PeakMemory() as memory:
        start, cpu_start = time.perf_counter(), time.process_time()
        out = continuum_attention(query, key, value, weights)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    assert isinstance(out, Tensor)

    n = len(mesh)
    rows = torch.linspace(0, n - 1, CHECKED_ROWS).long()
    scores = query[0, rows].double() @ key[0].double().T / math.sqrt(head_dim)
    mass = weights.double() * torch.exp(scores - scores.amax(1, keepdim=True))
    exact = mass @ value[0].double() / mass.sum(1, keepdim=True)
    error = (out[0, rows] - exact).abs().max() / value.abs().max()
    return {
        "mesh": f"{side} x {side}",
        "points": n,
        "head_dim": head_dim,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_memory_bytes": memory.bytes,
        "inputs_and_output_bytes": sum(
            t.numel() * t.element_size() for t in (query, key, value, weights, out)
        ),
        "n_by_n_bytes": n * n * query.element_size(),
        "error_against_float64": error.item(),
    }


def _functions(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(1, N, count): smooth functions at the points, one head."""
    frequency = 2 * math.pi * torch.randn(points.shape[-1], count, generator=generator)
    phase = 2 * math.pi * torch.rand(count, generator=generator)
    return torch.cos(points @ frequency + phase).unsqueeze(0)
