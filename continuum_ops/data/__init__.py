"""Operator-learning data sets: in the time domain, sampled at any times (CA section 6.1), and of PDEs."""

from .burgers import BurgersData, burgers
from .controlled_ode import controlled_ode
from .lorenz63 import lorenz63
from .trajectories import Trajectories, uneven_times, uniform_times

__all__ = [
    "BurgersData",
    "Trajectories",
    "burgers",
    "controlled_ode",
    "lorenz63",
    "uneven_times",
    "uniform_times",
]
