"""continuum_ops.nn.replace_attention: what stays the same, and weights that reach every layer."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import continuum_ops as co

B, N, E, H, FF = 3, 6, 8, 2, 16
KW = {"dropout": 0.0, "dtype": torch.float64}


def randomise(model, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.4)
    return model


def repeat(x, counts, batch_first):
    return x.repeat_interleave(counts, 1 if batch_first else 0)


def pick_first(x, counts, batch_first):
    first = counts.cumsum(0) - counts
    return x[:, first] if batch_first else x[first]


def points(n=N, batch_first=True):
    x = torch.randn(B, n, E, dtype=torch.float64)
    return x if batch_first else x.transpose(0, 1).contiguous()


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


COUNTS = torch.tensor([1, 3, 2, 2, 1, 4])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer(batch_first, norm_first, training):
    """Integer weights on N points are the stock model on points repeated that often, through every layer."""
    kwargs = KW | {"batch_first": batch_first, "norm_first": norm_first}
    with warnings.catch_warnings():
        # Stock torch remarks at construction that it will not nest such an encoder.
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        stock = randomise(nn.Transformer(E, H, 2, 2, FF, **kwargs)).train(training)
    model = copy.deepcopy(stock)
    before = dict(model.named_parameters())
    modules = dict(model.named_modules())
    assert co.nn.replace_attention(model) is model
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert list(modules) == [name for name, _ in model.named_modules()]
    attention = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    assert len(attention) == 6
    assert {type(m) for m in attention} == {co.nn.MultiheadAttention}
    assert all(m.training == training for m in model.modules())

    src, tgt = points(batch_first=batch_first), points(4, batch_first)
    tgt_counts = torch.tensor([2, 1, 5, 1])
    with torch.set_grad_enabled(training):
        assert_same(model(src, tgt), stock(src, tgt))
        expected = pick_first(
            stock(repeat(src, COUNTS, batch_first), repeat(tgt, tgt_counts, batch_first)),
            tgt_counts,
            batch_first,
        )
        with co.nn.quadrature(COUNTS.double()), co.nn.quadrature(tgt_counts.double()):
            out = model(src, tgt)
        assert_same(out, expected)
        assert not torch.allclose(out, model(src, tgt))
        mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
        assert_same(model(src, tgt, tgt_mask=mask), stock(src, tgt, tgt_mask=mask))


def test_encoder_in_inference_is_the_formula():
    """In eval mode without gradients the stock encoder takes fused paths that skip the attention module."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, FF, batch_first=True, **KW), 2)
    randomise(encoder).eval()
    assert encoder.use_nested_tensor
    x, w = points(), torch.rand(N, dtype=torch.float64) + 0.1
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad():
        stock_out = encoder(x, src_key_padding_mask=padding)
        co.nn.replace_attention(encoder)
        assert_same(encoder(x, src_key_padding_mask=padding)[~padding], stock_out[~padding])
        with co.nn.quadrature(w):
            out = encoder(x, src_key_padding_mask=padding)
        y = x
        for layer in encoder.layers:
            y = layer.norm1(y + attention_formula(layer.self_attn, y, y, torch.where(padding, 0.0, w)))
            y = layer.norm2(y + layer.linear2(layer.linear1(y).relu()))
    assert_same(out, y)
    assert not torch.allclose(out[~padding], stock_out[~padding])


def attention_formula(attn, x, memory, w):
    """Multi-head attention with weights (B, M), one head at a time."""
    (wq, wk, wv), (bq, bk, bv) = attn.in_proj_weight.chunk(3), attn.in_proj_bias.chunk(3)
    q, k, v = x @ wq.T + bq, memory @ wk.T + bk, memory @ wv.T + bv
    d = E // H
    heads = []
    for h in range(H):
        one = slice(h * d, (h + 1) * d)
        e = w[..., None, :] * torch.exp(q[..., one] @ k[..., one].transpose(1, 2) / d**0.5)
        heads.append(e @ v[..., one] / e.sum(-1, keepdim=True))
    return torch.cat(heads, -1) @ attn.out_proj.weight.T + attn.out_proj.bias


