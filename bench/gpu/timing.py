"""Seconds of GPU work by CUDA events, candidates in turns; errors and memory of what is timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Run = Callable[[], Sequence[Tensor]]


class Clock(Protocol):
    """What the benchmark needs of a device; the tests have one that pretends."""

    def seconds(self, run: Callable[[], object], calls: int) -> float:
        """Seconds per call of ``calls`` calls in a row, the device idle before and after."""

    def peak_bytes(self, run: Run) -> int:
        """Peak memory of one call beyond what was allocated before and what it returns."""


class CudaClock:
    """CUDA events. A buffer larger than the L2 cache is written before each sample, outside of it."""

    FLUSH_BYTES = 2**27

    def __init__(self) -> None:
        self.flush = torch.empty(self.FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def seconds(self, run: Callable[[], object], calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls

    def peak_bytes(self, run: Run) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = run()
        torch.cuda.synchronize()
        returned = sum(x.numel() * x.element_size() for x in outputs)
        return torch.cuda.max_memory_allocated() - before - returned


@dataclass
class Candidate:
    """``run`` is timed; ``parity`` does the same work and returns what ``reference`` (float64) holds by name.

    Beyond ``bound`` (max |x - ref| / max |ref|, any tensor) a candidate is wrong, and not timed.
    """

    name: str
    run: Run
    parity: Callable[[], dict[str, Tensor]]
    reference: dict[str, Tensor]
    bound: float
    note: str = ""


@dataclass
class Measured:
    """What is known of a candidate so far; ``reason`` says why it is not timed."""

    candidate: Candidate
    errors: dict[str, float] = field(default_factory=dict)
    extra_bytes: int = 0
    first: float = 0.0
    samples: list[float] = field(default_factory=list)
    reason: str | None = None

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"candidate": self.candidate.name, "note": self.candidate.note}
        if self.errors:
            row["errors"] = self.errors
        if self.reason is not None:
            return {**row, "skipped": self.reason}
        return {
            **row,
            "ms": statistics.median(self.samples) * 1e3,
            "ms_min": min(self.samples) * 1e3,
            "ms_max": max(self.samples) * 1e3,
            "samples": len(self.samples),
            "extra_mib": self.extra_bytes / 2**20,
        }


def relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    if found.keys() != exact.keys():
        raise ValueError(f"outputs {sorted(found)} were returned, {sorted(exact)} are compared")
    errors = {}
    for name, x in found.items():
        if x.shape != exact[name].shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {tuple(exact[name].shape)}")
        largest = exact[name].abs().max().clamp_min(1e-300)
        errors[name] = ((x.double() - exact[name]).abs().max() / largest).item()
    return errors


def explain(error: BaseException) -> str:
    """The type and the first line of an error, for the result file."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def prepare(candidate: Candidate, clock: Clock) -> Measured:
    """Compare with float64, then measure memory and time of a first call. What fails is a reason, not a stop.

    A broken CUDA context is a stop: nothing after it in this process would say anything.
    """
    measured = Measured(candidate)
    try:
        measured.errors = relative_errors(candidate.parity(), candidate.reference)
        wrong = {k: e for k, e in measured.errors.items() if not e <= candidate.bound}  # NaN too
        if wrong:
            text = ", ".join(f"{k} {e:.2e}" for k, e in wrong.items())
            measured.reason = f"wrong: off from float64 by {text}, the bound is {candidate.bound:.0e}"
            return measured
        measured.extra_bytes = clock.peak_bytes(candidate.run)
        measured.first = clock.seconds(candidate.run, 1)
    except Exception as error:  # no memory, no kernel for the shape, a compiler's own types
        if is_fatal(error):
            raise
        measured.reason = explain(error)
    return measured


def is_fatal(error: BaseException) -> bool:
    """True where the CUDA context is lost and the process has to end."""
    text = str(error)
    return any(
        sign in text
        for sign in (
            "illegal memory access",
            "misaligned address",
            "device-side assert",
            "unspecified launch",
        )
    )


def time_in_turns(
    ready: Sequence[Measured],
    clock: Clock,
    *,
    seconds: float,
    rounds: tuple[int, int] = (3, 9),
    min_sample: float = 4e-3,
) -> None:
    """Add samples to each: a round takes one of each and starts one later than the round before.

    As many rounds as fit ``seconds``, within ``rounds``; fast calls are repeated to last ``min_sample``.
    """
    if not ready:
        return
    calls = [max(1, round(min_sample / max(m.first, 1e-6))) for m in ready]
    whole = sum(n * m.first for n, m in zip(calls, ready, strict=True))
    count = int(min(max(seconds / max(whole, 1e-6), rounds[0]), rounds[1]))
    for r in range(count):
        for k in range(len(ready)):
            i = (r + k) % len(ready)
            ready[i].samples.append(clock.seconds(ready[i].candidate.run, calls[i]))
