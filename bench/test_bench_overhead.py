"""Tiny calls under pytest-benchmark: ``pytest bench --benchmark-only``, with the inputs of the script."""

from __future__ import annotations

import bench_overhead as script
import harness
import pytest


@pytest.mark.parametrize("passes", script.PASSES)
@pytest.mark.parametrize("name", list(script.make_cases(1)))
def test_call(benchmark, name: str, passes: str) -> None:
    candidate = script.make_candidate(name, script.make_cases(4)[name], passes)
    benchmark.group = f"{passes}, N = 16, d = 16, H = 4"
    benchmark.extra_info["error"] = harness.check_parity(candidate)
    benchmark(candidate.run)
