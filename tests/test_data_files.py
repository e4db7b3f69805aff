"""Published files: each format, its values and axes; damaged and foreign ones; grids of pairs."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import continuum_ops as co
from continuum_ops.data import grid_pairs, read_arrays

h5py = pytest.importorskip("h5py", reason="the extra files")
scipy_io = pytest.importorskip("scipy.io", reason="the extra files")

A = np.arange(24.0).reshape(2, 3, 4)
B = np.arange(6, dtype=np.float32).reshape(3, 2)


class Trap:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "executed")


def matlab_hdf5(path: Path) -> None:
    """As MATLAB 7.3 writes: a header in a user block, axes in reverse, the class of each variable."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, values in (("a", A), ("b", B)):
            file.create_dataset(name, data=values.T).attrs["MATLAB_class"] = np.bytes_("double")
        file.create_dataset("text", data=np.array([[104], [105]], np.uint16)).attrs["MATLAB_class"] = (
            np.bytes_("char")
        )
        empty = file.create_dataset("empty", data=np.array([0, 3], np.uint64))
        empty.attrs["MATLAB_class"], empty.attrs["MATLAB_empty"] = np.bytes_("double"), np.uint8(1)
        file.create_dataset("#refs#/x", data=A)
    with path.open("r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM")


def write(name: str, path: Path) -> None:
    if name == "npz":
        np.savez_compressed(path, a=A, b=B)
    elif name == "mat":
        scipy_io.savemat(path, {"a": A, "b": B, "text": "hello", "cell": np.array([1, "x"], dtype=object)})
    elif name == "v73":
        matlab_hdf5(path)
    elif name == "h5":
        with h5py.File(path, "w") as file:
            file["a"], file["b"], file["text"] = A, B, "hello"
            file["t0_fields/density"] = A + 1
    elif name == "pt":
        torch.save(
            {"a": torch.from_numpy(A), "b": torch.from_numpy(B), "list": [torch.ones(2), "text"]}, path
        )
    elif name == "legacy":
        data = {"a": torch.from_numpy(A), "b": torch.from_numpy(B)}
        torch.save(data, path, _use_new_zipfile_serialization=False)


SUFFIX = {"npz": "npz", "mat": "mat", "v73": "mat", "h5": "hdf5", "pt": "pt", "legacy": "pt"}


@pytest.mark.parametrize("name", SUFFIX)
def test_formats(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"file.{SUFFIX[name]}"
    write(name, path)
    arrays = read_arrays(path)
    assert torch.equal(arrays["a"], torch.from_numpy(A)) and arrays["a"].dtype == torch.float64
    assert torch.equal(arrays["b"], torch.from_numpy(B)) and arrays["b"].dtype == torch.float32
    assert all(array.is_contiguous() for array in arrays.values())
    extra = {"h5": {"t0_fields/density"}, "pt": {"list/0"}, "v73": {"empty"}}.get(name, set())
    assert set(arrays) == {"a", "b"} | extra
    if name == "h5":
        assert torch.equal(arrays["t0_fields/density"], torch.from_numpy(A + 1))
    if name == "v73":
        assert arrays["empty"].shape == (0, 3)
    only = read_arrays(str(path), ["b"])
    assert list(only) == ["b"] and torch.equal(only["b"], arrays["b"])
    with pytest.raises(ValueError, match=r"names must be among \['a', 'b'.*\] of .*, got 'c'"):
        read_arrays(path, ["a", "c"])


def test_files_of_one_array(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.asfortranarray(A).astype(">f4"))
    array = read_arrays(tmp_path / "x.npy")["x"]
    assert torch.equal(array, torch.from_numpy(A).float()) and array.is_contiguous()
    torch.save(torch.from_numpy(B), tmp_path / "y.pt")
    assert torch.equal(read_arrays(tmp_path / "y.pt")["y"], torch.from_numpy(B))
    scipy_io.savemat(tmp_path / "z.mat", {"b": B.astype(float)}, format="4")
    assert torch.equal(read_arrays(tmp_path / "z.mat")["b"], torch.from_numpy(B).double())


def test_the_content_says_what_a_file_is(tmp_path: Path) -> None:
    write("h5", tmp_path / "data.mat")
    assert torch.equal(read_arrays(tmp_path / "data.mat")["a"], torch.from_numpy(A))
    write("npz", tmp_path / "data.npz")
    (tmp_path / "data.npz").rename(tmp_path / "data.bin")
    assert torch.equal(read_arrays(tmp_path / "data.bin")["b"], torch.from_numpy(B))


@pytest.mark.parametrize("name", ["mat", "v73", "h5", "pt"])
def test_a_named_text_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"file.{SUFFIX[name]}"
    write(name, path)
    text = "list/1" if name == "pt" else "text"
    with pytest.raises(ValueError, match=rf"'{text}' of .* must be an array of numbers"):
        read_arrays(path, [text])


@pytest.mark.parametrize("name", ["npy", *SUFFIX])
def test_truncated_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"file.{SUFFIX.get(name, name)}"
    if name == "npy":
        np.save(path, A)
    else:
        write(name, path)
    whole = path.read_bytes()
    for share in (0.5, 0.9):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match=r"file\.\w+ is damaged"):
            read_arrays(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"file\.\w+ is empty"):
        read_arrays(path)


