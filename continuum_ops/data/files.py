"""Arrays of published data files, and pairs of functions made of them."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..mesh import Grid
from ._mat5 import check as check_mat5
from .functions import FunctionPairs
from .trajectories import check_dtype, check_int

HDF5 = b"\x89HDF\r\n\x1a\n"
FORMATS = ".npy, .npz, .mat, .h5 / .hdf5 or .pt"
NUMBERS = "biufc"  # numpy's kinds; not times, whose unit a tensor cannot hold


def read_arrays(path: str | os.PathLike[str], names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The arrays of numbers in a data file, by name.

    What the file is, its first bytes say, not its name:

    * .npy, .npz (numpy);
    * .mat of MATLAB up to version 7.2 (scipy), and of version 7.3 (h5py), with MATLAB's order of the axes in
      both: HDF5 holds them in reverse;
    * .h5, .hdf5 (h5py): as for PDEBench or The Well, "t0_fields/density" naming a data set in a group;
    * .pt of tensors, or of dicts, lists and tuples of them, nested names joined by "/" and items of a list
      by their index (``torch.load(weights_only=True)``).

    A .npy file and a .pt file of one tensor have one array, named like the file without its ending. Nothing
    in a file is executed: pickled objects are refused.

    Args:
        path: of the file.
        names: of the arrays wanted; None for all. What is not an array of numbers (texts, cells, structs) is
            left out unless it is named.

    Returns:
        dict: name -> tensor on the CPU, in the dtype of the file, contiguous.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is none of these, is damaged or larger than memory, holds pickled objects, or
            names data in another file (HDF5); a name that it does not have, or that is not an array of
            numbers, such as an array of times with a unit.
        TypeError: names that are not a sequence of names.
        ImportError: without scipy for .mat, h5py for version 7.3 and .h5.
    """
    if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
        raise TypeError(f"names must be a sequence of names, got {names!r}")
    path = Path(path)
    reader = _reader(path)
    try:
        return reader(path, names)
    except (ImportError, _Refused):
        raise
    except MemoryError as error:  # a damaged file may ask for any size
        raise ValueError(f"{path} is damaged or too large for this machine: {error}") from error
    except Exception as error:  # the libraries raise what they happen to meet in a damaged file
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def grid_pairs(
    input: Tensor | np.ndarray,
    target: Tensor | np.ndarray,
    ndim: int,
    *,
    kind: str | Sequence[str],
    bounds: Sequence[Any] | None = None,
    every: int = 1,
    dtype: torch.dtype = torch.float32,
) -> FunctionPairs:
    """Pairs of functions on an evenly spaced grid, from arrays as files hold them.

    Published files do not say where their samples lie, so ``kind`` must: both ends of the interval included
    ("endpoint"; the 421 x 421 Darcy flows), one period without the repeated end ("periodic"; Burgers,
    Navier-Stokes, Kolmogorov flow), or the centres of cells ("cell"; finite volumes, PDEBench).

    Args:
        input: (n, N_1, .., N_d) or (n, N_1, .., N_d, c_in) real numbers.
        target: likewise, on the same grid.
        ndim: d, 1 to 3.
        kind: one name for all axes or one per axis.
        bounds: (lo, hi) per axis, on one axis also (lo, hi) alone; None for the unit cube.
        every: take every so-many-th point of each axis, from the first. It must divide N_i - 1 on an
            "endpoint" axis, N_i on a "periodic" one, and be 1 on a "cell" axis, whose centres are not nested.
        dtype: torch.float32 or torch.float64, of everything that is returned.

    Returns:
        FunctionPairs: grid, input (n, N, c_in), target (n, N, c_out), N in row-major order; on the CPU.

    Raises:
        TypeError: arrays that do not hold real numbers.
        ValueError: shapes that do not fit; values that are not finite; a kind or bounds that do not fit.
    """
    ndim = check_int("ndim", ndim, minimum=1)
    if ndim > 3:
        raise ValueError(f"ndim must be at most 3, got {ndim}")
    every = check_int("every", every, minimum=1)
    dtype = check_dtype(dtype)
    fields = [_field("input", input, ndim), _field("target", target, ndim)]
    shapes = [tuple(field.shape[: ndim + 1]) for field in fields]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"target must have as many samples and the grid of input, {shapes[0]}, got {shapes[1]}"
        )
    grid = Grid.uniform(shapes[0][1:], bounds, kind)
    if every > 1:
        for axis, (size, name) in enumerate(zip(grid.shape, grid.kind, strict=True)):
            span = {"endpoint": size - 1, "periodic": size, "cell": 1}[name]
            if span % every:
                raise ValueError(f'every must divide {span} on axis {axis} of kind "{name}", got {every}')
        shape = [len(range(0, size, every)) for size in grid.shape]
        grid = Grid.uniform(shape, bounds, kind)
        fields = [field[(slice(None), *[slice(None, None, every)] * ndim)] for field in fields]
    pairs = [field.flatten(1, ndim).to(dtype).contiguous() for field in fields]
    return FunctionPairs(grid.to(dtype=dtype), *pairs)


def _field(name: str, values: Tensor | np.ndarray, ndim: int) -> Tensor:
    field = values if isinstance(values, Tensor) else torch.as_tensor(values)
    if field.is_complex() or field.dtype == torch.bool:
        raise TypeError(f"{name} must hold real numbers, got {field.dtype}")
    if field.ndim == ndim + 1:
        field = field.unsqueeze(-1)
    axes = ", ".join("N" * ndim)
    if field.ndim != ndim + 2 or not field.numel():
        raise ValueError(f"{name} must have shape (n, {axes}) or (n, {axes}, c), got {tuple(field.shape)}")
    field = field.detach().cpu()
    if not bool(torch.isfinite(field).all()):
        raise ValueError(f"{name} must be finite, got NaN or Inf")
    return field


