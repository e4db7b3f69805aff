"""What training shares: the loop, losses as integrals, normalisers, files that are whole or not there."""

from .files import atomic_write
from .loop import Fitted, fit
from .losses import h1_seminorm, relative_l2, relative_l2_h1
from .normalizers import PointwiseNormalizer

__all__ = [
    "Fitted",
    "PointwiseNormalizer",
    "atomic_write",
    "fit",
    "h1_seminorm",
    "relative_l2",
    "relative_l2_h1",
]
