"""The fused kernel of Galerkin attention on CUDA tensors: norms, coordinates and k^T W v in one pass.

Marked gpu. The same file runs under Triton's interpreter on CPU tensors: see test_triton_interpreter.py.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from continuum_cuda import DEVICE, DTYPES, on_gpu_only, place, pytestmark
from helpers import draw
from test_galerkin_attention_layer import B, H, M, N, formula, inputs, make
from torch import Tensor
from triton_support import INTERPRETED, kernels

from continuum_ops.ops import _galerkin_attention_fused as fused

__all__ = ["pytestmark"]  # the marks, for pytest to find

EPS = 1e-5
SHIPPED = kernels("galerkin_attention")._CONFIGS
INF, NAN = math.inf, math.nan


class Case(NamedTuple):
    """The tensors of galerkin_gram."""

    key: Tensor
    value: Tensor
    pos: Tensor | None
    weights: Tensor | None
    key_scale: Tensor | None
    key_shift: Tensor | None
    value_scale: Tensor | None
    value_shift: Tensor | None


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    """The kernel's launches, and nn.GalerkinAttention on the device of the tests takes it."""
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr(fused, "DEVICES", (DEVICE.type,))
    kernel, launches = kernels("galerkin_attention"), []
    if INTERPRETED:  # which takes a time per tile
        monkeypatch.setattr(
            kernel, "_CONFIGS", dict.fromkeys(kernel._CONFIGS, (kernel.Config(64, 4, 2),) * 2)
        )
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda *args: (launches.append(args), forward(*args))[1])
    return launches


def case(
    leads=(2, 2), m=60, d=16, dv=9, dtype=torch.float32, p=2, weights="keys", norms="kv", offset=0.0
) -> Case:
    batch, heads = leads
    key, value = draw((*leads, m, d), dtype, 1) + offset, draw((*leads, m, dv), dtype, 2)
    shape = {
        "none": None, "keys": (1, 1, m), "batch": (batch, 1, m), "heads": (1, heads, m), "full": (*leads, m)
    }[weights]  # fmt: skip
    affine = [
        1.0 + 0.3 * draw((heads, width), seed=seed) if side in norms else None
        for side, width, seed in (("k", d, 4), ("k", d, 5), ("v", dv, 6), ("v", dv, 7))
    ]
    return Case(
        key,
        value,
        draw((batch, m, p), seed=8) if p > 0 else None,
        None if shape is None else draw(shape, seed=3, positive=True),
        *affine,
    )


def by_formula(x: Case) -> Tensor:
    """[x, Ln k]^T W [x, Ln v] written out; a row of weight 0 does not exist."""
    keys = x.key.shape[-2]
    w = x.key.new_full((1, 1, keys), 1 / max(keys, 1)) if x.weights is None else x.weights.to(x.key.dtype)
    live = (w != 0)[..., None]

    def normed(rows, scale, shift):
        rows = torch.where(live, rows, 0.0)
        if scale is not None:
            mean = rows.mean(-1, keepdim=True)
            variance = (rows - mean).square().mean(-1, keepdim=True)
            rows = (rows - mean) / (variance + EPS).sqrt()
            rows = rows * scale[:, None].to(rows.dtype) + shift[:, None].to(rows.dtype)
        if x.pos is not None:
            pos = x.pos[:, None].to(rows.dtype).expand(*rows.shape[:-1], -1)
            rows = torch.cat([pos, rows], -1)
        return torch.where(live, rows, 0.0)

    k, v = normed(x.key, x.key_scale, x.key_shift), normed(x.value, x.value_scale, x.value_shift)
    return (k * w[..., None]).mT @ v


def plain(x: Case) -> Tensor:
    """Layer norms and the product as a user would write them, all in the dtype of the keys."""
    k, v = x.key, x.value
    if x.key_scale is not None:
        k = F.layer_norm(k, k.shape[-1:], eps=EPS) * x.key_scale[:, None].to(k.dtype)
        k = k + x.key_shift[:, None].to(k.dtype)
    if x.value_scale is not None:
        v = F.layer_norm(v, v.shape[-1:], eps=EPS) * x.value_scale[:, None].to(v.dtype)
        v = v + x.value_shift[:, None].to(v.dtype)
    if x.pos is not None:
        k, v = (torch.cat([x.pos[:, None].to(t.dtype).expand(*t.shape[:-1], -1), t], -1) for t in (k, v))
    w = k.new_full((), 1 / k.shape[-2]) if x.weights is None else x.weights.to(k.dtype)[..., None]
    return (k * w).mT @ v


