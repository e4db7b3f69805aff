"""The papers' experiments: their settings, and small ones that two cores train in minutes.

Each is what a TOML file would hold. A new one is an entry of the dictionary of its paper, the paper's
settings first and what --small changes after them. Comments say what the papers leave open; that is our
choice.
"""

from __future__ import annotations

from . import ca, gt, pit
from .baselines import BASELINES
from .ca import Content

EXPERIMENTS: dict[str, tuple[Content, Content]] = {
    **ca.TRAJECTORIES,
    **gt.EXPERIMENTS,
    **pit.EXPERIMENTS,
    **ca.FIELDS,
}

__all__ = ["BASELINES", "EXPERIMENTS", "Content"]
