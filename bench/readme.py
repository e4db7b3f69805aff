"""The measured blocks of README.md, docs/measured.md and bench/README.md, from bench/results/.

No figure is typed by hand.

    python bench/readme.py          # rewrites the blocks
    python bench/readme.py --check  # exit code 1 if a file differs from its results

A block stands between ``<!-- measured: FILE.json -->`` and ``<!-- end -->``; the "op" of the file says how it
is rendered. ``FILE.json memory`` takes the peak memory of a benchmark, and ``headline-MACHINE`` a few rows of
several files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
FILES = (ROOT / "README.md", ROOT / "docs" / "measured.md", ROOT / "bench" / "README.md")
BLOCK = re.compile(r"<!-- measured: (\S+?)( memory)? -->\n(.*?)<!-- end -->", re.DOTALL)
PASSES = ("forward", "forward + backward")

Row = Mapping[str, Any]
Document = Mapping[str, Any]


def commit(document: Document) -> str:
    return (document["machine"].get("commit") or "unknown").split()[0][:7]


def processor(m: Mapping[str, Any]) -> str:
    if "avx2" not in m:  # what `continuum-ops demo` itself writes
        return f"{m['cpu']}, {m['cores']} cores, {m['backends']['cpu']}, torch {m['torch']}"
    isa = "AVX-512" if m["avx512f"] else "AVX2" if m["avx2"] else "neither AVX2 nor AVX-512"
    return f"{m['cpu']}, {isa}, {m['cores']} {'virtual ' if m['virtual'] else ''}cores, torch {m['torch']}"


def machine(document: Document) -> str:
    """One sentence: the machine, its measured ceilings, the commit."""
    text = processor(document["machine"])
    for threads, c in (document.get("ceilings") or {"threads": {}})["threads"].items():
        text += (
            f"; {threads} threads reach {c['fma_gflops']:.0f} GFLOP/s FMA, "
            f"{c['exp2_giga_per_s']:.1f} G exp2/s, torch.mm {c['blas_gflops']:.0f} GFLOP/s"
        )
    return f"{text}; commit {commit(document)}."


def pick(rows: Sequence[Row], **wanted: Any) -> Row | None:
    """The row whose entries, or entries of its case, are these."""
    return next((r for r in rows if all({**r, **r["case"]}.get(k) == v for k, v in wanted.items())), None)


def time(row: Row | None) -> str:
    return "" if row is None or "ms" not in row else report.milliseconds(row["ms"])


def ratio(row: Row | None) -> str:
    """Its time divided by this package's, or why there is none."""
    if row is None:
        return ""
    if "skipped" in row:
        return "does not fit" if row["skipped"].startswith("would need") else row["skipped"]
    return f"{row['speedup']:.2f}" if row["speedup"] < 10 else f"{row['speedup']:.0f}"


def both(default: Row | None, kept: Row | None) -> str:
    """Default allocator / memory kept; a reason that both share once."""
    texts = [text for text in (ratio(default), ratio(kept)) if text]
    measured = any(row is not None and "speedup" in row for row in (default, kept))
    return " / ".join(texts if measured else dict.fromkeys(texts))


def share(row: Row | None) -> str:
    return "" if row is None or "ceiling_fraction" not in row else f"{100 * row['ceiling_fraction']:.0f} %"


def continuum_attention(document: Document) -> str:
    rows = [r for r in document["rows"] if r["table"] in [f"{p}, float32" for p in PASSES]]
    peers = ["(b) SDPA, log w mask", "(c) SDPA, log w channel", "(d) SDPA, no weights"]
    # Older result files lack it.
    peers += [c for c in ("(e) FlexAttention, score_mod",) if pick(rows, candidate=c)]
    lines = []
    for passes in PASSES:
        for d, n in dict.fromkeys((r["case"]["d"], r["case"]["N"]) for r in rows):
            case = [r for r in rows if r["passes"] == passes and r["case"] == {"d": d, "N": n}]
            ours = pick(case, candidate="continuum_attention", allocator="default")
            plain = [pick(case, candidate="(a) plain PyTorch", allocator=a) for a in ("default", "kept")]
            others = [ratio(pick(case, candidate=c, allocator="default")) for c in peers]
            lines.append([str(d), str(n), passes, time(ours), share(ours), both(*plain), *others])
    header = ["d", "N", "pass", "ours, ms", "of the ceiling", "(a) default / kept", *(p[:3] for p in peers)]
    return report.table(header, lines)