def ours(x: Case) -> Tensor:
    return torch.ops.continuum_ops.galerkin_gram(*map(place, x), EPS).cpu()


def double(x: Case) -> Case:
    return Case(*(None if t is None else t.double() for t in x))


def run(function, x: Case, grad: Tensor) -> dict[str, Tensor]:
    """The matrix and the gradient of every tensor."""
    leaves = Case(
        *(
            None
            if t is None
            else t.detach().as_strided(t.shape, t.stride(), t.storage_offset()).requires_grad_()
            for t in x
        )
    )
    out = function(leaves)
    wanted = {name: t for name, t in leaves._asdict().items() if t is not None}
    grads = torch.autograd.grad(out, list(wanted.values()), grad.to(out.dtype))
    return {"out": out.detach(), **dict(zip(wanted, grads, strict=True))}


def check(x: Case) -> dict[str, Tensor]:
    """Values and gradients within max(2 x error of the plain form, 8 eps max|value|)."""
    p = 0 if x.pos is None else x.pos.shape[-1]
    grad = draw((*x.key.shape[:2], p + x.key.shape[-1], p + x.value.shape[-1]), seed=9)
    actual, rough = run(ours, x, grad), run(plain, x, grad)
    true = run(by_formula, double(x), grad)
    assert actual["out"].dtype == torch.float32
    for name, value in actual.items():
        assert value.shape == true[name].shape, name
        if value.numel() == 0:
            continue
        error = (value.double() - true[name]).abs().max().item()
        allowed = 2 * (rough[name].double() - true[name]).abs().max().item()
        allowed = allowed if math.isfinite(allowed) else 0.0
        allowed = max(allowed, 8 * torch.finfo(x.key.dtype).eps * true[name].abs().max().item())
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"
    return actual


# --- values and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, weights",
    [*((torch.float32, w) for w in ("none", "batch", "heads", "full")), *((d, "keys") for d in DTYPES)],
    ids=str,
)
def test_values_and_gradients(dtype, weights, on_device):
    check(case(dtype=dtype, weights=weights, m=70))
    assert len(on_device) == 1


@pytest.mark.parametrize("norms, p", [("kv", 0), ("k", 1), ("v", 3), ("", 2), ("kv", 3), ("k", 0)])
def test_norms_and_coordinates(norms, p):
    check(case((1, 2), norms=norms, p=p))


def test_shipped_tiles(monkeypatch):
    kernel = kernels("galerkin_attention")
    monkeypatch.setattr(kernel, "_CONFIGS", SHIPPED)
    check(case((1, 1), 40, 20, 33))


@pytest.mark.parametrize(
    "d, dv",
    [(1, 1), (2, 3), (15, 17), (24, 24), (31, 33), (65, 64), (96, 96), (129, 5), (3, 147), (256, 256)],
)
def test_widths(d, dv):
    """CASES 17 and 23: no powers of two, D != Dv, blocks of a matrix that is wider than one."""
    check(case((1, 1), 40, d, dv, torch.bfloat16 if d in (15, 65) else torch.float32))


@pytest.mark.parametrize("m", [1, 2, 15, 17, 127, 129, 256, 257, 513])
def test_lengths(m):
    check(case((1, 1), m, 8, 8, weights="none" if m in (17, 257) else "keys"))


@pytest.mark.parametrize("shape", [(2, 2, 0), (0, 2, 5), (2, 0, 5)])
def test_nothing_to_sum(shape, on_device):
    """CASES 12."""
    *leads, m = shape
    result = check(case(tuple(leads), m, 8, 8))
    assert set(result) == {"out", *Case._fields}
    assert not result["out"].any()
    assert not any(t.any() for t in result.values())


