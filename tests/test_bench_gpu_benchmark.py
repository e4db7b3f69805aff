"""The benchmark of the GPU check, without a GPU: limits, record, what is timed, candidates that are right."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import replace

import pytest
import torch
from gpu_check_helpers import CASE, CPU, FakeClock, candidate, gpu_check, new_record, operator

from gpu import attention, benchmark, case, galerkin, patch, position, tables, timing  # isort: skip
from gpu.record import Budget, Estimates  # isort: skip


# The budget and the estimates


def test_budget_counts_down_and_keeps_a_reserve():
    now = [100.0]
    budget = Budget(110.0, lambda: now[0])
    assert budget.left() == 10.0
    assert budget.limit(3.0) == 3.0
    assert budget.limit(30.0, reserve=4.0) == 6.0
    now[0] = 109.0
    assert budget.limit(30.0, reserve=4.0) == 0.0


def test_estimates_scale_the_nearest_size_and_dim():
    estimates = Estimates()
    assert estimates.seconds("a", "float32", case.FORWARD, 16, 4096) is None
    estimates.observe("a", "float32", case.FORWARD, 16, 1000, 0.5)  # bound by launches
    estimates.observe("a", "float32", case.FORWARD, 16, 4000, 1.0)
    assert estimates.seconds("a", "float32", case.FORWARD, 16, 8000) == 4.0
    assert estimates.seconds("a", "float32", case.FORWARD, 64, 8000) == 16.0
    assert estimates.seconds("a", "float32", case.BACKWARD, 16, 8000) == 4.0 * Estimates.BACKWARD
    assert estimates.seconds("a", "bfloat16", case.FORWARD, 16, 8000) is None
    assert estimates.seconds("b", "float32", case.FORWARD, 16, 8000) is None


def test_candidates_that_do_not_fit_are_left_out_with_the_reason():
    estimates = Estimates()
    for name, seconds in (("continuum_ops", 1.0), ("peer", 2.0), ("other", 0.5)):
        estimates.observe(name, "float32", case.FORWARD, 16, 1000, seconds)
    op = operator(["continuum_ops", "peer", "other"])
    calls = benchmark.CALLS
    assert set(benchmark.affordable(op, CASE, 4 * calls, estimates, []).values()) == {None}
    assert benchmark.affordable(op, CASE, 2 * calls, estimates, []) == {
        "continuum_ops": None,
        "peer": f"would take about {2 * calls} s of the {calls} s left",
        "other": None,
    }
    reasons = benchmark.affordable(op, CASE, 1.0, estimates, [])
    assert reasons["continuum_ops"] == f"would take about {calls} s of the 1 s left"
    assert reasons["other"] == "continuum_ops is left out"


def test_a_warmed_candidate_costs_no_compilation():
    op = operator(["continuum_ops", "FlexAttention, x"])
    cold = benchmark.affordable(op, CASE, 5.0, Estimates(), [])
    assert cold["FlexAttention, x"] == "would take about 12 s of the 5 s left"
    key = benchmark.warmed_key("FlexAttention, x", CASE)
    assert benchmark.affordable(op, CASE, 5.0, Estimates(), [key])["FlexAttention, x"] is None


# Timing


def test_a_candidate_is_compared_then_measured():
    clock = FakeClock({"a": 0.25})
    measured = timing.prepare(candidate("a", {"out": torch.tensor([1.0, 1.0, 1.0 + 2**-21])}), clock)
    assert measured.errors == {"out": 2**-21}
    assert (measured.first, measured.extra_bytes, measured.reason) == (0.25, 2**20, None)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (
            {"out": torch.tensor([1.0, 1.0, 1.5])},
            r"wrong: off from float64 by out 5.00e-01, the bound is 1e-06",
        ),
        ({"out": torch.tensor([1.0, float("nan"), 1.0])}, "wrong: off from float64 by out nan"),
        ({"out": torch.ones(2)}, r"ValueError: out has shape \(2,\), expected \(3,\)"),
        ({}, r"ValueError: outputs \[\] were returned, \['out'\] are compared"),
    ],
)
def test_a_wrong_candidate_is_not_timed(found, reason):
    clock = FakeClock({})
    measured = timing.prepare(candidate("a", found), clock)
    assert measured.reason is not None
    assert re.match(reason, measured.reason)
    assert clock.log == []
    assert "ms" not in measured.row()


def test_a_candidate_that_raises_is_a_reason_and_a_lost_context_is_not():
    def fail(text):
        def raises():
            raise RuntimeError(text)

        return replace(candidate("a"), parity=raises)

    measured = timing.prepare(fail("No available kernel.\nmore"), FakeClock({}))
    assert measured.row() == {"candidate": "a", "note": "", "skipped": "RuntimeError: No available kernel."}
    with pytest.raises(RuntimeError, match="illegal memory access"):
        timing.prepare(fail("CUDA error: an illegal memory access was encountered"), FakeClock({}))


def test_rounds_take_turns_and_fit_the_time():
    clock = FakeClock({"a": 0.1, "b": 0.2})
    ready = [timing.prepare(candidate(name), clock) for name in "ab"]
    clock.log.clear()
    timing.time_in_turns(ready, clock, seconds=1.6)
    assert "".join(name for name, _ in clock.log) == "abbaabbaab"
    assert ready[1].row()["ms"] == 200.0
    clock.log.clear()
    timing.time_in_turns(ready, clock, seconds=0.0)
    assert len(clock.log) == 2 * 3
    timing.time_in_turns([], clock, seconds=1.0)


def test_fast_calls_are_repeated():
    clock = FakeClock({"a": 1e-4})
    ready = [timing.prepare(candidate("a"), clock)]
    timing.time_in_turns(ready, clock, seconds=1.0, min_sample=4e-3)
    assert clock.log[-1] == ("a", 40)
    assert ready[0].row()["samples"] == 9


# The loop over cases and its record


def test_rows_carry_case_floors_and_ratio():
    rates = {"ex2_per_s": 8e9, "float32_flops": 1e12, "tf32_flops": 6e12, "bfloat16_flops": 1e13}
    clock = FakeClock({"continuum_ops": 0.002, "peer": 0.005})
    rows = benchmark.run_case(operator(), CASE, CPU, clock, 100.0, Estimates())
    ours, peer = case.finish_rows(CASE, rows, operator(), rates)
    # 8e6 scores: one exponential each is 1 ms; 64 flops each are 0.1536 ms at 1e13 / 3.
    assert ours["exp_floor_ms"] == pytest.approx(1.0)
    assert ours["matrix_floor_ms"] == pytest.approx(0.1536)
    assert (ours["op"], ours["d"], ours["N"], ours["precision"]) == ("op", 16, 1000, "float32")
    assert (ours["over_ours"], peer["over_ours"]) == (1.0, 2.5)
    assert case.floors(replace(CASE, passes=case.BACKWARD), operator(), rates)[
        "exp_floor_ms"
    ] == pytest.approx(2.0)
    assert case.floors(replace(CASE, precision="bfloat16"), operator(), rates)[
        "matrix_floor_ms"
    ] == pytest.approx(0.0512)
    assert case.floors(CASE, operator(), {}) == {}


def test_the_record_is_on_disk_after_each_case(tmp_path):
    path = tmp_path / "r.json"
    record = new_record(path)
    cases = [replace(CASE, n=n) for n in (1000, 2000)]
    seen = []

    def inputs(c, device):
        seen.append(json.loads(path.read_text()))

    op = operator(cases=cases)
    op.inputs = inputs
    clock = FakeClock({"continuum_ops": 1e-3, "peer": 2e-3})
    benchmark.run_cases({"op": op}, cases, CPU, clock, Budget(time.time() + 99), record)
    assert [len(document["rows"]) for document in seen] == [0, 2]
    assert seen[1]["cases"] == {cases[0].key: "ended", cases[1].key: "begun"}
    final = json.loads(path.read_text())
    assert set(final["cases"].values()) == {"ended"}
    assert len(final["rows"]) == 4
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_case_that_broke_the_process_is_not_tried_again(tmp_path):
    cases = [replace(CASE, n=n) for n in (1000, 2000)]
    record = new_record(tmp_path / "r.json", cases={cases[0].key: "begun"})
    clock = FakeClock({"continuum_ops": 1e-3, "peer": 2e-3})
    benchmark.run_cases({"op": operator()}, cases, CPU, clock, Budget(time.time() + 99), record)
    assert {row["N"] for row in record.document["rows"]} == {2000}


def test_cases_beyond_the_budget_are_skipped_from_what_smaller_ones_took(tmp_path):
    now = [0.0]
    cases = [replace(CASE, n=n) for n in (1000, 2000, 4000)]
    record = new_record(tmp_path / "r.json")
    clock = FakeClock({"continuum_ops": 0.5, "peer": 1.0}, now)
    benchmark.run_cases({"op": operator()}, cases, CPU, clock, Budget(40.0, lambda: now[0]), record)
    rows = {(r["N"], r["candidate"]): r for r in record.document["rows"]}
    assert "ms" in rows[1000, "peer"]
    assert rows[2000, "peer"]["skipped"].startswith(f"would take about {benchmark.CALLS * 4} s of the")
    assert now[0] < 40.0


def test_inputs_that_do_not_fit_the_memory_are_a_reason():
    op = operator()

    def inputs(c, device):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    op.inputs = inputs
    rows = benchmark.run_case(op, CASE, CPU, FakeClock({}), 100.0, Estimates())
    assert {r["skipped"] for r in rows} == {"OutOfMemoryError: CUDA out of memory."}


def test_float32_products_follow_the_case_and_are_set_back():
    seen = []
    op = operator()
    op.inputs = lambda c, device: seen.append(torch.get_float32_matmul_precision())
    clock = FakeClock({"continuum_ops": 1e-3, "peer": 2e-3})
    for precision in ("float32", "tf32"):
        benchmark.run_case(op, replace(CASE, precision=precision), CPU, clock, 100.0, Estimates())
    assert seen == ["highest", "high"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_operators_share_the_time_in_proportion():
    a = [replace(CASE, n=n) for n in range(4)]
    b = [replace(CASE, op="b", n=n) for n in range(2)]
    order = benchmark.interleave([a, b])
    assert [c.op for c in order] == ["op", "b", "op", "op", "b", "op"]
    assert [c for c in order if c.op == "op"] == a


def test_rows_of_a_real_case_render(tmp_path, monkeypatch):
    class CpuClock(FakeClock):
        def seconds(self, run, calls):
            start = time.perf_counter()
            run()
            return time.perf_counter() - start

    monkeypatch.setattr(attention, "names", lambda c: [case.OURS])
    record = new_record(tmp_path / "r.json", rates={"ex2_per_s": 1e9})
    cases = [case.Case(attention.NAME, "float32", p, 16, 130) for p in (case.FORWARD, case.BACKWARD)]
    chosen = {attention.NAME: attention}
    benchmark.run_cases(chosen, cases, CPU, CpuClock({}), Budget(time.time() + 99), record)
    assert [set(row["errors"]) for row in record.document["rows"]] == [
        {"out"},
        {"out", "query", "key", "value"},
    ]
    assert "### continuum_attention, float32, forward + backward" in tables.render(record.document)
    assert tables.exit_code(record.document) == 0


# Candidates


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("passes", [case.FORWARD, case.BACKWARD])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("module", [attention, position])
def test_every_candidate_is_right(monkeypatch, module, precision, passes):
    """On the CPU, where SDPA has other kernels, and FlexAttention runs uncompiled and forward only."""
    for shared in (attention, position):
        monkeypatch.setattr(shared, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    monkeypatch.setattr(module, "compiled", lambda attend: attend)
    monkeypatch.setattr(module, "PARITY_ROWS", 11)
    chosen = case.Case(module.NAME, precision, passes, 16, 130)
    inputs = module.inputs(chosen, CPU)
    for name in module.names(chosen):
        if name.startswith("FlexAttention") and passes != case.FORWARD:
            continue
        built = module.candidate(name, chosen, inputs)
        errors = timing.relative_errors(built.parity(), built.reference)
        assert max(errors.values()) <= built.bound, (name, errors)
        assert built.run()[0].shape == (*built.reference["out"].shape[:-2], 130, 16)


@pytest.mark.parametrize("module", [attention, position])
def test_an_answer_without_weights_is_wrong(monkeypatch, module):
    monkeypatch.setattr(module, "PARITY_ROWS", 11)
    chosen = case.Case(module.NAME, "float32", case.FORWARD, 16, 130)
    inputs = module.inputs(chosen, CPU)
    ours = module.ATTEND[case.OURS]
    monkeypatch.setitem(module.ATTEND, case.OURS, lambda *tensors: ours(*tensors[:-1]))
    measured = timing.prepare(module.candidate(case.OURS, chosen, inputs), FakeClock({}))
    assert measured.reason is not None
    assert measured.reason.startswith("wrong: off from float64 by out")


@pytest.mark.parametrize("passes", [case.FORWARD, case.BACKWARD])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_candidate_of_patch_attention_is_right(monkeypatch, precision, passes):
    chosen = case.Case(patch.NAME, precision, passes, 16, 26**2)
    inputs = patch.inputs(chosen, CPU)
    for name in patch.names(chosen):
        built = patch.candidate(name, chosen, inputs)
        errors = timing.relative_errors(built.parity(), built.reference)
        assert max(errors.values()) <= built.bound, (name, errors)
        assert built.run()[0].shape == (1, 26, 26, 8, 16)
    monkeypatch.setitem(patch.ATTEND, case.OURS, lambda x, q, k, v: patch.co.patch_attention(q, k, v, 2))
    measured = timing.prepare(patch.candidate(case.OURS, chosen, inputs), FakeClock({}))
    assert measured.reason is not None
    assert measured.reason.startswith("wrong: off from float64 by out")


def test_floors_of_patch_attention_are_bytes_and_products(tmp_path):
    chosen = case.Case(patch.NAME, "bfloat16", case.FORWARD, 16, 416**2)
    rates = {"bytes_per_s": 1e12, "float32_flops": 1e12, "tf32_flops": 6e12, "bfloat16_flops": 1e13}
    # Four tensors of 416 x 416 x 8 x 16 numbers of two bytes; two products of 169 x 169 patches.
    expected = {"memory_floor_ms": 0.1772, "matrix_floor_ms": 1.497}
    assert case.floors(chosen, patch, rates) == pytest.approx(expected, rel=1e-3)
    row = {"candidate": case.OURS, "ms": 1.0, "ms_min": 1.0, "ms_max": 1.0, "errors": {"out": 0.0}}
    rows = case.finish_rows(chosen, [{**row, "extra_mib": 1.0, "note": ""}], patch, rates)
    assert "| d | N | memory floor, ms | matrix floor, ms |" in "\n".join(tables.render_rows(rows))


@pytest.mark.parametrize("passes", [case.FORWARD, case.BACKWARD])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_candidate_of_galerkin_attention_is_right(monkeypatch, precision, passes):
    """On the CPU the fused operator is composed of the same steps."""
    chosen = case.Case(galerkin.NAME, precision, passes, 16, 300)
    inputs = galerkin.inputs(chosen, CPU)
    for name in galerkin.names(chosen):
        built = galerkin.candidate(name, chosen, inputs)
        errors = timing.relative_errors(built.parity(), built.reference)
        assert max(errors.values()) <= built.bound, (name, errors)
        assert built.run()[0].shape == (1, 8, 300, 18)
    equal = replace(inputs.x, weights=torch.full((1, 1, 300), 1 / 300))
    built = galerkin.candidate(case.OURS, chosen, replace(inputs, x=equal))
    measured = timing.prepare(built, FakeClock({}))
    assert measured.reason is not None
    assert measured.reason.startswith("wrong: off from float64 by out")


def test_floors_of_galerkin_attention_are_bytes_and_products():
    chosen = case.Case(galerkin.NAME, "float32", case.BACKWARD, 128, 65536)
    rates = {"bytes_per_s": 1e12, "float32_flops": 1e12, "tf32_flops": 6e12}
    # Eleven tensors of 65536 x 8 x 128 numbers of four bytes; six products of 130 channels, at 6e12 / 3.
    expected = {"memory_floor_ms": 2.9528, "matrix_floor_ms": 53.163}
    assert case.floors(chosen, galerkin, rates) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_channels_carry_log_weights_that_one_does_not(dtype):
    """On a graded mesh of 4096 points log w / scale reaches -70, which one bfloat16 channel rounds by 0.1."""
    x = attention.make_inputs(4096, 16, dtype, CPU, rows=8)
    log_w = x.weights.double().log() / 16**-0.5
    hi = log_w.to(dtype)
    lo = (log_w - hi.double()).to(dtype)
    if dtype == torch.bfloat16:
        assert (hi.double() - log_w).abs().max() > 0.05
    assert (hi.double() + lo.double() - log_w).abs().max() < 5e-4


def test_position_reference_agrees_with_autograd():
    x = position.make_inputs(37, 5, torch.float64, CPU, rows=9)
    x = replace(x, value=x.value.requires_grad_(), rate=x.rate.double().requires_grad_())
    out = position.co.reference.position_attention(
        x.x.double(), x.y.double(), x.value, x.rate, x.weights.double()
    )
    grads = torch.autograd.grad(out, (x.value, x.rate), position.parity_grad_out(x))
    exact = position.exact(x)
    for name, found in zip(exact, (out[..., x.rows, :], *grads), strict=True):
        torch.testing.assert_close(found, exact[name], rtol=1e-6, atol=1e-12)


def test_the_plan_names_every_case_of_the_issue_and_what_matters_first(capsys):
    assert gpu_check.main(["--plan", "--only", "continuum_attention"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines)) == 3 * 2 * 4 * 4
    main = [line for line in lines if "d = 16, N = 65536" in line and "tf32" not in line]
    assert all(lines.index(line) < 8 for line in main)
    assert len(main) == 4
    assert lines[0].endswith(f"{case.OURS}; {attention.EFFICIENT}; {attention.FLEX}")


@pytest.mark.parametrize("module", [attention, position, patch, galerkin])
def test_the_small_case_of_the_sanitizer_runs(module):
    module.small(CPU)
