"""Galerkin and Fourier attention: values and gradients in every dtype, edge cases, messages, registration."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from helpers import draw, qkv
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import continuum_ops as co

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAMES = ("out", "query", "key", "value", "weights")
BOTH = pytest.mark.parametrize(
    "attend", [co.galerkin_attention, co.fourier_attention], ids=lambda f: f.__name__
)
ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def long(tensor: Tensor) -> np.ndarray:
    array = tensor.detach().double().numpy()
    return array.astype(np.longdouble) if tensor.dtype == torch.float64 else array


def sum_to(array: np.ndarray, shape) -> np.ndarray:
    array = array.sum(tuple(range(array.ndim - len(shape))))
    shrunk = tuple(i for i, size in enumerate(shape) if size == 1 and array.shape[i] != 1)
    return array.sum(shrunk, keepdims=True)


def exact(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, g: Tensor) -> dict[str, np.ndarray]:
    """The quadratic form out_i = sum_k w_k (q_i . k_k) v_k and its derivatives, in numpy."""
    leads = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    m = k.shape[-2]
    full = np.full(m, 1.0 / m if m else 0.0, long(q).dtype) if w is None else long(w).astype(long(q).dtype)
    full = np.broadcast_to(full, (*leads, m))
    dead = full[..., None] == 0
    query, grad = long(q), long(g)
    key, value = np.where(dead, 0, long(k)), np.where(dead, 0, long(v))

    def t(x):
        return np.swapaxes(x, -1, -2)

    scores, back = query @ t(key), grad @ t(value)  # (N, M)
    result = {
        "out": (scores * full[..., None, :]) @ value,
        "query": (back * full[..., None, :]) @ key,
        "key": full[..., None] * (t(back) @ query),
        "value": full[..., None] * (t(scores) @ grad),
    }
    shapes = {"query": q.shape, "key": k.shape, "value": v.shape}
    if w is not None:
        result["weights"] = np.where(dead[..., 0], 0, (scores * back).sum(-2))
        shapes["weights"] = w.shape
    return {name: sum_to(x, shapes[name]) if name in shapes else x for name, x in result.items()}


def plain(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None) -> Tensor:
    """What a user would write, all in the dtype of query."""
    if w is None:
        return q @ (k.mT @ v / max(k.shape[-2], 1))
    live = (w != 0)[..., None]
    k, v = k.masked_fill(~live, 0), v.masked_fill(~live, 0)
    return q @ (k.mT @ (w.to(q.dtype)[..., None] * v))


def run(function, tensors, grad_out) -> dict[str, Tensor]:
    leaves = [
        None if t is None else t.detach().as_strided(t.shape, t.stride(), t.storage_offset()).requires_grad_()
        for t in tensors
    ]
    out = function(*leaves)
    wanted = [t for t in leaves if t is not None]
    grads = torch.autograd.grad(out, wanted, grad_out.to(out.dtype))
    return dict(zip(NAMES, (out.detach(), *grads), strict=False))


def check(attend, q, k, v, w=None, grad_out=None) -> dict[str, Tensor]:
    """Forward and backward within max(2 x error of the plain form, 8 eps x the sum of absolute values)."""
    leads = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    g = draw((*leads, q.shape[-2], v.shape[-1]), q.dtype, seed=9) if grad_out is None else grad_out
    actual, rough = run(attend, (q, k, v, w), g), run(plain, (q, k, v, w), g)
    true = exact(q, k, v, w, g)
    terms = exact(*(x.detach().nan_to_num(0).abs() for x in (q, k, v)), w, g.abs())
    assert actual.keys() == true.keys()
    for name, value in actual.items():
        assert value.shape == true[name].shape, name
        if value.numel() == 0:
            continue
        error = float(np.abs(long(value) - true[name]).max())
        allowed = float(np.abs(long(rough[name]) - true[name]).max())
        allowed = 2 * allowed if math.isfinite(allowed) else 0.0
        allowed = max(allowed, 8 * torch.finfo(value.dtype).eps * float(terms[name].max()))
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"
    return actual


def weights_of(kind: str, leads, m: int, dtype=torch.float32) -> Tensor | None:
    shape = {"none": None, "keys": (m,), "batch": (leads[0], 1, m), "full": (*leads, m), "scalar": ()}[kind]
    return None if shape is None else draw(shape, dtype, seed=3, positive=True)


# --- values and gradients ------------------------------------------------------------------------


@BOTH
@ALL_DTYPES
@pytest.mark.parametrize("kind", ["none", "keys", "batch", "full", "scalar"])
def test_values_and_gradients(attend, dtype, kind):
    q, k, v = qkv((2, 3), 33, 65, 16, 9, dtype)
    acc = torch.promote_types(dtype, torch.float32)
    out = check(attend, q, k, v, weights_of(kind, (2, 3), 65, acc))["out"]
    assert out.dtype == dtype


@ALL_DTYPES
@pytest.mark.parametrize("n, m", [(0, 5), (5, 0), (1, 1), (2, 15), (17, 127), (129, 1025), (1025, 2)])
@pytest.mark.parametrize("kind", ["none", "keys"])
def test_odd_lengths(dtype, n, m, kind):
    q, k, v = qkv((2, 1), n, m, 8, 5, dtype)
    check(co.galerkin_attention, q, k, v, weights_of(kind, (2, 1), m))


@pytest.mark.parametrize(
    "d, dv", [(1, 1), (15, 17), (31, 33), (32, 384), (64, 3), (129, 65), (146, 147), (256, 256)]
)
def test_feature_sizes(d, dv):
    """CASES 17 and 23."""
    check(co.galerkin_attention, *qkv((1, 2), 20, 30, d, dv), weights_of("keys", (1, 2), 30))


@given(
    n=st.integers(0, 20),
    m=st.integers(0, 20),
    d=st.integers(1, 9),
    dv=st.integers(1, 9),
    leads=st.sampled_from(
        [((), (), ()), ((2,), (1,), (2,)), ((2, 3), (3,), (2, 1)), ((1, 3), (2, 1), (2, 3))]
    ),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["plain", "transposed", "sliced"]),
    weighted=st.booleans(),
)
def test_drawn_shapes_and_strides(n, m, d, dv, leads, dtype, layout, weighted):
    def make(lead, rows, cols, seed):
        if layout == "transposed":
            return draw((*lead, cols, rows), dtype, seed).transpose(-1, -2)
        if layout == "sliced":  # what lies around is NaN
            wide = torch.full((*lead, rows + 2, 2 * cols + 1), math.nan, dtype=dtype)
            wide[..., 1 : rows + 1, 1::2] = draw((*lead, rows, cols), dtype, seed)
            return wide[..., 1 : rows + 1, 1::2]
        return draw((*lead, rows, cols), dtype, seed)

    q, k, v = make(leads[0], n, d, 0), make(leads[1], m, d, 1), make(leads[2], m, dv, 2)
    w = draw((m,), torch.float64, 3, positive=True) if weighted else None
    check(co.galerkin_attention, q, k, v, w)


@BOTH
@pytest.mark.parametrize("weighted", [False, True])
def test_derivatives(attend, weighted):
    q, k, v = qkv((2, 1), 4, 5, 3, 2, torch.float64)
    w = draw((2, 1, 5), torch.float64, 3, positive=True)
    inputs = [t.requires_grad_() for t in ((q, k, v, w) if weighted else (q, k, v))]
    assert gradcheck(attend, inputs, check_forward_ad=True)
    assert gradgradcheck(attend, inputs, check_fwd_over_rev=True)


def test_third_derivative():
    """q (k^T W v) with all of size 1 is q k v w: its mixed third derivative is w."""
    q, k, v = (torch.full((1, 1), x, dtype=torch.float64, requires_grad=True) for x in (2.0, 3.0, 5.0))
    w = torch.tensor([7.0], dtype=torch.float64)
    grad = co.galerkin_attention(q, k, v, w)
    for leaf in (q, k, v):
        (grad,) = torch.autograd.grad(grad.sum(), leaf, create_graph=True)
    assert grad.item() == 7.0


@BOTH
@pytest.mark.parametrize("how", ["one tensor", "key is value", "computed from another"])
def test_second_derivatives_of_inputs_that_depend_on_each_other(attend, how):
    """With create_graph=True the first derivative is composed anew: of each input for itself."""
    x = draw((2, 6, 4), torch.float64, 1).requires_grad_()
    y = draw((2, 6, 4), torch.float64, 2).requires_grad_()
    p = draw((6,), torch.float64, 3, positive=True).requires_grad_()

    def derivatives(function):
        q, k, v, w = {
            "one tensor": lambda: (x, x, x, p),
            "key is value": lambda: (y, x, x, p),
            "computed from another": lambda: (y, x, x * y.sin(), p * x[0, :, 0].exp()),
        }[how]()
        first = torch.autograd.grad(
            function(q, k, v, w).square().sum(), (x, y, p), create_graph=True, materialize_grads=True
        )
        return first, torch.autograd.grad(sum(g.square().sum() for g in first), (x, y, p), allow_unused=True)

    found, true = derivatives(attend), derivatives(lambda q, k, v, w: (q @ k.mT * w) @ v)
    for one, other in zip((*found[0], *found[1]), (*true[0], *true[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-10)


def test_weights_of_any_graph():
    """CASES 18: only the weights require gradients, made by softplus, of several shapes."""
    q, k, v = qkv((2, 3), 6, 7, 4, 5, torch.float64)
    g = draw((2, 3, 6, 5), torch.float64, 8)
    for shape in [(7,), (2, 1, 7), (2, 3, 7), ()]:
        p = draw(shape, torch.float64, 5).requires_grad_()
        w = torch.nn.functional.softplus(p)
        (grad,) = torch.autograd.grad(co.galerkin_attention(q, k, v, w), p, g)
        true = exact(q, k, v, w, g)["weights"] / (1 + np.exp(-p.detach().numpy()))
        np.testing.assert_allclose(grad.numpy(), true.astype(np.float64), rtol=1e-12, atol=1e-14)


# --- edge rules ----------------------------------------------------------------------------------


@BOTH
@ALL_DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_dead_rows_do_not_exist(attend, dtype, bad):
    q, k, v = qkv((2, 3), 6, 9, 4, 5, dtype)
    w = draw((2, 1, 9), seed=3, positive=True)
    w[:, :, ::3] = 0
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[..., ::3, :], dirty_v[..., ::3, :] = bad, bad
    dirty = check(attend, q, dirty_k, dirty_v, w)
    clean = run(attend, (q, k, v, w), draw((2, 3, 6, 5), dtype, seed=9))
    for name in NAMES:
        assert torch.equal(dirty[name], clean[name]), name
    assert not dirty["key"][..., ::3, :].any() and not dirty["value"][..., ::3, :].any()
    assert not dirty["weights"][..., ::3].any()


def test_second_derivatives_at_dead_rows_are_finite():
    q, k, v = (t.requires_grad_() for t in qkv((1,), 3, 4, 2, 2, torch.float64))
    w = torch.tensor([1.0, 0.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    dirty = k.detach().clone()
    dirty[:, 1] = math.nan
    dirty.requires_grad_()
    out = co.galerkin_attention(q, dirty, v, w)
    first = torch.autograd.grad(out.square().sum(), (q, dirty, v, w), create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), (q, dirty, v, w))
    assert all(bool(x.isfinite().all()) for x in (*first, *second))
    assert not second[1][:, 1].any() and second[3][1] == 0


@BOTH
@pytest.mark.parametrize("m", [0, 5])
def test_nothing_to_attend_to(attend, m):
    """CASES 3 and 12: no keys, or all weights 0."""
    q, k, v = qkv((2, 3), 6, m, 4, 5)
    result = run(attend, (q, k, v, torch.zeros(m)), torch.ones(2, 3, 6, 5))
    assert result["out"].shape == (2, 3, 6, 5)
    assert all(not x.any() for x in result.values())
    assert not attend(*qkv((2, 3), 6, 0, 4, 5)).any()
    for shape in [(0, 3, 6), (2, 3, 0)]:
        assert attend(
            torch.ones(*shape, 4), torch.ones(shape[0], 3, 5, 4), torch.ones(shape[0], 3, 5, 2)
        ).shape == (
            *shape,
            2,
        )


def test_nan_in_a_live_row_comes_out():
    """CASES 19: of a query its own row, of a key every row."""
    q, k, v = qkv((1,), 6, 7, 4, 5)
    q[0, 2] = math.nan
    out = co.galerkin_attention(q, k, v, draw((7,), positive=True))
    assert out[0, 2].isnan().all() and out[0, [0, 1, 3, 4, 5]].isfinite().all()
    k[0, 3, 0] = math.nan
    assert co.galerkin_attention(q, k, v).isnan().all()


def test_output_is_linear_in_the_weights():
    q, k, v = qkv((2,), 6, 7, 4, 5, torch.float64)
    w = draw((7,), torch.float64, positive=True)
    doubled = co.galerkin_attention(q, k, v, 2 * w)
    assert torch.equal(doubled, 2 * co.galerkin_attention(q, k, v, w))


def test_equal_weights_are_the_default():
    q, k, v = qkv((2,), 6, 8, 4, 5)
    torch.testing.assert_close(
        co.galerkin_attention(q, k, v),
        co.galerkin_attention(q, k, v, torch.full((8,), 0.125)),
        rtol=0,
        atol=1e-6,
    )


def test_float16_sums_that_overflow_float16():
    """k^T v = 70,000 is beyond float16, its mean is not; nor is the product with a small query."""
    k = torch.full((70_000, 1), 1.0, dtype=torch.float16)
    q = torch.full((1, 1), 2.0**-10, dtype=torch.float16)
    assert co.galerkin_attention(q, k, k).item() == 2.0**-10
    assert (
        co.galerkin_attention(q, k, k, torch.ones(70_000)).item() == torch.tensor(70_000 / 1024).half().item()
    )


@pytest.mark.parametrize("n", [65_537, 73_728])
def test_many_points(n):
    """CASES 1 and 2, with log-graded weights."""
    q, k, v = qkv((1,), n, n, 16, 16)
    w = torch.logspace(-6, 0, n)
    out = co.galerkin_attention(q, k, v, w)[0, -8:]
    gram = (long(k[0]) * long(w)[:, None]).T @ long(v[0])
    size = (np.abs(long(k[0])) * long(w)[:, None]).T @ np.abs(long(v[0]))
    allowed = 8 * torch.finfo(torch.float32).eps * (np.abs(long(q[0, -8:])) @ size).max()
    assert np.abs(long(out) - long(q[0, -8:]) @ gram).max() <= allowed


def test_expanded_keys_and_permuted_storage():
    """CASES 7, 8, 20: stride 0, token-major views, storage offset 1; the op is called with each in turn."""
    q = draw((4, 17, 3, 8)).transpose(1, 2)
    k, v = (draw((1, 3, 33, 8), seed=s).expand(4, 3, 33, 8) for s in (1, 2))
    w = draw((34,), seed=3, positive=True)[1:]
    check(co.galerkin_attention, q, k, v, w)
    check(co.galerkin_attention, q, k.contiguous(), v.contiguous()[..., :-2], w)


@pytest.mark.parametrize("how", ["cat", "expanded", "transposed"])
def test_strided_grad_output(how):
    """CASES 9."""
    g = {
        "cat": draw((2, 6, 10))[..., :5],
        "expanded": torch.ones(()).expand(2, 6, 5),
        "transposed": draw((2, 5, 6)).mT,
    }[how]
    check(co.galerkin_attention, *qkv((2,), 6, 7, 4, 5), None, g)


def test_many_small_problems():
    """CASES 11: B * H = 65,600."""
    q, k, v = qkv((8200, 8), 2, 3, 2, 2)
    out = co.galerkin_attention(q, k, v)
    true = long(q) @ (np.swapaxes(long(k), -1, -2) @ long(v)) / 3
    np.testing.assert_allclose(out.numpy(), true, rtol=0, atol=1e-5)


def test_same_bits_twice():
    """CASES 14."""
    q, k, v = qkv((2, 3), 129, 257, 16, 16)
    w, g = draw((257,), seed=3, positive=True), draw((2, 3, 129, 16), seed=9)
    first = run(co.galerkin_attention, (q, k, v, w), g)
    for _ in range(10):
        again = run(co.galerkin_attention, (q, k, v, w), g)
        assert all(torch.equal(first[name], again[name]) for name in NAMES)


def test_memory_is_linear():
    """A matrix of 2^20 x 2^20 entries would take 4 TB."""
    x = torch.ones(2**20, 2)
    assert co.fourier_attention(x, x, x).sum().item() == 2**22


# --- errors --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_invalid_weights(attend, bad):
    q, k, v = qkv((2,), 3, 4, 2, 2)
    with pytest.raises(ValueError, match=rf"weights must be >= 0 and finite, got {bad:g}"):
        attend(q, k, v, torch.tensor([1.0, 2.0, bad, 1.0]))


@BOTH
@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"query": 1.0}, TypeError, "query must be a Tensor, got float"),
        ({"key": torch.ones(2, 4, 2).to_sparse()}, TypeError, "key must be a dense"),
        (
            {"value": torch.ones(2, 4, 2, device="meta")},
            ValueError,
            "value must be on query's device cpu, got meta",
        ),
        (
            {"query": torch.ones(2, 3, 2, dtype=torch.int64)},
            TypeError,
            "query must be float64, .*got torch.int64",
        ),
        ({"key": torch.ones(2, 4, 2).double()}, TypeError, "key must have query's dtype torch.float32, got"),
        ({"query": torch.ones(2)}, ValueError, "query must have at least 2 dimensions, got shape"),
        ({"key": torch.ones(2, 4, 3)}, ValueError, r"key must have shape \(\.\.\., M, 2\)"),
        ({"value": torch.ones(2, 5, 2)}, ValueError, r"value must have shape \(\.\.\., 4, Dv\)"),
        ({"value": torch.ones(3, 4, 2)}, ValueError, "the leading dimensions of query, key and value"),
        (
            {"weights": torch.ones(3)},
            ValueError,
            r"weights must be broadcastable to .* = \(2, 4\), got \(3,\)",
        ),
        ({"weights": torch.ones(1, 2, 4)}, ValueError, "weights must be broadcastable"),
        ({"weights": torch.ones(4, dtype=torch.bool)}, TypeError, "weights must be a floating-point tensor"),
        (
            {"weights": co.Grid.uniform(4)},
            TypeError,
            "weights must be a Tensor, got Grid; pass its .weights attribute",
        ),
    ],
)
def test_errors_name_the_argument(attend, change, error, message):
    arguments = {"query": torch.ones(2, 3, 2), "key": torch.ones(2, 4, 2), "value": torch.ones(2, 4, 2)}
    with pytest.raises(error, match=f"{attend.__name__}: {message}"):
        attend(**{**arguments, **change})


# --- registration, torch.compile, torch.func, autocast -------------------------------------------


@pytest.mark.parametrize(
    "dtype, weighted", [(torch.float64, True), (torch.float32, False), (torch.bfloat16, True)]
)
def test_opcheck(dtype, weighted):
    q, k, v = (t.requires_grad_() for t in qkv((2, 3), 6, 7, 4, 5, dtype))
    w = (
        draw((7,), torch.promote_types(dtype, torch.float32), positive=True).requires_grad_()
        if weighted
        else None
    )
    opcheck(torch.ops.continuum_ops.galerkin_attention, (q, k, v, w))


def test_opcheck_of_the_weights():
    opcheck(torch.ops.continuum_ops.check_weights, (torch.rand(3, 4),))


@pytest.mark.parametrize(
    "attend, backend", [(co.galerkin_attention, "aot_eager"), (co.fourier_attention, "inductor")]
)
def test_compile_fullgraph_and_dynamic(attend, backend):
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for n in (6, 11) if backend == "aot_eager" else (6,):
        q, k, v = qkv((2, 3), n, n + 1, 4, 5)
        check(compiled, q, k, v, draw((n + 1,), positive=True))
        check(compiled, q, k, v)
    with pytest.raises(ValueError, match="weights must be >= 0 and finite, got -1"):
        compiled(q, k, v, torch.full((k.shape[-2],), -1.0))


def test_vmap_has_batching_rules():
    q, k, v = qkv((4, 3), 6, 7, 4, 5, torch.float64)
    w = draw((4, 7), torch.float64, positive=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped = torch.func.vmap(co.galerkin_attention)(q, k, v, w)
        shared = torch.func.vmap(co.galerkin_attention, in_dims=(0, 0, None, None))(q, k, v[0], w[0])
    torch.testing.assert_close(mapped, co.galerkin_attention(q, k, v, w[:, None]), rtol=0, atol=1e-13)
    torch.testing.assert_close(shared, co.galerkin_attention(q, k, v[0], w[0]), rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="weights must be >= 0 and finite, got -"):
        torch.func.vmap(co.galerkin_attention)(q, k, v, -w)


def test_per_sample_gradients():
    """torch.func.vmap of grad: the gradient of the weights for each sample."""
    q, k, v = qkv((4,), 6, 7, 4, 5, torch.float64)
    w = draw((7,), torch.float64, positive=True)

    def loss(w, q, k, v):
        return co.galerkin_attention(q, k, v, w).sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(w, q, k, v)
    true = exact(q, k, v, w.expand(4, 7).contiguous(), torch.ones(4, 6, 5, dtype=torch.float64))["weights"]
    np.testing.assert_allclose(grads.numpy(), true.astype(np.float64), rtol=1e-12)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast(low):
    """CASES 21: query, key, value take the autocast dtype; weights and products stay float32."""
    q, k, v = (t.requires_grad_() for t in qkv((2, 3), 30, 40, 16, 8))
    w = draw((40,), positive=True).requires_grad_()
    with torch.autocast("cpu", low):
        out = co.galerkin_attention(q, k, v, w)
        same = co.galerkin_attention(q.to(low), k.to(low), v.bfloat16(), w)
        wide = co.galerkin_attention(q.double(), k.double(), v.double(), w)
    assert out.dtype == low and same.dtype == low and wide.dtype == torch.float64
    assert torch.equal(out, co.galerkin_attention(q.to(low), k.to(low), v.to(low), w))
    for leaf, grad in zip((q, k, v, w), torch.autograd.grad(out.float().sum(), (q, k, v, w)), strict=True):
        assert grad.dtype == torch.float32 and grad.shape == leaf.shape and bool(grad.isfinite().all())


def test_meta_tensors_with_offsets_beyond_32_bits():
    """CASES 10."""
    x = torch.empty_strided((2, 3, 1000, 16), (0, 0, 2**31, 1), device="meta")
    assert co.galerkin_attention(x, x, x, torch.empty(1000, device="meta")).shape == (2, 3, 1000, 16)