def test_pickles_are_refused_and_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    trap = np.array([Trap(mark)], dtype=object)
    np.save(tmp_path / "x.npy", trap, allow_pickle=True)
    np.savez(tmp_path / "x.npz", a=A, trap=trap)
    torch.save({"a": torch.ones(1), "trap": Trap(mark)}, tmp_path / "x.pt")
    torch.save(Trap(mark), tmp_path / "y.pt", _use_new_zipfile_serialization=False)
    for name in ("x.npy", "x.npz"):
        with pytest.raises(ValueError, match="holds pickled objects, which are not read"):
            read_arrays(tmp_path / name)
    for name in ("x.pt", "y.pt"):
        with pytest.raises(ValueError, match="holds objects other than tensors, dicts, lists and tuples"):
            read_arrays(tmp_path / name)
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(
        ValueError, match=r"x\.pkl must be a \.npy, \.npz, \.mat, .* file, its first bytes are"
    ):
        read_arrays(tmp_path / "x.pkl")
    assert not mark.exists()


def test_foreign_files(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(ValueError, match="it is another archive"):
        read_arrays(tmp_path / "x.zip")
    (tmp_path / "x.mat").write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(ValueError, match=r"x\.mat is damaged"):
        read_arrays(tmp_path / "x.mat")
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "none.npy")
    with pytest.raises(TypeError, match="names must be a sequence of names, got 'a'"):
        read_arrays(tmp_path / "x.zip", "a")


@pytest.mark.parametrize(("name", "package"), [("mat", "scipy.io"), ("v73", "h5py"), ("h5", "h5py")])
def test_without_packages(name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"file.{SUFFIX[name]}"
    write(name, path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"continuum_ops\[files\]"):
        read_arrays(path)


def test_pairs_on_grids() -> None:
    rng = np.random.default_rng(0)
    a, u = rng.standard_normal((3, 9, 5)), rng.standard_normal((3, 9, 5, 2))
    pairs = grid_pairs(a, u, 2, kind="endpoint", dtype=torch.float64)
    assert pairs.grid.shape == (9, 5) and pairs.grid.kind == ("endpoint", "endpoint")
    np.testing.assert_array_equal(pairs.input.numpy(), a.reshape(3, 45, 1))
    np.testing.assert_array_equal(pairs.target.numpy(), u.reshape(3, 45, 2))
    coarse = grid_pairs(a, u, 2, kind="endpoint", every=4, dtype=torch.float64)
    np.testing.assert_array_equal(coarse.target.numpy(), u[:, ::4, ::4].reshape(3, 6, 2))
    kept = pairs.grid.points.view(9, 5, 2)[::4, ::4].reshape(6, 2)
    torch.testing.assert_close(coarse.grid.points, kept)
    line = grid_pairs(torch.ones(2, 8), torch.ones(2, 8), 1, kind="periodic", bounds=(0, 2), every=2)
    assert line.grid.points[:, 0].tolist() == [0.0, 0.5, 1.0, 1.5] and line.grid.period == (2.0,)
    cells = grid_pairs(torch.ones(2, 4), torch.ones(2, 4), 1, kind="cell")
    assert cells.grid.points[:, 0].tolist() == [0.125, 0.375, 0.625, 0.875]
    assert line.input.dtype == line.grid.dtype == torch.float32


one = torch.ones(2, 8)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"input": one[:1]}, ValueError, r"grid of input, \(1, 8\), got \(2, 8\)"),
        ({"target": torch.ones(2, 9)}, ValueError, r"grid of input, \(2, 8\), got \(2, 9\)"),
        (
            {"input": torch.ones(2, 8, 3, 1)},
            ValueError,
            r"input must have shape \(n, N\) or \(n, N, c\), got",
        ),
        ({"input": one * torch.nan}, ValueError, "input must be finite, got NaN or Inf"),
        ({"target": one + 0j}, TypeError, "target must hold real numbers, got torch.complex64"),
        ({"ndim": 4}, ValueError, "ndim must be at most 3, got 4"),
        ({"kind": "centre"}, ValueError, "kind"),
        ({"every": 3}, ValueError, r'every must divide 8 on axis 0 of kind "periodic", got 3'),
        (
            {"every": 2, "kind": "endpoint"},
            ValueError,
            r'every must divide 7 on axis 0 of kind "endpoint", got 2',
        ),
        ({"every": 2, "kind": "cell"}, ValueError, r'every must divide 1 on axis 0 of kind "cell", got 2'),
        ({"dtype": torch.int64}, TypeError, "dtype must be torch.float32"),
    ],
)
def test_errors(change, error, message) -> None:
    with pytest.raises(error, match=message):
        co.data.grid_pairs(**{"input": one, "target": one, "ndim": 1, "kind": "periodic", **change})
