"""Small layers under pytest-benchmark: ``pytest bench --benchmark-only``, with the inputs of the script."""

from __future__ import annotations

import bench_attention_layers as script
import harness
import pytest


@pytest.mark.parametrize("passes", script.PASSES)
@pytest.mark.parametrize("name", [script.OURS, script.PLAIN, script.NEURALOPERATOR])
@pytest.mark.parametrize(
    "layer", [script.make_galerkin(512, 64), script.make_codomain(32)], ids=["Galerkin", "codomain"]
)
def test_layer(benchmark, layer: script.Layer, name: str, passes: str) -> None:
    candidate = script.find(name, layer, passes, layer.exact())
    if isinstance(candidate, str):
        pytest.skip(candidate)
    benchmark.group = f"{passes}, {type(layer).__name__}"
    benchmark.extra_info["error"] = harness.check_parity(candidate)
    benchmark(candidate.run)
