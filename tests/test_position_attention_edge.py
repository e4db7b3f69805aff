"""Edge rules of position attention: keys that do not count, empty rows, NaN, layouts, sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import assert_near, draw, lse_dtype
from position_helpers import NAMES, attend, check, exact, points, results, scene

import continuum_ops as co

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


# --- keys that do not exist ----------------------------------------------------------------------


@pytest.mark.parametrize("junk", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize(
    "options", [{}, {"radius": 0.4}, {"period": (1.0, 2.0)}], ids=["global", "local", "periodic"]
)
def test_zero_weight_removes_the_key(path, dtype, junk, options):
    """As if it were not there, even if its rows are NaN or Inf; its own gradients are 0."""
    acc = lse_dtype(dtype)
    x, y, v, rate = scene(30, 80, 2, dtype=dtype)
    w = draw((80,), acc, positive=True)
    dead = draw((80,), seed=8) > 0.3
    w[dead] = 0
    few = results(x, y[~dead], v[:, ~dead], rate, w[~dead], **options)
    y, v = y.clone(), v.clone()
    y[dead], v[:, dead] = junk, junk
    many = results(x, y, v, rate, w, **options)
    for name, rows in (("key_pos", 0), ("value", 1), ("weights", 0)):
        grad = many[name].transpose(0, rows)
        assert bool((grad[dead] == 0).all()), name
        many[name] = grad[~dead].transpose(0, rows)
    assert_near(many, few)


def test_first_tiles_dead(path):
    """CASES 4: M = 600, the first 512 weights 0."""
    x, y, v, rate = scene(40, 600, 2)
    w = draw((600,), positive=True)
    w[:512] = 0
    check(x, y, v, rate, w)
    assert_near(
        {"out": attend(x, y, v, rate, w)[0]}, {"out": attend(x, y[512:], v[:, 512:], rate, w[512:])[0]}
    )


def test_one_sample_without_keys(path):
    """CASES 3: all weights 0 in one batch entry; the others are untouched."""
    x, y, v, rate = scene(20, 30, 2, batch=3)
    w = draw((3, 30), positive=True)
    full = results(x, y, v, rate, w)
    w[1] = 0
    result = results(x, y, v, rate, w)
    assert bool((result["out"][1] == 0).all()) and bool((result["lse"][1] == -math.inf).all())
    assert bool((result["value"][1] == 0).all()) and bool((result["weights"][1] == 0).all())
    assert all(bool(result[n].isfinite().all()) for n in ("out", *NAMES))
    for name in ("out", "lse", "value", "weights"):
        assert torch.equal(result[name][::2], full[name][::2]), name
    check(x, y, v, rate, w)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_no_key_within_radius(path, dtype):
    x, y, v, rate = scene(30, 40, 2, dtype=dtype)
    radius = torch.full((30,), 0.5, dtype=lse_dtype(dtype))
    x = x.clone()
    x[::3] += 10
    empty = torch.zeros(30, dtype=torch.bool)
    empty[::3] = True
    result = check(x, y, v, rate, radius=radius)
    assert bool((result["out"][:, :, empty] == 0).all()) and bool(
        (result["lse"][:, :, empty] == -math.inf).all()
    )
    assert bool(result["lse"][:, :, ~empty].isfinite().all())
    assert bool((result["query_pos"][empty] == 0).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_come_in_for_empty_rows_do_not_count(path, bad):
    x, y, v, rate = scene(6, 7, 2, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, y, v, rate)]
    radius = torch.full((6,), 2.0, dtype=torch.float64)
    with torch.no_grad():
        leaves[0][2] += 100
    out, lse = attend(*leaves, radius=radius)
    g, gl = draw(out.shape, torch.float64), draw(lse.shape, torch.float64)
    clean = torch.autograd.grad((out, lse), leaves, (g, gl), retain_graph=True)
    g[:, :, 2], gl[:, :, 2] = bad, bad
    for a, b in zip(torch.autograd.grad((out, lse), leaves, (g, gl)), clean, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_far_tile_that_counts(path):
    """The keys of one cluster have 2^-13 of the weight of the other's: small, and more than rounding."""
    near, far = points((300, 2), seed=1) / 20, points((100, 2), seed=2) / 20 + 1
    x, y = points((100, 2), seed=3) / 20, torch.cat([near, far])
    v = torch.cat([torch.zeros(1, 300, 1), torch.ones(1, 100, 1)], 1)
    for rate in (3.0, 4.5, 6.0):
        out = check(x, y, v, torch.tensor([rate]))["out"]
        assert 1e-6 < float(out.max()) < 1e-2


