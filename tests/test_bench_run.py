"""What bench/run.py says of two results, and the exponents of bench/plots.py, on made-up rows."""

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(BENCH))
    try:
        import plots
        import run

        yield run, plots
    finally:
        sys.path.remove(str(BENCH))


def document(**speedups):
    rows = [
        {"table": "forward", "case": {"N": 8}, "allocator": "default", "candidate": c, "speedup": s}
        for c, s in speedups.items()
    ]
    rows.append(
        {"table": "forward", "case": {"N": 8}, "allocator": "default", "candidate": "z", "skipped": "no"}
    )
    return {"rows": rows}


def test_ratios_of_both_are_compared(scripts):
    run, _ = scripts
    before, now = document(ours=1.0, a=2.0, b=4.0, gone=3.0), document(ours=1.0, a=2.3, b=3.0, new=1.5)
    found = run.compare(before, now)
    assert [(r.before, r.now) for r in found] == [(2.0, 2.3), (4.0, 3.0)]
    assert [r.change for r in found] == pytest.approx([0.15, -0.25])
    text = run.render({"op": found})
    assert "| op | 2 | 1 | 0.95 |" in text
    assert "b; forward; N 8; default | 4.00 | 3.00" in text and "| a;" not in text


def test_every_benchmark_is_a_script(scripts):
    run, _ = scripts
    assert {b.script for b in run.BENCHMARKS.values()} == {p.name for p in BENCH.glob("bench_*.py")}


def test_exponent(scripts):
    _, plots = scripts
    assert plots.slope([(n, 3 * n**1.7) for n in (10, 100, 1000)]) == pytest.approx(1.7)
