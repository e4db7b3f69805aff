"""Every refusal of patch attention: which argument, what it must be, what it was."""

from __future__ import annotations

import math

import pytest
import torch
from patch_helpers import scene

import continuum_ops as co

ones = torch.ones


def call(**changes):
    q, k, v, _ = scene((4, 6), (2, 9))
    return co.patch_attention(**{"query": q, "key": k, "value": v, "patch_size": (2, 3), **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": [1.0]}, "query must be a Tensor, got list"),
        ({"key": None}, "key must be a Tensor, got NoneType"),
        ({"value": 1.0}, "value must be a Tensor, got float"),
        ({"query": ones(2, 4, 6, 2, 3).int()}, "query must be a floating-point tensor, got torch.int32"),
        (
            {"query": ones(2, 4, 6, 2, 3).to(torch.float8_e4m3fn)},
            "query must be float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
        ),
        (
            {"key": ones(2, 2, 9, 2, 3).double()},
            "key must have query's dtype torch.float32, got torch.float64",
        ),
        ({"value": ones(2, 2, 9, 2, 3).half()}, "value must have query's dtype .*, got torch.float16"),
        ({"key": ones(2, 2, 9, 2, 3).to_sparse()}, r"key must be a dense \(strided\) tensor"),
        ({"patch_size": 2.0}, "patch_size must be an int or one int for each grid axis, got 2.0"),
        ({"patch_size": (2, 3.0)}, r"patch_size must be an int .* got \(2, 3.0\)"),
        ({"patch_size": True}, "patch_size must be an int .* got True"),
        ({"weights": [1.0]}, "weights must be a Tensor, got list"),
        ({"weights": ones(4, 6).bool()}, "weights must be a floating-point tensor, got torch.bool"),
        ({"weights": co.Grid.uniform((4, 6))}, "weights must be a Tensor, got Grid; pass its .weights"),
        ({"scale": "big"}, "scale must be None or a number, got str"),
        ({"scale": ones(())}, "scale must be None or a number, got Tensor"),
    ],
)
def test_wrong_types(changes, message):
    with pytest.raises(TypeError, match=f"^patch_attention: {message}"):
        call(**changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"query": ones(2, 2, 3)},
            r"query must have shape \(B, \*grid, H, D\) .* 1 to 3 axes, got \(2, 2, 3\)",
        ),
        ({"query": ones(1, 1, 1, 1, 1, 1, 1)}, r"query must have shape .* got \(1, 1, 1, 1, 1, 1, 1\)"),
        (
            {"key": ones(2, 18, 2, 3)},
            r"key must have as many grid axes as query, 2, got shape \(2, 18, 2, 3\)",
        ),
        ({"key": ones(1, 2, 9, 2, 3)}, r"key must have query's batch B = 2 and heads H = 2 .* got \(1, 2, 9"),
        ({"value": ones(2, 2, 9, 1, 3)}, r"value must have query's batch .* got \(2, 2, 9, 1, 3\)"),
        ({"key": ones(2, 2, 9, 2, 4)}, r"key must have as many channels as query, 3, got \(2, 2, 9, 2, 4\)"),
        ({"value": ones(2, 4, 9, 2, 3)}, r"value must have the grid of key, \(2, 9\), got \(2, 4, 9, 2, 3\)"),
        ({"patch_size": (2,)}, r"patch_size must be an int or have one for each grid axis, 2, got \(2,\)"),
        ({"patch_size": 0}, "patch_size must be at least 1, got 0"),
        ({"patch_size": (2, -3)}, r"patch_size must be at least 1, got \(2, -3\)"),
        ({"patch_size": 3}, r"patch_size must divide the grid of query, \(4, 6\), .* got \(3, 3\); pad"),
        ({"patch_size": (4, 3)}, r"patch_size must divide the grid of key, \(2, 9\), .* got \(4, 3\)"),
        ({"weights": ones(24)}, r"weights must have the shape of the query grid, \(4, 6\), .* got \(24,\)"),
        ({"weights": ones(6)}, r"weights must have the shape of the query grid, \(4, 6\), .* got \(6,\)"),
        ({"weights": ones(3, 4, 6)}, r"weights must have .* \(B, \*grid\) = \(2, 4, 6\), .* got \(3, 4, 6\)"),
        ({"key": ones(2, 2, 9, 2, 3, device="meta")}, "key must be on query's device cpu, got meta"),
        ({"weights": ones(4, 6, device="meta")}, "weights must be on query's device cpu, got meta"),
    ],
)
def test_wrong_values(changes, message):
    with pytest.raises(ValueError, match=f"^patch_attention: {message}"):
        call(**changes)


@pytest.mark.parametrize("bad", [-1e-9, -math.inf, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_negative_nan_or_infinite_weights(bad, dtype):
    tensors = [t.to(dtype) for t in scene((4, 6), (2, 9))[:3]]
    w = ones(2, 4, 6)
    w[1, 2, 3] = bad
    with pytest.raises(ValueError, match="weights must be >= 0 and finite, got"):
        co.patch_attention(*tensors, (2, 3), w)


def test_negative_weights_are_refused_in_a_compiled_function():
    compiled = torch.compile(co.patch_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="weights must be >= 0"):
        compiled(*scene((4,))[:3], 2, -ones(4))
