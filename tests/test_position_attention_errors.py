"""Every refusal of position attention: which argument, what it must be, what it was."""

from __future__ import annotations

import math

import pytest
import torch
from position_helpers import scene

import continuum_ops as co

ones = torch.ones


def make():
    return dict(zip(("query_pos", "key_pos", "value", "rate"), scene(5, 7, 2, channels=6), strict=True))


def call(**changes):
    return co.position_attention(**{**make(), **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"value": [1.0]}, "value must be a Tensor, got list"),
        ({"value": ones(2, 7, 6).int()}, "value must be a floating-point tensor, got torch.int32"),
        (
            {"value": ones(2, 7, 6).to(torch.float8_e4m3fn)},
            "value must be float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
        ),
        ({"value": ones(2, 7, 6).to_sparse()}, r"value must be a dense \(strided\) tensor"),
        ({"query_pos": 1.0}, "query_pos must be a Tensor, got float"),
        (
            {"query_pos": ones(5, 2).to(torch.float8_e4m3fn)},
            "query_pos must be float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
        ),
        ({"key_pos": None}, "key_pos must be a Tensor, got NoneType"),
        ({"key_pos": ones(7, 2).int()}, "key_pos must be a floating-point tensor, got torch.int32"),
        (
            {"query_pos": co.PointCloud(ones(5, 2))},
            "query_pos must be a Tensor, got PointCloud; pass its .points",
        ),
        ({"rate": 3.0}, "rate must be a Tensor, got float"),
        ({"rate": ones(2).int()}, "rate must be a floating-point tensor, got torch.int32"),
        ({"weights": [1.0] * 7}, "weights must be a Tensor, got list"),
        ({"weights": (ones(7), ones(1))}, "weights must be a Tensor, got tuple"),
        ({"weights": ones(7).bool()}, "weights must be a floating-point tensor, got torch.bool"),
        ({"weights": co.Grid.uniform(7)}, "weights must be a Tensor, got Grid; pass its .weights"),
        ({"radius": "far"}, "radius must be None, a number or a Tensor, got str"),
        ({"radius": ones(5).int()}, "radius must be a floating-point tensor, got torch.int32"),
        ({"period": 1.0}, "period must be None or a sequence of d numbers, got 1.0"),
        ({"period": ("x", 1)}, "period must be None or a sequence of d numbers"),
    ],
)
def test_wrong_types(changes, message):
    with pytest.raises(TypeError, match=f"^position_attention: {message}"):
        call(**changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"value": ones(7, 6)}, r"value must have shape \(B, M, C\) or \(B, H, M, C\), got \(7, 6\)"),
        (
            {"value": ones(2, 3, 7, 6)},
            r"value must have shape .* with H = 2 as rate has, got \(2, 3, 7, 6\)",
        ),
        ({"value": ones(2, 8, 6)}, r"key_pos must have a row for each of the 8 rows of value, got \(7, 2\)"),
        ({"rate": torch.tensor(3.0)}, r"rate must have shape \(H,\), one for each head, got \(\)"),
        ({"rate": ones(2, 1)}, r"rate must have shape \(H,\), one for each head, got \(2, 1\)"),
        (
            {"query_pos": ones(5)},
            r"query_pos must have shape \(N, d\) or \(B, N, d\) with B = 2 .* got \(5,\)",
        ),
        ({"query_pos": ones(3, 5, 2)}, r"query_pos must have shape .* with B = 2 .* got \(3, 5, 2\)"),
        ({"key_pos": ones(7, 3)}, "key_pos must have as many coordinates as query_pos, 2, got 3"),
        ({"weights": ones(8)}, r"weights must have shape \(M,\) or \(B, M\) = \(2, 7\), got \(8,\)"),
        ({"weights": ones(1, 7)}, r"weights must have shape \(M,\) or \(B, M\) = \(2, 7\), got \(1, 7\)"),
        ({"radius": -1.0}, "radius must be >= 0, got -1.0"),
        ({"radius": math.nan}, "radius must be >= 0, got nan"),
        ({"radius": ones(7)}, r"radius must be a number or have shape .* = \(2, 5\), got \(7,\)"),
        ({"period": (1.0,)}, "period must have one entry for each coordinate, 2, got 1"),
        ({"period": (1.0, 0.0)}, r"period must be > 0 .* got \(1.0, 0.0\)"),
        ({"period": (1.0, math.nan)}, r"period must be > 0 .* got \(1.0, nan\)"),
        ({"key_pos": ones(7, 2, device="meta")}, "key_pos must be on value's device cpu, got meta"),
        ({"rate": ones(2, device="meta")}, "rate must be on value's device cpu, got meta"),
        ({"weights": ones(7, device="meta")}, "weights must be on value's device cpu, got meta"),
    ],
)
def test_wrong_values(changes, message):
    with pytest.raises(ValueError, match=f"^position_attention: .*{message}"):
        call(**changes)


@pytest.mark.parametrize(
    "weights, error, message",
    [
        ((ones(4),), ValueError, "weights must be a Tensor or one tensor for each axis of key_pos, 2, got 1"),
        ((ones(4), ones(3)), ValueError, r"weights\[1\] must have shape \(5,\), got \(3,\)"),
        ((ones(4), [1.0] * 5), TypeError, r"weights\[1\] must be a Tensor, got list"),
        (3.0, TypeError, "weights must be a Tensor, or with a Grid one tensor for each axis, got float"),
    ],
)
def test_weights_of_a_grid(weights, error, message):
    grid = co.Grid.uniform((4, 5), dtype=torch.float32)
    with pytest.raises(error, match=f"^position_attention: {message}"):
        co.position_attention(ones(3, 2), grid, ones(2, 20, 3), ones(2), weights)


@pytest.mark.parametrize("bad", [-1e-9, -math.inf, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["weights", "rate", "radius"])
def test_negative_nan_or_infinite_numbers(path, bad, dtype, name):
    if name == "radius" and bad == math.inf:
        pytest.skip("an infinite radius is none")
    value = ones({"weights": 7, "rate": 2, "radius": 5}[name])
    value[1] = bad
    with pytest.raises(ValueError, match=f"{name} must be >= 0"):
        call(**{"value": ones(2, 7, 6, dtype=dtype), name: value})


def test_infinite_radius_and_period():
    expected = call()
    assert torch.equal(call(radius=math.inf), expected)
    assert torch.equal(call(period=(math.inf, math.inf)), expected)


def test_negative_weights_are_refused_in_a_compiled_function():
    compiled = torch.compile(co.position_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="weights must be >= 0"):
        compiled(*scene(5, 7, 2), -ones(7))
