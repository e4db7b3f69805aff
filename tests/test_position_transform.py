"""Position attention through a grid on the CPU (csrc/position_transform.h), against long arithmetic: all
heads that can go through a grid do, whatever it costs, and each test sees that they did."""

import math

import pytest
import torch
from helpers import assert_results, draw
from position_helpers import NAMES, attend, check, exact, plain, points, results, run, scene

import continuum_ops as co
from continuum_ops.backends import extension

KERNELS = extension()[0]
pytestmark = pytest.mark.skipif(KERNELS is None, reason="the compiled extension is not built")
RATES = torch.tensor([3.0, 20.0], dtype=torch.float64)


@pytest.fixture
def grids():
    """Calls the function with all heads through grids that can; returns its result and how many did."""

    def through(use, function, *args, **options):
        KERNELS.set_grids(use)
        before = KERNELS.heads_through_grids()
        try:
            result = function(*args, **options)
        finally:
            KERNELS.set_grids(KERNELS.Grids.when_faster)
        return result, KERNELS.heads_through_grids() - before

    return through


@pytest.fixture
def through(grids):
    """The same; the number of heads, both passes counted, must be `heads`."""

    def call(function, *args, heads, **options):
        result, count = grids(KERNELS.Grids.when_possible, function, *args, **options)
        assert count == heads
        return result

    return call


