"""What is measured: a case of an operator, the rows it gives, and the floors beside its times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .timing import Candidate

FORWARD, BACKWARD = "forward", "forward + backward"
OURS = "continuum_ops"


@dataclass(frozen=True)
class Precision:
    """A dtype, the setting of float32 products, and the largest error that counts as right."""

    dtype: torch.dtype
    matmul: str
    bound: float


PRECISIONS = {
    "float32": Precision(torch.float32, "highest", 1e-5),
    "tf32": Precision(torch.float32, "high", 5e-3),
    "bfloat16": Precision(torch.bfloat16, "highest", 3e-2),
}


@dataclass(frozen=True)
class Case:
    """N = M = n points; ``dim`` channels of query and key, of value (position), of all (patch)."""

    op: str
    precision: str
    passes: str
    dim: int
    n: int

    @property
    def key(self) -> str:
        return f"{self.op}, {self.precision}, {self.passes}, d = {self.dim}, N = {self.n}"


class Operator(Protocol):
    """A module that knows the cases of one operator and the candidates of a case."""

    NAME: str
    HEADS: int

    @staticmethod
    def cases() -> list[Case]:
        """In the order in which they are measured: what matters most first."""

    @staticmethod
    def names(case: Case) -> list[str]:
        """The candidates of a case, ours first."""

    @staticmethod
    def inputs(case: Case, device: torch.device) -> Any:
        """Tensors of the case and the float64 values of its parity rows."""

    @staticmethod
    def candidate(name: str, case: Case, inputs: Any) -> Candidate: ...

    @staticmethod
    def flops(case: Case) -> float:
        """Of the matrix products, per score."""

    @staticmethod
    def small(device: torch.device) -> None:
        """One small call per kernel, forward and backward, for compute-sanitizer."""


def exponentials(case: Case) -> int:
    """Per score: the backward cannot do without computing each again once."""
    return 1 if case.passes == FORWARD else 2


def floors(case: Case, operator: Operator, rates: Mapping[str, float]) -> dict[str, float]:
    """Times that no kernel of this definition undercuts at the rates measured on this card, in ms.

    A float32-accurate product takes the fastest of plain float32, three TF32 products and three of float16
    (at the rate of bfloat16). An operator that is no sum over N x N scores has ``floors`` of its own.
    """
    own = getattr(operator, "floors", None)
    if own is not None:
        return dict(own(case, rates))
    scores = float(operator.HEADS) * case.n * case.n
    found = {}
    if "ex2_per_s" in rates:
        found["exp_floor_ms"] = scores * exponentials(case) / rates["ex2_per_s"] * 1e3
    if {"float32_flops", "tf32_flops", "bfloat16_flops"} <= rates.keys():
        exact32 = max(rates["float32_flops"], rates["tf32_flops"] / 3, rates["bfloat16_flops"] / 3)
        flops = {"float32": exact32, "tf32": rates["tf32_flops"], "bfloat16": rates["bfloat16_flops"]}
        found["matrix_floor_ms"] = scores * operator.flops(case) / flops[case.precision] * 1e3
    return found


def finish_rows(
    case: Case, rows: Sequence[dict[str, Any]], operator: Operator, rates: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Each row with its case, its floors, and its time over ours."""
    label = {"op": case.op, "precision": case.precision, "passes": case.passes, "d": case.dim, "N": case.n}
    limits = floors(case, operator, rates)
    ours = next((r["ms"] for r in rows if r["candidate"] == OURS and "ms" in r), None)
    finished = []
    for row in rows:
        extra: dict[str, Any] = {}
        if "ms" in row:
            extra = {**limits}
            if ours is not None:
                extra["over_ours"] = row["ms"] / ours
        finished.append({**label, **row, **extra})
    return finished
