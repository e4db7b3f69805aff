"""FANO's attention in mode space against its definition in space; pitfalls of the half spectrum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import draw

from continuum_ops.nn import FourierPatchAttention, SpectralConv
from continuum_ops.ops import _fourier_patch_modes as mode_module

# patch shape, modes, patches: even and odd, up to Nyquist on the last axis and on the others
CASES = [
    ((16,), (4,), (3,)),
    ((16,), (9,), (5,)),
    ((15,), (8,), (3,)),
    ((1,), (1,), (4,)),
    ((2,), (2,), (4,)),
    ((8, 8), (3, 3), (3, 2)),
    ((8, 8), (4, 5), (2, 3)),
    ((8, 6), (1, 1), (2, 2)),
    ((8, 8), (3, 5), (2, 2)),
    ((8, 8), (4, 3), (2, 2)),
    ((9, 7), (3, 3), (2, 2)),
    ((9, 7), (4, 4), (2, 2)),
    ((7, 8), (3, 5), (2, 2)),
    ((32, 32), (9, 9), (2, 2)),
    ((4, 6, 4), (2, 2, 3), (2, 1, 2)),
    ((4, 3, 5), (2, 1, 3), (1, 2, 2)),
    ((6, 4, 6), (2, 2, 2), (2, 2, 1)),
]
IDS = [f"{'x'.join(map(str, p))}-{'x'.join(map(str, m))}" for p, m, _ in CASES]


def make(
    points, modes, embed_dim=6, heads=2, dtype=torch.float64, size=1.0, **options
) -> FourierPatchAttention:
    """Generic weights, far from Hermitian, and scores of size 1."""
    torch.manual_seed(0)
    layer = FourierPatchAttention(embed_dim, heads, points, modes, dtype=dtype, **options)
    with torch.no_grad():
        layer.in_proj_weight.mul_(size)
        if layer.out_proj.bias is not None:
            layer.out_proj.bias.normal_()
    return layer


def field(points, patches, batch=2, channels=6, dtype=torch.float64):
    return draw((batch, *(n * p for n, p in zip(points, patches, strict=True)), channels), dtype)


def patches_of(x: np.ndarray, points) -> list[np.ndarray]:
    counts = [n // p for n, p in zip(x.shape[1:-1], points, strict=True)]
    cuts = itertools.product(*(range(c) for c in counts))
    return [
        x[(slice(None), *(slice(i * p, (i + 1) * p) for i, p in zip(cut, points, strict=True)))]
        for cut in cuts
    ]


def convolve(x: np.ndarray, w: np.ndarray, modes) -> np.ndarray:
    """irfftn(R rfftn(x)) of one patch (B, *points, C) with numpy, w (*rows, E, C) complex."""
    axes, points = tuple(range(1, x.ndim - 1)), x.shape[1:-1]
    spectrum = np.fft.rfftn(x, axes=axes, norm="forward")
    mixed = np.zeros((*spectrum.shape[:-1], w.shape[-2]), complex)
    ranges = []
    for n, m in zip(points[:-1], modes[:-1], strict=True):
        up = [(k, k) for k in range(m) if k <= (n - 1) // 2]
        ranges.append(up + [(-k, 2 * m - k) for k in range(1, m + 1) if k <= n // 2])
    ranges.append([(k, k) for k in range(modes[-1]) if k <= points[-1] // 2])
    for choice in itertools.product(*ranges):
        there, here = tuple(c[0] for c in choice), tuple(c[1] for c in choice)
        at = (slice(None), *there)
        mixed[at] = spectrum[at] @ w[here].T
    # numpy's inverse: complex along the leading axes, the real part of columns 0 and Nyquist along the last.
    return np.fft.irfftn(mixed, s=points, axes=axes, norm="forward")


def definition(layer, u, points=None, weights=None, keep_scores=False):
    """CA eq. 62-64, 68: spectral convolutions of each patch, inner products in space, softmax, mixing."""
    points = layer.patch_size if points is None else points
    x = u.detach().numpy().astype(np.float64)
    w = layer.in_proj_weight.detach().numpy().astype(np.float64)
    w = w[..., 0, :] + 1j * w[..., 1, :]
    q, k, v = ([convolve(p, part, layer.modes) for p in patches_of(x, points)] for part in w)
    cells = math.prod(u.shape[1:-1])
    scale = (1 / cells if weights is None else 1.0) if layer.scale is None else layer.scale
    inner = None
    if weights is not None:
        full = np.broadcast_to(weights.detach().numpy(), u.shape[:-1])[..., None]
        inner = patches_of(full, points)
    batch, heads, dim, count = len(x), layer.num_heads, layer.head_dim, len(q)
    scores = np.zeros((batch, heads, count, count))
    for p, j in itertools.product(range(count), repeat=2):
        products = q[p] * k[j] * (1 if inner is None else inner[p])
        scores[:, :, p, j] = scale * products.reshape(batch, -1, heads, dim).sum((1, 3))
    a = np.exp(scores - scores.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    out = np.zeros_like(x)
    for p, place in enumerate(patches_of(out, points)):
        mixed = sum(
            np.repeat(a[:, :, p, j], dim, 1).reshape(batch, *[1] * len(points), -1) * v[j]
            for j in range(count)
        )
        place[...] = mixed @ layer.out_proj.weight.detach().numpy().astype(np.float64).T
        if layer.out_proj.bias is not None:
            place[...] += layer.out_proj.bias.detach().numpy()
    return (out, scores) if keep_scores else out


@pytest.fixture(params=["dense", "fft"])
def transform(request, monkeypatch):
    choose = mode_module.choose_modes
    name = "continuum_ops.nn.fourier_patch_attention.choose_modes"
    monkeypatch.setattr(name, lambda *args: choose(*args, dense=request.param == "dense"))
    return request.param


@pytest.mark.parametrize("points, modes, patches", CASES, ids=IDS)
def test_is_the_definition(points, modes, patches, transform):
    layer, u = make(points, modes, size=2.0), field(points, patches)
    true, scores = definition(layer, u, keep_scores=True)
    np.testing.assert_allclose(layer(u).detach().numpy(), true, rtol=0, atol=1e-12 * np.abs(true).max())
    u32 = layer.float()(u.float())
    assert u32.dtype == torch.float32
    np.testing.assert_allclose(u32.detach().numpy(), true, rtol=0, atol=1e-5 * np.abs(true).max())


@pytest.mark.parametrize("points, modes, patches", [CASES[0], CASES[6], CASES[10], CASES[14]], ids=str)
def test_gradients(points, modes, patches, transform):
    layer = make([min(n, 4) for n in points], [min(m, 2) for m in modes], 4, 2, size=2.0)
    u = field(layer.patch_size, [min(p, 2) for p in patches], 1, 4).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def function(u, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (u,))

    leaves = (u, *(p.detach().requires_grad_() for p in layer.parameters()))
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_compile_fullgraph(transform):
    torch._dynamo.reset()
    layer, u = make((6, 8), (2, 3)), field((6, 8), (2, 2))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = layer(u)
    torch.testing.assert_close(compiled(u), expected)
    grads = [torch.autograd.grad(f(u).square().sum(), list(layer.parameters())) for f in (layer, compiled)]
    torch.testing.assert_close(grads[1], grads[0])
