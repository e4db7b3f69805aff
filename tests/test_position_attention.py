"""Values and derivatives of position attention against an independent computation in longer arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import draw, lse_dtype
from hypothesis import given
from hypothesis import strategies as st
from position_helpers import attend, check, exact, points, position_module, scene

import continuum_ops as co

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 15, 17, 127, 129]


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize(
    "n, m", [(a, b) for a in SIZES for b in SIZES if a + b in (2, 3, 30, 32, 144, 256, 258)]
)
def test_odd_lengths(path, dtype, n, m):
    x, y, v, rate = scene(n, m, 2, dtype=dtype, seed=n + m)
    check(x, y, v, rate, draw((m,), lse_dtype(dtype), positive=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=names)
@pytest.mark.parametrize("d", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["global", "weighted", "local", "periodic", "local periodic"])
def test_dimensions(path, dtype, d, kind):
    options = {}
    if "periodic" in kind:
        options["period"] = (1.0, 0.75, math.inf, 2.0, 1.0)[:d]
    if "local" in kind:
        options["radius"] = 0.2 * d
    w = draw((90,), lse_dtype(dtype), positive=True) if kind != "global" else None
    check(*scene(70, 90, d, dtype=dtype, seed=d), w, **options)


@pytest.mark.parametrize("rate", [0.0, 1e-3, 1.0, 1e2, 1e4, 1e5])
@pytest.mark.parametrize("same", [True, False], ids=["self", "cross"])
def test_rates(path, rate, same):
    x, y, v, _ = scene(60, 75, 2)
    x = y if same else x
    check(x, y, v, torch.tensor([rate, 3.0]), draw((75,), positive=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=names)
@pytest.mark.parametrize("offset", [4096.0, 1e5])
@pytest.mark.parametrize("kind", ["global", "local", "periodic"])
def test_coordinates_far_from_the_origin(path, dtype, offset, kind):
    options = {"global": {}, "local": {"radius": 0.3}, "periodic": {"period": (1.0, math.inf)}}[kind]
    x, y, v, rate = scene(50, 61, 2, dtype=dtype, offset=offset)
    check(x, y, v, rate, **options)


def test_expansion_would_cancel(path):
    """CASES 16: 512,695 and 512,804 are 109 apart; coincident points are 0 apart."""
    x = torch.tensor([[512_695.0]])
    y = torch.tensor([[512_804.0], [512_695.0], [512_695.0]])
    rate = torch.tensor([1.0 / 109**2])
    _, lse = attend(x, y, torch.zeros(1, 3, 1), rate)
    assert lse.item() == pytest.approx(math.log(2 + math.exp(-1)), abs=1e-6)
    result = check(x, y, draw((1, 3, 4)), rate)
    assert all(bool(t.isfinite().all()) for t in result.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=names)
def test_nothing_near(path, dtype):
    """rate d^2 of 1e5 and more for every key: the nearest decides, and nothing underflows to 0 / 0."""
    x, y, v, _ = scene(20, 30, 2, dtype=dtype)
    result = check(x, y + 3.0, v, torch.tensor([1e4, 1e5], dtype=dtype))
    assert bool(result["lse"].isfinite().all())
    assert bool((result["lse"] < -1e4).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("value_heads", [None, 1, 3])
@pytest.mark.parametrize("kind", ["shared", "per sample", "one per sample", "weights", "radius"])
def test_what_the_batch_shares(path, dtype, value_heads, kind):
    per_sample = kind == "per sample"
    x, y, v, rate = scene(
        33, 40, 2, batch=3, heads=3, value_heads=value_heads, dtype=dtype, per_sample=per_sample
    )
    acc = lse_dtype(dtype)
    w = draw((3, 40) if kind == "weights" else (40,), acc, positive=True)
    options = {"radius": 0.3 + 0.2 * points((3, 33), acc, 9)} if kind == "radius" else {}
    if kind == "one per sample":
        y = points((3, 40, 2), acc, 5)
    check(x, y, v, rate, w, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("channels", [1, 3, 15, 16, 17, 31, 33, 64, 65, 129, 146, 147])
def test_channels(path, dtype, channels):
    """CASES 17: sizes at which something inside switches."""
    check(
        *scene(37, 41, 2, batch=1, channels=channels, dtype=dtype),
        draw((41,), lse_dtype(dtype), positive=True),
    )


@pytest.mark.parametrize("batch, channels", [(5, 7), (8, 64), (3, 129)])
def test_columns_of_batch_and_channels(path, batch, channels):
    check(*scene(100, 130, 2, batch=batch, channels=channels))


@pytest.mark.parametrize("heads, dtype", [(5, torch.float32), (1, torch.float64)])
@pytest.mark.parametrize("radius", [None, 0.1])
@pytest.mark.parametrize("rate", [1.0, 2e4])
def test_many_points_are_reordered_and_tiles_are_skipped(path, heads, radius, rate, dtype):
    """More points than are taken as they come, in an order that says nothing about their places."""
    x, y, v, _ = scene(350, 450, 2, batch=1, heads=heads, dtype=dtype)
    rates = rate * torch.linspace(0.5, 1.5, heads, dtype=dtype)
    check(x, y, v, rates, draw((450,), dtype, positive=True), radius=radius)
    check(y, y, v, rates, radius=radius, period=(1.0, math.inf))


@pytest.mark.parametrize("d", [1, 3, 4])
def test_many_points_in_other_dimensions(path, d):
    x, y, v, _ = scene(300, 350, d, batch=1, channels=2)
    check(x, y, v, torch.tensor([30.0, 3e3]), radius=0.4)
    check(y, y, v, torch.tensor([30.0, 3e3]), period=(1.0,) * d)


def test_weights_from_softplus(path):
    """CASES 18: weights from a graph, (M,) and (B, M); only some inputs require gradients."""
    x, y, v, rate = scene(9, 11, 2, dtype=torch.float64)
    for shape in ((11,), (2, 11), (1,), ()):
        p = draw(shape, torch.float64, 4).requires_grad_()
        w = torch.nn.functional.softplus(p).expand(11 if len(shape) < 2 else shape)
        out, lse = attend(x, y, v, rate, w)
        g, gl = draw(out.shape, torch.float64, 5), draw(lse.shape, torch.float64, 6)
        (grad,) = torch.autograd.grad((out * g).sum() + (lse * gl).sum(), p)
        true = exact(x, y, v, rate, w, grad_out=g, grad_lse=gl)["weights"].astype(float)
        true = torch.from_numpy(true) * torch.sigmoid(p.detach())
        torch.testing.assert_close(grad, true.sum_to_size(p.shape), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wanted", range(5))
def test_one_gradient_alone(path, wanted):
    tensors = [*list(scene(40, 50, 2, dtype=torch.float64)), draw((50,), torch.float64, positive=True)]
    every = [t.clone().requires_grad_() for t in tensors]
    alone = [t.clone().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
    expected = torch.autograd.grad(attend(*every)[0].square().sum(), every)[wanted]
    (grad,) = torch.autograd.grad(attend(*alone)[0].square().sum(), alone[wanted])
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["global", "periodic", "local", "per sample", "value per head"])
def test_gradcheck(path, kind):
    x, y, v, rate = scene(
        3,
        4,
        2,
        channels=1,
        dtype=torch.float64,
        per_sample=kind == "per sample",
        value_heads=2 if kind == "value per head" else None,
    )
    rate = rate / 5
    w = draw((2, 4) if kind == "per sample" else (4,), torch.float64, positive=True) + 0.1
    options = {"periodic": {"period": (1.0, math.inf)}, "local": {"radius": 0.6}}.get(kind, {})
    leaves = [t.requires_grad_() for t in (x, y, v, rate, w)]

    def call(*args):
        return attend(*args, **options)

    assert bool(call(*leaves)[1].isfinite().all())
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_gradgradcheck_without_weights_and_of_some_inputs(path):
    x, y, v, rate = scene(4, 5, 1, channels=2, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (y, v)]
    assert torch.autograd.gradgradcheck(lambda y, v: attend(x, y, v, rate), leaves)
    assert torch.autograd.gradgradcheck(lambda y, v: attend(x, y, v, rate)[1], [*leaves[:1], v])


def test_third_derivatives_raise(path):
    x, y, v, rate = scene(3, 4, 2, dtype=torch.float64)
    rate.requires_grad_()
    out = co.position_attention(x, y, v, rate)
    (first,) = torch.autograd.grad(out.square().sum(), rate, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), rate, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivatives are not implemented"):
        torch.autograd.grad(second.sum(), rate)


@pytest.mark.parametrize("period", [None, (1.0, 1.0)])
def test_float64_positions_keep_small_differences(path, period):
    """Grid neighbours far from the origin, float32 values: equidistant ones are in or out together."""
    axis = 1000.0 + torch.arange(30, dtype=torch.float64) / 30
    x = torch.cartesian_prod(axis, axis)
    radius = 2 / 30  # a neighbour two steps away is exactly at the radius
    v = draw((1, 900, 2))
    _, lse = attend(x, x, v, torch.zeros(1), radius=radius, period=period)
    counts = lse.exp().round().reshape(30, 30)
    assert bool((counts[2:-2, 2:-2] == 13).all())
    assert counts[0, 0] == (13 if period else 6)
    check(x, x, v, torch.tensor([100.0, 1e4]), radius=radius, period=period)


def test_uneven_sampling(path):
    """CASES 30: f = sin 6t, a grid seven times denser on the left half; one global row at 0.5."""
    left, right = (
        torch.linspace(0, 0.5, 141, dtype=torch.float64),
        torch.linspace(0.5, 1, 21, dtype=torch.float64),
    )
    t = torch.cat([left, right[1:]])
    w = co.quadrature.trapezoid(t)
    fine = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    query, rate = torch.tensor([[0.5]], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)

    def row(points, weights):
        return co.position_attention(
            query, points[:, None], (6 * points).sin()[None, :, None], rate, weights
        ).item()

    true = row(fine, co.quadrature.trapezoid(fine))
    kernel = (-0.5 * (0.5 - fine) ** 2).exp()
    closed = torch.trapezoid(kernel * (6 * fine).sin(), fine) / torch.trapezoid(kernel, fine)
    assert true == pytest.approx(closed.item(), abs=1e-9)
    assert abs(row(t, w) - true) < 0.002
    assert 0.4 < abs(row(t, None) - true) < 0.6


@given(st.data())
def test_random_shapes(data):
    integer = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    dtype = data.draw(st.sampled_from(DTYPES))
    n, m, d, heads = integer(1, 140), integer(1, 140), integer(1, 4), integer(1, 3)
    acc = lse_dtype(dtype)
    value_heads = data.draw(st.sampled_from([None, 1, heads]))
    x, y, v, rate = scene(
        n,
        m,
        d,
        batch=integer(1, 3),
        heads=heads,
        channels=integer(1, 40),
        value_heads=value_heads,
        dtype=dtype,
        per_sample=data.draw(st.booleans()),
        seed=integer(0, 100),
        geometry=data.draw(st.sampled_from([acc, torch.float64])),
    )
    w = draw((m,), acc, seed=1, positive=True) if data.draw(st.booleans()) else None
    if w is not None and data.draw(st.booleans()):
        w[draw((m,), seed=2) > 0.5] = 0
    radius = data.draw(st.sampled_from([None, 0.0, 0.3, 10.0]))
    period = data.draw(st.sampled_from([None, (1.0, 0.7, math.inf, 1.0)[:d]]))
    check(x, y, v, rate, w, radius=radius, period=period)


def test_grid_is_its_points(path):
    grid = co.Grid.uniform((6, 5), dtype=torch.float32)
    other = co.Grid.uniform((4, 7), kind="periodic", dtype=torch.float32)
    v, rate = draw((2, 28, 3)), torch.tensor([5.0, 50.0])
    w = other.axis_weights
    product = (w[0][:, None] * w[1]).flatten()
    out, lse = attend(grid, other, v, rate, w)
    expected = exact(grid.points, other.points, v, rate, product)
    np.testing.assert_allclose(out, expected["out"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, expected["lse"], rtol=0, atol=1e-5)


def test_chunked_and_kernel_are_told_apart(path, monkeypatch):
    """The fixture `path` does what it says."""
    called = []
    original = position_module._attend
    monkeypatch.setattr(position_module, "_attend", lambda *a: called.append(1) or original(*a))
    co.position_attention(*scene(3, 4, 2), return_lse=True)  # plain calls ask the kernel directly
    assert called
    assert (original is torch.ops.continuum_ops.position_attention_chunked) == (path.name == "chunked")
