"""What a table of a paper is: rows times columns, each saying a part of what its cells hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from ..config import Config, merge
from ..presets import load

Content = dict[str, Any]
# Of errors over the test samples, of the roll-out over samples and time. parameters and flops need no run;
# speed is in steps a second, epoch in seconds; best is the epoch of the least validation error.
Measure = Literal[
    "mean", "median", "worst", "rollout", "parameters", "flops", "radius", "speed", "epoch", "best"
]
ERRORS = ("mean", "median", "worst")
WITHOUT_RUN = ("parameters", "flops")


@dataclass(frozen=True)
class Part:
    """What a row or a column says of its cells, the column's word before the row's; or all of a single cell.

    experiment: its name; "{}" in it stands for `problem`, so that rows can be models and columns problems.
    changes, small: values that take the place of the experiment's, and with --small of its small form; small
        None: the changes, too.
    test, small_test: likewise values of [data] in the test alone.
    mesh: of an error: "" the mesh of the training, "finest", "x0.5" for the uniform one with so many times
        the points on an axis, or a kind ("uneven", "random", "scattered").
    layer, head: of "radius": the layer's name in the model, the head counted from 1.
    why: why there can be no number, a row's before a column's; the cell then stays empty.
    """

    experiment: str = ""
    problem: str = ""
    changes: Content = field(default_factory=dict)
    small: Content | None = None
    test: Content = field(default_factory=dict)
    small_test: Content | None = None
    measure: Measure | Literal[""] = ""
    mesh: str = ""
    layer: str = ""
    head: int = 0
    why: str = ""

    def over(self, other: Part) -> Part:
        """This part's word where it has one, else the other's; tables of values merge."""
        found: dict[str, Any] = {}
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            found[f.name] = mine or theirs
        found["why"] = other.why or self.why
        found["changes"] = merge(other.changes, self.changes)
        found["test"] = {**other.test, **self.test}
        if self.small is not None or other.small is not None:
            found["small"] = merge(other.changed(True), self.changed(True))
        if self.small_test is not None or other.small_test is not None:
            found["small_test"] = {**other.tested(True), **self.tested(True)}
        return Part(**found)

    def changed(self, small: bool) -> Content:
        """The changes at this size."""
        return self.changes if not small or self.small is None else self.small

    def tested(self, small: bool) -> Content:
        """The changes of the test at this size."""
        return self.test if not small or self.small_test is None else self.small_test

    @property
    def name(self) -> str:
        """Of the experiment."""
        return self.experiment.replace("{}", self.problem)


class Plot(NamedTuple):
    """How a figure is drawn of its cells.

    curves: a line for each row against the numbers `x` of the columns. scatter: the columns after the first
    against the first, a line for the rows that are named alike up to the last comma. samples: the test
    samples of the cells with a published value, or of all where none has one.
    """

    kind: Literal["curves", "scatter", "samples"]
    x: tuple[float, ...] = ()
    label: str = ""


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper.

    paper: the published values, a list for each row, None where there is none; shorter lists are filled up.
    cells: what single cells have in place of their row's and column's parts.
    note: what differs from the paper beyond the settings of the runs.
    """

    title: str
    rows: Mapping[str, Part]
    columns: Mapping[str, Part]
    paper: Sequence[Sequence[float | None]] = ()
    cells: Mapping[tuple[str, str], Part] = field(default_factory=dict)
    plot: Plot | None = None
    note: str = ""

    def cell(self, row: str, column: str) -> Part:
        """All that is said of a cell."""
        own = self.cells.get((row, column))
        return self.columns[column].over(self.rows[row]) if own is None else own

    def drawn(self, row: str, column: str) -> bool:
        """Whether the figure shows a test sample of this cell."""
        if self.plot is None or self.plot.kind != "samples":
            return False
        return not any(map(any, self.paper)) or self.published(row, column) is not None

    def published(self, row: str, column: str) -> float | None:
        """The paper's value of a cell."""
        i, j = list(self.rows).index(row), list(self.columns).index(column)
        values = self.paper[i] if i < len(self.paper) else ()
        return values[j] if j < len(values) else None

    def places(self, cells: set[tuple[str, str]]) -> str:
        """Whole rows and columns by their name, then single cells."""
        left, words = set(cells), []
        for label, group in [
            *((row, {(row, column) for column in self.columns}) for row in self.rows),
            *((column, {(row, column) for row in self.rows}) for column in self.columns),
        ]:
            if group <= cells:
                words.append(label)
                left -= group
        single = [f"{row}, {c}" for row in self.rows for c in self.columns if (row, c) in left]
        return "; ".join([*words, *single])


def config_of(part: Part, small: bool) -> Config:
    """The configuration that a cell's run has.

    Raises:
        ConfigError: a part that names no experiment, or settings that this one does not know.
    """
    return load(part.name, small=small, sections=part.changed(small))
