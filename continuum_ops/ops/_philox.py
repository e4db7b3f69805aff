"""Philox4x32, a counter-based random generator (Salmon, Moraes, Dror, Shaw 2011), in tensor arithmetic.

A word depends on (seed, counter) alone, so that any part of a dropout mask can be made again, in any order
and on any device, with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox4x32(counter: list[Tensor], key: list[Tensor], rounds: int) -> list[Tensor]:
    """Four 32-bit output words of each counter.

    counter: four int64 tensors with values in [0, 2^32) that broadcast together; key: two such tensors.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The 64-bit pattern of an unsigned product survives the wrap of signed multiplication; so do its
        # halves.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _LOW, (product1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _LOW, high0 ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return [c0, c1, c2, c3]


def dropout_keep(
    seed: Tensor, dropout_p: float, leads: tuple[int, ...], start: int, rows: int, keys: int
) -> Tensor:
    """Which keys survive dropout, bool (*leads, rows, keys), for the queries start, ..., start + rows - 1.

    Key k of query i in the flattened (C order) leading index b reads word k & 3 of counter (k >> 2, i, b
    mod 2^32, b >> 32) after 7 rounds, and is dropped if that word is below floor(dropout_p 2^32).
    """
    device = seed.device
    row = torch.arange(start, start + rows, device=device)
    quad = torch.arange((keys + 3) // 4, device=device)
    word = _words(seed, leads, row, quad)[..., :keys]
    return (word >= int(dropout_p * 2.0**32)).reshape(*leads, rows, keys)


def dropout_keep_at(
    seed: Tensor, dropout_p: float, leads: tuple[int, ...], row: Tensor, key: Tensor
) -> Tensor:
    """As `dropout_keep`, for queries and keys that are a part of others, of which these are the places."""
    quad, at = torch.unique(key >> 2, return_inverse=True)
    word = _words(seed, leads, row, quad).index_select(-1, 4 * at + (key & 3))
    return (word >= int(dropout_p * 2.0**32)).reshape(*leads, row.numel(), key.numel())


def _words(seed: Tensor, leads: tuple[int, ...], row: Tensor, quad: Tensor) -> Tensor:
    """(product of leads, rows, 4 quads), the words of the counters one after the other."""
    count = 1
    for size in leads:
        count *= size
    lead = torch.arange(count, device=seed.device)[:, None, None]
    counter = [quad[None, None, :], row[None, :, None], lead & _LOW, lead >> 32]
    seed = seed.reshape(())
    words = philox4x32(counter, [seed & _LOW, (seed >> 32) & _LOW], rounds=7)
    return torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)
