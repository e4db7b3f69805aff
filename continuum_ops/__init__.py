"""Attention on functions: operators, quadrature, layers and models that respect the mesh.

The core needs only torch and numpy; ``continuum_ops.nn``, ``.models``, ``.data`` and ``.distributed`` are
imported on use.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from . import quadrature
from .backends import backends
from .mesh import Grid, PointCloud
from .ops.continuum_attention import continuum_attention
from .ops.fourier_attention import fourier_attention
from .ops.galerkin_attention import galerkin_attention
from .ops.patch_attention import patch_attention
from .ops.position_attention import position_attention
from .ops.quantile_radius import quantile_radius

__version__ = "0.1.0"
__all__ = [
    "Grid",
    "PointCloud",
    "backends",
    "continuum_attention",
    "data",
    "distributed",
    "fourier_attention",
    "galerkin_attention",
    "models",
    "nn",
    "patch_attention",
    "position_attention",
    "quadrature",
    "quantile_radius",
    "reference",
]

_LAZY = ("data", "distributed", "models", "nn", "reference")


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
