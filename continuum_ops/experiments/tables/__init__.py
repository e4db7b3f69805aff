"""The papers' tables and figures, filled from runs: ``continuum-ops tables``.

What a table holds is data: ca.py, gt.py and pit.py say which experiment, with which changes, measured how and
on which mesh, each cell is, and what the paper printed there.
"""

from __future__ import annotations

from . import ca, gt, pit
from .spec import Part, Plot, Table

TABLES: dict[str, Table] = {**pit.TABLES, **gt.TABLES, **ca.TABLES}

# fill.py reads TABLES.
from .fill import Filled, fill, listed, needed  # noqa: E402

__all__ = ["TABLES", "Filled", "Part", "Plot", "Table", "fill", "listed", "needed"]
