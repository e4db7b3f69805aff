"""Registration with torch.library, torch.compile, autocast, and what backends() says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers import draw, qkv
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import continuum_ops as co

ops = torch.ops.continuum_ops
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def arguments(dtype=torch.float32, requires_grad=True):
    q, k, v = qkv((2, 3), 6, 7, 4, 5, dtype)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    w = draw((7,), acc, positive=True).expand(2, 3, 7).contiguous()
    return [
        t.requires_grad_(requires_grad) for t in (q, k.transpose(-3, -2).contiguous().transpose(-3, -2), v, w)
    ]


OPTIONS = (0.5, 0.0, False)
NO_DISTANCE = (None,) * 4  # query_pos, key_pos, rate, radius


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("kind", ["plain", "no weights", "mask", "causal", "dropout"])
def test_opcheck_forward(dtype, kind):
    q, k, v, w = arguments(dtype)
    mask = torch.ones(2, 3, 6, 7, dtype=torch.bool).tril() if kind == "mask" else None
    seed = torch.tensor([17]) if kind == "dropout" else None
    options = (0.5, 0.25 if kind == "dropout" else 0.0, kind == "causal")
    w = None if kind == "no weights" else w
    opcheck(ops.continuum_attention_forward, (q, k, v, w, mask, *NO_DISTANCE, seed, None, *options))


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("with_weights, weights_grad", [(True, True), (True, False), (False, False)])
def test_opcheck_backward(dtype, with_weights, weights_grad):
    q, k, v, w = arguments(dtype, requires_grad=False)
    w = w if with_weights else None
    inputs = (q, k, v, w, None, *NO_DISTANCE, None)
    out, lse, stats = ops.continuum_attention_forward(*inputs, None, *OPTIONS)
    grads = (torch.randn_like(out), torch.randn_like(lse))
    args = (*grads, *inputs, out, stats, None, *OPTIONS, weights_grad, False, False)
    opcheck(ops.continuum_attention_backward, args)


def _distance_arguments(dtype, requires_grad):
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    x, y = (draw((2, 1, n, 2), acc, n).requires_grad_(requires_grad) for n in (6, 7))
    rate, radius = (
        torch.ones(1, 3, dtype=acc).requires_grad_(requires_grad),
        torch.full((1, 1, 6), 5.0, dtype=acc),
    )
    return (*arguments(dtype, requires_grad), None, x, y, rate, radius, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=names)
def test_opcheck_distance(dtype):
    period = [3.0, float("inf")]
    opcheck(ops.continuum_attention_forward, (*_distance_arguments(dtype, True), period, *OPTIONS))
    inputs = _distance_arguments(dtype, False)
    out, lse, stats = ops.continuum_attention_forward(*inputs, period, *OPTIONS)
    grads = (torch.randn_like(out), torch.randn_like(lse))
    for wanted in ((True, True, True), (False, False, True), (False, True, False)):
        opcheck(ops.continuum_attention_backward, (*grads, *inputs, out, stats, period, *OPTIONS, *wanted))


def _chunked_arguments(requires_grad):
    mask = draw((1, 3, 6, 1), seed=4).requires_grad_(requires_grad)
    x, y = (draw((2, 1, n, 2), seed=n).requires_grad_(requires_grad) for n in (6, 7))
    rate = torch.ones(1, 3).requires_grad_(requires_grad)
    radius = torch.full((1, 1, 6), 5.0)
    return (
        *arguments(requires_grad=requires_grad),
        mask,
        x,
        y,
        rate,
        radius,
        None,
        [3.0, float("inf")],
        *OPTIONS,
    )


def test_opcheck_chunked():
    opcheck(ops.continuum_attention_chunked, _chunked_arguments(True))


def test_opcheck_chunked_backward():
    grads = (torch.randn(2, 3, 6, 5), torch.randn(2, 3, 6))
    opcheck(ops.continuum_attention_chunked_backward, (*grads, *_chunked_arguments(False), [True] * 8))


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_fake_tensors_of_other_devices(device):
    with FakeTensorMode():
        q = torch.empty(2, 3, 6, 4, device=device, dtype=torch.bfloat16)
        v = torch.empty(2, 3, 6, 2, device=device, dtype=torch.bfloat16)
        out, lse = co.continuum_attention(q, q, v, return_lse=True)
    assert out.shape == (2, 3, 6, 2) and out.dtype == torch.bfloat16 and out.device.type == device
    assert lse.shape == (2, 3, 6) and lse.dtype == torch.float32


@pytest.mark.parametrize("kind", ["weights", "causal", "mask", "distance", "broadcast"])
def test_compile_fullgraph(kind):
    torch._dynamo.reset()
    q, k, v, w = arguments()
    options = {
        "weights": {},
        "broadcast": {},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": draw((6, 7))},
        "distance": {
            "query_pos": draw((6, 2)),
            "key_pos": draw((7, 2)),
            "rate": 2.0,
            "radius": 1.5,
            "period": (2.0, 3.0),
        },
    }[kind]
    if kind == "broadcast":
        w = draw((7,), positive=True).requires_grad_()

    def loss(q, k, v, w):
        out, lse = co.continuum_attention(q, k, v, w, return_lse=True, **options)
        return out.sin().sum() + lse.cos().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if kind == "weights" else "aot_eager")
    torch.testing.assert_close(compiled(q, k, v, w), loss(q, k, v, w))
    leaves = (q, k, v, w)
    for a, b in zip(
        torch.autograd.grad(compiled(*leaves), leaves),
        torch.autograd.grad(loss(*leaves), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_compile_with_dropout_and_dynamic_shapes():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *a: co.continuum_attention(*a, dropout_p=0.5),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for n in (6, 9):
        q, k, v = (t.requires_grad_() for t in qkv((2,), n, n + 1, 4, 4))
        out = compiled(q, k, v)
        assert out.shape == (2, n, 4)
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum(), (q, k, v)))


# --- autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("term", ["none", "mask", "distance"])
def test_autocast(term):
    """CASES 21: query, key, value take the autocast dtype; weights, positions, rate and lse stay float32."""
    q, k, v = (t.requires_grad_() for t in qkv((2, 3), 30, 40, 16, 8))
    w = draw((40,), positive=True).requires_grad_()
    x, y = draw((30, 2), seed=5).requires_grad_(), draw((40, 2), seed=6).requires_grad_()
    rate, mask = torch.ones(3, requires_grad=True), draw((30, 40), seed=7).requires_grad_()
    options = {
        "none": {},
        "mask": {"attn_mask": mask},
        "distance": {"query_pos": x, "key_pos": y, "rate": rate},
    }[term]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = co.continuum_attention(q, k, v, w, return_lse=True, **options)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    low = [t.to(torch.bfloat16) for t in (q, k, v)]
    same = co.continuum_attention(*low, w, return_lse=True, **options)
    assert torch.equal(out, same[0]) and torch.equal(lse, same[1])
    leaves = [q, k, v, w, *(t for t in options.values())]
    for leaf, grad in zip(leaves, torch.autograd.grad(out.float().sum() + lse.sum(), leaves), strict=True):
        assert grad.dtype == torch.float32 and grad.shape == leaf.shape and bool(grad.isfinite().all())


def test_autocast_leaves_float64_alone():
    q, k, v = qkv((2,), 5, 6, 4, 4, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out = co.continuum_attention(q, k, v)
    assert torch.equal(out, co.continuum_attention(q, k, v))


def test_autocast_joins_mixed_dtypes():
    q, k, v = qkv((2,), 5, 6, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert co.continuum_attention(q, k.bfloat16(), v.half()).dtype == torch.bfloat16


# --- what is loaded ------------------------------------------------------------------------------


def run_python(code, **environment):
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, env=env, check=True
    )


CALL = """
import torch, continuum_ops as co
q = torch.ones(2, 2)
for _ in range(3):
    co.continuum_attention(q, q, q)
