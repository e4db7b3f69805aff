"""Files that are whole or not there."""

from __future__ import annotations

import glob
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when the block ends, and is deleted if it raises.

    The bytes go to a temporary file in the same directory, reach the disk (fsync, where a full disk shows at
    the latest) and are then renamed to `path` in one step. Whatever ends the block early, Ctrl-C included,
    leaves `path` as it was. The file gets the permissions that the umask allows.

    Raises:
        OSError: the file cannot be created or written; its filename is `path`.
    """
    target = Path(path)
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes it private
        os.replace(temporary, target)
    except BaseException as error:
        if temporary is not None:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
        if isinstance(error, OSError) and error.filename in (None, temporary):
            error.filename = str(target)
        raise


def remove_leftovers(path: str | os.PathLike[str]) -> None:
    """Delete the temporary files of killed :func:`atomic_write`s to `path`; nobody may be writing."""
    target = Path(path)
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        leftover.unlink(missing_ok=True)


def write_json(path: Path, result: dict[str, Any]) -> Path:
    """Write the result; NaN and infinity, which JSON does not know, raise ValueError."""
    with atomic_write(path) as file:
        file.write((json.dumps(result, indent=2, allow_nan=False) + "\n").encode())
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
