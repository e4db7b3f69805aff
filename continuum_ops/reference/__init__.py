"""Plain PyTorch versions of the operators, in the order of the formulas: the oracle of the tests."""

from .continuum_attention import continuum_attention
from .fourier_attention import fourier_attention
from .galerkin_attention import galerkin_attention
from .patch_attention import patch_attention
from .position_attention import position_attention
from .quantile_radius import quantile_radius

__all__ = [
    "continuum_attention",
    "fourier_attention",
    "galerkin_attention",
    "patch_attention",
    "position_attention",
    "quantile_radius",
]
