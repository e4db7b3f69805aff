"""The committed table of errors holds for the code as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import accuracy
from harness import describe_machine


def row(error: float, plain: float | str | None = 1.0, backend: str = "avx2") -> accuracy.Row:
    names = {"op": "continuum_attention", "backend": backend, "dtype": "float32", "result": "out"}
    return names | {"error": error, "input": "1 x 1", "plain": plain, "peer": None}


def test_errors_are_at_most_the_committed_ones() -> None:
    """Times 1.25, on the small inputs; chunked PyTorch, which is BLAS, on the same machine only."""
    committed = json.loads(accuracy.RESULT.read_text())
    keys = ("cpu", "blas", "torch_cpu_capability", "torch")
    here = describe_machine()
    same = all(here[k] == committed["machine"][k] for k in keys)
    threads = torch.get_num_threads()
    try:
        rows = [r for r in accuracy.cpu_table() if same or r["backend"] != "chunked"]
    finally:
        torch.set_num_threads(threads)
    assert {r["op"] for r in rows} == set(accuracy.OPS)
    assert accuracy.regressions(rows, committed["short"]) == []


def test_the_committed_table_is_within_the_budget() -> None:
    """But for large logits: where two nearly tie, the rounding of a score decides, not the operator."""
    committed = json.loads(accuracy.RESULT.read_text())
    for rows in (committed["short"], committed.get("full", [])):
        assert {r["input"] for r in rows if accuracy.beyond(r)} <= {"large logits"}
    assert {r["backend"] for r in committed["short"]} >= {"avx2", "generic", "chunked"}


@pytest.mark.parametrize(
    "now, found",
    [
        (row(2.5), []),
        (row(2.51), ["continuum_attention avx2 float32 out: 2.51 eps on 1 x 1, committed 2"]),
        (row(1.0, backend="avx9"), ["continuum_attention avx9 float32 out: not in the committed table"]),
    ],
)
def test_regressions(now: accuracy.Row, found: list[str]) -> None:
    assert accuracy.regressions([now], [row(2.0)]) == found


def test_half_an_eps_is_the_last_rounding() -> None:
    assert accuracy.regressions([row(0.5)], [row(0.1)]) == []
    assert len(accuracy.regressions([row(0.51)], [row(0.1)])) == 1


@pytest.mark.parametrize(
    "error, plain, found",
    [(8.0, 1.0, False), (8.1, 4.0, True), (8.1, 4.05, False), (8.1, "not finite", True)],
)
def test_beyond_the_budget(error: float, plain: float | str, found: bool) -> None:
    assert accuracy.beyond(row(error, plain)) is found


def test_a_wrong_result_is_seen() -> None:
    """An operator that drops its weights, an error of the order of 1 / eps."""
    name, tensors, options = next(i for i in accuracy.inputs("continuum_attention") if i[0] == "17 x 129")
    case = accuracy.cast("continuum_attention", tensors, options, torch.float32)
    g = case.cotangents()
    true, size = case.exact(g | {"lse": torch.zeros_like(g["lse"])})

    def wrong(case: accuracy.Case, t: accuracy.Tensors) -> tuple[torch.Tensor, ...]:
        return accuracy.own(case, t | {"weights": torch.ones_like(t["weights"]) + 0 * t["weights"]})

    found = accuracy.errors(accuracy.derive(wrong, case, g["out"]), true, size, torch.float32)
    assert found["out"] > 1e3 and found["d_value"] > 1e3, name
