"""What the numbers were measured on, and the memory that a piece of code needs."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
from types import TracebackType
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..backends import backends

EXTRAS = ("scipy", "tqdm", "matplotlib", "jinja2", "scikit-fem", "h5py", "tensorboard")


def machine() -> dict[str, Any]:
    """Machine, versions and backends, for a report."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "continuum_ops": __version__,
        "backends": backends(),
    }


def packages() -> dict[str, str]:
    """Versions of the packages of the extras, or that one is not installed."""
    found = {}
    for name in EXTRAS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class PeakMemory:
    """Growth of the resident memory of this process at its highest point inside a ``with`` block.

    ``bytes`` is the growth, or None where the kernel does not let a process reset its high-water mark (it is
    Linux's /proc/self/clear_refs). glibc first gives back what it keeps of earlier work, which would
    otherwise serve the block unseen; with another C library the growth may be too small.
    """

    bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
        if trim is not None:
            trim(0)
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
        except OSError:
            self._before = None
        else:
            self._before = _status("VmRSS")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        peak = _status("VmHWM")
        if self._before is not None and peak is not None:
            self.bytes = max(0, peak - self._before)


def _status(key: str) -> int | None:
    """A size of /proc/self/status in bytes."""
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            for line in file:
                if line.startswith(key + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
