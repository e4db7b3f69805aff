"""Neural operators built from the layers of `continuum_ops.nn`, and their published configurations."""

from . import convert
from .galerkin_transformer import GalerkinTransformer
from .pit import PiT, PiTGeometry
from .pit_latent import farthest_point_mesh, pool_mesh, sample_mesh
from .presets import preset, preset_names
from .tno import TNO

__all__ = [
    "TNO",
    "GalerkinTransformer",
    "PiT",
    "PiTGeometry",
    "convert",
    "farthest_point_mesh",
    "pool_mesh",
    "preset",
    "preset_names",
    "sample_mesh",
]
