"""Neural operators built from the layers of `continuum_ops.nn`, and their published configurations."""

from . import convert
from .fano import FANO
from .fno import FNO
from .galerkin_transformer import GalerkinTransformer
from .pit import PiT, PiTGeometry
from .pit_latent import farthest_point_mesh, pool_mesh, sample_mesh
from .presets import preset, preset_names
from .smoothing import Smoothing
from .tno import TNO
from .vitno import ViTNO

__all__ = [
    "FANO",
    "FNO",
    "TNO",
    "GalerkinTransformer",
    "PiT",
    "PiTGeometry",
    "Smoothing",
    "ViTNO",
    "convert",
    "farthest_point_mesh",
    "pool_mesh",
    "preset",
    "preset_names",
    "sample_mesh",
]
