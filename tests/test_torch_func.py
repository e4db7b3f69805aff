"""The operators under torch.func and in forward mode, and a Laplacian of a model."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwd
from functorch_helpers import F64, RATE, W6, cases
from helpers import draw
from position_helpers import points
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import continuum_ops as co
from continuum_ops import reference

ops = torch.ops.continuum_ops
CASES = cases()
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def agree(case, transform):
    """The transform of the operator is that of the dense formula, without torch's slow fallback of vmap."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = transform(case.ours)
    torch.testing.assert_close(ours, transform(case.dense), rtol=1e-9, atol=1e-11)


def scalar(f):
    return lambda *args: sum(out.sin().sum() for out in f(*args))


def tangents(args):
    return tuple(draw(t.shape, F64, 50 + i) for i, t in enumerate(args))


# --- one transform ---------------------------------------------------------------------------------


@every
def test_reverse_mode(case):
    argnums = tuple(range(len(case.args)))
    agree(case, lambda f: grad(scalar(f), argnums)(*case.args))
    agree(case, lambda f: jacrev(f, argnums)(*case.args))

    def pullback(f):
        out, pull = vjp(f, *case.args)
        return pull(tuple(o.cos() for o in out))

    agree(case, pullback)


@every
def test_forward_mode(case):
    argnums = tuple(range(len(case.args)))
    agree(case, lambda f: jvp(f, case.args, tangents(case.args)))
    agree(case, lambda f: jacfwd(f, argnums)(*case.args))

    def dual(f):
        with fwd.dual_level():
            inputs = [fwd.make_dual(t, d) for t, d in zip(case.args, tangents(case.args), strict=True)]
            return [tuple(fwd.unpack_dual(out)) for out in f(*inputs)]

    agree(case, dual)


def patterns(args, count):
    """in_dims of all inputs, of each one alone, and a few random ones at random dimensions."""
    choose = random.Random(0)
    batched = [[True] * len(args), *([i == j for j in range(len(args))] for i in range(len(args)))]
    batched += [[choose.random() < 0.5 for _ in args] for _ in range(count)]
    for chosen in batched:
        if any(chosen):
            yield tuple(choose.randint(0, t.dim()) if b else None for t, b in zip(args, chosen, strict=True))


def batch(args, in_dims, size=3):
    return [
        t if d is None else torch.stack([t * (1 + 0.1 * i) for i in range(size)], d)
        for t, d in zip(args, in_dims, strict=True)
    ]


@every
def test_vmap(case):
    argnums = tuple(range(len(case.args)))
    for in_dims in patterns(case.args, 4):
        args = batch(case.args, in_dims)
        agree(case, lambda f, d=in_dims, a=args: vmap(f, d)(*a))
        agree(case, lambda f, d=in_dims, a=args: vmap(grad(scalar(f), argnums), d)(*a))
        agree(case, lambda f, d=in_dims, a=args: grad(scalar(vmap(f, d)), argnums)(*a))


@every
def test_vmap_of_forward_mode(case):
    directions = tangents(case.args)
    for in_dims in list(patterns(case.args, 2))[:: len(case.args)]:
        args = batch(case.args, in_dims)
        agree(case, lambda f, d=in_dims, a=args: vmap(lambda *x: jvp(f, x, directions)[1], d)(*a))


@every
def test_nested_vmap(case):
    first, *middle, last = case.args
    firsts, lasts = torch.stack([first, 2 * first]), torch.stack([last, 2 * last, 3 * last], -1)

    def nested(f):
        def inner(a, b):
            return f(a, *middle, b)

        def twice(g):
            return vmap(vmap(g, (None, -1)), (0, None))(firsts, lasts)

        return twice(inner), twice(grad(scalar(inner), (0, 1)))

    agree(case, nested)


# --- derivatives of derivatives ----------------------------------------------------------------------


@every
def test_second_derivatives_in_every_order(case):
    ends = (0, len(case.args) - 1)
    for outer, inner in ((jacfwd, jacrev), (jacrev, jacrev), (jacfwd, jacfwd), (jacrev, jacfwd)):
        agree(case, lambda f, o=outer, i=inner: o(i(scalar(f), ends), ends)(*case.args))


