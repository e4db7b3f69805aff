"""The transformer neural operator against the formulas of CA, written out with plain tensor operations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import continuum_ops as co
from continuum_ops.models import TNO


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def trapezoid(x: Tensor) -> Tensor:
    dx = x.diff()
    return 0.5 * torch.cat([dx[:1], dx[:-1] + dx[1:], dx[-1:]])


def make_tno(*args: int, seed: int = 0, randomise: bool = True, **kwargs: object) -> TNO:
    """A small float64 model; `randomise` moves every parameter, so that biases, gains, W1 and W2 matter."""
    torch.manual_seed(seed)
    settings = {"d_model": 12, "num_heads": 3, "num_layers": 2, "dtype": torch.float64, **kwargs}
    model = TNO(*args, **settings)
    if randomise:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def paper_forward(
    model: TNO,
    u: Tensor,
    x: Tensor,
    integral: Callable[[Tensor], Tensor],
    *,
    heads: int,
    layers: int,
    norm_first: bool = False,
    universal: bool = False,
    initial: Tensor | None = None,
) -> Tensor:
    """CA (9)-(19), or (31)-(34), of one sample u (N, C), x (N, d); `integral` sums (N, ...) over N."""
    p = {k: t.detach() for k, t in model.state_dict().items()}

    def linear(name: str, v: Tensor) -> Tensor:
        return v @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def pointwise(name: str, v: Tensor) -> Tensor:
        return linear(f"{name}.linear2", gelu(linear(f"{name}.linear1", v))) if universal else linear(name, v)

    def norm(name: str, v: Tensor) -> Tensor:
        if universal:
            return v
        centred = v - v.mean(1, keepdim=True)
        scaled = centred / ((centred**2).mean(1, keepdim=True) + 1e-5).sqrt()
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    def residual(name: str, v: Tensor) -> Tensor:
        return v @ p[f"{name}.weight"].T if f"{name}.weight" in p else v

    def attention(name: str, v: Tensor) -> Tensor:
        d, size, out = v.shape[1], v.shape[1] // heads, []
        for h in range(heads):
            rows = [slice(part * d + h * size, part * d + (h + 1) * size) for part in range(3)]
            q, k, val = (v @ p[f"{name}.in_proj_weight"][r].T + p[f"{name}.in_proj_bias"][r] for r in rows)
            density = (q @ k.T / math.sqrt(size)).exp()  # of point k around point i: row i, column k
            out.append(integral(density.T[:, :, None] * val[:, None, :]) / integral(density.T)[:, None])
        return linear(f"{name}.out_proj", torch.cat(out, 1))

    def feed_forward(name: str, v: Tensor) -> Tensor:
        return linear(f"{name}.linear2", gelu(linear(f"{name}.linear1", v)))

    v = pointwise("lift", torch.cat([u, x], 1))
    if initial is not None:
        v = torch.cat([pointwise("lift_initial", torch.cat([u[0], initial, x[0]])[None]), v[1:]])
    for i in range(layers):
        n = f"layers.{i}"
        if norm_first:
            v = residual(f"{n}.residual1", v) + attention(f"{n}.self_attn", norm(f"{n}.norm1", v))
            v = residual(f"{n}.residual2", v) + feed_forward(n, norm(f"{n}.norm2", v))
        else:
            v = norm(f"{n}.norm1", residual(f"{n}.residual1", v) + attention(f"{n}.self_attn", v))
            v = norm(f"{n}.norm2", residual(f"{n}.residual2", v) + feed_forward(n, v))
    return pointwise("projection", torch.cat([v, x], 1) if universal else v)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"residual_weights": True},
        {"norm_first": True},
        {"norm_first": True, "residual_weights": True},
        {"variant": "universal"},
        {"initial_channels": 2},
        {"initial_channels": 2, "variant": "universal"},
        {"dim_feedforward": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("coord_dim", [1, 2, 3])
def test_forward_is_the_formula_of_the_paper(options: dict, coord_dim: int) -> None:
    model = make_tno(2, 3, coord_dim, **options)
    batch, n = 2, 17
    u, x = rand(batch, n, 2), rand(n, coord_dim, seed=1)
    w = rand(n, seed=2).abs()
    w[3] = 0.0
    initial = rand(batch, 2, seed=3) if "initial_channels" in options else None
    out = model(u, co.PointCloud(x, w), initial)
    for b in range(batch):
        expected = paper_forward(
            model,
            u[b],
            x,
            lambda f: torch.einsum("k,k...->...", w, f),
            heads=3,
            layers=2,
            norm_first=options.get("norm_first", False),
            universal=options.get("variant") == "universal",
            initial=None if initial is None else initial[b],
        )
        torch.testing.assert_close(out[b], expected, rtol=1e-11, atol=1e-12)


def test_attention_is_the_trapezoid_rule_of_the_paper() -> None:
    # CA (58), (59): averages of neighbouring points times their distance, on an uneven mesh.
    x = torch.cumsum(rand(23, seed=4).abs() + 0.01, 0)
    u = rand(1, 23, 1)

    def rule(f: Tensor) -> Tensor:
        dx = (x[1:] - x[:-1]).reshape(-1, *[1] * (f.ndim - 1))
        return (0.5 * (f[1:] + f[:-1]) * dx).sum(0)

    model = make_tno(1, 2, 1)
    expected = paper_forward(model, u[0], x[:, None], rule, heads=3, layers=2)
    for out in (model(u, co.Grid(x)), model(u, x, weights=trapezoid(x))):
        torch.testing.assert_close(out[0], expected, rtol=1e-11, atol=1e-12)


def test_grid_and_point_cloud_give_points_and_weights() -> None:
    axes = [torch.linspace(0, 1, 4, dtype=torch.float64) ** 2, torch.linspace(-1, 1, 5, dtype=torch.float64)]
    x = torch.cartesian_prod(*axes)
    w = torch.outer(trapezoid(axes[0]), trapezoid(axes[1])).flatten()
    model = make_tno(1, 1, 2)
    u = rand(3, 20, 1)
    expected = model(u, x, weights=w)
    torch.testing.assert_close(model(u, co.Grid(*axes)), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(u, co.PointCloud(x, w)), expected, rtol=1e-12, atol=1e-12)
    assert (model(u, x) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("norm_first", [False, True])
def test_layer_loads_the_parameters_of_torch_and_agrees(norm_first: bool) -> None:
    theirs = torch.nn.TransformerEncoderLayer(
        12,
        3,
        20,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=norm_first,
        dtype=torch.float64,
    )
    model = make_tno(1, 1, 1, num_layers=1, dim_feedforward=20, norm_first=norm_first)
    layer = model.layers[0]
    layer.load_state_dict(theirs.state_dict())
    v = rand(2, 11, 12)
    torch.testing.assert_close(layer(v), theirs(v), rtol=1e-11, atol=1e-12)


def test_residual_weights_start_as_the_identity() -> None:
    plain = make_tno(1, 1, 1, randomise=False)
    learnable = make_tno(1, 1, 1, residual_weights=True, randomise=False, seed=1)
    missing, unexpected = learnable.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert missing == [f"layers.{i}.residual{j}.weight" for i in range(2) for j in (1, 2)]
    u, x = rand(1, 9, 1), rand(9, 1, seed=1)
    torch.testing.assert_close(learnable(u, x), plain(u, x), rtol=0, atol=1e-13)


def test_universal_variant_contains_the_averaging_layer_of_theorem_22() -> None:
    # Q = K = 0, V = I, W2 = 0, W3 = W4 = I, b2 = 0 make the layer f(W1 v + b1 + mean of v), CA (36), (37).
    d = 6
    model = make_tno(1, 1, 1, d_model=d, num_heads=2, num_layers=1, variant="universal", activation="tanh")
    layer = model.layers[0]
    eye = torch.eye(d, dtype=torch.float64)
    with torch.no_grad():
        layer.self_attn.in_proj_weight.copy_(torch.cat([0 * eye, 0 * eye, eye]))
        layer.self_attn.in_proj_bias.zero_()
        layer.self_attn.out_proj.weight.copy_(eye)
        layer.self_attn.out_proj.bias.zero_()
        layer.residual2.weight.zero_()
        layer.linear1.weight.copy_(eye)
        layer.linear2.weight.copy_(eye)
        layer.linear2.bias.zero_()
    u, x = rand(1, 15, 1), rand(15, 1, seed=1)
    w = rand(15, seed=2).abs()
    s = model.state_dict()

    def network(name: str, v: Tensor) -> Tensor:
        hidden = torch.tanh(v @ s[f"{name}.linear1.weight"].T + s[f"{name}.linear1.bias"])
        return hidden @ s[f"{name}.linear2.weight"].T + s[f"{name}.linear2.bias"]

    v = network("lift", torch.cat([u[0], x], 1))
    mean = (w[:, None] * v).sum(0) / w.sum()
    v = torch.tanh(v @ layer.residual1.weight.T + layer.linear1.bias + mean)
    expected = network("projection", torch.cat([v, x], 1))
    torch.testing.assert_close(model(u, co.PointCloud(x, w))[0], expected, rtol=1e-11, atol=1e-12)


def sample(model: TNO, x: Tensor, weights: Tensor | str) -> Tensor:
    with torch.no_grad():
        return model((torch.sin(5 * x) + x**2)[None, :, None], x[:, None], weights=weights)[0, :, 0]


@pytest.mark.parametrize("options", [{}, {"variant": "universal"}], ids=str)
def test_refinement_converges_with_order_two(options: dict) -> None:
    model = make_tno(1, 1, 1, **options)
    coarse = []
    for n in (16, 32, 64, 128):
        x = torch.linspace(0, 1, n + 1, dtype=torch.float64)
        coarse.append(sample(model, x, trapezoid(x))[:: n // 16])
    steps = [(b - a).abs().max() for a, b in itertools.pairwise(coarse)]
    for previous, current in itertools.pairwise(steps):
        assert 3.6 < previous / current < 4.4


def test_uneven_mesh_needs_the_weights() -> None:
    # The mesh of CA (41): the second half twice as dense. With equal weights refinement leads elsewhere.
    model = make_tno(1, 1, 1)
    x = torch.linspace(0, 1, 1025, dtype=torch.float64)
    limit = sample(model, x, trapezoid(x))[::64]
    errors: dict[str, list[float]] = {"trapezoid": [], "equal": []}
    for n in (16, 32, 64, 128):
        half = torch.linspace(0, 0.5, n // 2 + 1, dtype=torch.float64)
        uneven = torch.cat([half[:-1], torch.linspace(0.5, 1, n + 1, dtype=torch.float64)])
        keep = torch.cat([torch.arange(0, n // 2, n // 16), torch.arange(n // 2, len(uneven), n // 8)])
        for name, weights in (("trapezoid", trapezoid(uneven)), ("equal", "equal")):
            errors[name].append(float((sample(model, uneven, weights)[keep] - limit).abs().max()))
    assert errors["trapezoid"][-1] < errors["trapezoid"][0] / 50
    assert errors["equal"][-1] > 20 * errors["trapezoid"][-1]
    assert errors["equal"][-1] > 0.5 * errors["equal"][-2]


def test_permuted_points_permute_the_output() -> None:
    model = make_tno(2, 1, 2)
    u, x, w = rand(2, 19, 2), rand(19, 2, seed=1), rand(19, seed=2).abs()
    order = torch.randperm(19, generator=torch.Generator().manual_seed(0))
    out = model(u, co.PointCloud(x, w))
    torch.testing.assert_close(
        model(u[:, order], co.PointCloud(x[order], w[order])), out[:, order], rtol=1e-11, atol=1e-12
    )


def test_duplicated_points_with_split_weights_change_nothing() -> None:
    model = make_tno(2, 1, 2)
    u, x, w = rand(2, 19, 2), rand(19, 2, seed=1), rand(19, seed=2).abs()
    share = torch.linspace(0.1, 0.9, 19, dtype=torch.float64)
    mesh = co.PointCloud(torch.cat([x, x]), torch.cat([share * w, (1 - share) * w]))
    out = model(u, co.PointCloud(x, w))
    torch.testing.assert_close(
        model(torch.cat([u, u], 1), mesh), torch.cat([out, out], 1), rtol=1e-11, atol=1e-12
    )


def test_a_point_of_weight_zero_is_evaluated_but_not_seen() -> None:
    model = make_tno(1, 1, 1)
    u, x, w = rand(1, 12, 1), rand(12, 1, seed=1), rand(12, seed=2).abs()
    w[5] = 0.0
    out = model(u, co.PointCloud(x, w))
    moved = u.clone()
    moved[:, 5] += 3.0
    changed = (model(moved, co.PointCloud(x, w)) - out).abs()[0, :, 0]
    assert changed[5] > 1e-3
    assert changed[torch.arange(12) != 5].max() < 1e-12


@pytest.mark.parametrize("shared", [None, "points", "weights"])
def test_meshes_of_their_own_per_sample(shared: str | None) -> None:
    model = make_tno(1, 2, 2)
    u = rand(3, 10, 1)
    x = rand(10, 2, seed=1) if shared == "points" else rand(3, 10, 2, seed=1)
    w = rand(10, seed=2).abs() if shared == "weights" else rand(3, 10, seed=2).abs()
    out = model(u, x, weights=w) if shared == "points" else model(u, co.PointCloud(x, w))
    for b in range(3):
        alone = model(u[b : b + 1], co.PointCloud(x if x.ndim == 2 else x[b], w if w.ndim == 1 else w[b]))
        torch.testing.assert_close(out[b : b + 1], alone, rtol=1e-11, atol=1e-12)


def test_weights_of_the_mesh_can_be_replaced() -> None:
    model = make_tno(1, 1, 1)
    u, x, w = rand(2, 13, 1), rand(13, 1, seed=1), rand(13, seed=2).abs()
    equal = model(u, x)
    mesh = co.PointCloud(x, w)
    weighted = model(u, mesh)
    assert (weighted - equal).abs().max() > 1e-3
    torch.testing.assert_close(model(u, mesh, weights="equal"), equal, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(model(u, mesh, weights=torch.full_like(w, 7.0)), equal, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(model(u, x, weights=w), weighted, rtol=0, atol=0)
    torch.testing.assert_close(model(u, x, weights=5.0 * w), weighted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "options",
    [{"residual_weights": True}, {"norm_first": True}, {"variant": "universal", "initial_channels": 2}],
    ids=str,
)
def test_every_parameter_and_input_gets_a_gradient(options: dict) -> None:
    model = make_tno(1, 2, 1, **options)
    u, x, w = rand(2, 9, 1).requires_grad_(), rand(9, 1, seed=1).requires_grad_(), rand(9, seed=2).abs()
    w.requires_grad_()
    more = {"initial": rand(2, 2, seed=3).requires_grad_()} if "initial_channels" in options else {}
    model(u, x, weights=w, **more).square().sum().backward()
    for name, leaf in {**dict(model.named_parameters()), "u": u, "points": x, "weights": w, **more}.items():
        assert leaf.grad is not None, name
        assert torch.isfinite(leaf.grad).all(), name
        assert leaf.grad.abs().max() > 1e-8, name


def test_initial_condition_enters_at_the_first_point_only() -> None:
    model = make_tno(1, 2, 1, initial_channels=2)
    u, x, initial = rand(2, 8, 1), rand(8, 1, seed=1), rand(2, 2, seed=3)
    w = rand(8, seed=2).abs()
    w[0] = 0.0  # the point is evaluated, but nobody sees it
    changed = (model(u, co.PointCloud(x, w), initial + 1.0) - model(u, co.PointCloud(x, w), initial)).abs()
    assert changed[:, 0].min() > 1e-3
    assert changed[:, 1:].max() < 1e-12
    w[0] = 0.5
    changed = (model(u, co.PointCloud(x, w), initial + 1.0) - model(u, co.PointCloud(x, w), initial)).abs()
    assert changed[:, 1:].amax(-1).min() > 1e-6


def test_state_dict_round_trip() -> None:
    options = {"initial_channels": 1, "variant": "universal"}
    model, other = make_tno(1, 1, 1, **options), make_tno(1, 1, 1, seed=1, **options)
    u, x, initial = rand(1, 6, 1), rand(6, 1, seed=1), rand(1, 1, seed=2)
    before = model(u, x, initial)
    assert (other(u, x, initial) - before).abs().max() > 1e-3
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(u, x, initial), before, rtol=0, atol=0)


def test_surrounding_weights_reach_points_without_weights_only() -> None:
    model = make_tno(1, 1, 1)
    u, x, w = rand(1, 9, 1), rand(9, 1, seed=1), rand(9, seed=2).abs()
    equal, weighted = model(u, x), model(u, x, weights=w)
    with co.nn.quadrature(w):
        assert torch.equal(model(u, x), weighted)
    for mesh, weights, expected in ((x, "equal", equal), (co.PointCloud(x, w), "mesh", weighted)):
        with pytest.warns(UserWarning, match="were not used"), co.nn.quadrature(w.flip(0)):
            torch.testing.assert_close(model(u, mesh, weights=weights), expected, rtol=1e-12, atol=1e-13)


def test_attention_matrix_is_not_asked_for() -> None:
    model = make_tno(1, 1, 1)
    asked = []
    for layer in model.layers:
        layer.self_attn.register_forward_hook(
            lambda m, args, kwargs, out: asked.append(out[1]), with_kwargs=True
        )
    model(rand(1, 6, 1), rand(6, 1))
    assert asked == [None, None]


def test_dropout_lives_in_training_only() -> None:
    model = make_tno(1, 1, 1, dropout=0.5)
    u, x = rand(1, 6, 1), rand(6, 1, seed=1)
    assert not torch.equal(model(u, x), model(u, x))
    model.eval()
    assert torch.equal(model(u, x), model(u, x))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    # The parameters and inputs are those that the low dtype can hold, so only the arithmetic differs.
    model = make_tno(1, 1, 1, randomise=False).to(dtype)
    u, x, w = rand(2, 33, 1, dtype=dtype), rand(33, 1, seed=1, dtype=dtype), rand(33, seed=2).abs().float()
    out = model(u, co.PointCloud(x, w))
    assert out.dtype == dtype
    expected = model.double()(u.double(), co.PointCloud(x.double(), w.double()))
    assert (out.double() - expected).norm() / expected.norm() < tolerance


def test_points_and_weights_of_another_precision_follow_u() -> None:
    model = make_tno(1, 1, 1).float()
    u, x, w = rand(1, 7, 1, dtype=torch.float32), rand(7, 1, seed=1), rand(7, seed=2).abs()
    expected = model(u, co.PointCloud(x.float(), w.float()))
    torch.testing.assert_close(model(u, co.PointCloud(x, w)), expected, rtol=0, atol=0)


def test_autocast() -> None:
    model = make_tno(1, 1, 1, initial_channels=1, randomise=False).float()
    u, x, w = rand(2, 33, 1).float(), rand(33, 1, seed=1).float(), rand(33, seed=2).abs().float()
    initial = rand(2, 1, seed=3).float()
    expected = model(u, co.PointCloud(x, w), initial)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(u, co.PointCloud(x, w), initial)
    out.float().square().sum().backward()
    assert (out.float() - expected).norm() / expected.norm() < 0.05
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"in_channels": 0}, ValueError, "in_channels must be at least 1, was 0"),
        ({"out_channels": 1.5}, TypeError, "out_channels must be an int, was float"),
        ({"coord_dim": -1}, ValueError, "coord_dim must be at least 1, was -1"),
        ({"num_layers": True}, TypeError, "num_layers must be an int, was bool"),
        ({"initial_channels": -2}, ValueError, "initial_channels must be at least 0, was -2"),
        (
            {"d_model": 10, "num_heads": 4},
            ValueError,
            "d_model must be divisible by num_heads, was 10 with .* 4",
        ),
        ({"dropout": 1.5}, ValueError, "dropout must be a probability between 0 and 1, was 1.5"),
        ({"variant": "linear"}, ValueError, "variant must be .*, was 'linear'"),
        ({"variant": "universal", "norm_first": True}, ValueError, "norm_first must be False with variant"),
        ({"activation": "step"}, ValueError, "activation must be one of .* or a callable, was 'step'"),
        ({"activation": 3}, TypeError, "activation must be a str or a callable, was int"),
    ],
    ids=str,
)
def test_constructor_errors(change: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        TNO(**{"in_channels": 1, "out_channels": 1, "coord_dim": 1, **change})


U, X, W = torch.zeros(2, 5, 1), torch.zeros(5, 2), torch.ones(5)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"u": torch.zeros(5, 1)}, r"u must have shape \(B, N, 1\), was \(5, 1\)"),
        (
            {"u": torch.zeros(2, 5, 5, 1)},
            r"5, 5, 1\); the axes of a grid are one: u.flatten\(1, -2\)",
        ),
        ({"u": torch.zeros(2, 5, 3)}, r"u must have shape \(B, N, 1\), was \(2, 5, 3\)"),
        ({"u": U.double()}, "u must have the dtype of the parameters, torch.float32, was torch.float64"),
        ({"u": U.long()}, "u must have the dtype of the parameters, torch.float32, was torch.int64"),
        ({"mesh": torch.zeros(5)}, r"mesh must have shape \(5, 2\) or \(2, 5, 2\) .*, was \(5,\)"),
        ({"mesh": torch.zeros(5, 3)}, r"mesh must have shape .*, was \(5, 3\)"),
        ({"mesh": torch.zeros(4, 2)}, r"mesh must have shape .*, was \(4, 2\)"),
        ({"mesh": X.long()}, "mesh must have a floating dtype, was torch.int64"),
        ({"mesh": X.to("meta")}, "mesh must be on the device of u, cpu, was on meta"),
        ({"mesh": co.PointCloud(X[:3])}, r"mesh.points must have shape \(5, 2\) or .*, was \(3, 2\)"),
        ({"weights": W[:3]}, r"weights must have shape \(5,\) or \(2, 5\) .*, was \(3,\)"),
        ({"weights": W.long()}, "weights must have a floating dtype, was torch.int64"),
        ({"weights": "none"}, 'weights must be "mesh", "equal" or a tensor, was \'none\''),
        ({"initial": torch.zeros(2, 2)}, "initial must be None for a model with initial_channels=0"),
    ],
)
def test_forward_value_errors(change: dict, match: str) -> None:
    model = TNO(1, 1, 2, d_model=4, num_heads=1, num_layers=1)
    with pytest.raises(ValueError, match=match):
        model(**{"u": U, "mesh": X, **change})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"initial": None}, r"initial must be a tensor of shape \(B, 3\) .*, was None"),
        ({"initial": torch.zeros(2, 2)}, r"initial must have shape \(2, 3\) .*, was \(2, 2\)"),
        ({"initial": torch.zeros(2, 3).double()}, "initial must have the dtype of u, torch.float32"),
        ({"u": U[:, :0], "mesh": X[:0]}, "u must have at least one point where initial is given"),
    ],
)
def test_initial_condition_errors(change: dict, match: str) -> None:
    model = TNO(1, 1, 2, d_model=4, num_heads=1, num_layers=1, initial_channels=3)
    with pytest.raises(ValueError, match=match):
        model(**{"u": U, "mesh": X, "initial": torch.zeros(2, 3), **change})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"u": [1.0]}, "u must be a tensor, was list"),
        ({"mesh": [0.0]}, "mesh must be a Grid, a PointCloud or a tensor of points, was list"),
        ({"weights": None}, 'weights must be "mesh", "equal" or a tensor, was NoneType'),
        ({"initial": [1.0]}, "initial must be a tensor, was list"),
    ],
)
def test_forward_type_errors(change: dict, match: str) -> None:
    model = TNO(1, 1, 2, d_model=4, num_heads=1, num_layers=1, initial_channels=3)
    with pytest.raises(TypeError, match=match):
        model(**{"u": U, "mesh": X, "initial": torch.zeros(2, 3), **change})
