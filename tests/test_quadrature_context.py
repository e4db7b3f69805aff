"""with continuum_ops.nn.quadrature(w): which layers take the weights, and when the block complains."""

import asyncio
import threading
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import continuum_ops as co

B, N, M, E, H = 2, 5, 7, 8, 2


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return co.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(B, N, E, dtype=torch.float64)


def weights(*shape, seed=2):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1


def attend(layer, x, **kwargs):
    return layer(x, x, x, need_weights=False, **kwargs)[0]


class FakeMesh:
    weights = weights(N)


@pytest.mark.parametrize("w", [weights(N), weights(B, N), weights(B, H, N), FakeMesh()])
def test_the_block_is_the_weights_argument(layer, x, w):
    with co.nn.quadrature(w):
        inside = attend(layer, x)
    assert torch.equal(inside, attend(layer, x, weights=w))
    assert not torch.allclose(inside, attend(layer, x))


def test_an_explicit_argument_wins(layer, x):
    own, outer = weights(N), weights(N, seed=3)
    with co.nn.quadrature(outer):
        assert torch.equal(attend(layer, x, weights=own), attend(layer, x, weights=own))
        explicit = attend(layer, x, weights=own)
        implicit = attend(layer, x)
    assert torch.equal(explicit, attend(layer, x, weights=own))
    assert torch.equal(implicit, attend(layer, x, weights=outer))


def test_the_innermost_block_that_fits_wins(layer, x):
    outer, inner, other = weights(N), weights(N, seed=3), weights(M)
    memory = torch.randn(B, M, E, dtype=torch.float64)
    with co.nn.quadrature(outer):
        with co.nn.quadrature(inner), co.nn.quadrature(other):
            assert torch.equal(attend(layer, x), attend(layer, x, weights=inner))
            cross = layer(x, memory, memory)[0]
            assert torch.equal(cross, layer(x, memory, memory, weights=other)[0])
        assert torch.equal(attend(layer, x), attend(layer, x, weights=outer))
    assert torch.equal(attend(layer, x), attend(layer, x, weights=torch.ones(N, dtype=torch.float64)))


def test_a_shadowed_block_does_not_warn(layer, x):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="quadrature weights")
        with co.nn.quadrature(weights(N)), co.nn.quadrature(weights(N, seed=3)):
            attend(layer, x)


def test_unused_weights_warn_with_the_lengths_seen(layer, x):
    memory = torch.randn(B, M, E, dtype=torch.float64)
    plain = attend(layer, x)
    message = "quadrature weights of length 9 were not used: the attention inside the block had 5, 7 keys"
    with pytest.warns(UserWarning, match=message) as caught, co.nn.quadrature(weights(9)):
        assert torch.equal(attend(layer, x), plain)
        layer(x, memory, memory)
    assert caught[0].filename == __file__
    with (
        pytest.warns(
            UserWarning, match="of length 9 were not used: no attention ran inside the block that could"
        ),
        co.nn.quadrature(weights(9)),
    ):
        attend(layer, x, weights=weights(N))


def test_an_exception_closes_the_block_without_a_warning(layer, x):
    plain = attend(layer, x)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="quadrature weights")
        with pytest.raises(KeyError), co.nn.quadrature(weights(N)):
            raise KeyError
    assert torch.equal(attend(layer, x), plain)


def test_threads_do_not_see_each_others_blocks(layer, x):
    plain = attend(layer, x)
    results, barrier = {}, threading.Barrier(3)

    def work(name, w):
        if w is None:
            barrier.wait()
            results[name] = attend(layer, x)
            barrier.wait()
            return
        with co.nn.quadrature(w):
            barrier.wait()
            results[name] = attend(layer, x)
            barrier.wait()

    given = {"none": None, "a": weights(N), "b": weights(N, seed=3)}
    threads = [threading.Thread(target=work, args=item) for item in given.items()]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert torch.equal(results["none"], plain)
    for name in "ab":
        assert torch.equal(results[name], attend(layer, x, weights=given[name]))


def test_asyncio_tasks_do_not_see_each_others_blocks(layer, x):
    async def work(w):
        with co.nn.quadrature(w):
            await asyncio.sleep(0)
            return attend(layer, x)

    async def both():
        return await asyncio.gather(work(weights(N)), work(weights(N, seed=3)))

    a, b = asyncio.run(both())
    assert torch.equal(a, attend(layer, x, weights=weights(N)))
    assert torch.equal(b, attend(layer, x, weights=weights(N, seed=3)))


def test_a_compiled_layer_follows_the_block(layer, x):
    compiled = torch.compile(layer, backend="eager")
    plain = attend(compiled, x)
    for w in (weights(N), weights(N, seed=3)):
        with co.nn.quadrature(w):
            assert torch.equal(attend(compiled, x), attend(layer, x, weights=w))
        assert torch.equal(attend(compiled, x), plain)


def test_gradients_reach_the_weights(layer, x):
    w = weights(N).requires_grad_()
    with co.nn.quadrature(w):
        loss = attend(layer, x).square().sum()
    (g,) = torch.autograd.grad(loss, w)
    (expected,) = torch.autograd.grad(attend(layer, x, weights=w).square().sum(), w)
    assert torch.equal(g, expected)
    assert g.abs().max() > 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_with_backward_inside_the_block(layer, x, use_reentrant):
    def gradient(run):
        y = x.clone().requires_grad_()
        with co.nn.quadrature(weights(N)):
            run(y).square().sum().backward()
        return y.grad

    expected = gradient(lambda y: attend(layer, y))
    actual = gradient(lambda y: checkpoint(lambda z: attend(layer, z), y, use_reentrant=use_reentrant))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "w, error, match",
    [
        ([1.0, 2.0], TypeError, "weights must be a tensor or a mesh with .weights, got list"),
        (torch.ones(3, dtype=torch.int64), TypeError, "weights must be floating point, got torch.int64"),
        (torch.tensor(1.0), ValueError, r"weights must have shape \(M,\), \(B, M\) or \(B, H, M\), got \(\)"),
    ],
)
def test_bad_weights_are_named(w, error, match):
    with pytest.raises(error, match=match), co.nn.quadrature(w):
        pass


def test_a_wrong_batch_size_is_an_error_in_the_layer(layer, x):
    match = r"weights must have shape \(5,\), \(2, 5\) or \(2, 2, 5\), got \(3, 5\)"
    with pytest.raises(ValueError, match=match), co.nn.quadrature(weights(3, N)):
        attend(layer, x)
