"""Public operators, one file per operator."""

from .continuum_attention import continuum_attention

__all__ = ["continuum_attention"]
