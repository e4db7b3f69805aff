"""ViT-NO: the lift, weights; what it shares with FANO: test_patch_model.py."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import draw
from patch_definition import drawn

import continuum_ops as co
from continuum_ops.models import ViTNO


def test_mesh_weights_are_the_default_and_matter():
    model = drawn(ViTNO, (2, 2), 4, 2)
    grid = co.Grid.uniform((8, 8))
    u = draw((1, 64, 2), torch.float64)
    assert torch.equal(model(u, grid), model(u, grid, weights="mesh"))
    assert (model(u, grid) - model(u, grid, weights="equal")).abs().max() > 1e-6
    cells = co.Grid.uniform((8, 8), kind="cell")
    torch.testing.assert_close(model(u, cells), model(u, cells, weights="equal"), rtol=1e-12, atol=1e-12)


def test_equal_weights_are_equal_within_another_quadrature_block():
    model = drawn(ViTNO, (2, 2), 4, 2)
    grid = co.Grid.uniform((8, 8))
    u = draw((1, 64, 2), torch.float64)
    true = model(u, grid, weights="equal")
    with pytest.warns(UserWarning, match="were not used"), co.nn.quadrature(grid):
        assert torch.equal(model(u, grid, weights="equal"), true)


def test_mirrored_patches_of_a_function_that_is_not_periodic():
    """The lift with the kernel 1: x is kept much better by its cosine than by its Fourier series."""

    def error(periodic_extension):
        model = drawn(ViTNO, (2,), 32, 8, periodic_extension=periodic_extension)
        with torch.no_grad():
            model.lift.weight.zero_()
            model.lift.weight[..., 2, 0, 0] = 1.0  # from the coordinate to the first channel
        grid = co.Grid.uniform(64, kind="cell")
        u = torch.zeros(1, 64, 3, dtype=torch.float64)
        u[..., 2] = grid.points[:, 0]
        return (model.lift(u)[..., 0] - u[..., 2]).abs().max().item()

    assert error(True) < 0.2 * error(False)


def test_lift_is_the_only_spectral_map():
    """Parameters: lift (C + d) d_model 2^(d-1) modes^d 2, encoder, projection (CA table 4)."""
    model = ViTNO(1, 1, 2, num_patches=4, patch_size=8, modes=3, d_model=16, num_heads=4, num_layers=2)
    encoder = 2 * (4 * (16 * 16 + 16) + 2 * (16 * 16 + 16) + 4 * 16)
    assert sum(p.numel() for p in model.parameters()) == 3 * 16 * 2 * 9 * 2 + encoder + 17


def test_more_patches_than_one_share_the_lift():
    """A function that repeats on each patch, without coordinates, is lifted alike."""
    model = drawn(ViTNO, (3,), 4, 2)
    u = draw((1, 4, 4), torch.float64).repeat(1, 3, 1)
    v = model.lift(u[..., :3])
    torch.testing.assert_close(v[:, :4], v[:, 4:8], rtol=0, atol=1e-13)
    assert v.shape == (1, 12, 6) and math.isfinite(v.sum().item())
