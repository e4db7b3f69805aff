"""What training shares: the loop, losses as integrals, normalisers, files that are whole or not there."""

from .checkpoint import CheckpointError, load_checkpoint, load_model, save_checkpoint
from .files import atomic_write, write_json
from .loop import Fitted, Step, Training, fit, one_cycle
from .losses import h1_seminorm, relative_h1, relative_l1, relative_l2, relative_l2_h1
from .normalizers import PointwiseNormalizer, ScaleNormalizer

__all__ = [
    "CheckpointError",
    "Fitted",
    "PointwiseNormalizer",
    "ScaleNormalizer",
    "Step",
    "Training",
    "atomic_write",
    "fit",
    "h1_seminorm",
    "load_checkpoint",
    "load_model",
    "one_cycle",
    "relative_h1",
    "relative_l1",
    "relative_l2",
    "relative_l2_h1",
    "save_checkpoint",
    "write_json",
]
