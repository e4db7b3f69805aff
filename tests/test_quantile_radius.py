"""Quantile radius against numpy's quantile of the dense distances, and closed forms."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch
from helpers import draw

import continuum_ops as co
from continuum_ops import reference
from continuum_ops.ops.quantile_radius import _select_device

module = importlib.import_module("continuum_ops.ops.quantile_radius")
F64 = torch.float64
INF = math.inf


def points(n, d, seed=0, dtype=F64, batch=()) -> torch.Tensor:
    return torch.rand(*batch, n, d, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def dense(x, y, quantile, period=None):
    x, y = (t.double().numpy().astype(np.longdouble) for t in (x, y))
    difference = x[..., :, None, :] - y[..., None, :, :]
    for axis, length in enumerate(period or ()):
        if math.isfinite(length):
            difference[..., axis] -= length * np.rint(difference[..., axis] / length)
    distance = np.sqrt((difference**2).sum(-1))
    return np.quantile(distance, np.longdouble(quantile), axis=-1).astype(float)


@pytest.mark.parametrize("quantile", [0, 0.0, 0.02, 1 / 3, 0.5, 0.987, 1.0, 1])
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
def test_values(quantile, d, dtype):
    x, y = points(37, d, 0, dtype), points(101, d, 1, dtype)
    radius = co.quantile_radius(x, y, quantile)
    assert radius.dtype == torch.promote_types(dtype, torch.float32) and radius.shape == (37,)
    eps = torch.finfo(radius.dtype).eps
    np.testing.assert_allclose(radius.numpy(), dense(x, y, quantile), rtol=8 * eps, atol=0)
    wide = (t.to(radius.dtype) for t in (x, y))
    torch.testing.assert_close(
        radius, reference.quantile_radius(*wide, quantile), rtol=100 * eps, atol=100 * eps
    )


@pytest.mark.parametrize("period", [[1.0, 1.0], [0.3, INF], [INF, INF]])
def test_periodic(period):
    x, y = points(40, 2, 0) * 3 - 1, points(50, 2, 1)
    for quantile in (0.0, 0.21, 0.9):
        radius = co.quantile_radius(x, y, quantile, period=period)
        np.testing.assert_allclose(radius.numpy(), dense(x, y, quantile, period), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("batch", [((3,), (3,)), ((3,), ()), ((), (3,)), ((0,), ()), ((1,), (1,))])
def test_batches(batch):
    x, y = points(11, 2, 0, batch=batch[0]), points(13, 2, 1, batch=batch[1])
    radius = co.quantile_radius(x, y, 0.3)
    assert radius.shape == (*torch.broadcast_shapes(*batch), 11)
    np.testing.assert_allclose(radius.numpy(), dense(x, y, 0.3), rtol=1e-14, atol=0)


def test_meshes():
    grid, cloud = co.Grid.uniform((5, 7)), co.PointCloud(points(20, 2))
    np.testing.assert_allclose(
        co.quantile_radius(grid, cloud, 0.1).numpy(), dense(grid.points, cloud.points, 0.1), rtol=1e-14
    )
    assert torch.equal(
        co.quantile_radius(grid, cloud, 0.1), co.quantile_radius(grid.points, cloud.points, 0.1)
    )


def test_closed_form():
    """On n evenly spaced points the sorted distances from the left end are their own indices."""
    x = torch.linspace(0, 1, 11, dtype=F64)[:, None]
    assert co.quantile_radius(x[:1], x, 0.25).item() == pytest.approx(0.25, abs=1e-15)
    assert co.quantile_radius(x[5:6], x, 1.0).item() == pytest.approx(0.5, abs=1e-15)
    assert co.quantile_radius(x[5:6], x, 0.1).item() == pytest.approx(0.1, abs=1e-15)
    assert co.quantile_radius(x, x[3:4], 0.7).tolist() == pytest.approx([abs(i - 3) / 10 for i in range(11)])


def test_far_and_coincident_points():
    x = torch.tensor([[512_695.0, 0.0]])
    y = torch.tensor([[512_804.0, 0.0], [512_695.0, 0.0]])
    assert co.quantile_radius(x, y, 1.0).item() == 109.0
    assert co.quantile_radius(x, y, 0.0).item() == 0.0
    assert co.quantile_radius(x, y, 0.5).item() == 54.5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk", [1, 1000, 2**17])
def test_chunks_and_threads(monkeypatch, threads, chunk):
    monkeypatch.setattr(module, "CHUNK_CPU", chunk)
    x, y = points(50, 2, 0), points(60, 2, 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        radius = co.quantile_radius(x, y, 0.3)
    finally:
        torch.set_num_threads(before)
    np.testing.assert_allclose(radius.numpy(), dense(x, y, 0.3), rtol=1e-14, atol=0)


def test_the_way_of_accelerators(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_DEVICE", 500)
    x, y = points(50, 3, 0), points(60, 3, 1)
    squares = _select_device(x, y, 11, 12, [INF, 0.5, 2.0])
    sorted_squares = np.sort(
        [[dense(a[None], b[None], 0.0, [INF, 0.5, 2.0])[0] for b in y] for a in x[:4]], axis=1
    )
    np.testing.assert_allclose(squares[:4].sqrt().numpy(), sorted_squares[:, 11:13], rtol=1e-13)


def test_strided_input_and_empty_queries():
    x = points(2, 30, 0).mT[::2]
    y = points(2, 40, 1).mT
    np.testing.assert_allclose(co.quantile_radius(x, y, 0.2).numpy(), dense(x, y, 0.2), rtol=1e-14)
    assert co.quantile_radius(x[:0], y, 0.2).shape == (0,)


def test_no_gradient():
    x = points(5, 2).requires_grad_()
    assert not co.quantile_radius(x, x, 0.4).requires_grad


def test_the_fraction_of_keys_within():
    grid = co.Grid.uniform((30, 30))
    radius = co.quantile_radius(grid, grid, 0.05)
    d2 = (grid.points[:, None] - grid.points).square().sum(-1)
    within = (d2 <= radius[:, None] ** 2 * (1 + 8 * torch.finfo(F64).eps)).sum(-1)
    assert (within >= math.floor(0.05 * 899) + 1).all()
    assert (within <= 0.05 * 899 + 1 + 8).all()  # ties: at most 8 points of a square lattice on this circle


@pytest.mark.slow
def test_more_than_2_to_the_24_keys():
    """torch.quantile gives up there, and float32 does not hold the position q (M - 1)."""
    m = 2**24 + 10
    order = torch.randperm(m, generator=torch.Generator().manual_seed(0))
    y = order.to(F64)[:, None]  # distances from 0 are 0, 1, ..., m - 1
    for quantile in (0.0, 0.25, (m - 4) / (m - 1), 1.0):
        radius = co.quantile_radius(torch.zeros(1, 1, dtype=F64), y, quantile).item()
        assert radius == pytest.approx(quantile * (m - 1), rel=1e-15)
    y32 = (order.to(torch.float32) / 2**24)[:, None]  # sums of float32 squares only round
    radius = co.quantile_radius(torch.zeros(1, 1), y32, 0.75).item()
    assert radius == pytest.approx(0.75 * (m - 1) / 2**24, rel=2e-7)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((points(4, 2), points(5, 2), 1.5), ValueError, r"quantile must be in \[0, 1\], got 1.5"),
        ((points(4, 2), points(5, 2), -0.1), ValueError, r"quantile must be in \[0, 1\], got -0.1"),
        ((points(4, 2), points(5, 2), math.nan), ValueError, r"quantile must be in \[0, 1\], got nan"),
        ((points(4, 2), points(5, 2), "0.5"), TypeError, "quantile must be a number .* got str"),
        ((points(4, 2), points(5, 2), True), TypeError, "quantile must be a number .* got bool"),
        ((points(4, 2), points(0, 2), 0.5), ValueError, r"key_pos must have at least one key, .*\(0, 2\)"),
        ((points(4, 2), points(5, 3), 0.5), ValueError, "key_pos must have as many coordinates .* 2, got 3"),
        ((points(4, 2)[0], points(5, 2), 0.5), ValueError, r"query_pos must have shape .* got \(2,\)"),
        ((points(4, 2), None, 0.5), TypeError, "key_pos must be a Tensor or a mesh, got NoneType"),
        ((points(4, 2).long(), points(5, 2), 0.5), TypeError, "query_pos must be a floating-point tensor"),
        ((points(4, 2), points(5, 2).to("meta"), 0.5), ValueError, "key_pos must be on query_pos's device"),
        (
            (points(4, 2, batch=(2,)), points(5, 2, batch=(3,)), 0.5),
            ValueError,
            "key_pos must have query_pos's batch of 2, got 3",
        ),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        co.quantile_radius(*arguments)


@pytest.mark.parametrize(
    ("period", "error", "match"),
    [
        ([1.0], ValueError, "period must have one entry for each coordinate, 2, got 1"),
        ([1.0, 0.0], ValueError, r"period must be > 0 \(inf: not periodic\), got \(1.0, 0.0\)"),
        (1.0, TypeError, "period must be None or a sequence of d numbers, got 1.0"),
    ],
)
def test_bad_periods(period, error, match):
    with pytest.raises(error, match=match):
        co.quantile_radius(points(4, 2), points(5, 2), 0.5, period=period)


def test_draw_far_away():
    """Coordinates offset by 4096 in float32: differences are exact, so only the squares round."""
    x, y = draw((20, 2), torch.float32, 0) + 4096, draw((30, 2), torch.float32, 1) + 4096
    np.testing.assert_allclose(co.quantile_radius(x, y, 0.1).numpy(), dense(x, y, 0.1), rtol=1e-6, atol=0)
