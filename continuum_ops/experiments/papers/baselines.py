"""What the papers compare their models with: the FNO, and TNO's encoder with Fourier attention.

Each is trained on the data of an experiment of :data:`EXPERIMENTS`, with its loss and its numbers of steps.
"""

from __future__ import annotations

from typing import Any

from ..config import merge
from .ca import FIELDS, Content
from .gt import EXPERIMENTS as GT
from .pit import EXPERIMENTS as PIT

Pair = tuple[Content, Content]


def _on(experiment: Pair, paper: Content, small: Content) -> Pair:
    """The experiment with another model."""
    there, less = ({k: v for k, v in content.items() if k != "model"} for content in experiment)
    return merge(there, paper), merge(less, small)


def _fno(dimension: int, **settings: Any) -> Content:
    return {"model": {"preset": f"fno-{dimension}d", **settings}}


# CA 6.2.2: 12 modes an axis, 128 channels, batches of 8, learning rate 1e-4; 4 and 1e-3 on Kolmogorov flow.
_CA_FNO: Content = merge(_fno(2), {"optimizer": {"learning_rate": 1e-4}})
_SMALL_2D: Content = {"model": {"width": 24, "lift_channels": 48}, "optimizer": {"learning_rate": 4e-3}}
_SMALL_1D: Content = {"model": {"modes": 16, "width": 32, "lift_channels": 48}}
# GT table 5 and PiT table 10: modes of either sign, so twice as many.
_GT_FNO: Content = _fno(2, modes=24, width=32)

BASELINES: dict[str, Pair] = {
    # Batches of 2, learning rate 1e-3.
    "fourier-tno-darcy64": _on(
        FIELDS["tno-darcy64"],
        {"model": {"preset": "fourier-tno-darcy64"}},
        {"model": {"d_model": 32, "num_heads": 4, "num_layers": 4, "dim_feedforward": 32}},
    ),
    "fno-darcy64": _on(
        FIELDS["tno-darcy64"], merge(_CA_FNO, {"training": {"steps": 9000, "batch_size": 8}}), _SMALL_2D
    ),
    "fno-darcy416-lognormal": _on(
        FIELDS["vitno-darcy416-lognormal"],
        merge(_CA_FNO, {"training": {"steps": 9000, "batch_size": 8}}),
        _SMALL_2D,
    ),
    "fno-darcy416": _on(
        FIELDS["vitno-darcy416"],
        merge(_CA_FNO, {"training": {"steps": 9000, "batch_size": 8}}),
        _SMALL_2D,
    ),
    "fno-kolmogorov": _on(
        FIELDS["vitno-kolmogorov"],
        merge(_fno(2), {"training": {"steps": 45_000, "batch_size": 4}}),
        _SMALL_2D,
    ),
    "fno-burgers": _on(GT["galerkin-burgers"], _fno(1), _SMALL_1D),
    "fno-darcy": _on(GT["galerkin-darcy"], _GT_FNO, {"model": {"modes": 12, "width": 24}}),
    # From a grid to the same one, as the FNO has no other.
    "fno-darcy-inverse": _on(
        GT["galerkin-darcy-inverse"],
        merge(_GT_FNO, {"data": {"coarsening": 1}}),
        {"model": {"modes": 12, "width": 24}},
    ),
    "fno-pit-inviscid-burgers": _on(PIT["pit-inviscid-burgers"], _fno(1, modes=38, width=32), _SMALL_1D),
    "fno-pit-shock-tube": _on(
        PIT["pit-shock-tube"], _fno(1, in_channels=3, modes=14, width=32), {"model": {"lift_channels": 48}}
    ),
    # On grids alone.
    "fno-pit-darcy": _on(
        PIT["pit-darcy"], merge(_GT_FNO, {"data": {"meshes": []}}), {"model": {"modes": 12, "width": 24}}
    ),
    "fno-pit-vorticity": _on(
        PIT["pit-vorticity"],
        _fno(2, in_channels=10, modes=24, width=20),
        {"model": {"modes": 8, "width": 20}},
    ),
}
