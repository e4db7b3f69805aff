"""Operator-learning data sets: functions of time, sampled at any times (CA 6.1), and Darcy flow (PiT A.3)."""

from .controlled_ode import controlled_ode
from .darcy import DarcyFlow, darcy, solve_darcy
from .lorenz63 import lorenz63
from .trajectories import Trajectories, uneven_times, uniform_times

__all__ = [
    "DarcyFlow",
    "Trajectories",
    "controlled_ode",
    "darcy",
    "lorenz63",
    "solve_darcy",
    "uneven_times",
    "uniform_times",
]
