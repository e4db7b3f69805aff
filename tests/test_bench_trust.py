"""bench/trust.py: merging figures into the result file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
from trust import record


def test_record_keeps_the_other_items_and_keys(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"
    record("properties", {"cases": 3, "seconds": 1.5}, path)
    record("accuracy", {"rows": 2}, path)
    record("properties", {"cases": 4}, path)
    assert json.loads(path.read_text()) == {
        "accuracy": {"rows": 2},
        "properties": {"cases": 4, "seconds": 1.5},
    }
    assert [p.name for p in tmp_path.iterdir()] == ["trust.json"]


def test_record_refuses_what_json_cannot_hold_and_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"
    record("accuracy", {"rows": 2}, path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        record("accuracy", {"error": float("nan")}, path)
    assert json.loads(path.read_text()) == {"accuracy": {"rows": 2}}


@pytest.mark.parametrize("text", ["[1]", '{"accuracy": 3}'])
def test_record_refuses_a_foreign_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trust.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="must hold a JSON object of objects"):
        record("accuracy", {"rows": 2}, path)
    assert path.read_text() == text
