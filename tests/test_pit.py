"""The position-induced transformer against the paper's formulas in numpy float64."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import continuum_ops as co
from continuum_ops.models import PiT, farthest_point_mesh, pool_mesh
from continuum_ops.models.pit_layer import PiTBlock, SelfAttention
from continuum_ops.nn import PositionAttention

erf = np.vectorize(math.erf)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(*args: int, seed: int = 0, **settings: Any) -> PiT:
    """A small float64 model whose every parameter matters: biases moved, rates of several lengths."""
    torch.manual_seed(seed)
    defaults = {"width": 6, "num_heads": 2, "num_layers": 2, "dtype": torch.float64}
    rates = {"initial_rate": (0.8, 7.0), "initial_local_rate": (5.0, 40.0)}
    model = PiT(*args, **{**defaults, **rates, **settings})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def linear(layer: nn.Module | None, x: np.ndarray) -> np.ndarray:
    assert isinstance(layer, nn.Linear)
    out = x @ layer.weight.detach().numpy().T
    return out if layer.bias is None else out + layer.bias.detach().numpy()


def mlp(layer: Any, x: np.ndarray) -> np.ndarray:
    return linear(layer.linear2, gelu(linear(layer.linear1, x)))


def distances(x: np.ndarray, y: np.ndarray, period: tuple[float, ...] | None) -> np.ndarray:
    difference = np.abs(x[:, None] - y[None])
    if period is not None:
        for axis, length in enumerate(period):
            if math.isfinite(length):
                difference[..., axis] = np.minimum(difference[..., axis], length - difference[..., axis])
    return np.sqrt((difference**2).sum(-1))


def attention(
    layer: Any, u: np.ndarray, x: np.ndarray, y: np.ndarray, w: np.ndarray, period: tuple[float, ...] | None
) -> np.ndarray:
    """Position attention (PiT 5, 9, 10, 22), or with contents (3) and (12), heads side by side."""
    distance = distances(x, y, period)
    if isinstance(layer, SelfAttention):
        position = layer.position
        value = linear(layer.value_proj if position is None else position.value_proj, u)
        q, k = linear(layer.query_proj, u), linear(layer.key_proj, u)
        width = q.shape[1] // layer.num_heads
        rates = np.zeros(layer.num_heads) if position is None else position.rate.detach().numpy()
        keep = np.ones_like(distance, dtype=bool)
    else:
        assert isinstance(layer, PositionAttention)
        rates = layer.rate.detach().numpy()
        value = np.tile(u, len(rates)) if layer.value_proj is None else linear(layer.value_proj, u)
        q = k = None
        width = value.shape[1] // len(rates)
        keep = np.ones_like(distance, dtype=bool)
        if layer.quantile is not None:
            keep = distance <= np.quantile(distance, layer.quantile, axis=1, keepdims=True) * (1 + 1e-12)
    heads = []
    for h, rate in enumerate(rates):
        part = slice(h * width, (h + 1) * width)
        score = -rate * distance**2
        if q is not None and k is not None:
            score = score + q[:, part] @ k[:, part].T / math.sqrt(width)
        mass = np.where(keep, w * np.exp(score), 0.0)
        heads.append(mass / mass.sum(1, keepdims=True) @ value[:, part])
    return np.concatenate(heads, axis=1)


def block(layer: Any, u: np.ndarray, x: np.ndarray, w: np.ndarray, period: Any) -> np.ndarray:
    mixed = attention(layer.attention, u, x, x, w, period)
    if layer.linear is None:
        return gelu(mlp(layer.mlp, np.concatenate([u, mixed], axis=1)))
    return gelu(mlp(layer.mlp, gelu(mixed)) + linear(layer.linear, u))


def formula(
    model: PiT,
    u: Tensor,
    inputs: tuple[Tensor, Tensor],
    latents: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    period: tuple[float, ...] | None = None,
) -> np.ndarray:
    """One sample (N, C); meshes are points and weights."""
    (x, w), (y, wy), (z, wz) = (tuple(t.numpy() for t in mesh) for mesh in (inputs, latents, outputs))
    v = np.concatenate([u.numpy(), x], axis=1)
    concatenated = model.lift is None
    if not concatenated:
        v = gelu(linear(model.lift, v))
    if isinstance(model.encoder, PiTBlock):
        v = block(model.encoder, v, x, w, period)
    else:
        v = attention(model.encoder, v, y, x, w, period)
        v = gelu(mlp(model.lift_heads, v)) if concatenated else gelu(v)
    for layer in model.layers:
        v = block(layer, v, y, wy, period)
    if isinstance(model.decoder, PiTBlock):
        v = block(model.decoder, v, y, wy, period)
    else:
        v = attention(model.decoder, v, z, y, wy, period)
        v = v if concatenated else gelu(v)
    for layer in model.decoder_layers:
        v = block(layer, v, z, wz, period)
    return mlp(model.projection, v)


def cloud(n: int, d: int, seed: int) -> co.PointCloud:
    return co.PointCloud(rand(n, d, seed=seed), rand(n, seed=seed + 1) + 0.2)


def of(mesh: Any) -> tuple[Tensor, Tensor]:
    return mesh.points, mesh.weights


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("weights", ["mesh", "equal"])
@pytest.mark.parametrize("rate_function", ["tan_clamped", "square", "tan_sin"])
def test_scattered_meshes(d: int, weights: Any, rate_function: Any) -> None:
    model = make(
        2, 1, d, encoder_quantile=0.3, decoder_quantile=0.5, rate_function=rate_function, decoder_layers=1
    )
    x, y, z = cloud(13, d, 1), cloud(7, d, 3), cloud(9, d, 5)
    u = rand(2, 13, 2, seed=7)
    out = model(u, x, z, latent_mesh=y, weights=weights)
    assert out.shape == (2, 9, 1)
    meshes = [of(m) if weights == "mesh" else (m.points, torch.ones(len(m))) for m in (x, y, z)]
    for sample, found in zip(u, out.detach().numpy(), strict=True):
        np.testing.assert_allclose(found, formula(model, sample, *meshes), rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", ["position", "self-position", "self-a", "self-b"])
def test_every_attention_on_one_mesh(attention: Any) -> None:
    model = make(2, 1, 2, attention=attention, decoder_layers=1, encoder_quantile=0.3, decoder_quantile=0.4)
    mesh, u = cloud(11, 2, 1), rand(2, 11, 2, seed=2)
    exact = formula(model, u[1], of(mesh), of(mesh), of(mesh))
    np.testing.assert_allclose(model(u, mesh)[1].detach().numpy(), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", ["position", "self-a", "self-b", "self-position"])
def test_local_blocks_with_one_mesh_per_sample(attention: Any) -> None:
    model = make(3, 1, 2, local_blocks=True, attention=attention, encoder_quantile=0.2, decoder_quantile=0.3)
    points, w = rand(2, 12, 2, seed=1), rand(2, 12, seed=2) + 0.1
    u = rand(2, 12, 3, seed=3)
    out = model(u, co.PointCloud(points, w)).detach().numpy()
    for b in range(2):
        mesh = (points[b], w[b])
        np.testing.assert_allclose(out[b], formula(model, u[b], mesh, mesh, mesh), rtol=0, atol=1e-12)
    equal = model(u, points).detach().numpy()
    mesh = (points[0], torch.ones(12))
    np.testing.assert_allclose(equal[0], formula(model, u[0], mesh, mesh, mesh), rtol=0, atol=1e-12)


def test_concatenated_heads() -> None:
    model = make(2, 1, 2, heads="concatenate", encoder_quantile=0.3, decoder_quantile=0.4)
    x, y, z, u = cloud(13, 2, 1), cloud(7, 2, 3), cloud(9, 2, 5), rand(2, 13, 2, seed=7)
    exact = formula(model, u[0], of(x), of(y), of(z))
    np.testing.assert_allclose(model(u, x, z, latent_mesh=y)[0].detach().numpy(), exact, rtol=0, atol=1e-12)
    # A_in: 2 rates; its MLP (2 (2 + 2), 6, 6); two blocks of 2 rates and (6 + 12, 6, 6); 2 rates; (12, 6, 1).
    expected = 2 + (8 * 6 + 6 + 42) + 2 * (2 + 18 * 6 + 6 + 42) + 2 + (12 * 6 + 6 + 7)
    assert sum(p.numel() for p in model.parameters()) == expected


@pytest.mark.parametrize("kind", ["endpoint", "periodic"])
def test_grids_and_their_pooled_latent_grid(kind: str) -> None:
    model = make(1, 2, 2, latent=(3, 4), encoder_quantile=0.1, decoder_quantile=0.5, decoder_layers=1)
    x, z = co.Grid.uniform((6, 8), kind=kind), co.Grid.uniform((5, 7), kind=kind)
    u = rand(2, 48, 1, seed=1)
    period = (1.0, 1.0) if kind == "periodic" else None
    y = pool_mesh(x, (3, 4))
    exact = formula(model, u[0], of(x), of(y), of(z), period)
    np.testing.assert_allclose(model(u, x, z)[0].detach().numpy(), exact, rtol=0, atol=1e-12)
    # The same points without their structure, and the period told to the model.
    told = make(1, 2, 2, encoder_quantile=0.1, decoder_quantile=0.5, decoder_layers=1, period=period)
    told.load_state_dict(model.state_dict())
    clouds = [co.PointCloud(*of(m)) for m in (x, y, z)]
    scattered = told(u, clouds[0], clouds[2], latent_mesh=clouds[1])
    np.testing.assert_allclose(scattered[0].detach().numpy(), exact, rtol=0, atol=1e-12)


def test_a_number_of_latent_points_takes_the_farthest() -> None:
    model = make(1, 1, 2, latent=5, encoder_quantile=0.3, decoder_quantile=0.4)
    mesh, u = cloud(14, 2, 1), rand(1, 14, 1, seed=2)
    latent = farthest_point_mesh(mesh, 5)
    torch.testing.assert_close(model(u, mesh), model(u, mesh, latent_mesh=latent))
    per_sample = co.PointCloud(torch.stack([mesh.points, rand(14, 2, seed=9)]))
    both = model(u.expand(2, 14, 1), per_sample)
    torch.testing.assert_close(both[:1], model(u, co.PointCloud(mesh.points)))


def test_a_line_of_times_without_a_second_axis() -> None:
    model = make(1, 1, 1)
    t, u = rand(9, seed=1), rand(2, 9, 1, seed=2)
    assert torch.equal(model(u, t), model(u, t[:, None]))


def test_converges_as_the_grid_is_refined() -> None:
    """One set of parameters, a smooth function: the output on the same points settles."""
    model = make(1, 1, 2, latent=(4, 4), encoder_quantile=0.2, decoder_quantile=0.5)
    at = co.PointCloud(torch.tensor([[0.25, 0.5], [0.75, 0.125], [1.0, 0.0]], dtype=torch.float64))

    def output(n: int, weights: Any) -> Tensor:
        grid = co.Grid.uniform((n, n))
        u = torch.cos(3 * grid.points[:, 0]) * grid.points[:, 1]
        return model(u[None, :, None], grid, at, weights=weights)

    finest = output(129, "mesh")
    errors = [(output(n, "mesh") - finest).abs().max().item() for n in (9, 33)]
    assert errors[1] < errors[0] / 3 and errors[1] < 0.02 * finest.abs().max().item()


def test_weights_matter_on_a_graded_mesh() -> None:
    model = make(1, 1, 1, encoder_quantile=None, decoder_quantile=None)
    even, graded = torch.linspace(0, 1, 65, dtype=torch.float64), torch.linspace(0, 1, 97).double() ** 2
    at, latent = co.PointCloud(even[::16]), co.PointCloud(even[::8])

    def output(x: Tensor, weights: Any) -> Tensor:
        return model(torch.sin(4 * x)[None, :, None], co.Grid(x), at, latent_mesh=latent, weights=weights)

    truth = output(even, "mesh")
    weighted, equal = ((output(graded, w) - truth).abs().max() for w in ("mesh", "equal"))
    assert weighted < equal / 20


def test_geometry_is_found_once_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    from continuum_ops.models import pit

    calls: list[int] = []
    find = pit.quantile_radius
    monkeypatch.setattr(pit, "quantile_radius", lambda *a, **k: calls.append(1) or find(*a, **k))
    model = make(1, 1, 2, latent=(3, 3), encoder_quantile=0.2, decoder_quantile=0.5)
    grid, u = co.Grid.uniform((7, 7)), rand(1, 49, 1)
    first = model(u, grid)
    assert len(calls) == 2
    assert torch.equal(model(u, grid), first) and len(calls) == 2
    model(u, co.Grid.uniform((7, 7)))
    assert len(calls) == 4
    # Tensors may change, so nothing is kept for them; a geometry may be held on to.
    points, latent = grid.points.clone(), rand(5, 2, seed=3)
    model(u, points, latent_mesh=latent)
    model(u, points, latent_mesh=latent)
    assert len(calls) == 8
    geometry = model.geometry(points, latent_mesh=latent)
    assert torch.equal(model(u, geometry), model(u, geometry)) and len(calls) == 10
    # A mesh whose tensor was written to is another mesh.
    cloud = co.PointCloud(points)
    before = model(u, cloud, latent_mesh=co.PointCloud(latent))
    points.mul_(0.5)
    assert not torch.allclose(model(u, cloud, latent_mesh=co.PointCloud(latent)), before)


def test_copies_and_files(tmp_path: Any) -> None:
    model = make(1, 1, 2, latent=(3, 3))
    grid, u = co.Grid.uniform((7, 7)), rand(1, 49, 1)
    expected = model(u, grid)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._geometries == [] and len(model._geometries) == 1
        assert torch.equal(other(u, grid), expected)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fresh = make(1, 1, 2, latent=(3, 3), seed=5)
    assert not torch.equal(fresh(u, grid), expected)
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(fresh(u, grid), expected)


def test_single_precision_on_a_grid_of_float64() -> None:
    model = make(1, 1, 2, latent=(3, 3))
    grid, u = co.Grid.uniform((7, 7)), rand(1, 49, 1)
    exact = model(u, grid)
    single = model.float()(u.float(), grid)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-5)


def test_every_parameter_gets_a_gradient_and_coordinates_too() -> None:
    model = make(1, 1, 2, encoder_quantile=0.3, decoder_quantile=0.5, decoder_layers=1)
    points = rand(9, 2, seed=1).requires_grad_()
    model(rand(2, 9, 1), points, latent_mesh=rand(5, 2, seed=2)).square().sum().backward()
    for name, parameter in (*model.named_parameters(), ("points", points)):
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"width": 7}, ValueError, "width must be divisible by num_heads, was 7 with num_heads 2"),
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1, was 0"),
        ({"decoder_layers": -1}, ValueError, "decoder_layers must be at least 0, was -1"),
        ({"attention": "cross"}, ValueError, "attention must be one of position, .*, was 'cross'"),
        ({"heads": "sum"}, ValueError, "heads must be .*, was 'sum'"),
        ({"heads": "concatenate", "local_blocks": True}, ValueError, 'heads must be "split" with attention'),
        ({"local_blocks": True, "latent": 4}, ValueError, "latent must be None with local_blocks, was 4"),
        ({"latent": (4,)}, ValueError, r"latent must be None, an int or 2 sizes of at least 1, was \(4,\)"),
        ({"latent": 0}, ValueError, "latent must be at least 1, was 0"),
        ({"period": (1.0,)}, ValueError, r"period must be None or 2 positive numbers, was \(1.0,\)"),
        ({"encoder_quantile": 2.0}, ValueError, "quantile must be None or a number between 0 and 1, was 2.0"),
        ({"rate_function": "exp"}, ValueError, "rate_function must be one of"),
    ],
)
def test_constructor_errors(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(1, 1, 2, **settings)


GRID = co.Grid.uniform((4, 4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, u: m(u[0], GRID), ValueError, r"u must have shape \(B, N, 1\), was \(16, 1\)"),
        (
            lambda m, u: m(u.float(), GRID),
            ValueError,
            "u must have the dtype of the parameters, torch.float64",
        ),
        (lambda m, u: m(None, GRID), TypeError, "u must be a tensor, was NoneType"),
        (lambda m, u: m(u, None), TypeError, "mesh must be a Grid, a PointCloud or a tensor of points"),
        (lambda m, u: m(u, co.Grid.uniform((4, 5))), ValueError, r"mesh must have shape \(16, 2\) or"),
        (lambda m, u: m(u, co.Grid.uniform((16,))), ValueError, r"mesh must have points of shape \(N, 2\)"),
        (lambda m, u: m(u, GRID, rand(3, 3)), ValueError, "output_mesh must have points of shape"),
        (lambda m, u: m(u, GRID, latent_mesh=[1]), TypeError, "latent_mesh must be a Grid"),
        (lambda m, u: m(u, rand(16, 2).long()), TypeError, "mesh must have a floating dtype"),
        (
            lambda m, u: m(u, rand(16, 2)),
            ValueError,
            r"latent_mesh must be given for a model with latent=\(2, 2\)",
        ),
        (lambda m, u: m(u, GRID, weights="none"), ValueError, "weights must be .*, was 'none'"),
        (
            lambda m, u: m(u, m.geometry(GRID), GRID),
            ValueError,
            "output_mesh and latent_mesh must be None where mesh is a PiTGeometry",
        ),
        (
            lambda m, u: make(1, 1, 2, attention="self-a")(u, GRID, GRID),
            ValueError,
            "output_mesh and latent_mesh must be None: with local_blocks",
        ),
    ],
)
def test_call_errors(call: Callable[[PiT, Tensor], Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(make(1, 1, 2, latent=(2, 2)), rand(2, 16, 1))