"""


def test_without_extension_says_so_once():
    result = run_python(CALL + "print(co.backends()['cpu'])", CONTINUUM_OPS_NO_EXT="1")
    assert result.stdout.strip() == "chunked PyTorch: CONTINUUM_OPS_NO_EXT=1"
    assert result.stderr.count("the CPU operators run as chunked PyTorch (CONTINUUM_OPS_NO_EXT=1") == 1


def test_missing_extension_says_so_once_and_how_to_build_it():
    block = "import sys; sys.modules['continuum_ops._C'] = None\n"
    result = run_python(block + CALL + "print(co.backends()['cpu'])", CONTINUUM_OPS_NO_EXT="0")
    assert result.stdout.startswith("chunked PyTorch: the compiled extension")
    assert result.stderr.count("UserWarning: continuum_ops") == 1 and "pip install" in result.stderr


def test_import_is_silent_and_needs_only_torch_and_numpy():
    code = """
import sys, torch
before = {name.split(".")[0] for name in sys.modules}
import continuum_ops
print({name.split(".")[0] for name in sys.modules} & {"scipy", "click", "tqdm", "matplotlib"} - before)
"""
    result = run_python(code, CONTINUUM_OPS_NO_EXT="1")
    assert result.stdout.strip() == "set()" and "continuum_ops" not in result.stderr


def test_backends_names_every_device():
    loaded = co.backends()
    assert set(loaded) == {"cpu", "cuda"}
    assert loaded["cpu"].startswith(("C++ (", "chunked PyTorch: "))
    if not torch.cuda.is_available():
        assert loaded["cuda"].startswith("not available: ")
