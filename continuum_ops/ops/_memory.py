"""What is said where memory cannot be had; csrc/memory.h says the same for the C++ kernels."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

_REFUSED = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")  # of torch's CPU allocator
_LESS = "fewer batch entries, heads or queries in a call, or a narrower dtype, need less (docs/memory.md)"


def explained(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """function, whose lack of memory is a RuntimeError with the operator, the size and what needs less.

    On a GPU it stays a torch.OutOfMemoryError, whose own message has the size.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        try:
            return function(*args)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"{op}: {error}; {_LESS}") from error
        except RuntimeError as error:
            refused = _REFUSED.search(str(error))
            if refused is None:
                raise
            size = int(refused[1])
            text = f"{op}: {size / 2**30:.3f} GiB ({size} bytes) cannot be allocated; {_LESS}"
            raise RuntimeError(text) from error

    return run
