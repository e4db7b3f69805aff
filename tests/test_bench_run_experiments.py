"""bench/run_experiments.py: what it runs again, and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from continuum_ops.experiments import EXPERIMENTS

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import run_experiments

    return run_experiments


def test_only_what_is_missing_or_stale_is_run(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(name: str, work: Path) -> dict[str, Any]:
        ran.append(name)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return row(name, config=script.small(name).to_dict())

    monkeypatch.setattr(script, "run", run)
    out = tmp_path / "result.json"
    arguments = ["run_experiments.py", "tno-cde", "pit-darcy", "tno-lorenz63", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(KeyboardInterrupt):
        script.main()
    assert [r["name"] for r in json.loads(out.read_text())["rows"]] == ["tno-cde", "pit-darcy"]
    document = json.loads(out.read_text())
    document["rows"][0]["config"]["training"]["steps"] += 1
    del document["rows"][1]["config"]["training"]["autocast"]  # a setting that was added since
    document["rows"].append(row("gone", config={}))
    out.write_text(json.dumps(document))
    script.main()
    assert ran[3:] == ["tno-cde", "tno-lorenz63"]
    # In the order of the experiments, whatever the order of the runs.
    assert [r["name"] for r in json.loads(out.read_text())["rows"]] == [
        "tno-lorenz63",
        "tno-cde",
        "pit-darcy",
    ]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*arguments, "--list"])
    script.main()
    assert capsys.readouterr().out.split() == []


def row(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "parameters": 1234,
        "metric": "relative_l2",
        "mean": 0.05,
        "median": 0.04,
        "constant": 0.2,
        "factor": 4.0,
        "wanted": 5.0,
        "paper": {"error": 0.0119, "what": "median, CA table 1"},
        "differs": {"data.train": [3600, 512], "model.width": [None, 32], "training.seed": [0, 1]},
        "cpu_seconds": 12.3,
        **changes,
    }


def test_the_table(script: Any) -> None:
    lines = script.render({"rows": [row("tno-darcy64"), row("tno-cde", factor=7.26, cpu_seconds=None)]})
    end = "1.19 % (median, CA table 1) | samples 3,600 → 512; channels default → 32 |"
    found = {line.split(" | ")[0].removeprefix("| "): line for line in lines.splitlines()[2:]}
    assert list(found) == list(EXPERIMENTS)
    assert (
        found["tno-darcy64"]
        == f"| tno-darcy64 | 1,234 | 5.00 % (4.00 %) L2 | 20.0 % | 4.0, below 5 | 12 | {end}"
    )
    assert found["tno-cde"] == f"| tno-cde | 1,234 | 5.00 % (4.00 %) L2 | 20.0 % | 7.3 |  | {end}"
    # Not run.
    assert found["pit-darcy"] == "| pit-darcy |  |  |  |  |  | 0.485 % (PiT table 1) |  |"
    assert found["pit-joukowski"].endswith("|  | (stand-in: none) |  |")


def test_every_experiment_has_a_value_or_says_why_not(script: Any) -> None:
    assert set(script.PAPER) == set(EXPERIMENTS)
    assert all(error is None or 0 < error < 0.2 for error, _ in script.PAPER.values())
    assert {name for name, least in script.WANTED.items() if least == 3} == {
        "galerkin-darcy-inverse",
        "fourier-darcy-inverse",
    }
    found = dict(script.differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4, "e": 5}, "d": 3}))
    assert found == {"a.c": (2, 4), "a.e": (None, 5)}
