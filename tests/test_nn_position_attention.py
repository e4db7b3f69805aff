"""The layer of position attention against the formula in numpy float64."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import continuum_ops as co
from continuum_ops.nn import PositionAttention


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def formula(
    u: Tensor,
    x: Tensor,
    y: Tensor,
    rates: list[float],
    matrices: list[np.ndarray],
    weights: Tensor | None = None,
    quantile: float | None = None,
    period: tuple[float, ...] | None = None,
) -> np.ndarray:
    """PiT (22) with (9) and (10) for one sample: u (M, C), x (N, d), y (M, d) -> (N, sum of the widths)."""
    difference = x.numpy()[:, None] - y.numpy()[None]
    if period is not None:
        for axis, length in enumerate(period):
            if math.isfinite(length):
                folded = np.abs(difference[..., axis]) % length
                difference[..., axis] = np.minimum(folded, length - folded)
    squared = (difference**2).sum(-1)
    w = np.ones(len(y)) if weights is None else weights.numpy()
    heads = []
    for rate, matrix in zip(rates, matrices, strict=True):
        mass = w * np.exp(-rate * squared)
        if quantile is not None:
            distance = np.sqrt(squared)
            radius = np.quantile(distance, quantile, axis=1, keepdims=True)
            mass = np.where(distance <= radius * (1 + 1e-12), mass, 0.0)
        heads.append((mass / mass.sum(1, keepdims=True)) @ u.numpy() @ matrix)
    return np.concatenate(heads, axis=1)


def split(layer: PositionAttention) -> list[np.ndarray]:
    """W_h (in_features, out_features / H) of each head."""
    assert layer.value_proj is not None
    full = layer.value_proj.weight.detach().numpy().T
    return np.split(full, layer.num_heads, axis=1)


def make(*args: int, seed: int = 0, **kwargs: object) -> PositionAttention:
    torch.manual_seed(seed)
    return PositionAttention(*args, **{"dtype": torch.float64, "initial_rate": (0.7, 9.0), **kwargs})


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("quantile", [None, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_attention(d: int, quantile: float | None, weighted: bool) -> None:
    layer = make(5, 6, 2, quantile=quantile)
    x, y, u = rand(7, d, seed=1), rand(11, d, seed=2), rand(3, 11, 5, seed=3)
    w = rand(11, seed=4) + 0.1 if weighted else None
    out = layer(u, x, co.PointCloud(y, w) if weighted else y)
    assert out.shape == (3, 7, 6)
    for sample, found in zip(u, out.detach().numpy(), strict=True):
        exact = formula(sample, x, y, [0.7, 9.0], split(layer), w, quantile)
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-13)


def test_self_attention_on_one_mesh() -> None:
    layer = make(4, None, 2)
    mesh = co.PointCloud(rand(9, 2, seed=1), rand(9, seed=2))
    u = rand(1, 9, 4, seed=3)
    exact = formula(u[0], mesh.points, mesh.points, [0.7, 9.0], split(layer), mesh.weights)
    np.testing.assert_allclose(layer(u, mesh)[0].detach().numpy(), exact, atol=1e-13)
    plain = formula(u[0], mesh.points, mesh.points, [0.7, 9.0], split(layer))
    np.testing.assert_allclose(layer(u, mesh, weights="equal")[0].detach().numpy(), plain, atol=1e-13)
    given = rand(9, seed=5)
    other = formula(u[0], mesh.points, mesh.points, [0.7, 9.0], split(layer), given)
    np.testing.assert_allclose(layer(u, mesh, weights=given)[0].detach().numpy(), other, atol=1e-13)


@pytest.mark.parametrize("quantile", [None, 0.2])
def test_grids_with_their_weights_and_periods(quantile: float | None) -> None:
    layer = make(3, 4, 2, quantile=quantile)
    x = co.Grid.uniform((4, 6), kind=("endpoint", "periodic"))
    y = co.Grid.uniform((5, 8), kind=("cell", "periodic"))
    u = rand(2, 40, 3, seed=3)
    exact = formula(
        u[1], x.points, y.points, [0.7, 9.0], split(layer), y.weights, quantile, period=(math.inf, 1.0)
    )
    np.testing.assert_allclose(layer(u, x, y)[1].detach().numpy(), exact, atol=1e-12)
    unperiodic = formula(u[1], x.points, y.points, [0.7, 9.0], split(layer), y.weights, quantile)
    found = layer(u, x, y, period=(math.inf, math.inf))
    np.testing.assert_allclose(found[1].detach().numpy(), unperiodic, atol=1e-12)


def test_one_mesh_per_sample() -> None:
    layer = make(3, 4, 2, quantile=0.4)
    x, y, w = rand(2, 5, 2, seed=1), rand(2, 8, 2, seed=2), rand(2, 8, seed=3) + 0.1
    u = rand(2, 8, 3, seed=4)
    out = layer(u, co.PointCloud(x), co.PointCloud(y, w)).detach().numpy()
    for b in range(2):
        exact = formula(u[b], x[b], y[b], [0.7, 9.0], split(layer), w[b], 0.4)
        np.testing.assert_allclose(out[b], exact, atol=1e-13)


def test_a_given_radius_takes_the_place_of_the_quantile() -> None:
    layer = make(3, 4, 2, quantile=0.01)
    x, y, u = rand(5, 2, seed=1), rand(30, 2, seed=2), rand(1, 30, 3, seed=3)
    radius = co.quantile_radius(x, y, 0.5)
    exact = formula(u[0], x, y, [0.7, 9.0], split(layer), None, 0.5)
    np.testing.assert_allclose(layer(u, x, y, radius=radius)[0].detach().numpy(), exact, atol=1e-13)


def test_concatenated_heads_mix_the_input_itself() -> None:
    layer = make(3, None, 2, heads="concatenate", quantile=0.5)
    assert layer.out_features == 6 and layer.value_proj is None
    assert [n for n, _ in layer.named_parameters()] == ["rate_parameter"]
    x, y, u = rand(5, 2, seed=1), rand(8, 2, seed=2), rand(1, 8, 3, seed=3)
    exact = formula(u[0], x, y, [0.7, 9.0], [np.eye(3)] * 2, None, 0.5)
    np.testing.assert_allclose(layer(u, x, y)[0].detach().numpy(), exact, atol=1e-13)


def test_weights_of_an_enclosing_block_reach_tensors_of_points() -> None:
    layer = make(3, 4, 2)
    x, y, u, w = rand(5, 2, seed=1), rand(8, 2, seed=2), rand(1, 8, 3, seed=3), rand(8, seed=4)
    with co.nn.quadrature(w):
        inside = layer(u, x, y)
    torch.testing.assert_close(inside, layer(u, x, co.PointCloud(y, w)))
    assert (inside - layer(u, x, y)).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("tan_clamped", lambda p: np.tan(np.clip(p, 0, np.arctan(1e6)))),
        ("square", np.square),
        ("tan_sin", lambda p: np.tan(np.pi / 4 * (1 - 1e-7) * (1 + np.sin(p)))),
    ],
)
def test_rates(name: str, function) -> None:
    parameter = torch.tensor([-4.0, -0.3, 0.0, 0.5, 1.2, 1.57, 2.0, 30.0], dtype=torch.float64)
    layer = PositionAttention(8, None, 8, rate_function=name, dtype=torch.float64)
    with torch.no_grad():
        layer.rate_parameter.copy_(parameter)
    np.testing.assert_allclose(
        layer.rate.detach().numpy(), function(parameter.numpy()), rtol=1e-8, atol=1e-12
    )
    single = layer.float().rate
    assert (single >= 0).all() and torch.isfinite(single).all()


@pytest.mark.parametrize("name", ["tan_clamped", "square", "tan_sin"])
@pytest.mark.parametrize("rate", [1e-3, 1.0, 2500.0, 1e5])
def test_initial_rates(name: str, rate: float) -> None:
    layer = PositionAttention(4, None, 2, rate_function=name, initial_rate=(rate, 3.0), dtype=torch.float64)
    assert layer.rate.tolist() == pytest.approx([rate, 3.0], rel=1e-6)


def test_a_clamped_rate_can_come_back() -> None:
    layer = PositionAttention(2, None, 1, dtype=torch.float64)
    for parameter, gradient in ((-0.5, 1.0), (0.8, 1 + math.tan(0.8) ** 2)):
        with torch.no_grad():
            layer.rate_parameter.fill_(parameter)
        layer.rate_parameter.grad = None
        layer.rate.sum().backward()
        assert layer.rate_parameter.grad.item() == pytest.approx(gradient)


def test_random_rates_lie_where_the_paper_starts() -> None:
    torch.manual_seed(0)
    parameter = PositionAttention(64, None, 64).rate_parameter
    assert (parameter >= 0).all() and (parameter < 1).all() and parameter.std() > 0.2


def test_gradients() -> None:
    layer = make(2, 2, 2, quantile=0.6)
    x, y, u = rand(4, 2, seed=1), rand(6, 2, seed=2), rand(2, 6, 2, seed=3).requires_grad_()
    assert layer.value_proj is not None
    parameters = (layer.rate_parameter, layer.value_proj.weight)

    def run(value: Tensor, *_: Tensor) -> Tensor:
        return layer(value, x, y)

    torch.autograd.gradcheck(run, (u, *parameters))


def test_state_dict_and_copy() -> None:
    layer, other = make(3, 4, 2, seed=1), make(3, 4, 2, seed=2, initial_rate=1.0)
    x, u = rand(6, 2, seed=1), rand(1, 6, 3, seed=2)
    assert list(layer.state_dict()) == ["rate_parameter", "value_proj.weight"]
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(u, x), layer(u, x))
    assert torch.equal(copy.deepcopy(layer)(u, x), layer(u, x))
    assert "quantile=None" in repr(layer)


@pytest.mark.parametrize(
    ("args", "settings", "error", "message"),
    [
        ((4, 5, 2), {}, ValueError, "out_features must be divisible by num_heads, was 5 with num_heads 2"),
        ((0,), {}, ValueError, "in_features must be at least 1, was 0"),
        ((4, 4, 1.0), {}, TypeError, "num_heads must be an int, was float"),
        ((4,), {"quantile": 1.5}, ValueError, "quantile must be None or a number between 0 and 1, was 1.5"),
        ((4,), {"rate_function": "exp"}, ValueError, "rate_function must be one of tan_clamped.*, was 'exp'"),
        ((4,), {"heads": "sum"}, ValueError, "heads must be .*, was 'sum'"),
        (
            (4, 4, 2),
            {"heads": "concatenate"},
            ValueError,
            r"out_features must be num_heads \* in_features = 8",
        ),
        ((4, 4, 2), {"initial_rate": (1.0,)}, ValueError, "initial_rate must be a number or 2 numbers"),
        ((4,), {"initial_rate": -1.0}, ValueError, "initial_rate must be .*, was -1.0"),
    ],
)
def test_constructor_errors(args, settings, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PositionAttention(*args, **settings)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda f, u, x: f(u[0], x),
            ValueError,
            r"value must have shape \(B, 6, 3\) for 6 keys, was \(6, 3\)",
        ),
        (lambda f, u, x: f(u, x[:5]), ValueError, r"value must have shape \(B, 5, 3\) for 5 keys"),
        (lambda f, u, x: f(None, x), TypeError, "value must be a tensor, was NoneType"),
        (lambda f, u, x: f(u, [1.0], x), TypeError, "query_pos must be a Grid, another Mesh or a tensor"),
        (
            lambda f, u, x: f(u, x.long(), x),
            TypeError,
            "query_pos must have a floating dtype, was torch.int64",
        ),
        (lambda f, u, x: f(u, x[0], x), ValueError, r"query_pos must have shape \(N, d\) or"),
        (lambda f, u, x: f(u, x, weights="none"), ValueError, "weights must be .*, was 'none'"),
        (lambda f, u, x: f(u, x, weights=1.0), TypeError, "weights must be .*, was float"),
        (lambda f, u, x: f(u, x, weights=x[:5, 0]), ValueError, r"weights must have shape \(6,\) or"),
        (
            lambda f, u, x: f(
                u, co.Grid.uniform((4, 4), kind="periodic"), co.Grid.uniform((2, 3), kind="endpoint")
            ),
            ValueError,
            "query_pos and key_pos must be Grids of the same period",
        ),
    ],
)
def test_call_errors(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(make(3, 4, 2), rand(1, 6, 3), rand(6, 2, seed=1))
