"""Public operators, one file per operator."""

from .continuum_attention import continuum_attention
from .position_attention import position_attention

__all__ = ["continuum_attention", "position_attention"]
