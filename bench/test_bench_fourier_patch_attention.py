"""Small cases under pytest-benchmark: ``pytest bench --benchmark-only``, with the inputs of the script."""

from __future__ import annotations

import bench_fourier_patch_attention as script
import harness
import pytest


@pytest.mark.parametrize("passes", script.PASSES)
@pytest.mark.parametrize("kind", [script.OURS, script.USUAL, script.TUNED])
def test_attention(benchmark, kind: str, passes: str) -> None:
    size = (4, 16, 5, 32)
    case, exact = script.make_case(*size), script.reference(*size)
    candidate = script.make_candidate(kind, case, passes, exact)
    benchmark.group = f"{passes}, 64 x 64, patch 16, 5 modes, d = 32"
    benchmark.extra_info["error"] = harness.check_parity(candidate)
    benchmark(candidate.run)