def test_decoder_layer_in_inference_is_the_formula():
    layer = randomise(nn.TransformerDecoderLayer(E, H, FF, batch_first=True, **KW)).eval()
    co.nn.replace_attention(layer)
    x, memory = points(4), points()
    w, w_memory = (torch.rand(n, dtype=torch.float64) + 0.1 for n in (4, N))
    with torch.no_grad():
        with co.nn.quadrature(w), co.nn.quadrature(w_memory):
            out = layer(x, memory)
        y = layer.norm1(x + attention_formula(layer.self_attn, x, x, w))
        y = layer.norm2(y + attention_formula(layer.multihead_attn, y, memory, w_memory))
        y = layer.norm3(y + layer.linear2(layer.linear1(y).relu()))
    assert_same(out, y)


def test_a_model_that_is_an_attention_layer():
    layer = nn.MultiheadAttention(E, H)
    assert co.nn.replace_attention(layer) is layer
    assert type(layer) is co.nn.MultiheadAttention


def test_twice_is_once_and_quiet():
    model = co.nn.replace_attention(nn.Sequential(nn.MultiheadAttention(E, H)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        co.nn.replace_attention(model)
    assert type(model[0]) is co.nn.MultiheadAttention


def test_shared_modules_stay_shared_and_optimizers_keep_working():
    shared = nn.MultiheadAttention(E, H, batch_first=True, **KW)
    model = nn.ModuleDict({"a": shared, "b": shared})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    co.nn.replace_attention(model)
    assert model["a"] is model["b"] is shared
    x = points()
    before = shared.in_proj_weight.detach().clone()
    model["b"](x, x, x)[0].square().sum().backward()
    optimizer.step()
    assert not torch.equal(model["a"].in_proj_weight, before)


def test_hooks_keep_running():
    layer = nn.MultiheadAttention(E, H, batch_first=True, **KW)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append("after"))
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    co.nn.replace_attention(layer)
    layer(*[points()] * 3)
    assert calls == ["before", "after"]


def test_pruned_weights_and_a_parametrized_out_proj_are_kept():
    layer = randomise(nn.MultiheadAttention(E, H, batch_first=True, **KW))
    prune.l1_unstructured(layer, "in_proj_weight", 0.3)
    parametrizations.weight_norm(layer.out_proj)
    x = points()
    expected = layer(x, x, x)[0]
    co.nn.replace_attention(layer)
    assert_same(layer(x, x, x)[0], expected)
    layer(x, x, x)[0].sum().backward()
    assert layer.in_proj_weight_orig.grad is not None


@pytest.mark.parametrize("name", ["in_proj_weight", "q_proj_weight", "in_proj_bias"])
def test_parametrizations_are_kept_and_can_be_removed(name):
    sizes = {"kdim": 5, "vdim": 4} if name == "q_proj_weight" else {}
    layer = randomise(nn.MultiheadAttention(E, H, batch_first=True, **sizes, **KW))
    parametrize.register_parametrization(layer, name, Doubled())
    q = points()
    k, v = (torch.randn(B, N, d, dtype=torch.float64) for d in (layer.kdim, layer.vdim))
    expected = layer(q, k, v)[0]
    parameters = dict(layer.named_parameters())
    co.nn.replace_attention(layer)
    assert isinstance(layer, co.nn.MultiheadAttention)
    assert type(layer).__name__ == "ParametrizedMultiheadAttention"
    assert_same(layer(q, k, v)[0], expected)
    after = dict(layer.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[n] is p for n, p in parameters.items())
    w = torch.rand(N, dtype=torch.float64) + 0.1
    out = layer(q, k, v, weights=w)[0]
    out.sum().backward()
    assert layer.parametrizations[name].original.grad.abs().max() > 0
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(q, k, v, weights=w)[0], out)
    parametrize.remove_parametrizations(layer, name)
    assert type(layer) is co.nn.MultiheadAttention
    assert torch.equal(layer(q, k, v, weights=w)[0], out)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


