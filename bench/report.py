"""Markdown from a result file: ``python bench/report.py bench/results/FILE.json``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

LEGEND = (
    "Cells: median (min-max) ms; **time divided by this package's time in the same process**; fraction of "
    "the ceiling; SDPA's path where it is not flash; ~ where other processes disturbed all samples but one."
)


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def milliseconds(ms: float) -> str:
    return f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if "skipped" in row:
        return row["skipped"]
    text = f"{milliseconds(row['ms'])} ({milliseconds(row['ms_min'])}-{milliseconds(row['ms_max'])})"
    if "speedup" in row:
        text += f" **{row['speedup']:.2f}x**"
    if "ceiling_fraction" in row:
        text += f" {row['ceiling_fraction']:.0%}"
    if row["note"]:
        text += f" {row['note']}"
    if row["clean_samples"] < 2:
        text += " ~"
    return text


def render_rows(rows: Sequence[Row]) -> str:
    """One table per value of row["table"]; a line per row["case"], a column per candidate and allocator.

    Every row has "table", "case", "candidate", "allocator" and either "skipped" (a reason) or the times.
    """
    parts = [LEGEND]
    for title in dict.fromkeys(r["table"] for r in rows):
        chosen = [r for r in rows if r["table"] == title]
        cases = list(dict.fromkeys(tuple(r["case"].items()) for r in chosen))
        columns = list(dict.fromkeys((r["candidate"], r["allocator"]) for r in chosen))
        found = {(tuple(r["case"].items()), r["candidate"], r["allocator"]): r for r in chosen}
        header = [name for name, _ in cases[0]]
        header += [c if a == "default" else f"{c}, {a} memory" for c, a in columns]
        lines = [
            [str(v) for _, v in case] + [_cell(found.get((case, *c))) for c in columns] for case in cases
        ]
        parts.append(f"### {title}\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def render_memory(rows: Sequence[Row]) -> str:
    header = [
        "candidate",
        "pass",
        "inputs MiB",
        "outputs MiB",
        "beyond them MiB",
        "beyond / both",
        "N x M MiB",
    ]
    keys = ["inputs_mib", "outputs_mib", "extra_mib", "extra_ratio", "scores_mib"]
    digits = [1, 1, 1, 2, 0]
    lines = []
    for row in rows:
        figures = [f"{row[k]:.{n}f}" for k, n in zip(keys, digits, strict=True)]
        lines.append([row["candidate"], row["pass"], *figures])
    return f"### Peak memory, {rows[0]['shape']}\n\n{table(header, lines)}"


def render_machine(machine: Mapping[str, Any]) -> str:
    isa = "AVX-512" if machine["avx512f"] else "AVX2" if machine["avx2"] else "no AVX2"
    virtual = " (virtual)" if machine["virtual"] else ""
    return (
        f"Machine: {machine['cpu']}, {machine['cores']} cores{virtual}, {isa}, L2 {machine['l2']}, "
        f"{machine['memory_gib']} GiB, {machine['os']}; torch {machine['torch']} with "
        f"{machine['torch_cpu_capability']} kernels, {machine['blas']}; "
        f"continuum_ops {machine['continuum_ops']}, commit {machine['commit'] or 'unknown'}, "
        f"backends {json.dumps(machine['backends'])}."
    )


def render_ceilings(ceilings: Mapping[str, Any]) -> str:
    lines = []
    for threads, c in ceilings["threads"].items():
        fma = f"{c['fma_gflops']:.0f}"
        if "fma_avx2_gflops" in c:
            fma += f" ({c['fma_avx2_gflops']:.0f} at AVX2 width)"
        rest = [c["blas_gflops"], c["exp2_giga_per_s"], c["triad_gb_per_s"], c["first_touch_gb_per_s"]]
        lines.append([threads, fma, *(f"{x:.3g}" for x in rest)])
    header = ["threads", "FMA GFLOP/s", "torch.mm GFLOP/s", "exp2 G/s", "triad GB/s", "first touch GB/s"]
    disturbed = f"other processes took {ceilings['other_cpu']:.0%} of a core meanwhile"
    return f"### Ceilings ({ceilings['isa']}; {disturbed})\n\n{table(header, lines)}"


def render(document: Mapping[str, Any]) -> str:
    """The whole result file as Markdown."""
    parts = [f"## {document['op']}", render_machine(document["machine"])]
    settings = ", ".join(f"{k} {v}" for k, v in document["settings"].items())
    parts.append(f"Measured {document['created']}; {settings}.")
    if document.get("ceilings"):
        parts.append(render_ceilings(document["ceilings"]))
    if document.get("rows"):
        parts.append(render_rows(document["rows"]))
    if document.get("memory"):
        parts.append(render_memory(document["memory"]))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Render a result file as Markdown.")
    parser.add_argument("path", type=Path)
    print(render(json.loads(parser.parse_args().path.read_text())), end="")


if __name__ == "__main__":
    main()