class _Refused(ValueError):
    """A whole file that does not hold what is wanted."""


Reader = Callable[[Path, "Sequence[str] | None"], dict[str, Tensor]]


def _reader(path: Path) -> Reader:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path} must be a {FORMATS} file, it is no regular file")
    with path.open("rb") as file:
        head = file.read(520)
    if not head:
        raise ValueError(f"{path} is empty")
    if head.startswith(b"\x93NUMPY"):
        return _read_npy
    if head.startswith(b"PK"):
        return _read_zip
    if head.startswith(b"MATLAB 7.3") or head.startswith(HDF5) or head[512:].startswith(HDF5):
        return _read_matlab_hdf5 if head.startswith(b"MATLAB") else _read_hdf5
    if head.startswith(b"MATLAB 5.0") or path.suffix == ".mat":
        return _read_mat
    if path.suffix in (".pt", ".pth"):
        return _read_torch
    raise ValueError(f"{path} must be a {FORMATS} file, its first bytes are {head[:8]!r}")


def _read_npy(path: Path, names: Sequence[str] | None) -> dict[str, Tensor]:
    try:
        values = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise _pickled(path, error) from error
    if values.dtype.kind not in NUMBERS:
        raise _Refused(f"{path} must hold an array of numbers, it holds {values.dtype}")
    return _chosen(path, {path.stem: values}, names)


def _read_zip(path: Path, names: Sequence[str] | None) -> dict[str, Tensor]:
    with zipfile.ZipFile(path) as archive:
        members = archive.namelist()
    if any(member.endswith("data.pkl") for member in members):
        return _read_torch(path, names)
    if not all(member.endswith(".npy") for member in members):
        raise _Refused(f"{path} must be a {FORMATS} file, it is another archive")
    with np.load(path, allow_pickle=False) as archive:
        try:
            return _chosen(path, archive, names)
        except _Refused:
            raise
        except ValueError as error:
            raise _pickled(path, error) from error


def _pickled(path: Path, error: ValueError) -> ValueError:
    if "allow_pickle" in str(error):
        return _Refused(f"{path} must hold arrays of numbers, it holds pickled objects, which are not read")
    return ValueError(str(error))


def _read_torch(path: Path, names: Sequence[str] | None) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # a name cut short looks like a forbidden one
        others = "objects other than tensors, dicts, lists and tuples, which are not read"
        raise _Refused(f"{path} is damaged or holds {others}") from error
    if isinstance(content, Tensor):
        content = {path.stem: content}
    return _chosen(path, dict(_flat(content)), names)


def _flat(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, Mapping):
        items = list(content.items())
    elif isinstance(content, list | tuple):
        items = list(enumerate(content))
    else:
        yield prefix, content
        return
    for key, value in items:
        yield from _flat(value, f"{prefix}/{key}" if prefix else str(key))


def _read_mat(path: Path, names: Sequence[str] | None) -> dict[str, Tensor]:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ImportError('a .mat file needs scipy: pip install "continuum_ops[files]"') from error
    with path.open("rb") as file:
        if file.read(10) == b"MATLAB 5.0":
            check_mat5(path)
    content = loadmat(path)
    return _chosen(path, {name: content[name] for name in content if not name.startswith("__")}, names)


def _read_hdf5(path: Path, names: Sequence[str] | None, matlab: bool = False) -> dict[str, Tensor]:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f'{path.name} needs h5py: pip install "continuum_ops[files]"') from error
    with h5py.File(path, "r") as file:
        found: dict[str, Any] = {}

        def visit(name: str, entry: Any) -> None:
            if isinstance(entry, h5py.Dataset) and not name.startswith("#"):
                if entry.external or entry.is_virtual:
                    raise _Refused(f"{name!r} of {path} names data in another file, which are not read")
                found[name] = entry

        file.visititems(visit)
        return _chosen(path, found, names, _matlab_values if matlab else None)


def _read_matlab_hdf5(path: Path, names: Sequence[str] | None) -> dict[str, Tensor]:
    return _read_hdf5(path, names, matlab=True)


def _matlab_values(entry: Any) -> np.ndarray:
    if entry.attrs.get("MATLAB_class") == b"char":
        return np.asarray("text")
    if entry.attrs.get("MATLAB_empty"):
        return np.empty(entry[()].astype(int))
    return entry[()].T


def _chosen(
    path: Path,
    content: Mapping[str, Any],
    names: Sequence[str] | None,
    values: Callable[[Any], np.ndarray] | None = None,
) -> dict[str, Tensor]:
    wanted = list(content) if names is None else list(names)
    for name in wanted:
        if name not in content:
            raise _Refused(f"names must be among {sorted(content)} of {path}, got {name!r}")
    arrays = {}
    for name in wanted:
        entry = content[name]
        tensor = _tensor(entry if isinstance(entry, Tensor) else (values or np.asarray)(entry))
        if tensor is not None:
            arrays[name] = tensor
        elif names is not None:
            raise _Refused(f"{name!r} of {path} must be an array of numbers, it is something else")
    return arrays


def _tensor(values: Any) -> Tensor | None:
    if isinstance(values, Tensor):
        return values.contiguous()
    if values.dtype.kind not in NUMBERS:
        return None
    return torch.from_numpy(np.require(values, values.dtype.newbyteorder("="), ["C", "W"]))