class NoAttention(nn.Module):
    def forward(self, x, *args, **kwargs):
        assert "weights" not in kwargs
        return x, None


def test_an_encoder_layer_with_a_foreign_attention_module_is_left_alone():
    model = nn.Sequential(
        nn.TransformerEncoderLayer(E, H, FF, **KW), nn.TransformerEncoderLayer(E, H, FF, **KW)
    )
    model[0].self_attn = NoAttention()
    x = points()
    expected = model(x)
    co.nn.replace_attention(model)
    assert type(model[0]) is nn.TransformerEncoderLayer
    assert type(model[1]) is co.nn.TransformerEncoderLayer
    assert_same(model(x), expected)


def test_a_replaced_model_survives_deepcopy_and_loads_stock_state_dicts():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, FF, batch_first=True, **KW), 2).eval()
    state = copy.deepcopy(encoder.state_dict())
    twin = copy.deepcopy(co.nn.replace_attention(encoder))
    twin.load_state_dict(state, strict=True)
    x, w = points(), torch.rand(N, dtype=torch.float64)
    with torch.no_grad(), co.nn.quadrature(w):
        assert torch.equal(twin(x), encoder(x))


def test_a_compiled_model_notices_the_replacement():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, FF, batch_first=True, **KW), 1).eval()
    compiled = torch.compile(encoder, backend="eager")
    x, w = points(), torch.rand(N, dtype=torch.float64)
    with torch.no_grad():
        stock_out = compiled(x)
        co.nn.replace_attention(encoder)
        with co.nn.quadrature(w):
            out = compiled(x)
            assert_same(out, encoder(x))
    assert not torch.allclose(out, stock_out)


class MyLayer(nn.TransformerEncoderLayer):
    pass


def test_subclasses_of_the_encoder_layer_keep_their_class_but_not_the_fused_path():
    layer = randomise(MyLayer(E, H, FF, batch_first=True, **KW)).eval()
    co.nn.replace_attention(layer)
    assert type(layer) is MyLayer
    x, w = points(), torch.rand(N, dtype=torch.float64) + 0.1
    with torch.no_grad():
        with co.nn.quadrature(w):
            out = layer(x)
        y = layer.norm1(x + attention_formula(layer.self_attn, x, x, w))
        assert_same(out, layer.norm2(y + layer.linear2(layer.linear1(y).relu())))


class MyAttention(nn.MultiheadAttention):
    pass


class OurAttention(co.nn.MultiheadAttention):
    pass


def test_what_cannot_be_swapped_is_refused_by_name_before_anything_changes():
    model = nn.ModuleDict(
        {
            "plain": nn.MultiheadAttention(E, H),
            "own": MyAttention(E, H),
            "constrained": parametrizations.weight_norm(MyAttention(E, H), "in_proj_weight"),
            "patched": nn.MultiheadAttention(E, H),
            "ours": OurAttention(E, H),
        }
    )
    model["patched"].forward = lambda *args, **kwargs: None
    match = (
        r"own \(a .*MyAttention, whose forward may differ from torch.nn's\); "
        r"constrained \(a .*MyAttention, .*\); patched \(its forward was replaced on the instance\)\. "
        r"A quadrature block reaches them as they are"
    )
    with pytest.raises(ValueError, match=match):
        co.nn.replace_attention(model)
    assert type(model["plain"]) is nn.MultiheadAttention
    for name in ("own", "constrained", "patched"):
        del model[name]
    co.nn.replace_attention(model)
    assert type(model["plain"]) is co.nn.MultiheadAttention
    assert type(model["ours"]) is OurAttention


def test_a_model_without_attention_warns():
    with pytest.warns(
        UserWarning, match="model has no torch.nn.MultiheadAttention: nothing was replaced .calls of"
    ):
        co.nn.replace_attention(nn.Linear(2, 2))


def test_only_modules():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got function"):
        co.nn.replace_attention(lambda x: x)
