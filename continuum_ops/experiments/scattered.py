"""Sources on scattered points that differ from sample to sample: stand-ins for PiT A.5 and A.6."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import ScatteredPairs, elastic_cell, joukowski_airfoil
from ..data.elastic_cell import hole_radii
from ..mesh import PointCloud
from .sources import SOURCES, Case, Samples, Source, Split, Tensors


@dataclass(frozen=True)
class _Scattered(Source):
    """Samples on meshes of `points` points; tested also on meshes of other sizes, `resolutions`."""

    train: int = 1000
    test: int = 200
    points: int = 1024
    resolutions: tuple[int, ...] = ()

    def check(self) -> None:
        for n in (self.points, *self.resolutions):
            if n < self._least():
                raise ValueError(f"points must be at least {self._least()}, was {n}")

    def cases(self) -> list[Case]:
        sizes = dict.fromkeys((self.points, *self.resolutions))
        return [Case(f"{n} points", "scattered", n) for n in sizes]

    def draw(self, n: int, seed: int, split: Split) -> Tensors:
        drawn: Tensors = {}
        for case in self.cases() if split == "test" else self.cases()[:1]:
            pairs = self._pairs(n, case.size, seed)
            parts = pairs.mesh.points, pairs.mesh.weights, self._target(pairs.target)
            names = (f"{name}, {case.size}" for name in ("points", "weights", "target"))
            drawn |= dict(zip(names, parts, strict=True))
        return drawn | self._shape(n, seed)

    def read(self, tensors: Tensors, split: Split, case: Case | None = None) -> Samples:
        n = self.points if case is None else case.size
        points, weights, target = (tensors[f"{name}, {n}"] for name in ("points", "weights", "target"))
        mesh = PointCloud(points, weights)
        return Samples(self._input(points, tensors), target, mesh, mesh)

    def blank(self) -> Tensors:
        """Points at random, for what is computed of their distances."""
        drawn = super().blank()
        generator = torch.Generator().manual_seed(0)
        drawn[f"points, {self.points}"] = torch.rand(2, self.points, 2, generator=generator)
        drawn[f"weights, {self.points}"].fill_(1 / self.points)
        return drawn

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n = self.points
        return {f"points, {n}": (n, 2), f"weights, {n}": (n,), f"target, {n}": (n, 1)}

    @abstractmethod
    def _least(self) -> int:
        """Points that a mesh needs."""

    @abstractmethod
    def _pairs(self, n: int, points: int, seed: int) -> ScatteredPairs:
        """n samples on so many points."""

    @abstractmethod
    def _target(self, values: Tensor) -> Tensor:
        """The channel to learn."""

    @abstractmethod
    def _input(self, points: Tensor, tensors: Tensors) -> Tensor:
        """The input function at the points."""

    def _shape(self, n: int, seed: int) -> Tensors:
        """What else is known of the domain."""
        return {}


@dataclass(frozen=True)
class JoukowskiAirfoil(_Scattered):
    """A stand-in for PiT's NACA flows: points around a Joukowski airfoil -> pressure coefficient there.

    Potential flow in place of transonic flow, see ``continuum_ops.data.joukowski_airfoil``: errors are not
    comparable with published ones.
    """

    source = "joukowski_airfoil"

    def _least(self) -> int:
        return 64

    def _pairs(self, n: int, points: int, seed: int) -> ScatteredPairs:
        return joukowski_airfoil(n, points, seed=seed)

    def _target(self, values: Tensor) -> Tensor:
        return values[..., 2:].clone()

    def _input(self, points: Tensor, tensors: Tensors) -> Tensor:
        return points


@dataclass(frozen=True)
class ElasticCell(_Scattered):
    """A stand-in for PiT's elasticity: 42 radii of the hole of an elastic cell -> von Mises stress.

    Another material, other holes and other meshes, see ``continuum_ops.data.elastic_cell``: errors are not
    comparable with published ones. The radii r become 5 r - 1, in [0, 1] (PiT F.5).
    """

    source = "elastic_cell"

    points: int = 972

    def _least(self) -> int:
        return 150

    def _pairs(self, n: int, points: int, seed: int) -> ScatteredPairs:
        return elastic_cell(n, points, seed=seed)

    def _target(self, values: Tensor) -> Tensor:
        return values[..., 2:].clone()

    def _shape(self, n: int, seed: int) -> Tensors:
        return {"radii": hole_radii(n, seed=seed)}

    def _input(self, points: Tensor, tensors: Tensors) -> Tensor:
        return (5 * tensors["radii"] - 1)[:, None].expand(-1, points.shape[1], -1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(), "radii": (42,)}


SOURCES.update({s.source: s for s in (JoukowskiAirfoil, ElasticCell)})
