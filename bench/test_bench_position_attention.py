"""Single kernels under pytest-benchmark: ``pytest bench --benchmark-only``, with the inputs of the script."""

from __future__ import annotations

import functools

import bench_position_attention as script
import harness
import pytest
from torch import Tensor

SIZES = [1024, 1025]
FORMS = [script.OP, script.DIRECT, script.LOCAL, script.PLAIN, script.CHUNKED]


@functools.cache
def inputs_and_exact(n: int, local: bool) -> tuple[script.Inputs, dict[str, Tensor]]:
    x = script.make_inputs(n, local=local)
    return x, script.exact(x, backward=True)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("passes", list(script.COST))
def test_points(benchmark, passes: str, form: str, n: int) -> None:
    x, exact = inputs_and_exact(n, form == script.LOCAL)
    x = x if passes == "forward" else x.requiring_grad()
    candidate = script.make_candidate(form, x, passes, exact)
    benchmark.group = f"{passes}, N = {n}"
    benchmark.extra_info["error"] = harness.check_parity(candidate)
    benchmark(candidate.run)


@pytest.mark.parametrize("passes", list(script.COST))
@pytest.mark.parametrize("form", [script.ON_GRID, script.PLAIN])
def test_grid(benchmark, passes: str, form: str) -> None:
    x = script.make_inputs(1024, side=32)
    exact = script.exact(x, backward=True)
    x = x if passes == "forward" else x.requiring_grad()
    candidate = script.make_candidate(form, x, passes, exact)
    benchmark.group = f"{passes}, grid of 32 x 32"
    benchmark.extra_info["error"] = harness.check_parity(candidate)
    benchmark(candidate.run)
