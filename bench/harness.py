"""Shared by the benchmarks: parity first, interleaved timing, peak memory, the machine, JSON and Markdown.

Linux only: noise and memory are read from /proc. A benchmark script coordinates and measures nothing itself:
it starts workers (itself again, the environment set before torch is loaded) and merges the rows they print.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import report
import torch
from gpu.record import write_json as write_json
from torch import Tensor

import continuum_ops

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
MIB = float(2**20)
NOISY = 0.10  # a sample is noisy when other processes used more CPU than this fraction of its wall time

# "kept": glibc keeps freed memory instead of returning it, so large temporaries are not faulted in again.
ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "kept": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"},
}


class ParityError(AssertionError):
    """A candidate does not compute what it is timed for."""


@dataclass(frozen=True)
class Candidate:
    """Something to time: ``run`` returns what must agree with ``reference`` (float64) within ``bound``.

    The error is max |x - ref| / max |ref| of the worst tensor. ``parity``, where given, is called in place
    of ``run`` for the comparison: the same work, returning what the reference covers (some rows of it, say).
    """

    name: str
    run: Callable[[], Sequence[Tensor]]
    reference: Sequence[Tensor]
    bound: float
    note: str = ""
    parity: Callable[[], Sequence[Tensor]] | None = None


@dataclass(frozen=True)
class Sample:
    seconds: float
    other_cpu: float  # CPU seconds of other processes and of the hypervisor per second of wall time

    @property
    def noisy(self) -> bool:
        return self.other_cpu > NOISY


@dataclass
class Timing:
    """Samples of one candidate. Statistics use the clean samples, or all if fewer than two are clean."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def clean(self) -> int:
        return sum(not s.noisy for s in self.samples)

    def row(self) -> dict[str, Any]:
        used = [s.seconds for s in self.samples if not s.noisy or self.clean < 2]
        return {
            "ms": statistics.median(used) * 1e3,
            "ms_min": min(used) * 1e3,
            "ms_max": max(used) * 1e3,
            "samples": len(self.samples),
            "clean_samples": self.clean,
        }


def check_parity(candidate: Candidate) -> float:
    """Run once and return the error against float64; ParityError if it is too large or a shape is wrong."""
    outputs = candidate.run() if candidate.parity is None else candidate.parity()
    if len(outputs) != len(candidate.reference):
        raise ParityError(f"{candidate.name}: {len(outputs)} outputs, expected {len(candidate.reference)}")
    worst = 0.0
    for i, (x, exact) in enumerate(zip(outputs, candidate.reference, strict=True)):
        if x.shape != exact.shape:
            raise ParityError(
                f"{candidate.name}: output {i} has shape {tuple(x.shape)}, expected {tuple(exact.shape)}"
            )
        error = ((x.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-300)).item()
        if not error <= candidate.bound:  # also true for NaN
            raise ParityError(
                f"{candidate.name}: output {i} is off from float64 by {error:.2e} of its largest entry, "
                f"the bound is {candidate.bound:.0e}"
            )
        worst = max(worst, error)
    return worst


def attempt(build: Callable[[], Candidate]) -> Candidate | str:
    """A peer's candidate after one call outside the timing, in which it may compile, or why there is none.

    "not installed", "out of memory", or the class of the exception that began it.
    """
    try:
        candidate = build()
    except ModuleNotFoundError:
        return "not installed"
    try:
        candidate.run()
    except ModuleNotFoundError:
        return "not installed"
    except Exception as error:
        if isinstance(error, MemoryError) or re.search(
            r"allocate memory|enough memory|bad_alloc", str(error)
        ):
            return "out of memory"
        while inner := getattr(error, "inner_exception", None) or error.__cause__:  # inductor's, dynamo's
            error = inner
        return type(error).__name__.removeprefix("Observed")  # dynamo's name of what the traced code raised
    return candidate


def _machine_cpu_seconds() -> float:
    ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_cpu_seconds() -> float:
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def take_sample(run: Callable[[], object], min_seconds: float) -> Sample:
    """Call for at least ``min_seconds``: wall seconds per call, and what other processes took meanwhile.

    The number of calls is not fixed beforehand: on a busy machine one call can take a hundred times another.
    """
    machine, own, start = _machine_cpu_seconds(), _own_cpu_seconds(), time.perf_counter()
    calls, wall = 0, 0.0
    while calls == 0 or wall < min_seconds:
        run()
        calls += 1
        wall = time.perf_counter() - start
    others = (_machine_cpu_seconds() - machine) - (_own_cpu_seconds() - own)
    return Sample(wall / calls, max(0.0, others / wall))


def time_interleaved(
    candidates: Sequence[Candidate],
    *,
    rounds: int,
    min_seconds: float = 0.2,
    max_rounds: int | None = None,
    sample: Callable[[Callable[[], object], float], Sample] = take_sample,
) -> list[dict[str, Any]]:
    """Check every candidate, then time them in turns: one row per candidate, in the order given.

    A round takes one sample of each candidate and starts one candidate later than the round before, so that
    clock drift and what a neighbour leaves in the caches fall on all alike. Rounds go on until each has
    ``rounds`` clean samples, or for ``max_rounds`` (default 2 * rounds). Nothing is timed if one fails
    parity; the parity check is the first warm-up call, one more follows where that took under a second.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    errors, quick = [], []
    for c in candidates:
        start = time.perf_counter()
        errors.append(check_parity(c))
        quick += [c] * (time.perf_counter() - start < 1.0)
    for c in quick:
        c.run()
    timings = [Timing() for _ in candidates]
    for r in range(2 * rounds if max_rounds is None else max_rounds):
        for k in range(len(candidates)):
            i = (r + k) % len(candidates)
            timings[i].samples.append(sample(candidates[i].run, min_seconds))
        if min(t.clean for t in timings) >= rounds:
            break
    return [
        {"candidate": c.name, "note": c.note, "error": e, "error_bound": c.bound, **t.row()}
        for c, e, t in zip(candidates, errors, timings, strict=True)
    ]


def _status_bytes(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {key}")
    return int(match[1]) * 1024


def peak_growth(run: Callable[[], Sequence[Tensor]]) -> tuple[int, int]:
    """(growth of the resident peak during one call, bytes of what it returned). Use it in a fresh worker.

    Warm up with a small call first, so that thread pools and lazily loaded code are not counted; a large one
    would leave memory in the allocator that the measured call then reuses unseen.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before = _status_bytes("VmRSS")
    outputs = run()
    return _status_bytes("VmHWM") - before, sum(x.numel() * x.element_size() for x in outputs)


