"""Grid against grid: the rule of the radius, dead keys, the registered operators and errors."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch
from grid_helpers import F64, INF, axes, dense, positive
from helpers import draw

import continuum_ops as co
from continuum_ops.mesh import product_weights
from continuum_ops.ops._position_attention_grid import grid_attention, serves

# --- the rule of the radius ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equidistant_neighbours_are_in_or_out_together(dtype):
    h = 3 / 64
    grid = co.Grid.uniform((21, 21), ((0, 20 * h), (0, 20 * h)), dtype=dtype)
    value = torch.eye(441, dtype=dtype)[None, None]
    for steps, count in ((1.0, 5), (math.sqrt(2.0), 9), (2.0, 13), (math.sqrt(5.0), 21)):
        p = grid_attention(grid, grid, value, torch.zeros(1, dtype=dtype), radius=steps * h)
        inner = p[0, 0].view(21, 21, 441)[3:-3, 3:-3]
        assert ((inner > 0).sum(-1) == count).all()


def test_quantile_radius_reaches_its_key():
    """Also where the radius was rounded to float32 and the grid is in float64."""
    query, key = co.Grid(*axes((9, 8), 0)), co.Grid(*axes((12, 11), 1))
    radius = co.quantile_radius(query, key, 13 / 131)  # on the 14th key
    value = torch.eye(132, dtype=torch.float32)[None, None]
    for r in (radius, radius.float()):
        p = grid_attention(query, key, value, torch.ones(1), radius=r)
        assert ((p[0, 0] > 0).sum(-1) == 14).all()


def test_no_key_within_the_radius():
    query, key = co.Grid(*axes((4, 5), 0)), co.Grid(*axes((3, 3), 1, offset=0.05))
    value, rate = draw((2, 1, 9, 2), F64).requires_grad_(), torch.ones(2, dtype=F64, requires_grad=True)
    radius = torch.full((20,), 0.01, dtype=F64)
    radius[7] = 5.0
    out, lse = grid_attention(query, key, value, rate, radius=radius, return_lse=True)
    empty = torch.arange(20) != 7
    assert (
        (out[:, :, empty] == 0).all() and (lse[:, :, empty] == -INF).all() and lse[:, :, 7].isfinite().all()
    )
    grads = torch.autograd.grad(out.sum() + lse.where(lse.isfinite(), 0.0).sum(), [value, rate])
    assert all(g.isfinite().all() for g in grads)
    grads = torch.autograd.grad(
        grid_attention(query, key, value, rate, radius=radius[0].item(), return_lse=True),
        [value, rate],
        [torch.ones_like(out), torch.ones_like(lse)],
    )
    assert all((g == 0).all() for g in grads)


def test_nan_is_seen_within_the_radius_only():
    grid = co.Grid.uniform((6, 6))
    value = draw((1, 1, 36, 3))
    value[0, 0, 14, 1], value[0, 0, 35, 2] = math.nan, -INF
    out = grid_attention(grid, grid, value, torch.ones(2), radius=0.21)
    near = (grid.points[14] - grid.points).square().sum(-1) <= 0.21**2
    corner = (grid.points[35] - grid.points).square().sum(-1) <= 0.21**2
    assert torch.equal(out[0, :, :, 1].isnan(), near.expand(2, -1))
    assert torch.equal(out[0, :, :, 2] == -INF, corner.expand(2, -1))
    assert out[..., 0].isfinite().all()


# --- dead keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [None, 0.5])
def test_keys_of_weight_zero_do_not_exist(radius):
    query, full = co.Grid(*axes((4, 5), 0)), axes((6, 7), 1)
    live = [torch.tensor([1, 2, 4]), torch.tensor([0, 1, 3, 4, 6])]
    w = [t.index_fill(0, i, 1.0) for t, i in zip((torch.zeros(6), torch.zeros(7)), live, strict=True)]
    w = [t.double().requires_grad_() for t in w]
    value = torch.full((2, 1, 6, 7, 3), math.nan, dtype=F64)
    rows, columns = live[0][:, None], live[1][None]
    part = draw((2, 1, 3, 5, 3), F64)
    value[:, :, rows, columns] = part
    value = value.flatten(2, 3).requires_grad_()
    rate = torch.tensor([3.0, 40.0], dtype=F64, requires_grad=True)
    out, lse = grid_attention(query, co.Grid(*full), value, rate, w, radius=radius, return_lse=True)
    small = co.Grid(*(t[i] for t, i in zip(full, live, strict=True)))
    true = dense(query.points, small.points, part.flatten(2, 3), rate, radius=radius)
    np.testing.assert_allclose(out.detach().numpy(), true[0].astype(float), rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse.detach().numpy(), true[1].astype(float), rtol=0, atol=1e-14)
    g = torch.ones_like(out)
    g[0, 0, 0] = math.nan  # a NaN that comes back must not reach dead keys either
    grads = torch.autograd.grad(out, [value, rate, *w], g)
    grad_value = grads[0].view(2, 6, 7, 3)
    dead = torch.ones(6, 7, dtype=torch.bool)
    dead[rows, columns] = False
    assert (grad_value[:, dead] == 0).all()
    assert grad_value[1, ~dead].isfinite().all()
    clean = torch.autograd.grad(
        grid_attention(query, co.Grid(*full), value, rate, w, radius=radius), [rate, *w], torch.ones_like(out)
    )
    assert all(t.isfinite().all() for t in clean)
    for t, i in zip(clean[1:], live, strict=True):
        assert (t[[k for k in range(len(t)) if k not in i]] == 0).all()


@pytest.mark.parametrize("radius", [None, 0.5])
def test_all_weights_zero(radius):
    grid = co.Grid(*axes((4, 5), 0))
    w = [torch.zeros(4, dtype=F64, requires_grad=True), torch.ones(5, dtype=F64, requires_grad=True)]
    value = torch.full((2, 1, 20, 3), math.nan, dtype=F64, requires_grad=True)
    rate = torch.tensor([3.0], dtype=F64, requires_grad=True)
    out, lse = grid_attention(grid, grid, value, rate, w, radius=radius, return_lse=True)
    assert (out == 0).all() and (lse == -INF).all()
    grads = torch.autograd.grad([out, lse], [value, rate, *w], [torch.ones_like(out), torch.ones_like(lse)])
    assert all((g == 0).all() for g in grads)


def test_weights_scaled_by_a_constant():
    grid = co.Grid(*axes((4, 5), 0))
    value, rate, w = draw((1, 1, 20, 2), F64), torch.tensor([3.0], dtype=F64), positive((4, 5), 2)
    for radius in (None, 0.4):
        a = grid_attention(grid, grid, value, rate, w, radius=radius, return_lse=True)
        scaled = [1e-200 * w[0], 1e100 * w[1]]
        b = grid_attention(grid, grid, value, rate, scaled, radius=radius, return_lse=True)
        torch.testing.assert_close(a[0], b[0], rtol=0, atol=1e-14)
        torch.testing.assert_close(a[1] - b[1], torch.full((1, 1, 20), 100 * math.log(10), dtype=F64))


@pytest.mark.parametrize("radius", [None, 0.5])
@pytest.mark.parametrize("shape", [(0, 1, 20, 2), (2, 1, 20, 0)])
def test_nothing_to_compute(shape, radius):
    grid = co.Grid(*axes((4, 5), 0))
    value = torch.zeros(shape, requires_grad=True)
    rate = torch.ones(3, requires_grad=True)
    out, lse = grid_attention(grid, grid, value, rate, radius=radius, return_lse=True)
    assert out.shape == (shape[0], 3, 20, shape[-1]) and lse.shape == (shape[0], 3, 20)
    assert lse.isfinite().all()
    grads = torch.autograd.grad(out.sum(), [value, rate])
    assert all((g == 0).all() for g in grads)


# --- contract ------------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [None, 0.5])
def test_same_bits_twice(radius):
    grid = co.Grid.uniform((9, 8), dtype=torch.float32)
    value, rate = draw((3, 1, 72, 5)).requires_grad_(), torch.tensor([3.0, 80.0], requires_grad=True)
    results = []
    for _ in range(5):
        out = grid_attention(grid, grid, value, rate, grid.axis_weights, radius=radius)
        results.append((out, *torch.autograd.grad(out.sum(), [value, rate])))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("radius", [None, 0.5])
def test_autocast_does_not_lower_the_computation(radius):
    grid = co.Grid.uniform((9, 8), dtype=torch.float32)
    value, rate = draw((2, 1, 72, 4)).requires_grad_(), torch.tensor([3.0, 80.0], requires_grad=True)
    expected = grid_attention(grid, grid, value, rate, radius=radius)
    grads = torch.autograd.grad(expected.square().sum(), [value, rate])
    with torch.autocast("cpu", torch.bfloat16):
        out = grid_attention(grid, grid, value, rate, radius=radius)
        inside = torch.autograd.grad(out.square().sum(), [value, rate])
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, inside, strict=True))


@pytest.mark.slow
def test_opcheck():
    grid = co.Grid(*axes((4, 5), 0))
    value, rate = draw((2, 1, 20, 3), F64).requires_grad_(), torch.tensor([3.0, 1.0], dtype=F64)
    matrices = [torch.rand(2, n, n, dtype=F64, requires_grad=True) for n in (4, 5)]
    args = (value, matrices, rate, positive((4, 5), 1))
    torch.library.opcheck(torch.ops.continuum_ops.grid_product.default, args)
    rate = rate.clone().requires_grad_()
    radius = torch.tensor(0.5, dtype=F64)
    lists = [[a.clone().requires_grad_() for a in grid.axes] for _ in range(2)]
    args = (value, *lists, rate, torch.rand(20, dtype=F64, requires_grad=True), radius, [INF, INF], 1e-16)
    torch.library.opcheck(torch.ops.continuum_ops.window_attention.default, args)


@pytest.mark.slow
@pytest.mark.parametrize("radius", [None, 0.5])
def test_compiles_as_one_graph(radius):
    grid = co.Grid.uniform((9, 8), dtype=torch.float32)
    value, rate = draw((2, 1, 72, 4)).requires_grad_(), torch.tensor([3.0, 80.0], requires_grad=True)

    def function(value, rate):
        return grid_attention(grid, grid, value, rate, grid.axis_weights, radius=radius, return_lse=True)

    compiled = torch.compile(function, fullgraph=True)
    for a, b in zip(function(value, rate), compiled(value, rate), strict=True):
        torch.testing.assert_close(a, b)
    grads = [
        torch.autograd.grad(f(value, rate)[0].square().sum(), [value, rate]) for f in (function, compiled)
    ]
    torch.testing.assert_close(*grads)


def test_what_is_served():
    grid, line = co.Grid(*axes((4, 5), 0)), co.Grid(*axes((6,), 0))
    points, w = grid.points, grid.weights
    assert serves(grid, grid, None, radius=None)
    assert serves(grid, grid, grid.axis_weights, radius=0.1)
    assert serves(grid, grid, w, radius=None) and serves(grid, grid, w.clone(), radius=0.1)
    assert not serves(grid, grid, w.clone(), radius=None)  # may be no product
    assert serves(line, line, torch.ones(6), radius=None)
    assert not serves(grid, points, None, radius=None) and not serves(points, grid, None, radius=None)
    assert not serves(grid, line, None, radius=None)
    assert not serves(grid, grid, w[None], radius=0.1)
    assert not serves(grid, grid, None, radius=torch.ones(2, 20))
    long = co.Grid.uniform((3000,))
    assert not serves(long, long, None, radius=None)  # its axis matrix would be N x N
    assert serves(long, long, None, radius=0.1)


@pytest.mark.parametrize("radius", [None, 0.5])
def test_bad_weights(radius):
    grid = co.Grid(*axes((4, 5), 0))
    value, rate = torch.zeros(1, 1, 20, 2), torch.ones(1)
    a, b = torch.ones(4), torch.ones(5)
    for weights, error, match in [
        ((a,), ValueError, "one tensor for each of 2 axes, got 1"),
        ((b, a), ValueError, r"weights\[0\] must have shape \(4,\), got \(5,\)"),
        ((a, b.long()), TypeError, r"weights\[1\] must be a floating-point Tensor, got torch.int64"),
        ((a, None), TypeError, r"weights\[1\] must be a floating-point Tensor, got NoneType"),
        ((a, b.to("meta")), ValueError, r"weights\[1\] must be on key_pos's device cpu, got meta"),
        ((a, -b), ValueError, r"weights.* must be >= 0 and not NaN, got a smallest value of -1"),
        ((a * math.nan, b), ValueError, "weights.* must be >= 0 and not NaN"),
        ((a * INF, b), ValueError, "weights.* must be >= 0 and finite, got inf"),
    ]:
        with pytest.raises(error, match=match):
            grid_attention(grid, grid, value, rate, weights, radius=radius)


@pytest.mark.parametrize("radius", [None, 0.5])
def test_bad_rate_and_radius(radius):
    grid = co.Grid(*axes((4, 5), 0))
    value = torch.zeros(1, 1, 20, 2)
    for rate in (torch.tensor([1.0, -1.0]), torch.tensor([math.nan])):
        with pytest.raises(ValueError, match="rate must be >= 0 and not NaN"):
            grid_attention(grid, grid, value, rate, radius=radius)
    if radius is not None:
        for bad in (-1.0, math.nan, torch.tensor([0.5] * 19 + [-0.1])):
            with pytest.raises(ValueError, match="radius must be >= 0 and not NaN"):
                grid_attention(grid, grid, value, torch.ones(1), radius=bad)


# --- which form serves ---------------------------------------------------------------------------


@pytest.mark.parametrize("point_kernel", [True, False])
@pytest.mark.parametrize("radius", [None, 0.4])
def test_the_public_function_chooses_a_form_and_gives_the_formula(monkeypatch, radius, point_kernel):
    """Windows only without the point kernel, products of axis matrices with it too; weights in each form."""
    module = importlib.import_module("continuum_ops.ops.position_attention")
    monkeypatch.setattr(module.direct, "KERNELS", point_kernel)
    used = []
    monkeypatch.setattr(
        module.grids, "grid_attention", lambda *a, **k: (used.append(1), grid_attention(*a, **k))[1]
    )
    query, key = co.Grid(*axes((4, 6), 1)), co.Grid(*axes((5, 3), 2))
    value, rate = draw((2, 15, 3), F64, 3), torch.tensor([1.0, 30.0], dtype=F64)
    weights = positive((5, 3), 4)
    out, lse = co.position_attention(query, key, value, rate, weights, radius=radius, return_lse=True)
    expected = dense(query.points, key.points, value[:, None], rate, product_weights(weights), radius=radius)
    for actual, true in zip((out, lse), expected, strict=True):
        np.testing.assert_allclose(actual, true.astype(float), rtol=1e-12, atol=1e-12)
    assert bool(used) == (radius is None or not point_kernel)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("form", ["grids", "windows", "radius", "points"])
def test_weights_of_axes_whose_product_float32_does_not_hold(monkeypatch, form, scale):
    """A constant factor leaves the output, and shifts lse by its logarithm."""
    module = importlib.import_module("continuum_ops.ops.position_attention")
    monkeypatch.setattr(module.direct, "KERNELS", form != "windows")
    query, key = co.Grid(*axes((4, 6), 1)), co.Grid(*axes((5, 3), 2))
    value, rate = draw((2, 15, 3), F64, 3).float(), torch.tensor([1.0, 30.0])
    plain = [w.float() for w in positive((5, 3), 4)]
    radius = 9.0 if form in ("windows", "radius") else None
    weights = [(w * scale).requires_grad_() for w in plain]
    at = query.points if form == "points" else query
    out, lse = co.position_attention(at, key, value, rate, weights, radius=radius, return_lse=True)
    product = product_weights([w.double() for w in plain])
    true_out, true_lse = dense(query.points, key.points, value.double()[:, None], rate.double(), product)
    np.testing.assert_allclose(out.detach(), true_out.astype(float), rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse.detach(), true_lse.astype(float) + 2 * math.log(scale), rtol=0, atol=1e-4)
    (grad,) = torch.autograd.grad(lse.sum(), weights[:1])
    assert grad.isfinite().all() and (grad * weights[0] > 0).all()


def test_no_samples_between_grids():
    """Derivatives and vmap of nothing are nothing."""
    grid, rate, none = co.Grid.uniform((4, 5)), torch.ones(1), torch.zeros(0, 20, 1)

    def attend(v):
        return co.position_attention(grid, grid, v, rate)

    assert torch.func.jvp(attend, (none,), (none,))[1].shape == (0, 1, 20, 1)
    assert torch.func.vmap(attend)(torch.zeros(3, 0, 20, 1)).shape == (3, 0, 1, 20, 1)
    value = none.clone().requires_grad_()
    (first,) = torch.autograd.grad(attend(value).square().sum(), value, create_graph=True)
    assert torch.autograd.grad(first.sum(), value)[0].shape == (0, 20, 1)
