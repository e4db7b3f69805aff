"""bench/bench_attention_layers.py: every form computes the layer, neuraloperator's where it is installed."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import bench_attention_layers as script
import harness

LAYERS = {
    "Galerkin": lambda: script.make_galerkin(37, 24),
    "Galerkin, weights": lambda: script.make_galerkin(37, 24, weighted=True),
    "codomain": lambda: script.make_codomain(7, functions=3, heads=2),
}


def neuralop():
    pytest.importorskip("neuralop", reason="make test-models installs it")


@pytest.mark.parametrize("passes", script.PASSES)
@pytest.mark.parametrize("name", [script.OURS, script.PLAIN])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_form_passes_parity(layer, name, passes):
    layer = LAYERS[layer]()
    candidate = script.make_candidate(name, layer, passes, layer.exact())
    assert len(candidate.reference) == (1 if passes == "forward" else len(layer.exact()))
    assert harness.check_parity(candidate) < 1e-5


def test_the_reference_is_the_formula_point_by_point():
    """GT (6) and CA remark 16, one sum after the other in Python's floats."""
    layer = script.make_galerkin(3, 4, heads=2, weighted=True)
    x = layer.x[0].tolist()
    w = layer.weights.tolist()

    def project(p, y):
        return [[sum(a * b for a, b in zip(row, point, strict=True)) for row in p.tolist()] for point in y]

    def normed(head):
        mean = sum(head) / len(head)
        variance = sum((c - mean) ** 2 for c in head) / len(head)
        return [(c - mean) / math.sqrt(variance + 1e-5) for c in head]

    q, k, v = (project(p, x) for p in layer.projections)
    expected = [[0.0] * 4 for _ in range(3)]
    for i in range(3):
        for c in range(4):
            h = slice(2 * (c // 2), 2 * (c // 2) + 2)
            for j in range(3):
                score = sum(a * b for a, b in zip(q[i][h], normed(k[j][h]), strict=True))
                expected[i][c] += w[j] * score * normed(v[j][h])[c % 2]
    torch.testing.assert_close(layer.exact()["out"][0], torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)

    functions = script.make_codomain(2, functions=2, heads=1)
    q, k, v = (t[0, :, :, 0].double() for t in functions.tensors())  # (T, N, D)
    for t in range(2):
        scores = [(q[t] * k[s]).sum() / 4 for s in range(2)]
        terms = [math.exp(s) for s in scores]
        out = sum(e / sum(terms) * v[s] for s, e in enumerate(terms))
        torch.testing.assert_close(functions.exact()["out"][0, t, :, 0], out, rtol=1e-12, atol=1e-12)


@pytest.mark.models
@pytest.mark.parametrize("passes", script.PASSES)
@pytest.mark.parametrize("layer", ["Galerkin", "codomain"])
def test_neuraloperators_layers_pass_parity(layer, passes):
    neuralop()
    layer = LAYERS[layer]()
    assert harness.check_parity(script.find(script.NEURALOPERATOR, layer, passes, layer.exact())) < 1e-5


@pytest.mark.models
def test_neuraloperators_weights_multiply_the_queries():
    """What "another result" says: its weighted output is that of weights 1, row i times w_i."""
    neuralop()
    layer = LAYERS["Galerkin, weights"]()
    exact = layer.exact()
    assert (
        script.find(script.NEURALOPERATOR, layer, "forward", exact)
        == "another result: weights at the queries"
    )
    even = script.make_galerkin(37, 24)
    torch.testing.assert_close(even.x, layer.x, rtol=0, atol=0)
    theirs = layer.forms(False)[script.NEURALOPERATOR]().attend().double()
    expected = 37 * even.exact()["out"] * layer.weights.double()[:, None]
    assert (theirs - expected).abs().max() < 1e-5 * expected.abs().max()


def test_without_neuraloperator_it_is_not_installed(monkeypatch):
    for name in ("neuralop.layers.attention_kernel_integral", "neuralop.layers.coda_layer"):
        monkeypatch.setitem(sys.modules, name, None)
    sample = harness.Sample(0.5, 0.0)
    quick = functools.partial(harness.time_interleaved, sample=lambda run, min_seconds: sample)
    monkeypatch.setattr(harness, "time_interleaved", quick)
    args = script.parse(["--size", "16", "--dim", "64", "--side", "4", "--rounds", "1"])
    rows = script.time_all(args, "default")
    assert len(rows) == 3 * 2 * 3  # layers, passes, forms
    assert [r["skipped"] for r in rows if r["candidate"] == script.NEURALOPERATOR] == ["not installed"] * 6
    assert all(r["speedup"] == 1.0 for r in rows if r["candidate"] != script.NEURALOPERATOR)
