"""Operator-learning data sets: functions of time (CA 6.1), Darcy flow (PiT A.3), Burgers (GT 5.1)."""

from .burgers import BurgersData, burgers
from .controlled_ode import controlled_ode
from .darcy import DarcyFlow, darcy, solve_darcy
from .lorenz63 import lorenz63
from .trajectories import Trajectories, uneven_times, uniform_times

__all__ = [
    "BurgersData",
    "DarcyFlow",
    "Trajectories",
    "burgers",
    "controlled_ode",
    "darcy",
    "lorenz63",
    "solve_darcy",
    "uneven_times",
    "uniform_times",
]
