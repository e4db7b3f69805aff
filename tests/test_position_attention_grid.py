"""Grid against grid: axis by axis, or the window of neighbours, against the dense formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from grid_helpers import F64, INF, PERIODS, SHAPES, assert_right, axes, dense, outer, positive
from helpers import assert_within_budget, draw

import continuum_ops as co
from continuum_ops import reference
from continuum_ops.ops import _grid_product, _position_attention_blocks
from continuum_ops.ops._position_attention_grid import grid_attention, serves

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
        monkeypatch.setattr(_position_attention_blocks, "BLOCK_SCORES", scores)
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


def test_gradcheck_without_the_kernels(monkeypatch):
    """On views by BLAS, as where the extension is not built; all sizes differ."""
    monkeypatch.setattr(_grid_product, "_compiled", lambda x: False)
    leaves, call = _problem(((2, 3), (5, 4)), weighted=True)
    assert torch.autograd.gradcheck(call, leaves)


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


@pytest.mark.slow
def test_memory_of_a_large_grid():
    """416 x 416 all to all: constants are kept, and one row is that of the dense formula."""
    grid = co.Grid.uniform((416, 416), dtype=torch.float32)
    value = draw((1, 1, 416 * 416, 4))
    value[..., 0] = 1.0
    out = grid_attention(grid, grid, value, torch.tensor([30.0]), grid.axis_weights)
    atol = 8 * torch.finfo(torch.float32).eps * value.abs().max().item()
    torch.testing.assert_close(out[..., 0], torch.ones(1, 1, 416 * 416), rtol=0, atol=atol)
    for row in (0, 100_000, 173_055):
        true, _ = dense(grid.points[row : row + 1], grid.points, value, torch.tensor([30.0]), grid.weights)
        torch.testing.assert_close(
            out[0, 0, row].double(), torch.from_numpy(true[0, 0, 0]), rtol=0, atol=4e-6
        )
