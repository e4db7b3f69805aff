"""What ``continuum-ops demo`` runs: a TNO on Lorenz-63, a PiT on Darcy flow, attention on 173,056 points."""

from .experiment import run
from .settings import Settings

__all__ = ["Settings", "run"]
