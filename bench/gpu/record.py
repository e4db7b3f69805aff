"""The result file, rewritten after every measurement, and the time that is left. Standard library only."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write all of it or nothing: to a temporary file beside ``path``, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as f:
            json.dump(document, f, indent=1)
            f.write("\n")
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class Record:
    """A document of "machine", "steps", "rates", "cases", "rows" that is on disk after every change.

    Two processes use it in turn, never at once: the one that runs the steps, and the benchmark it waits for.
    """

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path = path
        self.document = document

    @classmethod
    def load(cls, path: Path) -> Record:
        return cls(path, json.loads(path.read_text()))

    def save(self) -> None:
        write_json(self.path, self.document)

    def put(self, section: str, name: str, fields: Any) -> None:
        self.document.setdefault(section, {})[name] = fields
        self.save()

    def add_rows(self, rows: list[dict[str, Any]]) -> None:
        self.document.setdefault("rows", []).extend(rows)
        self.save()


class Budget:
    """Seconds until a deadline on the wall clock, which parent and child processes share."""

    def __init__(self, deadline: float, now: Callable[[], float] = time.time) -> None:
        self.deadline = deadline
        self.now = now

    def left(self) -> float:
        return self.deadline - self.now()

    def limit(self, seconds: float, *, reserve: float = 0.0) -> float:
        """At most ``seconds``, and no more than leaves ``reserve`` for what comes later; never negative."""
        return max(0.0, min(seconds, self.left() - reserve))


class Estimates:
    """What a call will take, from calls already timed: seconds grow as N squared and at most as d."""

    BACKWARD = 4.0  # forward + backward over forward, where only the forward was timed

    def __init__(self) -> None:
        self.seen: dict[tuple[str, ...], dict[tuple[str, int, int], float]] = {}

    def observe(self, candidate: str, precision: str, passes: str, dim: int, n: int, seconds: float) -> None:
        self.seen.setdefault((candidate, precision), {})[passes, dim, n] = seconds

    def seconds(self, candidate: str, precision: str, passes: str, dim: int, n: int) -> float | None:
        """None where nothing is known of the candidate in this precision.

        The timed case that is nearest in N is scaled, of those the nearest in d: small cases are bound by
        launches and tell little of large ones.
        """
        known = self.seen.get((candidate, precision), {})
        same = {key: s for key, s in known.items() if key[0] == passes}
        factor = 1.0
        if not same and passes != "forward":
            same, factor = known, self.BACKWARD
        if not same:
            return None

        def distance(key: tuple[str, int, int]) -> tuple[float, float]:
            return max(n, key[2]) / min(n, key[2]), max(dim, key[1]) / min(dim, key[1])

        nearest = min(same, key=distance)
        return same[nearest] * factor * (n / nearest[2]) ** 2 * max(1.0, dim / nearest[1])
