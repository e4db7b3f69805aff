"""Progress bars."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def require(who: str, *names: str, extra: str = "train") -> None:
    """Raise an ImportError that names the extra, for the first of the packages that is missing."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f'{who} needs {name}: pip install "continuum_ops[{extra}]"') from error


def progress_bar(
    total: int | None, desc: str, unit: str, bar_format: str | None = None, initial: int = 0
) -> Any:
    """A tqdm bar on stderr; in a log file it prints seldom."""
    from tqdm import tqdm

    interval = 0.2 if sys.stderr.isatty() else 15.0
    return tqdm(
        total=total, desc=desc, unit=unit, mininterval=interval, bar_format=bar_format, initial=initial
    )
