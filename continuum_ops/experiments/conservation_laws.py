"""Sources of conservation laws on an interval: averages over cells."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from ..data import FunctionPairs, inviscid_burgers, shock_tube
from ..mesh import Grid
from .sources import SOURCES, Case, Samples, Source, Split, Tensors


@dataclass(frozen=True)
class _Cells(Source):
    """Averages over `cells` cells of an interval; tested also with other numbers of them, `resolutions`."""

    train: int = 1024
    test: int = 128
    cells: int = 1024
    resolutions: tuple[int, ...] = ()

    def check(self) -> None:
        finest = max(self.cells, *self.resolutions, 0)
        for n in (self.cells, *self.resolutions):
            if n < 2 or finest % n:
                raise ValueError(f"cells must divide those of the finest mesh, {finest}, was {n}")

    def cases(self) -> list[Case]:
        return [Case(f"{n} cells", "uniform", n) for n in dict.fromkeys((self.cells, *self.resolutions))]

    def draw(self, n: int, seed: int, split: Split) -> Tensors:
        data = self._pairs(n, max(self.cells, *self.resolutions, 0) if split == "test" else self.cells, seed)
        return {"input": data.input, "target": data.target}

    def read(self, tensors: Tensors, split: Split, case: Case | None = None) -> Samples:
        n = self.cells if case is None else case.size
        # Averages over coarser cells are the averages of these.
        u, z = (tensors[name].unflatten(1, (n, -1)).mean(2) for name in ("input", "target"))
        mesh = self._mesh(n)
        return Samples(u, z, mesh, mesh)

    @abstractmethod
    def _pairs(self, n: int, cells: int, seed: int) -> FunctionPairs:
        """n samples on so many cells."""

    @abstractmethod
    def _mesh(self, cells: int) -> Grid:
        """Their centres."""


@dataclass(frozen=True)
class InviscidBurgers(_Cells):
    """Entropy solutions of Burgers' equation without viscosity, u(x, 0) -> u(x, 0.1) (PiT A.1).

    length_scale: of the initial functions, as in ``continuum_ops.data.inviscid_burgers``.
    """

    source = "inviscid_burgers"

    length_scale: float = 0.06

    def _pairs(self, n: int, cells: int, seed: int) -> FunctionPairs:
        return inviscid_burgers(n, cells, seed=seed, length_scale=self.length_scale)

    def _mesh(self, cells: int) -> Grid:
        centres = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
        return Grid(centres, kind="periodic", period=1.0).to(dtype=torch.float32)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("input", "target"), (self.cells, 1))


@dataclass(frozen=True)
class ShockTube(_Cells):
    """Shock tubes, density, momentum and energy at time 0 -> energy at time 1.5 (PiT A.2)."""

    source = "shock_tube"

    cells: int = 2048

    def _pairs(self, n: int, cells: int, seed: int) -> FunctionPairs:
        return shock_tube(n, cells, seed=seed)

    def _mesh(self, cells: int) -> Grid:
        return Grid.uniform(cells, (-5.0, 5.0), "cell", dtype=torch.float32)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"input": (self.cells, 3), "target": (self.cells, 1)}


SOURCES.update({s.source: s for s in (InviscidBurgers, ShockTube)})
