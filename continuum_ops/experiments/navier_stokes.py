"""Sources of flows on a periodic square, as their vorticity."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import kolmogorov, vorticity
from ..mesh import Grid
from .sources import SOURCES, Case, Frames, Samples, Source, Split, Tensors


@dataclass(frozen=True)
class _PeriodicSquare(Source):
    """Flows on `resolution` points an axis; tested also on `resolutions`, all nested in the finest grid.

    solver: points an axis of the grid on which training samples are computed, 0: those of the grid. Tests are
        computed on it or on the finest grid of the cases, whichever is finer.
    """

    resolution: int = 64
    resolutions: tuple[int, ...] = ()
    solver: int = 0

    def check(self) -> None:
        for split in ("train", "test"):
            solver = self._solver(split)
            for n in (self.resolution, *self.resolutions) if split == "test" else (self.resolution,):
                if n < 4 or n % 2 or solver % n:
                    raise ValueError(
                        f"resolution must be even, at least 4 and a divisor of {solver}, the points of the "
                        f"computation, was {n}"
                    )

    def cases(self) -> list[Case]:
        sizes = dict.fromkeys((self.resolution, *self.resolutions))
        return [Case(f"{n} x {n}", "uniform", n) for n in sizes]

    def _nodes(self, split: str) -> int:
        return max(self.resolution, *self.resolutions, 0) if split == "test" else self.resolution

    def _solver(self, split: str) -> int:
        return max(self.solver, self._nodes(split))

    def _coarse(self, fields: Tensor, split: Split, size: int) -> Tensor:
        """(..., nodes^2, 1) of the drawn grid: (..., size^2, 1)."""
        nodes = self._nodes(split)
        every = nodes // size
        return fields.unflatten(-2, (nodes, nodes))[..., ::every, ::every, :].flatten(-3, -2)


@dataclass(frozen=True)
class Kolmogorov(_PeriodicSquare):
    """Kolmogorov flow, vorticity at time T -> at T + lag on [0, 2 pi]^2 (CA 6.2.3: 11 and 0.1)."""

    source = "kolmogorov"
    chunk = 8

    train: int = 9000
    validation: int = 500
    test: int = 500
    resolution: int = 416
    T: float = 11.0
    lag: float = 0.1

    def check(self) -> None:
        super().check()
        for name in ("T", "lag"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, was {getattr(self, name)}")

    def draw(self, n: int, seed: int, split: Split) -> Tensors:
        data = kolmogorov(
            n,
            self._nodes(split),
            seed=seed,
            solver_resolution=self._solver(split),
            T=self.T,
            lag=self.lag,
        )
        return {"input": data.input, "target": data.target}

    def read(self, tensors: Tensors, split: Split, case: Case | None = None) -> Samples:
        n = self.resolution if case is None else case.size
        u, z = (self._coarse(tensors[name], split, n) for name in ("input", "target"))
        mesh = _periodic(n, 2 * math.pi)
        return Samples(u, z, mesh, mesh)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("input", "target"), (self.resolution**2, 1))


@dataclass(frozen=True)
class Vorticity(_PeriodicSquare):
    """Forced flow on the unit square, snapshots of the vorticity at t = 1, 2, .. -> the next one (PiT A.4).

    train, validation and test count flows. Each gives snapshots - history samples: `history` snapshots in a
    row are the input, the one after them the target.
    """

    source = "vorticity"
    chunk = 8

    test: int = 200
    solver: int = 256
    snapshots: int = 30
    history: int = 10

    def check(self) -> None:
        super().check()
        if self.history < 1:
            raise ValueError(f"history must be at least 1, was {self.history}")
        if self.snapshots <= self.history:
            raise ValueError(f"snapshots must be above history = {self.history}, was {self.snapshots}")

    def draw(self, n: int, seed: int, split: Split) -> Tensors:
        data = vorticity(
            n,
            self._nodes(split),
            seed=seed,
            solver_resolution=self._solver(split),
            times=range(1, self.snapshots + 1),
        )
        return {"vorticity": data.vorticity}

    def read(self, tensors: Tensors, split: Split, case: Case | None = None) -> Samples:
        n = self.resolution if case is None else case.size
        w = self._coarse(tensors["vorticity"], split, n).squeeze(-1)
        windows = w.unfold(1, self.history + 1, 1).flatten(0, 1)
        mesh = _periodic(n, 1.0)
        return Samples(windows[..., :-1], windows[..., -1:], mesh, mesh)

    def frames(self, tensors: Tensors) -> Frames:
        """The snapshots on the grid of the training, from the first `history` of them on."""
        w = self._coarse(tensors["vorticity"], "test", self.resolution)
        times = tuple(map(float, range(1, self.snapshots + 1)))
        return Frames(w, times, _periodic(self.resolution, 1.0), known=self.history)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"vorticity": (self.snapshots, self.resolution**2, 1)}


def _periodic(n: int, length: float) -> Grid:
    return Grid.uniform((n, n), [(0.0, length)] * 2, "periodic", dtype=torch.float32)


SOURCES.update({s.source: s for s in (Kolmogorov, Vorticity)})
