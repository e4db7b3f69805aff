"""Operator-learning data sets in the time domain, sampled at any times (CA section 6.1)."""

from .controlled_ode import controlled_ode
from .lorenz63 import lorenz63
from .trajectories import Trajectories, uneven_times, uniform_times

__all__ = ["Trajectories", "controlled_ode", "lorenz63", "uneven_times", "uniform_times"]
