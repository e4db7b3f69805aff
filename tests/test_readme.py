"""README.md and docs/models.md: the examples run as they stand, the figures are those of bench/results/."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import torch

import continuum_ops as co

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()


def examples(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_examples_run():
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in examples(README):
        exec(block, names)
    x, w, q, k, v, out = (names[n] for n in ("x", "w", "q", "k", "v", "out"))
    trapezoid = torch.cat([x[1:2] - x[:1], x[2:] - x[:-2], x[-1:] - x[-2:-1]]).double() / 2
    torch.testing.assert_close(w.double(), trapezoid, rtol=0, atol=1e-7)
    expected = (q.double() @ k.double().mT / q.shape[-1] ** 0.5 + trapezoid.log()).softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    assert names["y"].shape == (2, 129, 64) and names["prediction"].shape == (1, 129)


def test_two_screens():
    """Of 55 lines each; what is more stands in docs/."""
    assert README.count("\n") <= 110


def test_what_the_readme_links_to_is_there():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_put_it_into_your_model():
    section = MODELS[MODELS.index("## A snippet of each") :].split("\n## ")[0]
    blocks = examples(section)
    assert [("replace_attention" in b, "timm" in b, "continuum_attention" in b) for b in blocks] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    torch.manual_seed(0)
    names: dict[str, object] = {"torch": torch, "co": co}
    exec(blocks[0], names)
    mesh, encoder = names["mesh"], names["encoder"]
    assert all(isinstance(layer.self_attn, co.nn.MultiheadAttention) for layer in encoder.layers)
    assert names["features"].shape == (2, 100, 64)
    exec(blocks[2], names)
    layer = names["Attention"](8, 2)
    u = torch.randn(2, 100, 8)
    q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2).double() for x in layer.qkv(u).chunk(3, -1))
    p = (q @ k.mT / 2 + mesh.weights.double().log()).softmax(-1)
    expected = layer.out.double()((p @ v).transpose(1, 2).flatten(-2))
    layer.float()
    torch.testing.assert_close(layer(u, mesh.weights).double(), expected, rtol=0, atol=1e-5)


def test_laplacian():
    """Against central differences in float64."""
    names: dict[str, object] = {"torch": torch, "co": co}
    torch.manual_seed(0)
    (block,) = examples(MODELS[MODELS.index("## Derivatives of a model") :])
    exec(block, names)
    model, grid, u, x = names["model"].double(), names["grid"], names["u"].double(), names["x"].double()
    h = 1e-3
    with torch.no_grad():
        values = [model(u, grid, x + s * h * e)[0, :, 0] for e in torch.eye(2) for s in (1, -1, 0, 0)]
    exact = (values[0] + values[1] + values[4] + values[5] - values[2] * 2 - values[6] * 2) / h**2
    torch.testing.assert_close(
        names["laplacian"].double(), exact, rtol=0, atol=1e-3 * exact.abs().max().item()
    )
    slope = model.decoder.rate_parameter.grad
    assert slope is not None and slope.isfinite().all() and slope.abs().min() > 0


def test_measured_blocks_are_those_of_the_result_files(monkeypatch):
    """None is typed by hand: bench/readme.py writes them."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    readme = importlib.import_module("readme")
    counts = {
        path.relative_to(ROOT).as_posix(): len(readme.BLOCK.findall(path.read_text()))
        for path in readme.FILES
    }
    assert counts["README.md"] >= 1 and counts["docs/measured.md"] >= 18 and counts["bench/README.md"] >= 1
    for path in readme.FILES:
        assert readme.rewrite(path.read_text()) == path.read_text(), path
    assert "commit" in README and "No GPU figure is measured" in README


def test_the_picture_is_of_the_result_files():
    """The labels of its bars, drawn by bench/plots.py, are the demo's errors."""
    picture = (ROOT / "docs/figures/weights.svg").read_text()
    path = sorted((ROOT / "bench/results").glob("demo-*.json"))[-1]
    medians = [f"{100 * row['median']:.2f}" for row in json.loads(path.read_text())["meshes"]]
    labels = re.findall(r">(\d\.\d\d)</text>", picture)
    assert sorted(labels) == sorted(medians)
