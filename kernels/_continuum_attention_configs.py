"""Tile sizes, warps and pipeline stages of the continuum attention kernels: one table, nothing tuned at run
time."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Config(NamedTuple):
    queries: int
    keys: int
    num_warps: int
    num_stages: int


# (kind, largest padded width of a row): forward, gradients over keys, gradients over queries.
# Chosen by what ptxas spills (tests/test_triton_compile.py has the bounds); not measured on a GPU.
_TABLE = {
    ("16 bit", 32): (Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(32, 64, 4, 3)),
    ("16 bit", 64): (Config(64, 64, 4, 3), Config(64, 64, 4, 2), Config(32, 64, 4, 2)),
    ("16 bit", 128): (Config(64, 32, 4, 2), Config(64, 32, 4, 2), Config(32, 64, 8, 2)),
    ("16 bit", 256): (Config(64, 32, 8, 2), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    ("float32", 32): (Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(32, 64, 4, 2)),
    ("float32", 64): (Config(32, 32, 4, 2), Config(16, 32, 4, 2), Config(32, 32, 4, 2)),
    ("float32", 128): (Config(32, 32, 8, 2), Config(16, 32, 4, 1), Config(32, 16, 4, 1)),
    ("float32", 256): (Config(16, 32, 4, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
}
# From sm_100 on products are summed in a memory of their own, and more threads have to share the rest.
_TABLE_100 = {
    ("16 bit", 32): (Config(128, 64, 8, 3), *_TABLE["16 bit", 32][1:]),
    ("16 bit", 64): (Config(128, 64, 8, 3), *_TABLE["16 bit", 64][1:]),
}
# Forward, where float32 products are those of float16 parts. A multiple of the queries above.
_SPLIT = {
    32: Config(64, 128, 4, 2),
    64: Config(64, 64, 4, 2),
    128: Config(64, 32, 4, 2),
    256: Config(16, 32, 4, 1),
}
_SPLIT_80 = {64: Config(64, 32, 4, 2), 128: Config(32, 32, 4, 2)}
_SPLIT_100 = {64: Config(128, 64, 8, 2)}
_SPLIT_DISTANCE = {32: Config(64, 64, 4, 2)}
MAX_WIDTH = 256
MIN_CAPABILITY = 80  # bfloat16 and TF32 products


def configs(dtype: torch.dtype, width: int, capability: int) -> tuple[Config, Config, Config]:
    """Configurations for rows padded to `width`, on compute capability 10 * major + minor."""
    kind = "float32" if dtype == torch.float32 else "16 bit"
    entry = (kind, max(32, width))
    return _TABLE_100[entry] if capability >= 100 and entry in _TABLE_100 else _TABLE[entry]


def split_config(width: int, capability: int, distance: bool) -> Config:
    """The forward's configuration for float16 parts."""
    own = _SPLIT_100 if capability >= 100 else _SPLIT_80 if capability < 90 else {}
    return (_SPLIT | own | (_SPLIT_DISTANCE if distance else {}))[max(32, width)]
