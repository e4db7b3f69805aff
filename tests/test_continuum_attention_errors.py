"""Every refusal of continuum attention: which argument, what it must be, what it was."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import qkv

import continuum_ops as co


def make():
    return dict(zip(("query", "key", "value"), qkv((2, 3), 5, 7, 4, 6), strict=True))


def call(**changes):
    return co.continuum_attention(**{**make(), **changes})


ones = torch.ones
POSITIONS = {"query_pos": ones(5, 2), "key_pos": ones(7, 2), "rate": ones(3)}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": [1.0]}, "query must be a Tensor, got list"),
        ({"key": None}, "key must be a Tensor, got NoneType"),
        ({"value": 3}, "value must be a Tensor, got int"),
        (
            {"query": ones(2, 3, 5, 4).int()},
            "query must be float64, float32, bfloat16 or float16, got torch.int32",
        ),
        ({"query": ones(2, 3, 5, 4) + 0j}, "query must be float64, .* got torch.complex64"),
        ({"key": ones(2, 3, 7, 4).double()}, "key must have query's dtype torch.float32, got torch.float64"),
        (
            {"value": ones(2, 3, 7, 6).half()},
            "value must have query's dtype torch.float32, got torch.float16",
        ),
        ({"weights": [1.0] * 7}, "weights must be a Tensor, got list"),
        ({"weights": ones(7).int()}, "weights must be a floating-point tensor, got torch.int32"),
        ({"attn_mask": [True]}, "attn_mask must be a Tensor, got list"),
        (
            {"attn_mask": ones(5, 7).int()},
            r"attn_mask must be bool \(True = attend\) or floating-point, got torch.int32",
        ),
        ({"dropout_p": "0.1"}, r"dropout_p must be a number in \[0, 1\], got str"),
        ({"scale": torch.tensor(1.0)}, "scale must be None or a number, got Tensor"),
        ({**POSITIONS, "query_pos": 1}, "query_pos must be a Tensor, got int"),
        ({**POSITIONS, "key_pos": None}, "key_pos must be a Tensor, got NoneType"),
        (
            {**POSITIONS, "key_pos": ones(7, 2).int()},
            "key_pos must be a floating-point tensor, got torch.int32",
        ),
        (
            {**POSITIONS, "key_pos": ones(7, 2).to(torch.float8_e4m3fn)},
            "key_pos must be float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
        ),
        ({**POSITIONS, "rate": "1"}, "rate must be a Tensor, got str"),
        ({**POSITIONS, "rate": ones(3).int()}, "rate must be a floating-point tensor, got torch.int32"),
        ({**POSITIONS, "period": 1.0}, "period must be None or a sequence of d numbers, got 1.0"),
        ({**POSITIONS, "radius": "far"}, "radius must be None, a number or a Tensor, got str"),
        ({**POSITIONS, "radius": ones(5).int()}, "radius must be a floating-point tensor, got torch.int32"),
    ],
)
def test_wrong_types(changes, message):
    with pytest.raises(TypeError, match=f"^continuum_attention: {message}"):
        call(**changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": ones(4)}, r"query must have at least 2 dimensions, got shape \(4,\)"),
        ({"key": ones(2, 3, 7, 5)}, r"key must have shape \(..., M, 4\), .* got \(2, 3, 7, 5\)"),
        ({"value": ones(2, 3, 8, 6)}, r"value must have shape \(..., 7, Dv\), .* got \(2, 3, 8, 6\)"),
        ({"key": ones(2, 2, 7, 4)}, r"leading dimensions .* got \(2, 3\), \(2, 2\) and \(2, 3\)"),
        ({"weights": ones(8)}, r"weights must be broadcastable to \(..., H, M\) = \(2, 3, 7\), got \(8,\)"),
        ({"weights": ones(2, 7)}, r"weights must be broadcastable .* got \(2, 7\)"),
        ({"weights": ones(4, 2, 3, 7)}, r"weights must be broadcastable .* got \(4, 2, 3, 7\)"),
        ({"attn_mask": ones(7, 5)}, r"attn_mask must be broadcastable to .* = \(2, 3, 5, 7\), got \(7, 5\)"),
        (
            {"attn_mask": ones(5, 7, dtype=torch.bool), "is_causal": True},
            "attn_mask must be None when is_causal=True",
        ),
        ({"dropout_p": 1.5}, r"dropout_p must be in \[0, 1\], got 1.5"),
        ({"dropout_p": -0.1}, r"dropout_p must be in \[0, 1\], got -0.1"),
        ({"dropout_p": math.nan}, r"dropout_p must be in \[0, 1\], got nan"),
        ({"scale": math.inf}, "scale must be finite, got inf"),
        ({"scale": -3e38}, "scale must be at most 1e.38 in magnitude for torch.float32 queries, got -3e.38"),
        ({**POSITIONS, "query_pos": ones(6, 2)}, r"query_pos must have shape .* N = 5, got \(6, 2\)"),
        ({**POSITIONS, "key_pos": ones(7)}, r"key_pos must have shape .* M = 7, got \(7,\)"),
        (
            {**POSITIONS, "key_pos": ones(7, 3)},
            "key_pos must have as many coordinates as query_pos, 2, got 3",
        ),
        ({**POSITIONS, "query_pos": ones(4, 5, 2)}, r"query_pos must be broadcastable to .* got \(4, 5, 2\)"),
        ({**POSITIONS, "rate": ones(4)}, r"rate must be broadcastable to \(H,\) = \(3,\), got \(4,\)"),
        ({**POSITIONS, "rate": None}, "rate or radius must be given with query_pos and key_pos"),
        ({**POSITIONS, "period": (1.0,)}, "period must have one entry for each coordinate, 2, got 1"),
        ({**POSITIONS, "period": (1.0, 0.0)}, r"period must be > 0 .* got \(1.0, 0.0\)"),
        ({**POSITIONS, "radius": -1.0}, "radius must be >= 0, got -1.0"),
        ({**POSITIONS, "radius": math.nan}, "radius must be >= 0, got nan"),
        (
            {**POSITIONS, "radius": ones(7)},
            r"radius must be broadcastable to \(..., N\) = \(2, 5\), got \(7,\)",
        ),
        ({"key": ones(2, 3, 7, 4, device="meta")}, "key must be on query's device cpu, got meta"),
        ({"weights": ones(7, device="meta")}, "weights must be on query's device cpu, got meta"),
    ],
)
def test_wrong_values(changes, message):
    with pytest.raises(ValueError, match=f"^continuum_attention: .*{message}"):
        call(**changes)


@pytest.mark.parametrize("terms", [{"rate": ones(3)}, {"period": (1.0, 1.0)}, {"radius": 1.0}])
def test_distance_terms_need_positions(terms):
    with pytest.raises(TypeError, match="query_pos must be a Tensor, got NoneType"):
        call(**terms)


@pytest.mark.parametrize("bad", [-1e-9, -math.inf, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_negative_nan_or_infinite_weights(path, bad, dtype):
    q, k, v = qkv((2, 3), 5, 7, 4, 6, dtype)
    w = ones(3, 7)
    w[1, 4] = bad
    with pytest.raises(ValueError, match="weights must be >= 0"):
        co.continuum_attention(q, k, v, w)


@pytest.mark.parametrize("bad", [-1e-9, math.nan])
def test_negative_or_nan_rate_and_radius(bad):
    with pytest.raises(ValueError, match="rate must be >= 0"):
        call(**{**POSITIONS, "rate": torch.tensor([1.0, bad, 1.0])})
    with pytest.raises(ValueError, match="radius must be >= 0"):
        call(**{**POSITIONS, "radius": torch.tensor([1.0, bad, 1.0, 1.0, 1.0])})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weights": co.Grid.uniform(7)}, "weights must be a Tensor, got Grid; pass its .weights"),
        ({"weights": ones(7).bool()}, "got torch.bool; a mask is passed as attn_mask="),
        ({"weights": ones(7).to_sparse()}, r"weights must be a dense \(strided\) tensor"),
        ({"query": ones(2, 3, 5, 4).to_sparse()}, r"query must be a dense \(strided\) tensor"),
    ],
)
def test_what_is_easily_mistaken_for_a_tensor_of_weights(changes, message):
    with pytest.raises(TypeError, match=f"^continuum_attention: .*{message}"):
        call(**changes)


def test_negative_weights_are_refused_in_a_compiled_function():
    compiled = torch.compile(co.continuum_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="weights must be >= 0"):
        compiled(*qkv((2,), 5, 7, 4, 6), -ones(7))
