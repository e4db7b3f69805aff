"""PatchSpectralConv: each patch on its own, periodic extension, modes that a patch lacks, errors."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import draw
from patch_definition import patches_of

from continuum_ops.nn import PatchSpectralConv, SpectralConv

GRIDS = [((12,), (3,)), ((8, 6), (2, 3)), ((4, 6, 2), (2, 2, 1))]


@pytest.mark.parametrize(("shape", "num_patches"), GRIDS)
def test_spectral_convolution_acts_on_each_patch(shape, num_patches):
    torch.manual_seed(0)
    modes = (1,) * len(shape)
    layer = PatchSpectralConv(2, 3, modes, num_patches, dtype=torch.float64)
    plain = SpectralConv(2, 3, modes, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    u = draw((2, *shape, 2), torch.float64)
    out = layer(u)
    assert out.shape == (2, *shape, 3)
    for at in patches_of(shape, num_patches):
        at = (slice(None), *at)
        torch.testing.assert_close(out[at], plain(u[at]), rtol=0, atol=1e-13)


def test_periodic_extension_is_a_cosine_series():
    """With the kernel 1 the output is the truncated cosine series of the patch, whatever its ends."""
    layer = PatchSpectralConv(1, 1, 4, 3, periodic_extension=True, dtype=torch.float64)
    with torch.no_grad():
        layer.weight[..., 0], layer.weight[..., 1] = 1.0, 0.0
    u = draw((2, 30, 1), torch.float64)
    out = layer(u)
    x = (torch.arange(10, dtype=torch.float64) + 0.5) / 10
    basis = torch.stack([torch.cos(math.pi * k * x) for k in range(4)])
    for patch in range(3):
        at = slice(10 * patch, 10 * patch + 10)
        coefficients = torch.einsum("bxc,kx->bkc", u[:, at], basis) / basis.square().sum(1)[:, None]
        true = torch.einsum("bkc,kx->bxc", coefficients, basis)
        torch.testing.assert_close(out[:, at], true, rtol=0, atol=1e-13)


@pytest.mark.parametrize("periodic_extension", [False, True])
def test_modes_that_a_patch_lacks(periodic_extension):
    """An error in training, left out in evaluation (CASES 28: 9 modes on patches of 16)."""
    torch.manual_seed(0)
    points = 8 if periodic_extension else 16
    layer = PatchSpectralConv(1, 1, (9, 9), (2, 2), periodic_extension=periodic_extension)
    u = torch.randn(1, 2 * points, 2 * points, 1)
    with pytest.raises(ValueError, match=r"modes\[0\] must be at most 8 to train on an axis of 16 points"):
        layer(u)
    assert layer.eval()(u).isfinite().all()
    with torch.no_grad():
        layer.weight[..., 0], layer.weight[..., 1] = 1.0, 0.0
    # Each mode once: with the kernel 1 nothing is lost or counted twice.
    torch.testing.assert_close(layer(u), u, rtol=0, atol=1e-5)


def test_spectral_convolution_errors():
    with pytest.raises(ValueError, match="modes must be one number for each of 2 axes, got"):
        PatchSpectralConv(1, 1, (2,), (2, 2))
    layer = PatchSpectralConv(1, 1, 1, (2, 2))
    with pytest.raises(ValueError, match=r"u must have shape \(B, n_1, n_2, 1\), got \(1, 4, 1\)"):
        layer(torch.zeros(1, 4, 1))
    with pytest.raises(ValueError, match="u must have a multiple of 2 points along axis 1"):
        layer(torch.zeros(1, 4, 5, 1))
