"""The model of an experiment between normalised functions, and the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..mesh import Grid, Mesh
from ..models import PiT, pool_mesh, preset
from ..models.patch_model import PatchModel
from ..nn._patches import patch_size
from ..training import (
    PointwiseNormalizer,
    ScaleNormalizer,
    relative_h1,
    relative_l1,
    relative_l2,
    relative_l2_h1,
)
from .config import Config, ConfigError
from .sources import Samples, one_each

Normalizer = PointwiseNormalizer | ScaleNormalizer | None


class Operator(nn.Module):
    """A model between normalised functions, with what is known of the training samples as buffers.

    ``average`` holds the mean of the training targets, what a prediction is compared with: pointwise, or with
    one mesh per sample over samples and points.
    """

    def __init__(self, config: Config, statistics: Samples, mesh: Mesh) -> None:
        super().__init__()
        try:
            self.model = preset(config.model.preset, **config.model.settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"model.{error}") from error
        self.input = _normalizer(config.normalizers.input, statistics.input, statistics.mesh)
        self.target = _normalizer(config.normalizers.target, statistics.target, statistics.target_mesh)
        self.average: PointwiseNormalizer | ScaleNormalizer
        if one_each(statistics.target_mesh):
            self.average = ScaleNormalizer(statistics.target, "standard")
        else:
            assert isinstance(statistics.target_mesh, Grid)
            self.average = PointwiseNormalizer(statistics.target, statistics.target_mesh)
        self.noise = config.data.noise
        self._takes_weights = "weights" in inspect.signature(self.model.forward).parameters
        self._mesh = mesh
        self._latent: Mesh | None = None

    @property
    def takes_weights(self) -> bool:
        """Whether the model can be asked for equal weights."""
        return self._takes_weights

    def forward(self, samples: Samples, weights: str = "mesh") -> Tensor:
        """Predictions (B, M, C) at the points of the target mesh."""
        options: dict[str, Any] = {"weights": weights} if self._takes_weights else {}
        u = samples.input if self.input is None else self.input.encode(samples.input, samples.mesh)
        if samples.initial is not None:
            # Values of the target at the first point.
            known = samples.initial
            options["initial"] = (
                self.target.encode(known) if isinstance(self.target, ScaleNormalizer) else known
            )
        if (
            isinstance(self.model, PiT)
            and isinstance(self.model.latent, tuple)
            and not isinstance(samples.mesh, Grid)
        ):
            options["latent_mesh"] = self._latent_mesh(self.model.latent, samples.mesh.device)
        z = self.model(u, samples.mesh, **options)
        return z if self.target is None else self.target.decode(z, samples.target_mesh)

    def perturb(self, samples: Samples, generator: torch.Generator | None = None) -> Samples:
        """The samples with noise, N(0, noise^2 c_i), c_i the variance at point i."""
        if self.noise == 0:
            return samples
        assert isinstance(self.input, PointwiseNormalizer)
        drawn = torch.randn(samples.input.shape, generator=generator, dtype=samples.input.dtype)
        drawn = drawn.to(samples.input.device)
        return samples._replace(input=samples.input + self.noise * self.input.deviation(samples.mesh) * drawn)

    def _latent_mesh(self, shape: tuple[int, ...], device: torch.device) -> Mesh:
        """Scattered points take the latent mesh of the training."""
        if self._latent is None:
            self._latent = pool_mesh(self._mesh, shape).to(device)
        return self._latent


def build(config: Config, samples: Samples, statistics: Samples) -> Operator:
    """A freshly initialised operator for training samples.

    Raises:
        ConfigError: settings that do not fit the model, the data or each other.
    """
    _check_normalizers(config, statistics)
    operator = Operator(config, statistics, samples.mesh)
    _check_fit(config, operator, samples)
    return operator


def _normalizer(kind: str, samples: Tensor, mesh: Mesh) -> Normalizer:
    if kind == "none":
        return None
    if kind == "pointwise":
        assert isinstance(mesh, Grid)
        return PointwiseNormalizer(samples, mesh)
    return ScaleNormalizer(samples, kind)  # type: ignore[arg-type]


def _check_normalizers(config: Config, statistics: Samples) -> None:
    if config.data.noise and config.normalizers.input != "pointwise":
        raise ConfigError(
            f'normalizers.input must be "pointwise" with noise of the input, was "{config.normalizers.input}"'
        )
    for name, mesh in (("input", statistics.mesh), ("target", statistics.target_mesh)):
        if getattr(config.normalizers, name) == "pointwise" and not isinstance(mesh, Grid):
            raise ConfigError(
                f'normalizers.{name} must not be "pointwise" for samples that are not on a grid, '
                'was "pointwise"'
            )
    for name, values in (("input", statistics.input), ("target", statistics.target)):
        if getattr(config.normalizers, name) == "log" and not bool((values > 0).all()):
            raise ConfigError(
                f'normalizers.{name} must not be "log" for samples that are not all > 0, was "log"'
            )
    if statistics.initial is not None and config.normalizers.target == "pointwise":
        raise ConfigError('normalizers.target must not be "pointwise" with initial values, was "pointwise"')


def _check_fit(config: Config, operator: Operator, samples: Samples) -> None:
    """One sample through the model, before hours of data and training; and the patches of all grids."""
    if isinstance(operator.model, PatchModel) and not operator.model.pad:
        patches = operator.model.num_patches
        for case in config.data.cases():
            if case.kind == "uniform":
                try:
                    patch_size("the grid of the data", (case.size,) * len(patches), patches)
                except ValueError as error:
                    raise ConfigError(f"model.num_patches and the data do not fit: {error}") from error
    one = samples.each(lambda x: x[:1])
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            prediction = operator(one, config.model.weights)
            loss_of(config)(prediction, one._replace(target=torch.ones_like(one.target)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the model and the data do not fit: {error}") from error


def loss_of(config: Config) -> Callable[[Tensor, Samples], Tensor]:
    """Of predictions (B, M, C) and samples: (B,)."""
    loss = config.loss

    def value(prediction: Tensor, samples: Samples) -> Tensor:
        mesh = samples.target_mesh
        if loss.name in ("relative_l1", "relative_l2"):
            return METRICS[loss.name](prediction, samples.target, mesh.weights)
        if not isinstance(mesh, Grid):
            raise ValueError(f"loss.name = {loss.name} needs targets on a Grid")
        if loss.name == "relative_h1":
            return relative_h1(prediction, samples.target, mesh)
        axis = mesh.axes[0]
        spacing = ((axis[-1] - axis[0]) / (len(axis) - 1)).item()
        flux = samples.coefficient if loss.flux else None
        if loss.flux and flux is None:
            raise ValueError("loss.flux must be false for data without a coefficient, was true")
        return relative_l2_h1(prediction, samples.target, mesh, loss.gamma * spacing, flux)

    return value


METRICS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "relative_l1": relative_l1,
    "relative_l2": relative_l2,
}
