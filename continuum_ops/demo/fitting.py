"""The training of the demonstration's models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn

from ..training import Fitted, fit
from ..training.progress import progress_bar
from .settings import DarcySettings, Settings

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Trained(Generic[Model]):
    model: Model
    parameters: int
    fitted: Fitted


def train_model(
    model: Model,
    loss: Callable[[Tensor], Tensor],
    validate: Callable[[], float],
    samples: int,
    settings: Settings | DarcySettings,
    title: str,
) -> Trained[Model]:
    """Train as the settings say, with a progress bar."""
    with progress_bar(settings.steps, title, "step") as bar:
        fitted = fit(
            model.parameters(),
            loss,
            samples,
            steps=settings.steps,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            warm_up=settings.warm_up,
            validate=validate,
            validate_every=settings.validate_every,
            bar=bar,
        )
    return Trained(model, sum(p.numel() for p in model.parameters()), fitted)
