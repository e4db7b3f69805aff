"""A look at the frame of a MATLAB 5 file before scipy reads it.

scipy 1.17 takes the type of an element as an index without a look at it: a damaged file ends the process.
Layout: MathWorks, MAT-File Format (2025), chapter 1.
"""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

MATRIX, COMPRESSED, UINT32, INT32 = 14, 15, 6, 5
NUMBERS = {1, 2, 3, 4, 5, 6, 7, 9, 12, 13}
TEXT = NUMBERS | {16, 17, 18}
TYPES = TEXT | {MATRIX, COMPRESSED}
CHAR, SPARSE, NUMERIC, OPAQUE = 4, 5, range(6, 16), 17  # classes of a matrix; an opaque one has no dimensions
DEEPEST = 100


def check(path: Path) -> None:
    """Raise ValueError unless the elements of a file have known types and lie inside each other."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(128)
        if len(head) < 128 or head[126:] not in (b"IM", b"MI"):
            raise ValueError("it has no header")
        order = "<" if head[126:] == b"IM" else ">"
        while file.tell() < size:
            kind, count, _ = _tag(file, order)
            start = file.tell()
            if kind not in (MATRIX, COMPRESSED) or start + count > size:
                raise ValueError(f"an element of type {kind} and {count} bytes at byte {start - 8}")
            if kind == MATRIX:
                _matrix(file, order, count, 0)
            else:
                inside = _Inflated(file, count)
                kind, inflated, _ = _tag(inside, order)
                if kind != MATRIX:
                    raise ValueError(f"a compressed element of type {kind} at byte {start - 8}")
                _matrix(inside, order, inflated, 0)
            file.seek(start + count)


class _Inflated(io.RawIOBase):
    """What `count` compressed bytes of a file hold, from front to back."""

    def __init__(self, file: BinaryIO, count: int) -> None:
        self.file, self.left, self.zlib = file, count, zlib.decompressobj()

    def read(self, size: int = -1) -> bytes:
        parts: list[bytes] = []
        while size > 0:
            fresh = self.zlib.unconsumed_tail or self.file.read(min(self.left, 1 << 16))
            if not self.zlib.unconsumed_tail:
                self.left -= len(fresh)
            found = self.zlib.decompress(fresh, size)
            if not found and not fresh:
                break
            parts.append(found)
            size -= len(found)
        return b"".join(parts)


Stream = BinaryIO | _Inflated


def _tag(stream: Stream, order: str) -> tuple[int, int, bytes | None]:
    """(type, bytes, the bytes themselves where they stand in the tag)"""
    first, second = struct.unpack(order + "I4s", _exactly(stream, 8))
    if first >> 16 and (first & 0xFFFF) in TYPES:
        return first & 0xFFFF, first >> 16, second
    return first, struct.unpack(order + "I", second)[0], None


def _exactly(stream: Stream, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise ValueError("an element goes beyond the end")
    return data


def _skip(stream: Stream, count: int) -> None:
    if isinstance(stream, _Inflated):
        while count > 0:
            count -= len(_exactly(stream, min(count, 1 << 20)))
    else:
        stream.seek(count, io.SEEK_CUR)


def _matrix(stream: Stream, order: str, left: int, depth: int) -> None:
    if depth > DEEPEST:
        raise ValueError("cells or structures are nested too deeply")
    parts: int | None = None  # how many there must be, where scipy reads so many without a look
    index = 0
    while left > 0:
        kind, count, inline = _tag(stream, order)
        padded = 0 if inline is not None else (count + 7) // 8 * 8
        left -= 8 + padded
        if kind not in TYPES or kind == COMPRESSED or (inline is not None and count > 4) or left < 0:
            raise ValueError(f"an element of type {kind} and {count} bytes inside another one")
        if index == 0:
            if kind != UINT32 or count != 8 or inline is not None:
                raise ValueError("a matrix without flags")
            flags = struct.unpack(order + "II", _exactly(stream, 8))[0]
            class_, numbers = flags & 0xFF, 1 + (flags >> 11 & 1)  # real, and imaginary, parts
            parts = {CHAR: 4, SPARSE: 5 + numbers, **dict.fromkeys(NUMERIC, 3 + numbers)}.get(class_)
        elif kind == MATRIX and parts is None:
            if inline is not None:
                raise ValueError("a matrix in a tag")
            _matrix(stream, order, count, depth + 1)
            _skip(stream, padded - count)
        else:
            if index == 1 and class_ != OPAQUE and (kind != INT32 or count % 4 or count < 8):
                raise ValueError("a matrix without dimensions")
            if parts is not None and index > 2 and kind not in (TEXT if class_ == CHAR else NUMBERS):
                raise ValueError(f"numbers of type {kind}")
            if depth == 0 and parts is not None and index == parts - 1:
                if left > 0:
                    raise ValueError("a matrix of numbers with more than numbers")
                return  # what is left need not be inflated to see that
            _skip(stream, padded)
        index += 1
    if parts is not None and index != parts:
        raise ValueError(f"a matrix of {index} elements in the place of {parts}")
