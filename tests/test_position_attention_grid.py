"""Grid against grid: axis by axis, or the window of neighbours, against the dense formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import assert_within_budget, draw
from torch import Tensor

import continuum_ops as co
from continuum_ops import reference
from continuum_ops.ops import _grid_product, _position_attention_window
from continuum_ops.ops._position_attention_grid import grid_attention, serves

F64 = torch.float64
INF = math.inf
SHAPES = [((7,), (5,)), ((4, 6), (5, 3)), ((3, 2, 4), (2, 5, 3))]
PERIODS = {1: [1.1], 2: [1.3, INF], 3: [INF, 1.1, 0.9]}


def axes(shape, seed, dtype=F64, offset=0.0) -> list[Tensor]:
    """Uneven axes on [0, 1) + offset."""
    generator = torch.Generator().manual_seed(seed)
    steps = [torch.rand(n, dtype=F64, generator=generator) + 0.1 for n in shape]
    return [(offset + s.cumsum(0) / s.sum() * 0.9).to(dtype) for s in steps]


def positive(shape, seed) -> list[Tensor]:
    return [draw((n,), F64, seed + i).abs() + 0.1 for i, n in enumerate(shape)]


def outer(vectors) -> Tensor:
    product = vectors[0]
    for w in vectors[1:]:
        product = (product[:, None] * w).flatten()
    return product


def dense(query, key, value, rate, weights=None, *, radius=None, period=None):
    """The formula in numpy: out (B, H, N, C) and lse (B, H, N); in long arithmetic for float64 values."""
    real = np.longdouble if value.dtype == F64 else np.float64
    x, y, v, r = (t.detach().double().numpy().astype(real) for t in (query, key, value, rate))
    difference = x[:, None] - y[None]
    if period is not None:
        for axis, length in enumerate(period):
            if math.isfinite(length):
                difference[..., axis] -= length * np.rint(difference[..., axis] / length)
    d2 = (difference**2).sum(-1)
    w = np.ones(len(y), real) if weights is None else weights.detach().double().numpy().astype(real)
    keep = np.broadcast_to(w > 0, d2.shape)
    if radius is not None:
        reach = np.asarray(radius, real)
        reach = reach[:, None] if reach.ndim else reach
        keep = keep & (d2 <= reach**2 * (1 + 8 * np.finfo(np.float64).eps))
    v = np.where(w[:, None] > 0, v, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        logits = np.where(keep, -r[:, None, None] * d2 + np.log(w), -np.inf)
        top = logits.max(-1, keepdims=True)
        top = np.where(np.isinf(top), 0, top)
        e = np.exp(logits - top)
        total = e.sum(-1, keepdims=True)
        lse = np.where(total > 0, top + np.log(total), -np.inf)[..., 0]
        p = e / np.where(total > 0, total, 1)
    out = p @ v
    return out, np.broadcast_to(lse, out.shape[:-1])


def assert_right(result, true, rough, value) -> None:
    """Budget: twice the error of the dense reference in the dtype of the values, or 8 eps."""
    for what, actual, exact, plain in zip(("out", "lse"), result, true, rough, strict=True):
        finite = np.isfinite(exact)
        error = float(np.abs(plain.double().numpy()[finite] - exact[finite]).max(initial=0))
        size = max(1.0, np.abs(exact[np.isfinite(exact)]).max(initial=0))
        size = size if what == "lse" else float(value.double().nan_to_num().abs().max())
        assert_within_budget(actual, np.asarray(exact, np.float64), error, size, what)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("radius", [None, 0.5, "each"])
@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
def test_values(shapes, periodic, radius, weighted, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    query, key = (co.Grid(*axes(s, i, wide)) for i, s in enumerate(shapes))
    w = [t.to(wide) for t in positive(shapes[1], 5)] if weighted else None
    if radius == "each":
        radius = draw((len(query),), F64, 3).abs() * 0.3
    period = PERIODS[len(shapes[0])] if periodic else None
    value, rate = draw((2, 1, len(key), 3), dtype), torch.tensor([0.0, 7.0, 400.0], dtype=wide)
    options = {"radius": radius, "period": period}
    result = grid_attention(query, key, value, rate, w, return_lse=True, **options)
    assert result[0].dtype == dtype and result[1].dtype == wide
    flat = None if w is None else outer(w)
    true = dense(query.points, key.points, value, rate, flat, **options)
    rough = reference.position_attention(
        query.points, key.points, value, rate, flat, return_lse=True, **options
    )
    assert_right(result, true, (rough[0].to(dtype), rough[1]), value)


@pytest.mark.parametrize("kind", ["endpoint", "periodic", "cell"])
@pytest.mark.parametrize("radius", [None, 0.3])
def test_kinds_with_their_own_weights(kind, radius):
    query, key = co.Grid.uniform((5, 6), kind=kind), co.Grid.uniform((8, 4), kind=kind)
    period = list(key.period)
    value, rate = draw((2, 2, 32, 3), F64), torch.tensor([3.0, 50.0], dtype=F64)
    options = {"radius": radius, "period": period}
    true = dense(query.points, key.points, value, rate, key.weights, **options)
    for weights in (key.axis_weights, key.weights):  # the grid's own weights are known to be a product
        assert serves(query, key, weights, radius=radius)
        out, lse = grid_attention(query, key, value, rate, weights, return_lse=True, **options)
        np.testing.assert_allclose(out.numpy(), true[0].astype(float), rtol=0, atol=1e-14)
        np.testing.assert_allclose(lse.numpy(), true[1].astype(float), rtol=0, atol=1e-14)


@pytest.mark.parametrize("radius", [None, 0.25])
@pytest.mark.parametrize("rate", [0.0, 1.0, 1e3, 1e5])
@pytest.mark.parametrize("offset", [0.0, 4096.0])
def test_rates_and_offsets_in_float32(rate, offset, radius):
    key = co.Grid(*axes((17, 15), 1, torch.float32, offset))
    query = co.Grid(*axes((9, 16), 2, torch.float32, offset))
    value, rates = draw((2, 1, len(key), 5)), torch.tensor([rate])
    result = grid_attention(query, key, value, rates, radius=radius, return_lse=True)
    true = dense(query.points, key.points, value, rates, radius=radius)
    args = (query.points, key.points, value, rates)
    rough = reference.position_attention(*args, radius=radius, return_lse=True)
    assert_right(result, true, rough, value)


def test_far_coordinates_are_subtracted_first():
    """512,695 and 512,804 are 109 apart in float32; coincident points are at distance 0."""
    key = co.Grid(torch.tensor([512_695.0, 512_804.0]), torch.tensor([512_695.0, 512_804.0]))
    value = torch.tensor([1.0, 2.0, 3.0, 4.0])[None, None, :, None]
    rate = torch.tensor([math.log(2.0) / 109**2])  # one step along an axis halves a term
    expected = torch.tensor([(4 + 2 * 2 + 2 * 3 + 4) / 9, (2 + 4 * 2 + 3 + 2 * 4) / 9])
    for radius in (None, 200.0):
        out, lse = grid_attention(key, key, value, rate, radius=radius, return_lse=True)
        torch.testing.assert_close(out[0, 0, :2, 0], expected, rtol=2e-6, atol=0)
        torch.testing.assert_close(lse, torch.full((1, 1, 4), math.log(2.25)), rtol=2e-6, atol=0)
    near = grid_attention(key, key, value, rate, radius=0.0)
    assert torch.equal(near, value)


def test_uneven_sampling():
    """One row at 0.5 over sin 6t: weights undo a grid that is seven times denser on its left half."""
    t = torch.cat([torch.linspace(0, 0.5, 701, dtype=F64)[:-1], torch.linspace(0.5, 1, 101, dtype=F64)])
    fine = torch.linspace(0, 1, 20_001, dtype=F64)
    rate = torch.tensor([1.0], dtype=F64)
    g = torch.exp(-((fine - 0.5) ** 2))
    true = (torch.trapezoid(g * torch.sin(6 * fine), fine) / torch.trapezoid(g, fine)).item()
    query, key = co.Grid(torch.tensor([0.5, 2.0], dtype=F64)), co.Grid(t)
    value = torch.sin(6 * t)[None, None, :, None]
    for radius in (None, 10.0):
        weighted = grid_attention(query, key, value, rate, key.weights, radius=radius)[0, 0, 0, 0].item()
        plain = grid_attention(query, key, value, rate, radius=radius)[0, 0, 0, 0].item()
        assert abs(weighted - true) < 0.002
        assert abs(plain - true) > 0.4


def test_shared_and_own_values_strided():
    """Values of each head in (B, M, H, C) storage, expanded over the batch."""
    query, key = co.Grid(*axes((4, 6), 0)), co.Grid(*axes((5, 3), 1))
    value = draw((1, 15, 3, 2), F64).transpose(1, 2).expand(4, -1, -1, -1)
    rate = torch.tensor([1.0, 5.0, 30.0], dtype=F64)
    for radius in (None, 0.5):
        out = grid_attention(query, key, value, rate, radius=radius)
        expected, _ = dense(query.points, key.points, value, rate, radius=radius)
        np.testing.assert_allclose(out.numpy(), expected.astype(float), rtol=0, atol=1e-14)


@pytest.mark.parametrize("radius", [None, 0.5])
def test_the_order_and_the_blocks_do_not_matter(monkeypatch, radius):
    """Axes that grow and shrink; one sample at a time or several; windows of one query or of many."""
    shapes = ((2, 9, 5), (7, 3, 4))
    query, key = (co.Grid(*axes(s, i)) for i, s in enumerate(shapes))
    value, rate = draw((5, 1, len(key), 3), F64), torch.tensor([2.0, 30.0], dtype=F64)
    expected, _ = dense(query.points, key.points, value, rate, radius=radius)
    for block, scores in ((1, 1), (700, 1000), (2**20, 2**22)):
        monkeypatch.setattr(_grid_product, "BLOCK_CPU", block)
        monkeypatch.setattr(_position_attention_window, "BLOCK_SCORES", scores)
        out = grid_attention(query, key, value, rate, radius=radius)
        np.testing.assert_allclose(out.numpy(), expected.astype(float), rtol=0, atol=1e-14)


def test_axis_order_has_the_least_work():
    import itertools

    for seed in range(20):
        sizes = torch.randint(1, 30, (4, 2), generator=torch.Generator().manual_seed(seed)).tolist()
        matrices = [torch.empty(1, m, n) for m, n in sizes]

        def cost(order, sizes=sizes):
            now, total = math.prod(n for _, n in sizes), 0
            for m, n in (sizes[i] for i in order):
                total += now * m
                now = now // n * m
            return total

        best = min(map(cost, itertools.permutations(range(4))))
        assert cost(_grid_product.axis_order(matrices)) == best


@pytest.mark.parametrize("period", [0.7, 1.0, 2.5, 30.0])
@pytest.mark.parametrize("offset", [-7.3, 0.0, 4096.0])
@pytest.mark.parametrize("radius", [0.0, 0.05, 0.2, 0.36, 3.0, INF])
def test_windows_of_a_periodic_axis(period, offset, radius):
    """Keys outside [0, period), more than one period of them, queries elsewhere."""
    query, key = co.Grid(axes((40,), 3)[0] - 2.037), co.Grid(axes((33,), 4, offset=offset)[0])
    value, rate = draw((1, 1, 33, 2), F64), torch.tensor([3.0], dtype=F64)
    options = {"radius": radius, "period": [period]}
    result = grid_attention(query, key, value, rate, return_lse=True, **options)
    true = dense(query.points, key.points, value, rate, **options)
    for actual, expected in zip(result, true, strict=True):
        np.testing.assert_allclose(actual.numpy(), expected.astype(float), rtol=0, atol=1e-9)


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


# --- derivatives ---------------------------------------------------------------------------------


def _problem(shapes, weighted, heads=1):
    leaves = [
        draw((2, heads, math.prod(shapes[1]), 2), F64),
        torch.tensor([0.5, 7.0], dtype=F64),
        *axes(shapes[0], 0),
        *axes(shapes[1], 1),
        *(positive(shapes[1], 5) if weighted else []),
    ]
    d = len(shapes[0])

    def call(value, rate, *rest, **options):
        query, key = co.Grid(*rest[:d]), co.Grid(*rest[d : 2 * d])
        w = list(rest[2 * d :]) if weighted else None
        return grid_attention(query, key, value, rate, w, return_lse=True, **options)

    return [t.requires_grad_() for t in leaves], call


@pytest.mark.parametrize("radius", [None, 0.7])
@pytest.mark.parametrize("shapes", [((3,), (4,)), ((2, 3), (3, 2)), ((2, 1, 2), (1, 2, 2))])
def test_gradcheck_and_gradgradcheck(shapes, radius):
    shapes = tuple(tuple(max(2, n) for n in s) for s in shapes)
    leaves, call = _problem(shapes, weighted=True, heads=2)
    period = PERIODS[len(shapes[0])]
    fast = len(shapes[0]) == 3

    def function(*tensors):
        return call(*tensors, radius=radius, period=period)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=fast)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("radius", [None, 0.4, "each"])
@pytest.mark.parametrize("heads", [1, 3])
def test_gradients_within_budget(dtype, radius, heads):
    shapes = ((7, 9), (8, 6))
    query, key, w = axes(shapes[0], 0, dtype), axes(shapes[1], 1, dtype), positive(shapes[1], 4)
    if radius == "each":
        radius = draw((63,), F64, 3).abs() * 0.3 + 0.15
    leaves = [draw((2, heads, 48, 3), dtype), torch.tensor([0.5, 9.0, 60.0], dtype=dtype)]
    leaves += [*query, *key, *(t.to(dtype) for t in w)]
    grad_out, grad_lse = draw((2, 3, 63, 3), dtype, 8), draw((2, 3, 63), dtype, 9)

    def through_grids(value, rate, *rest):
        grids = co.Grid(*rest[:2]), co.Grid(*rest[2:4])
        return grid_attention(*grids, value, rate, rest[4:], radius=radius, return_lse=True)

    def through_points(value, rate, *rest):
        x, y = (
            torch.stack(torch.meshgrid(*a, indexing="ij"), -1).flatten(0, 1) for a in (rest[:2], rest[2:4])
        )
        r = radius
        return reference.position_attention(x, y, value, rate, outer(rest[4:]), radius=r, return_lse=True)

    def gradients(function, dtype):
        inputs = [t.detach().to(dtype).requires_grad_() for t in leaves]
        results = [t.where(t.isfinite(), 0.0) for t in function(*inputs)]
        return torch.autograd.grad(results, inputs, [grad_out.to(dtype), grad_lse.to(dtype)])

    true = gradients(through_points, F64)
    rough = gradients(through_points, dtype)
    for i, (actual, exact, plain) in enumerate(
        zip(gradients(through_grids, dtype), true, rough, strict=True)
    ):
        error = (plain.double() - exact).abs().max().item() if dtype != F64 else 0.0
        # In float64 the oracle has an error of its own: sums of a few hundred terms.
        size = exact.abs().max().item() * (1 if dtype != F64 else 8)
        assert_within_budget(actual, exact.numpy(), error, size, f"gradient {i}")


@pytest.mark.parametrize("radius", [None, 0.5])
def test_only_what_requires_a_gradient(radius):
    grid = co.Grid(*axes((4, 5), 0))
    value, rate = draw((2, 1, 20, 2), F64), torch.tensor([3.0, 1.0], dtype=F64)
    expected = torch.autograd.grad(
        reference.position_attention(
            grid.points, grid.points, value, (r := rate.clone().requires_grad_()), radius=radius
        ).sum(),
        r,
    )[0]
    leaf = rate.clone().requires_grad_()
    out = grid_attention(grid, grid, value, leaf, radius=radius)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), leaf)[0], expected, rtol=1e-12, atol=1e-13)
    leaf = value.clone().requires_grad_()
    out = grid_attention(grid, grid, leaf, rate, radius=radius)
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    ones = grid_attention(grid, grid, torch.eye(20, dtype=F64)[None, None], rate, radius=radius)
    torch.testing.assert_close(grad, ones.sum((1, 2))[:, None, :, None].expand(2, 1, 20, 2))


def test_third_derivatives():
    """Axis by axis they exist; within a radius they raise."""
    leaves, call = _problem(((3, 2), (2, 3)), weighted=False)
    rate = leaves[1]

    def third(**options):
        total = call(*leaves, **options)[0].square().sum()
        for _ in range(3):
            (total,) = torch.autograd.grad(total.sum(), rate, create_graph=True)
        return total

    d2 = {}

    def by_points(rate):
        x, y = (
            torch.stack(torch.meshgrid(*a, indexing="ij"), -1).flatten(0, 1)
            for a in (leaves[2:4], leaves[4:6])
        )
        return reference.position_attention(x, y, leaves[0], rate)

    total = by_points(rate).square().sum()
    for _ in range(3):
        (total,) = torch.autograd.grad(total.sum(), rate, create_graph=True)
    d2["expected"] = total
    torch.testing.assert_close(third(), d2["expected"], rtol=1e-10, atol=1e-12)
    with pytest.raises(RuntimeError, match="third derivatives are not implemented"):
        third(radius=0.9)


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


@pytest.mark.slow
def test_memory_of_a_large_grid():
    """416 x 416 all to all: constants are kept, and one row is that of the dense formula."""
    grid = co.Grid.uniform((416, 416), dtype=torch.float32)
    value = draw((1, 1, 416 * 416, 4))
    value[..., 0] = 1.0
    out = grid_attention(grid, grid, value, torch.tensor([30.0]), grid.axis_weights)
    torch.testing.assert_close(out[..., 0], torch.ones(1, 1, 416 * 416), rtol=0, atol=4e-7)
    for row in (0, 100_000, 173_055):
        true, _ = dense(grid.points[row : row + 1], grid.points, value, torch.tensor([30.0]), grid.weights)
        torch.testing.assert_close(
            out[0, 0, row].double(), torch.from_numpy(true[0, 0, 0]), rtol=0, atol=4e-6
        )
