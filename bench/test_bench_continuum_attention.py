"""Single kernels under pytest-benchmark: ``pytest bench --benchmark-only``, with the inputs of the script."""

from __future__ import annotations

import functools

import bench_continuum_attention as script
import harness
import pytest
from torch import Tensor

CASES = [(1024, 16), (1024, 64), (1025, 32)]


@functools.cache
def inputs_and_exact(n: int, dim: int, weighted: bool) -> tuple[script.Inputs, dict[str, Tensor]]:
    x = script.make_inputs(n, dim)
    return x, script.exact(x, weighted=weighted)


@pytest.mark.parametrize(("n", "dim"), CASES)
@pytest.mark.parametrize("form", list(script.FORMS))
def test_forward(benchmark, form: str, n: int, dim: int) -> None:
    x, exact = inputs_and_exact(n, dim, form != script.UNWEIGHTED)
    candidate = script.make_candidate(form, x, "forward", exact)
    benchmark.group = f"forward, N = {n}, d = {dim}"
    benchmark.extra_info["error"] = harness.check_parity(candidate)
    benchmark(candidate.run)


# FlexAttention has no backward on CPUs.
@pytest.mark.parametrize(("n", "dim"), CASES)
@pytest.mark.parametrize("form", [f for f in script.FORMS if f != script.FLEX])
def test_forward_backward(benchmark, form: str, n: int, dim: int) -> None:
    x, exact = inputs_and_exact(n, dim, form != script.UNWEIGHTED)
    x = x.requiring_grad(weights=False)
    candidate = script.make_candidate(form, x, "forward + backward", exact)
    benchmark.group = f"forward + backward, N = {n}, d = {dim}"
    benchmark.extra_info["error"] = harness.check_parity(candidate)
    benchmark(candidate.run)


@pytest.mark.parametrize("form", [f for f in script.FORMS if f not in (script.UNWEIGHTED, script.FLEX)])
def test_forward_backward_with_weights(benchmark, form: str) -> None:
    x, exact = inputs_and_exact(1024, 16, True)
    x = x.requiring_grad(weights=True)
    candidate = script.make_candidate(form, x, "forward + backward", exact)
    benchmark.group = "forward + backward, weights too, N = 1024, d = 16"
    benchmark.extra_info["error"] = harness.check_parity(candidate)
    benchmark(candidate.run)
