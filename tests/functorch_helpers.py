"""Operators beside their dense formulas, whose derivatives and batching rules are torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from helpers import draw
from position_helpers import points
from torch import Tensor

import continuum_ops as co
from continuum_ops import reference

F64 = torch.float64
W6 = draw((6,), F64, positive=True)
RATE = torch.tensor([1.5, 3.0], dtype=F64)


class Case(NamedTuple):
    """An operator as a function of some of its arguments, and the same in the dense form."""

    ours: Callable[..., tuple[Tensor, ...]]
    dense: Callable[..., tuple[Tensor, ...]]
    args: tuple[Tensor, ...]


def _case(op: str, given: dict[str, Tensor], **options: Any) -> Case:
    def call(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        def f(*args: Tensor) -> tuple[Tensor, ...]:
            out = function(**dict(zip(given, args, strict=True)), **options)
            return out if isinstance(out, tuple) else (out,)

        return f

    return Case(call(getattr(co, op)), call(getattr(reference, op)), tuple(given.values()))


def _qkv(*leads: int) -> dict[str, Tensor]:
    return {
        "query": draw((*leads, 5, 3), F64, 1),
        "key": draw((*leads, 6, 3), F64, 2),
        "value": draw((*leads, 6, 4), F64, 3),
    }


def _positions(*leads: int) -> dict[str, Tensor]:
    return {"query_pos": points((*leads, 5, 2), F64, 1), "key_pos": points((6, 2), F64, 2)}


def _grids() -> Case:
    query = co.Grid(torch.tensor([0.0, 0.4, 1.0], dtype=F64), torch.tensor([0.1, 0.2, 0.6, 0.9], dtype=F64))
    key = co.Grid(torch.tensor([0.1, 0.7], dtype=F64), torch.tensor([0.0, 0.5, 0.8], dtype=F64))

    def ours(value: Tensor, rate: Tensor, first: Tensor, second: Tensor) -> Any:
        return co.position_attention(query, key, value, rate, (first, second), return_lse=True)

    def dense(value: Tensor, rate: Tensor, first: Tensor, second: Tensor) -> Any:
        w = (first[:, None] * second).flatten()
        return reference.position_attention(query.points, key.points, value, rate, w, return_lse=True)

    axis_weights = [draw((n,), F64, n, positive=True) for n in (2, 3)]
    return Case(ours, dense, (draw((2, 6, 3), F64), RATE, *axis_weights))


def _patches(**weights: Tensor) -> Case:
    tensors = {
        "query": draw((2, 2, 4, 2, 3), F64, 1),
        "key": draw((2, 4, 2, 2, 3), F64, 2),
        "value": draw((2, 4, 2, 2, 1), F64, 3),
    }
    return _case("patch_attention", {**tensors, **weights}, patch_size=(1, 2), scale=0.5, return_lse=True)


def cases() -> dict[str, Case]:
    both = {"return_lse": True}
    mesh = {**_positions(2), "rate": RATE}
    value, per_head = {"value": draw((2, 6, 3), F64, 3)}, {"value": draw((2, 2, 6, 3), F64, 3)}
    weights = {"weights": W6}
    continuum, position = "continuum_attention", "position_attention"
    return {
        "continuum": _case(continuum, {**_qkv(2, 2), **weights}, **both),
        "no heads": _case(continuum, {**_qkv(), **weights}, **both),
        "causal": _case(continuum, _qkv(2), is_causal=True, **both),
        "bool mask": _case(continuum, _qkv(2), attn_mask=draw((5, 6)) > -1.0, **both),
        "float mask": _case(continuum, {**_qkv(2), "attn_mask": draw((5, 6), F64, 7)}, **both),
        "distance": _case(continuum, {**mesh, **_qkv(2, 2), **weights}, period=[1.0, 3.0], **both),
        "no heads, distance": _case(continuum, {**_positions(), **_qkv()}, rate=2.0, radius=0.7, **both),
        "position": _case(position, {**_positions(), **value, "rate": RATE, **weights}, **both),
        "per sample": _case(position, {**mesh, **per_head, **weights}, radius=0.7, **both),
        "value and rate": _case(position, {**value, "rate": RATE}, **_positions(), period=[1.0, 2.0], **both),
        "value": _case(position, {**value, **_positions()}, rate=RATE, **both),
        "grids": _grids(),
        "patches": _patches(),
        "patches, weights": _patches(weights=draw((2, 4), F64, 8, positive=True)),
        "galerkin": _case("galerkin_attention", {**_qkv(2), **weights}),
        "fourier": _case("fourier_attention", _qkv(2)),
    }
