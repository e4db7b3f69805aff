"""What ViT-NO and FANO share: resolutions, options, padding, modes, smoothing, compile, autocast, errors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import patch_definition
import pytest
import torch
from helpers import draw
from patch_definition import drawn, order

import continuum_ops as co
from continuum_ops.models import FANO, Smoothing, ViTNO

MODELS = [ViTNO, FANO]
both = pytest.mark.parametrize("kind_of_model", MODELS)


def make(kind_of_model, coord_dim=2, *, channels=(1, 1), **options):
    torch.manual_seed(0)
    settings = {"num_patches": 2, "patch_size": 8, "modes": 3, "d_model": 8, "num_heads": 2, "num_layers": 2}
    settings |= {"scale": 8.0, "dtype": torch.float64, **options}
    model = kind_of_model(*channels, coord_dim, **settings)
    if model.final_spectral is not None:  # starts as 0, which would hide it
        torch.nn.init.normal_(model.final_spectral.weight)
    return model.eval()


def smooth(points):
    """(1, N, 1) samples of a function that is not periodic on the patches."""
    return (torch.sin(2 * math.pi * points).prod(-1) + torch.cos(3 * points[:, 0])).unsqueeze(-1)[None]


def on(model, n, kind, **options):
    """(*grid, C) output on a grid of n points an axis."""
    d = len(model.num_patches)
    grid = co.Grid.uniform((n,) * d, kind=kind)
    with torch.no_grad():
        return model(smooth(grid.points), grid, **options).view(*grid.shape, -1)


DEFINITIONS = [
    *((ViTNO, patch_definition.vitno, *c) for c in (((12,), (3,), (2,)), ((8, 12), (2, 3), (2, 2)))),
    *((FANO, patch_definition.fano, *c) for c in (((12,), (3,), (3,)), ((8, 15), (2, 3), (2, 3)))),
    (ViTNO, patch_definition.vitno, (4, 4, 8), (2, 1, 2), (1, 2, 2)),
    (FANO, patch_definition.fano, (4, 4, 8), (2, 1, 2), (1, 2, 2)),
]


@pytest.mark.parametrize(("kind_of_model", "definition", "shape", "num_patches", "modes"), DEFINITIONS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("weights", ["mesh", "equal", "tensor"])
def test_is_the_definition(kind_of_model, definition, shape, num_patches, modes, norm_first, weights):
    size = [n // p for n, p in zip(shape, num_patches, strict=True)]
    model = drawn(kind_of_model, num_patches, size, modes, norm_first=norm_first, final_spectral=2)
    grid = co.Grid.uniform(shape, [(0, 2)] * len(shape))  # endpoint: uneven weights
    u = draw((2, len(grid), 2), torch.float64)
    w = {
        "mesh": grid.weights,
        "equal": torch.ones(len(grid), dtype=torch.float64),
        "tensor": draw((len(grid),), torch.float64, positive=True),
    }[weights]
    out = model(u, grid, weights=w if weights == "tensor" else weights)
    w = (w / w.sum()).view(shape).numpy()
    for b in range(2):
        true = definition(model, u[b], grid, w, 2, 4.0)
        np.testing.assert_allclose(out[b].detach().numpy(), true, rtol=0, atol=1e-10)


@both
@pytest.mark.parametrize("periodic_extension", [False, True])
@pytest.mark.parametrize("weights", ["mesh", "equal"])
def test_shared_points_converge_when_the_grid_is_refined(kind_of_model, periodic_extension, weights):
    """52, 104, 208 and 416 in small: half-open grids keep the points, with order 1."""
    model = make(kind_of_model, periodic_extension=periodic_extension, final_spectral=5)
    outs = [on(model, n, "periodic", weights=weights) for n in (16, 32, 64, 128)]
    shared = [out[:: 2**i, :: 2**i] for i, out in enumerate(outs)]
    steps = [(a - b).abs().max().item() for a, b in itertools.pairwise(shared)]
    assert steps[0] > 1e-4
    assert order(steps[0], steps[1], 2) > 0.9 and order(steps[1], steps[2], 2) > 0.95


@both
@pytest.mark.parametrize("coord_dim", [1, 2, 3])
def test_cells_converge_with_order_two(kind_of_model, coord_dim):
    model = make(kind_of_model, coord_dim, final_spectral=5, patch_size=6)
    sizes = (12, 36, 108) if coord_dim < 3 else (12, 36)
    outs = [on(model, n, "cell") for n in sizes]
    coarse, middle = outs[0], outs[1][(slice(1, None, 3),) * coord_dim]
    first = (coarse - middle).abs().max().item()
    assert 1e-5 < first < 0.2 * outs[0].abs().max().item()
    if coord_dim < 3:
        second = (middle - outs[2][(slice(4, None, 9),) * coord_dim]).abs().max().item()
        assert order(first, second, 3) > 1.8


@both
def test_end_points_converge_away_from_the_edges_of_patches(kind_of_model):
    model = make(kind_of_model, 1, num_patches=4)
    places = np.array([0.1, 0.35, 0.62, 0.9])

    def at(n):
        return np.interp(places, np.linspace(0, 1, n), on(model, n, "endpoint")[:, 0].numpy())

    outs = [at(24 * k + 4) for k in (4, 16, 64)]
    coarse, fine = (np.abs(a - b).max() for a, b in itertools.pairwise(outs))
    assert coarse > 1e-3
    assert order(coarse, fine, 4) > 0.9


@both
def test_modes_that_the_coarser_grid_lacks_are_left_out(kind_of_model):
    """CASES 28: an error at the training patch; a trained model runs on a coarser one, and on finer ones."""
    with pytest.raises(ValueError, match=r"modes\[0\] must be at most 8 for patches of 16 points .* was 9"):
        make(kind_of_model, patch_size=16, modes=9)
    with pytest.raises(ValueError, match=r"modes\[1\] must be at most 9 for patches of 16 points .* was 10"):
        make(kind_of_model, patch_size=16, modes=(8, 10))
    model = make(kind_of_model, patch_size=16, modes=8, final_spectral=16)
    for n in (32, 16, 12, 8, 48, 64):
        assert on(model, n, "cell").isfinite().all(), n
    model.train()
    grid = co.Grid.uniform((16, 16), kind="cell")
    with pytest.raises(ValueError, match=r"modes\[0\] must be at most"):
        model(smooth(grid.points), grid)
    extended = make(kind_of_model, patch_size=16, modes=(16, 17), periodic_extension=True)
    assert on(extended.train(), 32, "cell").isfinite().all()


@both
@pytest.mark.parametrize("coord_dim", [1, 2, 3])
def test_other_shapes_and_every_option(kind_of_model, coord_dim):
    """Non-square grids and patches, batch, channels; every parameter has a gradient."""
    shape = (8, 6, 4)[:coord_dim]
    model = make(
        kind_of_model,
        coord_dim,
        channels=(2, 3),
        num_patches=(2, 1, 2)[:coord_dim],
        patch_size=(4, 6, 2)[:coord_dim],
        modes=(2, 2, 1)[:coord_dim],
        residual_weights=True,
        dropout=0.1,
        dim_feedforward=5,
        activation="silu",
        norm_first=True,
        final_spectral=(3, 2, 2)[:coord_dim],
        smoothing=("dirichlet", "periodic", "dirichlet")[:coord_dim],
    ).train()
    kind = ("endpoint", "periodic", "cell")[:coord_dim]
    grid = co.Grid.uniform(shape, kind=kind)
    u = draw((3, len(grid), 2), torch.float64)
    out = model(u, grid)
    assert out.shape == (3, len(grid), 3)
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0 or name.endswith("k_proj.bias"), name


@both
def test_gradcheck(kind_of_model):
    model = make(
        kind_of_model, 1, patch_size=4, modes=2, num_layers=1, final_spectral=2, smoothing="periodic"
    )
    grid = co.Grid.uniform(8, kind="periodic")
    u = draw((1, 8, 1), torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda u: model(u, grid), (u,))


@both
def test_residual_weights_start_as_the_identity(kind_of_model):
    plain, learned = make(kind_of_model), make(kind_of_model, residual_weights=True)
    missing = learned.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert len(missing) == 4 and all("residual" in name for name in missing)
    assert torch.equal(on(plain, 16, "cell"), on(learned, 16, "cell"))


@both
def test_final_layers(kind_of_model):
    """The spectral layer starts as 0; smoothing comes last."""
    plain = make(kind_of_model)
    torch.manual_seed(0)
    model = make(kind_of_model, final_spectral=4, smoothing="dirichlet", smoothing_eps=1e-2)
    model.load_state_dict(plain.state_dict(), strict=False)
    z = on(plain, 16, "cell")
    with torch.no_grad():
        z = model.final_spectral(z[None])
        true = Smoothing("dirichlet", 1e-2)(z, co.Grid.uniform((16, 16), kind="cell"))[0]
    torch.testing.assert_close(on(model, 16, "cell"), true, rtol=0, atol=1e-12)
    fresh = kind_of_model(1, 1, 1, num_patches=2, patch_size=8, modes=2, d_model=8, final_spectral=3)
    assert not fresh.final_spectral.weight.any()


@both
def test_units_of_the_domain_do_not_change_the_scores(kind_of_model):
    """Weights are divided by their sum: without coordinates in the input a scaled domain gives the same."""
    model = make(kind_of_model)
    u = draw((1, 256, 1), torch.float64)
    columns = model.lift.weight
    with torch.no_grad():  # the coordinates' columns
        (columns[..., 1:, :, :] if kind_of_model is ViTNO else columns[:, 1:]).zero_()
    for kind in ("cell", "endpoint"):
        one = model(u, co.Grid.uniform((16, 16), kind=kind), weights="mesh")
        two = model(u, co.Grid.uniform((16, 16), ((0, 5), (-1, 1)), kind=kind), weights="mesh")
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    assert model(u, co.Grid.uniform((16, 16)), weights=torch.zeros(256)).isfinite().all()


@both
def test_padding_is_for_those_who_ask(kind_of_model):
    grid = co.Grid.uniform((15, 16), kind="cell")
    u = smooth(grid.points)
    message = r"mesh must have a multiple of 2 points along axis 0 .* got 15 of the grid \(15, 16\)"
    with pytest.raises(ValueError, match=message):
        make(kind_of_model)(u, grid)
    model = make(kind_of_model, pad=True, final_spectral=3)
    # By hand: one more row that repeats the last u, one spacing further, of weight 0.
    axis = torch.cat([grid.axes[0], grid.axes[0][-1:] + 1 / 15])
    longer = co.Grid(axis, grid.axes[1], kind="cell")
    w = torch.full((16, 16), 1 / 240, dtype=torch.float64)
    w[-1] = 0
    rows = u.view(1, 15, 16, 1)
    rows = torch.cat([rows, rows[:, -1:]], 1)
    last, model.final_spectral = model.final_spectral, None
    true = model(rows.view(1, -1, 1), longer, weights=w.flatten()).view(1, 16, 16, 1)[:, :15]
    model.final_spectral = last
    for weights in ("mesh", "equal"):
        out = model(u, grid, weights=weights).view(1, 15, 16, 1)
        torch.testing.assert_close(out, last(true), rtol=0, atol=1e-11)
    # A grid that the patches divide is not touched.
    even = on(make(kind_of_model, pad=True), 16, "cell")
    assert torch.equal(even, on(make(kind_of_model), 16, "cell"))


@both
def test_padding_a_grid_with_fewer_points_than_patches(kind_of_model):
    model = make(kind_of_model, 1, num_patches=4, pad=True)
    for n in (1, 3, 5, 9):
        grid = co.Grid.uniform(n, kind="cell")
        assert model(smooth(grid.points), grid).shape == (1, n, 1)


@both
@pytest.mark.parametrize("n", [416, 85])
def test_autocast_transforms_in_float32(kind_of_model, n):
    """CASES 26: bfloat16 autocast on grids that are no powers of two."""
    patches = {416: 13, 85: 5}[n]
    options = {"num_patches": patches, "patch_size": n // patches, "num_layers": 1, "dtype": torch.float32}
    model = make(kind_of_model, 1, final_spectral=5, smoothing="dirichlet", **options)
    grid = co.Grid.uniform(n, kind="cell", dtype=torch.float32)
    u = smooth(grid.points)
    true = model(u, grid)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(u, grid)
        assert model.final_spectral(u.view(1, n, 1)).dtype == torch.bfloat16 or u.dtype == torch.float32
    torch.testing.assert_close(out.float(), true, rtol=0, atol=0.05 * true.abs().max().item())


@both
def test_compile_fullgraph(kind_of_model):
    model = make(kind_of_model, num_layers=1, final_spectral=3, dtype=torch.float32)
    grid = co.Grid.uniform((16, 16), kind="cell", dtype=torch.float32)
    u = smooth(grid.points)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(u, grid), model(u, grid), rtol=1e-4, atol=1e-5)


@both
def test_state_dict_and_meta_device(kind_of_model):
    model, other = make(kind_of_model, final_spectral=3), make(kind_of_model, final_spectral=3)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    other.load_state_dict(model.state_dict())
    assert torch.equal(on(other, 16, "cell"), on(model, 16, "cell"))
    assert next(make(kind_of_model, device="meta").parameters()).is_meta


@both
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 9}, "d_model must be divisible by num_heads, was 9 with num_heads 2"),
        ({"num_layers": 0}, "num_layers must be at least 1, was 0"),
        ({"coord_dim": 4}, "coord_dim must be 1, 2 or 3, was 4"),
        ({"num_patches": (2, 2, 2)}, "num_patches must be one number for each of 2 axes"),
        ({"modes": 0}, "modes must be at least 1, got 0"),
        ({"modes": 9, "periodic_extension": True}, r"modes\[0\] must be at most 4 for patches of 4 points"),
        ({"dropout": 1.5}, "dropout must be a probability between 0 and 1, was 1.5"),
        ({"activation": "elu"}, "activation must be one of"),
        ({"norm_residual": True}, "norm_first must be True with norm_residual, was False"),
        ({"smoothing": "neumann"}, 'boundary must be "periodic" or "dirichlet"'),
        ({"smoothing": ("periodic",) * 3}, "smoothing must be one name or one per axis of 2"),
        ({"final_spectral": 0}, "final_spectral must be at least 1, got 0"),
    ],
)
def test_constructor_errors(kind_of_model, options, message):
    settings = {"in_channels": 1, "out_channels": 1, "coord_dim": 2, "num_patches": 2, "patch_size": 4}
    settings |= {"modes": 2, "d_model": 8, "num_heads": 2, **options}
    with pytest.raises(ValueError, match=message):
        kind_of_model(**settings)


@both
def test_call_errors(kind_of_model):
    model = make(kind_of_model)
    grid = co.Grid.uniform((16, 16), kind="cell")
    u = smooth(grid.points)
    with pytest.raises(TypeError, match="mesh must be a Grid, was PointCloud; patches need a tensor-product"):
        model(u, co.PointCloud(grid.points))
    with pytest.raises(TypeError, match="mesh must be a Grid, was int"):
        model(u, 16)
    with pytest.raises(ValueError, match=r"u must have shape \(B, N, 1\), was \(1, 16, 16, 1\); the axes of"):
        model(u.view(1, 16, 16, 1), grid)
    with pytest.raises(ValueError, match="mesh must have 2 axes, had 1"):
        model(u, co.Grid.uniform(256, kind="cell"))
    with pytest.raises(ValueError, match=r"mesh must have the 240 points of u, had \(16, 16\)"):
        model(u[:, :240], grid)
    with pytest.raises(
        ValueError, match=r"u must have the dtype of the parameters, torch\.float64, was torch"
    ):
        model(u.float(), grid)
    with pytest.raises(ValueError, match=r"weights must be .mesh., .equal. or a tensor, was 'volume'"):
        model(u, grid, weights="volume")
    with pytest.raises(ValueError, match=r"weights must have shape \(256,\) for u"):
        model(u, grid, weights=torch.ones(16, 16))
    with pytest.raises(TypeError, match=r"weights must be .mesh., .equal. or a tensor, was list"):
        model(u, grid, weights=[1.0])
    axis = torch.linspace(0, 1, 16).double() ** 2
    with pytest.raises(ValueError, match=r"mesh must be evenly spaced for .*, was spaced from"):
        model(u, co.Grid(axis, grid.axes[1]))
