"""The ceilings of this machine: FMA, exp2 and memory rates, to state what fraction of them a kernel reaches.

``python bench/ceilings.py`` prints them for 1 and 2 threads. ``ceilings.cpp`` is compiled with
``-march=native`` in a temporary directory; a ``torch.mm`` is timed besides, because BLAS may use a narrower
instruction set than the machine has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import torch

SOURCE = Path(__file__).with_name("ceilings.cpp")
EXP2_ERROR_BOUND = 1e-6  # a polynomial that is wrong would be no ceiling for one that is right


# Two virtual cores may share one of the host's for a while, which halves every figure of two threads.
RUNS, PAUSE = 6, 3.0


def best_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The largest of each figure of several runs."""
    threads = {
        count: {name: max(run["threads"][count][name] for run in runs) for name in figures}
        for count, figures in runs[0]["threads"].items()
    }
    return {**runs[0], "other_cpu": min(run["other_cpu"] for run in runs), "threads": threads}


def blas_gflops(threads: int, size: int = 2048, repeats: int = 7) -> float:
    """Best rate of a float32 ``torch.mm`` of two (size, size) matrices, in GFLOP/s."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b, out = (torch.ones(size, size) for _ in range(3))
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2.0 * size**3 / best * 1e-9


def measure_ceilings(threads: Sequence[int] = (1, 2)) -> dict[str, Any]:
    """Compile and run the micro-benchmarks.

    Returns ``{"isa", "exp2_error", "other_cpu", "threads": {"1": {"fma_gflops", "exp2_giga_per_s",
    "triad_gb_per_s", "first_touch_gb_per_s", "blas_gflops"}}}``, with AVX-512 ``fma_avx2_gflops`` too.
    Each figure is the best of several repetitions; ``other_cpu`` is what other processes took meanwhile.
    Raises RuntimeError without a C++ compiler (``CXX``, else g++).
    """
    cores = os.cpu_count() or 1
    if bad := [t for t in threads if not 1 <= t <= cores]:
        raise ValueError(f"threads must be between 1 and the {cores} cores of this machine, got {bad}")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError("the ceilings are measured by a C++ program: install g++ or set CXX")
    with tempfile.TemporaryDirectory() as directory:
        program = str(Path(directory) / "ceilings")
        flags = ["-std=c++17", "-O3", "-march=native", "-fopenmp"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", program], check=True)
        command = [program, *map(str, threads)]
        runs: list[dict[str, Any]] = []
        for _ in range(RUNS):
            sample = harness.take_sample(
                lambda: runs.append(json.loads(subprocess.check_output(command, text=True))), 0
            )
            runs[-1]["other_cpu"] = sample.other_cpu
            time.sleep(PAUSE)
    ceilings = best_of(runs)
    if ceilings["exp2_error"] > EXP2_ERROR_BOUND:
        raise RuntimeError(f"exp2 of ceilings.cpp is off by {ceilings['exp2_error']:.1e}, relative")
    for count in threads:
        ceilings["threads"][str(count)]["blas_gflops"] = round(blas_gflops(count), 1)
    return ceilings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default: 1 2)")
    print(json.dumps(measure_ceilings(parser.parse_args().threads), indent=2))


if __name__ == "__main__":
    main()
