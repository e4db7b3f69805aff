"""Files in the layouts of PDEBench and The Well, as their documentation describes them."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from continuum_ops.cli import main
from continuum_ops.data import layout_of, read_pdebench, read_the_well

h5py = pytest.importorskip("h5py", reason="the extra files")

rng = np.random.default_rng(0)
X, Y = (np.arange(6) + 0.5) / 6, (np.arange(4) + 0.5) / 4
SERIES = rng.standard_normal((3, 5, 6, 4))
STATIC = rng.standard_normal((3, 6, 4))


def pdebench(path: Path, **arrays: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name.replace("_coordinate", "-coordinate")] = values
    return path


def flow(path: Path, **more: Any) -> Path:
    """2-D compressible flow: one time more than there are frames."""
    arrays = {"density": SERIES, "Vx": SERIES + 1, "x_coordinate": X, "y_coordinate": Y}
    return pdebench(path, **{**arrays, "t_coordinate": np.linspace(0, 1, 6), **more})


def the_well(path: Path, **changes: Any) -> Path:
    """Two axes, x periodic: scalars, one constant in time, one of x alone; a vector, a tensor."""
    with h5py.File(path, "w") as file:
        file.attrs["dataset_name"], file.attrs["grid_type"] = "example", changes.get("grid_type", "cartesian")
        file.attrs["n_spatial_dims"], file.attrs["n_trajectories"] = 2, 3
        dimensions = file.create_group("dimensions")
        dimensions.attrs["spatial_dims"] = ["x", "y"]
        for name, values in (("time", np.arange(5.0)), ("x", np.arange(6) / 6), ("y", Y)):
            dimensions[name] = values.astype(np.float32)
            dimensions[name].attrs["sample_varying"] = changes.get("sample_varying") == name
        for name, kind in (("x", changes.get("bc_type", "PERIODIC")), ("y", "WALL")):
            condition = file.create_group(f"boundary_conditions/{name}_boundary")
            condition.attrs["bc_type"], condition.attrs["associated_dims"] = kind, [name]
        fields = {
            "t0_fields/pressure": (SERIES, (True, True, True, True)),
            "t0_fields/depth": (STATIC, (True, False, True, True)),
            "t0_fields/profile": (STATIC[0, :, 0], (False, False, True, False)),
            "t1_fields/velocity": (np.stack([SERIES, -SERIES], -1), (True, True, True, True)),
            "t2_fields/stress": (np.zeros((3, 5, 6, 4, 2, 2)) + np.arange(4).reshape(2, 2), (True,) * 4),
        }
        for name, (values, varies) in fields.items():
            file[name] = changes.get(name, values).astype(np.float32)
            attrs = file[name].attrs
            attrs["sample_varying"], attrs["time_varying"], attrs["dim_varying"] = *varies[:2], varies[2:]
        for order, names in enumerate((["pressure", "depth", "profile"], ["velocity"], ["stress"])):
            file[f"t{order}_fields"].attrs["field_names"] = names
    return path


def test_pdebench_arrays(tmp_path: Path) -> None:
    found = read_pdebench(flow(tmp_path / "flow.hdf5"), dtype=torch.float64)
    assert found.names == ("Vx", "density")
    np.testing.assert_array_equal(found.values[..., 1].numpy(), SERIES.reshape(3, 5, 24))
    np.testing.assert_array_equal(found.values[..., 0].numpy(), SERIES.reshape(3, 5, 24) + 1)
    np.testing.assert_allclose(found.times.numpy(), [0, 0.2, 0.4, 0.6, 0.8])
    assert found.grid.kind == ("cell", "cell")
    np.testing.assert_allclose(found.grid.axes[0].numpy(), X)
    np.testing.assert_allclose(found.grid.weights.numpy(), np.full(24, 1 / 24))
    some = read_pdebench(tmp_path / "flow.hdf5", ["density"], samples=slice(1, 3))
    np.testing.assert_array_equal(
        some.values[..., 0].numpy(), SERIES[1:].reshape(2, 5, 24).astype(np.float32)
    )
    assert some.values.dtype == some.grid.dtype == some.times.dtype == torch.float32


def test_pdebench_line_and_darcy(tmp_path: Path) -> None:
    """One axis, periodic, with as many frames as points; and a coefficient without a time."""
    values = rng.standard_normal((2, 6, 6))
    path = pdebench(tmp_path / "a.hdf5", tensor=values, x_coordinate=X.astype(np.float32))
    found = read_pdebench(path, kind="periodic", dtype=torch.float64)
    np.testing.assert_array_equal(found.values[..., 0].numpy(), values)
    assert found.grid.period[0] == pytest.approx(1) and found.times.tolist() == [0, 1, 2, 3, 4, 5]
    path = pdebench(
        tmp_path / "b.hdf5",
        nu=STATIC,
        tensor=STATIC[:, None],
        x_coordinate=X,
        y_coordinate=Y,
        t_coordinate=[0.0, 1],
    )
    found = read_pdebench(path, ["nu", "tensor"], dtype=torch.float64)
    assert found.values.shape == (3, 1, 24, 2) and found.times.tolist() == [0.0]
    np.testing.assert_array_equal(found.values[:, 0, :, 0].numpy(), STATIC.reshape(3, 24))


def test_pdebench_incompressible(tmp_path: Path) -> None:
    velocity, force = rng.standard_normal((3, 5, 4, 4, 2)), rng.standard_normal((3, 4, 4, 2))
    path = pdebench(tmp_path / "ns.h5", velocity=velocity, force=force, t=np.tile(np.arange(5.0), (3, 1)))
    found = read_pdebench(path, ["velocity", "force"], kind="periodic", dtype=torch.float64)
    assert found.names == ("velocity_0", "velocity_1", "force_0", "force_1")
    np.testing.assert_array_equal(found.values[..., :2].numpy(), velocity.reshape(3, 5, 16, 2))
    np.testing.assert_array_equal(found.values[:, 4, :, 2:].numpy(), force.reshape(3, 16, 2))
    assert found.times.tolist() == [0, 1, 2, 3, 4] and found.grid.shape == (4, 4)


def test_pdebench_groups(tmp_path: Path) -> None:
    values = rng.standard_normal((3, 5, 6, 4, 2))
    with h5py.File(tmp_path / "rd.h5", "w") as file:
        for i in range(3):
            group = file.create_group(f"{i:04}")
            group["data"], group["grid/x"], group["grid/y"] = values[i], X, Y
            group["grid/t"] = np.linspace(0, 2, 5)
    found = read_pdebench(tmp_path / "rd.h5", samples=slice(1, None), dtype=torch.float64)
    np.testing.assert_array_equal(found.values.numpy(), values[1:].reshape(2, 5, 24, 2))
    assert found.names == ("data_0", "data_1") and found.times.tolist() == [0, 0.5, 1, 1.5, 2]
    with pytest.raises(ValueError, match=r"fields must be among \['data'\] of .*, got \['u'\]"):
        read_pdebench(tmp_path / "rd.h5", ["u"])
    with pytest.raises(ValueError, match=r"samples must choose some of the 3 of"):
        read_pdebench(tmp_path / "rd.h5", samples=slice(5, 9))


def test_the_well(tmp_path: Path) -> None:
    found = read_the_well(the_well(tmp_path / "w.hdf5"))
    names = ("pressure", "depth", "profile", "velocity_0", "velocity_1", *(f"stress_{i}" for i in range(4)))
    assert found.names == names and found.values.shape == (3, 5, 24, 9)
    single = SERIES.reshape(3, 5, 24).astype(np.float32)
    static, profile = STATIC.astype(np.float32), STATIC[0, :, 0].astype(np.float32)
    expected = [single, np.repeat(static.reshape(3, 1, 24), 5, 1), np.tile(profile.repeat(4), (3, 5, 1))]
    expected += [single, -single, *(np.full((3, 5, 24), float(i)) for i in range(4))]
    np.testing.assert_array_equal(found.values.numpy(), np.stack(expected, -1))
    assert found.grid.kind == ("periodic", "cell") and found.grid.period[0] == pytest.approx(1, rel=1e-6)
    assert found.times.tolist() == [0, 1, 2, 3, 4]
    some = read_the_well(tmp_path / "w.hdf5", ["profile", "depth"], samples=slice(2, 3), kind="cell")
    np.testing.assert_array_equal(
        some.values[0, 0].numpy(), np.stack([profile.repeat(4), static[2].ravel()], -1)
    )
    assert some.values.shape == (1, 1, 24, 2) and some.times.tolist() == [0.0]


READERS = [(read_pdebench, flow), (read_the_well, the_well)]


@pytest.mark.parametrize(("read", "write"), READERS)
def test_files_that_cannot_be_read(read: Any, write: Any, tmp_path: Path, monkeypatch: Any) -> None:
    path = write(tmp_path / "x.hdf5")
    whole = path.read_bytes()
    for share in (0.3, 0.6, 0.9):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match=r"x\.hdf5 is damaged"):
            read(path)
    path.write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match=r"x\.hdf5 must be an HDF5 file, its first bytes are b'\\x80"):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"must be an HDF5 file, its first bytes are b''"):
        read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.hdf5")
    path.write_bytes(whole)
    with pytest.raises(TypeError, match=r"dtype must be torch\.float32 or torch\.float64"):
        read(path, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"fields must be among \[.*\] of .*, got 'nothing'"):
        read(path, ["nothing"])
    with pytest.raises(ValueError, match="fields must be a sequence of names, got 'density'"):
        read(path, "density")
    with pytest.raises(ValueError, match=r"samples must choose some of those of .*, got none"):
        read(path, samples=slice(7, 9))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"continuum_ops\[files\]"):
        read(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"density": SERIES[..., :3]},
            r"density of .* must have the grid \(6, 4\) of the coordinates, has",
        ),
        ({"density": SERIES * np.nan}, "density of .* must be finite, holds NaN or Inf"),
        ({"density": SERIES[:2]}, "density of .* must have 3 samples and 5 frames, has"),
        ({"x_coordinate": X[::-1].copy()}, "coordinates of .*: axes"),
        ({"t_coordinate": [0.0]}, "must have a time for each of 5 frames, has 1"),
    ],
)
def test_pdebench_files_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_pdebench(flow(tmp_path / "x.hdf5", **changes))


def test_one_layout_for_another(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a file of The Well: it has no dimensions, has"):
        read_the_well(flow(tmp_path / "a.hdf5"))
    with pytest.raises(ValueError, match="must be a file of PDEBench: it has no x-coordinate, has"):
        read_pdebench(the_well(tmp_path / "b.hdf5"))
    with h5py.File(tmp_path / "c.hdf5", "w") as file:
        file["0000/u"] = X
    with pytest.raises(ValueError, match=r"must be a file of PDEBench: 0000 has \['u'\], not data and grid"):
        read_pdebench(tmp_path / "c.hdf5")
    with pytest.raises(ValueError, match="must hold fields, it holds none"):
        read_pdebench(pdebench(tmp_path / "d.hdf5", x_coordinate=X))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid_type": "spherical"}, "must hold a Cartesian grid, its grid_type is 'spherical'"),
        ({"sample_varying": "y"}, "must have one grid for all samples, 'y' differs between them"),
        ({"t0_fields/depth": SERIES}, r"depth of .* must have shape \(3, 6, 4\) and 1 components, has"),
        ({"t1_fields/velocity": SERIES}, r"velocity of .* must have shape \(3, 5, 6, 4\) and 2 components"),
    ],
)  # fmt: skip
def test_the_well_files_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_the_well(the_well(tmp_path / "x.hdf5", **changes))


def call(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(path)])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What a file holds; and one line and exit code 2 for a file that is damaged, foreign or not there."""
    code, out, _ = call(capsys, flow(tmp_path / "a.hdf5"))
    assert code == 0
    assert out.splitlines() == [
        "layout  PDEBench",
        "fields  Vx, density",
        "grid    6 x 4, cell, cell",
        "frames  5, t = 0 to 0.8",
    ]
    code, out, _ = call(capsys, the_well(tmp_path / "b.hdf5"))
    assert code == 0 and out.startswith("layout  The Well\nfields  pressure, depth, profile, velocity_0")
    np.savez(tmp_path / "c.npz", a=STATIC, b=np.arange(3))
    code, out, _ = call(capsys, tmp_path / "c.npz")
    assert code == 0 and [line.split(maxsplit=1) for line in out.splitlines()] == [
        ["a", "(3, 6, 4) float64"],
        ["b", "(3,) int64"],
    ]
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["u"] = STATIC
    assert layout_of(tmp_path / "d.h5") is None
    assert call(capsys, tmp_path / "d.h5")[1].split() == ["u", "(3,", "6,", "4)", "float64"]

    whole = (tmp_path / "a.hdf5").read_bytes()
    (tmp_path / "a.hdf5").write_bytes(whole[: len(whole) // 2])
    np.save(tmp_path / "e.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "f.h5").write_bytes(b"<html>not found</html>")
    for name, message in (
        ("a.hdf5", "is damaged"),
        ("e.npy", "holds pickled objects, which are not read"),
        ("f.h5", "must be an HDF5 file, its first bytes are"),
        ("g.h5", "g.h5: no such file"),
    ):
        code, out, err = call(capsys, tmp_path / name)
        assert code == 2 and out == "" and err.count("\n") == 1
        assert err.startswith("Error: ") and message in err