def test_a_large_weight_out_of_reach(path):
    """Exponents are relative to the largest within the radius: beyond it there may be any other."""
    x, y = torch.tensor([[0.0], [0.9]]), torch.tensor([[0.05], [0.5], [0.1]])
    w, v = torch.tensor([1e-36, 1e36, 2e-36]), torch.tensor([1.0, 5.0, 4.0]).view(1, 3, 1)
    out, lse = attend(x, y, v, torch.zeros(1), w, radius=torch.tensor([0.2, 2.0]))
    torch.testing.assert_close(out.flatten(), torch.tensor([3.0, 5.0]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(3e-36), math.log(1e36)]))
    check(x, y, v, torch.ones(1), w, radius=torch.tensor([0.2, 2.0]))


def test_radius_zero_keeps_coincident_points(path):
    y, v = points((40, 2)), draw((2, 40, 3))
    out, lse = attend(y, y, v, torch.tensor([3.0]), radius=0.0)
    torch.testing.assert_close(out[:, 0], v)
    assert bool((lse == 0).all())
    assert bool((attend(y + 0.001, y, v, torch.tensor([3.0]), radius=0.0)[1] == -math.inf).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=names)
@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_key_at_the_radius_is_in(path, dtype, d):
    """Whatever rounding does to the distance that the radius was taken from."""
    x, y = points((200, d), dtype, 1), points((200, d), dtype, 2)
    radius = (x - y).square().sum(-1).sqrt()
    alone = torch.eye(200, dtype=dtype)  # each query sees one key
    v = draw((200, 200, 1), dtype)
    _, lse = attend(x, y, v, torch.zeros(1, dtype=dtype), alone, radius=radius)
    assert bool((lse.diagonal(dim1=0, dim2=2) == 0).all())


@pytest.mark.parametrize(
    "n, m, batch, channels", [(5, 0, 2, 3), (0, 5, 2, 3), (0, 0, 2, 3), (5, 6, 0, 3), (5, 6, 2, 0)]
)
@pytest.mark.parametrize("per_sample", [False, True])
def test_nothing_to_attend_to(path, n, m, batch, channels, per_sample):
    """CASES 12."""
    x, y, v, rate = scene(n, m, 2, batch=batch, channels=channels, per_sample=per_sample)
    result = results(x, y, v, rate, draw((m,), positive=True))
    assert result["out"].shape == (batch, 2, n, channels) and bool((result["out"] == 0).all())
    assert result["lse"].shape == (batch, 2, n)
    if m == 0:
        assert bool((result["lse"] == -math.inf).all())
    for name, tensor in zip(NAMES[:4], (x, y, v, rate), strict=True):
        assert result[name].shape == tensor.shape and bool(result[name].isfinite().all())
        assert channels == 0 or bool((result[name] == 0).all())


