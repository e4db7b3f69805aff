"""The C++ entry points, past the public functions' checks, refuse what they would read outside a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import continuum_ops as co

OPS = torch.ops.continuum_ops
pytestmark = pytest.mark.skipif(
    not co.backends()["cpu"].startswith("C++"), reason="the extension is not built"
)
F = torch.float32


def continuum() -> tuple[dict[str, Any], Any]:
    q, k, v, w = torch.randn(2, 5, 4), torch.randn(2, 7, 4), torch.randn(2, 7, 3), torch.rand(2, 7)
    absent, options = (None,) * 6, (None, 1.0, 0.0, False)
    out, lse, stats = OPS.continuum_attention_forward(q, k, v, w, *absent, *options)
    given = {"grad_out": torch.ones_like(out), "grad_lse": torch.ones_like(lse), "out": out, "stats": stats}

    def call(grad_out: Tensor, grad_lse: Tensor, out: Tensor, stats: Tensor) -> Any:
        return OPS.continuum_attention_backward(
            grad_out, grad_lse, q, k, v, w, *absent, out, stats, *options, True, False, False
        )

    return given, call


def patch() -> tuple[dict[str, Any], Any]:
    q, k, v, w = torch.randn(2, 6, 1, 4), torch.randn(2, 4, 1, 4), torch.randn(2, 4, 1, 3), torch.rand(1, 6)
    out, lse, probabilities = OPS.patch_attention_forward(q, k, v, w, [2], None)
    given = {
        "grad_out": torch.ones_like(out),
        "grad_lse": torch.ones_like(lse),
        "probabilities": probabilities,
    }

    def call(grad_out: Tensor, grad_lse: Tensor, probabilities: Tensor) -> Any:
        return OPS.patch_attention_backward(
            grad_out, grad_lse, q, k, v, w, lse, probabilities, [2], None, [True] * 4
        )

    return given, call


def position() -> tuple[dict[str, Any], Any]:
    x, y, value = torch.rand(1, 5, 2), torch.rand(1, 7, 2), torch.randn(2, 1, 7, 3)
    rate, w = torch.rand(2), torch.rand(1, 7)
    out, lse, stats = OPS.position_attention_forward(x, y, value, rate, w, None, None)
    given = {"grad_out": torch.ones_like(out), "grad_lse": torch.ones_like(lse), "out": out, "stats": stats}

    def call(grad_out: Tensor, grad_lse: Tensor, out: Tensor, stats: Tensor) -> Any:
        return OPS.position_attention_backward(
            grad_out, grad_lse, x, y, value, rate, w, out, lse, stats, None, None, [True] * 5
        )

    return given, call


def galerkin() -> tuple[dict[str, Any], Any]:
    q, k, v = torch.randn(2, 5, 4), torch.randn(2, 7, 4), torch.randn(2, 7, 3)

    def call(grad_out: Tensor) -> Any:
        return OPS.galerkin_attention_small_backward(grad_out, q, k, v, None, False)

    return {"grad_out": torch.ones(2, 5, 3)}, call


@pytest.mark.parametrize("make", [continuum, patch, position, galerkin])
@pytest.mark.parametrize("change", ["shorter", "empty", "scalar", "batch", "dtype"])
def test_gradients_and_results_of_other_sizes(make: Any, change: str) -> None:
    given, call = make()
    call(**given)
    for name, tensor in given.items():
        other = {
            "shorter": lambda t: t[..., :-1].contiguous(),
            "empty": lambda t: t.new_empty(0),
            "scalar": lambda t: t.new_zeros(()),
            "batch": lambda t: t[:1].expand(3, *t.shape[1:]).contiguous(),
            "dtype": lambda t: t.double(),
        }[change](tensor)
        with pytest.raises((RuntimeError, ValueError), match=f"{name}|out and stats|leading dim"):
            call(**{**given, name: other})


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_other_numbers_of_dimensions_than_query(shape: tuple[int, ...], place: int) -> None:
    tensors = [torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 4)]
    tensors[place] = torch.ones(shape)
    with pytest.raises(RuntimeError, match=r"leading dimensions|as many dimensions|at least 2|one dtype"):
        OPS.continuum_attention_forward(*tensors, *(None,) * 8, 1.0, 0.0, False)
    with pytest.raises(RuntimeError, match="as many dimensions, at least 2"):
        OPS.galerkin_attention_small(*tensors, None)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_leading_dimensions_of_one(place: int) -> None:
    """Found by the fuzzer: the gradient of a tensor that leads share was written for each of them."""
    sizes = [(2, 5, 4), (2, 7, 4), (2, 7, 3)]
    sizes[place] = (1, *sizes[place][1:])
    tensors = [torch.ones(size) for size in sizes]
    with pytest.raises(RuntimeError, match="leading dimensions"):
        OPS.galerkin_attention_small(*tensors, None)
    with pytest.raises(RuntimeError, match="leading dimensions"):
        OPS.galerkin_attention_small_backward(torch.ones(2, 5, 3), *tensors, None, False)


def test_a_copy_of_a_mask_of_keys_is_the_same_mask():
    """Hooks on saved tensors, as those that offload them, may hand the backward contiguous copies."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for n in (5, 9, 9))
    q, weights = q.requires_grad_(), torch.rand(9, generator=generator)
    keep = torch.ones(9, dtype=torch.bool)
    keep[weights.argmax()] = False  # the largest weight is that of a removed key
    mask = keep.expand(5, 9)
    expected = ((q @ k.mT / 8**0.5 + weights.log()).masked_fill(~mask, -torch.inf).softmax(-1) @ v).sum()
    (true,) = torch.autograd.grad(expected, q)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t
    ):
        out = co.continuum_attention(q, k, v, weights, attn_mask=mask)
    (grad,) = torch.autograd.grad(out.sum(), q)
    torch.testing.assert_close(grad, true, rtol=0, atol=1e-5)
