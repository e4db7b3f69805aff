"""A filled table as Markdown, JSON and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...training import atomic_write, write_json
from .spec import Table

if TYPE_CHECKING:
    from ..evaluation import Picture

Cells = dict[tuple[str, str], dict[str, Any]]


def as_markdown(table: Table, result: dict[str, Any]) -> str:
    """Each cell our value and in brackets the paper's; what was not run is empty."""
    cells = _by_place(result)
    lines = [f"# {result['title']}", ""]
    if result["small"]:
        lines += ["Ours at the settings of --small, (the paper's) at its own.", ""]
    else:
        lines += ["Ours (the paper's).", ""]
    lines += _line(["", *table.columns]) + _line(["---"] * (len(table.columns) + 1))
    for row in table.rows:
        lines += _line([row, *(_text(cells[row, column]) for column in table.columns)])
    if table.note:
        lines += ["", table.note]
    reasons: dict[str, set[tuple[str, str]]] = {}
    for cell in result["cells"]:
        if cell.get("why") and "command" not in cell:
            reasons.setdefault(cell["why"], set()).add((cell["row"], cell["column"]))
    lines += [
        line for why, places in reasons.items() for line in ("", f"Empty, {table.places(places)}: {why}.")
    ]
    missing = list(dict.fromkeys(c["command"] for c in result["cells"] if "command" in c))
    if missing:
        lines += ["", "Not run:", "", *(f"    {line}" for line in missing)]
    return "\n".join([*lines, ""])


def write(
    out: Path,
    name: str,
    table: Table,
    result: dict[str, Any],
    text: str,
    pictures: list[Picture] | None,
) -> list[Path]:
    """NAME.md, NAME.json and of figures NAME.png; pictures None: no figure."""
    out.mkdir(parents=True, exist_ok=True)
    with atomic_write(out / f"{name}.md") as file:
        file.write(text.encode())
    files = [out / f"{name}.md", write_json(out / f"{name}.json", result)]
    if pictures is None or table.plot is None or not any(c["run"] for c in result["cells"]):
        return files
    from .. import plots

    path = out / f"{name}.png"
    if table.plot.kind == "samples":
        return [*files, plots.write_samples(path, pictures)]
    return [*files, plots.write_lines(path, _lines(table, result), table.plot.label)]


def _lines(table: Table, result: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Abscissas and errors of each line of a figure; what is empty is left out."""
    cells = _by_place(result)
    found: dict[str, tuple[list[float], list[float]]] = {}
    assert table.plot is not None
    first, *others = table.columns
    for row in table.rows:
        if table.plot.kind == "curves":
            points = [(row, x, cells[row, c]) for x, c in zip(table.plot.x, table.columns, strict=True)]
        else:
            group = row.rpartition(",")[0]
            points = [(f"{group}, {c}", cells[row, first]["value"], cells[row, c]) for c in others]
        for label, x, cell in points:
            if x is not None and cell["value"] is not None:
                line = found.setdefault(label, ([], []))
                line[0].append(x)
                line[1].append(cell["value"])
    return found


def _by_place(result: dict[str, Any]) -> Cells:
    return {(cell["row"], cell["column"]): cell for cell in result["cells"]}


def _line(words: list[str]) -> list[str]:
    return ["| " + " | ".join(words) + " |"]


def _text(cell: dict[str, Any]) -> str:
    ours, paper = (_number(cell[key], cell["measure"]) for key in ("value", "paper"))
    return " ".join([*([ours] if ours else []), *([f"({paper})"] if paper else [])])


def _number(value: float | None, measure: str) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if measure in ("parameters", "best") else f"{value:.3g}"