def position_attention(document: Document) -> str:
    rows = document["rows"]
    lines = []
    for name, title in (("points", "points"), ("grid", "grid")):
        for passes in PASSES:
            chosen = [r for r in rows if r["table"].startswith(f"{name}, {passes}, ")]
            for case in dict.fromkeys(tuple(r["case"].items()) for r in chosen):
                these = [r for r in chosen if tuple(r["case"].items()) == case]
                op = "position_attention" if name == "points" else "position_attention, Grid"
                ours = [pick(these, candidate=op, allocator=a) for a in ("default", "kept")]
                direct = [
                    pick(these, candidate=f"{op}, pair by pair", allocator=a) for a in ("default", "kept")
                ]
                others = [
                    both(*(pick(these, candidate=c, allocator=a) for a in ("default", "kept")))
                    for c in ("(a) plain PyTorch", "(b) chunked torch.mm", "(c) pykeops LazyTensor")
                ]
                what = ", ".join(f"{k} = {v}" if k != "grid" else f"{v}" for k, v in case)
                times = " / ".join(filter(None, map(time, ours)))
                pairs = " / ".join(filter(None, map(time, direct)))
                lines.append([f"{title} {what}", passes, times, pairs, share(direct[0]), *others])
    header = [
        "case",
        "pass",
        "ours, ms, default / kept",
        "pair by pair, ms",
        "of the ceiling",
        "(a)",
        "(b)",
        "(c)",
    ]
    return report.table(header, lines)


def patches(document: Document) -> str:
    """patch_attention, fourier_patch_attention: one line per grid and pass, one column per other form."""
    rows = document["rows"]
    names = list(dict.fromkeys(r["candidate"] for r in rows))
    lines = []
    for passes in PASSES:
        chosen = [r for r in rows if r["table"].startswith(f"{passes}, ")]
        for case in dict.fromkeys(tuple(r["case"].items()) for r in chosen):
            these = [r for r in chosen if tuple(r["case"].items()) == case]
            cells = [[pick(these, candidate=c, allocator=a) for a in ("default", "kept")] for c in names]
            times = " / ".join(filter(None, map(time, cells[0])))
            grid = dict(case)["grid"]
            lines.append([grid, passes, times, share(cells[0][1]), *(both(*pair) for pair in cells[1:])])
    return report.table(
        ["grid", "pass", "ours, ms, default / kept", "of the ceiling (kept)", *names[1:]], lines
    )


class Headline(NamedTuple):
    """A row of a result file's table, and the form that it stands beside."""

    op: str
    what: str
    row: Mapping[str, Any]
    ours: str
    other: str
    title: str  # of the other form
    allocator: str = "kept"

    def rows(self, document: Document) -> tuple[Row, Row]:
        """Ours and the other form's in a result file of this op."""
        ours, other = (
            pick(document["rows"], candidate=c, allocator=self.allocator, **self.row)
            for c in (self.ours, self.other)
        )
        if ours is None or other is None or "ms" not in ours or "ms" not in other:
            raise LookupError(f"no times of {self.what!r} beside {self.other!r} in the results of {self.op}")
        return ours, other

    def ratio(self, document: Document) -> float:
        """The other form's time over ours."""
        ours, other = self.rows(document)
        return float(other["ms"] / ours["ms"])


BOTH = "forward + backward, float32"
HEADLINES = (
    Headline(
        "continuum_attention",
        "`continuum_attention`, 16,384 points, 8 heads of 16",
        {"table": BOTH, "d": 16, "N": 16384},
        "continuum_attention",
        "(b) SDPA, log w mask",
        "SDPA with log w as its mask",
        "default",
    ),
    Headline(
        "continuum_attention",
        "the same, 4,096 points",
        {"table": BOTH, "d": 16, "N": 4096},
        "continuum_attention",
        "(d) SDPA, no weights",
        "SDPA without weights",
        "default",
    ),
    Headline(
        "position_attention",
        "`position_attention`, 4,096 points, 8 samples of 64 channels",
        {"table": f"points, {BOTH}", "N": 4096},
        "position_attention",
        "(a) plain PyTorch",
        "plain PyTorch",
    ),
    Headline(
        "patch_attention",
        "`patch_attention`, 416 x 416 points",
        {"table": BOTH, "grid": "416 x 416"},
        "patch_attention",
        "(a) rearrange, einsum",
        "rearrange and einsum",
    ),
    Headline(
        "fourier_patch_attention",
        "`nn.FourierPatchAttention`, 416 x 416 points",
        {"table": BOTH, "grid": "416 x 416"},
        "mode space",
        "space: 1 rfft2, bmm, 3 irfft2, bmm",
        "Q, K and V in space",
    ),
    Headline(
        "galerkin_attention",
        "10 layers of `nn.GalerkinAttention`, 8,192 points",
        {"table": BOTH, "N": 8192},
        "galerkin",
        "softmax",
        "softmax attention of this package",
        "default",
    ),
    Headline(
        "overhead",
        "`continuum_attention`, 16 points, 1 head of 16, one thread",
        {"table": f"{BOTH}, N = M = 16, d = 16, B = 1", "threads": 1, "H": 1},
        "continuum_attention",
        "sdpa",
        "SDPA without weights",
        "default",
    ),
)


