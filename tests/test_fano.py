"""FANO: periodic extension; what it shares with ViT-NO: test_patch_model.py."""

from __future__ import annotations

import numpy as np
import patch_definition
import pytest
import torch
from helpers import draw
from patch_definition import drawn

import continuum_ops as co
from continuum_ops.models import FANO
from continuum_ops.models.patch_layer import ExtendedAttention


def test_equal_weights_are_the_default():
    model = drawn(FANO, (2, 2), 4, 2)
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
