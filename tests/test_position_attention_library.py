"""Position attention with torch.library, torch.compile and autocast."""

from __future__ import annotations

import pytest
import torch
from helpers import draw, lse_dtype
from position_helpers import check, points, results, scene
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import continuum_ops as co

ops = torch.ops.continuum_ops
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KINDS = ["shared", "per sample", "local", "periodic", "value per head", "no weights", "wide positions"]


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def arguments(dtype=torch.float32, kind="shared", requires_grad=True):
    """As the registered operators take them."""
    acc = lse_dtype(dtype)
    lead = 2 if kind == "per sample" else 1
    geometry = torch.float64 if kind == "wide positions" else acc
    x, y = points((lead, 6, 2), geometry, 1), points((lead, 7, 2), geometry, 2)
    value = draw((2, 2 if kind == "value per head" else 1, 7, 3), dtype, 3)
    rate = torch.tensor([1.0, 5.0], dtype=acc)
    weights = None if kind == "no weights" else draw((1, 7), acc, positive=True)
    tensors = [t if t is None else t.requires_grad_(requires_grad) for t in (x, y, value, rate, weights)]
    radius = torch.full((1, 6), 0.6, dtype=acc) if kind == "local" else None
    return (*tensors, radius, [1.0, float("inf")] if kind == "periodic" else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_forward(dtype, kind):
    opcheck(ops.position_attention_forward, arguments(dtype, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "needs", [[True] * 5, [False, True, False, False, False], [False] * 2 + [True] + [False] * 2]
)
def test_opcheck_backward(kind, needs):
    *tensors, radius, period = arguments(torch.float32, kind, requires_grad=False)
    out, lse, stats = ops.position_attention_forward(*tensors, radius, period)
    grads = (torch.randn_like(out), torch.randn_like(lse))
    opcheck(ops.position_attention_backward, (*grads, *tensors, out, lse, stats, radius, period, needs))


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_chunked(kind):
    opcheck(ops.position_attention_chunked, arguments(torch.float32, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_chunked_backward(kind):
    inputs = arguments(torch.float32, kind, requires_grad=False)
    out, lse = ops.position_attention_chunked(*inputs)
    args = (torch.randn_like(out), torch.randn_like(lse), *inputs, [True, True, False, True, True])
    opcheck(ops.position_attention_chunked_backward, args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_gradients_that_are_not_needed_are_empty(kind, dtype):
    *tensors, radius, period = arguments(dtype, kind, requires_grad=False)
    out, lse, stats = ops.position_attention_forward(*tensors, radius, period)
    grad = torch.randn_like(out)
    for wanted in range(5):
        needs = [i == wanted for i in range(5)]
        grads = ops.position_attention_backward(grad, None, *tensors, out, lse, stats, radius, period, needs)
        for i, (g, t) in enumerate(zip(grads, tensors, strict=True)):
            assert g.shape == (t.shape if i == wanted and t is not None else (0,))
            assert i != wanted or t is None or g.dtype == t.dtype


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_fake_tensors_of_other_devices(device):
    with FakeTensorMode():
        x = torch.empty(6, 2, device=device)
        v = torch.empty(3, 6, 4, device=device, dtype=torch.bfloat16)
        out, lse = co.position_attention(x, x, v, torch.empty(2, device=device), radius=0.5, return_lse=True)
    assert out.shape == (3, 2, 6, 4) and out.dtype == torch.bfloat16 and out.device.type == device
    assert lse.shape == (3, 2, 6) and lse.dtype == torch.float32


@pytest.mark.parametrize("kind", ["global", "local", "per sample", "inductor"])
def test_compile_fullgraph(kind):
    torch._dynamo.reset()
    x, y, v, rate = scene(6, 7, 2, per_sample=kind == "per sample")
    leaves = [t.requires_grad_() for t in (x, y, v, rate, draw((7,), positive=True))]
    options = {"radius": 0.8, "period": (1.0, 2.0)} if kind == "local" else {}

    def loss(*tensors):
        out, lse = co.position_attention(*tensors, return_lse=True, **options)
        return out.sin().sum() + lse.cos().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if kind == "inductor" else "aot_eager")
    torch.testing.assert_close(compiled(*leaves), loss(*leaves))
    for a, b in zip(
        torch.autograd.grad(compiled(*leaves), leaves),
        torch.autograd.grad(loss(*leaves), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_compile_with_dynamic_shapes_and_a_grid():
    torch._dynamo.reset()
    compiled = torch.compile(co.position_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (6, 9):
        x, y, v, rate = scene(n, n + 1, 2)
        torch.testing.assert_close(compiled(x, y, v, rate), co.position_attention(x, y, v, rate))


def test_autocast():
    """CASES 21: value takes the autocast dtype; weights, positions, rate and lse stay float32."""
    x, y, v, rate = scene(30, 40, 2)
    leaves = [t.requires_grad_() for t in (x, y, v, rate, draw((40,), positive=True))]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = co.position_attention(*leaves, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    low = co.position_attention(x, y, v.bfloat16(), rate, leaves[4], return_lse=True)
    assert torch.equal(out, low[0]) and torch.equal(lse, low[1])
    for leaf, grad in zip(leaves, torch.autograd.grad(out.float().sum() + lse.sum(), leaves), strict=True):
        assert grad.dtype == torch.float32 and grad.shape == leaf.shape and bool(grad.isfinite().all())


def test_autocast_leaves_float64_alone():
    tensors = scene(5, 6, 2, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out = co.position_attention(*tensors)
    assert torch.equal(out, co.position_attention(*tensors))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=names)
def test_narrow_geometry_is_used_in_float32(narrow):
    x, y, v, rate = scene(20, 30, 2)
    w = draw((30,), positive=True)
    low = [t.to(narrow) for t in (x, y, v, rate, w)]
    result = results(*low)
    assert all(result[name].dtype == narrow for name in ("out", "query_pos", "key_pos", "rate", "weights"))
    wide = results(*(t.float() for t in low[:2]), low[2], *(t.float() for t in low[3:]))
    for name in ("query_pos", "rate"):
        torch.testing.assert_close(result[name], wide[name].to(narrow))


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_every_instruction_set(isa):
    extension = pytest.importorskip("continuum_ops._C")
    if isa not in extension.isas():
        pytest.skip(f"this machine has no {isa}")
    before = extension.isa()
    extension.set_isa(isa)
    try:
        for dtype in DTYPES:
            tensors = scene(130, 150, 3, channels=21, dtype=dtype)
            w = draw((150,), lse_dtype(dtype), positive=True)
            check(*tensors, w, radius=0.5, period=(1.0, 2.0, 3.0))
            check(*tensors, w)
    finally:
        extension.set_isa(before)
