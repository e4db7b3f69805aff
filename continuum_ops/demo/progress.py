"""Progress bars of the demonstration."""

from __future__ import annotations

import sys
from typing import Any


def progress_bar(total: int | None, desc: str, unit: str, bar_format: str | None = None) -> Any:
    """A tqdm bar on stderr; in a log file it prints seldom."""
    from tqdm import tqdm

    interval = 0.2 if sys.stderr.isatty() else 15.0
    return tqdm(total=total, desc=desc, unit=unit, mininterval=interval, bar_format=bar_format)
