"""What a layer looks at from a point, against the formulas in numpy; and the roll-out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from experiment_cases import TINY, tiny
from patch_definition import array, convolve, fourier_attention_kernels, linear, patches_of
from torch import nn

import continuum_ops as co
from continuum_ops.experiments import Frames, Samples, attention_of, roll_out
from continuum_ops.experiments.operator import Operator, build

POINT = {1: (0.7,), 2: (0.7, 0.3)}


def made(name: str, mesh: Any = None, **changes: Any) -> tuple[Operator, Samples]:
    """An operator in float64 with every parameter drawn, and one sample on a mesh."""
    torch.manual_seed(0)
    config = tiny(name, **changes)
    source = config.data
    drawn = source.draw(2, 0, "train")
    samples = source.read(drawn, "train")
    operator = build(config, samples, source.statistics(drawn)).double().eval()
    for parameter in operator.model.parameters():
        nn.init.normal_(parameter, std=0.5)
    samples = samples.each(lambda t: t[:1].double())
    mesh = samples.mesh.to(dtype=torch.float64) if mesh is None else mesh
    return operator, samples._replace(mesh=mesh, target_mesh=mesh)


def inputs_of(operator: Operator, samples: Samples, layer: nn.Module) -> tuple[Any, ...]:
    kept: list[Any] = []
    handle = layer.register_forward_pre_hook(lambda _, args: kept.append(args))
    with torch.no_grad():
        operator(samples, "mesh")
    handle.remove()
    return kept[0]


def softmax(scores: np.ndarray, w: np.ndarray) -> np.ndarray:
    e = w * np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def nearest(points: np.ndarray, point: tuple[float, ...]) -> int:
    return int(((points - np.array(point)) ** 2).sum(-1).argmin())


def test_continuum_attention() -> None:
    operator, samples = made("tno-cde", mesh=co.Grid(torch.linspace(0, 1.4, 11).double() ** 2))
    (found,) = attention_of(operator, samples, POINT[1])
    layer = operator.model.layers[0].self_attn
    x = array(inputs_of(operator, samples, layer)[0][0])
    points, w = array(samples.mesh.points), array(samples.mesh.weights)
    i = nearest(points, POINT[1])
    q, k = (
        x @ array(m).T + array(b)
        for m, b in zip(layer.in_proj_weight.chunk(3)[:2], layer.in_proj_bias.chunk(3)[:2], strict=True)
    )
    for h in range(2):
        c = slice(4 * h, 4 * h + 4)
        p = softmax(k[:, c] @ q[i, c] / 2, w)
        np.testing.assert_allclose(array(found.density[h]), p / (w / w.sum()), rtol=1e-10)
    assert found.name == "layers.0.self_attn" and found.query.item() == points[i, 0]
    assert torch.equal(found.points, samples.mesh.points)


@pytest.mark.parametrize("weights", ["mesh", "equal"])
def test_position_attention(weights: str) -> None:
    axis = torch.linspace(0, 1, 11).double() ** 1.5
    operator, samples = made("pit-darcy", mesh=co.Grid(axis, axis))
    found = attention_of(operator, samples, POINT[2], weights)
    assert [layer.name for layer in found] == ["encoder", "layers.0.attention", "decoder"]
    geometry = operator.model.geometry(samples.mesh)
    pairs = geometry.encoder, geometry.processor, geometry.decoder
    modules = operator.model.encoder, operator.model.layers[0].attention, operator.model.decoder
    for row, pair, module in zip(found, pairs, modules, strict=True):
        x, y = array(pair.query.points), array(pair.key.points)
        w = array(pair.key.weights) if weights == "mesh" else np.ones(len(y))
        i = nearest(x, POINT[2])
        squares = ((x[i] - y) ** 2).sum(-1)
        near = np.ones(len(y), bool)
        if pair.radius is not None:
            near = squares <= array(pair.radius)[i] ** 2 * (1 + 1e-14)
            assert 0 < near.sum() < len(y)
        for h, rate in enumerate(array(module.rate)):
            p = softmax(-rate * squares, w * near)
            np.testing.assert_allclose(array(row.density[h]), p / (w / w.sum()), rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(array(row.query), x[i])


def test_attention_of_position_and_content() -> None:
    operator, samples = made("pit-darcy", model={"attention": "self-position"})
    found = {row.name: row for row in attention_of(operator, samples, POINT[2])}
    layer = operator.model.layers[0].attention
    u, pair, _ = inputs_of(operator, samples, layer)
    y, w = array(pair.key.points), array(pair.key.weights)
    i = nearest(y, POINT[2])
    q, k = (array(u[0]) @ array(m.weight).T for m in (layer.query_proj, layer.key_proj))
    for h, rate in enumerate(array(layer.position.rate)):
        c = slice(4 * h, 4 * h + 4)
        p = softmax(k[:, c] @ q[i, c] / 2 - rate * ((y - y[i]) ** 2).sum(-1), w)
        np.testing.assert_allclose(
            array(found["layers.0.attention"].density[h]), p / (w / w.sum()), rtol=1e-9, atol=1e-12
        )


def test_galerkin_attention() -> None:
    operator, samples = made("galerkin-burgers")
    found = attention_of(operator, samples, POINT[1])[0]
    layer = operator.model.layers[0].attention
    x = array(inputs_of(operator, samples, layer)[0][0])
    points = array(samples.mesh.points)
    i = nearest(points, POINT[1])
    q, k = (linear(m, x) for m in (layer.q_proj, layer.k_proj))
    k = k - k.mean(-1, keepdims=True)
    k = k / np.sqrt(k.var(-1, keepdims=True) + 1e-5) * array(layer.k_norm.weight) + array(layer.k_norm.bias)
    kernel = points @ points[i] + k @ q[i]
    np.testing.assert_allclose(array(found.density[0]), kernel, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["vitno", "fano", "extended"])
def test_patch_attention(kind: str) -> None:
    changes = {"periodic_extension": True, "modes": 2} if kind == "extended" else {}
    operator, samples = made("vitno-darcy416" if kind == "vitno" else "fano-darcy416", model=changes)
    found = attention_of(operator, samples, POINT[2])[0]
    layer = operator.model.layers[0].attention
    u = array(inputs_of(operator, samples, layer)[0][0])
    at = list(patches_of(samples.mesh.shape, (2, 2)))
    if kind == "vitno":
        q, k = (linear(m, u) for m in (layer.q_proj, layer.k_proj))
        scale = layer.scale
    elif kind == "extended":
        parts = layer.in_conv(torch.from_numpy(u)[None])[0].chunk(3, -1)
        q, k = (array(x) for x in parts[:2])
        scale = layer.factor
    else:
        kernels = fourier_attention_kernels(layer.in_proj_weight, layer.modes)
        q, k = (np.zeros(u.shape) for _ in range(2))
        for out, kernel in zip((q, k), kernels, strict=False):
            for p in at:
                out[p] = convolve(kernel, u[p], 8)
        scale = layer.factor
    w = 1 / u[..., 0].size
    own = at[2]  # x = 0.7, y = 0.3
    for h in range(2):
        c = slice(4 * h, 4 * h + 4)
        scores = np.array([scale * w * (q[own][..., c] * k[j][..., c]).sum() for j in at])
        a = softmax(scores, np.ones(4))
        density = found.density[h].view(8, 8).numpy()
        for share, j in zip(a, at, strict=True):
            np.testing.assert_allclose(density[j], 4 * share, rtol=1e-9)


def test_the_middle_and_a_wrong_point() -> None:
    operator, samples = made("tno-cde")
    (found,) = attention_of(operator, samples)
    assert found.query.item() == pytest.approx(1, abs=1e-6)
    with pytest.raises(ValueError, match=r"point must have 1 coordinates, was \[0\.1, 0\.2\]"):
        attention_of(operator, samples, (0.1, 0.2))


class _Line(nn.Module):
    """The next frame of a flow that moves in straight lines, from its last two: 2 u_1 - u_0."""

    def forward(self, samples: Samples, weights: str) -> torch.Tensor:
        return 2 * samples.input[..., 1:] - samples.input[..., :1]

    def perturb(self, samples: Samples, generator: Any) -> Samples:
        return samples


def test_a_roll_out_feeds_predictions_back() -> None:
    mesh = co.Grid.uniform(5)
    start, slope = torch.rand(2, 3, 1, 5, 1, dtype=torch.float64)
    t = torch.arange(6.0, dtype=torch.float64).view(1, 6, 1, 1)
    truth = start + t * slope
    given = truth.clone()
    given[:, 2:] = torch.nan  # only the known frames may be used
    frames = Frames(given, tuple(range(6)), mesh, known=2)
    found = roll_out(_Line(), frames, "mesh", 2)
    torch.testing.assert_close(found, truth[:, 2:], rtol=1e-12, atol=1e-12)


def test_frames_of_burgers() -> None:
    """Frame k + 1 is the solution that starts from frame k."""
    from continuum_ops.data.burgers import _cole_hopf

    source = tiny("galerkin-burgers", data={"rollout": 2, "points": 256, "resolutions": [], "test": 2}).data
    drawn = source.draw(2, 3, "test")
    frames = source.frames(drawn)
    assert frames.values.shape == (2, 4, 256, 1) and frames.times == (0, 1, 2, 3) and frames.known == 1
    for i in range(3):
        first, second = (frames.values[0, j, :, 0].double().numpy() for j in (i, i + 1))
        spectrum = np.fft.rfft(first, norm="forward")
        spectrum[[0, -1]] = 0
        expected = _cole_hopf(spectrum, 256, 0.1 / (2 * np.pi), 1.0)
        np.testing.assert_allclose(second, expected, atol=2e-5 * np.abs(expected).max())
    assert "later" not in source.draw(2, 3, "train")
    assert tiny("galerkin-burgers").data.frames(drawn) is None


@pytest.mark.parametrize("name", TINY)
def test_every_experiment_shows_its_attention(name: str) -> None:
    """Whatever its mesh, also one of the sample's own."""
    config = tiny(name)
    blank = config.data.blank()
    samples = config.data.read(blank, "train")
    operator = build(config, samples, config.data.statistics(blank)).eval()
    found = attention_of(operator, samples.each(lambda t: t[:1]), weights=config.model.weights)
    assert found
    d = samples.mesh.ndim
    for layer in found:
        assert layer.points.shape == (layer.density.shape[1], d) and layer.query.shape == (d,)
        assert layer.density.isfinite().all()


def test_frames_of_vorticity() -> None:
    source = tiny("pit-vorticity").data
    drawn = source.draw(2, 0, "test")
    frames = source.frames(drawn)
    samples = source.read(drawn, "test", source.cases()[0])
    assert frames.known == 2 and frames.times == (1, 2, 3, 4) and frames.mesh.shape == (8, 8)
    # The first sample of each flow is its first window.
    windows = samples.input.unflatten(0, (2, 2))
    torch.testing.assert_close(windows[:, 0], frames.values[:, :2, :, 0].mT, rtol=0, atol=0)
    targets = samples.target.unflatten(0, (2, 2))
    torch.testing.assert_close(targets, frames.values[:, 2:], rtol=0, atol=0)
