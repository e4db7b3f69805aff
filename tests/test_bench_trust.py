"""bench/trust.py: merging figures into the result file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
from properties import counted, run_pytest
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


def test_cases_are_counted_in_the_words_of_this_hypothesis(tmp_path: Path) -> None:
    (tmp_path / "test_drawn.py").write_text(
        """
from hypothesis import given, settings
from hypothesis import strategies as st

@settings(max_examples=7, database=None)
@given(st.integers())
def test_one(n):
    pass

@settings(max_examples=5, database=None)
@given(st.integers(0, 10**6))
def test_other(n):
    pass

@settings(max_examples=9, database=None)
@given(st.booleans())
def test_fails(b):
    assert 0
"""
    )
    code, text = run_pytest([str(tmp_path), "--hypothesis-show-statistics"])
    found = counted(text)
    assert code == 1 and found.pop("cases_failed") >= 1
    assert found == {"cases_tried": 7 + 5, "tests_passed": 2, "tests_failed": 1}
    assert counted("607 passed, 8 deselected in 23.32s") == {"tests_passed": 607, "tests_failed": 0}
