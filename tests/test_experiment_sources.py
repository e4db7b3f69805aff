"""Data sets of the experiments: what is read on each mesh, against the generators and numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from experiment_cases import tiny

from continuum_ops import data
from continuum_ops.data.elastic_cell import hole_radii, perforated_square
from continuum_ops.data.functions import sample_generator
from continuum_ops.experiments import EXPERIMENTS, ConfigError, Source, evaluate, load, train
from continuum_ops.experiments.operator import build
from continuum_ops.experiments.running import predict, select
from continuum_ops.mesh import Grid, PointCloud


def source_of(name: str, **changes: Any) -> Source:
    return tiny(name, data=changes).data


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_two_steps_of_every_small_experiment(name: str, tmp_path: Any) -> None:
    """With the model and the meshes of --small, on samples for two steps."""
    batch = load(name, small=True).training.batch_size
    config = load(
        name,
        small=True,
        sections={
            "data": {"train": max(batch, 2), "validation": 1, "test": 1},
            "schedule": {"name": "constant"},
            "training": {"steps": 2, "validate_every": 2, "log_every": 1, "threads": 1},
        },
    )
    run = train(config, tmp_path)
    assert [entry["step"] for entry in run.log] == [1, 2]
    assert all(math.isfinite(entry["loss"]) for entry in run.log)
    assert math.isfinite(run.log[-1]["validation"])


@pytest.mark.parametrize(
    ("name", "make"), [("pit-inviscid-burgers", data.inviscid_burgers), ("pit-shock-tube", data.shock_tube)]
)
def test_averages_over_cells(name: str, make: Any) -> None:
    """The exact averages over the coarse cells, though the fine ones are on file."""
    source = source_of(name)
    law = {"length_scale": 0.15} if name == "pit-inviscid-burgers" else {}
    drawn = source.draw(2, 7, "test")
    assert drawn["target"].shape == (2, 32, 1)
    for case, cells in zip(source.cases(), (16, 32), strict=True):
        samples = source.read(drawn, "test", case)
        pairs = make(2, cells, seed=7, **law)
        torch.testing.assert_close(samples.input, pairs.input, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(samples.target, pairs.target, rtol=1e-5, atol=1e-5)
        assert isinstance(samples.mesh, Grid)
        torch.testing.assert_close(samples.mesh.axes[0], pairs.grid.axes[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(samples.mesh.weights, pairs.grid.weights, rtol=1e-6, atol=0)
        assert samples.mesh.kind == pairs.grid.kind and samples.mesh.period == pairs.grid.period


def test_kolmogorov_flow() -> None:
    source = source_of("vitno-kolmogorov")
    drawn = source.draw(2, 3, "test")
    fine = data.kolmogorov(2, 16, seed=3, T=0.5)
    for case, every in zip(source.cases(), (2, 1), strict=True):
        samples = source.read(drawn, "test", case)
        for got, true in ((samples.input, fine.input), (samples.target, fine.target)):
            expected = true.numpy().reshape(2, 16, 16)[:, ::every, ::every].reshape(2, -1, 1)
            np.testing.assert_array_equal(got.numpy(), expected)
        axis = np.arange(16 // every) * every * 2 * math.pi / 16
        assert isinstance(samples.mesh, Grid) and samples.mesh.kind == ("periodic", "periodic")
        np.testing.assert_allclose(samples.mesh.axes[0].numpy(), axis, rtol=1e-6)
    training = source.draw(1, 3, "train")
    assert torch.equal(training["input"], data.kolmogorov(1, 8, seed=3, T=0.5, solver_resolution=16).input)


def test_frames_of_the_vorticity() -> None:
    """Two frames in a row are the input, the one after them the target: two samples of four frames."""
    source = source_of("pit-vorticity")
    drawn = source.draw(3, 3, "test")
    frames = data.vorticity(3, 16, seed=3, solver_resolution=16, times=[1, 2, 3, 4]).vorticity.numpy()
    samples = source.read(drawn, "test", source.cases()[0])
    assert samples.input.shape == (6, 64, 2) and samples.target.shape == (6, 64, 1)
    for i in range(3):
        for first in range(2):
            row = 2 * i + first
            field = frames[i].reshape(4, 16, 16)[:, ::2, ::2].reshape(4, 64)
            np.testing.assert_array_equal(samples.input[row].numpy(), field[first : first + 2].T)
            np.testing.assert_array_equal(samples.target[row, :, 0].numpy(), field[first + 2])
    # A roll-out starts from the first two; its window of channels is an input.
    whole = source.frames(drawn)
    assert whole is not None and whole.known == 2 and whole.times == (1.0, 2.0, 3.0, 4.0)
    assert torch.equal(torch.cat([whole.values[:, 0], whole.values[:, 1]], -1), samples.input[::2])
    assert torch.equal(whole.values[:, 2], samples.target[::2]) and whole.mesh.shape == (8, 8)


def test_laws_of_the_darcy_coefficient() -> None:
    source = source_of("tno-darcy64")
    drawn = source.draw(2, 5, "train")
    expected = data.darcy(2, 17, seed=5, constant_mode=False, coefficient="lognormal", sigma=12.0, tau=3.0)
    assert torch.equal(drawn["coefficient"], expected.coefficient)
    assert torch.equal(drawn["solution"], expected.solution)
    paper = load("vitno-darcy416-lognormal").data
    assert (paper.sigma, paper.tau, paper.constant_mode) == (12.0, 6.0, False)


def test_one_mesh_for_each_sample() -> None:
    config = tiny("pit-joukowski")
    source = config.data
    drawn = source.draw(3, 5, "test")
    for case, size in zip(source.cases(), (64, 80), strict=True):
        samples = source.read(drawn, "test", case)
        pairs = data.joukowski_airfoil(3, size, seed=5)
        assert isinstance(samples.mesh, PointCloud) and samples.mesh is samples.target_mesh
        assert torch.equal(samples.mesh.points, pairs.mesh.points)
        assert torch.equal(samples.mesh.weights, pairs.mesh.weights)
        assert torch.equal(samples.input, pairs.mesh.points)
        assert torch.equal(samples.target, pairs.target[..., 2:])
    some = select(samples, torch.tensor([2, 0]))
    assert some.mesh is some.target_mesh
    assert torch.equal(some.mesh.points, samples.mesh.points[[2, 0]])
    assert torch.equal(some.mesh.weights, samples.mesh.weights[[2, 0]])
    # Each sample alone gives what it gives among others.
    operator = build(config, samples, samples)
    whole = predict(operator, samples, "mesh", 3)
    for i in range(3):
        alone = predict(operator, select(samples, torch.tensor([i])), "mesh", 1)
        torch.testing.assert_close(alone, whole[i : i + 1], rtol=1e-4, atol=1e-5)


def test_the_mean_where_every_sample_has_a_mesh(tmp_path: Any) -> None:
    """The constant predictor of the table is the mean over samples and points."""
    config = tiny("pit-joukowski")
    train(config, tmp_path, data=tmp_path / "data")
    rows = evaluate(tmp_path, data=tmp_path / "data").result["rows"]
    assert [row["kind"] for row in rows] == ["scattered", "scattered"]
    files = {split: next((tmp_path / "data").rglob(f"{split}-*.pt")) for split in ("train", "test")}
    drawn = {split: torch.load(path, weights_only=True)["tensors"] for split, path in files.items()}
    mean = drawn["train"]["target, 64"].double().mean().item()
    for row, size in zip(rows, (64, 80), strict=True):
        w, z = (drawn["test"][f"{name}, {size}"].double().numpy() for name in ("weights", "target"))
        error = np.sqrt((w * (z[..., 0] - mean) ** 2).sum(1) / (w * z[..., 0] ** 2).sum(1))
        assert row["training_mean"] == pytest.approx(error.mean(), rel=1e-4)
    assert (tmp_path / "samples.png").stat().st_size > 0


def test_radii_of_the_hole() -> None:
    """The vertices on the hole lie at the radii that are interpolated from those on file."""
    radii = hole_radii(3, 420, seed=11).numpy()
    angles = 2 * np.pi * np.arange(420) / 420
    for i in range(3):
        points, cells = perforated_square(sample_generator(11, i), 300)
        edges = np.sort(np.concatenate([cells[:, [a, b]] for a, b in ((0, 1), (1, 2), (2, 0))]), 1)
        once, count = np.unique(edges, axis=0, return_counts=True)
        at = points[np.unique(once[count == 1])] - 0.5
        rim = at[np.abs(at).max(1) < 0.45]
        assert len(rim) > 10
        expected = np.interp(np.arctan2(rim[:, 1], rim[:, 0]), angles, radii[i], period=2 * np.pi)
        np.testing.assert_allclose(np.hypot(*rim.T), expected, atol=1e-3)
    source = source_of("pit-elastic-cell")
    drawn = source.draw(2, 11, "test")
    samples = source.read(drawn, "test")
    expected = np.repeat(5 * radii[:2, None, ::10] - 1, 150, axis=1)
    np.testing.assert_allclose(samples.input.numpy(), expected, atol=1e-6)
    cells = data.elastic_cell(2, 150, seed=11)
    assert torch.equal(samples.target, cells.target[..., 2:]) and torch.equal(
        samples.mesh.points, cells.mesh.points
    )
    assert torch.equal(hole_radii(2, seed=11, start=1), hole_radii(3, seed=11)[1:])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("pit-shock-tube", {"data": {"resolutions": [24]}}, "data.cells must divide those of the finest"),
        ("vitno-kolmogorov", {"data": {"solver": 12}}, "data.resolution must be even, at least 4 and a div"),
        ("vitno-kolmogorov", {"data": {"lag": 0.0}}, r"data.lag must be above 0, was 0\.0"),
        ("pit-vorticity", {"data": {"snapshots": 2}}, "data.snapshots must be above history = 2, was 2"),
        ("pit-vorticity", {"data": {"history": 0}}, "data.history must be at least 1, was 0"),
        ("pit-joukowski", {"data": {"points": 63}}, "data.points must be at least 64, was 63"),
        ("pit-elastic-cell", {"data": {"resolutions": [149]}}, "data.points must be at least 150, was 149"),
        ("tno-darcy64", {"data": {"tau": 0.0}}, r"data.tau must be above 0, was 0\.0"),
        ("tno-darcy64", {"data": {"coefficient": "smooth"}}, "data.coefficient must be one of piecewise"),
        (
            "pit-joukowski",
            {"normalizers": {"target": "pointwise"}},
            'normalizers.target must not be "pointwise" for samples that are not on a grid',
        ),
    ],
)  # fmt: skip
def test_wrong_settings(name: str, changes: dict[str, Any], message: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tiny(name, **changes), tmp_path)
    assert not list(tmp_path.iterdir())
