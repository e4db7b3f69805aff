"""Noise of measured inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def with_noise(
    values: Tensor, level: float, *, seed: int | torch.Generator, deviation: Tensor | None = None
) -> Tensor:
    """values + level * sqrt(c_i) * e, e standard normal, c_i the variance at point i (GT 5.3, eq. 23).

    Args:
        values: (n, ...) samples, float32 or float64.
        level: >= 0; the paper's inverse problem has 0, 0.01 and 0.1.
        seed: of the draw, or the generator that it goes on with.
        deviation: sqrt(c), (...): that of training samples for those of a test. None: of ``values``, n >= 2.

    Returns:
        A new tensor like values; the same seed gives the same numbers on a CPU.

    Raises:
        TypeError: values that are not floating-point.
        ValueError: a level that is negative or no number; one sample without a deviation; a deviation of
            another shape.
    """
    if not isinstance(values, Tensor) or not values.is_floating_point():
        what = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"values must be a floating-point Tensor, got {what}")
    if not (level >= 0 and math.isfinite(level)):
        raise ValueError(f"level must be >= 0 and finite, got {level}")
    if deviation is None:
        if values.ndim == 0 or len(values) < 2:
            raise ValueError(f"values must hold at least 2 samples to vary, got shape {tuple(values.shape)}")
        deviation = values.std(0)
    elif deviation.shape != values.shape[1:]:
        raise ValueError(f"deviation must have shape {tuple(values.shape[1:])}, got {tuple(deviation.shape)}")
    generator = (
        seed if isinstance(seed, torch.Generator) else torch.Generator(values.device).manual_seed(seed)
    )
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype, device=values.device)
    return values + level * deviation * noise
