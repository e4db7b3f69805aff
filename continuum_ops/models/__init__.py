"""Neural operators built from the layers of `continuum_ops.nn`, and their published configurations."""

from .galerkin_transformer import GalerkinTransformer
from .presets import preset, preset_names
from .tno import TNO

__all__ = ["TNO", "GalerkinTransformer", "preset", "preset_names"]
