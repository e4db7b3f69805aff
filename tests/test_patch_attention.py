"""Patch attention: values and gradients in every dtype against an independent long computation."""

from __future__ import annotations

import itertools
import math

import patch_helpers
import pytest
import torch
from helpers import draw
from hypothesis import given
from hypothesis import strategies as st
from patch_helpers import check, chunked, scene
from torch.autograd import gradcheck, gradgradcheck

import continuum_ops as co
from continuum_ops import reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
WEIGHTS = pytest.mark.parametrize("weights", ["none", "grid", "batch", "axis"])
GRIDS = [((12,), (20,), 4), ((6, 8), (9, 4), (3, 2)), ((4, 2, 6), (2, 2, 3), (2, 1, 3))]


@pytest.fixture
def path_of_patches(request, monkeypatch):
    """The registered operator, or the one in PyTorch in several blocks."""
    if request.param == "chunked":
        monkeypatch.setattr(chunked, "CHUNK_SCORES", 8)

        def attend(query, key, value, weights, sizes, *, scale=None):
            if scale is None:
                scale = 1.0 if weights is not None else 1.0 / math.prod(query.shape[1:-2])
            full = None
            if weights is not None:
                lead = weights.dim() == query.dim() - 2
                full = weights if lead else weights[None]
                full = full.expand(full.shape[0], *query.shape[1:-2])
            out, lse, _ = patch_helpers._Chunked.apply(query, key, value, full, sizes, scale)
            return out, lse

        monkeypatch.setattr(patch_helpers, "attend", attend)


BOTH_PATHS = pytest.mark.parametrize("path_of_patches", ["kernel", "chunked"], indirect=True)


@BOTH_PATHS
@ALL_DTYPES
@WEIGHTS
@pytest.mark.parametrize("grid, kgrid, patch", GRIDS)
def test_values_and_gradients(path_of_patches, dtype, weights, grid, kgrid, patch):
    check(scene(grid, kgrid, dtype=dtype, d=5, dv=9, weights=weights), patch)


@BOTH_PATHS
@pytest.mark.parametrize("grid, patch", [((26, 39), (2, 3)), ((210,), 1), ((16,), 16)])
def test_many_patches_one_patch_and_patches_of_one_point(path_of_patches, grid, patch):
    """169 patches; more keys than channels, so that probabilities are computed again; a single patch."""
    check(scene(grid, batch=1, d=16, weights="grid"), patch, scale=0.3)


def test_counts_of_patches_around_every_tile(isa):
    """Each count from 1 to 84 is one of tiles of every height; the counts of keys go through all widths."""
    for rows in [*range(1, 85), 193]:
        keys, dv = 1 + 5 * rows % 67, 1 + rows % 19
        dtype = torch.float32 if rows % 4 else torch.float64
        check(scene((2 * rows,), (2 * keys,), batch=1, heads=1, d=3, dv=dv, dtype=dtype, weights="grid"), 2)


