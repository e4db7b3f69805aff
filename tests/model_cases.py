"""Every model preset at a small size, with inputs: what the tests of models inside PyTorch share.

A new preset is one line in `PRESETS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import continuum_ops as co

TNO = {"d_model": 8, "num_heads": 2, "num_layers": 1, "dim_feedforward": 12, "dropout": 0.0}
PIT = {"width": 8, "num_heads": 2, "num_layers": 1, "encoder_quantile": 0.3, "decoder_quantile": 0.4}
GT = {"d_model": 8, "num_heads": 2, "num_layers": 1, "dim_feedforward": 12, "modes": 3, "decoder_channels": 6}
GT_2D = {"d_model": 6, "num_heads": 2, "num_layers": 1, "dim_feedforward": 8, "coarsening": 2.0}
PATCHES = {"d_model": 8, "num_heads": 2, "num_layers": 1, "num_patches": 2, "patch_size": 6, "modes": 3}
PATCHES |= {"dim_feedforward": 12, "final_spectral": 4}
NO_DROPOUT = dict.fromkeys(
    ("attention_dropout", "dropout", "downsample_dropout", "upsample_dropout", "decoder_dropout"), 0.0
)


@dataclass(frozen=True)
class ModelCase:
    """A preset made small.

    settings: overrides of the preset. Dropout is off, so that two runs can be compared.
    side: points per axis of the grid, for N = side**coord_dim points.
    """

    preset: str
    settings: dict[str, Any] = field(default_factory=dict)
    side: int = 12

    def model(self, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> nn.Module:
        """With random parameters, also where a new model has zeros; the same in each dtype, but rounded."""
        torch.manual_seed(seed)
        model = co.models.preset(self.preset, dtype=torch.float64, **{**self.settings, **settings})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model.to(dtype)

    def grid(self, dtype: torch.dtype = torch.float32, side: int | None = None) -> co.Grid:
        model = self._meta()
        dim = model.coord_dim if hasattr(model, "coord_dim") else len(model.num_patches)
        return co.Grid.uniform((self.side if side is None else side,) * dim, dtype=dtype)

    def _meta(self) -> Any:
        return co.models.preset(self.preset, device="meta", **self.settings)

    def inputs(
        self, dtype: torch.dtype = torch.float32, batch: int = 2, side: int | None = None, seed: int = 1
    ) -> tuple[Tensor, ...]:
        """u, and the initial condition where the model takes one; the mesh is that of `grid`."""
        model = self._meta()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        n = len(self.grid(side=side))
        u = draw(batch, n, model.in_channels)
        channels = getattr(model, "initial_channels", 0)
        return (u, draw(batch, channels)) if channels else (u,)

    def mesh(self, model: nn.Module, side: int | None = None) -> Any:
        """What a compiled model takes for a mesh: the grid, of PiT its geometry."""
        grid = self.grid(next(model.parameters()).dtype, side)
        return model.geometry(grid) if isinstance(model, co.models.PiT) else grid


def run(model: Callable[..., Tensor], inputs: tuple[Tensor, ...], mesh: Any) -> Tensor:
    u, *rest = inputs
    return model(u, mesh, *rest)


PRESETS = [
    ModelCase("tno-lorenz63", TNO, 24),
    ModelCase("tno-cde", TNO, 24),
    ModelCase("tno-darcy64", TNO, 6),
    *(
        ModelCase(f"{name}-{data}", PATCHES)
        for name in ("vitno", "fano")
        for data in ("darcy416", "kolmogorov")
    ),
    ModelCase("pit-inviscid-burgers", {**PIT, "latent": (7,)}, 24),
    ModelCase("pit-shock-tube", {**PIT, "latent": (7,)}, 24),
    ModelCase("pit-darcy", {**PIT, "latent": (3, 4)}, 6),
    ModelCase("pit-vorticity", {**PIT, "latent": (3, 4)}, 6),
    ModelCase("pit-naca", {**PIT, "latent": (3, 4)}, 6),
    ModelCase("pit-elasticity", PIT, 6),
    ModelCase("galerkin-burgers", GT, 24),
    ModelCase("fourier-burgers", {**GT, **NO_DROPOUT}, 24),
    ModelCase("galerkin-darcy", {**GT, **GT_2D, **NO_DROPOUT}, 13),
    ModelCase("fourier-darcy", {**GT, **GT_2D, **NO_DROPOUT}, 13),
    ModelCase("galerkin-darcy-inverse", {**GT, **GT_2D, **NO_DROPOUT}, 13),
]

# One preset of each class, for what takes long.
REPRESENTATIVES = ("tno-lorenz63", "pit-darcy", "galerkin-darcy", "vitno-darcy416", "fano-darcy416")
CLASSES = [case for case in PRESETS if case.preset in REPRESENTATIVES]


def by_preset(cases: list[ModelCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.preset for case in cases])
