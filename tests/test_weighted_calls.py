"""Calls of torch's attention functions inside a quadrature block, against the formula in float64."""

from __future__ import annotations

import asyncio
import math
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import continuum_ops as co

B, H, N, M, D, DV = 2, 4, 5, 7, 6, 3
SDPA = F.scaled_dot_product_attention


def qkv(dtype=torch.float64, heads=H, kv_heads=H, requires_grad=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, heads, N, D), (B, kv_heads, M, D), (B, kv_heads, M, DV))
    return [
        torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
        for s in shapes
    ]


def weights(*shape, seed=2):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1


def formula(q, k, v, w, keep=None, bias=None, scale=None):
    """w broadcasts to (B, H, M)."""
    q, k, v = q.double(), k.double(), v.double()
    s = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    s = s if bias is None else s + bias.double()
    e = w.double()[..., None, :] * torch.exp(s)
    e = e if keep is None else torch.where(keep, e, 0.0)
    return e @ v / e.sum(-1, keepdim=True)


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "w, broadcast", [(weights(M), (M,)), (weights(B, M), (B, 1, M)), (weights(B, H, M), (B, H, M))]
)
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_weights_of_each_shape(w, broadcast, dtype, tolerance):
    q, k, v = qkv(dtype)
    with co.nn.quadrature(w):
        out = SDPA(q, k, v)
    assert out.dtype == dtype
    close(out, formula(q, k, v, w.view(broadcast)), tolerance)
    assert not torch.allclose(out, SDPA(q, k, v))


@pytest.mark.parametrize("c", [1.0, 0.3])
def test_equal_weights_give_the_models_own_output(c):
    q, k, v = qkv()
    with co.nn.quadrature(torch.full((M,), c, dtype=torch.float64)):
        close(SDPA(q, k, v), SDPA(q, k, v))
    outside = SDPA(q, k, v)
    with co.nn.quadrature(torch.full((M,), c, dtype=torch.float64)):
        close(SDPA(q, k, v), outside)