def test_no_heads_and_no_coordinates(path):
    x, y, v, _ = scene(4, 5, 2)
    assert attend(x, y, v, torch.zeros(0))[0].shape == (2, 0, 4, 3)
    out, lse = attend(x[:, :0], y[:, :0], v, torch.tensor([2.0]))  # no coordinate: all points coincide
    torch.testing.assert_close(out, v.mean(1)[:, None, None].expand(2, 1, 4, 3))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(5)))


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e-30, 2.0**-20, 1e25])
def test_weights_times_a_constant(path, factor):
    x, y, v, rate = scene(20, 30, 2)
    w = draw((30,), positive=True)
    out, lse = attend(x, y, v, rate, w)
    scaled, shifted = attend(x, y, v, rate, w * factor)
    torch.testing.assert_close(scaled, out, rtol=0, atol=1e-6)
    torch.testing.assert_close(shifted, lse + math.log(factor), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=names)
@pytest.mark.parametrize("rate", [1.0, 300.0])
def test_weights_of_all_sizes(path, dtype, rate):
    """The nearest key may have a weight so small that others decide."""
    x, y, v, _ = scene(150, 200, 2, dtype=dtype)
    w = torch.logspace(-10, 10, 200, dtype=dtype)[
        torch.randperm(200, generator=torch.Generator().manual_seed(0))
    ]
    check(x, y, v, torch.tensor([rate, 0.0], dtype=dtype), w)
    check(x, y, v, torch.tensor([rate, 0.0], dtype=dtype), w, radius=0.2)


def test_coincident_points(path):
    """All distances 0, and pairs of equal points: finite gradients."""
    v, rate = draw((2, 20, 3)), torch.tensor([1.0, 1e5])
    check(torch.ones(9, 2), torch.ones(20, 2), v, rate)
    y = points((10, 2)).repeat(2, 1)
    check(y, y, v, rate, draw((20,), positive=True))


