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
    count = 1
    for size in leads:
        count *= size
    device = seed.device
    lead = torch.arange(count, device=device)[:, None, None]
    row = torch.arange(start, start + rows, device=device)[None, :, None]
    quad = torch.arange((keys + 3) // 4, device=device)[None, None, :]
    seed = seed.reshape(())
    words = philox4x32([quad, row, lead & _LOW, lead >> 32], [seed & _LOW, (seed >> 32) & _LOW], rounds=7)
    word = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)[..., :keys]
    return (word >= int(dropout_p * 2.0**32)).reshape(*leads, rows, keys)