def headline_documents(name: str) -> dict[str, Document]:
    """The result files that the table of README.md is made of, by op, of one machine."""
    return {
        op: json.loads((RESULTS / f"{op}-{name}.json").read_text())
        for op in dict.fromkeys(h.op for h in HEADLINES)
    }


def headline_machine() -> str:
    """The machine that the table of README.md is of, as its result files name it."""
    found = re.search(r"<!-- measured: headline-(\S+) -->", FILES[0].read_text())
    if found is None:
        raise LookupError(f"{FILES[0]} has no block <!-- measured: headline-MACHINE -->")
    return found[1]


def headline(name: str) -> str:
    """The table of README.md, of one machine."""
    documents = headline_documents(name)
    lines = []
    for h in HEADLINES:
        document = documents[h.op]
        ours, _ = h.rows(document)
        times = f"{h.ratio(document):.2f}"
        lines.append([h.what, f"{report.milliseconds(ours['ms'])} ms", h.title, times, commit(document)])
    first = documents[HEADLINES[0].op]
    peak = {r["candidate"]: r for r in first["memory"] if r["pass"] == "forward + backward"}
    ours, other = peak["continuum_attention"], peak["(b) SDPA, log w mask"]
    header = ["forward + backward, float32", "ours", "beside", "its time / ours", "commit"]
    points = int(ours["shape"].split(",")[0].split()[-1])
    return (
        f"{report.table(header, lines)}\n\n"
        f"Peak memory beyond inputs and outputs at {points:,} points, one head of 16: "
        f"{ours['extra_mib']:.1f} MiB, SDPA with log w as its mask {other['extra_mib']:.1f} MiB; "
        f"one N x N matrix takes {ours['scores_mib'] / 1024:.0f} GiB.\n"
        f"{processor(first['machine'])}, {first['settings']['threads']} threads but for the last row."
    )


def percent(error: float) -> str:
    return f"{100 * error:.2f} %"


def demo(document: Document) -> str:
    """What ``make demo`` measures."""
    settings, fine = document["settings"], document["large_grid"]
    meshes: dict[tuple[str, int], dict[str, Row]] = {}
    for row in document["meshes"]:
        meshes.setdefault((row["mesh"], row["points"]), {})[row["weights"]] = row
    lines = [
        [mesh, str(n), *(f"{percent(w[k]['median'])} ({100 * w[k]['worst']:.1f} %)" for k in w)]
        for (mesh, n), w in meshes.items()
    ]
    names = [f"{name} weights" for name in next(iter(meshes.values()))]
    darcy = document["darcy"]
    grids = [
        [f"{g['resolution']} x {g['resolution']}", f"{percent(g['mean'])} ({100 * g['worst']:.1f} %)"]
        for g in darcy["grids"]
    ]
    tno, pit, tested = document["training"], darcy["training"], settings["darcy"]
    return "\n\n".join(
        [
            f"Lorenz-63, x(t) -> y(t), median (worst) of {settings['test_trajectories']} test trajectories; "
            f"TNO with {tno['parameters']:,} parameters, {settings['steps']} steps in "
            f"{tno['cpu_seconds']:.0f} s of CPU time on {settings['train_trajectories']:,} trajectories, "
            "sampled on the first mesh:",
            report.table(["mesh", "points", *names], lines),
            f"Darcy flow, a(x) -> u(x), mean (worst) of {tested['test_samples']} test samples; "
            f"PiT with {pit['parameters']:,} parameters, {tested['steps']} steps in "
            f"{pit['cpu_seconds']:.0f} s of CPU time on {tested['train_samples']:,} samples of "
            "the first grid:",
            report.table(["grid", "error"], grids),
            f"One head of attention over {fine['mesh']} points, d = {fine['head_dim']}: "
            f"{fine['cpu_seconds']:.0f} s of CPU time, {fine['peak_memory_bytes'] / 1e6:.0f} MB beyond "
            f"{fine['inputs_and_output_bytes'] / 1e6:.0f} MB of inputs and output, where one N x N matrix "
            f"takes {fine['n_by_n_bytes'] / 1e9:.0f} GB; largest error against float64 "
            f"{fine['error_against_float64']:.1e} of the largest value.",
            f"In all {document['seconds']:.0f} s, {settings['threads']} thread"
            f"{'s' if settings['threads'] > 1 else ''}.",
        ]
    )


