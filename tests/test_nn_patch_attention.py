"""PatchAttention: the definition in numpy, weights, cross-attention, resolution, errors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import draw
from patch_definition import order, patches_of

import continuum_ops as co
from continuum_ops.nn import PatchAttention

GRIDS = [((12,), (3,)), ((8, 6), (2, 3)), ((4, 6, 2), (2, 2, 1))]


def definition(layer, query, key, weights):
    """CA (62)-(64) patch by patch: query, key (B, *grid, C), weights (*grid)."""
    linear = {
        name: (m.weight.detach().numpy(), 0.0 if m.bias is None else m.bias.detach().numpy())
        for name, m in layer.named_children()
    }
    q, k, v = (
        x.numpy() @ linear[name][0].T + linear[name][1]
        for name, x in (("q_proj", query), ("k_proj", key), ("v_proj", key))
    )
    size = [n // p for n, p in zip(query.shape[1:-1], layer.num_patches, strict=True)]
    keys = [n // s for n, s in zip(key.shape[1:-1], size, strict=True)]
    heads, out = layer.num_heads, np.zeros(q.shape)
    w = weights.numpy()
    for b, h in itertools.product(range(len(q)), range(heads)):
        channels = slice(h * layer.head_dim, (h + 1) * layer.head_dim)
        for at in patches_of(query.shape[1:-1], layer.num_patches):
            there = list(patches_of(key.shape[1:-1], keys))
            scores = np.array(
                [
                    layer.scale * (w[at][..., None] * q[b][at][..., channels] * k[b][j][..., channels]).sum()
                    for j in there
                ]
            )
            a = np.exp(scores - scores.max())
            a /= a.sum()
            out[b][(*at, channels)] = sum(x * v[b][j][..., channels] for x, j in zip(a, there, strict=True))
    return torch.from_numpy(out @ linear["out_proj"][0].T + linear["out_proj"][1])


def make(num_patches, **options):
    torch.manual_seed(0)
    layer = PatchAttention(6, 2, num_patches, **{"scale": 3.0, "dtype": torch.float64, **options})
    for parameter in layer.parameters():  # biases too
        torch.nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize(("shape", "num_patches"), GRIDS)
@pytest.mark.parametrize("bias", [True, False])
def test_is_the_definition(shape, num_patches, bias):
    layer = make(num_patches, bias=bias)
    u = draw((2, *shape, 6), torch.float64)
    w = draw(shape, torch.float64, seed=1, positive=True)
    n = math.prod(shape)
    equal = torch.full(shape, 1 / n, dtype=torch.float64)
    torch.testing.assert_close(layer(u), definition(layer, u, u, equal), rtol=1e-11, atol=1e-11)
    true = definition(layer, u, u, w)
    torch.testing.assert_close(layer(u, weights=w), true, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(layer(u, weights=w.flatten()), true, rtol=1e-11, atol=1e-11)
    assert (layer(u) - true).abs().max() > 1e-3


def test_cross_attention_to_another_grid():
    layer = make((2, 3))
    query, key = draw((2, 8, 6, 6), torch.float64), draw((2, 4, 10, 6), torch.float64, seed=1)
    equal = torch.full((8, 6), 1 / 48, dtype=torch.float64)
    torch.testing.assert_close(
        layer(query, key), definition(layer, query, key, equal), rtol=1e-11, atol=1e-11
    )


def test_weights_of_a_mesh_and_of_a_surrounding_block():
    layer = make((2, 3))
    grid = co.Grid.uniform((8, 6), ((0, 2), (0, 3)))  # trapezoid weights
    u = draw((1, 8, 6, 6), torch.float64)
    true = definition(layer, u, u, grid.weights.view(8, 6))
    torch.testing.assert_close(layer(u, weights=grid), true, rtol=1e-11, atol=1e-11)
    with co.nn.quadrature(grid):
        torch.testing.assert_close(layer(u), true, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_one_graph_serves_every_resolution(scale):
    torch._dynamo.reset()
    layer = make((2, 3), scale=scale)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for i, shape in enumerate([(8, 9), (4, 12), (6, 15)]):
        u = draw((2, *shape, 6), torch.float64)
        equal = torch.full(shape, 1 / math.prod(shape), dtype=torch.float64)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            out = compiled(u)
        torch.testing.assert_close(out, definition(layer, u, u, equal), rtol=1e-11, atol=1e-11)


def test_gradients():
    layer = make((2,))
    u = draw((1, 6, 6), torch.float64).requires_grad_()
    w = draw((6,), torch.float64, positive=True).requires_grad_()
    assert torch.autograd.gradcheck(lambda u, w: layer(u, weights=w), (u, w))
    layer(u).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters() if p.dim() > 1)


def test_more_samples_of_the_same_functions_change_little():
    """Midpoint rules on the same patches: order 2, at the points that refining by 3 keeps."""
    layer = make((2, 2))
    for parameter in layer.parameters():
        parameter.data /= 3

    def at(n):
        points = co.Grid.uniform((n, n), kind="cell").points
        waves = [torch.sin(k * points[:, :1] + 2 * points[:, 1:]) for k in range(6)]
        with torch.no_grad():
            return layer(torch.cat(waves, -1).view(1, n, n, 6))

    coarse, middle, fine = at(4), at(12)[:, 1::3, 1::3], at(36)[:, 4::9, 4::9]
    first, second = (coarse - middle).abs().max().item(), (middle - fine).abs().max().item()
    assert first > 1e-5
    assert order(first, second, 3) > 1.8


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((6, 4, 2), {}, "embed_dim must be divisible by num_heads, got 6 and 4"),
        ((0, 1, 2), {}, "embed_dim must be at least 1, got 0"),
        ((6, 2, 0), {}, "num_patches must be at least 1, got 0"),
        ((6, 2, (1, 2, 3, 4)), {}, r"num_patches must be one number for each of 1 to 3 axes"),
    ],
)
def test_constructor_errors(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        PatchAttention(*arguments, **options)


def test_call_errors():
    with pytest.raises(TypeError, match=r"num_patches must be an int or one per axis, got 2\.5"):
        PatchAttention(6, 2, 2.5)  # type: ignore[arg-type]
    layer = PatchAttention(6, 2, (2, 3))
    u = torch.zeros(1, 8, 6, 6)
    with pytest.raises(ValueError, match=r"query must have shape \(B, n_1, n_2, 6\), got \(1, 8, 6\)"):
        layer(u[..., 0])
    with pytest.raises(ValueError, match=r"key must have shape \(B, n_1, n_2, 6\), got \(1, 8, 6, 5\)"):
        layer(u, u[..., :5])
    message = r"query must have a multiple of 3 points along axis 1 .* got 5 of the grid \(8, 5\)"
    with pytest.raises(ValueError, match=message):
        layer(u[:, :, :5])
    with pytest.raises(ValueError, match=r"weights must have shape \(8, 6\) or \(48,\), got \(47,\)"):
        layer(u, weights=torch.ones(47))
    with pytest.raises(TypeError, match="weights must be a tensor or a mesh"):
        layer(u, weights=[1.0])
    with pytest.raises(ValueError, match="weights"):
        layer(u, weights=-torch.ones(8, 6))
