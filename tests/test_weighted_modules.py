"""torch.nn.MultiheadAttention and compiled models inside a quadrature block."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import continuum_ops as co

B, N, M = 2, 5, 7
SDPA = F.scaled_dot_product_attention


def weights(*shape, seed=2):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


MHA = {"plain": {}, "appended": {"add_bias_kv": True, "add_zero_attn": True}, "sizes": {"kdim": 5, "vdim": 3}}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", MHA)
def test_stock_multihead_attention_is_ours(kind, batch_first, need_weights):
    """In eval mode without gradients, where torch has a fused path that forms no torch function calls."""
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(8, 2, batch_first=batch_first, dtype=torch.float64, **MHA[kind]).eval()
    ours = co.nn.MultiheadAttention(8, 2, batch_first=batch_first, dtype=torch.float64, **MHA[kind]).eval()
    ours.load_state_dict(stock.state_dict())
    sizes = (stock.embed_dim, stock.kdim, stock.vdim)
    xs = [torch.randn(B, n, c, dtype=torch.float64) for n, c in zip((N, M, M), sizes, strict=True)]
    xs = xs if batch_first else [x.transpose(0, 1) for x in xs]
    w = weights(B, M)
    padding = torch.zeros(B, M, dtype=torch.bool)
    padding[0, 5:] = True
    mask = torch.ones(N, M, dtype=torch.bool).triu(3)
    options = {"need_weights": need_weights, "key_padding_mask": padding, "attn_mask": mask}
    with torch.no_grad():
        with co.nn.quadrature(w):
            out, p = stock(*xs, **options, average_attn_weights=False)
        expected, expected_p = ours(*xs, **options, average_attn_weights=False, weights=w)
        close(out, expected)
        if need_weights:
            close(p, expected_p)
        else:
            assert p is None
        with co.nn.quadrature(torch.ones(M, dtype=torch.float64)):
            close(stock(*xs, **options)[0], stock(*xs, **options)[0])
            equal = stock(*xs, **options)[0]
        close(equal, stock(*xs, **options)[0])


def test_the_signature_of_torchs_function_is_the_one_we_read():
    """A new argument of multi_head_attention_forward must not be dropped."""
    read = inspect.getsource(co.nn._weighted_calls._Layer) + inspect.getsource(
        co.nn._weighted_calls.multi_head_attention_forward
    )
    names = set(inspect.signature(F.multi_head_attention_forward).parameters)
    assert not [name for name in names if f'"{name}"' not in read]


def test_static_keys_are_refused():
    layer = nn.MultiheadAttention(8, 2)
    x = torch.randn(M, B, 8)
    args = (
        8,
        2,
        layer.in_proj_weight,
        layer.in_proj_bias,
        None,
        None,
        False,
        0.0,
        layer.out_proj.weight,
        None,
    )
    with (
        co.nn.quadrature(weights(M)),
        pytest.raises(ValueError, match="static_v must be None inside a quadrature"),
    ):
        F.multi_head_attention_forward(x, x, x, *args, static_v=torch.randn(2 * B, M, 4))


def test_a_stock_encoder_in_inference_takes_no_fused_path():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64), 2
    )
    encoder.eval()
    x = torch.randn(B, M, 8, dtype=torch.float64)
    counts = torch.tensor([1, 3, 2, 2, 1, 4, 1])
    first = counts.cumsum(0) - counts
    with torch.no_grad():
        expected = encoder(x.repeat_interleave(counts, 1))[:, first]
        with co.nn.quadrature(counts.double()):
            out = encoder(x)
    close(out, expected, 1e-11)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.stock = nn.MultiheadAttention(8, 2, batch_first=True)
        self.ours = co.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = SDPA(q, k, v).transpose(1, 2).flatten(-2)
        x = x + SDPA(q, k[:, :, :3], v[:, :, :3]).transpose(1, 2).flatten(-2)
        return self.ours(self.stock(x, x, x)[0], x, x, need_weights=False)[0]


@pytest.mark.parametrize("fresh", [True, False])
def test_compiled_without_a_graph_break_and_not_again_for_other_weights(fresh):
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net().double()
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    x = torch.randn(B, M, 8, dtype=torch.float64)
    if not fresh:
        close(compiled(x), net(x))
    before = len(graphs)
    for seed in range(3):
        with co.nn.quadrature(weights(M, seed=seed)):
            actual = compiled(x)
            close(actual, net(x))
    assert len(graphs) == before + 1
    for n in (9, 10, 11, 12):
        x = torch.randn(B, n, 8, dtype=torch.float64)
        with co.nn.quadrature(weights(n)):
            close(compiled(x), net(x))
    assert len(graphs) == before + 2
    close(compiled(x), net(x))
    assert not torch.allclose(actual, compiled(torch.randn(B, M, 8, dtype=torch.float64)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="quadrature weights")
        with co.nn.quadrature(weights(12)):
            compiled(x)
    with (
        pytest.warns(UserWarning, match="compiled attention inside the block had other numbers of keys"),
        co.nn.quadrature(weights(99)),
    ):
        compiled(x)
