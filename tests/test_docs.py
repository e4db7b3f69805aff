"""The examples of docs/ run as they stand there, those of a page one after the other."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md") if "```python" in path.read_text())


def test_there_are_pages():
    assert {"index.md", "operators.md", "quadrature.md", "models.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_examples(page):
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        if "import timm" not in block:  # test_real_models.py runs it
            exec(block, names)
