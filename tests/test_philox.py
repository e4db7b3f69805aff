"""The random generator of dropout, and dropout itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import draw, exact, qkv

import continuum_ops as co
from continuum_ops.ops._philox import dropout_keep, dropout_keep_at, philox4x32


def scalar_philox(counter, key, rounds):
    """One block in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


# Known answers published with the generator (Random123, philox 4x32 10).
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_known_answers(counter, key, words):
    as_tensors = [[torch.tensor([x]) for x in part] for part in (counter, key)]
    assert [w.item() for w in philox4x32(*as_tensors, rounds=10)] == words
    assert scalar_philox(counter, key, 10) == words


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 0x123456789ABCDEF])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_mask_is_a_function_of_seed_lead_query_and_key(seed, p):
    keep = dropout_keep(torch.tensor([seed]), p, (2, 3), 4, 3, 7)
    threshold = int(p * 2**32)
    for b in range(6):
        for i in range(3):
            for k in range(7):
                word = scalar_philox([k >> 2, i + 4, b, 0], [seed & 0xFFFFFFFF, seed >> 32], 7)[k & 3]
                assert bool(keep.flatten(0, 1)[b, i, k]) == (word >= threshold)


def test_mask_of_a_part_is_that_of_its_places():
    seed, p, row, key = 2**40 + 5, 0.5, [9, 2], [7, 100000001, 3, 6, 7]
    keep = dropout_keep_at(torch.tensor([seed]), p, (3,), torch.tensor(row), torch.tensor(key))
    for b in range(3):
        for i, r in enumerate(row):
            for j, k in enumerate(key):
                word = scalar_philox([k >> 2, r, b, 0], [seed & 0xFFFFFFFF, seed >> 32], 7)[k & 3]
                assert bool(keep[b, i, j]) == (word >= int(p * 2**32))


def test_share_dropped():
    keep = dropout_keep(torch.tensor([5]), 0.3, (4,), 0, 300, 301)
    n = keep.numel()
    assert abs((~keep).sum().item() - 0.3 * n) < 5 * (0.3 * 0.7 * n) ** 0.5


def _factor(seed, p, leads, n, m):
    torch.manual_seed(seed)
    drawn = torch.randint(2**63 - 1, (1,), dtype=torch.int64)
    return dropout_keep(drawn, p, leads, 0, n, m).double() / (1 - p)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n, m", [(70, 131), (1, 5), (130, 64)])
def test_forward_and_backward_use_the_same_mask(path, n, m, is_causal):
    q, k, v = (t.requires_grad_() for t in qkv((2, 3), n, m, 16, 8))
    w = 0.5 + draw((3, m)).square()
    w[:, 1::5] = 0  # the mask belongs to the key's own index, dead keys counted
    w = w.requires_grad_()
    grad_out, grad_lse = draw((2, 3, n, 8), seed=8), draw((2, 3, n), seed=9)
    factor = _factor(11, 0.4, (2, 3), n, m)
    torch.manual_seed(11)
    out, lse = co.continuum_attention(q, k, v, w, dropout_p=0.4, is_causal=is_causal, return_lse=True)
    true = exact(q, k, v, w, is_causal=is_causal, factor=factor, grad_out=grad_out, grad_lse=grad_lse)
    grads = torch.autograd.grad((out, lse), (q, k, v, w), (grad_out, grad_lse))
    names = ("out", "lse", "query", "key", "value", "weights")
    for name, actual in zip(names, (out, lse, *grads), strict=True):
        size = np.abs(true[name][np.isfinite(true[name])]).max()
        np.testing.assert_allclose(actual.detach(), true[name], rtol=0, atol=2e-6 * size, err_msg=name)


def test_paths_draw_the_same_mask():
    q, k, v = qkv((2, 3), 40, 50, 8, 8)
    results = []
    for mask in (None, torch.zeros(1, 1)):  # a float mask is the work of the chunked path
        torch.manual_seed(3)
        results.append(co.continuum_attention(q, k, v, attn_mask=mask, dropout_p=0.5))
    torch.testing.assert_close(*results)


def test_second_derivatives_use_the_same_mask(path):
    inputs = [t.requires_grad_() for t in qkv((2,), 3, 5, 2, 2, torch.float64)]

    def function(*args):
        torch.manual_seed(5)
        return co.continuum_attention(*args, dropout_p=0.3)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_manual_seed_reproduces(path):
    q, k, v = qkv((2,), 30, 40, 8, 8)
    torch.manual_seed(0)
    a, b = (co.continuum_attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(a, co.continuum_attention(q, k, v, dropout_p=0.5)) and not torch.equal(a, b)


@pytest.mark.parametrize("p", [1, 1.0])
def test_everything_dropped(path, p):
    q, k, v = (t.requires_grad_() for t in qkv((2,), 10, 12, 4, 4))
    out, lse = co.continuum_attention(q, k, v, dropout_p=p, return_lse=True)
    assert bool((out == 0).all()) and bool(lse.isfinite().all())
    assert all(bool((g == 0).all()) for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_zero_probability_draws_nothing(path):
    q, k, v = qkv((2,), 10, 12, 4, 4)
    state = torch.get_rng_state()
    assert torch.equal(co.continuum_attention(q, k, v, dropout_p=0.0), co.continuum_attention(q, k, v))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("op", ["forward", "chunked"])
def test_a_part_of_the_queries_and_keys_drops_what_the_whole_does(op):
    q, k, v = (t.requires_grad_() for t in qkv((2,), 70, 131, 8, 4, torch.float64))
    row = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:70]
    key = torch.randperm(300, generator=torch.Generator().manual_seed(2))[:131]
    drawn = torch.tensor([77])
    factor = dropout_keep(drawn, 0.4, (2,), 0, 200, 300)[:, row][..., key].double() / 0.6
    function = getattr(torch.ops.continuum_ops, f"continuum_attention_{op}")
    seed = torch.cat([drawn, row, key])
    out, lse, *_ = function(q, k, v, *(None,) * 6, seed, None, 0.5, 0.4, False)
    g, g_lse = draw(out.shape, torch.float64, 8), draw(lse.shape, torch.float64, 9)
    true = exact(q, k, v, scale=0.5, factor=factor, grad_out=g, grad_lse=g_lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (g, g_lse))
    for name, value in zip(("out", "lse", "query", "key", "value"), (out, lse, *grads), strict=True):
        expected = true[name].astype(np.float64)
        atol = 1e-13 * np.abs(expected).max()
        np.testing.assert_allclose(value.detach().numpy(), expected, rtol=0, atol=atol, err_msg=name)
    with pytest.raises(RuntimeError, match="seed: one int64, or that and the places of the N queries and M"):
        torch.ops.continuum_ops.continuum_attention_forward(
            q, k, v, *(None,) * 6, seed[:-1], None, 0.5, 0.4, False
        )