@pytest.mark.parametrize("heads, channels", [(8, 16), (16, 8)])
def test_outputs_larger_than_caches(isa, heads, channels):
    """16 MiB, of lines that one head fills or shares, many points in a task; against float64 autograd."""
    tensors = scene((256, 128), batch=1, heads=heads, d=channels, weights="grid")
    sizes, scale = (128, 64), 1e-4
    grad_out, grad_lse = patch_helpers.cotangents(tensors[0], tensors[2], sizes)
    got = patch_helpers.run(patch_helpers.attend, tensors, sizes, grad_out, grad_lse, scale=scale)
    long = [t.double() for t in (*tensors, grad_out, grad_lse)]
    true = patch_helpers.run(patch_helpers.plain, long[:4], sizes, *long[4:], scale=scale)
    assert got["out"].numel() * got["out"].element_size() == 2**24
    for name, value in true.items():
        assert (got[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_several_blocks_of_queries_sum_into_keys(dtype):
    """2209 x 2209 scores are beyond what is held at once."""
    check(scene((47, 47), batch=1, heads=1, d=2, dtype=dtype), 1, scale=0.5)


@pytest.mark.parametrize(
    "d, dv", [(1, 1), (15, 17), (31, 33), (32, 384), (64, 3), (129, 65), (146, 147), (256, 256)]
)
def test_feature_sizes(d, dv):
    """CASES 17 and 23."""
    check(scene((6, 4), batch=1, d=d, dv=dv, weights="grid"), (3, 2), scale=1 / d)


@given(
    axes=st.integers(1, 3),
    counts=st.tuples(*[st.integers(1, 3)] * 6),
    patch=st.tuples(*[st.integers(1, 4)] * 3),
    d=st.integers(1, 9),
    dv=st.integers(1, 9),
    heads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["plain", "heads first", "sliced"]),
    weights=st.sampled_from(["none", "grid", "batch", "axis"]),
)
def test_drawn_shapes_and_strides(axes, counts, patch, d, dv, heads, dtype, layout, weights):
    sizes = patch[:axes]
    grid, kgrid = ([c * s for c, s in zip(counts[i:], sizes, strict=False)] for i in (0, 3))

    def place(t):
        if layout == "heads first":  # (B, H, C, *grid) storage
            order = (0, t.dim() - 2, t.dim() - 1, *range(1, t.dim() - 2))
            back = (0, *range(3, t.dim()), 1, 2)
            return t.permute(order).contiguous().permute(back)
        if layout == "sliced":  # what lies around is NaN
            wide = torch.full(
                (t.shape[0], t.shape[1] + 2, *t.shape[2:-1], 2 * t.shape[-1] + 1), math.nan, dtype=t.dtype
            )
            wide[:, 1:-1, ..., 1::2] = t
            return wide[:, 1:-1, ..., 1::2]
        return t

    tensors = scene(tuple(grid), tuple(kgrid), heads=heads, d=d, dv=dv, dtype=dtype, weights=weights)
    check(
        [None if t is None else place(t) if i < 3 else t for i, t in enumerate(tensors)],
        list(sizes),
        scale=0.2,
    )


@WEIGHTS
@pytest.mark.parametrize("grid, kgrid, patch", GRIDS)
def test_reference(weights, grid, kgrid, patch):
    q, k, v, w = scene(grid, kgrid, dtype=torch.float64, weights=weights)
    for a, b in zip(
        co.patch_attention(q, k, v, patch, w, return_lse=True),
        reference.patch_attention(q, k, v, patch, w, return_lse=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("weights", ["none", "grid", "batch", "axis"])
@pytest.mark.parametrize(
    "grid, kgrid, patch", [((4,), (6,), 2), ((2, 4), (4, 2), (2, 1)), ((2, 2, 2), (2, 2, 4), 2)]
)
def test_derivatives(weights, grid, kgrid, patch):
    tensors = scene(grid, kgrid, d=2, dv=1, dtype=torch.float64, weights=weights)
    leaves = [t.requires_grad_() for t in tensors if t is not None]

    def attend(q, k, v, w=None):
        return co.patch_attention(q, k, v, patch, w, scale=0.3, return_lse=True)

    assert gradcheck(attend, leaves)
    assert gradgradcheck(attend, leaves)


def test_second_derivatives_in_blocks(monkeypatch):
    tensors = scene((6,), (4,), d=2, dtype=torch.float64, weights="grid")
    leaves = [t.requires_grad_() for t in tensors]

    def second():
        out, lse = co.patch_attention(*leaves[:3], 1, leaves[3], return_lse=True)
        first = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    whole = second()
    monkeypatch.setattr(chunked, "CHUNK_SCORES", 1)
    for a, b in zip(second(), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_third_derivatives_raise():
    q, k, v, _ = (t if t is None else t.requires_grad_() for t in scene((4,), dtype=torch.float64))
    (first,) = torch.autograd.grad(co.patch_attention(q, k, v, 2).sin().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivatives are not implemented"):
        torch.autograd.grad(second.sum(), q)


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_one_gradient_alone_is_the_same(wanted):
    """CASES 18: only some inputs require gradients."""
    tensors = scene((6, 4), weights="batch")
    all_of_them = check(tensors, (3, 2))
    leaf = tensors[wanted] = tensors[wanted].detach().requires_grad_()
    grad_out, grad_lse = patch_helpers.cotangents(tensors[0], tensors[2], [3, 2])
    outputs = patch_helpers.attend(*tensors, [3, 2])
    live = [(o, g) for o, g in zip(outputs, (grad_out, grad_lse), strict=True) if o.requires_grad]
    (grad,) = torch.autograd.grad([o for o, _ in live], leaf, [g for _, g in live])
    assert torch.equal(grad, all_of_them[patch_helpers.NAMES[wanted]])


def test_weights_of_any_graph():
    """CASES 18: only the weights require gradients, made by softplus, of several shapes."""
    q, k, v, _ = scene((4, 6), dtype=torch.float64)
    for shape in [(4, 6), (1, 4, 6), (2, 4, 6), (4, 1), (2, 1, 6)]:
        p = draw(shape, torch.float64, 5).requires_grad_()
        assert gradcheck(lambda p: co.patch_attention(q, k, v, 2, torch.nn.functional.softplus(p)), p)


def test_finer_patches_converge():
    """With the default scale the scores are integrals: patch count fixed, error of order 1 or more in h."""

    def output(n):
        x = torch.arange(n, dtype=torch.float64) / n
        q = torch.stack([torch.sin(2 * math.pi * x), torch.cos(5 * x)], -1)[None, :, None]
        k = torch.stack([torch.exp(x), x**2], -1)[None, :, None]
        return co.patch_attention(q, 3 * k, k, n // 4)[0, :: n // 16, 0]

    fine = output(4096)
    errors = [(output(n) - fine).abs().max().item() for n in (16, 32, 64, 128)]
    for coarse, finer in itertools.pairwise(errors):
        assert finer < 0.55 * coarse
