"""Single kernels under pytest-benchmark: ``pytest bench --benchmark-only``, with the inputs of the script."""

from __future__ import annotations

import functools

import bench_patch_attention as script
import harness
import pytest
from torch import Tensor


@functools.cache
def inputs_and_exact(side: int) -> tuple[script.Inputs, dict[str, Tensor]]:
    x = script.make_inputs(side)
    return x, script.exact(x, backward=True)


@pytest.mark.parametrize("side", [52, 65])
@pytest.mark.parametrize(
    "passes, form",
    [("forward", form) for form in script.FORMS]
    + [("forward + backward", form) for form in script.FORMS[:2]],
)
def test_grid(benchmark, passes: str, form: str, side: int) -> None:
    x, exact = inputs_and_exact(side)
    x = x if passes == "forward" else x.requiring_grad()
    candidate = script.make_candidate(form, x, passes, exact)
    benchmark.group = f"{passes}, grid of {side} x {side}"
    benchmark.extra_info["error"] = harness.check_parity(candidate)
    benchmark(candidate.run)