# --- NaN -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [40, 700])
@pytest.mark.parametrize("radius", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_nan_query_row(path, dtype, radius, n):
    """CASES 19: that row is NaN, the others are right."""
    x, y, v, rate = scene(n, 50, 2, dtype=dtype)
    expected = attend(x, y, v, rate, radius=radius)
    x[17] = math.nan
    others = torch.arange(n) != 17
    for actual, clean in zip(attend(x, y, v, rate, radius=radius), expected, strict=True):
        assert bool(actual[:, :, 17].isnan().all())
        assert_near({"others": actual[:, :, others]}, {"others": clean[:, :, others]})


@pytest.mark.parametrize("rate", [10.0, 1e5])
def test_nan_in_a_live_key_or_value(path, rate):
    """It comes out for every query, also where the key is too far away to matter otherwise."""
    x, y, v, _ = scene(700, 800, 2)
    rates = torch.tensor([rate])
    bad = y.clone()
    bad[3, 1] = math.nan
    out, lse = attend(x, bad, v, rates)
    assert bool(out.isnan().all()) and bool(lse.isnan().all())
    bad = v.clone()
    bad[0, 3, 2] = math.nan
    out, lse = attend(x, y, bad, rates)
    assert bool(out[0, ..., 2].isnan().all()) and bool(lse.isfinite().all())
    assert bool(out[0, ..., :2].isfinite().all()) and bool(out[1].isfinite().all())


def test_dead_keys_get_no_gradient_from_a_nan_query(path):
    x, y, v, rate = scene(6, 8, 2)
    w = torch.ones(8)
    w[2] = 0
    x[1] = math.nan
    result = results(x, y, v, rate, w)
    assert bool((result["key_pos"][2] == 0).all()) and bool((result["value"][:, 2] == 0).all())
    assert result["weights"][2] == 0


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, m", [(50, 77), (17, 129), (1, 33), (97, 65)])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_junk_behind_partial_tiles(path, dtype, n, m):
    """CASES 5: the inputs are slices of buffers whose rest is NaN."""

    def inside(tensor):
        buffer = torch.full([size + 9 for size in tensor.shape], math.nan, dtype=tensor.dtype)
        return buffer[tuple(slice(4, 4 + size) for size in tensor.shape)].copy_(tensor)

    tensors = [*scene(n, m, 2, dtype=dtype), draw((2, m), lse_dtype(dtype), positive=True)]
    clean = results(*tensors)
    assert_near(results(*(inside(t) for t in tensors)), clean)
    assert all(bool(t.isfinite().all()) for t in clean.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_strided_inputs_and_two_layouts_in_a_row(path, dtype):
    """CASES 8: sliced, permuted and expanded values; positions with coordinates apart."""
    acc = lse_dtype(dtype)
    x, y = points((2, 60), acc, 1).mT, points((2, 2, 72), acc, 2).mT
    v = draw((2, 72, 3, 8), dtype, 3).transpose(1, 2)
    w, rate = draw((72, 2), acc, positive=True).T, draw((6,), acc, 4, positive=True)[::2]
    tensors = [x, y, v, rate, w]
    clean = results(*(t.contiguous() for t in tensors))
    assert_near(results(*tensors), clean)
    backwards = draw((2, 3, 8, 72), dtype, 3).mT
    assert_near(results(x, y, backwards, rate, w), results(x, y, backwards.contiguous(), rate, w))
    expanded = v[:1].expand(2, -1, -1, -1)
    assert_near(results(x, y, expanded, rate, w), results(x, y, expanded.contiguous(), rate, w))
    assert_near(results(*tensors), clean)


@pytest.mark.parametrize("loss", ["cat", "sum", "transpose", "slice"])
def test_strided_gradients(path, loss):
    """CASES 9: the gradient of the output arrives sliced, expanded or transposed."""
    leaves = [t.requires_grad_() for t in (*scene(20, 30, 2, channels=8, dtype=torch.float64),)]
    out, lse = attend(*leaves)
    z, pattern = draw((2, 2, 20, 8), torch.float64, 9), draw((2, 20, 2, 8), torch.float64, 10)
    scalar = {
        "cat": lambda: (torch.cat([out, z], 1) * draw((2, 4, 20, 8), torch.float64, 11)).sum(),
        "sum": lambda: out.sum(),
        "transpose": lambda: (out.transpose(1, 2) * pattern).sum(),
        "slice": lambda: (out[..., ::2] * z[..., ::2]).sum(),
    }[loss]()
    cotangent = torch.autograd.grad(scalar, out, retain_graph=True)[0].contiguous()
    true = exact(*leaves, grad_out=cotangent)
    for name, grad in zip(NAMES, torch.autograd.grad(scalar + lse.sum() * 0, leaves), strict=False):
        size = float(true["terms"][name].max())
        np.testing.assert_allclose(grad, true[name].astype(float), rtol=0, atol=1e-14 * max(size, 1))


def test_unaligned_storage(path):
    """CASES 20: tensors that start one element into their buffer."""
    x, y, v, rate = scene(31, 51, 2, channels=5)

    def shifted(t):
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    tensors = [x, y, v, rate, draw((51,), positive=True)]
    assert_same(results(*(shifted(t) for t in tensors)), results(*tensors))


def test_stride_beyond_32_bits(path):
    """CASES 10: rows so far apart that their offsets pass 2^31 elements, in a buffer that is mapped only."""
    rows, stride = 5, 2**29 + 8
    buffer = torch.empty((rows - 1) * stride + 16, dtype=torch.float16)
    v = buffer.as_strided((1, rows, 3), (0, stride, 1))
    v.copy_(draw((1, rows, 3)))
    y, rate = points((rows, 2)), torch.tensor([4.0])
    out = co.position_attention(y, y, v, rate)
    assert torch.equal(out, co.position_attention(y, y, v.contiguous(), rate))


# --- threads, sizes ------------------------------------------------------------------------------


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_same_bits_every_time(path, dtype, threads):
    """CASES 14: 30 repeats, forward and backward, on more than one thread."""
    threads(2)
    x, y, v, rate = scene(100, 70, 2, dtype=dtype)
    w = draw((70,), positive=True)
    first = results(x, y, v, rate, w, radius=0.5)
    for _ in range(29):
        assert_same(results(x, y, v, rate, w, radius=0.5), first)


@pytest.mark.parametrize("n, m", [(900, 100), (100, 900), (600, 700)])
@pytest.mark.parametrize("per_sample", [False, True])
def test_threads_divide_the_work(n, m, per_sample, threads):
    """Few keys are split by queries, many by keys; the sums are the same but for rounding."""
    x, y, v, rate = scene(n, m, 2, per_sample=per_sample, channels=40)
    w = draw((m,), positive=True)
    threads(1)
    alone = results(x, y, v, rate, w)
    threads(4)
    assert_near(results(x, y, v, rate, w), alone)


@pytest.mark.parametrize("slope", [2.0, 10.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_maximum_arrives_late(path, dtype, slope):
    """CASES 13, small: scores that rise along the keys."""
    acc = lse_dtype(dtype)
    y = torch.linspace(-1, 0, 1030, dtype=acc)[:, None]
    check(points((9, 1), acc), y, draw((1, 1030, 4), dtype), torch.tensor([slope], dtype=acc))


def _needs_kernel(path):
    if not path.compiled:
        pytest.skip("minutes long without the compiled kernel")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_maximum_arrives_late_among_many_keys(path, dtype):
    """CASES 13: M = 131,072."""
    _needs_kernel(path)
    m = 131_072
    y = torch.linspace(-1, 0, m)[:, None]
    check(points((9, 1)), y, draw((1, m, 4), dtype), torch.tensor([30.0, 3e4]), draw((m,), positive=True))


@pytest.mark.slow
def test_many_small_problems(path):
    """CASES 11: batch * heads = 65,600, N = 16, a mesh for each sample."""
    _needs_kernel(path)
    x, y, v, _ = scene(16, 16, 2, batch=8200, heads=8, channels=4, per_sample=True)
    rate = torch.logspace(-1, 2, 8)
    out = co.position_attention(x, y, v, rate)
    for i in (0, 4099, 8199):
        true = exact(x[i], y[i], v[i : i + 1], rate)["out"]
        np.testing.assert_allclose(out[i : i + 1], true, rtol=0, atol=1e-6 * v[i].abs().max().item())


@pytest.mark.slow
def test_many_points(path):
    """65,537 points, whose square passes 2^32: eight rows of the output and of the gradient of value."""
    _needs_kernel(path)
    n = 65_537
    x, v = points((n, 2)), draw((1, n, 16))
    w, rate = torch.logspace(-3, 1, n), torch.tensor([200.0])
    v.requires_grad_()
    out, lse = attend(x, x, v, rate, w)
    true = exact(x[-8:], x, v, rate, w)
    np.testing.assert_allclose(
        out.detach()[..., -8:, :], true["out"], rtol=0, atol=2e-6 * v.abs().max().item()
    )
    np.testing.assert_allclose(lse.detach()[..., -8:], true["lse"], rtol=0, atol=1e-5)
    g = draw((1, 1, n, 16), seed=5)
    (grad,) = torch.autograd.grad(out, v, g)
    d2 = (x[-8:, None].double() - x[None].double()).square().sum(-1)
    p = w[-8:, None].double() * (-200.0 * d2 - lse[0].detach().double()).exp()
    np.testing.assert_allclose(grad[0, -8:], p @ g[0, 0].double(), rtol=0, atol=1e-5 * p.sum(-1).max().item())


def test_memory_of_the_chunked_path_is_bounded(monkeypatch):
    """No block of scores is larger than the budget, forward, backward and twice backward."""
    from position_helpers import position_chunked, position_module

    monkeypatch.setattr(position_chunked, "CHUNK_SCORES", 1000)
    monkeypatch.setattr(position_module, "_attend", torch.ops.continuum_ops.position_attention_chunked)
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(
                t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if hasattr(t, "numel")
            )
            return out

    leaves = [t.requires_grad_() for t in scene(100, 90, 2, channels=2)]
    with Watch():
        out = co.position_attention(*leaves)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
    assert max(largest) <= 1000, max(largest)
