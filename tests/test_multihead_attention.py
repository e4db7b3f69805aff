"""continuum_ops.nn.MultiheadAttention against torch.nn.MultiheadAttention and against the formula."""

import copy
import inspect
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

import continuum_ops as co
import continuum_ops.nn.multihead_attention as mha_module

B, N, M, E, H = 3, 5, 7, 12, 3


APPENDED = {"add_bias_kv": True, "add_zero_attn": True}


def make_pair(dtype=torch.float64, seed=0, **kwargs):
    """A stock layer with random biases and ours with its state dict."""
    torch.manual_seed(seed)
    stock = nn.MultiheadAttention(E, H, dtype=dtype, **kwargs)
    with torch.no_grad():
        for p in stock.parameters():
            p.normal_(std=0.5)
    ours = co.nn.MultiheadAttention(E, H, dtype=dtype, **kwargs)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def make_inputs(batch_first=True, kdim=E, vdim=E, dtype=torch.float64, batch=B, requires_grad=False):
    shapes = [(batch, N, E), (batch, M, kdim), (batch, M, vdim)]
    xs = [torch.randn(s, dtype=dtype) for s in shapes]
    xs = xs if batch_first else [x.transpose(0, 1).contiguous() for x in xs]
    return [x.requires_grad_(requires_grad) for x in xs]


