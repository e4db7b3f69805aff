"""What bench/run.py says of two results, and the exponents of bench/plots.py, on made-up rows."""

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(BENCH))
    try:
        import plots
        import run

        yield run, plots
    finally:
        sys.path.remove(str(BENCH))


def document(**speedups):
    rows = [
        {"table": "forward", "case": {"N": 8}, "allocator": "default", "candidate": c, "speedup": s}
        for c, s in speedups.items()
    ]
    rows.append(
        {"table": "forward", "case": {"N": 8}, "allocator": "default", "candidate": "z", "skipped": "no"}
    )
    return {"rows": rows}


def test_ratios_of_both_are_compared(scripts):
    run, _ = scripts
    before, now = document(ours=1.0, a=2.0, b=4.0, gone=3.0), document(ours=1.0, a=2.3, b=3.0, new=1.5)
    found = run.compare(before, now)
    assert [(r.before, r.now) for r in found] == [(2.0, 2.3), (4.0, 3.0)]
    assert [r.change for r in found] == pytest.approx([0.15, -0.25])
    text = run.render({"op": found})
    assert "| op | 2 | 1 | 0.95 |" in text
    assert "b; forward; N 8; default | 4.00 | 3.00" in text and "| a;" not in text


def timed(scripts, **times):
    """Result files that have the rows of README.md's table: by op, (ours, the other form) in ms."""
    run, _ = scripts
    documents = {}
    for h in run.readme.HEADLINES:
        if h.op not in times:
            continue
        rows = documents.setdefault(h.op, {"rows": []})["rows"]
        for candidate, ms in zip((h.ours, h.other), times[h.op], strict=True):
            case = {k: v for k, v in h.row.items() if k != "table"}
            row = {"table": h.row["table"], "case": case, "allocator": h.allocator, "candidate": candidate}
            rows.append({**row, "ms": ms, "clean_samples": 3})
    return documents


def test_rows_of_the_readme(scripts):
    """By the ratio of two times: 10 / 4 = 2.5, and 14 / 5 = 2.8 is 12 % more, 9 / 5 = 1.8 28 % less."""
    run, _ = scripts
    chosen = ["patch_attention", "galerkin_attention", "fourier_patch_attention"]
    before = timed(scripts, **dict.fromkeys(chosen, (4.0, 10.0)))
    now = timed(scripts, patch_attention=(5.0, 14.0), galerkin_attention=(5.0, 9.0))
    now["galerkin_attention"]["rows"][1]["clean_samples"] = 1
    text = run.headlines(before, now, chosen)
    assert "rearrange and einsum | 2.50 | 2.80 | +12% |" in text
    assert "softmax attention of this package | 2.50 | 1.80 ~ | -28% |" in text
    assert "Q, K and V in space | 2.50 | not measured |  |" in text
    assert "1 of 3 ratios of README.md within 20%" in text and "position_attention" not in text


def test_a_form_that_did_not_fit_is_not_measured(scripts):
    run, _ = scripts
    before = timed(scripts, patch_attention=(4.0, 10.0))
    now = timed(scripts, patch_attention=(4.0, 10.0))
    del now["patch_attention"]["rows"][1]["ms"]
    now["patch_attention"]["rows"][1]["skipped"] = "would need 25.8 GB of 23.6"
    text = run.headlines(before, now, ["patch_attention"])
    assert "| 2.50 | not measured |  |" in text and "0 of 1 ratios" in text


def test_the_short_run_has_every_row_of_the_readme(scripts):
    """Its sizes, dimensions, threads and heads, by the options of each script's short form."""
    run, _ = scripts
    assert {h.op for h in run.readme.HEADLINES} <= {
        n for n, b in run.BENCHMARKS.items() if b.short is not None
    }
    wanted = {"N": "--sizes", "d": "--dims", "threads": "--threads", "H": "--heads"}
    for h in run.readme.HEADLINES:
        options = list(run.BENCHMARKS[h.op].short)
        for key, option in wanted.items():
            if key in h.row and option in options:
                values = options[options.index(option) + 1 :]
                values = values[: next((i for i, v in enumerate(values) if v.startswith("-")), None)]
                assert str(h.row[key]) in values, (h.what, option)


def test_flex_attention_has_a_column_where_it_was_measured(scripts):
    run, _ = scripts
    case = {
        "table": "forward, float32",
        "passes": "forward",
        "case": {"d": 16, "N": 8},
        "allocator": "default",
    }
    rows = [{**case, "candidate": "continuum_attention", "ms": 2.0, "speedup": 1.0}]
    assert run.readme.continuum_attention({"rows": rows}).splitlines()[2].endswith("|  |  |  |")
    rows.append({**case, "candidate": "(e) FlexAttention, score_mod", "ms": 5.0, "speedup": 2.5})
    assert run.readme.continuum_attention({"rows": rows}).splitlines()[0].endswith("| (d) | (e) |")
    assert run.readme.continuum_attention({"rows": rows}).splitlines()[2].endswith("| 2.50 |")
    rows[-1] = {**case, "candidate": "(e) FlexAttention, score_mod", "skipped": "out of memory"}
    assert run.readme.continuum_attention({"rows": rows}).splitlines()[2].endswith("| out of memory |")


def test_compare_only_measures_nothing(scripts, tmp_path, capsys, monkeypatch):
    """The committed results against themselves: nothing deviates."""
    run, _ = scripts
    machine = run.readme.headline_machine()
    for op, document in run.readme.headline_documents(machine).items():
        (tmp_path / f"{op}-elsewhere.json").write_text(json.dumps(document))
    monkeypatch.setattr(run.harness, "describe_machine", lambda: {"name": "elsewhere"})
    monkeypatch.setattr(run.subprocess, "run", None)
    assert run.main(["--short", "--compare-only", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    rows = len(run.readme.HEADLINES)
    assert text.count("| +0% |") == rows and f"{rows} of {rows} ratios of README.md" in text
    assert f"README.md's ratios are of {machine}, these of elsewhere." in text


def test_every_benchmark_is_a_script(scripts):
    run, _ = scripts
    assert {b.script for b in run.BENCHMARKS.values()} == {p.name for p in BENCH.glob("bench_*.py")}


def test_exponent(scripts):
    _, plots = scripts
    assert plots.slope([(n, 3 * n**1.7) for n in (10, 100, 1000)]) == pytest.approx(1.7)
