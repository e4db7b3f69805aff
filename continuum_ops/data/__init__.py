"""Operator-learning data sets, each a function of its constants and a seed.

Functions of time (CA 6.1), Darcy flow (PiT A.3, CA 6.2.2), Burgers (GT 5.1), Kolmogorov flow (CA 6.2.3),
vorticity (PiT A.4), inviscid Burgers (PiT A.1), shock tubes (PiT A.2);
stand-ins on scattered points for elasticity and airfoils (PiT A.5, A.6). And readers of published files.
"""

from .burgers import BurgersData, burgers
from .controlled_ode import controlled_ode
from .darcy import DarcyFlow, darcy, solve_darcy
from .elastic_cell import elastic_cell
from .files import grid_pairs, read_arrays
from .functions import FunctionPairs, ScatteredPairs
from .inviscid_burgers import inviscid_burgers
from .joukowski import joukowski_airfoil
from .layouts import FieldSeries, layout_of, read_pdebench, read_the_well
from .lorenz63 import lorenz63
from .navier_stokes import VorticityData, kolmogorov, solve_vorticity, vorticity
from .noise import with_noise
from .shock_tube import shock_tube
from .trajectories import Trajectories, uneven_times, uniform_times

__all__ = [
    "BurgersData",
    "DarcyFlow",
    "FieldSeries",
    "FunctionPairs",
    "ScatteredPairs",
    "Trajectories",
    "VorticityData",
    "burgers",
    "controlled_ode",
    "darcy",
    "elastic_cell",
    "grid_pairs",
    "inviscid_burgers",
    "joukowski_airfoil",
    "kolmogorov",
    "layout_of",
    "lorenz63",
    "read_arrays",
    "read_pdebench",
    "read_the_well",
    "shock_tube",
    "solve_darcy",
    "solve_vorticity",
    "uneven_times",
    "uniform_times",
    "vorticity",
    "with_noise",
]
