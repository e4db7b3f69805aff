"""The examples of README.md run as they stand there, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_examples_run():
    assert len(BLOCKS) >= 3
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(block, names)
    x, w, q, k, v, out = (names[n] for n in ("x", "w", "q", "k", "v", "out"))
    expected = (q.double() @ k.double().mT / q.shape[-1] ** 0.5 + w.log()).softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    assert names["y"].shape == (1, 1024, 1)
    assert w.sum().item() == pytest.approx(1.0, abs=1e-12)