@pytest.mark.parametrize("channels", [1, 35, 67])
def test_instruction_sets(isa, through, channels):
    x, y, v, rate = scene(130, 201, 2, channels=channels, rate=RATES)
    through(check, x, y, v, rate, draw((201,), positive=True), heads=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
def test_dimensions(through, dtype, d, weighted):
    x, y, v, rate = scene(150, 170, d, dtype=dtype, rate=RATES if d < 3 else RATES / 5)
    through(check, x, y, v, rate, draw((170,), positive=True) if weighted else None, heads=4)


@pytest.mark.parametrize("rate", [0.0, 1e-6, 1.0, 60.0])
def test_rates(through, rate):
    x, y, v, _ = scene(120, 300, 2)
    through(check, x, y, v, torch.tensor([rate, 5.0]), heads=4)


@pytest.mark.parametrize(
    "kind", ["value per head", "per sample", "weights per sample", "float64 positions", "offset"]
)
def test_arguments(through, kind):
    options = {
        "value per head": {"value_heads": 2},
        "per sample": {"per_sample": True},
        "float64 positions": {"geometry": torch.float64, "offset": 1e5},
        "offset": {"offset": 4096.0},
    }.get(kind, {})
    x, y, v, rate = scene(140, 160, 2, rate=RATES, **options)
    shape = (2, 160) if "sample" in kind else (160,)
    w = draw(shape, positive=True)
    through(check, x, y, v, rate, w, heads=8 if "sample" in kind else 4)


def test_strided(through):
    x, y, v, rate = scene(100, 120, 2, channels=6, rate=RATES)
    strided = v.mT.contiguous().mT
    assert strided.stride(-1) != 1
    through(check, x.flip(0), y[:, [1, 0]], strided, rate, heads=4)
    through(check, x, y, v[:1].expand(3, -1, -1), rate, heads=4)


@pytest.mark.parametrize("period", [(1.0, 1.0), (1.0, math.inf), (0.9, 1.5)], ids=str)
def test_periodic(through, period):
    x, y, v, _ = scene(160, 1200, 2)
    x = x * torch.tensor([2.0, 1.0 if period[1] == math.inf else 2.0])
    through(check, x, y, v, torch.tensor([120.0]), draw((1200,), positive=True), period=period, heads=2)


def test_antipode_is_refused(grids):
    """Keys in one corner of a periodic domain, queries at the antipode, where the distance has a kink."""
    x, y, v, _ = scene(90, 110, 2)
    args = (x * 0.1 + 0.45, y * 0.1, v, torch.tensor([100.0]))
    _, count = grids(KERNELS.Grids.when_possible, check, *args, period=(1.0, 1.0))
    assert count == 0
    args = (x * 0.1 + 0.45, y * 0.1, v, torch.tensor([10.0]))
    _, count = grids(KERNELS.Grids.when_possible, check, *args, period=(1.0, 1.0))
    assert count == 0


def test_domain_within_half_a_period(through):
    x, y, v, rate = scene(90, 110, 2, rate=RATES)
    through(check, x, y, v, rate, period=(2.5, 3.0), heads=4)


@pytest.mark.parametrize("forward, backward", [("when_possible", "never"), ("never", "when_possible")])
def test_record_of_a_row(forward, backward):
    """What one way keeps of the rows for the backward pass serves the other: vmap may regroup the batch."""
    x, y, v, rate = scene(100, 120, 2, rate=RATES)

    def attend_then_differentiate(*args):
        KERNELS.set_grids(getattr(KERNELS.Grids, forward))
        out, lse = attend(*args)
        KERNELS.set_grids(getattr(KERNELS.Grids, backward))
        return out, lse

    tensors = [x, y + 0.3, v, rate, draw((120,), positive=True)]
    grad_out, grad_lse = draw((2, 2, 100, 3), seed=3), draw((2, 2, 100), seed=4)
    before = KERNELS.heads_through_grids()
    try:
        result = run(attend_then_differentiate, tensors, grad_out, grad_lse)
    finally:
        KERNELS.set_grids(KERNELS.Grids.when_faster)
    assert KERNELS.heads_through_grids() - before == 2
    true = exact(*tensors, grad_out=grad_out, grad_lse=grad_lse)
    rough = run(plain, tensors, grad_out, grad_lse)
    assert_results(result, true, rough, dict(zip(NAMES, tensors, strict=True)), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refused_rows(through, dtype):
    """A few queries far from all keys, of which float32 through a grid holds nothing, go pair by pair."""
    x, y, v, _ = scene(130, 150, 2, dtype=dtype)
    x = x.clone()
    x[::13] += 4.0
    rate = torch.tensor([0.1, 2.0, 6.0])
    w = draw((150,), positive=True)
    result = through(check, x, y, v, rate, w, heads=6)
    assert bool(result["lse"].isfinite().all())


def test_refused_rows_of_one_sample(through):
    x, y, v, _ = scene(130, 150, 2, per_sample=True)
    x = x.clone()
    x[1, 5:12] -= 3.0
    through(check, x, y, v, torch.tensor([1.0, 8.0]), draw((2, 150), positive=True), heads=8)


def test_heads_that_no_grid_serves(through):
    """A rate whose grid would be larger than the points allow is computed pair by pair beside the others."""
    x, y, v, _ = scene(130, 150, 2, value_heads=3)
    through(check, x, y, v, torch.tensor([1e5, 4.0, 3e4]), draw((150,), positive=True), heads=2)


def test_light_key_near_heavy_keys_far(through):
    """Rows whose sum comes from far, heavy keys are not accurate through a grid: they are refused."""
    x, y, v, _ = scene(130, 600, 2)
    x, y, w = x.clone(), y.clone(), torch.ones(600)
    x[:8] = y[:8] = points((8, 2)) * 0.1 + 1.6
    w[:8] = 1e-4
    through(check, x, y, v, torch.tensor([10.0]), w, heads=2)


def test_graded_weights(through, grids):
    x, y, v, rate = scene(140, 160, 2, rate=RATES)
    w = torch.exp(-11 * points((160, 1))[:, 0])
    through(check, x, y, v, rate, w, heads=4)
    _, count = grids(KERNELS.Grids.when_possible, check, x, y, v, rate, w**2)  # down to 2^-31
    assert count == 0


def test_zero_weights_hide_anything(through):
    x, y, v, rate = scene(100, 120, 2, rate=RATES)
    w = draw((120,), positive=True)
    dead = torch.arange(120) % 3 == 0
    w[dead] = 0
    wild, far = v.clone(), y.clone()
    wild[:, dead] = math.nan
    far[dead] = math.inf
    out, lse = through(attend, x, far, wild, rate, w, heads=2)
    expected, expected_lse = through(attend, x, y, v, rate, w, heads=2)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where, heads", [("value", 2), ("query", 0), ("key", 0), ("grad_out", 3)])
def test_what_is_not_finite(grids, bad, where, heads):
    """Goes pair by pair, so that the same comes out. The gradient of value does not look at
    value; of grad_out one head is not finite."""
    x, y, v, rate = scene(100, 120, 2, rate=RATES)
    grad_out = draw((2, 2, 100, 3))
    {"value": v[1, 3], "query": x[7], "key": y[9], "grad_out": grad_out[0, 1, 4]}[where].fill_(bad)
    leaf = v.requires_grad_()

    def both():
        out = co.position_attention(x, y, leaf, rate)
        return out.detach(), torch.autograd.grad(out, leaf, grad_out)[0]

    ours, count = grids(KERNELS.Grids.when_possible, both)
    direct, none = grids(KERNELS.Grids.never, both)
    assert (count, none) == (heads, 0)
    for a, b in zip(ours, direct, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())


@pytest.mark.parametrize("points_", ["one place", "a line", "three places"])
def test_degenerate_meshes(through, points_):
    x, y, v, rate = scene(90, 110, 2, rate=RATES)
    if points_ == "one place":
        x, y = x[:1].expand(90, -1), x[:1].expand(110, -1)
    elif points_ == "a line":
        x, y = (t * torch.tensor([1.0, 0.0]) for t in (x, y))
    else:
        y, rate = y[torch.arange(110) % 3], rate / 4
    through(check, x, y, v, rate, heads=4)


@pytest.mark.parametrize("n, m", [(1, 1), (1, 40), (40, 1), (2, 3), (97, 96)])
def test_few_points(through, n, m):
    x, y, v, rate = scene(n, m, 2, rate=torch.tensor([0.3, 3.0], dtype=torch.float64))
    through(check, x, y, v, rate, heads=4)


def test_some_gradients(grids):
    """Each gradient on its own has the bits that it has beside the others."""
    x, y, v, rate = scene(100, 120, 2, rate=RATES)
    w = draw((120,), positive=True)
    grad_out, grad_lse = draw((2, 2, 100, 3), seed=3), draw((2, 2, 100), seed=4)

    def gradients(needed):
        leaves = [
            t.detach().requires_grad_(name in needed)
            for name, t in zip(NAMES, (x, y, v, rate, w), strict=True)
        ]
        out, lse = attend(*leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return dict(zip(needed, torch.autograd.grad([out, lse], wanted, [grad_out, grad_lse]), strict=True))

    everything, _ = grids(KERNELS.Grids.when_possible, gradients, NAMES)
    for name in NAMES:
        alone, count = grids(KERNELS.Grids.when_possible, gradients, [name])
        assert count == 4
        assert torch.equal(alone[name], everything[name])


def test_chosen_by_itself(grids):
    """2500 points: the grid is the faster way and is taken, in one thread and in two, with the same bits."""
    x, _, v, rate = scene(2500, 2500, 2, channels=24, rate=RATES)
    outs = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        try:
            got, count = grids(KERNELS.Grids.when_faster, results, x, x.clone(), v, rate)
        finally:
            torch.set_num_threads(1)
        assert count == 4
        outs.append(got)
    for other in outs[1:]:
        assert all(torch.equal(outs[0][name], other[name]) for name in other)
    direct, count = grids(KERNELS.Grids.never, results, x, x.clone(), v, rate)
    assert count == 0
    # both within the budget of the same true values: 8 eps of the largest each
    for name in ("out", "lse", "value"):
        bound = 16 * torch.finfo(torch.float32).eps * float(direct[name].abs().max())
        assert float((outs[0][name] - direct[name]).abs().max()) <= bound


def test_many_points(grids):
    """60,000 points, all to all: sampled rows and the sum of the gradient of value, against float64."""
    n = 60_000
    x = points((n, 2))
    v = torch.sin(9 * x[:, :1] + torch.arange(4.0))[None].requires_grad_()
    rate = torch.tensor([40.0])

    def both():
        out = co.position_attention(x, x, v, rate)
        return out, torch.autograd.grad(out, v, torch.ones_like(out))[0]

    (out, grad), count = grids(KERNELS.Grids.when_faster, both)
    assert count == 2
    rows = torch.arange(0, n, 6007)
    true = exact(x[rows], x, v.detach(), rate)["out"]
    error = float((out.detach()[:, :, rows].double() - torch.from_numpy(true.astype("float64"))).abs().max())
    assert error <= 8 * torch.finfo(torch.float32).eps
    # every row of probabilities sums to one, so that the gradient of the sum of out sums to n
    assert float(grad.double().sum((0, 1)).sub(n).abs().max()) <= 1e-6 * n


def test_budget_at_scale(through):
    """600 points and smooth values, whose rounding adds up in one direction, beside plain PyTorch's error."""
    x, _, _, rate = scene(600, 600, 2, rate=torch.tensor([1.0, 10.0, 60.0], dtype=torch.float64))
    v = torch.sin(6 * x[:, :1] + torch.arange(40.0))[None] + 1
    through(check, x, x.clone(), v, rate, heads=6)
