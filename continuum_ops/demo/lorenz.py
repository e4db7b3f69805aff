"""A TNO on Lorenz-63 trajectories x -> y (CA section 6.1): training on one mesh, tests on others."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..data import Trajectories, lorenz63, uneven_times, uniform_times
from ..mesh import Grid
from ..models import TNO, preset
from ..training import relative_l2
from .fitting import Trained, train_model
from .machine import PeakMemory
from .settings import Settings

Weights = Literal["mesh", "equal"]


class MeshCase(NamedTuple):
    name: str
    times: Tensor


class Evaluation(NamedTuple):
    """A mesh's test: predictions (n, N, 1), their relative L2 errors (n,), and what they cost."""

    prediction: Tensor
    error: Tensor
    seconds: float
    peak_memory: int | None


class ScaledTNO(nn.Module):
    """A TNO between functions of deviation 1: z = s_out TNO(u / s_in).

    The equations do not change under (x, y, z) -> (-x, -y, z), nor does the distribution of the initial
    values, so x and y have mean 0 and need a scale alone.
    """

    scales: Tensor

    def __init__(self, model: TNO, scales: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("scales", scales)

    def forward(self, u: Tensor, mesh: Grid, weights: Weights = "mesh") -> Tensor:
        return self.model(u / self.scales[0], mesh, weights=weights) * self.scales[1]


def grid_of(times: Tensor) -> Grid:
    """The trapezoid rule on the times: weights in float64, then rounded."""
    return Grid(times).to(dtype=torch.float32)


def mesh_cases(intervals: int) -> list[MeshCase]:
    """The training mesh (CA 42), twice as coarse, twice as fine, and the uneven mesh (CA 41)."""

    def uniform(count: int, note: str = "") -> MeshCase:
        return MeshCase(f"dt = {2 / count:g}{note}", uniform_times(count))

    return [
        uniform(intervals, " (training)"),
        uniform(intervals // 2),
        uniform(2 * intervals),
        MeshCase("uneven", uneven_times(intervals)),
    ]


def train(settings: Settings) -> Trained[ScaledTNO]:
    """Train on dt = 2 / intervals: mean relative L2 loss (CA 39), AdamW, one-cycle learning rate.

    Raises:
        RuntimeError: the loss is no finite number.
    """
    n = settings.train_trajectories
    data = lorenz63(
        n + settings.validation_trajectories,
        uniform_times(settings.intervals),
        seed=2 * settings.seed,
        progress=True,
    )
    mesh = grid_of(uniform_times(settings.intervals))
    u, target = data.input[:n], data.target[:n]
    held_out = Trajectories(data.times, data.input[n:], data.target[n:])

    torch.manual_seed(settings.seed)
    network = preset(
        "tno-lorenz63",
        out_channels=1,
        initial_channels=0,
        d_model=settings.d_model,
        num_heads=settings.num_heads,
        num_layers=settings.num_layers,
        dim_feedforward=settings.d_model,
    )
    assert isinstance(network, TNO)
    model = ScaledTNO(network, torch.stack([u.square().mean().sqrt(), target.square().mean().sqrt()]))

    def loss(rows: Tensor) -> Tensor:
        return relative_l2(model(u[rows], mesh), target[rows], mesh.weights).mean()

    def validate() -> float:
        return evaluate(model, held_out, mesh, "mesh", settings).error.median().item()

    return train_model(model, loss, validate, n, settings, "training")


@torch.no_grad()
def evaluate(
    model: ScaledTNO, data: Trajectories, mesh: Grid, weights: Weights, settings: Settings
) -> Evaluation:
    """Predict on a mesh and measure with its quadrature weights, whatever weights the model uses."""
    with PeakMemory() as memory:
        start = time.perf_counter()
        batches = data.input.split(settings.test_batch_size)
        prediction = torch.cat([model(u, mesh, weights) for u in batches])
        seconds = time.perf_counter() - start
    return Evaluation(prediction, relative_l2(prediction, data.target, mesh.weights), seconds, memory.bytes)
