"""What training loops share: losses as integrals, and files that are whole or not there."""

from .files import atomic_write
from .losses import relative_l2

__all__ = ["atomic_write", "relative_l2"]
