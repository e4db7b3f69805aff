"""Readers of two published layouts of HDF5 files: PDEBench and The Well."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..mesh import Grid
from .trajectories import check_dtype

AXES = ("x", "y", "z")
SIGNATURE = b"\x89HDF\r\n\x1a\n"


class FieldSeries(NamedTuple):
    """Fields in time on one grid, as files hold them.

    grid: N points in row-major order, the coordinates of the file.
    times: (F,), of the frames.
    values: (n, F, N, c); what does not depend on time, or on the sample, is repeated.
    names: c names of the channels, "velocity_0" and "velocity_1" of a field with two.
    """

    grid: Grid
    times: Tensor
    values: Tensor
    names: tuple[str, ...]


def read_pdebench(
    path: str | os.PathLike[str],
    fields: Sequence[str] | None = None,
    *,
    kind: str | Sequence[str] = "cell",
    samples: slice = slice(None),
    dtype: torch.dtype = torch.float32,
) -> FieldSeries:
    """Fields of a file of PDEBench (Takamoto et al., 2022).

    Its three layouts:

    * arrays (n, t, x, ..) or (n, x, ..), channels last if there are several ("tensor", "nu"; "density",
      "pressure", "Vx", ..), beside "x-coordinate", "y-coordinate", "z-coordinate" and "t-coordinate", which
      may have one entry more than there are frames;
    * "velocity", "particles" (n, t, x, y, c) and "force" (n, x, y, c) beside "t", without coordinates: the
      unit square;
    * a group for each sample, "0000" and so on, with "data" (t, x, .., c) and "grid/x", .., "grid/t".

    Args:
        path: of the file.
        fields: names of arrays, in the order wanted; None: all, sorted. In a file of groups "data" alone.
        kind: of the grid's axes; coordinates are centres of cells in most of these files, "periodic" for the
            periodic equations.
        samples: which of them, ``slice(0, 100)``; nothing else is read.
        dtype: torch.float32 or torch.float64, of everything that is returned.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no HDF5 file, is damaged or has another layout; a name that it does not have;
            coordinates that do not fit the arrays or the kind; values that are not finite.
        ImportError: without h5py.
    """
    dtype = check_dtype(dtype)
    with _opened(path) as file:
        groups = sorted(name for name in file if name.isdigit())
        if groups:
            return _pdebench_groups(path, file, groups, fields, kind, samples, dtype)
        arrays = {n: a for n, a in file.items() if hasattr(a, "shape") and a.dtype.kind in "fiu"}
        axes = [arrays.pop(f"{x}-coordinate") for x in AXES if f"{x}-coordinate" in arrays]
        time = arrays.pop("t-coordinate", None)
        if not axes and "velocity" in arrays:
            time = arrays.pop("t", None)
            sizes = arrays["velocity"].shape[2:-1]
            grid = Grid.uniform(sizes, kind=kind)
        else:
            if not axes:
                raise _Layout(
                    f"{path} must be a file of PDEBench: it has no x-coordinate, has {sorted(file)}"
                )
            grid = _grid(path, [np.asarray(axis) for axis in axes], kind)
        named = {name: arrays[name] for name in _wanted(path, arrays, fields)}
        parts = {name: _pdebench_field(path, name, a, grid.shape, samples) for name, a in named.items()}
        frames = max(part.shape[1] for part in parts.values())
        at = np.arange(float(frames)) if time is None else np.atleast_2d(time[()])[0]
        return _series(path, grid, at, parts, dtype)


def read_the_well(
    path: str | os.PathLike[str],
    fields: Sequence[str] | None = None,
    *,
    kind: str | Sequence[str] | None = None,
    samples: slice = slice(None),
    dtype: torch.dtype = torch.float32,
) -> FieldSeries:
    """Fields of a file of The Well (Ohana et al., 2024), on a Cartesian grid.

    "dimensions" holds the coordinates, "t0_fields", "t1_fields" and "t2_fields" scalars, vectors and tensors
    (n, t, x, .., components); their attributes say on which of samples, times and axes each depends, and it
    is repeated along the others. "boundary_conditions" say which axes are periodic.

    Args:
        path: of the file.
        fields: names of fields, in the order wanted; None: all, in the file's order.
        kind: of the grid's axes; None: "periodic" where a boundary condition says so, else "cell".
        samples, dtype: as of :func:`read_pdebench`.

    Raises:
        As :func:`read_pdebench`; ValueError also for a grid that is not Cartesian or differs between samples.
    """
    dtype = check_dtype(dtype)
    with _opened(path) as file:
        for group in ("dimensions", "t0_fields"):
            if group not in file:
                raise _Layout(f"{path} must be a file of The Well: it has no {group}, has {sorted(file)}")
        if str(_text(file.attrs.get("grid_type", "cartesian"))) != "cartesian":
            raise _Layout(
                f"{path} must hold a Cartesian grid, its grid_type is {_text(file.attrs['grid_type'])!r}"
            )
        dimensions = file["dimensions"]
        names = [_text(name) for name in dimensions.attrs["spatial_dims"]]
        for name in (*names, "time"):
            if dimensions[name].attrs.get("sample_varying", False):
                raise _Layout(f"{path} must have one grid for all samples, {name!r} differs between them")
        periodic = _periodic(file)
        kinds = ["periodic" if name in periodic else "cell" for name in names] if kind is None else kind
        grid = _grid(path, [dimensions[name][()] for name in names], kinds)
        times = dimensions["time"][()]
        found: dict[str, tuple[int, Any]] = {}
        for order in range(3):
            group = file.get(f"t{order}_fields", {})
            listed = group.attrs.get("field_names", list(group)) if len(group) else []
            found |= {_text(name): (order, group[_text(name)]) for name in listed}
        n = int(file.attrs["n_trajectories"])
        parts = {
            name: _well_field(path, name, found[name], (n, len(times), *grid.shape), samples)
            for name in _wanted(path, found, fields)
        }
        return _series(path, grid, times, parts, dtype)


def layout_of(path: str | os.PathLike[str]) -> Literal["pdebench", "the_well"] | None:
    """Which of the two layouts an HDF5 file has, None: neither.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no HDF5 file or is damaged.
        ImportError: without h5py.
    """
    with _opened(path) as file:
        if "dimensions" in file and "t0_fields" in file:
            return "the_well"
        groups = [name for name in file if name.isdigit()]
        if "x-coordinate" in file or {"velocity", "t"} <= set(file) or (groups and "data" in file[groups[0]]):
            return "pdebench"
        return None


class _Layout(ValueError):
    """A whole file with another layout than the one wanted."""


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    path = Path(path)
    with path.open("rb") as start:
        head = start.read(8)
    if head != SIGNATURE:
        raise ValueError(f"{path} must be an HDF5 file, its first bytes are {head!r}")
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f'{path.name} needs h5py: pip install "continuum_ops[files]"') from error
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (_Layout, MemoryError):
        raise
    except Exception as error:  # h5py raises what it happens to meet in a damaged file
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _pdebench_groups(
    path: Any,
    file: Any,
    groups: list[str],
    fields: Sequence[str] | None,
    kind: str | Sequence[str],
    samples: slice,
    dtype: torch.dtype,
) -> FieldSeries:
    if fields is not None and list(fields) != ["data"]:
        raise _Layout(f"fields must be among ['data'] of {path}, got {list(fields)}")
    first = file[groups[0]]
    if "data" not in first or "grid" not in first:
        raise _Layout(
            f"{path} must be a file of PDEBench: {groups[0]} has {sorted(first)}, not data and grid"
        )
    axes = [first["grid"][x][()] for x in AXES if x in first["grid"]]
    grid = _grid(path, axes, kind)
    chosen = groups[samples]
    if not chosen:
        raise _Layout(f"samples must choose some of the {len(groups)} of {path}, got {samples}")
    shapes = {file[name]["data"].shape for name in chosen}
    if len(shapes) > 1:
        raise _Layout(f"{path} must have samples of one shape, has {sorted(shapes)}")
    values = np.stack([file[name]["data"][()] for name in chosen])
    if values.shape[2:-1] != grid.shape:
        raise _Layout(
            f"data of {path} must have the grid {grid.shape} of its coordinates, has {values.shape}"
        )
    times = first["grid"]["t"][()] if "t" in first["grid"] else np.arange(float(values.shape[1]))
    return _series(path, grid, times, {"data": values}, dtype)


def _pdebench_field(path: Any, name: str, array: Any, grid: tuple[int, ...], samples: slice) -> np.ndarray:
    """(n, F, *grid, c), F = 1 without a time."""
    d, shape = len(grid), array.shape
    if len(shape) >= 2 + d and shape[2 : 2 + d] == grid and len(shape) <= 3 + d:
        values = array[samples]
    elif len(shape) in (1 + d, 2 + d) and shape[1 : 1 + d] == grid:
        values = array[samples][:, None]
    else:
        raise _Layout(f"{name} of {path} must have the grid {grid} of the coordinates, has shape {shape}")
    return values if values.ndim == 3 + d else values[..., None]


def _well_field(
    path: Any, name: str, field: tuple[int, Any], full: tuple[int, ...], samples: slice
) -> np.ndarray:
    """(n, F, *grid, c): with an axis of 1 where the field does not depend on the sample or the time."""
    order, array = field
    attrs, d = array.attrs, len(full) - 2
    varies = [bool(attrs["sample_varying"]), bool(attrs["time_varying"]), *map(bool, attrs["dim_varying"])]
    expected = tuple(size for size, on in zip(full, varies, strict=True) if on)
    components = array.shape[len(expected) :]
    if array.shape[: len(expected)] != expected or int(np.prod(components)) != d**order:
        raise _Layout(
            f"{name} of {path} must have shape {expected} and {d**order} components, has {array.shape}"
        )
    values = array[samples] if varies[0] else array[()]
    for axis, on in enumerate(varies):
        if not on:
            values = np.expand_dims(values, axis)
    lengths = values.shape[:2] + tuple(full[2:])
    return np.broadcast_to(values.reshape(*values.shape[: 2 + d], d**order), (*lengths, d**order))


def _series(
    path: Any, grid: Grid, times: np.ndarray, parts: Mapping[str, np.ndarray], dtype: torch.dtype
) -> FieldSeries:
    n, frames = (max(part.shape[axis] for part in parts.values()) for axis in (0, 1))
    if not all(part.shape[0] for part in parts.values()):
        raise _Layout(f"samples must choose some of those of {path}, got none")
    times = times[:frames]
    if len(times) != frames:
        raise _Layout(f"{path} must have a time for each of {frames} frames, has {len(times)}")
    values, names = [], []
    for name, part in parts.items():
        if part.shape[0] not in (1, n) or part.shape[1] not in (1, frames):
            raise _Layout(f"{name} of {path} must have {n} samples and {frames} frames, has {part.shape[:2]}")
        field = torch.from_numpy(np.require(part, requirements=["C", "W"])).to(dtype)
        if not bool(torch.isfinite(field).all()):
            raise _Layout(f"{name} of {path} must be finite, holds NaN or Inf")
        values.append(field.flatten(2, -2).expand(n, frames, -1, -1))
        c = part.shape[-1]
        names += [name] if c == 1 else [f"{name}_{i}" for i in range(c)]
    at = torch.from_numpy(np.array(times, dtype=np.float64)).to(dtype)
    return FieldSeries(grid.to(dtype=dtype), at, torch.cat(values, -1), tuple(names))


def _grid(path: Any, axes: Sequence[np.ndarray], kind: str | Sequence[str]) -> Grid:
    try:
        # In the dtype of the file, whose rounding decides what counts as evenly spaced.
        return Grid(
            *(torch.from_numpy(np.array(axis, axis.dtype.newbyteorder("="))) for axis in axes), kind=kind
        )
    except ValueError as error:
        raise _Layout(f"coordinates of {path}: {error}") from error


def _wanted(path: Any, there: Mapping[str, Any], fields: Sequence[str] | None) -> list[str]:
    if fields is not None and (isinstance(fields, str) or not all(isinstance(f, str) for f in fields)):
        raise _Layout(f"fields must be a sequence of names, got {fields!r}")
    wanted = list(there) if fields is None else list(fields)
    for name in wanted:
        if name not in there:
            raise _Layout(f"fields must be among {sorted(there)} of {path}, got {name!r}")
    if not wanted:
        raise _Layout(f"{path} must hold fields, it holds none")
    return wanted


def _periodic(file: Any) -> set[str]:
    """Names of the axes with a periodic boundary."""
    found: set[str] = set()
    for condition in file.get("boundary_conditions", {}).values():
        if _text(condition.attrs.get("bc_type", "")).lower() == "periodic":
            found |= {_text(name) for name in condition.attrs["associated_dims"]}
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
