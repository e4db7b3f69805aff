"""The layer GalerkinAttention and its encoder layer, against the formulas written out in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import draw
from torch import Tensor

import continuum_ops as co
from continuum_ops.nn import GalerkinAttention, GalerkinEncoderLayer

TYPES = ["galerkin", "fourier", "linear", "softmax"]
B, N, M, E, H, C = 2, 7, 5, 6, 2, 2


def make(attention_type: str, **options) -> GalerkinAttention:
    torch.manual_seed(0)
    options = {"coord_dim": C, "eta": 1.0, "delta": 0.5, "dtype": torch.float64, **options}
    layer = GalerkinAttention(E, H, attention_type=attention_type, **options)
    for i, p in enumerate(layer.parameters()):  # no bias or norm at its neutral value
        p.data += 0.3 * draw(p.shape, p.dtype, seed=50 + i)
    return layer.eval()


def inputs(n: int = N, m: int = M):
    x, y = draw((B, n, E), torch.float64, 1), draw((B, m, E), torch.float64, 2)
    return x, y, draw((n, C), torch.float64, 3), draw((m, C), torch.float64, 4)


def norm(x: Tensor, module) -> Tensor:
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / (var + 1e-5).sqrt() * module.weight + module.bias


def formula(layer: GalerkinAttention, x, y, x_pos, y_pos, w: Tensor, normalize=True) -> Tensor:
    """GT (5), (6), (7) head by head and sample by sample, the N x M products formed."""
    kind, out = layer.attention_type, torch.empty(B, x.shape[1], H * (E // H + C), dtype=torch.float64)
    w = w.expand(B, H, y.shape[1])
    for b in range(B):
        for h in range(H):
            at = slice(h * E // H, (h + 1) * E // H)

            def project(name, u, at=at, h=h):
                linear = getattr(layer, f"{name}_proj")
                z = u @ linear.weight[at].T + linear.bias[at]
                if (
                    normalize
                    and name in {"galerkin": "kv", "fourier": "qk", "linear": "kv", "softmax": "qk"}[kind]
                ):
                    module = getattr(layer, f"{name}_norm")
                    z = norm(z, _Head(module, h))
                return z

            q = torch.cat([x_pos, project("q", x[b])], -1)
            k = torch.cat([y_pos, project("k", y[b])], -1)
            v = torch.cat([y_pos, project("v", y[b])], -1)
            weight = w[b, h]
            if kind in ("galerkin", "fourier"):
                z = (q @ k.T * weight) @ v
            elif kind == "linear":
                e = weight[:, None] * k.exp()
                z = (q.exp() / q.exp().sum(-1, keepdim=True)) @ (e / e.sum(0)).T @ v
            else:
                e = weight * (q @ k.T / math.sqrt(q.shape[-1])).exp()
                z = (e / e.sum(-1, keepdim=True)) @ v
            out[b, :, h * (E // H + C) : (h + 1) * (E // H + C)] = z
    return out @ layer.out_proj.weight.T + layer.out_proj.bias


class _Head:
    def __init__(self, module, h):
        self.weight, self.bias = module.weight[h], module.bias[h]


@pytest.mark.parametrize("attention_type", TYPES)
@pytest.mark.parametrize("shape", [None, (M,), (B, M), (B, H, M)], ids=str)
def test_cross_attention_is_the_formula(attention_type, shape):
    layer, (x, y, x_pos, y_pos) = make(attention_type), inputs()
    w = None if shape is None else draw(shape, torch.float64, 5, positive=True)
    out = layer(x, y, query_pos=x_pos, key_pos=y_pos, weights=w)
    full = (
        torch.full((M,), 1 / M, dtype=torch.float64) if w is None else (w.unsqueeze(1) if w.dim() == 2 else w)
    )
    torch.testing.assert_close(out, formula(layer, x, y, x_pos, y_pos, full), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention_type", TYPES)
def test_without_norms_and_in_batches_of_positions(attention_type):
    layer, (x, _, x_pos, _) = make(attention_type, normalize=False), inputs()
    out = layer(x, query_pos=x_pos.expand(B, N, C))
    full = torch.full((N,), 1 / N, dtype=torch.float64)
    torch.testing.assert_close(
        out, formula(layer, x, x, x_pos, x_pos, full, normalize=False), rtol=1e-12, atol=1e-12
    )
    names = {name for name, _ in layer.named_parameters()}
    assert names == {f"{p}_proj.{x}" for p in ("q", "k", "v", "out") for x in ("weight", "bias")}


@pytest.mark.parametrize("attention_type", TYPES)
def test_a_key_of_weight_zero_does_not_exist(attention_type):
    layer, (x, y, x_pos, y_pos) = make(attention_type), inputs()
    w = torch.tensor([1.0, 0.0, 2.0, 3.0, 0.0])
    y[:, w == 0] = math.nan
    out = layer(x, y, query_pos=x_pos, key_pos=y_pos, weights=w)
    live = layer(x, y[:, w > 0], query_pos=x_pos, key_pos=y_pos[w > 0], weights=w[w > 0])
    torch.testing.assert_close(out, live, rtol=1e-12, atol=1e-12)
    nothing = layer(x, y, query_pos=x_pos, key_pos=y_pos, weights=torch.zeros(M))
    torch.testing.assert_close(nothing, layer.out_proj.bias.expand_as(nothing), rtol=0, atol=0)


@pytest.mark.parametrize("attention_type", TYPES)
def test_gradients_where_no_key_is_left_are_finite(attention_type):
    layer, (x, y, x_pos, y_pos) = make(attention_type), inputs()
    leaves = [t.requires_grad_() for t in (x, y, x_pos, y_pos, torch.zeros(M, dtype=torch.float64))]
    out = layer(*leaves[:2], query_pos=leaves[2], key_pos=leaves[3], weights=leaves[4])
    assert all(
        bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum(), [*leaves, *layer.parameters()])
    )


@pytest.mark.parametrize("attention_type", TYPES)
def test_gradcheck(attention_type):
    layer, (x, y, x_pos, y_pos) = make(attention_type), inputs(3, 4)
    w = draw((4,), torch.float64, 5, positive=True)
    leaves = [t.requires_grad_() for t in (x, y, x_pos, y_pos, w)]

    def function(x, y, x_pos, y_pos, w):
        return layer(x, y, query_pos=x_pos, key_pos=y_pos, weights=w)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("attention_type", TYPES)
def test_output_converges_on_any_mesh(attention_type):
    """The same function on an even and on a graded mesh: trapezoid weights give one answer, to O(h^2)."""
    layer = make(attention_type, coord_dim=1)

    def at_zero(t: Tensor) -> Tensor:
        grid = co.Grid(t)
        x = torch.stack([torch.sin((i + 1) * t) for i in range(E)], -1)[None]
        return layer(x, query_pos=grid.points, weights=grid)[:, 0]

    even = torch.linspace(0, 1, 4001, dtype=torch.float64)
    graded = torch.linspace(0, 1, 2001, dtype=torch.float64) ** 2
    torch.testing.assert_close(at_zero(graded), at_zero(even), rtol=0, atol=1e-5)


def test_weights_of_an_enclosing_block():
    layer, (x, _, x_pos, _) = make("galerkin"), inputs()
    w = draw((N,), torch.float64, 5, positive=True)
    with co.nn.quadrature(w):
        out = layer(x, query_pos=x_pos)
    assert torch.equal(out, layer(x, query_pos=x_pos, weights=w))


def test_initialisation_is_diagonally_dominant():
    """GT eq. (17): eta U(-sqrt(3/d), sqrt(3/d)) + delta I."""
    torch.manual_seed(0)
    layer = GalerkinAttention(96, 1, eta=1e-2, delta=1e-2, coord_dim=1)
    bound = 1e-2 * math.sqrt(3 / 96)
    for p in (layer.q_proj, layer.k_proj, layer.v_proj):
        noise = p.weight.detach() - 1e-2 * torch.eye(96)
        assert noise.abs().max() <= bound * (1 + 1e-6)
        assert noise.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert not p.bias.any()
    assert layer.out_proj.weight.shape == (96, 97)


@pytest.mark.parametrize("attention_type", TYPES)
def test_norms_start_neutral_but_for_the_scale_of_fourier(attention_type):
    layer = GalerkinAttention(E, H, attention_type=attention_type)
    scales = {
        "q_norm": 1 / math.sqrt(E // H) if attention_type == "fourier" else 1.0,
        "k_norm": 1.0,
        "v_norm": 1.0,
    }
    for name, scale in scales.items():
        for parameter, value in zip(getattr(layer, name).parameters(), (scale, 0.0), strict=False):
            torch.testing.assert_close(parameter.detach(), torch.full((H, E // H), value))


@pytest.mark.parametrize("attention_type", TYPES)
def test_dropout_rests_in_evaluation(attention_type):
    """CASES 22."""
    layer, (x, _, x_pos, _) = make(attention_type, dropout=0.5), inputs()
    calm = make(attention_type)
    assert torch.equal(layer(x, query_pos=x_pos), calm(x, query_pos=x_pos))
    layer.train()
    assert not torch.equal(layer(x, query_pos=x_pos), layer(x, query_pos=x_pos))


@pytest.mark.parametrize("attention_type", ["galerkin", "fourier"])
def test_dropout_acts_on_the_small_matrix(attention_type):
    """All of it dropped leaves the bias; half of it gives q times a matrix with zeros and doubled entries."""
    layer, (x, _, x_pos, _) = make(attention_type, dropout=1.0), inputs()
    layer.train()
    out = layer(x, query_pos=x_pos)
    torch.testing.assert_close(out, layer.out_proj.bias.expand_as(out), rtol=0, atol=0)
    q = torch.eye(E // H + C, dtype=torch.float64).expand(1, 1, -1, -1)
    k, v = draw((1, 1, 9, E // H + C), torch.float64, 6), draw((1, 1, 9, E // H + C), torch.float64, 7)
    layer.dropout = 0.5
    matrix, dropped = k.mT @ v / 9, layer._attend(q, k, v, None)
    kept = dropped != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(dropped[kept], 2 * matrix[kept], rtol=1e-12, atol=0)


@pytest.mark.parametrize("attention_type", TYPES)
def test_autocast(attention_type):
    layer, (x, _, x_pos, _) = make(attention_type, dtype=torch.float32), inputs()
    x = x.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, query_pos=x_pos.float(), weights=torch.rand(N))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in (x, *layer.parameters()))


def test_compile_fullgraph():
    torch._dynamo.reset()
    layer = GalerkinEncoderLayer(E, H, coord_dim=C, dtype=torch.float64)
    x, _, x_pos, _ = inputs()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    w = torch.rand(N).double()
    torch.testing.assert_close(compiled(x, x_pos, weights=w), layer(x, x_pos, weights=w))


def test_copies_and_state():
    layer, (x, _, x_pos, _) = make("fourier"), inputs()
    other = make("fourier")
    for p in other.parameters():
        p.data.zero_()
    other.load_state_dict(layer.state_dict())
    out = layer(x, query_pos=x_pos)
    assert torch.equal(other(x, query_pos=x_pos), out)
    assert torch.equal(copy.deepcopy(layer)(x, query_pos=x_pos), out)


@pytest.mark.parametrize("scheme", ["galerkin", "regular"])
def test_encoder_layer_schemes(scheme):
    """GT (4)-(6): y + Attn, then + g; GT (7): Ln(z + g(Ln(z))) and no norms inside the attention."""
    torch.manual_seed(0)
    layer = GalerkinEncoderLayer(E, H, 9, coord_dim=C, layer_norm=scheme, dtype=torch.float64)
    x, _, x_pos, _ = inputs()
    z = x + layer.attention(x, query_pos=x_pos)
    inner = z if scheme == "galerkin" else F.layer_norm(z, (E,))
    hidden = inner @ layer.linear1.weight.T + layer.linear1.bias
    true = z + (hidden * torch.sigmoid(hidden)) @ layer.linear2.weight.T + layer.linear2.bias
    true = true if scheme == "galerkin" else F.layer_norm(true, (E,))
    torch.testing.assert_close(layer(x, x_pos), true, rtol=1e-12, atol=1e-12)
    has_norms = any(isinstance(m, co.nn.galerkin_attention.HeadNorm) for m in layer.modules())
    assert has_norms == (scheme == "galerkin")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_heads": 4}, "embed_dim must be divisible by num_heads, got 6 and 4"),
        ({"attention_type": "flash"}, "attention_type must be one of 'galerkin', .*, got 'flash'"),
        ({"dropout": 1.5}, r"dropout must be a probability in \[0, 1\], got 1.5"),
        ({"coord_dim": -1}, "coord_dim must be at least 0, got -1"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
    ],
)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=message):
        GalerkinAttention(**{"embed_dim": 6, "num_heads": 2, **options})


def test_encoder_layer_errors():
    with pytest.raises(ValueError, match='layer_norm must be "galerkin", "regular" or "post", got \'none\''):
        GalerkinEncoderLayer(6, 2, layer_norm="none")
    with pytest.raises(ValueError, match="dim_feedforward must be at least 1, got 0"):
        GalerkinEncoderLayer(6, 2, 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": torch.ones(N, E)}, r"query must have shape \(B, N, 6\), got \(7, 6\)"),
        ({"query_pos": None}, r"query_pos must have shape \(7, 2\) or \(2, 7, 2\), got None"),
        ({"query_pos": torch.ones(N, 3)}, r"query_pos must have shape .* got \(7, 3\)"),
        ({"weights": torch.ones(M)}, r"weights must have shape \(7,\), \(2, 7\) or \(2, 2, 7\), got \(5,\)"),
        ({"weights": -torch.ones(N)}, "weights must be >= 0 and finite, got -1"),
    ],
)
@pytest.mark.parametrize("attention_type", ["galerkin", "linear"])
def test_forward_errors(attention_type, change, message):
    layer = GalerkinAttention(E, H, coord_dim=C, attention_type=attention_type)
    arguments = {"query": torch.ones(B, N, E), "query_pos": torch.ones(N, C)}
    with pytest.raises(ValueError, match=message):
        layer(**{**arguments, **change})


def test_coordinates_that_were_not_asked_for():
    with pytest.raises(ValueError, match="query_pos must be None for a layer with coord_dim=0, got a tensor"):
        GalerkinAttention(E, H)(torch.ones(B, N, E), query_pos=torch.ones(N, C))