@every
def test_products_with_the_hessian(case):
    argnums, directions = tuple(range(len(case.args))), tangents(case.args)
    agree(case, lambda f: jvp(grad(scalar(f), argnums), case.args, directions))
    agree(case, lambda f: grad(lambda *x: jvp(scalar(f), x, directions)[1], argnums)(*case.args))
    agree(case, lambda f: jvp(lambda *x: jvp(f, x, directions)[1], case.args, directions))

    def tangent_of_pullback(f):
        out, pull = vjp(f, *case.args)
        return jvp(pull, (tuple(o.cos() for o in out),), (tuple(o.sin() for o in out),))

    agree(case, tangent_of_pullback)


@every
def test_backward_through_vmap_twice(case):
    """Ordinary tensors that require a gradient, mapped."""
    leaves = [t.clone().requires_grad_() for t in (torch.stack([case.args[0]] * 2), *case.args[1:])]

    def twice(f):
        out = vmap(f, (0, *(None for _ in leaves[1:])))(*leaves)
        first = torch.autograd.grad(scalar(lambda: out)(), leaves, create_graph=True)
        second = torch.autograd.grad(scalar(lambda: first)(), leaves, materialize_grads=True)
        return first, second

    agree(case, twice)


def test_third_derivatives():
    """In forward mode any order; in reverse mode the third raises."""
    case = CASES["no heads"]
    query, *rest = case.args

    def f(op):
        return lambda q: scalar(op)(q, *rest)

    agree(case, lambda op: jacfwd(jacfwd(jacfwd(f(op))))(query))
    agree(case, lambda op: jacfwd(jacrev(jacfwd(f(op))))(query))
    with pytest.raises(RuntimeError, match="continuum_attention has first and second derivatives in reverse"):
        grad(lambda q: grad(lambda q: grad(f(case.ours))(q).sum())(q).sum())(query)


