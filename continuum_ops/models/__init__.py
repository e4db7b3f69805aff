"""Neural operators built from the layers of `continuum_ops.nn`, and their published configurations."""

from .presets import preset, preset_names
from .tno import TNO

__all__ = ["TNO", "preset", "preset_names"]
