"""Tables in plain text."""

from __future__ import annotations


def aligned(table: list[tuple[str, ...]], left: tuple[int, ...]) -> tuple[list[str], str]:
    """The lines of a table, columns `left` flush left and the others right, and a rule of their width."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in table
    ]
    return lines, "-" * max(map(len, lines))
