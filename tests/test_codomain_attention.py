"""CodomainAttention: CA remark 16 in numpy, permutations, resolution, weights, errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import draw

import continuum_ops as co
from continuum_ops.nn import CodomainAttention

GRIDS = [((10,), (3,)), ((6, 8), (2, 3)), ((4, 5, 4), (1, 2, 2))]


def make(modes, **options):
    torch.manual_seed(0)
    settings = {"num_heads": 2, "head_dim": 3, "scale": 2.0, "dtype": torch.float64, **options}
    return CodomainAttention(modes, **settings)


def convolve(conv, u):
    """The spectral convolution of one function (*grid, C), mode by mode on full spectra."""
    shape, d = u.shape[:-1], u.ndim - 1
    axes = tuple(range(d))
    spectrum = np.fft.rfftn(u, axes=axes)
    out = np.zeros((*spectrum.shape[:-1], conv.out_channels), complex)
    weight = torch.view_as_complex(conv.weight.detach()).numpy()
    for block in range(weight.shape[0]):
        signs = [(block >> (d - 2 - i)) & 1 for i in range(d - 1)]
        for index in np.ndindex(*conv.modes):
            at = tuple(
                (n - m + i) if sign else i
                for i, n, m, sign in zip(index[:-1], shape[:-1], conv.modes[:-1], signs, strict=True)
            )
            at = (*at, index[-1])
            out[at] = spectrum[at] @ weight[(block, *index)]
    return np.fft.irfftn(out, s=shape, axes=axes)


@pytest.mark.parametrize(("shape", "modes"), GRIDS)
@pytest.mark.parametrize("token_channels", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_is_the_definition(shape, modes, token_channels, weighted):
    layer = make(modes, token_channels=token_channels)
    tokens, t = 4, token_channels
    u = draw((2, *shape, tokens * t), torch.float64)
    n = math.prod(shape)
    w = draw(shape, torch.float64, seed=1, positive=True)
    weights = w.numpy() if weighted else np.full(shape, 1 / n)
    out = layer(u, weights=w) if weighted else layer(u)
    assert out.shape == u.shape
    for b in range(2):
        functions = [u[b, ..., i * t : (i + 1) * t].numpy() for i in range(tokens)]
        q, k, v = ([convolve(c, f) for f in functions] for c in (layer.q_conv, layer.k_conv, layer.v_conv))
        for i in range(tokens):
            heads = []
            for h in (slice(0, 3), slice(3, 6)):
                scores = np.array([2.0 * (weights[..., None] * q[i][..., h] * x[..., h]).sum() for x in k])
                a = np.exp(scores - scores.max())
                a /= a.sum()
                heads.append(sum(p * x[..., h] for p, x in zip(a, v, strict=True)))
            matrix, bias = layer.out_proj.weight.detach().numpy(), layer.out_proj.bias.detach().numpy()
            true = np.concatenate(heads, -1) @ matrix.T + bias
            np.testing.assert_allclose(
                out[b, ..., i * t : (i + 1) * t].detach().numpy(), true, rtol=0, atol=1e-11
            )


def test_permuted_functions_permute_the_output_and_their_number_is_free():
    layer = make((2, 2))
    u = draw((1, 6, 6, 5), torch.float64)
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(layer(u[..., order]), layer(u)[..., order], rtol=0, atol=1e-12)
    assert layer(u[..., :1]).shape == (1, 6, 6, 1)


def test_one_set_of_parameters_serves_every_resolution():
    """Periodic, band-limited functions: shared points agree to rounding, on another domain too."""
    layer = make((3, 3))

    def at(n):
        points = co.Grid.uniform((n, n), kind="periodic").points * (2 * math.pi)
        waves = [torch.sin(points[:, 0]), torch.cos(points.sum(-1)), torch.cos(2 * points[:, 1]) + 0.5]
        return layer(torch.stack(waves, -1).view(1, n, n, 3))

    torch.testing.assert_close(at(24)[:, ::3, ::3], at(8), rtol=0, atol=1e-12)


def test_weights_of_a_mesh_and_of_a_surrounding_block():
    layer = make((2, 2))
    grid = co.Grid.uniform((6, 5))
    u = draw((1, 6, 5, 3), torch.float64)
    true = layer(u, weights=grid.weights.view(6, 5))
    torch.testing.assert_close(layer(u, weights=grid), true)
    with co.nn.quadrature(grid):
        torch.testing.assert_close(layer(u), true)
    assert (layer(u) - true).abs().max() > 1e-6


def test_gradients():
    layer = make((2,), num_heads=1, head_dim=2)
    u = draw((1, 5, 3), torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(layer, (u,))
    layer(u).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_errors():
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        CodomainAttention(2, num_heads=0)
    with pytest.raises(ValueError, match="modes must be one number for each of 1 to 3 axes"):
        CodomainAttention((1, 1, 1, 1))
    layer = CodomainAttention((2, 2), token_channels=2)
    with pytest.raises(ValueError, match=r"with a multiple of 2 channels, got \(1, 4, 4, 3\)"):
        layer(torch.zeros(1, 4, 4, 3))
    with pytest.raises(ValueError, match=r"u must have shape \(B, n_1, n_2, C\)"):
        layer(torch.zeros(1, 4, 4))
    with pytest.raises(ValueError, match=r"weights must have shape \(4, 4\) or \(16,\), got \(15,\)"):
        layer(torch.zeros(1, 4, 4, 2), weights=torch.ones(15))
    with pytest.raises(ValueError, match=r"modes\[0\] must be at most 1 to train"):
        layer(torch.zeros(1, 3, 4, 2))
