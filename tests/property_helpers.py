"""Drawn cases of every operator on every backend, and what two calls of one meaning may differ by."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cases import CASES, Case, Sizes, backends
from torch import Tensor
from triton_support import INTERPRETED

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EXAMPLES = max(1, settings.default.max_examples // (30 if INTERPRETED else 6))


def on(operators: list[str]) -> Callable:
    """Every one of the operators on every backend, with drawn cases."""

    def decorate(test: Callable) -> Callable:
        test = settings(max_examples=EXAMPLES)(given(st.data())(test))
        test = pytest.mark.parametrize("served", backends())(test)
        return pytest.mark.parametrize("op", operators)(test)

    return decorate


def drawn(data: st.DataObject, op: str, dtypes: list[torch.dtype] = DTYPES) -> Case:
    few = st.integers(1, 2 if INTERPRETED else 3)
    lengths = [1, 3, 17] if INTERPRETED else [1, 2, 3, 5, 8, 13, 17, 33, 70]
    sizes = Sizes(
        batch=data.draw(few, "batch"),
        heads=data.draw(few, "heads"),
        n=data.draw(st.integers(1, 3 if INTERPRETED else 12), "n"),
        m=data.draw(st.sampled_from(lengths), "m"),
        d=data.draw(st.integers(1, 9), "d"),
        dv=data.draw(st.integers(1, 6), "dv"),
    )
    dtypes = [t for t in dtypes if t != torch.float64] if INTERPRETED else dtypes
    return CASES[op](
        sizes, data.draw(st.sampled_from(dtypes), "dtype"), data.draw(st.integers(0, 999), "seed")
    )


def assert_agree(actual: dict[str, Tensor], expected: dict[str, Tensor], budget: dict[str, float]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        other = expected[name]
        assert tensor.shape == other.shape and tensor.dtype == other.dtype, name
        difference = (tensor.double() - other.double()).abs().amax().item()
        # Subnormal numbers round by half their distance, whatever their size: float16's are 6e-8 apart.
        limits = torch.finfo(tensor.dtype)
        allowed = 2 * budget[name] + limits.tiny * limits.eps
        assert difference <= allowed, f"{name}: differ by {difference:.3e}, allowed {allowed:.3e}"


def of_keys(
    case: Case, results: dict[str, Tensor], change: Callable[[Tensor, int], Tensor]
) -> dict[str, Tensor]:
    """The results with the gradients of what has keys changed along that axis."""
    axes = {f"d_{name}": axis for name, axis in case.keys.items()}
    return {name: change(t, axes[name]) if name in axes else t for name, t in results.items()}


def shuffled(data: st.DataObject, count: int) -> Tensor:
    return torch.tensor(data.draw(st.permutations(range(count)), "order"), dtype=torch.int64)
