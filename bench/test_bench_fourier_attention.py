"""Single kernels under pytest-benchmark: ``pytest bench --benchmark-only``, with the inputs of the script."""

from __future__ import annotations

import bench_fourier_attention as script
import harness
import pytest


@pytest.mark.parametrize("weighted", [False, True], ids=["1/N", "weights"])
@pytest.mark.parametrize("passes", ["forward", "forward + backward"])
@pytest.mark.parametrize("form", list(script.FORMS))
def test_fourier_attention(benchmark, form: str, passes: str, weighted: bool) -> None:
    x = script.make_inputs(1024, 96, 1, weighted=weighted)
    inputs = x if passes == "forward" else x.requiring_grad()
    candidate = script.make_candidate(form, inputs, passes, script.exact(x))
    benchmark.group = f"{passes}, N = 1024, d = 96"
    benchmark.extra_info["error"] = harness.check_parity(candidate)
    benchmark(candidate.run)
