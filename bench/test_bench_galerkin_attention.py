"""Small encoders under pytest-benchmark: ``pytest bench --benchmark-only``, with the inputs of the script."""

from __future__ import annotations

import bench_galerkin_attention as script
import harness
import pytest


@pytest.mark.parametrize("passes", ["forward", "forward + backward"])
@pytest.mark.parametrize("kind", script.TYPES)
def test_encoder(benchmark, kind: str, passes: str) -> None:
    inputs, encoder = script.make_inputs(512, 64, 1), script.make_encoder(kind, 64, 2)
    candidate = script.make_candidate(kind, encoder, inputs, passes, script.exact(encoder, kind, inputs[0]))
    benchmark.group = f"{passes}, N = 512, d = 64, 2 layers"
    benchmark.extra_info["error"] = harness.check_parity(candidate)
    benchmark(candidate.run)