def test_long_chunks_give_the_same_sums(monkeypatch):
    """Both lengths of a program's sum, the second over a chunk of 1024 points that is not full."""
    kernel = kernels("galerkin_attention")
    x = case((1, 1), 1100, 8, 8)
    true = by_formula(double(x))
    for programs, points in ((1, 1024), (10**6, 256)):
        monkeypatch.setattr(kernel, "PROGRAMS", programs)
        assert kernel.points_per_program(1, 1100) == points
        assert (ours(x) - true).abs().max() <= 2e-6 * true.abs().max()


@pytest.mark.parametrize("precision, allowed", [("highest", 2e-6), ("high", 5e-3)])
def test_matmul_precision(precision, allowed):
    """CASES 15: float32 at the default precision is accurate; "high" is TF32."""
    x = case((1, 2), 128, 32, 32, weights="none")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        out = ours(x)
    finally:
        torch.set_float32_matmul_precision(before)
    true = by_formula(double(x))
    error = ((out - true).abs().max() / true.abs().max()).item()
    assert error < allowed, error
    assert precision == "highest" or error > 1e-5, "TF32 was not used"


def test_rows_far_from_zero():
    """The variance of rows of mean 1e4 and deviation 1 does not cancel."""
    check(case(offset=1e4, weights="none"))


def test_affine_parameters_of_16_bits():
    x = case(dtype=torch.bfloat16)
    affine = [t.bfloat16() for t in x[4:]]
    check(x._replace(**dict(zip(Case._fields[4:], affine, strict=True))))


def test_tiny_weights_in_float16():
    """1e-7 is below float16's smallest normal number; the sum is not."""
    x = case((1, 1), dtype=torch.float16)._replace(weights=torch.full((1, 1, 60), 1e-7))
    true = by_formula(double(x))
    assert (ours(x) - true).abs().max() <= 2e-3 * true.abs().max()


# --- edge rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, bad", [(torch.float32, NAN), (torch.float32, INF), (torch.bfloat16, NAN)], ids=str
)
def test_dead_rows_do_not_exist(dtype, bad):
    x = case((2, 1), dtype=dtype, weights="batch")
    x.weights[..., ::3] = 0
    clean = check(x)
    dirty = x._replace(key=x.key.clone(), value=x.value.clone(), pos=x.pos.clone())
    for rows in (dirty.key, dirty.value, dirty.pos):
        rows[..., ::3, :] = bad
    grad = draw(clean["out"].shape, seed=9)
    result = run(ours, dirty, grad)
    for name, value in result.items():
        assert torch.equal(value, clean[name]), name
    assert not result["key"][..., ::3, :].any() and not result["value"][..., ::3, :].any()
    assert not result["weights"][..., ::3].any()


def test_the_first_tiles_dead():
    """CASES 4."""
    x = case((1, 1), 300, 8, 8)
    x.weights[..., :256] = 0
    few = Case(*(t[..., 256:, :] for t in x[:3]), x.weights[..., 256:], *x[4:])
    torch.testing.assert_close(ours(x), ours(few), rtol=1e-6, atol=1e-6)
    check(x)


def test_all_weights_zero():
    """CASES 3."""
    result = run(ours, case()._replace(weights=torch.zeros(1, 1, 60)), torch.ones(2, 2, 18, 11))
    assert all(not t.any() for t in result.values())


@pytest.mark.parametrize("bad", [-1.0, NAN, INF])
def test_invalid_weights_make_nan_of_their_lead(bad):
    """No synchronisation: the affected matrix is NaN, others are right."""
    x = case(weights="full")
    true = ours(x)
    x.weights[1, 1, 5] = bad
    out = ours(x)
    assert out[1, 1].isnan().all()
    assert torch.equal(out[0], true[0]) and torch.equal(out[1, 0], true[1, 0])


def test_nan_in_a_live_row_comes_out():
    """CASES 19."""
    x = case()
    x.key[1, 0, 7, 3] = NAN
    out = ours(x)
    assert out[1, 0, 2:].isnan().all()  # the rows of the normalised channels
    assert out[1, 0, :2].isfinite().all() and out[0].isfinite().all() and out[1, 1:].isfinite().all()


