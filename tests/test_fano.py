"""FANO: the definition in numpy, periodic extension; what it shares with ViT-NO: test_patch_model.py."""

from __future__ import annotations

import numpy as np
import patch_definition
import pytest
import torch
from helpers import draw

import continuum_ops as co
from continuum_ops.models import FANO
from continuum_ops.models.patch_layer import ExtendedAttention

GRIDS = [((12,), (3,), (3,)), ((8, 15), (2, 3), (2, 3)), ((4, 4, 8), (2, 1, 2), (1, 2, 2))]


def make(num_patches, patch_size, modes, **options):
    torch.manual_seed(0)
    settings = {"d_model": 6, "num_heads": 2, "num_layers": 2, "dim_feedforward": 5, "activation": "tanh"}
    settings |= {"scale": 4.0, "dtype": torch.float64, **options}
    model = FANO(
        2, 3, len(num_patches), num_patches=num_patches, patch_size=patch_size, modes=modes, **settings
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize(("shape", "num_patches", "modes"), GRIDS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("weights", ["mesh", "equal", "tensor"])
def test_is_the_definition(shape, num_patches, modes, norm_first, weights):
    size = [n // p for n, p in zip(shape, num_patches, strict=True)]
    model = make(num_patches, size, modes, norm_first=norm_first, final_spectral=2)
    grid = co.Grid.uniform(shape, [(0, 2)] * len(shape))
    u = draw((2, len(grid), 2), torch.float64)
    w = {
        "mesh": grid.weights,
        "equal": torch.ones(len(grid), dtype=torch.float64),
        "tensor": draw((len(grid),), torch.float64, positive=True),
    }[weights]
    out = model(u, grid, weights=w if weights == "tensor" else weights)
    w = (w / w.sum()).view(shape).numpy()
    for b in range(2):
        true = patch_definition.fano(model, u[b], grid, w, 2, 4.0)
        np.testing.assert_allclose(out[b].detach().numpy(), true, rtol=0, atol=1e-10)


def test_equal_weights_are_the_default():
    model = make((2, 2), 4, 2)
    grid = co.Grid.uniform((8, 8))
    u = draw((1, 64, 2), torch.float64)
    assert torch.equal(model(u, grid), model(u, grid, weights="equal"))
    assert (model(u, grid) - model(u, grid, weights="mesh")).abs().max() > 1e-6
    cells = co.Grid.uniform((8, 8), kind="cell")
    torch.testing.assert_close(model(u, cells), model(u, cells, weights="mesh"), rtol=1e-11, atol=1e-11)
    with pytest.warns(UserWarning, match="were not used"), co.nn.quadrature(grid):
        assert torch.equal(model(u, cells, weights="equal"), model(u, cells))


@pytest.mark.parametrize("weighted", [False, True])
def test_extended_attention_is_the_definition(weighted):
    """Q, K, V of the mirrored patch, cut back, then definition 14."""
    torch.manual_seed(0)
    shape, patches, modes = (8, 6), (2, 2), (3, 2)
    layer = ExtendedAttention(4, 2, modes, patches, factor=3.0, dtype=torch.float64)
    u = draw((1, *shape, 4), torch.float64)
    w = draw(shape, torch.float64, seed=1, positive=True)
    kernel = patch_definition.spectral_conv_kernel(layer.in_conv.weight, modes)
    at = list(patch_definition.patches_of(shape, patches))
    qkv = np.zeros((*shape, 12))
    for p in at:
        x = u[0].numpy()[p]
        x = np.concatenate([x, x[::-1]], 0)
        x = np.concatenate([x, x[:, ::-1]], 1)
        qkv[p] = patch_definition.convolve(kernel, x, 12)[:4, :3]
    q, k, v = np.split(qkv, 3, -1)
    weights = w.numpy() if weighted else np.full(shape, 1 / 48)
    true = patch_definition.linear(layer.out_proj, patch_definition.mix_patches(q, k, v, at, 2, weights, 3.0))
    out = layer(u, weights=w) if weighted else layer(u)
    np.testing.assert_allclose(out[0].detach().numpy(), true, rtol=0, atol=1e-11)


def test_parameters():
    """Lift; per layer 3 d_model^2 2^(d-1) modes^d 2, out, feed-forward, norms; projection (CA table 4)."""
    model = FANO(1, 1, 2, num_patches=4, patch_size=8, modes=3, d_model=16, num_heads=4, num_layers=2)
    layer = 3 * 16 * 16 * 2 * 9 * 2 + 3 * (16 * 16 + 16) + 4 * 16
    assert sum(p.numel() for p in model.parameters()) == 4 * 16 + 2 * layer + 17
