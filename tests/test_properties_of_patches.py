"""What holds for attention between patches: their points are those of an integral, the patches a set."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from operator_cases import Case, backend
from property_helpers import assert_agree, drawn, of_keys, on, shuffled
from torch import Tensor

ON_PATCHES = ["patch_attention"]


def in_patches(case: Case, index: Tensor, width: int, names: tuple[str, ...]) -> Case:
    """Case with the last axis of the grid of some tensors gathered: `index` in each patch."""
    axes = case.keys

    def gather(name: str) -> Tensor:
        t = case.tensors[name]
        blocks = torch.arange(t.shape[axes[name]] // width)[:, None] * width
        return t.index_select(axes[name], (blocks + index).flatten())

    return case.with_tensors(**{name: gather(name) for name in names})


@on(ON_PATCHES)
def test_the_order_of_the_points_of_a_patch_does_not_matter(
    served: str, op: str, data: st.DataObject
) -> None:
    case = drawn(data, op)
    width = case.options["patch_size"][-1]
    order, g = shuffled(data, width), case.cotangents()
    everything = tuple(case.tensors)
    permuted = in_patches(case, order, width, everything)

    def moved(t: Tensor, axis: int = -3) -> Tensor:
        blocks = torch.arange(t.shape[axis] // width)[:, None] * width
        return t.index_select(axis, (blocks + order).flatten())

    with backend(served):
        results = case.results(g)
        again = permuted.results({"out": moved(g["out"]), "lse": g["lse"]})
    expected = of_keys(case, results, lambda t, axis: moved(t, axis)) | {"out": moved(results["out"])}
    assert_agree(again, expected, case.budget(g))


@on(ON_PATCHES)
def test_the_order_of_the_patches_of_keys_does_not_matter(served: str, op: str, data: st.DataObject) -> None:
    case = drawn(data, op)
    width, points = case.options["patch_size"][-1], case.tensors["key"].shape[-3]
    order = shuffled(data, points // width)
    index = (order[:, None] * width + torch.arange(width)).flatten()
    permuted = case.with_tensors(**{n: case.tensors[n].index_select(-3, index) for n in ("key", "value")})
    g = case.cotangents()
    with backend(served):
        results, again = case.results(g), permuted.results(g)
    expected = results | {n: results[n].index_select(-3, index) for n in ("d_key", "d_value")}
    assert_agree(again, expected, case.budget(g))


@on(ON_PATCHES)
def test_a_point_of_a_patch_is_two_of_half_its_weight(served: str, op: str, data: st.DataObject) -> None:
    case = drawn(data, op, [torch.float32, torch.float64])
    *lead, width = case.options["patch_size"]
    twice = torch.arange(width).repeat_interleave(2)
    split = in_patches(case, twice, width, tuple(case.tensors))
    split = split.with_tensors(weights=split.tensors["weights"] / 2)
    split = Case(op, split.tensors, case.options | {"patch_size": [*lead, 2 * width]})
    g = case.cotangents()
    with backend(served):
        results, halves = (
            case.results(g),
            split.results({"out": g["out"].repeat_interleave(2, -3) / 2, "lse": g["lse"]}),
        )
    # Two points, each with half the cotangent: gradients of copies add up, but each weight has its own.
    joined = {f"d_{n}": _pairs(halves[f"d_{n}"], axis) for n, axis in case.keys.items()}
    joined["d_weights"] = joined["d_weights"] / 2
    again = {"out": _pairs(halves["out"], -3) / 2, "lse": halves["lse"]} | joined
    assert_agree(again, results, case.budget(g))


def _pairs(t: Tensor, axis: int) -> Tensor:
    return t.unflatten(axis, (-1, 2)).sum(axis)


@on(ON_PATCHES)
def test_a_point_without_weight_does_not_enter_the_scores(served: str, op: str, data: st.DataObject) -> None:
    """Its query may be NaN, and its key where no patch of queries weighs it. Its value is mixed as ever."""
    case = drawn(data, op)
    width = case.options["patch_size"][-1]
    at = data.draw(st.integers(0, width - 1), "at")
    junk = data.draw(st.sampled_from([math.nan, math.inf]), "junk")
    weights = case.tensors["weights"].clone()
    weights[..., at::width] = 0
    clean = case.with_tensors(weights=weights)
    dirty = clean.with_tensors(**{n: clean.tensors[n].clone() for n in ("query", "key")})
    for name in ("query", "key"):
        dirty.tensors[name][..., at::width, :, :] = junk
    g = case.cotangents()
    with backend(served):
        results, again = clean.results(g), dirty.results(g)
    assert (again["d_query"][..., at::width, :, :] == 0).all() and (
        again["d_weights"][..., at::width] == 0
    ).all()
    assert_agree(again, results, clean.budget(g))