def dense(layer, query, key, value, w, keep=None, bias=None):
    """out and probabilities (B, H, N, M) in float64 from the formula; query, key, value batch first.

    w (B, H, M) are the weights, keep and bias (B, H, N, M) a keep-mask and an additive mask.
    """
    if layer._qkv_same_embed_dim:
        projections = layer.in_proj_weight.double().chunk(3)
    else:
        projections = [p.double() for p in (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)]
    biases = [0.0] * 3 if layer.in_proj_bias is None else layer.in_proj_bias.double().chunk(3)
    heads = []
    for x, p, b in zip((query, key, value), projections, biases, strict=True):
        y = torch.einsum("bnc,ec->bne", x.double(), p) + b
        heads.append(torch.stack(y.split(E // H, dim=-1), dim=1))
    q, k, v = heads
    s = torch.einsum("bhnd,bhmd->bhnm", q, k) / math.sqrt(E // H)
    if bias is not None:
        s = s + bias.double()
    e = w.double()[:, :, None, :] * torch.exp(s)
    if keep is not None:
        e = torch.where(keep, e, 0.0)
    p = e / e.sum(-1, keepdim=True)
    out = torch.cat(torch.einsum("bhnm,bhmd->bhnd", p, v).unbind(1), dim=-1)
    out_bias = 0.0 if layer.out_proj.bias is None else layer.out_proj.bias.double()
    return torch.einsum("bne,fe->bnf", out, layer.out_proj.weight.double()) + out_bias, p


def assert_same(actual, expected, dtype=torch.float64):
    if dtype == torch.float64:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    else:
        torch.testing.assert_close(actual, expected)


VARIANTS = [
    {
        "bias": bias,
        "add_bias_kv": bias_kv,
        "add_zero_attn": zero,
        "batch_first": first,
        "kdim": kdim,
        "vdim": vdim,
    }
    for bias, bias_kv, zero, first, (kdim, vdim) in itertools.product(
        [True, False], [True, False], [True, False], [True, False], [(None, None), (5, 9), (E, 9)]
    )
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kwargs", VARIANTS, ids=lambda v: "-".join(str(int(x or 0)) for x in v.values()))
def test_equals_torch_for_every_constructor_variant(kwargs, dtype):
    stock, ours = make_pair(dtype, **kwargs)
    xs = make_inputs(kwargs["batch_first"], kwargs["kdim"] or E, kwargs["vdim"] or E, dtype)
    out, p = stock(*xs)
    ours_out, ours_p = ours(*xs)
    assert_same(ours_out, out, dtype)
    assert_same(ours_p, p, dtype)
    # Equal weights that are not one: appended keys must follow them.
    equal = torch.full((M,), 0.3, dtype=dtype)
    fused, none = ours(*xs, need_weights=False, weights=equal)
    assert none is None
    assert_same(fused, out, dtype)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shared", ["query_key_value", "key_value"])
def test_packed_projections_of_shared_inputs(batch_first, shared):
    stock, ours = make_pair(batch_first=batch_first)
    q, k, _ = make_inputs(batch_first)
    xs = (q, q, q) if shared == "query_key_value" else (q, k, k)
    assert_same(ours(*xs, need_weights=False)[0], stock(*xs, need_weights=False)[0])


@pytest.mark.parametrize("kwargs", [{}, {"bias": False}, {"kdim": 5, "vdim": 9}, {"add_bias_kv": True}])
def test_initialisation_and_state_dict_are_torchs(kwargs):
    torch.manual_seed(3)
    stock = nn.MultiheadAttention(E, H, **kwargs)
    torch.manual_seed(3)
    ours = co.nn.MultiheadAttention(E, H, **kwargs)
    state, expected = ours.state_dict(), stock.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    nn.MultiheadAttention(E, H, **kwargs).load_state_dict(state, strict=True)
    assert isinstance(ours, nn.MultiheadAttention)
    signature = inspect.signature(co.nn.MultiheadAttention)
    assert list(signature.parameters) == list(inspect.signature(nn.MultiheadAttention).parameters)


def random_mask(shape, kind):
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    if kind == "bool":
        return hidden
    if kind == "-inf":
        return torch.zeros(shape, dtype=torch.float64).masked_fill(hidden, -math.inf)
    return torch.randn(shape, dtype=torch.float64).masked_fill(hidden, -math.inf)


@pytest.mark.parametrize("extra", [{}, APPENDED], ids=["plain", "appended"])
@pytest.mark.parametrize("kind", ["bool", "-inf", "float"])
@pytest.mark.parametrize("which", ["2-D", "3-D", "padding", "2-D+padding", "3-D+padding"])
def test_masks_equal_torch(which, kind, extra):
    stock, ours = make_pair(batch_first=True, **extra)
    xs = make_inputs()
    masks = {}
    if "-D" in which:
        masks["attn_mask"] = random_mask((N, M) if "2" in which else (B * H, N, M), kind)
    if "padding" in which:
        masks["key_padding_mask"] = random_mask((B, M), kind)
    for average in (True, False):
        out, p = stock(*xs, average_attn_weights=average, **masks)
        ours_out, ours_p = ours(*xs, average_attn_weights=average, **masks)
        assert_same(ours_out, out)
        assert_same(ours_p, p)
    assert_same(ours(*xs, need_weights=False, **masks)[0], out)


def test_mixed_mask_types():
    stock, ours = make_pair(batch_first=True)
    xs = make_inputs()
    hidden, added = random_mask((N, M), "bool"), random_mask((B, M), "float")
    bias = torch.zeros(N, M, dtype=torch.float64).masked_fill(hidden, -math.inf)
    expected = stock(*xs, attn_mask=bias, key_padding_mask=added)[0]
    assert_same(ours(*xs, attn_mask=hidden, key_padding_mask=added)[0], expected)


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_finite_padding_values_that_stand_for_minus_infinity(fill):
    stock, ours = make_pair(torch.float32, batch_first=True)
    xs = make_inputs(dtype=torch.float32)
    padding = torch.zeros(B, M)
    padding[:, 4:] = fill
    padding[1] = -1e4  # the same for every key: no effect at all, and nothing underflows
    # In float64: adding -1e4 to a float32 score costs torch three digits.
    expected = stock.double()(*(x.double() for x in xs), key_padding_mask=padding.double())[0]
    assert_same(ours(*xs, key_padding_mask=padding)[0], expected.float(), torch.float32)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_unbatched(need_weights, average):
    stock, ours = make_pair(kdim=5, vdim=9)
    q, k, v = (x.squeeze(0) for x in make_inputs(kdim=5, vdim=9, batch=1))
    args = {"need_weights": need_weights, "average_attn_weights": average}
    for masks in (
        {},
        {"attn_mask": random_mask((N, M), "bool"), "key_padding_mask": random_mask((M,), "bool")},
        {"attn_mask": random_mask((H, N, M), "float")},
    ):
        (out, p), (ours_out, ours_p) = stock(q, k, v, **args, **masks), ours(q, k, v, **args, **masks)
        assert_same(ours_out, out)
        assert (ours_p is None) == (p is None)
        if p is not None:
            assert_same(ours_p, p)


@pytest.mark.parametrize("extra", [{}, APPENDED], ids=["plain", "appended"])
@pytest.mark.parametrize("padded", [False, True])
def test_causal(padded, extra):
    stock, ours = make_pair(batch_first=True, **extra)
    x = torch.randn(B, N, E, dtype=torch.float64)
    mask = torch.ones(N, N, dtype=torch.bool).triu(1)
    padding = torch.tensor([[False] * (N - i) + [True] * i for i in range(B)]) if padded else None
    expected, p = stock(x, x, x, key_padding_mask=padding, attn_mask=mask)
    for attn_mask in (mask, None):
        for need_weights in (True, False):
            out, ours_p = ours(
                x,
                x,
                x,
                key_padding_mask=padding,
                attn_mask=attn_mask,
                is_causal=True,
                need_weights=need_weights,
            )
            assert_same(out, expected)
            if need_weights:
                assert_same(ours_p, p)


class FakeMesh:
    def __init__(self, weights):
        self.weights = weights


@pytest.mark.parametrize("shape", [(M,), (B, M), (1, M), (B, H, M), (1, H, M), "mesh"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kdim", [None, 5])
def test_weighted_equals_the_formula(shape, batch_first, kdim):
    _, ours = make_pair(batch_first=batch_first, kdim=kdim, vdim=kdim)
    xs = make_inputs(True, kdim or E, kdim or E)
    w = torch.rand((M,) if shape == "mesh" else shape, dtype=torch.float64) + 0.1
    full = (w[:, None] if w.dim() == 2 else w).expand(B, H, M)
    expected, p = dense(ours, *xs, full)
    args = xs if batch_first else [x.transpose(0, 1) for x in xs]
    given = FakeMesh(w) if shape == "mesh" else w
    out, ours_p = ours(*args, weights=given, average_attn_weights=False)
    assert_same(out if batch_first else out.transpose(0, 1), expected)
    assert_same(ours_p, p)
    averaged = ours(*args, weights=given)[1]
    assert_same(averaged, p.mean(1))
    fused = ours(*args, weights=given, need_weights=False)[0]
    assert_same(fused, out)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_weights_with_masks_equal_the_formula(kind):
    _, ours = make_pair(batch_first=True)
    xs = make_inputs()
    w = torch.rand(B, M, dtype=torch.float64) + 0.1
    attn_mask, padding = random_mask((B * H, N, M), kind), random_mask((B, M), kind)
    both = [attn_mask.view(B, H, N, M), padding[:, None, None, :].expand(B, H, N, M)]
    weights = w[:, None].expand(B, H, M)
    if kind == "bool":
        expected, p = dense(ours, *xs, weights, keep=~(both[0] | both[1]))
    else:
        expected, p = dense(ours, *xs, weights, bias=both[0] + both[1])
    out, ours_p = ours(*xs, padding, attn_mask=attn_mask, weights=w, average_attn_weights=False)
    assert_same(out, expected)
    assert_same(ours_p, p)


def test_an_integer_weight_is_a_key_repeated():
    """w_j = 3 is the stock layer with key j given three times, w_j = 0 the one without key j."""
    stock, ours = make_pair(batch_first=True)
    q, k, v = make_inputs()
    counts = torch.tensor([1, 3, 2, 0, 4, 1, 1])
    expected = stock(q, k.repeat_interleave(counts, 1), v.repeat_interleave(counts, 1))[0]
    assert_same(ours(q, k, v, weights=counts.double())[0], expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("extra", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_appended_keys_have_the_mean_of_the_nonzero_weights(extra, padded):
    stock, ours = make_pair(batch_first=True, **extra)
    xs = make_inputs()
    w = torch.tensor([1.0, 3.0, 2.0, 0.0, 4.0, 1.0, 1.0], dtype=torch.float64)
    padding = torch.tensor([False, False, True, False, False, False, True]).expand(B, M) if padded else None
    # Probabilities of the stock layer, reweighted by hand: the mean is 12 / 6, whatever is padded.
    p = stock(*xs, padding, average_attn_weights=False)[1] * torch.cat([w, w.new_tensor([2.0])])
    actual = ours(*xs, padding, weights=w, average_attn_weights=False)[1]
    assert_same(actual, p / p.sum(-1, keepdim=True))


def test_keys_of_weight_zero_do_not_exist():
    _, ours = make_pair(batch_first=True)
    q, k, v = make_inputs()
    w = torch.rand(M, dtype=torch.float64)
    w[[2, 6]] = 0
    live = w > 0
    expected = ours(q, k[:, live], v[:, live], weights=w[live])
    broken_k, broken_v = k.clone(), v.clone()
    broken_k[:, 2], broken_v[:, 6] = math.nan, math.inf
    out, p = ours(q, broken_k, broken_v, weights=w)
    assert_same(out, expected[0])
    assert_same(p[..., live], expected[1])
    assert (p[..., ~live] == 0).all()


@pytest.mark.parametrize("how", ["weights", "attn_mask", "float attn_mask", "padding", "float padding"])
def test_a_query_without_keys_gives_zero_attention(how):
    _, ours = make_pair(batch_first=True)
    xs = make_inputs(requires_grad=True)
    args = {}
    if how == "weights":
        args["weights"] = torch.ones(B, M, dtype=torch.float64)
        args["weights"][1] = 0
    elif "attn_mask" in how:
        hidden = torch.zeros(B * H, N, M, dtype=torch.bool)
        hidden[H : 2 * H] = True
        args["attn_mask"] = torch.where(hidden, -math.inf, 0.0).double() if "float" in how else hidden
    else:
        hidden = torch.zeros(B, M, dtype=torch.bool)
        hidden[1] = True
        args["key_padding_mask"] = torch.where(hidden, -math.inf, 0.0).double() if "float" in how else hidden
    out, p = ours(*xs, **args)
    assert_same(out[1], ours.out_proj.bias.expand(N, E))
    assert (p[1] == 0).all()
    expected = ours(*(x[[0, 2]] for x in xs))[0]
    assert_same(out[[0, 2]], expected)
    (out.square().sum() + p.square().sum()).backward()
    for x in xs:
        assert x.grad.isfinite().all()
        assert (x.grad[1] == 0).all()
        assert x.grad[0].abs().max() > 0


def test_no_keys_and_no_queries():
    _, ours = make_pair(batch_first=True)
    q, k, v = make_inputs()
    empty = torch.zeros(B, 0, dtype=torch.float64)
    out, p = ours(q, k[:, :0], v[:, :0], weights=empty[0], key_padding_mask=empty)
    assert_same(out, ours.out_proj.bias.expand(B, N, E))
    assert p.shape == (B, N, 0)
    assert ours(q[:, :0], k, v)[0].shape == (B, 0, E)


def gradients(layer, call, xs):
    layer.zero_grad()
    ys = [x.detach().clone().requires_grad_() for x in xs]
    out, p = call(*ys)
    torch.manual_seed(9)
    # Not randn_like, which follows the strides of its argument.
    loss = sum((y * torch.randn(y.shape, dtype=y.dtype)).sum() for y in (out, p))
    return torch.autograd.grad(loss, [*ys, *layer.parameters()])


@pytest.mark.parametrize("kwargs", [{}, {"kdim": 5, "vdim": 9}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_gradients_equal_torch(kwargs):
    stock, ours = make_pair(batch_first=True, **kwargs)
    xs = make_inputs(kdim=kwargs.get("kdim", E), vdim=kwargs.get("vdim", E))
    mask = random_mask((N, M), "bool")
    expected = gradients(stock, lambda *x: stock(*x, attn_mask=mask), xs)
    actual = gradients(ours, lambda *x: ours(*x, attn_mask=mask), xs)
    for a, b in zip(actual, expected, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("shape", [(M,), (B, M), (B, H, M)])
def test_gradients_of_weights_and_float_masks(shape):
    _, ours = make_pair(batch_first=True)
    xs = [
        *make_inputs(),
        torch.randn(shape, dtype=torch.float64),
        torch.randn(B * H, N, M, dtype=torch.float64),
        torch.randn(B, M, dtype=torch.float64),
    ]

    def call(q, k, v, raw, attn_mask, padding):
        w = nn.functional.softplus(raw)
        return ours(q, k, v, padding, attn_mask=attn_mask, weights=w, average_attn_weights=False)

    def formula(q, k, v, raw, attn_mask, padding):
        w = nn.functional.softplus(raw)
        w = (w[:, None] if w.dim() == 2 else w).expand(B, H, M)
        return dense(ours, q, k, v, w, bias=attn_mask.view(B, H, N, M) + padding[:, None, None, :])

    for a, b in zip(gradients(ours, call, xs), gradients(ours, formula, xs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_dropout_only_while_training(monkeypatch):
    seen = []
    operator = mha_module.continuum_attention

    def spy(*args, dropout_p, **kwargs):
        seen.append(dropout_p)
        return operator(*args, dropout_p=dropout_p, **kwargs)

    monkeypatch.setattr(mha_module, "continuum_attention", spy)
    ours = co.nn.MultiheadAttention(E, H, dropout=0.5)
    x = torch.randn(N, B, E)
    ours(x, x, x)
    ours.eval()
    first, second = ours(x, x, x), ours(x, x, x)
    assert seen == [0.5, 0.0, 0.0]
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_inference_mode_uses_the_weights():
    """The stock class has a fused inference path for exactly this call."""
    _, ours = make_pair(batch_first=True)
    ours.eval()
    x = torch.randn(B, M, E, dtype=torch.float64)
    w = torch.rand(M, dtype=torch.float64)
    expected = dense(ours, x, x, x, w.expand(B, H, M))[0]
    with torch.inference_mode():
        assert_same(ours(x, x, x, weights=w)[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_low_precision(dtype):
    _, ours = make_pair(torch.float32, batch_first=True, add_bias_kv=True)
    xs = make_inputs(dtype=torch.float32, requires_grad=True)
    w = torch.rand(M)
    padding = torch.zeros(B, M, dtype=torch.bool)
    padding[0, 3] = True
    exact = ours(*xs, padding, weights=w)[0]
    with torch.autocast("cpu", dtype=dtype):
        out = ours(*xs, padding, weights=w)[0]
    assert out.dtype == dtype
    tolerance = 16 * torch.finfo(dtype).eps * exact.abs().max()
    assert (out - exact).abs().max() < tolerance
    out.float().sum().backward()
    assert all(x.grad.isfinite().all() for x in xs)
    half = ours.to(dtype)(*(x.to(dtype) for x in xs), padding, weights=w)[0]
    assert half.dtype == dtype
    assert (half - exact).abs().max() < tolerance


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_deepcopy_and_pickle(duplicate):
    _, ours = make_pair(batch_first=True, add_bias_kv=True)
    twin = duplicate(ours)
    assert type(twin) is co.nn.MultiheadAttention
    xs = make_inputs()
    w = torch.rand(M, dtype=torch.float64)
    assert torch.equal(twin(*xs, weights=w)[0], ours(*xs, weights=w)[0])


def test_hooks_of_out_proj_run():
    _, ours = make_pair(batch_first=True)
    calls = []
    ours.out_proj.register_forward_hook(lambda *_: calls.append(1))
    ours(*make_inputs())
    assert calls == [1]


def test_compiles_without_a_graph_break():
    _, ours = make_pair(batch_first=True)
    xs = make_inputs()
    w = torch.rand(M, dtype=torch.float64)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    for args in ({}, {"weights": w}, {"need_weights": False, "weights": w}):
        assert_same(compiled(*xs, **args)[0], ours(*xs, **args)[0])


BAD = [
    ({"query": torch.randn(B, N, E + 1)}, r"query must have 12 features, got shape \(3, 5, 13\)"),
    ({"key": torch.randn(M, E)}, r"all be 3-D .* or all 2-D, .* and key of shape \(7, 12\)"),
    ({"value": torch.randn(B, M + 1, E)}, r"value must have the batch and length of key, \(3, 7\), got"),
    ({"query": torch.randn(B + 1, N, E)}, "key must have the batch size of query, 4, got 3"),
    ({"weights": torch.ones(N)}, r"weights must have shape \(7,\), \(3, 7\) or \(3, 3, 7\), got \(5,\)"),
    ({"weights": torch.ones(N, M)}, r"weights must have shape .*, got \(5, 7\)"),
    ({"weights": torch.ones(())}, r"weights must have shape \(M,\), .*, got \(\)"),
    ({"weights": torch.ones(M).long()}, "weights must be floating point, got torch.int64"),
    ({"weights": [1.0] * M}, "weights must be a tensor or a mesh with .weights, got list"),
    ({"attn_mask": torch.ones(M, N) > 0}, r"attn_mask must have shape \(5, 7\) or \(9, 5, 7\), got"),
    ({"attn_mask": torch.ones(N, M).int()}, "attn_mask must be bool or floating point, got torch.int32"),
    ({"key_padding_mask": torch.ones(M) > 0}, r"key_padding_mask must have shape \(3, 7\), got \(7,\)"),
    (
        {"key_padding_mask": torch.ones(M)},
        "key_padding_mask must .* weights are passed as weights=",
    ),
    ({"attn_mask": torch.ones(M)}, "attn_mask must .* quadrature weights are passed as weights="),
    ({"key_padding_mask": torch.ones(B, M).int()}, "key_padding_mask must be bool or floating point"),
]


@pytest.mark.parametrize("change, match", BAD)
def test_bad_arguments_are_named(change, match):
    ours = co.nn.MultiheadAttention(E, H, batch_first=True)
    q, k, v = make_inputs(dtype=torch.float32)
    args = {"query": q, "key": k, "value": v} | change
    error = TypeError if "floating point" in match or "list" in match else ValueError
    with pytest.raises(error, match=match):
        ours(**args)


def test_nested_tensors_are_refused():
    ours = co.nn.MultiheadAttention(E, H, batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)])
    with pytest.raises(ValueError, match="query must be a dense tensor, got a nested one"):
        ours(x, x, x)
