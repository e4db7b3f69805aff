"""The demonstration behind ``continuum-ops demo``: a TNO on Lorenz-63, and attention on 173,056 points."""

from .experiment import run
from .settings import Settings

__all__ = ["Settings", "run"]
