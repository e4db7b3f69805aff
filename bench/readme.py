"""The measured blocks of README.md and bench/README.md, from bench/results/: no figure is typed by hand.

    python bench/readme.py          # rewrites the blocks
    python bench/readme.py --check  # exit code 1 if a file differs from its results

A block stands between ``<!-- measured: FILE.json -->`` and ``<!-- end -->``; the "op" of the file says how it
is rendered. ``FILE.json memory`` takes the peak memory of a benchmark.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
FILES = (ROOT / "README.md", ROOT / "bench" / "README.md")
BLOCK = re.compile(r"<!-- measured: (\S+?\.json)( memory)? -->\n(.*?)<!-- end -->", re.DOTALL)
PASSES = ("forward", "forward + backward")

Row = Mapping[str, Any]
Document = Mapping[str, Any]


def machine(document: Document) -> str:
    """One sentence: the machine, its measured ceilings, the commit."""
    m = document["machine"]
    isa = "AVX-512" if m["avx512f"] else "AVX2" if m["avx2"] else "neither AVX2 nor AVX-512"
    text = f"{m['cpu']}, {isa}, {m['cores']} {'virtual ' if m['virtual'] else ''}cores, torch {m['torch']}"
    for threads, c in (document.get("ceilings") or {"threads": {}})["threads"].items():
        text += (
            f"; {threads} threads reach {c['fma_gflops']:.0f} GFLOP/s FMA, "
            f"{c['exp2_giga_per_s']:.1f} G exp2/s, torch.mm {c['blas_gflops']:.0f} GFLOP/s"
        )
    return f"{text}; commit {(m['commit'] or 'unknown').split()[0][:7]}."


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
    lines = []
    for passes in PASSES:
        for d, n in dict.fromkeys((r["case"]["d"], r["case"]["N"]) for r in rows):
            case = [r for r in rows if r["passes"] == passes and r["case"] == {"d": d, "N": n}]
            ours = pick(case, candidate="continuum_attention", allocator="default")
            plain = [pick(case, candidate="(a) plain PyTorch", allocator=a) for a in ("default", "kept")]
            sdpa = ("(b) SDPA, log w mask", "(c) SDPA, log w channel", "(d) SDPA, no weights")
            others = [ratio(pick(case, candidate=c, allocator="default")) for c in sdpa]
            lines.append([str(d), str(n), passes, time(ours), share(ours), both(*plain), *others])
    header = ["d", "N", "pass", "ours, ms", "of the ceiling", "(a) default / kept", "(b)", "(c)", "(d)"]
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
                others = [
                    both(*(pick(these, candidate=c, allocator=a) for a in ("default", "kept")))
                    for c in ("(a) plain PyTorch", "(b) chunked torch.mm", "(c) pykeops LazyTensor")
                ]
                what = ", ".join(f"{k} = {v}" if k != "grid" else f"{v}" for k, v in case)
                times = " / ".join(filter(None, map(time, ours)))
                lines.append([f"{title} {what}", passes, times, share(ours[0]), *others])
    header = ["case", "pass", "ours, ms, default / kept", "of the ceiling", "(a)", "(b)", "(c)"]
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
                cells.append(times if name == names[0] else f"{times} ({both(*found)})")
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
    "continuum_attention": continuum_attention,
    "position_attention": position_attention,
    "patch_attention": patches,
    "fourier_patch_attention": patches,
    "overhead": overhead,
    "galerkin_attention": compact,
    "fourier_attention": compact,
    "pit_darcy": script("train_pit_darcy"),
    "patch_darcy": script("train_patch_darcy"),
    "patch_models": script("bench_patch_models"),
    "distributed": script("bench_distributed"),
    "experiments": script("run_experiments"),
    "train-galerkin-burgers": script("train_galerkin_burgers", rows=True),
    "train-galerkin-darcy-inverse": script("train_galerkin_darcy_inverse", rows=True),
}


def block(name: str, part: str) -> str:
    document = json.loads((RESULTS / name).read_text())
    if part:
        return memory(document)
    return f"{RENDER[document['op']](document)}\n\n{machine(document)}"


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
