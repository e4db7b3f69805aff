"""continuum_ops.nn.TransformerEncoderLayer and TransformerEncoder against torch.nn and the formula."""

import copy
import inspect
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import continuum_ops as co

B, N, E, H, FF = 3, 6, 8, 2, 16
STOCK = {"d_model": E, "nhead": H, "dim_feedforward": FF, "dtype": torch.float64}


def make_pair(seed=0, **kwargs):
    torch.manual_seed(seed)
    stock = nn.TransformerEncoderLayer(**STOCK | {"dropout": 0.0, "batch_first": True} | kwargs)
    with torch.no_grad():
        for p in stock.parameters():
            p.normal_(std=0.5)
    ours = co.nn.TransformerEncoderLayer(**STOCK | {"dropout": 0.0, "batch_first": True} | kwargs)
    ours.load_state_dict(stock.state_dict(), strict=True)
    return stock, ours


def formula(layer, x, w):
    """One post- or pre-norm layer in float64, batch first, weights (B, N), from the state dict alone."""
    p = layer.state_dict()

    def norm(y, name):
        centred = y - y.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"]
            + p[f"{name}.bias"]
        )

    def attention(y):
        qkv = y @ p["self_attn.in_proj_weight"].T + p["self_attn.in_proj_bias"]
        heads = []
        for h in range(H):
            q, k, v = (qkv[..., part * E + h * E // H : part * E + (h + 1) * E // H] for part in range(3))
            e = w[:, None, :] * torch.exp(q @ k.transpose(1, 2) / math.sqrt(E // H))
            heads.append(e @ v / e.sum(-1, keepdim=True))
        return torch.cat(heads, -1) @ p["self_attn.out_proj.weight"].T + p["self_attn.out_proj.bias"]

    def feed_forward(y):
        hidden = F.relu(y @ p["linear1.weight"].T + p["linear1.bias"])
        return hidden @ p["linear2.weight"].T + p["linear2.bias"]

    if layer.norm_first:
        x = x + attention(norm(x, "norm1"))
        return x + feed_forward(norm(x, "norm2"))
    x = norm(x + attention(x), "norm1")
    return norm(x + feed_forward(x), "norm2")


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first, bias, batch_first", list(itertools.product([True, False], repeat=3)))
def test_equals_torch(norm_first, bias, batch_first, training):
    stock, ours = make_pair(norm_first=norm_first, bias=bias, batch_first=batch_first)
    stock.train(training), ours.train(training)
    x = torch.randn(B, N, E, dtype=torch.float64)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, 4:] = True
    mask = torch.ones(N, N, dtype=torch.bool).triu(2)
    y = x if batch_first else x.transpose(0, 1)
    assert_same(ours(y, mask, padding), stock(y, mask, padding))
    assert_same(ours(y[0]), stock(y[0]))
    with torch.no_grad():
        assert_same(ours(y, src_key_padding_mask=padding), stock(y, src_key_padding_mask=padding))


@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu, nn.GELU()])
def test_activations(activation):
    stock, ours = make_pair(activation=activation, layer_norm_eps=1e-3)
    x = torch.randn(B, N, E, dtype=torch.float64)
    assert_same(ours(x), stock(x))
    stock.eval(), ours.eval()
    with torch.no_grad():
        assert_same(ours(x), stock(x))


def test_constructor_initialisation_and_state_dict_are_torchs():
    torch.manual_seed(1)
    stock = nn.TransformerEncoderLayer(**STOCK)
    torch.manual_seed(1)
    ours = co.nn.TransformerEncoderLayer(**STOCK)
    state, expected = ours.state_dict(), stock.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    stock.load_state_dict(state, strict=True)
    parameters = inspect.signature(co.nn.TransformerEncoderLayer).parameters
    reference = inspect.signature(nn.TransformerEncoderLayer).parameters
    assert list(parameters) == list(reference)
    assert [p.default for p in parameters.values()] == [p.default for p in reference.values()]
    assert type(ours.self_attn) is co.nn.MultiheadAttention
    with pytest.raises(RuntimeError, match="activation should be relu/gelu, not tanh"):
        co.nn.TransformerEncoderLayer(E, H, activation="tanh")


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_weighted_equals_the_formula(norm_first, training):
    _, ours = make_pair(norm_first=norm_first)
    ours.train(training)
    x = torch.randn(B, N, E, dtype=torch.float64)
    w = torch.rand(B, N, dtype=torch.float64) + 0.1
    with torch.set_grad_enabled(training):
        assert_same(ours(x, weights=w), formula(ours, x, w))
        assert_same(ours(x, weights=w[0]), formula(ours, x, w[:1].expand(B, N)))
    with torch.inference_mode():
        assert_same(ours(x, weights=w), formula(ours, x, w))


def test_is_causal():
    stock, ours = make_pair()
    x = torch.randn(B, N, E, dtype=torch.float64)
    mask = torch.ones(N, N, dtype=torch.bool).triu(1)
    expected = stock(x, mask)
    assert_same(ours(x, is_causal=True), expected)
    assert_same(ours(x, mask, is_causal=True), expected)


@pytest.mark.parametrize("norm", [True, False])
def test_encoder_with_integer_weights_is_the_stock_encoder_on_repeated_points(norm):
    torch.manual_seed(0)
    final = nn.LayerNorm(E, dtype=torch.float64) if norm else None
    stock = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**STOCK, dropout=0.0, batch_first=True),
        3,
        final,
        enable_nested_tensor=False,
    )
    with torch.no_grad():
        for p in stock.parameters():
            p.normal_(std=0.5)
    ours = co.nn.TransformerEncoder(
        co.nn.TransformerEncoderLayer(**STOCK, dropout=0.0, batch_first=True), 3, copy.deepcopy(final)
    )
    ours.load_state_dict(stock.state_dict(), strict=True)
    x = torch.randn(B, N, E, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([1, 3, 2, 2, 1, 4])
    first = counts.cumsum(0) - counts
    expected = stock(x.repeat_interleave(counts, 1))[:, first]
    out = ours(x, weights=counts.double())
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    (g,), (expected_g,) = (torch.autograd.grad(y.square().sum(), x) for y in (out, expected))
    torch.testing.assert_close(g, expected_g, rtol=1e-9, atol=1e-9)
    for training in (True, False):
        assert_same(ours.train(training)(x), stock.train(training)(x))
    mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    assert_same(ours(x, mask), stock(x, mask))
    assert_same(ours(x, is_causal=True), stock(x, mask))


def test_stock_encoder_around_our_layer_does_not_nest():
    stock, ours = make_pair()
    encoder = nn.TransformerEncoder(ours, 2, enable_nested_tensor=False).eval()
    expected = nn.TransformerEncoder(stock, 2, enable_nested_tensor=False)
    x = torch.randn(B, N, E, dtype=torch.float64)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        out = encoder(x, src_key_padding_mask=padding)
        assert_same(out[~padding], expected(x, src_key_padding_mask=padding)[~padding])
    with pytest.warns(UserWarning, match="use_nested_tensor is False"):
        nested = nn.TransformerEncoder(ours, 2)
    assert not nested.use_nested_tensor


def test_dropout_only_while_training():
    ours = co.nn.TransformerEncoderLayer(E, H, FF, dropout=0.5, batch_first=True)
    x = torch.randn(B, N, E)
    assert not torch.equal(ours(x), ours(x))
    ours.eval()
    assert torch.equal(ours(x), ours(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_deepcopy_and_pickle(duplicate):
    _, ours = make_pair()
    twin = duplicate(co.nn.TransformerEncoder(ours, 2)).eval()
    assert {type(layer) for layer in twin.layers} == {co.nn.TransformerEncoderLayer}
    x = torch.randn(B, N, E, dtype=torch.float64)
    w = torch.rand(B, N, dtype=torch.float64)
    with torch.no_grad():
        assert_same(twin(x, weights=w), formula(ours, formula(ours, x, w), w))


def test_encoder_refuses_a_stock_layer():
    stock, _ = make_pair()
    with pytest.raises(
        TypeError, match=r"encoder_layer must be a continuum_ops\.nn\.TransformerEncoderLayer, got torch"
    ):
        co.nn.TransformerEncoder(stock, 2)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_key_padding_mask_of_plus_infinity(bad):
    layer = co.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    x, mask = torch.randn(2, 5, 8), torch.zeros(2, 5)
    mask[1, 3] = bad
    with pytest.raises(ValueError, match="key_padding_mask must be finite or -inf, got inf or NaN"):
        layer(x, src_key_padding_mask=mask)
