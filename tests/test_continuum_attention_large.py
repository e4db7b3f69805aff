"""Sizes and strides of continuum attention that pass 2^31."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import assert_near, attend, check, draw, exact, qkv, run

import continuum_ops as co


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def results(*tensors, query_pos=None, key_pos=None, **options):
    """Outputs and gradients for fixed cotangents."""
    tensors = [*tensors, *(None,) * (5 - len(tensors)), query_pos, key_pos]
    shape = tensors[0].shape[:-1]
    grads = draw((*shape, tensors[2].shape[-1]), seed=21), draw(shape, seed=22)
    return run(attend, tensors, *grads, **options)


def test_token_stride_past_2_to_the_31(tmp_path, path):
    """CASES 10: (N - 1) * stride passes 2^31 in every input, a sparse file."""
    stride, d = 2**30 + 16, 4
    buffer = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2 * stride + 64, dtype=torch.float32)
    flags = torch.from_file(str(tmp_path / "flags"), shared=True, size=2 * stride + 64, dtype=torch.uint8)

    def far(tensor, offset, source=buffer):
        width = tensor.shape[-1]
        return source.as_strided(tensor.shape, (width, stride, 1), offset).copy_(tensor)

    q, k, v = qkv((1,), 3, 3, d, d)
    w = draw((3,), positive=True)
    mask = torch.tensor([[[1, 1, 0], [0, 1, 1], [1, 0, 1]]], dtype=torch.bool)
    terms = {"query_pos": draw((1, 3, 2), seed=5)[0], "key_pos": draw((1, 3, 2), seed=6)[0]}
    moved = [far(t, 8 * i) for i, t in enumerate((q, k, v))]
    far_w = buffer.as_strided((3,), (stride,), 24).copy_(w)
    far_mask = far(mask.byte(), 0, flags).view(torch.bool)
    far_terms = {name: far(t[None], 32 + 8 * i)[0] for i, (name, t) in enumerate(terms.items())}
    radius = buffer.as_strided((3,), (stride,), 56).copy_(torch.tensor([1.0, 2.0, 9.0]))
    assert_near(results(*moved, far_w, far_mask), results(q, k, v, w, mask))
    expected = results(q, k, v, w, **terms, rate=0.7, radius=radius.contiguous())
    assert_near(results(*moved, far_w, **far_terms, rate=0.7, radius=radius), expected)
    grad_out = far(draw((1, 3, d), seed=7), 48)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grads = torch.autograd.grad(attend(*leaves)[0], leaves, grad_out)
    true = exact(q, k, v, grad_out=grad_out)
    for name, grad in zip(("query", "key", "value"), grads, strict=True):
        np.testing.assert_allclose(grad, true[name], rtol=0, atol=1e-6)


def _needs_kernel(path):
    if not path.compiled:
        pytest.skip("minutes long without the compiled kernel")


def _large(n, dv=16):
    q, k, v = qkv((1,), n, n, 16, dv)
    return q, k, v, torch.logspace(-3, 1, n)


@pytest.mark.slow
@pytest.mark.parametrize("n", [65_537, 73_728])
def test_large_n_forward(path, n):
    """CASES 1: N^2 and N d pass 2^32 and 2^20; eight rows near the end."""
    _needs_kernel(path)
    q, k, v, w = _large(n)
    out, lse = attend(q, k, v, w)
    true = exact(q[:, -8:], k, v, w)
    np.testing.assert_allclose(out[:, -8:], true["out"], rtol=0, atol=2e-6 * v.abs().max().item())
    np.testing.assert_allclose(lse[:, -8:], true["lse"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_large_n_backward(path):
    """CASES 2: N = 46,342, whose square passes 2^31; eight rows of the gradients of key and value."""
    _needs_kernel(path)
    n, distinct = 46_342, 61
    q, k, v, w = _large(n)
    # Keys repeat, so that the exact sums over n keys are sums over 61 of them.
    kind = torch.arange(n) % distinct
    q, k, v = (t.requires_grad_() for t in (q, k[:, kind], v))
    grad_out = draw((1, n, 16), seed=5)
    out = co.continuum_attention(q, k, v, w)
    _, grad_key, grad_value = torch.autograd.grad(out, (q, k, v), grad_out)
    q64, k64, v64, w64, g64 = (t.detach().double().reshape(n, -1) for t in (q, k, v, w, grad_out))
    mass = torch.zeros(distinct, 1).double().index_add(0, kind, w64)
    moment = torch.zeros(distinct, 16).double().index_add(0, kind, w64 * v64)
    e = (0.25 * q64 @ k64[:distinct].T).exp()
    total = e @ mass
    row = ((e @ moment / total) * g64).sum(-1, keepdim=True)
    tail = w64[-8:].T * e[:, kind[-8:]] / total
    true_value = (tail.T @ g64).numpy()
    true_key = 0.25 * ((tail * (g64 @ v64[-8:].T - row)).T @ q64).numpy()
    for actual, true in ((grad_key, true_key), (grad_value, true_value)):
        np.testing.assert_allclose(actual[0, -8:], true, rtol=0, atol=2e-5 * np.abs(true).max())


@pytest.mark.slow
def test_many_small_problems(path):
    """CASES 11: batch * heads = 65,600, N = 16."""
    _needs_kernel(path)
    q, k, v = qkv((8200, 8), 16, 16, 4, 4)
    check(q, k, v, draw((8200, 8, 16), positive=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=names)
def test_maximum_arrives_late_among_many_keys(path, dtype):
    """CASES 13: M = 131,072."""
    _needs_kernel(path)
    m = 131_072
    q, k, v = qkv((1,), 9, m, 8, 8)
    q[..., 0], k[..., 0] = 1.0, torch.linspace(-30, 30, m) * 8**0.5
    check(q.to(dtype), k.to(dtype), v.to(dtype), draw((m,), positive=True))
