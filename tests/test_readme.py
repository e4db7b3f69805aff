"""The examples of README.md run as they stand there, one after the other."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

import continuum_ops as co

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


OWN = [block for block in BLOCKS if "import timm" not in block]
"""Those of other packages run in test_real_models.py."""


def test_examples_run():
    assert len(OWN) >= 4
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in OWN:
        exec(block, names)
    w, q, k, v, out = (names[n] for n in ("w", "q", "k", "v", "out"))
    expected = (q.double() @ k.double().mT / q.shape[-1] ** 0.5 + w.log()).softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    assert names["y"].shape == (1, 1024, 1)
    _check_laplacian(names)
    assert w.sum().item() == pytest.approx(1.0, abs=1e-12)


def test_put_it_into_your_model():
    section = README[README.index("## Put it into your model") :].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
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


def _check_laplacian(names):
    """Against central differences in float64."""
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
    """No figure of README.md is typed by hand: bench/readme.py writes them."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    readme = importlib.import_module("readme")
    assert len(readme.BLOCK.findall(README)) >= 8
    assert readme.rewrite(README) == README
    for path in readme.FILES:
        assert readme.rewrite(path.read_text()) == path.read_text()
