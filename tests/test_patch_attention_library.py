"""Patch attention with torch.library, torch.compile and autocast."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import draw, lse_dtype
from patch_helpers import check, chunked, scene
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import continuum_ops as co

ops = torch.ops.continuum_ops
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KINDS = ["plain", "weights", "weights of a sample", "cross", "one point", "1-D", "3-D"]


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def arguments(dtype=torch.float32, kind="plain", requires_grad=True):
    """As the registered operators take them."""
    grid, kgrid, sizes = {
        "cross": ((4, 6), (2, 6), [2, 3]),
        "one point": ((4, 6), (4, 6), [1, 1]),
        "1-D": ((6,), (6,), [2]),
        "3-D": ((2, 4, 2), (2, 2, 2), [1, 2, 1]),
    }.get(kind, ((4, 6), (4, 6), [2, 3]))
    *tensors, _ = scene(grid, kgrid, d=3, dv=2, dtype=dtype)
    lead = {"weights": 1, "weights of a sample": 2}.get(kind)
    w = None if lead is None else draw((lead, *grid), lse_dtype(dtype), positive=True)
    tensors = [t if t is None else t.requires_grad_(requires_grad) for t in (*tensors, w)]
    return (*tensors, sizes, None if kind == "plain" else 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_forward(dtype, kind):
    opcheck(ops.patch_attention_forward, arguments(dtype, kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("needs", [[True] * 4, [False, True, False, False], [False, False, True, True]])
def test_opcheck_backward(dtype, kind, needs):
    *tensors, sizes, scale = arguments(dtype, kind, requires_grad=False)
    out, lse, kept = ops.patch_attention_forward(*tensors, sizes, scale)
    assert (kept.numel() > 0) == (kind != "one point")
    grads = (torch.randn_like(out), torch.randn_like(lse))
    opcheck(ops.patch_attention_backward, (*grads, *tensors, lse, kept, sizes, scale, needs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_gradients_that_are_not_needed_are_empty(kind, dtype):
    *tensors, sizes, scale = arguments(dtype, kind, requires_grad=False)
    out, lse, kept = ops.patch_attention_forward(*tensors, sizes, scale)
    grad = torch.randn_like(out)
    for wanted in range(4):
        needs = [i == wanted for i in range(4)]
        grads = ops.patch_attention_backward(grad, None, *tensors, lse, kept, sizes, scale, needs)
        for i, (g, t) in enumerate(zip(grads, tensors, strict=True)):
            assert g.shape == (t.shape if i == wanted and t is not None else (0,))
            assert i != wanted or t is None or g.dtype == t.dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("kind", KINDS)
def test_the_pytorch_form_returns_what_the_schema_says(dtype, kind):
    """Shapes, dtypes and strides of the operator's fake: it serves devices without a kernel."""
    x = chunked.Inputs(*arguments(dtype, kind, requires_grad=False))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in x]
        expected = ops.patch_attention_forward(*fake)
    actual = chunked.forward(x)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
    grads = chunked.backward(x, torch.randn_like(actual[0]), None, actual[2], [True] * 4)
    for g, t in zip(grads, x.tensors(), strict=True):
        assert (g is None) == (t is None)
        assert g is None or (g.shape == t.shape and g.dtype == t.dtype and g.is_contiguous())


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_fake_tensors_of_other_devices(device):
    with FakeTensorMode():
        q = torch.empty(3, 4, 6, 2, 5, device=device, dtype=torch.bfloat16)
        v = torch.empty(3, 4, 6, 2, 7, device=device, dtype=torch.bfloat16)
        out, lse = co.patch_attention(q, q, v, 2, torch.empty(4, 6, device=device), return_lse=True)
    assert out.shape == (3, 4, 6, 2, 7) and out.dtype == torch.bfloat16 and out.device.type == device
    assert lse.shape == (3, 2, 6) and lse.dtype == torch.float32


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("weights", ["none", "batch"])
def test_compile_fullgraph(backend, weights):
    torch._dynamo.reset()
    leaves = [t.requires_grad_() for t in scene((4, 6), (2, 9), weights=weights) if t is not None]

    def loss(q, k, v, w=None):
        out, lse = co.patch_attention(q, k, v, (2, 3), w, return_lse=True)
        return out.sin().sum() + lse.cos().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*leaves), loss(*leaves))
    compiled_grads = torch.autograd.grad(compiled(*leaves), leaves)
    for a, b in zip(compiled_grads, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_compile_with_dynamic_shapes():
    torch._dynamo.reset()
    compiled = torch.compile(co.patch_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (4, 6, 8):
        q, k, v, w = scene((n, 6), weights="grid")
        torch.testing.assert_close(compiled(q, k, v, 2, w), co.patch_attention(q, k, v, 2, w))


def test_autocast():
    """CASES 21: query, key and value take the autocast dtype; weights and lse stay float32."""
    leaves = [t.requires_grad_() for t in scene((4, 6), weights="grid")]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = co.patch_attention(*leaves[:3], 2, leaves[3], return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    low = co.patch_attention(*(t.bfloat16() for t in leaves[:3]), 2, leaves[3], return_lse=True)
    assert torch.equal(out, low[0]) and torch.equal(lse, low[1])
    for leaf, grad in zip(leaves, torch.autograd.grad(out.float().sum() + lse.sum(), leaves), strict=True):
        assert grad.dtype == torch.float32 and grad.shape == leaf.shape and bool(grad.isfinite().all())


def test_autocast_leaves_float64_and_the_pytorch_form_alone():
    q, k, v, _ = scene((4, 6), dtype=torch.float64)
    x = chunked.Inputs(*(t.float() for t in (q, k, v)), None, [2, 2], 0.5)
    plain = co.patch_attention(q, k, v, 2), chunked.forward(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(co.patch_attention(q, k, v, 2), plain[0])
        assert torch.equal(chunked.forward(x)[0], plain[1])


def test_narrow_weights_are_used_in_float32():
    q, k, v, w = scene((4, 6), weights="grid")
    low = w.bfloat16()
    assert torch.equal(co.patch_attention(q, k, v, 2, low), co.patch_attention(q, k, v, 2, low.float()))


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_every_instruction_set(isa):
    extension = pytest.importorskip("continuum_ops._C")
    if isa not in extension.isas():
        pytest.skip(f"this machine has no {isa}")
    before = extension.isa()
    extension.set_isa(isa)
    try:
        for dtype in DTYPES:
            check(scene((26, 33), batch=1, d=21, dv=10, dtype=dtype, weights="grid"), (2, 3), scale=0.1)
            check(scene((12, 8), d=16, dtype=dtype), 4)
    finally:
        extension.set_isa(before)


def test_no_warning_with_the_extension():
    pytest.importorskip("continuum_ops._C")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        co.patch_attention(*scene((4, 6))[:3], 2)
