"""The distance term -rate |x_i - y_k|^2 of continuum attention, its radius and its period."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import NAMES, assert_near, attend, check, draw, error_of, exact, lse_dtype, plain, qkv, run

import continuum_ops as co
from continuum_ops import reference
from continuum_ops.ops._philox import dropout_keep

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def term(leads, n, m, d, dtype, batch=(), seed=50) -> dict[str, torch.Tensor]:
    """Positions in about a unit box and rates; in the dtype that the kernel computes in."""
    acc = lse_dtype(dtype)
    return {
        "query_pos": 0.5 * draw((*batch, n, d), acc, seed),
        "key_pos": 0.5 * draw((*batch, m, d), acc, seed + 1),
        "rate": draw(leads[-1:], acc, seed + 2, positive=True),
    }


def results(query, key, value, weights=None, query_pos=None, key_pos=None, rate=None, **options):
    """Outputs and gradients for fixed cotangents."""
    shape = query.shape[:-1]
    grad_out = draw((*shape, value.shape[-1]), query.dtype, 21)
    grad_lse = draw(shape, lse_dtype(query.dtype), 22)
    tensors = [query, key, value, weights, None, query_pos, key_pos, rate]
    return run(attend, tensors, grad_out, grad_lse, **options)


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(
            value, b[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


# --- against the formula -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("period", [None, (1.0, math.inf)])
@pytest.mark.parametrize("radius", [None, 0.7])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_within_budget(path, dtype, period, radius, batch):
    q, k, v = qkv((2, 3), 37, 41, 20, 12, dtype)
    w = draw((2, 1, 41), lse_dtype(dtype), positive=True)
    check(q, k, v, w, **term((2, 3), 37, 41, 2, dtype, batch), period=period, radius=radius)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("n, m, d", [(1, 1, 1), (17, 129, 3), (129, 65, 1), (50, 700, 2), (3, 40, 5)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_odd_lengths(path, dtype, n, m, d, is_causal):
    q, k, v = qkv((3,), n, m, 8, 9, dtype, seed=m)
    check(q, k, v, draw((m,), positive=True), **term((3,), n, m, d, dtype), is_causal=is_causal)


@pytest.mark.parametrize("leads, batch", [((), ()), ((3,), ()), ((2, 2, 3), (1, 2)), ((2, 2, 3), (2, 1))])
def test_leading_dimensions(path, leads, batch):
    q, k, v = qkv(leads, 9, 11, 4, 5, torch.float64)
    check(q, k, v, **term(leads, 9, 11, 2, torch.float64, batch), radius=1.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=names)
@pytest.mark.parametrize("shape", [(33,), (2, 33), (1, 33)])
def test_radius_of_each_query(path, dtype, shape):
    q, k, v = qkv((2, 3), 33, 90, 8, 8, dtype)
    radius = 0.2 + draw(shape, dtype, 7).abs()
    for rate in (True, False):
        terms = term((2, 3), 33, 90, 2, dtype)
        terms = terms if rate else {**terms, "rate": None}
        result = check(q, k, v, draw((90,), positive=True), **terms, radius=radius, period=(2.0, 2.0))
        if not rate:
            assert bool((result["query_pos"] == 0).all()) and bool((result["key_pos"] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=names)
def test_with_a_mask(path, dtype):
    q, k, v = qkv((2, 3), 33, 90, 8, 8, dtype)
    mask = draw((2, 1, 33, 90), seed=5) > 0
    mask[..., 0] = True
    check(q, k, v, attn_mask=mask, **term((2, 3), 33, 90, 2, dtype, (2,)))
    check(q, k, v, attn_mask=mask, **term((2, 3), 33, 90, 2, dtype, (2,)), radius=0.9)
    check(q, k, v, attn_mask=draw((33, 90), dtype, 6), **term((2, 3), 33, 90, 2, dtype), radius=0.9)


@pytest.mark.parametrize("radius", [None, 0.8])
def test_with_dropout(path, radius):
    """The same mask as without the term, and exact for that mask."""
    q, k, v = qkv((2, 3), 35, 70, 8, 8, torch.float64)
    terms = term((2, 3), 35, 70, 2, torch.float64)
    w = draw((70,), torch.float64, positive=True)
    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, (1,))
    factor = dropout_keep(seed, 0.3, (2, 3), 0, 35, 70).double() / 0.7
    torch.manual_seed(5)
    result = results(q, k, v, w, **terms, radius=radius, dropout_p=0.3)
    grads = draw((2, 3, 35, 8), torch.float64, 21), draw((2, 3, 35), torch.float64, 22)
    true = exact(q, k, v, w, **terms, radius=radius, factor=factor, grad_out=grads[0], grad_lse=grads[1])
    for name, value in result.items():
        size = np.abs(true[name][np.isfinite(true[name])]).max()
        np.testing.assert_allclose(value, true[name].astype(float), rtol=0, atol=1e-13 * size, err_msg=name)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("leads, n, m", [((8,), 70, 90), ((3,), 90, 700), ((1,), 60, 1300), ((1,), 1200, 70)])
def test_every_split_of_the_work(threads, leads, n, m):
    q, k, v = qkv(leads, n, m, 20, 12, torch.float32, seed=n + m)
    w, terms = draw((m,), positive=True), term(leads, n, m, 2, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first = check(q, k, v, w, **terms, radius=1.5)
        assert_same(check(q, k, v, w, **terms, radius=1.5), first)
    finally:
        torch.set_num_threads(before)


def test_reference_agrees():
    for period, radius in [(None, None), ((1.0, math.inf), 0.6)]:
        q, k, v = qkv((2, 3), 12, 14, 4, 4, torch.float64)
        w, terms = draw((14,), torch.float64, positive=True), term((2, 3), 12, 14, 2, torch.float64, (2,))
        true = exact(q, k, v, w, **terms, period=period, radius=radius)
        out, lse = reference.continuum_attention(
            q, k, v, w, **terms, period=period, radius=radius, return_lse=True
        )
        np.testing.assert_allclose(out, true["out"].astype(float), atol=1e-13)
        np.testing.assert_allclose(lse, true["lse"].astype(float), atol=1e-13)


# --- derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_first_and_second_derivatives(path, is_causal):
    q, k, v = qkv((1, 2), 3, 4, 1, 1, torch.float64)
    w = draw((4,), torch.float64, positive=True)
    x, y = draw((3, 2), torch.float64, 6), draw((1, 4, 2), torch.float64, 7)
    inputs = [t.requires_grad_() for t in (q, k, v, w, x, y, draw((2,), torch.float64, 8, positive=True))]

    def function(q, k, v, w, x, y, rate):
        terms = {"query_pos": x, "key_pos": y, "rate": rate, "period": (4.0, math.inf), "radius": 2.5}
        return co.continuum_attention(q, k, v, w, return_lse=True, is_causal=is_causal, **terms)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_second_derivatives_of_mask_and_distance_terms():
    q, k, v, w = [
        t.requires_grad_()
        for t in (*qkv((1, 2), 2, 4, 1, 1, torch.float64), draw((4,), torch.float64, positive=True))
    ]
    mask = draw((2, 1, 4), torch.float64, 5).requires_grad_()
    x, y = draw((2, 2), torch.float64, 6).requires_grad_(), draw((1, 4, 2), torch.float64, 7).requires_grad_()
    rate = draw((2,), torch.float64, 8, positive=True).requires_grad_()

    def function(q, k, v, w, mask, x, y, rate):
        terms = {"query_pos": x, "key_pos": y, "rate": rate, "period": (4.0, math.inf), "radius": 2.5}
        return co.continuum_attention(q, k, v, w, attn_mask=mask, return_lse=True, **terms)

    inputs = (q, k, v, w, mask, x, y, rate)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", ["query_pos", "key_pos", "rate"])
def test_only_one_gradient_is_wanted(path, name):
    q, k, v = qkv((3,), 9, 11, 4, 4, torch.float64)
    terms = term((3,), 9, 11, 2, torch.float64)
    grad_out = draw((3, 9, 4), torch.float64, 9)
    true = exact(q, k, v, **terms, grad_out=grad_out)[name].astype(float)
    terms[name].requires_grad_()
    (grad,) = torch.autograd.grad(co.continuum_attention(q, k, v, **terms), terms[name], grad_out)
    np.testing.assert_allclose(grad, true, rtol=0, atol=1e-13)


def test_positions_of_a_shared_mesh_get_the_sum_of_both_gradients(path):
    q, k, v = qkv((2, 3), 12, 12, 4, 4, torch.float64)
    terms = term((2, 3), 12, 12, 2, torch.float64)
    x = terms["query_pos"].requires_grad_()
    grad_out = draw((2, 3, 12, 4), torch.float64, 9)
    terms["key_pos"] = x
    (grad,) = torch.autograd.grad(co.continuum_attention(q, k, v, **terms), x, grad_out)
    true = exact(q, k, v, **terms, grad_out=grad_out)
    np.testing.assert_allclose(grad, (true["query_pos"] + true["key_pos"]).astype(float), rtol=0, atol=1e-13)


# --- edges ---------------------------------------------------------------------------------------


def test_rate_may_be_a_number(path):
    q, k, v = qkv((3,), 4, 5, 2, 2)
    x, y = draw((4, 2), seed=5), draw((5, 2), seed=6)
    one = co.continuum_attention(q, k, v, query_pos=x, key_pos=y, rate=1.5)
    torch.testing.assert_close(
        one, co.continuum_attention(q, k, v, query_pos=x, key_pos=y, rate=torch.full((3,), 1.5))
    )


def test_radius_zero_and_the_rim(path):
    """Radius 0 keeps the coincident key only; a key at the radius itself counts; no key: 0 and -inf."""
    x = torch.tensor([[0.0], [0.3], [5.0]])
    y = torch.tensor([[0.0], [0.1], [0.4]])
    q, k, v = qkv((), 3, 3, 2, 2)
    out = co.continuum_attention(q, k, v, query_pos=x, key_pos=y, radius=0.0)
    torch.testing.assert_close(out, torch.stack([v[0], torch.zeros(2), torch.zeros(2)]))
    radius = torch.tensor([0.1, 0.1, 0.1])
    out, lse = co.continuum_attention(
        q, k, v, query_pos=x, key_pos=y, radius=radius, scale=0.0, return_lse=True
    )
    torch.testing.assert_close(out[:2], torch.stack([(v[0] + v[1]) / 2, v[2]]))
    assert out[2].tolist() == [0.0, 0.0] and lse[2] == -math.inf


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_equidistant_neighbours_are_in_together(path, steps):
    """On points i / 10 some distances round above the radius that they are at: all of them count."""
    x = (torch.arange(11, dtype=torch.float64) / 10).float()[:, None]
    q, k, v = qkv((), 11, 11, 2, 2)
    _, lse = attend(q, k, v, query_pos=x, key_pos=x, radius=float(x[steps]), scale=0.0)
    count = [sum(abs(i - j) <= steps for j in range(11)) for i in range(11)]
    torch.testing.assert_close(lse, torch.tensor(count, dtype=torch.float64).log().float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=names)
def test_an_offset_of_the_coordinates_changes_nothing(path, dtype):
    """Coordinates in steps of 1/64, which float32 holds at an offset of 1e5 as well: the same bits."""
    q, k, v = qkv((3,), 40, 50, 8, 8, dtype)
    terms = term((3,), 40, 50, 2, dtype)
    steps = {name: (64 * terms[name]).round() / 64 for name in ("query_pos", "key_pos")}
    offset = {name: position + 100_000.0 for name, position in steps.items()}
    terms["rate"] = terms["rate"] * 10
    assert_same(results(q, k, v, **{**terms, **offset}), results(q, k, v, **{**terms, **steps}))
    check(q, k, v, **{**terms, **offset}, radius=0.8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=names)
def test_whole_turns_change_nothing(path, dtype):
    """A period of 2 with steps of 1/64: a point that is moved by turns is the same point."""
    q, k, v = qkv((3,), 40, 50, 8, 8, dtype)
    terms = term((3,), 40, 50, 2, dtype)
    terms |= {name: (64 * terms[name]).round() / 64 + 1 / 256 for name in ("query_pos",)}
    terms |= {name: (64 * terms[name]).round() / 64 for name in ("key_pos",)}
    turns = 2 * torch.arange(-20, 20, dtype=dtype)[:, None] * torch.tensor([1.0, 0.0], dtype=dtype)
    moved = {**terms, "query_pos": terms["query_pos"] + turns}
    period = (2.0, math.inf)
    assert_same(results(q, k, v, **moved, period=period), results(q, k, v, **terms, period=period))


def test_distances_far_from_the_origin(path):
    """CASES 16: float32 coordinates 512,695 and 512,804 are 109 apart, coincident points 0."""
    x = torch.tensor([[512695.0]], requires_grad=True)
    y = torch.tensor([[512804.0], [512695.0]], requires_grad=True)
    q, k = torch.zeros(1, 0), torch.zeros(2, 0)
    rate = torch.tensor(1e-3, requires_grad=True)
    out, lse = co.continuum_attention(q, k, torch.eye(2), query_pos=x, key_pos=y, rate=rate, return_lse=True)
    assert lse.item() == pytest.approx(math.log1p(math.exp(-1e-3 * 109**2)), abs=1e-7)
    grads = torch.autograd.grad(out[0, 0], (x, y, rate))
    p = 1 / (1 + math.exp(1e-3 * 109**2))
    assert grads[0].item() == pytest.approx(p * (1 - p) * 2e-3 * 109, rel=1e-4)
    assert grads[1][1].item() == 0.0 and all(bool(g.isfinite().all()) for g in grads)


def test_large_rate_has_finite_gradients(path):
    x = draw((20, 2), seed=5).requires_grad_()
    rate = torch.tensor(1e5, requires_grad=True)
    out = co.continuum_attention(*qkv((), 20, 20, 4, 4), query_pos=x, key_pos=x, rate=rate)
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum(), (x, rate)))


def test_float64_positions_of_float32_queries_keep_their_digits():
    """Seconds since 1970, a millisecond apart."""
    q, k, v = qkv((2,), 3, 4, 2, 2)
    x = 1.7e9 + torch.arange(3).double()[:, None] * 1e-3
    y = 1.7e9 + torch.arange(4).double()[:, None] * 1e-3
    out = co.continuum_attention(q, k, v, query_pos=x, key_pos=y, rate=1e6, radius=2.5e-3)
    near = co.continuum_attention(
        q, k, v, query_pos=(x - 1.7e9).float(), key_pos=(y - 1.7e9).float(), rate=1e6, radius=2.5e-3
    )
    torch.testing.assert_close(out, near, rtol=1e-3, atol=1e-3)


def test_coincident_points(path):
    """All points in one place: no term in the scores, no gradient of positions or rate, exactly."""
    q, k, v = qkv((2,), 20, 30, 4, 4)
    x, y = torch.full((20, 2), 0.1), torch.full((30, 2), 0.1)
    result = results(q, k, v, query_pos=x, key_pos=y, rate=torch.tensor([1e5, 3.0]))
    without = results(q, k, v)
    for name in ("query_pos", "key_pos", "rate"):
        assert bool((result.pop(name) == 0).all()), name
    assert_near(result, without)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_rate_zero(path, dtype):
    """Nothing is added to the scores, but the rate has a gradient."""
    q, k, v = qkv((2,), 20, 30, 4, 4, dtype)
    terms = term((2,), 20, 30, 2, dtype) | {"rate": torch.zeros(2, dtype=lse_dtype(dtype))}
    result = check(q, k, v, **terms)
    assert bool((result["rate"] != 0).all()) and bool((result["query_pos"] == 0).all())
    assert_near({name: result[name] for name in NAMES[:5]}, check(q, k, v))


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_rate_of_1e5(path, dtype):
    q, k, v = qkv((2,), 30, 40, 4, 4, dtype)
    terms = term((2,), 30, 40, 2, dtype) | {"rate": torch.tensor([1e5, 1e5], dtype=lse_dtype(dtype))}
    result = check(q, k, v, draw((40,), positive=True), **terms)
    assert all(bool(t.isfinite().all()) for t in result.values())


def test_rate_of_1e5_among_many_keys(path):
    """Scores of -1000 round by 6e-5 in float32, ours and plain: the worst of six draws of both."""
    worst: dict[str, float] = {}
    plain_worst: dict[str, float] = {}
    grads = draw((2, 30, 4), seed=21), draw((2, 30), seed=22)
    for seed in range(6):
        q, k, v = qkv((2,), 30, 600, 4, 4, seed=seed)
        terms = term((2,), 30, 600, 2, torch.float32, seed=50 + 3 * seed) | {"rate": torch.full((2,), 1e5)}
        tensors = [q, k, v, draw((600,), positive=True, seed=seed), None, *terms.values()]
        true = exact(*tensors[:4], **terms, grad_out=grads[0], grad_lse=grads[1])
        for errors, function in ((worst, attend), (plain_worst, plain)):
            for name, value in run(function, tensors, *grads).items():
                errors[name] = max(errors.get(name, 0.0), error_of(value, true[name]))
    assert all(worst[name] <= 2 * plain_worst[name] for name in worst), (worst, plain_worst)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=names)
def test_the_nearest_key_comes_last(path, dtype):
    """The score rises by 1e4 over the keys, in the last tile most."""
    q, k, v = qkv((1,), 33, 700, 4, 4, dtype)
    y = torch.linspace(100, 0, 700, dtype=dtype)[:, None]
    x = torch.linspace(0, 1, 33, dtype=dtype)[:, None]
    check(q, k, v, query_pos=x, key_pos=y, rate=torch.ones(1, dtype=dtype))


@pytest.mark.parametrize("junk", [math.nan, math.inf])
@pytest.mark.parametrize("radius", [None, 1.0])
def test_positions_of_dead_keys_have_no_effect(path, junk, radius):
    q, k, v = qkv((2, 3), 21, 300, 8, 8)
    w = draw((300,), positive=True)
    w[1::3] = 0
    terms = term((2, 3), 21, 300, 2, torch.float32)
    clean = results(q, k, v, w, **terms, radius=radius)
    assert bool((clean["key_pos"][1::3] == 0).all())
    terms["key_pos"][1::3] = junk
    assert_same(results(q, k, v, w, **terms, radius=radius), clean)


@pytest.mark.parametrize("radius", [None, 1.0])
def test_nan_position_of_a_query(path, radius):
    q, k, v = qkv((2,), 21, 70, 8, 8)
    terms = term((2,), 21, 70, 2, torch.float32)
    expected = attend(q, k, v, **terms, radius=radius)
    terms["query_pos"][17] = math.nan
    keep = torch.arange(21) != 17
    for actual, clean in zip(attend(q, k, v, **terms, radius=radius), expected, strict=True):
        assert bool(actual[:, 17].isnan().all())
        assert_near({"others": actual[:, keep]}, {"others": clean[:, keep]})


def test_strided_positions(path):
    """Slices of buffers of NaN, and transposed storage."""
    q, k, v = qkv((2, 3), 21, 70, 8, 8)
    terms = term((2, 3), 21, 70, 2, torch.float32, (2,))
    clean = results(q, k, v, **terms)
    inside = {}
    for name in ("query_pos", "key_pos"):
        buffer = torch.full([size + 5 for size in terms[name].shape], math.nan)
        inside[name] = buffer[tuple(slice(2, 2 + size) for size in terms[name].shape)].copy_(terms[name])
    rate = torch.full((7,), math.nan)[::3].copy_(terms["rate"])
    assert_same(results(q, k, v, **inside, rate=rate), clean)
    turned = {name: terms[name].mT.contiguous().mT for name in inside}
    assert_same(results(q, k, v, **turned, rate=terms["rate"]), clean)
    radius = torch.full((2, 9, 21), math.nan).mT[..., 4].copy_(0.3 + draw((2, 21), seed=8).abs())
    assert_same(
        results(q, k, v, **terms, radius=radius), results(q, k, v, **terms, radius=radius.contiguous())
    )


@pytest.mark.parametrize("n, m, leads", [(3, 0, (2, 2)), (0, 3, (2, 2)), (3, 4, (0, 2)), (3, 4, (2, 0))])
def test_nothing_at_all(path, n, m, leads):
    q, k, v = qkv(leads, n, m, 4, 5)
    result = results(q, k, v, **term(leads, n, m, 2, torch.float32), radius=1.0)
    assert bool((result["out"] == 0).all()) and bool((result["lse"] == -math.inf).all())
    for name in ("query_pos", "key_pos", "rate"):
        assert bool((result[name] == 0).all()), name


def test_positions_without_coordinates(path):
    q, k, v = qkv((2,), 5, 6, 4, 4)
    result = results(q, k, v, **term((2,), 5, 6, 0, torch.float32), radius=0.0)
    assert_near({name: result[name] for name in NAMES[:5]}, results(q, k, v))
    assert result["query_pos"].shape == (5, 0) and bool((result["rate"] == 0).all())


def test_no_key_within_the_radius(path):
    q, k, v = qkv((2,), 40, 50, 4, 4)
    terms = term((2,), 40, 50, 2, torch.float32)
    terms["query_pos"][30:] += 100
    result = check(q, k, v, **terms, radius=2.0)
    assert bool((result["out"][:, 30:] == 0).all()) and bool((result["lse"][:, 30:] == -math.inf).all())
    assert bool((result["query"][:, 30:] == 0).all()) and bool((result["query_pos"][30:] == 0).all())


@pytest.mark.parametrize("case", ["kernel", "mask", "float64"])
def test_which_operator_serves(case):
    """Positions go to the kernel; a float mask, or positions longer than the kernel's floats, do not."""
    q, k, v = qkv((2,), 5, 6, 4, 4)
    terms = term((2,), 5, 6, 2, torch.float64 if case == "float64" else torch.float32)
    called = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        co.continuum_attention(q, k, v, **terms, attn_mask=torch.zeros(5, 6) if case == "mask" else None)
    served = "forward" if case == "kernel" else "chunked"
    assert f"continuum_ops.continuum_attention_{served}.default" in called, called