@pytest.mark.parametrize("name", ["no heads", "float mask", "distance", "position", "per sample", "grids"])
def test_finite_differences(name):
    """Along random directions, of the operator itself and of its first derivatives."""
    case = CASES[name]
    leaves = [t.clone().requires_grad_() for t in case.args]
    assert gradcheck(case.ours, leaves, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(case.ours, leaves, check_fwd_over_rev=True, fast_mode=True)


# --- edges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 2**22])
def test_forward_mode_in_blocks_of_queries(chunk, monkeypatch):
    for name, module in (
        ("distance", "_continuum_attention_chunked"),
        ("per sample", "_position_attention_chunked"),
    ):
        monkeypatch.setattr(f"continuum_ops.ops.{module}.CHUNK_SCORES", chunk)
        case = CASES[name]
        agree(case, lambda f, c=case: jvp(f, c.args, tangents(c.args)))


@pytest.mark.parametrize("op", ["continuum", "position"])
def test_dead_keys_and_empty_rows_have_no_tangent(op):
    """A weight of 0 removes its key, NaN or not; a query out of reach gives 0 and -inf."""
    x, y, v = points((4, 2), F64, 1), points((6, 2), F64, 2), draw((1, 6, 3), F64)
    x[3] += 100.0
    w = W6.clone()
    w[2] = 0.0
    v[:, 2], y[2] = torch.nan, torch.nan

    def ours(x, v, w):
        if op == "position":
            return co.position_attention(x, y, v, RATE[:1], w, radius=2.0, return_lse=True)
        q, k = torch.zeros(1, 4, 1, dtype=F64), torch.zeros(1, 6, 1, dtype=F64)
        out, lse = co.continuum_attention(
            q, k, v, w, query_pos=x, key_pos=y, rate=RATE[:1], radius=2.0, return_lse=True
        )
        return out[:, None], lse[:, None]

    alive = [0, 1, 3, 4, 5]

    def dense(x, v, w):
        return reference.position_attention(
            x[:3], y[alive], v[:, alive], RATE[:1], w[alive], radius=2.0, return_lse=True
        )

    args = (x, v, w)
    directions = tangents(args)
    for transform in (
        lambda f: jvp(f, args, directions),
        lambda f: jvp(lambda *t: jvp(f, t, directions)[1], args, directions),
    ):
        true, found = transform(dense), transform(ours)
        for (out, lse), (expected, expected_lse) in zip(found, true, strict=True):
            torch.testing.assert_close(out[:, :, :3], expected)
            torch.testing.assert_close(lse[:, :, :3], expected_lse)
            assert not out[:, :, 3].any()
    assert found[1][1][:, :, 3].eq(0).all() and transform(ours)[0][1][:, :, 3].eq(0).all()
    assert jvp(ours, args, directions)[0][1][:, :, 3].eq(-torch.inf).all()


@pytest.mark.parametrize("keys", [0, 3])
def test_no_queries_or_no_keys(keys):
    q, k, v = draw((2, 3 - keys, 2), F64), draw((2, keys, 2), F64), draw((2, keys, 4), F64)
    out, tangent = jvp(lambda q: co.continuum_attention(q, k, v), (q,), (q,))
    assert out.shape == tangent.shape == (2, 3 - keys, 4) and not tangent.any()
    x, y = q[0], k[0]
    out, tangent = jvp(lambda x: co.position_attention(x, y, v, RATE), (x,), (x,))
    assert out.shape == tangent.shape == (2, 2, 3 - keys, 4) and not tangent.any()
    mapped = vmap(lambda v: co.position_attention(x, y, v[None], RATE))(v)
    assert mapped.shape == (2, 1, 2, 3 - keys, 4) and not mapped.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    q, k, v = (draw((2, 9, 4), dtype, i) for i in range(3))
    exact = jvp(reference.continuum_attention, *[tuple(t.double() for t in (q, k, v))] * 2)
    found = jvp(co.continuum_attention, (q, k, v), (q, k, v))
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(
            a.double(), b, rtol=0, atol=8 * torch.finfo(dtype).eps * b.abs().max().item()
        )
    mapped = vmap(co.continuum_attention)(q, k, v)
    assert torch.equal(mapped, co.continuum_attention(q[:, None], k[:, None], v[:, None])[:, 0])


def test_vmap_runs_the_kernel_once_for_the_batch(monkeypatch):
    """Values batched and a mesh that is shared: each probability is computed once."""
    x, v = points((20, 2), F64), draw((7, 20, 3), F64)
    calls = []
    module = "continuum_ops.ops._position_attention_functorch"
    operator = __import__(module, fromlist=["_OPERATOR"])._OPERATOR

    def counted(*args):
        calls.append(args)
        return ops.position_attention_forward(*args)

    from dataclasses import replace

    monkeypatch.setattr(f"{module}._OPERATOR", replace(operator, forward=counted))
    out = vmap(lambda v: co.position_attention(x, x, v[None], RATE)[0])(v)
    torch.testing.assert_close(out, co.position_attention(x, x, v, RATE))
    assert len(calls) == 1 and calls[0][0].shape == (1, 20, 2) and calls[0][2].shape == (7, 1, 20, 3)


def test_values_are_checked_inside_transforms():
    q = draw((3, 2, 5, 2), F64)
    bad = -torch.ones(5, dtype=F64)
    for f in (
        lambda q: co.continuum_attention(q, q, q, bad),
        lambda q: co.position_attention(q[0], q[0], q, RATE, bad),
        lambda q: co.galerkin_attention(q, q, q, bad),
    ):
        with pytest.raises(ValueError, match="weights must be >= 0"):
            vmap(f)(q)
        with pytest.raises(ValueError, match="weights must be >= 0"):
            jvp(f, (q[0],), (q[0],))
    grid = co.Grid.uniform((5, 1), kind="cell")
    for mesh in (grid, grid.points):
        with pytest.raises(ValueError, match="rate must be >= 0"):
            jvp(lambda v, m=mesh: co.position_attention(m, m, v, -RATE), (q[0],), (q[0],))


def test_values_are_checked_and_zero_is_none_too_small():
    """Rate and radius 0: each query sees the key at its place alone."""
    x, v = points((5, 2), F64), draw((2, 5, 2), F64)

    def f(v):
        nothing = torch.zeros(2, dtype=F64), torch.zeros(5, dtype=F64)
        return co.position_attention(x, x, v, nothing[0], radius=nothing[1])

    out, tangent = jvp(f, (v,), (v.exp(),))
    torch.testing.assert_close(out, v[:, None].expand_as(out))
    torch.testing.assert_close(tangent, v.exp()[:, None].expand_as(out))
    torch.testing.assert_close(vmap(f)(v[None])[0], out)


def test_dropout():
    q = torch.zeros(4, 1, 30, 2)
    v = torch.ones(4, 1, 30, 1)

    def f(q, v):
        return co.continuum_attention(q, q, v, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(f)(q, v)
    same, different = (vmap(f, randomness=r)(q, v) for r in ("same", "different"))
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])
    with pytest.raises(NotImplementedError, match="dropout_p > 0"):
        jvp(f, (q[0], v[0]), (q[0], v[0]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        grads = vmap(grad(lambda v, q: f(q, v).sum()), randomness="different")(v, q)
        torch.manual_seed(0)
        kept = vmap(f, randomness="different")(q, v)  # linear in v, which is 1
    torch.testing.assert_close(grads.sum((1, 2, 3)), kept.sum((1, 2, 3)))


# --- the registered operators and quantile_radius ------------------------------------------------------


def test_vmap_of_the_registered_window_operator():
    axes = [torch.linspace(0, 1, n, dtype=F64) for n in (3, 4)]
    v, rates = draw((3, 2, 1, 12, 2), F64), torch.tensor([[1.0], [2.0], [3.0]], dtype=F64)
    radius, period = torch.tensor(0.6, dtype=F64), [torch.inf] * 2

    def call(v, rate):
        return ops.window_attention(v, axes, axes, rate, None, radius, period, 1e-15)

    mesh = torch.cartesian_prod(*axes)
    for mapped, index in zip(vmap(call)(v, rates), (0, 1), strict=True):
        for i in range(3):
            expected = reference.position_attention(
                mesh, mesh, v[i, :, 0], rates[i], radius=0.6, return_lse=True
            )
            torch.testing.assert_close(mapped[i], expected[index])
    loss = vmap(grad(lambda v, rate: sum(t.sum() for t in call(v, rate))), (0, 0))
    with pytest.raises(RuntimeError, match="setup_context"):  # the public function takes the points instead
        loss(v, rates)


def test_batched_gradients_of_the_registered_operators():
    """torch.autograd.grad(is_grads_batched=True) maps the backward operator alone."""
    for name in ("continuum", "no heads", "float mask", "distance", "position", "per sample"):
        case = CASES[name]
        leaves = [t.clone().requires_grad_() for t in case.args]
        out = case.ours(*leaves)[0]
        cotangents = draw((3, *out.shape), F64)
        found = torch.autograd.grad(out, leaves, cotangents, is_grads_batched=True, retain_graph=True)
        for i in range(3):
            one = torch.autograd.grad(case.dense(*leaves)[0], leaves, cotangents[i])
            torch.testing.assert_close([g[i] for g in found], list(one), rtol=1e-9, atol=1e-11)


def test_vmap_of_every_registered_backward():
    grid_args = (
        draw((3, 2, 2, 6, 2), F64),
        draw((2, 1, 4, 2), F64),
        [draw((2, m, 2), F64, m) for m in (2, 3)],
    )
    mapped = vmap(lambda g: ops.grid_product_backward(g, *grid_args[1:], [], True, True))(grid_args[0])
    for i in range(3):
        single = ops.grid_product_backward(grid_args[0][i], *grid_args[1:], [], True, True)
        for a, b in zip(mapped, single, strict=True):
            torch.testing.assert_close(a[i], b)


def test_quantile_radius():
    """It has no derivative; mapped it is that of each entry."""
    x, y = draw((3, 2, 5, 2), F64), draw((6, 2, 3), F64, 1)
    one = vmap(co.quantile_radius, (0, 2, None))(x[:, 0], y, 0.3)
    two = vmap(co.quantile_radius, (0, 2, None))(x, y, 0.3)
    nested = vmap(vmap(co.quantile_radius, (0, None, None)), (0, 2, None))(x, y, 0.3)
    for i in range(3):
        expected = reference.quantile_radius(x[i], y[..., i], 0.3)
        torch.testing.assert_close(two[i], expected)
        torch.testing.assert_close(nested[i], expected)
        torch.testing.assert_close(one[i], expected[0])
    z = x[0, 0]
    assert not jvp(lambda z: co.quantile_radius(z, y[..., 0], 0.3), (z,), (z,))[1].any()
    assert torch.equal(grad(lambda z: (co.quantile_radius(z, z, 0.3) * 0 + 1).sum() + z.sum())(z), z * 0 + 1)


# --- a physics-informed model --------------------------------------------------------------------------


def laplacian(f, x):
    """sum_d d^2 f / dx_d^2 for f: (N, d) -> (N,) whose value at a point depends on that point alone."""
    total = torch.zeros_like(x[:, 0])
    for axis in range(x.shape[-1]):
        direction = torch.zeros_like(x)
        direction[:, axis] = 1.0
        total = total + jvp(lambda x, d=direction: jvp(f, (x,), (d,))[1], (x,), (direction,))[1]
    return total


@pytest.fixture(scope="module")
def field():
    """PiT without radii, from a grid to any points; the function of its parameters and 256 points."""
    torch.manual_seed(0)
    sizes = {"width": 16, "num_heads": 2, "num_layers": 2, "encoder_quantile": None, "decoder_quantile": None}
    rates = {"initial_rate": 4.0, "initial_local_rate": 8.0}
    model = co.models.PiT(1, 1, 2, **sizes, **rates, dtype=F64)
    mesh = co.Grid.uniform((9, 9))
    u = torch.sin(3.0 * mesh.points[:, :1])[None]

    def at(parameters, x):
        return functional_call(model, parameters, (u, mesh, x))[0, :, 0]

    return at, {name: p.detach() for name, p in model.named_parameters()}, points((256, 2), F64)


def test_laplacian_of_a_model_in_its_query_coordinates(field):
    at, parameters, x = field
    found = laplacian(lambda x: at(parameters, x), x)
    h = 1e-3
    exact = torch.zeros_like(found)
    for axis in torch.eye(2, dtype=F64):
        # Central differences of fourth order.
        near = at(parameters, x + h * axis) + at(parameters, x - h * axis)
        far = at(parameters, x + 2 * h * axis) + at(parameters, x - 2 * h * axis)
        exact += (16 * near - far - 30 * at(parameters, x)) / (12 * h * h)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-7 * exact.abs().max().item())
    hessians = vmap(hessian(lambda p: at(parameters, p[None])[0]))(x[:5])
    torch.testing.assert_close(hessians.diagonal(dim1=-2, dim2=-1).sum(-1), found[:5])
    twice = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(at(parameters, twice).sum(), twice, create_graph=True)
    reverse = sum(torch.autograd.grad(slope[:, i].sum(), twice, retain_graph=True)[0][:, i] for i in (0, 1))
    torch.testing.assert_close(reverse, found)


def test_gradient_of_a_residual_with_respect_to_the_parameters(field):
    at, parameters, x = field

    def residual(parameters):
        return laplacian(lambda x: at(parameters, x), x[:32]).square().mean()

    direction = {name: draw(p.shape, F64, i) for i, (name, p) in enumerate(parameters.items())}
    grads = grad(residual)(parameters)
    slope = sum((grads[name] * d).sum() for name, d in direction.items())
    h = 1e-5
    ahead, behind = (residual({n: p + s * h * direction[n] for n, p in parameters.items()}) for s in (1, -1))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * h), rtol=1e-6, atol=0)
