"""bench/results/trust.json: figures of the checks of trust, one object for each. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu.record import write_json

RESULTS = Path(__file__).resolve().parent / "results" / "trust.json"


def record(item: str, figures: dict[str, Any], path: Path = RESULTS) -> None:
    """Merge `figures` into the object `item` of the file at `path`; the other items and keys stay.

    The file is replaced in one step. Two processes must not record at the same time.

    Raises:
        ValueError: a figure is NaN or infinite, or the file is not a JSON object of objects.
    """
    document = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(document, dict) or not all(isinstance(entry, dict) for entry in document.values()):
        raise ValueError(f"{path} must hold a JSON object of objects")
    json.dumps(figures, allow_nan=False)
    document[item] = {**document.get(item, {}), **figures}
    write_json(path, dict(sorted(document.items())))
