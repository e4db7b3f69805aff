"""The harness refuses wrong candidates, interleaves, writes all or nothing, and renders what was measured."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import bench_continuum_attention as script  # noqa: E402
import ceilings  # noqa: E402
import harness  # noqa: E402
import report  # noqa: E402

ONES = torch.ones(3, dtype=torch.float64)


def candidate(name="right", output=None, bound=1e-6, log=None):
    def run():
        if log is not None:
            log.append(name)
        return (torch.ones(3) if output is None else output,)

    return harness.Candidate(name, run, [ONES], bound)


def clean(run, min_seconds):
    run()
    return harness.Sample(0.5, 0.0)


def noisy(run, min_seconds):
    run()
    return harness.Sample(0.5, 1.0)


def test_parity_returns_the_relative_error():
    output = torch.tensor([1.0, 1.0, 1.0 + 2**-10])
    reference = [4 * ONES]
    error = harness.check_parity(harness.Candidate("x", lambda: (4 * output,), reference, 1e-2))
    assert error == 2**-10


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            torch.tensor([1.0, 1.0, 1.1]),
            r"wrong: output 0 is off from float64 by 1.00e-01 .* the bound is 1e-06",
        ),
        (torch.tensor([1.0, math.nan, 1.0]), "wrong: output 0 is off from float64 by nan"),
        (torch.ones(2), r"wrong: output 0 has shape \(2,\), expected \(3,\)"),
    ],
)
def test_a_wrong_candidate_is_an_error_and_nothing_is_timed(output, message):
    sampled = []

    def sample(run, min_seconds):
        sampled.append(run)
        return harness.Sample(1.0, 0.0)

    with pytest.raises(harness.ParityError, match=message):
        harness.time_interleaved([candidate(), candidate("wrong", output)], rounds=2, sample=sample)
    assert sampled == []


def test_missing_outputs_are_an_error():
    with pytest.raises(harness.ParityError, match="x: 0 outputs, expected 1"):
        harness.check_parity(harness.Candidate("x", lambda: (), [ONES], 1.0))


def test_rounds_are_interleaved_and_start_one_later_each():
    log: list[str] = []
    rows = harness.time_interleaved([candidate(n, log=log) for n in "abc"], rounds=3, sample=clean)
    assert "".join(log[:3]) == "abc"  # parity
    assert "".join(log[3:6]) == "abc"  # warm-up
    assert "".join(log[6:]) == "abcbcacab"
    assert [r["candidate"] for r in rows] == ["a", "b", "c"]
    assert {r["samples"] for r in rows} == {3}
    assert {r["ms"] for r in rows} == {500.0}


def test_noisy_samples_are_repeated_then_reported():
    rows = harness.time_interleaved([candidate()], rounds=2, max_rounds=5, sample=noisy)
    assert (rows[0]["samples"], rows[0]["clean_samples"]) == (5, 0)


def test_rounds_must_be_positive():
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        harness.time_interleaved([candidate()], rounds=0)


def test_statistics_leave_noisy_samples_out():
    samples = [harness.Sample(s, 0.0) for s in (1.0, 2.0, 4.0)] + [harness.Sample(9.0, 0.5)]
    row = harness.Timing(samples).row()
    assert (row["ms"], row["ms_min"], row["ms_max"], row["clean_samples"]) == (2000.0, 1000.0, 4000.0, 3)


def test_a_sample_is_one_call_at_least_and_goes_on_until_min_seconds():
    calls = []
    sample = harness.take_sample(lambda: calls.append(0), 0.0)
    assert len(calls) == 1
    assert sample.seconds > 0
    assert sample.other_cpu >= 0
    harness.take_sample(lambda: calls.append(0), 0.01)
    assert len(calls) > 2


def test_json_is_written_whole(tmp_path):
    path = tmp_path / "new" / "r.json"
    harness.write_json(path, {"a": [1, 2]})
    assert json.loads(path.read_text()) == {"a": [1, 2]}
    assert os.listdir(path.parent) == ["r.json"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "r.json"
    harness.write_json(path, {"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        harness.write_json(path, {"a": 2, "b": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["r.json"]


def test_peak_growth_sees_a_temporary_that_is_gone():
    def run():
        temporary = torch.ones(2**24)  # 64 MiB
        return (temporary[:4].clone(),)

    growth, returned = harness.peak_growth(run)
    assert returned == 16
    assert 60 * harness.MIB < growth < 80 * harness.MIB


def test_machine_names_what_a_figure_depends_on():
    machine = harness.describe_machine()
    assert machine["torch"] == torch.__version__
    assert machine["cores"] == os.cpu_count()
    assert machine["name"] == machine["name"].lower()
    assert "/" not in machine["name"] and " " not in machine["name"]
    json.dumps(machine)


def test_worker_gets_threads_and_allocator_before_it_starts(tmp_path, monkeypatch):
    path = tmp_path / "worker.py"
    path.write_text("import json, os; print(json.dumps(dict(os.environ)))")
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "7")
    default = harness.run_worker(str(path), [], threads=1, allocator="default")
    kept = harness.run_worker(str(path), [], threads=2, allocator="kept")
    assert "MALLOC_MMAP_MAX_" not in default
    assert default["OMP_NUM_THREADS"] == "1"
    assert (kept["OMP_NUM_THREADS"], kept["MKL_NUM_THREADS"]) == ("2", "2")
    assert (kept["MALLOC_MMAP_MAX_"], kept["MALLOC_TRIM_THRESHOLD_"]) == ("0", "1000000000000")


def test_a_failed_worker_ends_the_run(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match=r"worker.py --x: the worker failed \(3\)"):
        harness.run_worker(str(path), ["--x"], threads=1, allocator="default")


def row(name, allocator="default", n=1024, **fields):
    case = {"d": 16, "N": n}
    return {"table": "forward, float32", "case": case, "candidate": name, "allocator": allocator, **fields}


def test_report_has_a_line_per_case_and_a_column_per_candidate_and_allocator():
    times = {"ms_min": 1.0, "ms_max": 20.0, "samples": 3, "clean_samples": 3, "note": ""}
    rows = [
        row("ours", ms=2.0, speedup=1.0, ceiling_fraction=0.8, **times),
        row("dense", ms=9.0, speedup=4.5, **times),
        row("ours", ms=2.0, speedup=1.0, n=4096, **{**times, "clean_samples": 1}),
        row("dense", skipped="would need 26.0 GB of 20.0", n=4096),
        row("dense", "kept", ms=4.0, speedup=2.0, **{**times, "note": "math"}),
    ]
    assert report.render_rows(rows).split("\n")[2:] == [
        "### forward, float32",
        "",
        "| d | N | ours | dense | dense, kept memory |",
        "| --- | --- | --- | --- | --- |",
        "| 16 | 1024 | 2 (1-20) **1.00x** 80% | 9 (1-20) **4.50x** | 4 (1-20) **2.00x** math |",
        "| 16 | 4096 | 2 (1-20) **1.00x** ~ | would need 26.0 GB of 20.0 | - |",
    ]


def test_document_renders_machine_ceilings_and_memory():
    document = harness.new_document("op", {"threads": 2})
    rates = {"fma_gflops": 530.0, "fma_avx2_gflops": 260.0, "exp2_giga_per_s": 40.0, "triad_gb_per_s": 83.0}
    rates |= {"first_touch_gb_per_s": 1.0, "blas_gflops": 205.0}
    document["ceilings"] = {"isa": "avx512", "other_cpu": 0.02, "threads": {"2": rates}}
    memory = {"candidate": "ours", "pass": "forward", "shape": "N = 9", "inputs_mib": 1, "outputs_mib": 2}
    document["memory"] = [{**memory, "extra_mib": 3, "extra_ratio": 1, "scores_mib": 99}]
    text = report.render(document)
    assert f"Machine: {document['machine']['cpu']}" in text
    assert "| 2 | 530 (260 at AVX2 width) | 205 | 40 | 83 | 1 |" in text
    assert "| ours | forward | 1.0 | 2.0 | 3.0 | 1.00 | 99 |" in text


def test_ratio_and_ceiling_follow_from_times():
    case = {
        "table": "forward, float32",
        "passes": "forward",
        "case": {"d": 16, "N": 1000},
        "allocator": "kept",
    }
    rows = [{**case, "candidate": script.OP, "ms": 2.0}, {**case, "candidate": "x", "ms": 5.0}]
    script.finish_rows(rows, {"fma_gflops": 512.0, "exp2_giga_per_s": 40.0})
    # 8e6 scores: 4 * 16 flops each are 1.0 ms at 512 GFLOP/s, one exponential each 0.2 ms at 40 G/s.
    assert rows[1]["speedup"] == 2.5
    assert rows[0]["gflops"] == pytest.approx(256.0)
    assert rows[0]["ceiling_fraction"] == pytest.approx(0.6)


@pytest.mark.parametrize("rows", [7, 37])
@pytest.mark.parametrize("weighted", [True, False])
def test_closed_form_of_the_parity_check_agrees_with_autograd(weighted, rows):
    x = script.make_inputs(37, 5, heads=2, dtype=torch.float64, rows=rows).requiring_grad(weights=weighted)
    out = script.dense(x.query, x.key, x.value, x.weights.double() if weighted else None)
    wanted = [x.query, x.key, x.value] + [x.weights] * weighted
    unsampled = torch.ones(37, dtype=torch.bool).index_fill_(0, x.rows, False)
    grads = torch.autograd.grad(out, wanted, x.grad_out.masked_fill(unsampled[:, None], 0.0))
    exact = script.exact(x, weighted=weighted, chunk_bytes=3 * 37 * 8)
    found = (out[..., x.rows, :], *grads)
    for name, value in zip(("out", "query", "key", "value", "weights"), found, strict=False):
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-6, atol=1e-12)


def test_parity_rows_are_all_or_one_of_each_stretch():
    assert script.make_inputs(5, 2, heads=1, rows=5).rows.tolist() == [0, 1, 2, 3, 4]
    rows = script.make_inputs(1003, 2, heads=1, rows=10).rows
    assert [int(r) * 10 // 1003 for r in rows] == list(range(10))


@pytest.mark.parametrize("name", ["out", "query", "key", "value"])
def test_an_error_outside_the_parity_rows_of_a_gradient_is_seen(name):
    x = script.make_inputs(65, 16, heads=1, rows=4).requiring_grad(weights=False)
    exact = script.exact(x, weighted=True)
    right = script.make_candidate(script.OP, x, "forward + backward", exact)
    assert harness.check_parity(right) < 1e-5
    row = 0 if name == "out" else next(i for i in range(65) if i not in x.rows)
    exact[name][0, 0, row] += 0.01
    with pytest.raises(harness.ParityError, match="is off from float64"):
        harness.check_parity(script.make_candidate(script.OP, x, "forward + backward", exact))


def test_parity_may_call_something_else_than_what_is_timed():
    seen = []
    parity = candidate("parity", log=seen).run
    timed = candidate("timed", log=seen)
    rows = harness.time_interleaved(
        [harness.Candidate("x", timed.run, [ONES], 1e-6, parity=parity)], rounds=1, sample=clean
    )
    assert seen == ["parity", "timed", "timed"]
    assert rows[0]["error"] == 0.0


def without_package():
    import no_such_package  # noqa: F401


def too_much():
    torch.empty(2**55)


def nested():
    """As dynamo reports what the traced code raised, and inductor what its compiler did."""
    inner = type("ObservedNotImplementedError", (RuntimeError,), {})("no backward")
    error = RuntimeError("compilation")
    error.inner_exception = ValueError("step")
    error.inner_exception.__cause__ = inner
    raise error


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (without_package, "not installed"),
        (too_much, "out of memory"),
        (lambda: [][0], "IndexError"),
        (nested, "NotImplementedError"),
    ],
)
def test_why_a_peer_cannot_be_timed(run, reason):
    assert harness.attempt(lambda: harness.Candidate("peer", run, [ONES], 1e-6)) == reason


def test_a_peer_that_is_not_installed_may_show_it_when_it_is_built():
    assert harness.attempt(without_package) == "not installed"


def test_a_fault_of_the_benchmark_is_no_reason():
    """What builds a candidate is ours, but for the import of the peer."""
    with pytest.raises(ZeroDivisionError):
        harness.attempt(lambda: 1 // 0)


def test_a_peer_is_called_once_before_the_timing():
    seen = []
    assert harness.attempt(lambda: candidate(log=seen)).name == "right"
    assert seen == ["right"]


def uncompiled(monkeypatch):
    monkeypatch.setattr(script, "compiled", lambda attend: attend)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("passes", list(script.COST))
@pytest.mark.parametrize("form", list(script.FORMS))
def test_every_form_passes_parity(form, passes, monkeypatch):
    """FlexAttention uncompiled here, and forward only: it has no backward on CPUs."""
    uncompiled(monkeypatch)
    if form == script.FLEX and passes != "forward":
        return
    x = script.make_inputs(65, 16)
    exact = script.exact(x, weighted=form != script.UNWEIGHTED)
    if passes != "forward":
        x = x.requiring_grad(weights=form != script.UNWEIGHTED)
    harness.check_parity(script.make_candidate(form, x, passes, exact))


def test_equal_weights_fail_parity_on_an_uneven_mesh():
    x = script.make_inputs(65, 16)
    wrong = script.make_candidate(script.UNWEIGHTED, x, "forward", script.exact(x, weighted=True))
    with pytest.raises(harness.ParityError, match="no weights: output 0 is off"):
        harness.check_parity(wrong)


def test_plain_pytorch_is_left_out_with_a_reason_where_it_does_not_fit(monkeypatch):
    monkeypatch.setattr(harness, "available_bytes", lambda: 10**5)
    monkeypatch.setattr(harness, "time_interleaved", lambda candidates, rounds: [])
    x = script.make_inputs(65, 16)
    references = {True: script.exact(x, weighted=True)}
    rows = script.time_case([script.OP, script.DENSE], x, "forward", references, 1, 65)
    assert rows == [{"candidate": script.DENSE, "skipped": "would need 0.0 GB of 0.0"}]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_left_out_with_a_reason(monkeypatch):
    uncompiled(monkeypatch)
    x = script.make_inputs(65, 16)
    exact = script.exact(x, weighted=True)
    assert script.flex_candidate(x, "forward", exact, 64) == "not run"
    found = script.flex_candidate(x.requiring_grad(weights=False), "forward + backward", exact, 65)
    assert found == "no backward on CPUs (NotImplementedError)"


@pytest.mark.slow
def test_flex_attention_compiled_passes_parity():
    x = script.make_inputs(65, 16)
    exact = script.exact(x, weighted=True)
    assert harness.check_parity(script.flex_candidate(x, "forward", exact, 65)) < 1e-5
    found = script.flex_candidate(x.requiring_grad(weights=False), "forward + backward", exact, 65)
    assert found == "no backward on CPUs (NotImplementedError)"


@pytest.mark.parametrize("option", ["--rounds", "--threads", "--memory-size", "--sizes", "--dims"])
def test_options_must_be_positive(option, capsys):
    with pytest.raises(SystemExit):
        script.parse([option, "0"])
    assert f"{option} must be positive, got" in capsys.readouterr().err


def test_short_stops_at_4096():
    assert script.parse(["--short"]).sizes == [1024, 4096]
    assert script.parse([]).sizes == [1024, 4096, 16384]


def test_ceilings_refuse_more_threads_than_cores():
    with pytest.raises(ValueError, match=r"threads must be between 1 and the .* got \[0\]"):
        ceilings.measure_ceilings([0])


def test_ceilings_are_the_best_of_each_figure_over_the_runs():
    def run(other: float, fma: float, exp2: float):
        threads = {"2": {"fma_gflops": fma, "exp2_giga_per_s": exp2}}
        return {"isa": "avx2", "exp2_error": 1e-7, "other_cpu": other, "threads": threads}

    best = ceilings.best_of([run(0.3, 117.0, 20.0), run(0.01, 230.0, 10.9)])
    assert best["threads"] == {"2": {"fma_gflops": 230.0, "exp2_giga_per_s": 20.0}}
    assert (best["isa"], best["other_cpu"]) == ("avx2", 0.01)
