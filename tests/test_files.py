"""Files are whole or as they were."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from continuum_ops.training import atomic_write

resource = pytest.importorskip("resource", reason="file size limits are a Unix feature")


def test_a_new_file_and_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    before = os.umask(0o027)
    try:
        with atomic_write(path) as file:
            file.write(b"whole")
            assert not path.exists()
    finally:
        os.umask(before)
    assert path.read_bytes() == b"whole"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_whatever_ends_the_block_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_write(path) as file:
        file.write(b"half")
        raise error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_write_that_the_system_refuses_half_way(tmp_path: Path) -> None:
    # The limit on the size of files is a full disk that a test can have: the first 4096 bytes are written.
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError) as caught, atomic_write(path) as file:
            file.write(b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none" / "a.bin"
    with pytest.raises(FileNotFoundError), atomic_write(path):
        pytest.fail("the block must not run")
