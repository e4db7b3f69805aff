"""What training loops share: losses as integrals, and files that are whole or not there."""

from .files import atomic_write
from .losses import h1_seminorm, relative_l2, relative_l2_h1

__all__ = ["atomic_write", "h1_seminorm", "relative_l2", "relative_l2_h1"]
