"""Plain calls ask the kernel first: what they give, and that nothing that intercepts calls is passed by."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import continuum_ops as co
from continuum_ops.backends import extension
from continuum_ops.ops import _direct as direct

backend, _ = extension()

KINDS = ("continuum", "position", "patch", "galerkin", "fourier")
needs_kernels = pytest.mark.skipif(
    not direct.KERNELS, reason="without the extension there is no kernel to ask"
)


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


def make(kind, dtype=torch.float64):
    """The operator as a function of its differentiable inputs, and these."""
    w = (0.1 + torch.rand(9, dtype=dtype, generator=torch.Generator().manual_seed(1))) / 9
    if kind == "position":
        x, y, rate = randn(7, 2, dtype=dtype), randn(9, 2, dtype=dtype, seed=1), randn(3, dtype=dtype).abs()
        return (
            lambda x, y, v, rate, w: co.position_attention(x, y, v, rate, w),
            (x, y, randn(2, 9, 4, dtype=dtype), rate, w),
        )
    if kind == "patch":
        q, k, v = (
            randn(2, *n, 2, dtype=dtype, seed=s) for s, n in enumerate(((2, 6, 2), (4, 3, 2), (4, 3, 2)))
        )
        masses = 0.1 + torch.rand(2, 6, dtype=dtype, generator=torch.Generator().manual_seed(1))
        return lambda q, k, v, w: co.patch_attention(q, k, v, (2, 3), w), (q, k, v, masses / 12)
    q, k, v = (randn(2, 3, n, 5, dtype=dtype, seed=s) for s, n in enumerate((7, 9, 9)))
    return getattr(co, f"{kind}_attention"), (q, k, v, w)


def by_patches(t, size):
    """(B, n, m, H, C) as (B, H, patches, points of a patch, C)."""
    t = t.unflatten(2, (-1, size[1])).unflatten(1, (-1, size[0]))
    return t.permute(0, 5, 1, 3, 2, 4, 6).flatten(2, 3).flatten(3, 4)


def formula(kind, *inputs):
    if kind == "position":
        x, y, v, rate, w = inputs
        scores = (-rate[:, None, None] * (x[:, None] - y).square().sum(-1)).exp() * w
        return scores @ v[:, None] / scores.sum(-1, keepdim=True)
    q, k, v, w = inputs
    if kind == "patch":
        p, j, values = (by_patches(t, (2, 3)) for t in (q * w[..., None, None], k, v))
        out = torch.einsum("bhpj,bhjxc->bhpxc", torch.einsum("bhpxc,bhjxc->bhpj", p, j).softmax(-1), values)
        out = out.unflatten(3, (2, 3)).unflatten(2, (1, 2))  # batch, head, patch of each axis, point of each
        return out.permute(0, 2, 4, 3, 5, 1, 6).reshape(q.shape)
    if kind == "continuum":
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).exp() * w
        return scores @ v / scores.sum(-1, keepdim=True)
    return (q @ k.mT * w) @ v


@pytest.fixture
def no_checks(monkeypatch):
    """The ordinary way must not be needed."""

    def fail(*args, **kwargs):
        raise AssertionError("the ordinary way was taken")

    for name in ("check_tensor", "check_qkv"):
        monkeypatch.setattr(f"continuum_ops.ops._checks.{name}", fail)


SOFTMAX = ("continuum", "position", "patch")
KINDS_KEPT = [*KINDS, *(f"{kind}, records kept" for kind in SOFTMAX)]


@pytest.fixture
def kept(monkeypatch):
    """What a backward reads of its forward is kept, which of small problems as these it is not."""
    monkeypatch.setattr(direct, "CHEAP", -1)


@pytest.fixture
def kind(request):
    name, _, records = request.param.partition(", ")
    if records:
        request.getfixturevalue("kept")
    return name


@needs_kernels
@pytest.mark.parametrize("kind", KINDS_KEPT, indirect=True)
def test_plain_calls_need_no_checks_and_agree_with_the_formula(kind, no_checks):
    op, inputs = make(kind)
    learned = [t.clone().requires_grad_() for t in inputs]
    expected = formula(kind, *learned)
    grad_out = randn(*expected.shape)
    wanted = torch.autograd.grad(expected, learned, grad_out)
    bound = 1e-13 * expected.abs().max().item()
    assert (op(*inputs) - expected).abs().max().item() <= bound
    out = op(*learned)
    assert (out - expected).abs().max().item() <= bound
    for got, grad in zip(torch.autograd.grad(out, learned, grad_out), wanted, strict=True):
        assert (got - grad).abs().max().item() <= 1e-12 * grad.abs().max().item()


@pytest.mark.parametrize("kind", KINDS_KEPT, indirect=True)
def test_derivatives_of_plain_calls(kind):
    op, inputs = make(kind)
    learned = tuple(t.clone().requires_grad_() for t in inputs)
    assert torch.autograd.gradcheck(op, learned)
    assert torch.autograd.gradgradcheck(op, learned)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("learned", range(4))
def test_one_gradient_alone(kind, learned):
    op, inputs = make(kind)
    chosen = inputs[learned].clone().requires_grad_()
    given = [chosen if i == learned else t for i, t in enumerate(inputs)]
    out, expected = op(*given), formula(kind, *given)
    grad_out = randn(*out.shape)
    (got,), (grad,) = (torch.autograd.grad(y, chosen, grad_out) for y in (out, expected))
    assert (got - grad).abs().max().item() <= 1e-12 * grad.abs().max().item()


@pytest.mark.parametrize("kind", KINDS_KEPT, indirect=True)
def test_batched_gradients(kind):
    op, inputs = make(kind)
    learned = [t.clone().requires_grad_() for t in inputs]
    out, expected = op(*learned), formula(kind, *learned)
    cotangents = randn(3, *out.shape)
    found = torch.autograd.grad(out, learned, cotangents, is_grads_batched=True)
    for i, grad_out in enumerate(cotangents):
        wanted = torch.autograd.grad(expected, learned, grad_out, retain_graph=True)
        for got, grad in zip(found, wanted, strict=True):
            assert (got[i] - grad).abs().max().item() <= 1e-12 * grad.abs().max().item()


@needs_kernels
@pytest.mark.parametrize("kind", SOFTMAX)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_records_computed_again_are_those_kept(kind, dtype, monkeypatch):
    op, inputs = make(kind, dtype)
    learned = [t.clone().requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = formula(kind, *exact)
    grad_out = randn(*expected.shape, dtype=dtype)
    wanted = torch.autograd.grad(expected, exact, grad_out.double())
    found, kept = [], []
    for bound in (direct.CHEAP, -1):
        monkeypatch.setattr(direct, "CHEAP", bound)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):  # noqa: B023
            out = op(*learned)
        found.append(torch.autograd.grad(out, learned, grad_out))
        kept.append(len(saved))
    assert kept == [len(inputs), len(inputs) + (1 if kind == "patch" else 2)]
    for again, before, grad in zip(*found, wanted, strict=True):
        assert torch.equal(again, before)
        assert (again - grad).abs().max().item() <= 64 * torch.finfo(dtype).eps * grad.abs().max().item()


@needs_kernels
@pytest.mark.parametrize("masses", [(9,), (2, 9), None])
@pytest.mark.parametrize("records", ["computed again", "kept"])
def test_points_of_each_sample(masses, records, request, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the ordinary way was taken")

    monkeypatch.setattr("continuum_ops.ops._position_attention_checks.check_value", fail)
    if records == "kept":
        request.getfixturevalue("kept")
    x, y, v, rate = randn(2, 7, 2), randn(2, 9, 2, seed=1), randn(2, 9, 4), randn(3).abs()
    given = [x, y, v, rate] if masses is None else [x, y, v, rate, 0.1 + randn(*masses).abs()]
    learned = [t.requires_grad_() for t in given]
    squares = (x[:, None, :, None] - y[:, None, None]).square().sum(-1)
    scores = (-rate[:, None, None] * squares).exp()
    if masses is not None:
        scores = scores * given[4].expand(2, 9)[:, None, None]
    expected = scores @ v[:, None] / scores.sum(-1, keepdim=True)
    out = co.position_attention(*given)
    assert (out - expected).abs().max().item() <= 1e-13 * expected.abs().max().item()
    grad_out = randn(*out.shape)
    grads = [torch.autograd.grad(t, learned, grad_out) for t in (out, expected)]
    for got, grad in zip(*grads, strict=True):
        assert (got - grad).abs().max().item() <= 1e-12 * grad.abs().max().item()
    if masses != (9,):
        assert torch.autograd.gradgradcheck(co.position_attention, learned)


@pytest.mark.parametrize("lead", [(2, 1), (1,)])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("size", [2, [2, 3], (2, 3)])
def test_patch_arguments(size, scale, lead):
    """One patch size for all axes, weights without the batch or an axis of the grid, 1 for no scale."""
    shape = (4, 6)
    q, k, v = (randn(2, *shape, 3, 5, seed=s).requires_grad_() for s in range(3))
    w = (0.1 + randn(*lead, 6).abs()).requires_grad_()
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    out = co.patch_attention(q, k, v, size, w, scale=scale)
    full = (w if w.dim() == 3 else w[None]).expand(-1, *shape)[..., None, None]
    p, j, values = (by_patches(t, sizes) for t in (q * full, k, v))
    scores = torch.einsum("bhpxc,bhjxc->bhpj", p, j) * (1.0 if scale is None else scale)
    expected = torch.einsum("bhpj,bhjxc->bhpxc", scores.softmax(-1), values)
    found = by_patches(out, sizes)
    assert (found - expected).abs().max().item() <= 1e-13 * expected.abs().max().item()
    grad_out = randn(*expected.shape)
    grads = [torch.autograd.grad(y, (q, k, v, w), grad_out) for y in (found, expected)]
    for got, grad in zip(*grads, strict=True):
        assert (got - grad).abs().max().item() <= 1e-12 * grad.abs().max().item()


@pytest.mark.parametrize("kind", ["continuum", "galerkin"])
def test_leading_dimensions_that_broadcast(kind):
    op, (q, k, v, w) = make(kind)
    given = [t.clone().requires_grad_() for t in (q[:1, :1], k[:, :1], v[0], w[None].repeat(3, 1))]
    out, expected = op(*given), formula(kind, *given[:3], given[3][:, None])
    assert (out - expected).abs().max().item() <= 1e-13 * expected.abs().max().item()
    grad_out = randn(*out.shape)
    grads = [torch.autograd.grad(y, given, grad_out) for y in (out, expected)]
    for got, grad in zip(*grads, strict=True):
        assert (got - grad).abs().max().item() <= 1e-12 * grad.abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_not_passed_by(kind):
    op, inputs = make(kind, torch.float32)
    learned = [t.clone().requires_grad_() for t in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op(*inputs).dtype == torch.bfloat16
        assert op(*learned).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert op(*inputs).dtype == torch.float32
    assert op(*learned).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_dispatch_modes_see_the_call(kind):
    """By the names under which others may know it: those of the operators with derivatives."""
    seen, linear = [], kind in ("galerkin", "fourier")

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    op, inputs = make(kind)
    learned = [t.clone().requires_grad_() for t in inputs]
    with Log():
        op(*inputs)
        forward = "aten::bmm" if linear else f"continuum_ops::{kind}_attention_forward"
        assert seen.count(forward) > 0
        out = op(*learned)
        before = seen.count("aten::bmm")
        out.sum().backward()
    if linear:
        assert seen.count("aten::bmm") >= before + 4  # two products, two derivatives of each
    else:
        assert seen.count(f"continuum_ops::{kind}_attention_backward") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_function_transforms(kind):
    op, inputs = make(kind)
    got = torch.func.grad(lambda v: op(*inputs[:2], v, *inputs[3:]).sin().sum())(inputs[2])
    expected = torch.func.grad(lambda v: formula(kind, *inputs[:2], v, *inputs[3:]).sin().sum())(inputs[2])
    assert (got - expected).abs().max().item() <= 1e-12 * expected.abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
def test_subclasses_are_not_passed_by(kind):
    class Named(torch.Tensor):
        pass

    op, inputs = make(kind)
    for place in range(4):
        given = [t.as_subclass(Named) if i == place else t for i, t in enumerate(inputs[:4])]
        assert direct.plain(*given) is None
        assert isinstance(op(*given, *inputs[4:]), Named)
    out = op(*(t.as_subclass(Named) for t in inputs))
    assert isinstance(out, Named)


@pytest.mark.parametrize("kind", KINDS)
def test_nested_tensors_are_refused_by_name(kind):
    op, inputs = make(kind)
    nested = torch.nested.nested_tensor([torch.ones(8, 3), torch.ones(5, 3)], dtype=torch.float64)
    names = {"position": ("query_pos", "key_pos", "value", "rate", "weights")}
    for place, name in enumerate(names.get(kind, ("query", "key", "value", "weights"))):
        given = [nested if i == place else t for i, t in enumerate(inputs)]
        with pytest.raises(TypeError, match=rf"{name} must be a dense \(strided\) tensor, got a nested one"):
            op(*given)


@pytest.mark.parametrize("kind", KINDS)
def test_storage_offsets(kind):
    op, inputs = make(kind)
    moved = [torch.cat([torch.full_like(t[:1], 7.0), t])[1:] for t in inputs]
    assert all(t.storage_offset() > 0 for t in moved)
    expected = formula(kind, *inputs)
    assert (op(*moved) - expected).abs().max().item() <= 1e-13 * expected.abs().max().item()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_tensor_without_data_is_refused(kind, recorded):
    """The kernel asks no tensor but the first where it is; the fake kernel must not answer."""
    op, inputs = make(kind)
    for place in range(len(inputs)):
        mixed = [t.to("meta") if i == place else t for i, t in enumerate(inputs)]
        with pytest.raises(ValueError, match="device"):
            op(*(t.requires_grad_(recorded) for t in mixed))


def test_what_intercepts():
    x = torch.ones(2)
    assert (direct.plain(x, x, x) is None) == (not direct.KERNELS)
    assert (direct.plain(x, x, x, x, None) is None) == (not direct.KERNELS)
    for place in range(5):
        for other in ([1.0], 1.0) if place > 2 else ([1.0], 1.0, None):
            assert direct.plain(*(other if i == place else x for i in range(5))) is None
    assert direct.plain(torch.ones(2, device="meta"), x, x) is None
    assert not direct.intercepted()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert direct.intercepted()
    with torch.autograd.forward_ad.dual_level():
        assert direct.intercepted()
    inside = []
    torch.func.grad(lambda t: (inside.append(direct.intercepted()), t.sum())[1])(x)
    torch.jit.trace(lambda t: (inside.append(direct.intercepted()), t * 2)[1], (x,), check_trace=False)
    assert inside == [True, True]


@needs_kernels
@pytest.mark.parametrize("learned", range(5))
def test_where_gradients_are_recorded(learned):
    tensors = [torch.ones(2, requires_grad=i == learned) for i in range(5)]
    assert direct.plain(*tensors) is True
    assert direct.plain(*(t.detach() for t in tensors)) is False
    with torch.no_grad():
        assert direct.plain(*tensors) is False


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (5, 3, 2, 7), (16, 16, 16, 16), (17, 33, 9, 31), (0, 4, 3, 3), (4, 0, 3, 3)]
)
@pytest.mark.parametrize("isa", backend.isas() if backend is not None else [])
def test_small_linear_attention_on_every_instruction_set(isa, shape, dtype):
    n, m, d, dv = shape
    q, k = randn(2, d, n, dtype=dtype).mT, randn(2, m, 2 * d, dtype=dtype)[..., ::2]
    v, w = randn(2, m, dv, dtype=dtype), torch.rand(m, dtype=dtype)
    if m > 2:
        w[1], k[:, 1], v[:, 1] = 0.0, math.nan, math.inf
    given = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (q, k, v, w)]
    before = backend.isa()
    backend.set_isa(isa)
    try:
        out = co.galerkin_attention(*given)
        grad_out = randn(*out.shape, dtype=dtype)
        grads = torch.autograd.grad(out, given, grad_out)
    finally:
        backend.set_isa(before)
    alive = (w != 0).nonzero().flatten()
    exact = [t.detach().double().requires_grad_() for t in (q, k[:, alive], v[:, alive], w[alive])]
    expected = (exact[0] @ exact[1].mT * exact[3]) @ exact[2]
    wanted = torch.autograd.grad(expected, exact, grad_out.double())
    eps = torch.finfo(dtype).eps

    def close(got, right):
        scale = right.abs().max().item() if right.numel() else 0.0
        return got.shape == right.shape and bool(((got.double() - right).abs() <= 32 * eps * scale).all())

    assert close(out, expected)
    assert close(grads[0], wanted[0])
    assert close(grads[1][:, alive], wanted[1]) and close(grads[2][:, alive], wanted[2])
    assert close(grads[3][alive], wanted[3])
    dead = (w == 0).nonzero().flatten()
    assert all(bool((g == 0).all()) for g in (grads[1][:, dead], grads[2][:, dead], grads[3][dead]))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_weights_that_the_small_kernel_refuses(value):
    q, k, v = (randn(2, 5, 3) for _ in range(3))
    with pytest.raises(ValueError, match="weights must be >= 0 and finite, got"):
        co.galerkin_attention(q, k, v, torch.tensor([1.0, 1.0, value, 1.0, 1.0], dtype=torch.float64))
