"""The benchmark process: cases in order of importance while there is time, on the record after each."""

from __future__ import annotations

import gc
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import steps
from .case import OURS, PRECISIONS, Case, Operator, finish_rows
from .record import Budget, Estimates, Record
from .timing import Clock, CudaClock, Measured, explain, is_fatal, prepare, time_in_turns

CALLS = 7  # of a candidate at least: parity, memory, warm-up, three samples, and one to spare
COMPILE = {"FlexAttention": 12.0}  # seconds, where no earlier process has filled the compiler's cache
WARMED = 3.0  # seconds, where one has
WARM_LARGEST = 65536 * 64  # N d of what is compiled beforehand, with real tensors, beside the tests
CASE_SECONDS = 0.6  # of timing for a case whose calls are short


def operators(names: Sequence[str]) -> dict[str, Operator]:
    from . import attention, galerkin, patch, position

    known: dict[str, Any] = {module.NAME: module for module in (attention, position, patch, galerkin)}
    return {name: known[name] for name in names}


def compile_seconds(name: str, case: Case, warmed: Sequence[str]) -> float:
    """What the first call of a candidate costs beyond its time."""
    cost = next((s for prefix, s in COMPILE.items() if name.startswith(prefix)), 0.0)
    return min(cost, WARMED) if warmed_key(name, case) in warmed else cost


def warmed_key(name: str, case: Case) -> str:
    return f"{name}: {case.key}"


def affordable(
    operator: Operator, case: Case, seconds: float, estimates: Estimates, warmed: Sequence[str]
) -> dict[str, str | None]:
    """For each candidate None, or why it is left out: the sum of what is kept stays within ``seconds``.

    Ours is first: without it the others have nothing to be compared with.
    """
    reasons: dict[str, str | None] = {}
    for name in operator.names(case):
        if name != OURS and reasons.get(OURS) is not None:
            reasons[name] = f"{OURS} is left out"
            continue
        call = estimates.seconds(name, case.precision, case.passes, case.dim, case.n)
        cost = CALLS * (call or 0.0) + compile_seconds(name, case, warmed)
        reasons[name] = None
        if cost > seconds:
            reasons[name] = f"would take about {cost:.0f} s of the {max(seconds, 0.0):.0f} s left"
        else:
            seconds -= cost
    return reasons


def run_case(
    operator: Operator,
    case: Case,
    device: torch.device,
    clock: Clock,
    seconds: float,
    estimates: Estimates,
    warmed: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Rows of one case: every candidate with its time or the reason why it has none."""
    reasons = affordable(operator, case, seconds, estimates, warmed)
    if all(reasons.values()):
        return [{"candidate": name, "skipped": reason} for name, reason in reasons.items()]
    torch.set_float32_matmul_precision(PRECISIONS[case.precision].matmul)
    try:
        inputs = operator.inputs(case, device)
        found: dict[str, Measured] = {}
        for name, reason in reasons.items():
            if reason is None:
                found[name] = prepare(operator.candidate(name, case, inputs), clock)
                if found[name].reason is None:
                    estimates.observe(name, case.precision, case.passes, case.dim, case.n, found[name].first)
        time_in_turns([m for m in found.values() if m.reason is None], clock, seconds=CASE_SECONDS)
        return [
            {"candidate": name, "skipped": reason} if reason is not None else found[name].row()
            for name, reason in reasons.items()
        ]
    except Exception as error:
        if is_fatal(error):
            raise
        return [{"candidate": name, "skipped": explain(error)} for name in reasons]
    finally:
        torch.set_float32_matmul_precision("highest")


def run_cases(
    chosen: Mapping[str, Operator],
    cases: Sequence[Case],
    device: torch.device,
    clock: Clock,
    budget: Budget,
    record: Record,
    warmed: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Every case that is not on record.

    One that was begun and not ended broke an earlier process: it is not tried again.
    """
    estimates = Estimates()
    for row in record.document.get("rows", []):
        if "ms" in row:
            key = (row["candidate"], row["precision"], row["passes"], row["d"], row["N"])
            estimates.observe(*key, row["ms"] * 1e-3)
    done = record.document.setdefault("cases", {})
    for case in cases:
        if case.key in done:
            continue
        record.put("cases", case.key, "begun")
        rows = run_case(chosen[case.op], case, device, clock, budget.left(), estimates, warmed)
        record.add_rows(finish_rows(case, rows, chosen[case.op], record.document.get("rates", {})))
        record.put("cases", case.key, "ended")
        for row in rows:
            figure = row.get("skipped", f"{row['ms']:.3f} ms" if "ms" in row else "")
            progress(f"{case.key}: {row['candidate']}: {figure}")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def interleave(lists: Sequence[list[Case]]) -> list[Case]:
    """The cases of several operators, in proportion: each operator's order is kept."""
    placed = [
        ((i + 0.5) / len(cases), k, case) for k, cases in enumerate(lists) for i, case in enumerate(cases)
    ]
    return [case for _, _, case in sorted(placed, key=lambda item: item[:2])]


def describe_gpu() -> dict[str, Any]:
    """Card, driver and versions; the fields that nvidia-smi alone knows are missing where it is."""
    card = torch.cuda.get_device_properties(0)
    fields = ["driver_version", "memory.total", "clocks.max.sm", "power.limit"]
    return {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "l2_mib": card.L2_cache_size / 2**20,
        "memory_gib": round(card.total_memory / 2**30, 1),
        **steps.smi(fields),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": version_of("triton"),
        "nvcc": nvcc_version(),
    }


def version_of(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def nvcc_version() -> str | None:
    try:
        text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release [\d.]+, V([\d.]+)", text)
    return found[1] if found else None


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure_rates(clock: CudaClock, record: Record) -> None:
    from . import rates

    for name, measure in rates.measurements(clock).items():
        if name not in record.document.setdefault("rates", {}):
            record.put("rates", name, measure())
            progress(f"{name}: {record.document['rates'][name]:.3g}")


def work(*, path: Path, deadline: float, names: Sequence[str], warmed: Sequence[str]) -> None:
    """The worker of gpu_check.py: fills the record at ``path`` until it is done or ended from outside."""
    import continuum_ops

    record, chosen, device = Record.load(path), operators(names), torch.device("cuda")
    record.put("machine", "gpu", describe_gpu())
    record.put("machine", "backends", continuum_ops.backends())
    clock = CudaClock()
    measure_rates(clock, record)
    cases = interleave([operator.cases() for operator in chosen.values()])
    run_cases(chosen, cases, device, clock, Budget(deadline), record, warmed, progress)


def warm(*, names: Sequence[str], part: int, parts: int) -> None:
    """Compile what compiles while the tests run: every ``parts``-th of the cases of moderate size.

    Prints the key of each as it is ready. The compilers' caches on disk carry the result to the benchmark.
    """
    chosen, device = operators(names), torch.device("cuda")
    cases = interleave([operator.cases() for operator in chosen.values()])
    for case in [c for c in cases if c.n * c.dim <= WARM_LARGEST][part::parts]:
        operator = chosen[case.op]
        torch.set_float32_matmul_precision(PRECISIONS[case.precision].matmul)
        for name in operator.names(case):
            if name == OURS or any(name.startswith(prefix) for prefix in COMPILE):
                try:
                    operator.candidate(name, case, operator.inputs(case, device)).run()
                    torch.cuda.synchronize()
                except Exception as error:
                    if is_fatal(error):
                        raise
                    progress(f"{name}: {case.key}: {explain(error)}")
                print(f"warmed {warmed_key(name, case)}", flush=True)
