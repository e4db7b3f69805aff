"""Which kernels are loaded, which are not, and why."""

from __future__ import annotations


def backends() -> dict[str, str]:
    return {}
