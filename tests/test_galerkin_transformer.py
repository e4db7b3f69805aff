"""The operator learners of GT: shapes, sub-networks in numpy or closed form, resolution, compile, errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import draw
from scipy.interpolate import RegularGridInterpolator
from torch import nn

import continuum_ops as co
from continuum_ops.models import GalerkinTransformer, preset
from continuum_ops.models.interpolation_cnn import Downsample, ResidualConv, coarse_axis, resample

TYPES = ["galerkin", "fourier", "linear", "softmax"]
TINY = {"d_model": 8, "num_layers": 2, "modes": 3, "decoder_channels": 6, "eta": 1.0}


def make(coord_dim: int = 1, **options) -> GalerkinTransformer:
    torch.manual_seed(0)
    return GalerkinTransformer(1, 2, coord_dim, **{**TINY, "dtype": torch.float64, **options}).eval()


def smooth(points, channels=1):
    """(1, N, C) samples of a smooth function of period 1."""
    phase = 2 * math.pi * points.sum(-1)
    return torch.stack([torch.sin((c + 1) * phase) + 0.5 for c in range(channels)], -1)[None]


@pytest.mark.parametrize("attention_type", TYPES)
@pytest.mark.parametrize("scheme", ["galerkin", "regular"])
def test_one_dimension(attention_type, scheme):
    model = make(attention_type=attention_type, layer_norm=scheme)
    grid = co.Grid.uniform(32, kind="periodic")
    out = model(smooth(grid.points).expand(3, -1, -1), grid)
    assert out.shape == (3, 32, 2) and bool(out.isfinite().all())
    out.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("attention_type", TYPES)
def test_one_set_of_parameters_serves_every_resolution(attention_type):
    """Periodic data: the rectangle rule is exact for the smooth input, so shared points agree to rounding."""
    model = make(attention_type=attention_type, layer_norm="regular")
    model.layers.eval()

    class Sine(nn.Module):  # coordinates enter as a periodic function, else the network is not smooth
        def forward(self, x):
            return torch.sin(2 * math.pi * x)

    def at(n: int):
        axis = torch.arange(n, dtype=torch.float64) / n
        grid = co.Grid(axis, kind="periodic")
        points = Sine()(grid.points)
        v = model.lift(torch.cat([smooth(grid.points), points[None]], -1))
        v = model._encode(v, points, grid.weights)
        return model.decoder(v, points, (n,))

    torch.testing.assert_close(at(128)[:, ::2], at(64), rtol=0, atol=1e-9)


def test_weights_are_those_of_the_mesh_over_their_sum():
    """A point of weight 0 does not count, a common factor cancels; points alone have equal weights."""
    model = make(decoder="pointwise")
    x = torch.rand(20, 1, dtype=torch.float64)
    u, w = smooth(x), torch.rand(20).double()
    out = model(u, co.PointCloud(x, w))
    torch.testing.assert_close(model(u, co.PointCloud(x, 7 * w)), out, rtol=1e-12, atol=1e-12)
    w[15:] = 0
    few = model(u[:, :15], co.PointCloud(x[:15], w[:15]))
    torch.testing.assert_close(model(u, co.PointCloud(x, w))[:, :15], few, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        model(u, x), model(u, co.PointCloud(x, torch.ones(20))), rtol=1e-12, atol=1e-12
    )
    assert bool(model(u, co.PointCloud(x, torch.zeros(20))).isfinite().all())


@pytest.mark.parametrize("coarse_output", [False, True])
@pytest.mark.parametrize("shape, coarse", [((21, 21), (8, 8)), ((16, 31), (6, 11))])
def test_two_grids(coarse_output, shape, coarse):
    decoder = "pointwise" if coarse_output else "spectral"
    model = make(2, coarsening=3.0, coarse_output=coarse_output, decoder=decoder, decoder_lift=True)
    grid = co.Grid.uniform(shape)
    assert model.coarse_shape(shape) == coarse
    out = model(smooth(grid.points).expand(2, -1, -1), grid)
    assert out.shape == (2, math.prod(coarse if coarse_output else shape), 2)
    out.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    "fine, ratio, coarse", [(141, 140 / 42, 43), (211, 3.5, 61), (141, 4.0, 36), (85, 3.0, 29)]
)
def test_grid_pairs_of_the_paper(fine, ratio, coarse):
    """GT tables 2 and 3."""
    assert make(2, coarsening=ratio).coarse_shape((fine, fine)) == (coarse, coarse)


def test_resample_is_bilinear_interpolation():
    x = draw((1, 1, 7, 9), torch.float64)
    fine = [np.linspace(0, 1, n) for n in (7, 9)]
    coarse = np.meshgrid(np.linspace(0, 1, 5), np.linspace(0, 1, 12), indexing="ij")
    true = RegularGridInterpolator(fine, x[0, 0].numpy())(np.stack(coarse, -1))
    np.testing.assert_allclose(resample(x, (5, 12))[0, 0].numpy(), true, rtol=0, atol=1e-13)


def test_coarse_weights_are_a_trapezoid_rule():
    grid = co.Grid.uniform(141)
    w = coarse_axis(grid.axis_weights[0], 43)
    np.testing.assert_allclose((w / w.sum()).numpy(), co.Grid.uniform(43).weights.numpy(), rtol=1e-12)
    np.testing.assert_allclose(
        coarse_axis(grid.axes[0], 43).numpy(), np.linspace(0, 1, 43), rtol=0, atol=1e-14
    )


def test_residual_convolution_adds_the_shared_channels():
    for i, o in ((4, 4), (2, 5), (5, 2)):
        block = ResidualConv(i, o, lambda x: x, 0.0, dtype=torch.float64)
        block.conv.weight.data.zero_()
        x = draw((1, i, 3, 3), torch.float64)
        y = block(x)
        assert y.shape == (1, o, 3, 3)
        assert torch.equal(y[:, : min(i, o)], x[:, : min(i, o)]) and not y[:, min(i, o) :].any()


def test_downsample_stacks_three_outputs():
    net = Downsample(1, 8, torch.relu, 0.0)
    assert [tuple(b.conv.weight.shape[:2]) for b in net.blocks] == [(2, 8), (2, 2), (4, 2)]
    assert net(draw((2, 1, 9, 9)), (4, 4)).shape == (2, 8, 4, 4)


def test_dropout_rests_in_evaluation():
    """CASES 22, all five places."""
    names = ("attention", "downsample", "upsample", "decoder")
    drop = {"dropout": 0.5, **{f"{n}_dropout": 0.5 for n in names}}
    grid = co.Grid.uniform((9, 9))
    u = smooth(grid.points)
    model, calm = (make(2, coarsening=2.0, decoder_lift=True, **d) for d in (drop, {}))
    assert torch.equal(model(u, grid), calm(u, grid))
    for name in drop:
        model = make(2, coarsening=2.0, decoder_lift=True, **{name: 0.5})
        model.train()
        assert not torch.equal(model(u, grid), calm(u, grid)), name


@pytest.mark.parametrize("name", ["galerkin-burgers", "fourier-burgers"])
def test_burgers_presets_run_at_any_size(name):
    model = preset(name).eval()
    for n in (512, 100, 16):
        grid = co.Grid.uniform(n, kind="periodic", dtype=torch.float32)
        assert model(torch.randn(2, n, 1), grid).shape == (2, n, 1)
    with pytest.raises(ValueError, match=r"modes\[0\] must be at most 9 to train on an axis of 16 points"):
        model.train()(torch.randn(2, 16, 1), grid)


def test_darcy_presets_run_at_any_size():
    grid = co.Grid.uniform((43, 43), dtype=torch.float32)
    u = torch.randn(1, 43 * 43, 1)
    assert preset("galerkin-darcy")(u, grid).shape == (1, 43 * 43, 1)
    assert preset("galerkin-darcy-inverse")(u, grid).shape == (1, 15 * 15, 1)


def test_autocast():
    model, grid = make(dtype=torch.float32), co.Grid.uniform(32, kind="periodic", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(smooth(grid.points), grid)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("coord_dim", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_compile_fullgraph(coord_dim):
    torch._dynamo.reset()
    options = {} if coord_dim == 1 else {"coarsening": 2.0, "decoder_lift": True}
    model = make(coord_dim, num_layers=1, **options)
    grid = co.Grid.uniform((16,) * coord_dim)
    u = smooth(grid.points)
    assert grid.weights.ndim == 1  # computed before: the first use of a cached property cannot be traced
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(u, grid), model(u, grid))


@pytest.mark.parametrize(
    "coord_dim, options, message",
    [
        (1, {"decoder": "wavelet"}, 'decoder must be "spectral", "pointwise" or "linear", was \'wavelet\''),
        (1, {"coarsening": 2.0}, "coord_dim must be 2 with coarsening, was 1"),
        (2, {"coarsening": 0.5}, "coarsening must be None or at least 1, was 0.5"),
        (2, {"coarse_output": True}, "coarse_output must be False without coarsening"),
        (
            2,
            {"middle": (4, 4)},
            r"middle must be None, or with coarsening 2 sizes of at least 1, was \(4, 4\)",
        ),
        (2, {"coarsening": 2.0, "middle": (4, 0)}, "middle must be None, or with coarsening 2 sizes"),
        (2, {"convolutions": "skip"}, 'convolutions must be "residual" or "plain", was \'skip\''),
        (1, {"num_layers": 0}, "num_layers must be at least 1, was 0"),
        (1, {"activation": "swoosh"}, "activation must be one of"),
    ],
)
def test_constructor_errors(coord_dim, options, message):
    with pytest.raises(ValueError, match=message):
        make(coord_dim, **options)


def test_forward_errors():
    grid, u = co.Grid.uniform(16, dtype=torch.float64), torch.ones(1, 16, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"u must have shape \(B, N, 1\), was \(1, 16, 2\)"):
        make()(u.expand(1, 16, 2), grid)
    with pytest.raises(ValueError, match=r"mesh must have points of shape \(16, 1\) .* was \(15, 1\)"):
        make()(u, co.Grid.uniform(15))
    with pytest.raises(ValueError, match="mesh must be a Grid for the spectral decoder, was PointCloud"):
        make()(u, co.PointCloud(grid.points))
    uneven = co.Grid(torch.linspace(0, 1, 16, dtype=torch.float64) ** 2)
    with pytest.raises(
        ValueError, match="mesh must be evenly spaced for the spectral decoder, was spaced from"
    ):
        make()(u, uneven)
    flat = co.Grid.uniform((4, 4), kind=("periodic", "endpoint"))
    with pytest.raises(ValueError, match='axes of kind "endpoint" or "cell" with coarsening, was "periodic"'):
        make(2, coarsening=2.0)(u, flat)
