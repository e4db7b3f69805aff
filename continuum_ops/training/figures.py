"""Figures of matplotlib as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .files import atomic_write


def new_figure(figsize: tuple[float, float]) -> Any:
    """A figure of the Agg backend, without pyplot and its state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> Path:
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
    return path