def convergence(document: Document) -> str:
    """Errors against the integral on uneven points: by their weights, and by equal ones."""
    rules = {
        (1, "trapezoid, uneven points"): "trapezoid",
        (2, "Voronoi, scattered points"): "Voronoi",
        (1, "equal weights, uneven points"): "equal",
        (2, "equal weights, uneven points"): "equal",
    }
    lines = []
    for row in document["rows"]:
        rule = rules.get((row["dimension"], row["rule"]))
        if rule is not None:
            ends = [f"{row['errors'][i]:.1e} ({row['points'][i]:,})" for i in (0, -1)]
            theory = f"{round(row['order'], 2) + 0.0:.2f} ({row['expected']:g})"  # no -0.00
            lines.append([row["operator"], str(row["dimension"]), rule, *ends, theory])
    header = ["operator", "dimensions", "weights", "error (points)", "error (points)", "order (theory)"]
    return report.table(header, lines)


def memory(document: Document) -> str:
    lines = [
        [r["candidate"], r["pass"], f"{r['inputs_mib'] + r['outputs_mib']:.0f}", f"{r['extra_mib']:.1f}"]
        for r in document["memory"]
    ]
    return report.table(["form", "pass", "inputs and outputs, MiB", "peak beyond them, MiB"], lines)


def overhead(document: Document) -> str:
    rows = document["rows"]
    names = list(dict.fromkeys(r["candidate"] for r in rows))
    lines = []
    for table in dict.fromkeys(r["table"] for r in rows):
        for case in dict.fromkeys(tuple(r["case"].items()) for r in rows):
            these = [r for r in rows if r["table"] == table and tuple(r["case"].items()) == case]
            found = [pick(these, candidate=c) for c in names]
            cells = ["" if r is None else f"{1e3 * r['ms']:.1f} ({r['ratio']:.2f})" for r in found]
            lines.append([table.split(", float32")[0], *(str(v) for _, v in case), *cells])
    header = ["pass", *(k for k, _ in tuple(rows[0]["case"].items())), *(f"{c}, us" for c in names)]
    return report.table(header, lines)


def compact(document: Document) -> str:
    """A line per case and pass, a column per form: milliseconds, and times ours in brackets."""
    rows = document["rows"]
    names = list(dict.fromkeys(r["candidate"] for r in rows))
    lines = []
    for table in dict.fromkeys(r["table"] for r in rows):
        chosen = [r for r in rows if r["table"] == table]
        for case in dict.fromkeys(tuple(r["case"].items()) for r in chosen):
            these = [r for r in chosen if tuple(r["case"].items()) == case]
            cells = []
            for name in names:
                found = [pick(these, candidate=name, allocator=a) for a in ("default", "kept")]
                times = " / ".join(filter(None, map(time, found)))
                ratios = both(*found)
                cells.append(times if name == names[0] else f"{times} ({ratios})" if times else ratios)
            lines.append([*(str(v) for _, v in case), table.split(", float32")[0], *cells])
    keys = [k for k, _ in tuple(rows[0]["case"].items())]
    return report.table([*keys, "pass", f"{names[0]}, ms", *(f"{n} (ratio)" for n in names[1:])], lines)


def script(name: str, rows: bool = False) -> Callable[[Document], str]:
    """The table that a training prints."""

    def render(document: Document) -> str:
        text: str = __import__(name).render(document["rows"] if rows else document)
        return text

    return render


RENDER: dict[str, Callable[[Document], str]] = {
    "demo": demo,
    "convergence": convergence,
    "continuum_attention": continuum_attention,
    "position_attention": position_attention,
    "patch_attention": patches,
    "fourier_patch_attention": patches,
    "overhead": overhead,
    "galerkin_attention": compact,
    "fourier_attention": compact,
    "attention_layers": compact,
    "pit_darcy": script("train_pit_darcy"),
    "patch_darcy": script("train_patch_darcy"),
    "patch_models": script("bench_patch_models"),
    "distributed": script("bench_distributed"),
    "experiments": script("run_experiments"),
    "train-galerkin-burgers": script("train_galerkin_burgers", rows=True),
    "train-galerkin-darcy-inverse": script("train_galerkin_darcy_inverse", rows=True),
}


def block(name: str, part: str) -> str:
    kind, _, of = name.partition("-")
    if kind == "headline":
        return headline(of)
    document = json.loads((RESULTS / name).read_text())
    if part:
        return memory(document)
    return f"{RENDER[document.get('op', 'demo')](document)}\n\n{machine(document)}"


def rewrite(text: str) -> str:
    """A text with every measured block made anew."""

    def replace(match: re.Match[str]) -> str:
        name, part = match[1], match[2] or ""
        return f"<!-- measured: {name}{part} -->\n{block(name, part.strip())}\n<!-- end -->"

    return BLOCK.sub(replace, text)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 on a difference")
    args = parser.parse_args(argv)
    before = {path: path.read_text() for path in FILES}
    after = {path: rewrite(text) for path, text in before.items()}
    if args.check:
        sys.exit(int(before != after))
    for path, text in after.items():
        path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
