"""Where the samples of an experiment come from, and the meshes on which they are read.

A new data set is a subclass of :class:`Source` with an entry in ``SOURCES``: its fields are the keys of the
section [data], with their defaults. More are in conservation_laws.py, navier_stokes.py and scattered.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..data import burgers, controlled_ode, darcy, lorenz63, uneven_times, uniform_times
from ..data.burgers import BurgersData
from ..mesh import Grid, Mesh, PointCloud

Split = Literal["train", "validation", "test"]
Tensors = dict[str, Tensor]


class Case(NamedTuple):
    """A mesh of the evaluation: its kind (uniform, uneven, random, scattered) and its points an axis."""

    name: str
    kind: str
    size: int


class Samples(NamedTuple):
    """Pairs of functions and their meshes.

    input (n, N, c) at the points of mesh, target (n, M, c') at those of target_mesh, each one mesh for all
    samples or one for each; initial (n, c''), known at the first point, or None; coefficient (n, M, 1), of
    the flux in H1 losses, or None.
    """

    input: Tensor
    target: Tensor
    mesh: Mesh
    target_mesh: Mesh
    initial: Tensor | None = None
    coefficient: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> Samples:
        """What a function makes of each tensor, that of a mesh too where every sample has its own."""
        mesh = _each(self.mesh, function)
        return self._replace(
            input=function(self.input),
            target=function(self.target),
            mesh=mesh,
            target_mesh=mesh if self.target_mesh is self.mesh else _each(self.target_mesh, function),
            initial=None if self.initial is None else function(self.initial),
            coefficient=None if self.coefficient is None else function(self.coefficient),
        )


class Frames(NamedTuple):
    """Flows of the test for a roll-out: values (n, F, N, c) at the times (F,), evenly apart, on a mesh.

    The operator maps the first `known` frames, their channels side by side, the oldest first, to the next.
    """

    values: Tensor
    times: tuple[float, ...]
    mesh: Mesh
    known: int = 1


@dataclass(frozen=True)
class Source(ABC):
    """A data set: how many samples, and what decides them.

    train, validation, test: numbers of samples. seed: of all three; they never share a sample.
    """

    source: ClassVar[str]
    # Samples drawn together and kept in one file. Their seed is that of their place, so that an interrupted
    # generation goes on where it stopped, and processes can share the work.
    chunk: ClassVar[int] = 64

    train: int = 1000
    validation: int = 100
    test: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("train", "validation", "test"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, was {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, was {self.seed}")
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Raise a ValueError that starts with the name of a field that does not fit."""

    @abstractmethod
    def cases(self) -> list[Case]:
        """The meshes of the evaluation; the first one is that of training and validation."""

    @abstractmethod
    def draw(self, n: int, seed: int, split: Split) -> Tensors:
        """n samples with their first axis; those of "test" hold what all cases read."""

    @abstractmethod
    def read(self, tensors: Tensors, split: Split, case: Case | None = None) -> Samples:
        """Samples on the mesh of a case (None: the first), or on that of the training."""

    def frames(self, tensors: Tensors) -> Frames | None:
        """Of the test samples, where the operator is a step in time that can be repeated; None: it is not."""
        return None

    def statistics(self, tensors: Tensors) -> Samples:
        """The training samples on the mesh of the normalisers, for pointwise ones a Grid."""
        return self.read(tensors, "train")

    def blank(self) -> Tensors:
        """Two training samples of ones, of which there are logarithms, without the work."""
        return {name: torch.ones(2, *shape) for name, shape in self.shapes().items()}

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors of a training sample."""

    @property
    def noise(self) -> float:
        """Of the input, relative to its deviation at each point."""
        return 0.0


@dataclass(frozen=True)
class _Trajectories(Source):
    """Functions of time on [0, 2] (CA 6.1): trained with dt = 2 / intervals.

    Tested with it, with half and twice as many intervals, on the uneven mesh (CA 41) and at random times.
    """

    train: int = 8000
    validation: int = 100
    test: int = 1000
    intervals: int = 200

    def check(self) -> None:
        if self.intervals < 2 or self.intervals % 2:
            raise ValueError(f"intervals must be even and at least 2, was {self.intervals}")

    def cases(self) -> list[Case]:
        n = self.intervals
        uniform = [Case(f"dt = {2 / k:g}", "uniform", k + 1) for k in (n, n // 2, 2 * n)]
        return [*uniform, Case("uneven", "uneven", 3 * n // 2 + 1), Case("random", "random", n + 1)]

    def times(self, case: Case) -> Tensor:
        """(N,) float64."""
        if case.kind == "uneven":
            return uneven_times(self.intervals)
        if case.kind == "random":
            generator = torch.Generator().manual_seed(0)
            inner = torch.rand(self.intervals - 1, generator=generator, dtype=torch.float64) * 2
            return torch.cat([torch.zeros(1), inner, torch.full((1,), 2.0)]).unique()
        return uniform_times(case.size - 1)

    def _all_times(self) -> Tensor:
        return torch.cat([self.times(case) for case in self.cases()]).unique()

    def read(self, tensors: Tensors, split: Split, case: Case | None = None) -> Samples:
        times = self.times(case or self.cases()[0])
        u, z = tensors["input"], tensors["target"]
        if split == "test":
            at = torch.searchsorted(self._all_times(), times)
            u, z = u[:, at], z[:, at]
        # The trapezoid rule in float64, then rounded.
        mesh = Grid(times).to(dtype=torch.float32)
        return Samples(u, z, mesh, mesh, tensors.get("initial"))

    def _drawn_at(self, split: Split) -> Tensor:
        return self._all_times() if split == "test" else self.times(self.cases()[0])


@dataclass(frozen=True)
class Lorenz63(_Trajectories):
    """Lorenz-63: x(t) -> y(t), or with task "x,y0,z0->y,z" also from y(0), z(0) to z(t) (CA 40)."""

    source = "lorenz63"
    chunk = 256  # integrated together

    task: Literal["x->y", "x,y0,z0->y,z"] = "x->y"

    def draw(self, n: int, seed: int, split: Split) -> Tensors:
        data = lorenz63(n, self._drawn_at(split), seed=seed, task=self.task)
        found = {"input": data.input, "target": data.target}
        return found if data.initial is None else {**found, "initial": data.initial}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n = self.intervals + 1
        if self.task == "x->y":
            return {"input": (n, 1), "target": (n, 1)}
        return {"input": (n, 1), "target": (n, 2), "initial": (2,)}


@dataclass(frozen=True)
class ControlledODE(_Trajectories):
    """dz = sin(z) du, u(t) -> z(t) (CA 6.1)."""

    source = "controlled_ode"
    chunk = 2000

    def draw(self, n: int, seed: int, split: Split) -> Tensors:
        data = controlled_ode(n, self._drawn_at(split), seed=seed)
        return {"input": data.input, "target": data.target}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("input", "target"), (self.intervals + 1, 1))


@dataclass(frozen=True)
class Burgers(Source):
    """Viscous Burgers, u(x, 0) -> u(x, 1) (GT 5.1): trained on `points`, tested also on `resolutions`.

    solver: points of the spectral computation, a multiple of all.
    rollout: further steps of time, u(x, 1) -> u(x, 2) -> .., that the test follows.
    """

    source = "burgers"

    train: int = 1024
    validation: int = 100
    test: int = 100
    points: int = 512
    resolutions: tuple[int, ...] = (2048, 8192)
    solver: int = 8192
    rollout: int = 0

    def check(self) -> None:
        if self.rollout < 0:
            raise ValueError(f"rollout must be at least 0, was {self.rollout}")
        for n in (self.points, *self.resolutions):
            if n < 1 or self.solver % n:
                raise ValueError(f"solver must be a multiple of {n} points, was {self.solver}")

    def cases(self) -> list[Case]:
        return [Case(f"{n} points", "uniform", n) for n in dict.fromkeys((self.points, *self.resolutions))]

    def _drawn_at(self, split: Split) -> int:
        return self.solver if split == "test" else self.points

    def draw(self, n: int, seed: int, split: Split) -> Tensors:
        def at(points: int, T: float) -> BurgersData:
            return burgers(n, points, seed=seed, T=T, resolution=self.solver)

        data = at(self._drawn_at(split), 1.0)
        found = {"input": data.input, "target": data.target}
        if split == "test" and self.rollout:
            # The solution is exact in time, so later frames are those of longer times.
            later = [at(self.points, float(t)).target for t in range(2, 2 + self.rollout)]
            found["later"] = torch.stack(later, 1)
        return found

    def frames(self, tensors: Tensors) -> Frames | None:
        if not self.rollout:
            return None
        first = self.read(tensors, "test", self.cases()[0])
        values = torch.cat([torch.stack([first.input, first.target], 1), tensors["later"]], 1)
        return Frames(values, tuple(map(float, range(values.shape[1]))), first.mesh)

    def read(self, tensors: Tensors, split: Split, case: Case | None = None) -> Samples:
        n = self.points if case is None else case.size
        every = self._drawn_at(split) // n
        mesh = Grid.uniform(n, kind="periodic", dtype=torch.float32)
        return Samples(tensors["input"][:, ::every], tensors["target"][:, ::every], mesh, mesh)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("input", "target"), (self.points, 1))


@dataclass(frozen=True)
class Darcy(Source):
    """Darcy flow with a random coefficient (PiT A.3, GT C.3, CA 6.2.2): a -> u, or u with noise -> a.

    resolution, resolutions: points an axis of training and of the other tests; all nested in the finest one.
    grid: "endpoint", nodes with both ends; "cell", cell centres, which are every other node of a grid of
        2 n + 1, so that the equation is solved on that.
    solver: points an axis on which training samples are solved, 0: those of the grid. Tests are solved on the
        finest grid of the cases.
    meshes: further meshes of the tests, of nodes of the finest grid: "uneven", twice as dense in one half of
        each axis as in the other, and "scattered", as many random nodes as the training has points.
    inverse: u -> a on a grid coarser by `coarsening` (GT 5.3), with normal noise of the input, `input_noise`
        times its deviation at each point (GT 23), drawn anew at every step; one fixed draw for the tests.
    coefficient, sigma, tau, constant_mode: its law, as in ``continuum_ops.data.darcy``.
    """

    source = "darcy"
    chunk = 32

    train: int = 1024
    resolution: int = 211
    resolutions: tuple[int, ...] = ()
    grid: Literal["endpoint", "cell"] = "endpoint"
    solver: int = 0
    meshes: tuple[Literal["uneven", "scattered"], ...] = ()
    inverse: bool = False
    coarsening: int = 1
    input_noise: float = 0.0
    coefficient: Literal["piecewise", "lognormal"] = "piecewise"
    sigma: float = 1.0
    tau: float = 3.0
    constant_mode: bool = False

    def check(self) -> None:
        finest = self._nodes("test")
        for n in (self.resolution, *self.resolutions):
            if n < 3 or (finest - 1) % (self._count(n) - 1):
                raise ValueError(
                    f"resolution must be nested in the finest grid, {finest} nodes an axis, was {n}"
                )
        if self.solver and (self.solver - 1) % (self._count(self.resolution) - 1):
            raise ValueError(
                f"solver - 1 must be a multiple of {self._count(self.resolution) - 1}, the gaps of the "
                f"training grid, was {self.solver} - 1"
            )
        if self.meshes and (self.grid == "cell" or self.inverse):
            raise ValueError(f'meshes must be empty with grid "cell" and with inverse, was {self.meshes}')
        if "uneven" in self.meshes and (finest - 1) // (self.resolution - 1) % 2:
            raise ValueError(
                f'meshes must be without "uneven" where the finest grid, {finest} nodes an axis, does not '
                f"hold the middles of the gaps of resolution = {self.resolution}, was {self.meshes}"
            )
        if self.inverse and self.grid == "cell":
            raise ValueError('inverse must be false with grid "cell", was true')
        if not self.inverse and (self.coarsening != 1 or self.input_noise):
            raise ValueError("inverse must be true with coarsening and input_noise, was false")
        for n in (self.resolution, *self.resolutions):
            if self.coarsening < 1 or (n - 1) % self.coarsening:
                raise ValueError(f"coarsening must divide {n} - 1, was {self.coarsening}")
        if not self.input_noise >= 0:
            raise ValueError(f"input_noise must be at least 0, was {self.input_noise}")
        for name in ("sigma", "tau"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, was {getattr(self, name)}")

    def _count(self, resolution: int) -> int:
        """Nodes an axis that a grid of the equation needs."""
        return 2 * resolution + 1 if self.grid == "cell" else resolution

    def _nodes(self, split: Split) -> int:
        sizes = (self.resolution, *self.resolutions) if split == "test" else (self.resolution,)
        return self._count(max(sizes))

    @property
    def noise(self) -> float:
        return self.input_noise

    def cases(self) -> list[Case]:
        sizes = dict.fromkeys((self.resolution, *self.resolutions))
        uniform = [Case(f"{n} x {n}", "uniform", n) for n in sizes]
        return [*uniform, *(Case(kind, kind, self.resolution) for kind in self.meshes)]

    def draw(self, n: int, seed: int, split: Split) -> Tensors:
        nodes = self._nodes(split)
        solver = self.solver if self.solver and split != "test" else nodes
        data = darcy(
            n,
            nodes,
            seed=seed,
            solver_resolution=solver,
            constant_mode=self.constant_mode,
            coefficient=self.coefficient,
            sigma=self.sigma,
            tau=self.tau,
        )
        return {"coefficient": data.coefficient, "solution": data.solution}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: (self._nodes("train") ** 2, 1) for name in ("coefficient", "solution")}

    def read(self, tensors: Tensors, split: Split, case: Case | None = None) -> Samples:
        case = case or self.cases()[0]
        nodes = self._nodes(split)
        a, u = (tensors[name].unflatten(1, (nodes, nodes)) for name in ("coefficient", "solution"))
        if case.kind == "scattered":
            chosen, cloud = self._scattered(nodes)
            a, u = a.flatten(1, 2)[:, chosen], u.flatten(1, 2)[:, chosen]
            return Samples(a, u, cloud, cloud, coefficient=a)
        if case.kind == "uneven":
            stride = (nodes - 1) // (self.resolution - 1)
            middle = (self.resolution - 1) // 2 * stride
            axis = torch.cat([torch.arange(0, middle, stride), torch.arange(middle, nodes, stride // 2)])
            mesh = Grid(*[axis.double() / (nodes - 1)] * 2).to(dtype=u.dtype)
            a, u = (x[:, axis][:, :, axis].flatten(1, 2) for x in (a, u))
            return Samples(a, u, mesh, mesh, coefficient=a)
        stride = (nodes - 1) // (self._count(case.size) - 1)
        a, u = a[:, ::stride, ::stride], u[:, ::stride, ::stride]
        if self.grid == "cell":
            a, u = a[:, 1::2, 1::2], u[:, 1::2, 1::2]
        mesh = _square(case.size, self.grid)
        if self.inverse:
            a = a[:, :: self.coarsening, :: self.coarsening]
            coarse = _square(a.shape[1], self.grid)
            return Samples(u.flatten(1, 2), a.flatten(1, 2), mesh, coarse)
        a, u = a.flatten(1, 2), u.flatten(1, 2)
        return Samples(a, u, mesh, mesh, coefficient=a)

    def statistics(self, tensors: Tensors) -> Samples:
        """On cells: at their corners, which reach the boundary, where the centres of finer cells lie too."""
        if self.grid != "cell":
            return self.read(tensors, "train")
        nodes = self._nodes("train")
        mesh = _square(self.resolution + 1, "endpoint")
        a, u = (
            tensors[name].unflatten(1, (nodes, nodes))[:, ::2, ::2].flatten(1, 2)
            for name in ("coefficient", "solution")
        )
        return Samples(a, u, mesh, mesh)

    def _scattered(self, nodes: int) -> tuple[Tensor, PointCloud]:
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randperm(nodes**2, generator=generator)[: self.resolution**2].sort().values
        points = torch.stack([chosen // nodes, chosen % nodes], 1).double() / (nodes - 1)
        cloud = PointCloud.voronoi(points, bounds=torch.tensor([[0.0, 1.0], [0.0, 1.0]]).double())
        return chosen, cloud.to(dtype=torch.float32)


def one_each(mesh: Mesh) -> bool:
    """Whether every sample has a mesh of its own, points (n, N, d)."""
    return isinstance(mesh, PointCloud) and mesh.points.ndim == 3


def _each(mesh: Mesh, function: Callable[[Tensor], Tensor]) -> Mesh:
    if not one_each(mesh):
        return mesh
    return PointCloud(function(mesh.points), function(mesh.weights.expand(mesh.points.shape[:-1])))


def _square(n: int, kind: str) -> Grid:
    return Grid.uniform((n, n), kind=kind, dtype=torch.float32)


SOURCES: dict[str, type[Source]] = {s.source: s for s in (Lorenz63, ControlledODE, Burgers, Darcy)}