@pytest.mark.parametrize("how", ["heads last", "sliced", "expanded", "unaligned"])
def test_strides(how):
    """CASES 5, 7, 8, 20: the layer's views, junk around a slice, stride 0, storage offset 1."""
    x = case(dtype=torch.bfloat16 if how == "unaligned" else torch.float32, weights="full", d=8, dv=8)
    true = ours(x)

    def moved(t: Tensor) -> Tensor:
        if how == "heads last":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        if how == "sliced":
            wide = torch.full((*t.shape[:-2], t.shape[-2] + 9, 2 * t.shape[-1] + 1), NAN, dtype=t.dtype)
            wide[..., 4:-5, 1::2] = t
            return wide[..., 4:-5, 1::2]
        flat = torch.cat([t.new_full((1,), NAN), t.flatten()])
        return flat[1:].view(t.shape)

    if how == "expanded":
        x = x._replace(key=x.key[:1].expand(2, 2, 60, 8), value=x.value[:1].expand(2, 2, 60, 8))
        true = ours(x._replace(key=x.key.contiguous(), value=x.value.contiguous()))
        x = x._replace(pos=x.pos[:1], weights=x.weights[:1, :1])
        same = x._replace(pos=x.pos.repeat(2, 1, 1), weights=x.weights.repeat(2, 2, 1))
        true = ours(same._replace(key=x.key.contiguous(), value=x.value.contiguous()))
    else:
        weights = moved(x.weights[..., None])[..., 0]
        x = x._replace(key=moved(x.key), value=moved(x.value), weights=weights)
    assert torch.equal(ours(x), true)
    check(x)


def test_a_tensor_passed_twice_has_the_sum_of_both_gradients():
    x = case((1, 2), 20, 6, 6)
    shared = x.key.clone().requires_grad_()
    grad = draw((1, 2, 8, 8), seed=9)
    (both,) = torch.autograd.grad(ours(x._replace(key=shared, value=shared)), shared, grad)
    each = run(ours, x._replace(value=x.key.clone()), grad)
    torch.testing.assert_close(both, each["key"] + each["value"])


def test_large_point_stride():
    """CASES 10: (M - 1) * stride passes 2^31; only the rows themselves are ever touched."""
    m, stride = 33, 2**26 + 64
    buffer = torch.empty((m - 1) * stride + 16, dtype=torch.bfloat16, device=DEVICE)
    assert (m - 1) * stride > 2**31
    x = Case(*map(place, case((1, 1), m, 16, 16, torch.bfloat16)))
    true = torch.ops.continuum_ops.galerkin_gram(*x, EPS)
    far = buffer.as_strided((1, 1, m, 16), (0, 0, stride, 1))
    for name in ("key", "value"):
        far.copy_(getattr(x, name))
        assert torch.equal(torch.ops.continuum_ops.galerkin_gram(*x._replace(**{name: far}), EPS), true)


@on_gpu_only
def test_many_leads():
    """CASES 11: B * H = 65,600."""
    check(case((8200, 8), 5, 4, 4))


def test_same_bits_twice():
    """CASES 14."""
    x = case((1, 2), m=300)
    first = ours(x)
    for _ in range(2 if INTERPRETED else 30):
        assert torch.equal(ours(x), first)


@pytest.mark.parametrize("what", ["float64", "257 channels", "4 coordinates"])
def test_what_the_kernel_does_not_take_is_composed(what, on_device):
    x = {
        "float64": lambda: double(case((1, 1), 20, 4, 4)),
        "257 channels": lambda: case((1, 1), 20, 257, 4),
        "4 coordinates": lambda: case((1, 1), 20, 4, 4, p=4),
    }[what]()
    true = by_formula(double(x))
    eps = torch.finfo(x.key.dtype).eps
    torch.testing.assert_close(ours(x).double(), true, rtol=0, atol=16 * eps * true.abs().max().item())
    assert on_device == []


# --- the layer -----------------------------------------------------------------------------------


def layer_and_inputs(kind, **options):
    layer = make(kind, dtype=torch.float32, **options)
    return layer, [t.float() for t in inputs()]


def call(layer, given, weights=None):
    x, y, x_pos, y_pos = given
    return layer(x, y, query_pos=x_pos, key_pos=y_pos, weights=weights)