def test_every_argument_of_the_call():
    q, k, v = qkv()
    w = weights(M)
    keep = torch.rand(B, 1, N, M, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[..., 0] = True
    bias = torch.randn(N, M, dtype=torch.float64)
    triangle = torch.ones(N, M, dtype=torch.bool).tril()
    with co.nn.quadrature(w):
        close(SDPA(q, k, v, keep), formula(q, k, v, w, keep=keep))
        close(SDPA(q, k, v, attn_mask=bias), formula(q, k, v, w, bias=bias))
        close(SDPA(q, k, v, None, 0.0, True), formula(q, k, v, w, keep=triangle))
        close(SDPA(query=q, key=k, value=v, scale=0.7), formula(q, k, v, w, scale=0.7))
        close(SDPA(q, k, v, scale=0.0), formula(q, k, v, w, scale=0.0))
        dropped = SDPA(q, k, torch.eye(M, dtype=torch.float64).expand(B, H, M, M), dropout_p=0.5)
        p = formula(q, k, torch.eye(M, dtype=torch.float64), w)
    # A dropped probability is 0, a kept one doubled.
    assert torch.where(dropped == 0, 0.0, (dropped - 2 * p).abs()).max() < 1e-12
    assert 0 < (dropped == 0).double().mean() < 1


@pytest.mark.parametrize("w, broadcast", [(weights(M), (M,)), (weights(B, H, M), (B, H, M))])
@pytest.mark.parametrize("kv_heads", [1, 2, H])
def test_grouped_queries(kv_heads, w, broadcast):
    q, k, v = qkv(kv_heads=kv_heads)
    groups = [h * kv_heads // H for h in range(H)]
    with co.nn.quadrature(w):
        out = SDPA(q, k, v, enable_gqa=True)
    close(out, formula(q, k[:, groups], v[:, groups], w.view(broadcast)))


def test_calls_with_other_numbers_of_dimensions():
    q, k, v = qkv()
    w, per_sample = weights(M), weights(B, M)
    with co.nn.quadrature(w):
        close(SDPA(q[0, 0], k[0, 0], v[0, 0]), formula(q[0, 0], k[0, 0], v[0, 0], w))
        close(SDPA(q[:, 0], k[:, 0], v[:, 0]), formula(q[:, 0], k[:, 0], v[:, 0], w))
        close(SDPA(q[:1], k, v), formula(q[:1], k, v, w))
    five = [x.unsqueeze(1).repeat(1, 3, 1, 1, 1) for x in (q, k, v)]
    with co.nn.quadrature(per_sample):
        close(SDPA(q[:, 0], k[:, 0], v[:, 0]), formula(q[:, 0], k[:, 0], v[:, 0], per_sample))
        close(SDPA(*five), formula(*five, per_sample[:, None, None]))


def test_gradients_of_inputs_and_weights():
    inputs = qkv(requires_grad=True)
    w = weights(M).requires_grad_()
    with co.nn.quadrature(w):
        loss = SDPA(*inputs).square().sum()
    actual = torch.autograd.grad(loss, [*inputs, w])
    expected = torch.autograd.grad(formula(*inputs, w).square().sum(), [*inputs, w])
    for a, e in zip(actual, expected, strict=True):
        close(a, e, 1e-11)
        assert e.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v = qkv(torch.float32)
    w = weights(M).float()
    with co.nn.quadrature(w), torch.autocast("cpu", dtype):
        out = SDPA(q, k, v)
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    close(out, formula(q.to(dtype), k.to(dtype), v.to(dtype), w), 4 * eps)


def test_other_lengths_are_torchs_to_the_bit_and_named_in_the_warning():
    q, k, v = qkv()
    expected = SDPA(q, k, v), SDPA(q, k[..., :2, :], v[..., :2, :])
    message = "of length 9 were not used: the attention inside the block had 2, 7 keys"
    with pytest.warns(UserWarning, match=message) as caught, co.nn.quadrature(weights(9)):
        actual = SDPA(q, k, v), SDPA(q, k[..., :2, :], v[..., :2, :])
    assert caught[0].filename == __file__
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_attention_that_is_written_out_is_not_seen_and_the_warning_says_so():
    q, k, v = qkv()
    message = "no attention ran inside the block that could take them .*attention that a model writes out"
    with pytest.warns(UserWarning, match=message), co.nn.quadrature(weights(M)):
        _ = (q @ k.transpose(-1, -2)).softmax(-1) @ v


def test_the_innermost_block_of_the_length_wins_and_others_get_the_rest():
    q, k, v = qkv()
    outer, inner, other = weights(M), weights(M, seed=3), weights(4)
    k4, v4 = k[..., :4, :], v[..., :4, :]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="quadrature weights")
        with co.nn.quadrature(outer), co.nn.quadrature(other):
            with co.nn.quadrature(inner):
                close(SDPA(q, k, v), formula(q, k, v, inner))
                close(SDPA(q, k4, v4), formula(q, k4, v4, other))
            close(SDPA(q, k, v), formula(q, k, v, outer))


def test_nothing_is_left_behind():
    before = _get_current_function_mode_stack()
    q, k, v = qkv()
    plain = SDPA(q, k, v)
    with pytest.raises(KeyError), co.nn.quadrature(weights(M)):
        SDPA(q, k, v)
        raise KeyError
    assert _get_current_function_mode_stack() == before
    assert torch.equal(SDPA(q, k, v), plain)
    assert SDPA is F.scaled_dot_product_attention


def test_threads_and_other_modes():
    q, k, v = qkv()
    plain = SDPA(q, k, v)
    seen = {}
    with co.nn.quadrature(weights(M)), BaseTorchFunctionMode():
        thread = threading.Thread(target=lambda: seen.update(out=SDPA(q, k, v)))
        thread.start()
        thread.join()
        close(SDPA(q, k, v), formula(q, k, v, weights(M)))
    assert torch.equal(seen["out"], plain)


def test_asyncio_tasks_that_close_in_the_order_in_which_they_opened():
    q, k, v = qkv()
    before = len(_get_current_function_mode_stack())

    async def first(opened, closed):
        with co.nn.quadrature(weights(M)):
            opened.set()
            await asyncio.sleep(0.01)
            out = SDPA(q, k, v)
        closed.set()
        return out, SDPA(q, k, v)

    async def second(opened, closed):
        await opened.wait()
        with co.nn.quadrature(weights(M, seed=3)):
            await closed.wait()
            return SDPA(q, k, v)

    async def third(opened, closed):
        await opened.wait()
        return SDPA(q, k, v)

    async def main():
        events = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(*(task(*events) for task in (first, second, third)))

    (inside, after), other, bystander = asyncio.run(main())
    close(inside, formula(q, k, v, weights(M)))
    close(other, formula(q, k, v, weights(M, seed=3)))
    for out in (after, bystander):
        assert torch.equal(out, SDPA(q, k, v))
    assert len(_get_current_function_mode_stack()) == before


def test_generators_that_close_out_of_order():
    q, k, v = qkv()
    before = len(_get_current_function_mode_stack())

    def attend(w):
        with co.nn.quadrature(w):
            while True:
                yield SDPA(q, k, v)

    first, second = attend(weights(M)), attend(weights(M, seed=3))
    close(next(first), formula(q, k, v, weights(M)))
    close(next(second), formula(q, k, v, weights(M, seed=3)))
    first.close()
    close(next(second), formula(q, k, v, weights(M, seed=3)))
    second.close()
    assert torch.equal(SDPA(q, k, v), SDPA(q, k, v))
    close(SDPA(q, k, v), formula(q, k, v, torch.ones(M)))
    assert len(_get_current_function_mode_stack()) == before


def test_a_block_closed_by_another_thread_is_over():
    q, k, v = qkv()

    def attend():
        with co.nn.quadrature(weights(M)):
            yield SDPA(q, k, v)

    generator = attend()
    next(generator)
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    try:
        close(SDPA(q, k, v), formula(q, k, v, torch.ones(M)))
    finally:
        while _get_current_function_mode_stack():
            torch.overrides._pop_mode()


@pytest.mark.parametrize(
    "how, use_reentrant",
    [
        ("Tensor.backward", True),
        ("Tensor.backward", False),
        ("autograd.backward", True),
        ("autograd.backward", False),
        ("autograd.grad", False),  # torch has reentrant checkpoints for backward() only
    ],
)
def test_checkpointed_calls_see_the_block_in_the_backward_pass(use_reentrant, how):
    w = weights(M)

    def gradients(run):
        inputs = qkv(requires_grad=True)
        with co.nn.quadrature(w):
            loss = run(*inputs).square().sum()
            if how == "Tensor.backward":
                loss.backward()
            elif how == "autograd.backward":
                torch.autograd.backward([loss], [torch.ones_like(loss)])
            else:
                return torch.autograd.grad(loss, inputs)
        return [x.grad for x in inputs]

    inputs = qkv(requires_grad=True)
    expected = torch.autograd.grad(formula(*inputs, w).square().sum(), inputs)
    actual = gradients(lambda *xs: checkpoint(lambda *ys: SDPA(*ys), *xs, use_reentrant=use_reentrant))
    for a, e in zip(actual, expected, strict=True):
        close(a, e, 1e-11)


def test_backward_inside_a_block_says_what_torch_says():
    x = torch.ones(3)
    with warnings.catch_warnings(), co.nn.quadrature(weights(M)):
        warnings.filterwarnings("ignore", message="quadrature weights")
        with pytest.raises(RuntimeError, match="does not require grad"):
            x.sum().backward()
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
            x.clone().requires_grad_().exp().backward()
        y = x.clone().requires_grad_()
        (unused,) = torch.autograd.grad(y.exp().sum(), [x.clone().requires_grad_()], allow_unused=True)
        assert unused is None
        z = y.exp()
        z.sum().backward(inputs=[y])
        first = torch.autograd.grad(y.pow(3).sum(), y, create_graph=True)[0]
        assert torch.equal(torch.autograd.grad(first.sum(), y)[0], 6 * y)
    assert torch.equal(y.grad, y.exp())


@pytest.mark.parametrize(
    "w, mask",
    [
        (weights(M), torch.tensor([True] * 4 + [False] * 3)),
        (weights(M), torch.rand(B, M, generator=torch.Generator().manual_seed(5)) < 0.7),
        (weights(B, M), torch.rand(B, M, generator=torch.Generator().manual_seed(5)) < 0.7),
        (weights(B, H, M), torch.rand(B, M, generator=torch.Generator().manual_seed(5)) < 0.7),
    ],
)
def test_a_mask_takes_padding_out_even_if_it_is_nan(w, mask):
    mask = mask.clone()
    mask[..., 0] = True
    q, k, v = qkv()
    full = mask.expand(B, M)[:, None]
    w3 = w if w.dim() == 3 else w.view(-1, 1, M)
    expected = formula(q, k, v, torch.where(full, w3, 0.0))
    hole = ~full[..., None]
    with co.nn.quadrature(w, mask):
        out = SDPA(q, k.masked_fill(hole, math.nan), v.masked_fill(hole, math.nan))
    close(out, expected)


@pytest.mark.parametrize(
    "mask, error, match",
    [
        ([True], TypeError, r"mask must be a bool tensor \(True where there is a point\), got list"),
        (torch.ones(M), TypeError, r"mask must be a bool tensor .*, got torch.float32"),
        (
            torch.ones(4, dtype=torch.bool),
            ValueError,
            r"mask must have shape \(7,\) or \(B, 7\) .*, got \(4,\)",
        ),
        (torch.ones(3, M, dtype=torch.bool), ValueError, r"for weights of shape \(2, 7\), got \(3, 7\)"),
        (
            torch.ones(M, dtype=torch.bool, device="meta"),
            ValueError,
            "mask must be on the device of weights, cpu",
        ),
    ],
)
def test_bad_masks_are_named(mask, error, match):
    with pytest.raises(error, match=match), co.nn.quadrature(weights(B, M), mask):
        pass


def test_what_cannot_take_weights_is_refused_by_name():
    q, k, v = qkv()
    with co.nn.quadrature(weights(3, M)):
        match = (
            r"weights of shape \(3, 7\) must be \(B, M\) of the attention call, whose query is \(2, 4, 5, 6\)"
        )
        with pytest.raises(ValueError, match=match):
            SDPA(q, k, v)
    with co.nn.quadrature(weights(B, H, M)), pytest.raises(ValueError, match=r"must be \(B, H, M\) of the"):
        SDPA(q[:, 0], k[:, 0], v[:, 0])
    with co.nn.quadrature(weights(M)):
        with pytest.raises(TypeError, match=r"attn_mask must be a bool or float tensor .* got a CausalBias"):
            SDPA(q, k, v, causal_lower_right(N, M))
        with pytest.raises(ValueError, match="attn_mask must be None when is_causal=True"):
            SDPA(q, k, v, torch.ones(N, M, dtype=torch.bool), is_causal=True)
        with pytest.raises(
            ValueError, match="key must have a number of heads that divides query's, 4, got 3"
        ):
            SDPA(q, k[:, :3], v[:, :3], enable_gqa=True)
        nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
        with pytest.raises(ValueError, match="nested tensors have no one length"):
            SDPA(nested, nested, nested)
        SDPA(q, k, v)
