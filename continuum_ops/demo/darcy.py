"""A PiT on Darcy flow (PiT section A.3): training on a coarse grid, tests on fine ones without retraining."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data import DarcyFlow, darcy
from ..data.darcy import HIGH, LOW
from ..mesh import Grid
from ..models import PiT
from ..models.pit_layer import Weights
from ..training import PointwiseNormalizer, relative_l2
from ..training.progress import progress_bar
from .fitting import Trained, train_model
from .machine import PeakMemory
from .settings import DarcySettings


class ScaledPiT(nn.Module):
    """A PiT between normalised functions.

    The two values of the coefficient become -1 and 1; the solution is told apart from the training samples'
    mean by their standard deviation at each point, both 0 on the boundary.
    """

    def __init__(self, model: PiT, solution: PointwiseNormalizer) -> None:
        super().__init__()
        self.model = model
        self.solution = solution

    def forward(self, coefficient: Tensor, grid: Grid, weights: Weights = "mesh") -> Tensor:
        """Coefficients (B, N, 1) at the points of a grid -> solutions (B, N, 1)."""
        u = (coefficient - (HIGH + LOW) / 2) * (2 / (HIGH - LOW))
        return self.solution.decode(self.model(u, grid, weights=weights), grid)


class Field(NamedTuple):
    """One test sample on the finest grid: (n, n) each, and its relative L2 error."""

    coefficient: Tensor
    solution: Tensor
    prediction: Tensor
    error: float


def training_data(settings: DarcySettings, seed: int) -> DarcyFlow:
    """Training samples, then those of the validation, on the training grid."""
    return darcy(
        settings.train_samples + settings.validation_samples,
        settings.resolutions[0],
        seed=2 * seed,
        solver_resolution=settings.train_solver,
        constant_mode=False,
        progress=True,
    )


def test_data(settings: DarcySettings, seed: int) -> DarcyFlow:
    """Test samples on the finest grid."""
    return darcy(
        settings.test_samples, settings.resolutions[-1], seed=2 * seed + 1, constant_mode=False, progress=True
    )


def train(
    data: DarcyFlow, settings: DarcySettings, seed: int, weights: Weights = "mesh"
) -> Trained[ScaledPiT]:
    """Train on data of :func:`training_data`: mean relative L2 loss, AdamW, one-cycle learning rate.

    Raises:
        RuntimeError: the loss is no finite number.
    """
    n, grid = settings.train_samples, data.grid
    learned, held_out = data[:n], data[n:]
    torch.manual_seed(seed)
    network = PiT(
        1,
        1,
        2,
        width=settings.width,
        num_heads=settings.num_heads,
        num_layers=settings.num_layers,
        latent=(settings.latent, settings.latent),
        encoder_quantile=settings.encoder_quantile,
        decoder_quantile=settings.decoder_quantile,
        rate_function=settings.rate_function,  # type: ignore[arg-type]
        initial_rate=settings.initial_rate,
        initial_local_rate=settings.initial_local_rate,
    )
    model = ScaledPiT(network, PointwiseNormalizer(learned.solution, grid))

    def loss(rows: Tensor) -> Tensor:
        prediction = model(learned.coefficient[rows], grid, weights)
        return relative_l2(prediction, learned.solution[rows], grid.weights).mean()

    def validate() -> float:
        return predict(model, held_out, weights, settings)[1].mean().item()

    return train_model(model, loss, validate, n, settings, "training PiT")


@torch.no_grad()
def predict(
    model: ScaledPiT, data: DarcyFlow, weights: Weights, settings: DarcySettings
) -> tuple[Tensor, Tensor]:
    """Predictions (n, N, 1) and their relative L2 errors (n,), integrals by the grid's trapezoid rule."""
    batches = data.coefficient.split(settings.test_batch_size)
    prediction = torch.cat([model(a, data.grid, weights) for a in batches])
    return prediction, relative_l2(prediction, data.solution, data.grid.weights)


def test(
    model: ScaledPiT, data: DarcyFlow, weights: Weights, settings: DarcySettings
) -> tuple[list[dict[str, Any]], Field]:
    """Errors on every grid, coarse to fine, and the sample of median error on the finest one.

    seconds and peak memory are of all samples, with the quantile radii, which are found once a grid.
    """
    rows: list[dict[str, Any]] = []
    with progress_bar(len(settings.resolutions), "testing PiT", "grid") as bar:
        for resolution in settings.resolutions:
            part = data.at(resolution)
            with PeakMemory() as memory:
                start = time.perf_counter()
                prediction, error = predict(model, part, weights, settings)
                seconds = time.perf_counter() - start
            rows.append(
                {
                    "resolution": resolution,
                    "points": len(part.grid),
                    "weights": "trapezoid" if weights == "mesh" else weights,
                    "mean": error.mean().item(),
                    "median": error.median().item(),
                    "worst": error.max().item(),
                    "seconds": seconds,
                    "peak_memory_bytes": memory.bytes,
                }
            )
            bar.update()
    index = int(error.argsort()[(len(error) - 1) // 2])
    shape = (resolution, resolution)
    return rows, Field(
        part.coefficient[index].view(shape),
        part.solution[index].view(shape),
        prediction[index].view(shape),
        error[index].item(),
    )
