"""How the kernel cuts its work must not show: leads, keys or queries, one thread or more."""

from __future__ import annotations

import pytest
import torch
from helpers import attend, check, draw, qkv, run

import continuum_ops as co

# (leads, N, M): whole leads to a thread; ranges of keys; ranges of queries.
SHAPES = [((8,), 70, 90), ((3,), 90, 700), ((1,), 60, 1300), ((1,), 1200, 70)]


@pytest.fixture(params=[1, 2, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("leads, n, m", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_split_within_budget(threads, leads, n, m, is_causal):
    q, k, v = qkv(leads, n, m, 20, 12, torch.float32, seed=n + m)
    check(q, k, v, draw((m,), torch.float32, positive=True), is_causal=is_causal)


@pytest.mark.parametrize(
    "threads, n, m", [(1, 200, 600), (2, 4200, 530), (4, 200, 600)], indirect=["threads"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_long_query_among_short_ones(threads, dtype, n, m):
    # The row needs a running maximum, and so do the rows that share its block in the forward pass; the
    # backward pass may cut its blocks elsewhere.
    q, k, v = qkv((1,), n, m, 16, 33, dtype, seed=5)
    q[0, n // 2] *= 40
    q[0, -1] *= 40
    check(q, k, v)


@pytest.mark.parametrize("leads, n, m", SHAPES)
def test_same_bits_again(threads, leads, n, m):
    q, k, v = qkv(leads, n, m, 20, 12, torch.float32, seed=n + m)
    w = draw((m,), torch.float32, positive=True)
    grads = draw((*leads, n, 12), torch.float32, 1), draw((*leads, n), torch.float32, 2)
    first = run(attend, [q, k, v, w, None], *grads)
    for _ in range(2):
        for name, value in run(attend, [q, k, v, w, None], *grads).items():
            assert torch.equal(value, first[name]), name


def test_a_thread_count_changes_rounding_only():
    q, k, v = qkv((1,), 300, 1300, 16, 16, torch.float64, seed=9)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            results.append(torch.autograd.grad(co.continuum_attention(*leaves).sin().sum(), leaves))
    finally:
        torch.set_num_threads(before)
    for one, three in zip(*results, strict=True):
        torch.testing.assert_close(one, three, rtol=0, atol=1e-13 * one.abs().max().item())
