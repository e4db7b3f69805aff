"""What the tests of the GPU check share: a clock that pretends, an operator of nothing, a record."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import gpu_check  # noqa: E402
from gpu import case, timing  # noqa: E402
from gpu.record import Record  # noqa: E402

CPU = torch.device("cpu")
ONES = torch.ones(3, dtype=torch.float64)
CASE = case.Case("op", "float32", case.FORWARD, 16, 1000)


class FakeClock:
    """Seconds by the name of what is called; nothing is slept."""

    def __init__(self, seconds: dict[str, float], now: list[float] | None = None) -> None:
        self.table, self.log = seconds, []
        self.now = [0.0] if now is None else now

    def seconds(self, run, calls):
        name = run()[0]
        self.log.append((name, calls))
        self.now[0] += calls * self.table[name]
        return self.table[name]

    def peak_bytes(self, run):
        run()
        return 2**20


def candidate(name, found=None, bound=1e-6):
    found = {"out": torch.ones(3)} if found is None else found
    return timing.Candidate(name, lambda: (name,), lambda: found, {"out": ONES}, bound)


def operator(names=("continuum_ops", "peer"), cases=(CASE,), build=candidate):
    return SimpleNamespace(
        NAME="op",
        HEADS=8,
        cases=lambda: list(cases),
        names=lambda c: list(names),
        inputs=lambda c, device: None,
        candidate=lambda name, c, inputs: build(name),
        flops=lambda c: 4.0 * c.dim,
    )


def new_record(path, **fields):
    document = gpu_check.new_document(gpu_check.parse(["--commit", "abc"]), ["op"])
    record = Record(path, {**document, **fields})
    record.save()
    return record
