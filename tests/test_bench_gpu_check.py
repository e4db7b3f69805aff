"""The GPU check, without a GPU: its steps and their limits, the command, the tables."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from gpu_check_helpers import gpu_check, new_record

from gpu import case, steps, tables  # isort: skip


# Steps


def sh(name, script, limit=20.0, **fields):
    return steps.Step(name, ["sh", "-c", script], limit, **fields)


def test_steps_run_side_by_side_and_are_recorded(tmp_path):
    record = new_record(tmp_path / "r.json")
    start = time.monotonic()
    some = [sh("a", "sleep 0.5; echo one; exit 3"), sh("b", "sleep 0.5; echo $X", env={"X": "two"})]
    steps.run_steps(some, record, tmp_path, cwd=tmp_path, poll=0.01)
    assert time.monotonic() - start < 0.95
    found = json.loads(record.path.read_text())["steps"]
    assert (found["a"]["rc"], found["a"]["tail"], found["a"]["cut_short"]) == (3, "one\n", False)
    assert (found["b"]["rc"], found["b"]["tail"]) == (0, "two\n")


def test_a_step_past_its_limit_ends_with_its_children_and_keeps_what_it_printed(tmp_path):
    record = new_record(tmp_path / "r.json")
    step = sh(
        "slow", "sh -c 'echo $$; sleep 60' & echo begun; wait", limit=0.5, summary=lambda t: {"lines": 2}
    )
    steps.run_steps([step], record, tmp_path, cwd=tmp_path, poll=0.01)
    found = record.document["steps"]["slow"]
    assert (found["rc"], found["cut_short"], found["lines"]) == (None, True, 2)
    assert "begun" in found["tail"]
    child = int(next(line for line in found["tail"].split() if line.isdigit()))
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_what_a_step_wrote_to_the_record_is_kept(tmp_path):
    record = new_record(tmp_path / "r.json")
    script = "import json; p = 'r.json'; d = json.load(open(p)); d['rows'] = [1]; json.dump(d, open(p, 'w'))"
    step = steps.Step("writer", [sys.executable, "-c", script], 20.0)
    steps.run_steps([step], record, tmp_path, cwd=tmp_path, poll=0.01)
    found = json.loads(record.path.read_text())
    assert found["rows"] == [1]
    assert found["steps"]["writer"]["rc"] == 0


def test_counts_of_pytest_are_read_from_its_lines_also_of_a_run_cut_short(tmp_path):
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('s', ['a b', 'c'])\n"
        "def test_a(s): pass\n"
        "def test_b(): assert 0\n"
        "def test_c(): pytest.skip('no reason')\n"
    )
    record = new_record(tmp_path / "r.json")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "test_x.py"]
    step = steps.Step("pytest", command, 60.0, summary=steps.pytest_summary)
    steps.run_steps([step], record, tmp_path, cwd=tmp_path)
    found = record.document["steps"]["pytest"]
    assert found["counts"] == {"failed": 1, "passed": 2, "skipped": 1}
    assert (found["failed"], found["rc"]) == (["test_x.py::test_b"], 1)
    text = (tmp_path / "pytest.log").read_text()
    assert steps.pytest_summary(text[: text.index("[ 75%]")]) == {
        "counts": {"failed": 1, "passed": 2},
        "failed": ["test_x.py::test_b"],
    }


def test_a_companion_ends_with_the_others_but_not_too_early(tmp_path):
    record = new_record(tmp_path / "r.json")
    some = [
        sh("tests", "sleep 0.2"),
        sh("warm", "sleep 60", companion=0.6),
        sh("late", "sleep 60", companion=0.1),
    ]
    steps.run_steps(some, record, tmp_path, cwd=tmp_path, poll=0.01)
    found = record.document["steps"]
    assert found["tests"]["rc"] == 0
    assert found["warm"]["cut_short"] and found["late"]["cut_short"]
    assert found["late"]["seconds"] < 0.6 <= found["warm"]["seconds"] < 5.0


@pytest.mark.parametrize(
    ("answer", "chosen", "expected"), [("9.0", None, "9.0"), ("9.0", "8.0", None), (None, None, None)]
)
def test_the_extension_is_built_for_the_card_unless_chosen(tmp_path, monkeypatch, answer, chosen, expected):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", chosen)
    if answer is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho {answer}\n")
        tool.chmod(0o755)
    assert steps.pip_install(9.0).env.get("TORCH_CUDA_ARCH_LIST") == expected


def test_lines_of_parallel_pytest_are_read_too():
    text = "[gw0] [ 50%] PASSED tests/t.py::test_a[x-1]\n[gw1] [100%] FAILED tests/t.py::test_b \n"
    expected = {"counts": {"failed": 1, "passed": 1}, "failed": ["tests/t.py::test_b"]}
    assert steps.pytest_summary(text) == expected


def test_summaries_of_the_sanitizer_are_read():
    assert steps.sanitizer_summary("========= ERROR SUMMARY: 3 errors\n") == {"errors": 3}
    text = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert steps.sanitizer_summary(text) == {"errors": 0}
    assert steps.sanitizer_summary("Device not supported") == {"errors": None}


def test_a_missing_sanitizer_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "find_sanitizer", lambda: None)
    record = new_record(tmp_path / "r.json")
    found = gpu_check.check_steps(["continuum_attention"], 10.0, record)
    assert [step.name for step in found] == ["pytest", "warm"]
    assert "compute-sanitizer is neither on the PATH" in record.document["steps"]["racecheck"]["skipped"]


# The command


def test_the_steps_share_the_budget_and_a_broken_benchmark_is_started_again(tmp_path, monkeypatch):
    ran = []

    def run_steps(some, record, logs, *, cwd):
        for step in some:
            ran.append(step)
            rc = 1 if step.name == "benchmark" else 0
            done = {"rc": rc, "cut_short": False, "seconds": 0.0, "tail": ""}
            if step.name == "warm":
                done["warmed"] = ["FlexAttention: x"]
            record.put("steps", step.name, done)

    monkeypatch.setattr(steps, "run_steps", run_steps)
    monkeypatch.setattr(steps, "find_sanitizer", lambda: "compute-sanitizer")
    record = gpu_check.check(gpu_check.parse(["--out", str(tmp_path), "--budget", "100"]))
    names = [step.name for step in ran]
    assert names == ["install", "pytest", "memcheck", "racecheck", "warm", "benchmark", "benchmark1"]
    limits = {step.name: step.limit for step in ran}
    assert limits["install"] == pytest.approx(35.0)
    assert limits["pytest"] == limits["warm"] == pytest.approx(32.0)
    assert 90 < limits["benchmark"] <= 96.0
    task = json.loads(ran[-1].command[-1])
    assert task["warmed"] == ["FlexAttention: x"]
    assert task["deadline"] == pytest.approx(time.time() + 96.0, abs=5.0)
    assert set(json.loads(record.path.read_text())["steps"]) == set(names)


def test_an_installation_that_fails_is_tried_again_without_compiled_kernels(tmp_path, monkeypatch):
    ran = []

    def run_steps(some, record, logs, *, cwd):
        ran.extend(some)
        record.put("steps", some[0].name, {"rc": 1 if some[0].name == "install" else 0})

    monkeypatch.setattr(steps, "run_steps", run_steps)
    record = new_record(tmp_path / "r.json")
    gpu_check.install(record, 9.0)
    assert [step.name for step in ran] == ["install", "install-without-extension"]
    assert ran[1].env["CONTINUUM_OPS_NO_EXT"] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "--budget must be positive, got 0.0"),
        (["--only", "softmax"], "argument --only: invalid choice: 'softmax'"),
    ],
)
def test_arguments_are_checked(arguments, message, capsys):
    with pytest.raises(SystemExit):
        gpu_check.parse(arguments)
    assert message in capsys.readouterr().err


def full_document():
    label = {"op": "op", "precision": "float32", "passes": "forward", "d": 16, "N": 1000, "note": ""}
    times = {
        "ms_min": 1.0,
        "ms_max": 3.0,
        "samples": 3,
        "extra_mib": 7.0,
        "errors": {"out": 1e-7, "key": 2e-7},
    }
    limits = {"exp_floor_ms": 0.5, "matrix_floor_ms": 0.25}
    rows = [
        {**label, "candidate": case.OURS, "ms": 2.0, "over_ours": 1.0, **times, **limits},
        {**label, "candidate": "peer", "ms": 5.0, "over_ours": 2.5, **times, **limits},
        {**label, "candidate": case.OURS, "N": 2000, "skipped": "would take about 9 s of the 1 s left"},
    ]
    document = gpu_check.new_document(gpu_check.parse(["--commit", "abc"]), ["op"])
    done = {"rc": 0, "cut_short": False, "seconds": 5.0}
    document["steps"] = {
        "install": done,
        "pytest": {**done, "counts": {"passed": 9}, "failed": []},
        "memcheck": {**done, "errors": 0},
        "racecheck": {"skipped": "not found"},
        "warm": {**done, "rc": None, "cut_short": True, "warmed": ["x"]},
        "benchmark": {**done, "rc": None, "cut_short": True},
    }
    document["rates"] = {"ex2_per_s": 3.7e12, "bfloat16_flops": 7e14}
    return {**document, "rows": rows}


def test_tables_show_time_ratio_error_memory_and_floors():
    text = tables.render(full_document())
    assert "| d | N | exp floor, ms | matrix floor, ms | continuum_ops | peer |" in text
    line = "| 16 | 1000 | 0.5 | 0.25 | 2 (1-3), 2.0e-07, 7 MiB | 5 (1-3) **2.50x**, 2.0e-07, 7 MiB |"
    assert line in text
    assert "| 16 | 2000 | - | - | would take about 9 s of the 1 s left | - |" in text
    assert "Rates: 3.7 T ex2/s, 700 TFLOP/s (bfloat16 torch.mm)." in text
    assert "| pytest | 5 | exit 0 | 9 passed |" in text
    assert "| warm | 5 | cut short | 1 compiled |" in text


def test_running_out_of_time_passes_and_what_is_wrong_does_not():
    assert tables.exit_code(full_document()) == 0
    for step, change in [
        ("install", {"rc": 1}),
        ("pytest", {"cut_short": True}),
        ("memcheck", {"errors": 2}),
        ("benchmark", {"rc": 1, "cut_short": False}),
    ]:
        document = full_document()
        document["steps"][step] = {**document["steps"][step], **change}
        assert tables.exit_code(document) == 1, step
    document = full_document()
    document["rows"][0] = {
        **document["rows"][2],
        "N": 1000,
        "skipped": "wrong: off from float64 by out 1e-02",
    }
    assert tables.exit_code(document) == 1
    assert tables.exit_code({**full_document(), "rows": []}) == 1
