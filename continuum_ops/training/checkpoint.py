"""Checkpoints: whole or as they were, and loaded without running what a file says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from torch import Tensor, nn

from .files import atomic_write

FORMAT = "continuum_ops checkpoint 1"


class CheckpointError(ValueError):
    """A file that is no checkpoint, or one of another model."""


def save_checkpoint(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write tensors and plain data (dicts, lists, numbers, strings, None) in one step.

    Raises:
        OSError: the file cannot be written; what was there stays.
    """
    with atomic_write(path) as file:
        torch.save({**content, "format": FORMAT}, file)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; a pickle of anything but tensors and plain data is refused.

    Raises:
        CheckpointError: a file that :func:`save_checkpoint` did not write, or a damaged one.
        OSError: the file cannot be read.
    """
    why = "it is damaged or was written by something else"
    if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
        raise CheckpointError(f"{path} is no checkpoint of continuum_ops: it is no regular file")
    with open(path, "rb") as file:
        # The older format is a bare pickle, on whose damage the reader fails in any way.
        if not is_zipfile(file):
            raise CheckpointError(f"{path} is no checkpoint of continuum_ops: {why}")
    try:
        with ZipFile(path) as archive:  # torch's reader lets changed names of parameters through
            intact = archive.testzip() is None
        content = torch.load(path, map_location="cpu", weights_only=True) if intact else None
    except OSError:
        raise
    except Exception as error:  # the reader raises what it happens to meet in a damaged file
        raise CheckpointError(f"{path} is no checkpoint of continuum_ops: {why}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of continuum_ops: {why}")
    return content


def load_model(model: nn.Module, state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """``model.load_state_dict(state)`` with an error that says in one line what does not fit.

    Raises:
        CheckpointError: a parameter or buffer that is missing, unknown, of another shape or kind of number,
            or holds NaN. The model is then as it was.
    """
    expected = model.state_dict()
    for name, value in expected.items():
        if name not in state:
            raise CheckpointError(f"{Path(path)} holds another model: it has no {name}")
        if not isinstance(state[name], Tensor) or _kind(state[name]) != _kind(value):
            was = state[name].dtype if isinstance(state[name], Tensor) else type(state[name]).__name__
            raise CheckpointError(
                f"{Path(path)} holds another model: {name} must hold {value.dtype}, was {was}"
            )
        if state[name].shape != value.shape:
            raise CheckpointError(
                f"{Path(path)} holds another model: {name} must have shape {tuple(value.shape)}, "
                f"was {tuple(state[name].shape)}"
            )
        if bool(state[name].isnan().any()):
            raise CheckpointError(f"{Path(path)} is of no use: {name} holds NaN")
    unknown = sorted(map(str, set(state) - set(expected)))
    if unknown:
        raise CheckpointError(f"{Path(path)} holds another model: it has {unknown[0]}, which this one lacks")
    model.load_state_dict(state)


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    """Floating-point, complex or neither: a precision is converted, another kind is a mistake."""
    return tensor.is_floating_point(), tensor.is_complex()