def available_bytes() -> int:
    """MemAvailable of this machine."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError("/proc/meminfo has no MemAvailable")
    return int(match[1]) * 1024


def run_worker(script: str, arguments: Sequence[str], *, threads: int, allocator: str) -> Any:
    """Run ``script`` in a fresh process, threads and allocator set before torch loads; return its result.

    The worker prints one JSON value on stdout, as its last line: what peers print while they compile comes
    before. Its stderr (progress, errors) is passed through.
    """
    count = str(threads)
    inherited = {k: v for k, v in os.environ.items() if k not in ALLOCATORS["kept"]}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    chosen = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env={**inherited, **chosen, **ALLOCATORS[allocator]},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{Path(script).name} {' '.join(arguments)}: the worker failed ({done.returncode})")
    return json.loads(done.stdout.strip().splitlines()[-1])


def start_worker(threads: int) -> None:
    """First call of a worker: set the thread count, and limit the address space to what is available.

    A candidate that forms N x N where it does not fit then raises instead of waking the OOM killer.
    """
    torch.set_num_threads(threads)
    limit = _status_bytes("VmSize") + available_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def parse_counts(description: str, argv: Sequence[str], *counts: tuple[str, int, str]) -> argparse.Namespace:
    """Options of a benchmark whose sizes are positive numbers (name, default, help), --out and --worker."""
    parser = argparse.ArgumentParser(description=description)
    for name, default, text in counts:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/OP-MACHINE.json)")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name, _, _ in counts:
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    return args


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _cpuinfo() -> dict[str, str]:
    first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {k.strip(): v.strip() for k, v in pairs}


def _l2_size() -> str:
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (index / "level").read_text().strip() == "2":
            return (index / "size").read_text().strip()
    return "unknown"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def describe_machine() -> dict[str, Any]:
    """What a figure depends on: CPU, cache, memory, system, torch, BLAS, this package and its commit."""
    cpu = _cpuinfo()
    flags = cpu.get("flags", "").split()
    model = cpu.get("model name", platform.machine())
    family = f"family {cpu['cpu family']} model {cpu['model']}" if "cpu family" in cpu else ""
    cores = os.cpu_count() or 1
    config = torch.__config__.show()
    blas = re.search(r"Math Kernel Library Version [\w.]+|OpenBLAS [\w.]+|BLAS_INFO=\w+", config)
    commit = _git("rev-parse", "HEAD")
    changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    total = re.search(r"^MemTotal:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    slug = re.sub(r"[^a-z0-9]+", "-", f"{model} {family} {cores} cores".lower()).strip("-")
    return {
        "name": slug,
        "cpu": " ".join(filter(None, [model, f"({family})" if family else ""])),
        "vendor": cpu.get("vendor_id", "unknown"),
        "cores": cores,
        "avx2": "avx2" in flags,
        "avx512f": "avx512f" in flags,
        "virtual": "hypervisor" in flags,
        "l2": _l2_size(),
        "memory_gib": round(int(total[1]) / 2**20, 1) if total else None,
        "os": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "blas": blas[0] if blas else "unknown",
        "continuum_ops": continuum_ops.__version__,
        "commit": commit + (" (changed)" if commit and changed else ""),
        "backends": continuum_ops.backends(),
    }


def new_document(op: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The frame of a result file; the caller adds "rows", "ceilings" and "memory"."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"op": op, "created": created, "settings": dict(settings), "machine": describe_machine()}


def memory_fields(
    tensors: Sequence[Tensor], growth: float, outputs: float, scores: float
) -> dict[str, float]:
    """Columns of a memory row, in MiB: the inputs, the outputs, what a call takes beyond both, N x N scores.

    ``growth`` is that of the peak during the call, ``outputs`` what of it remains, ``scores`` the bytes that
    the scores would take.
    """
    inputs = sum(t.numel() * t.element_size() for t in tensors)
    extra = growth - outputs
    return {
        "inputs_mib": inputs / MIB,
        "outputs_mib": outputs / MIB,
        "extra_mib": extra / MIB,
        "extra_ratio": extra / (inputs + outputs),
        "scores_mib": scores / MIB,
    }


def result_path(op: str, document: dict[str, Any], out: Path | None, suffix: str = "") -> Path:
    """Where the results go: `out`, or bench/results/OP-MACHINE.json."""
    return RESULTS / f"{op}-{document['machine']['name']}{suffix}.json" if out is None else out


def publish(document: dict[str, Any], path: Path) -> None:
    """The document to a file, its tables to the standard output."""
    write_json(path, document)
    print(report.render(document))
    progress(f"written to {path}")