@pytest.mark.parametrize(
    "kind, shape",
    [("galerkin", (B, M)), ("galerkin", (B, H, M)), ("fourier", None), ("fourier", (M,))],
    ids=str,
)
def test_the_layer_is_the_formula(kind, shape, on_device):
    """Output and the gradient of every parameter and input."""
    layer, given = layer_and_inputs(kind)
    w = None if shape is None else draw(shape, torch.float64, 5, positive=True)
    exact = copy.deepcopy(layer).double()
    leaves = [t.double().requires_grad_() for t in given]
    full = torch.full((M,), 1 / M, dtype=torch.float64) if w is None else w
    full = full.unsqueeze(1) if full.dim() == 2 else full
    true = formula(exact, *leaves, full)
    g = draw(true.shape, torch.float64, 9)
    expected = torch.autograd.grad(true, [*leaves, *exact.parameters()], g)

    layer = layer.to(DEVICE)
    on = [t.to(DEVICE).requires_grad_() for t in given]
    out = call(layer, on, None if w is None else w.to(DEVICE))
    found = torch.autograd.grad(out, [*on, *layer.parameters()], g.to(DEVICE, out.dtype))
    assert len(on_device) == 1
    for a, b in zip((out, *found), (true, *expected), strict=True):
        torch.testing.assert_close(
            a.detach().cpu().double(), b.detach(), rtol=1e-5, atol=1e-5 * b.abs().max().item()
        )


@pytest.mark.parametrize(
    "kind, options", [("galerkin", {"normalize": False}), ("linear", {}), ("softmax", {})]
)
def test_layers_that_have_nothing_to_fuse(kind, options, on_device):
    layer, given = layer_and_inputs(kind, **options)
    call(layer.to(DEVICE), [t.to(DEVICE) for t in given])
    assert on_device == []


def test_the_layer_under_autocast(on_device):
    layer, given = layer_and_inputs("galerkin")
    true = formula(
        copy.deepcopy(layer).double(), *(t.double() for t in given), torch.full((M,), 1 / M).double()
    )
    layer = layer.to(DEVICE)
    on = [t.to(DEVICE).requires_grad_() for t in given]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = call(layer, on)
    assert out.dtype == torch.bfloat16 and len(on_device) == 1
    assert (out.double().cpu() - true).abs().max() <= 3e-2 * true.abs().max()
    out.float().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in (*on, *layer.parameters()))


def test_dropout_acts_on_the_small_matrix():
    """All of it dropped leaves the bias; none of it in evaluation."""
    layer, given = layer_and_inputs("galerkin", dropout=1.0)
    layer, on = layer.to(DEVICE), [t.to(DEVICE) for t in given]
    calm = call(layer, on)
    assert torch.equal(calm, call(layer, on)) and calm.shape == (B, N, 6)
    layer.train()
    assert torch.equal(call(layer, on), layer.out_proj.bias.expand_as(calm))


def test_a_layer_without_coordinates(on_device):
    layer = make("galerkin", dtype=torch.float32, coord_dim=0)
    x = inputs()[0].float()
    exact = copy.deepcopy(layer).double()
    nothing = torch.empty(N, 0, dtype=torch.float64)
    # The formula is for heads with coordinates; out_proj of this layer has no columns for them.
    q, k, v = (F.linear(x.double(), p.weight, p.bias).unflatten(-1, (H, 3)).transpose(1, 2)
               for p in (exact.q_proj, exact.k_proj, exact.v_proj))  # fmt: skip
    rows = Case(k, v, nothing.expand(B, N, 0), None, exact.k_norm.weight, exact.k_norm.bias,
                exact.v_norm.weight, exact.v_norm.bias)  # fmt: skip
    true = (q @ by_formula(rows)).transpose(1, 2).flatten(-2)
    true = F.linear(true, exact.out_proj.weight, exact.out_proj.bias)
    out = layer.to(DEVICE)(x.to(DEVICE))
    assert len(on_device) == 1
    np.testing.assert_allclose(out.detach().cpu(), true.detach(), rtol=0, atol=2e-6 * true.abs().max().item())
