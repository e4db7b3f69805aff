"""Markdown from the document of gpu_check.py, and whether what it found is fit to pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OURS = "continuum_ops"
Row = Mapping[str, Any]

LEGEND = (
    "Cells: median (min-max) ms; **time divided by ours**; largest error against float64 of the output or "
    "any gradient, relative to its largest entry; memory beyond inputs and outputs. Floors: what the rates "
    "measured on this card allow for exponentials, the tensors' bytes and matrix products, each alone."
)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *lines])


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if "skipped" in row:
        return str(row["skipped"]).replace("|", "/")
    text = f"{row['ms']:.3g} ({row['ms_min']:.3g}-{row['ms_max']:.3g})"
    if "over_ours" in row and row["candidate"] != OURS:
        text += f" **{row['over_ours']:.2f}x**"
    return f"{text}, {max(row['errors'].values()):.1e}, {row['extra_mib']:.0f} MiB"


def render_rows(rows: Sequence[Row]) -> list[str]:
    parts = []
    for title in dict.fromkeys((r["op"], r["precision"], r["passes"]) for r in rows):
        chosen = [r for r in rows if (r["op"], r["precision"], r["passes"]) == title]
        names = list(dict.fromkeys(r["candidate"] for r in chosen))
        cases = sorted({(r["d"], r["N"]) for r in chosen})
        found = {(r["d"], r["N"], r["candidate"]): r for r in chosen}
        first = "memory_floor_ms" if any("memory_floor_ms" in r for r in chosen) else "exp_floor_ms"
        lines = []
        for d, n in cases:
            timed = [r for r in chosen if (r["d"], r["N"]) == (d, n) and first in r]
            keys = [first, "matrix_floor_ms"]
            floors = [f"{timed[0][k]:.3g}" if timed and k in timed[0] else "-" for k in keys]
            lines.append([str(d), str(n), *floors, *(_cell(found.get((d, n, name))) for name in names)])
        header = ["d", "N", f"{first.split('_')[0]} floor, ms", "matrix floor, ms", *names]
        parts.append(f"### {', '.join(title)}\n\n{_table(header, lines)}")
    return parts


def render_steps(steps: Mapping[str, Any]) -> str:
    lines = []
    for name, step in steps.items():
        if "skipped" in step:
            lines.append([name, "-", "-", step["skipped"]])
            continue
        said = ", ".join(f"{n} {kind}" for kind, n in step.get("counts", {}).items())
        said += "".join(f"; {test}" for test in step.get("failed", []))
        if "errors" in step:
            said = "no summary" if step["errors"] is None else f"{step['errors']} errors"
        if "warmed" in step:
            said = f"{len(step['warmed'])} compiled"
        end = "cut short" if step["cut_short"] else f"exit {step['rc']}"
        lines.append([name, f"{step['seconds']:.0f}", end, said.replace("|", "/")])
    return _table(["step", "s", "end", "found"], lines)


def render(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    said = [f"{k} {v}" for k, v in machine.get("gpu", {}).items()] + [f"commit {machine['commit']}"]
    rates = document["rates"]
    units = {"ex2_per_s": (1e12, "T ex2/s"), "bytes_per_s": (1e12, "TB/s (copy)")}
    said_rates = []
    for name, rate in rates.items():
        scale, unit = units.get(name, (1e12, f"TFLOP/s ({name.removesuffix('_flops')} torch.mm)"))
        said_rates.append(f"{rate / scale:.3g} {unit}")
    parts = [f"## GPU check of {document['created']}", ", ".join(said) + ".", render_steps(document["steps"])]
    if said_rates:
        parts.append(f"Rates: {', '.join(said_rates)}.")
    if document["rows"]:
        parts += [LEGEND, *render_rows(document["rows"])]
    return "\n\n".join(parts) + "\n"


def exit_code(document: Mapping[str, Any]) -> int:
    """1 where a step failed, or a result of ours is wrong or missing for another reason than time.

    A benchmark that ran out of time has done its work; tests that were cut short have not.
    """
    for name, step in document["steps"].items():
        if "skipped" in step or name == "warm":
            continue
        if step["cut_short"] and name.startswith("benchmark"):
            continue
        if step["cut_short"] or step["rc"] != 0 or step.get("errors"):
            return 1
    ours = [r for r in document["rows"] if r["candidate"] == OURS]
    failed = any("skipped" in r and not r["skipped"].startswith("would take") for r in ours)
    return int(failed or not any("ms" in r for r in ours))
