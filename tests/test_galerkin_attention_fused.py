"""The operator of the fused nn.GalerkinAttention where it is composed of torch's own, and its switch.

Its kernel: test_galerkin_attention_cuda.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers import draw
from test_galerkin_attention_layer import B, M, formula, inputs, make
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from triton_support import ROOT

from continuum_ops.nn import GalerkinEncoderLayer
from continuum_ops.ops import _galerkin_attention_fused as fused

F64 = torch.float64
gram = torch.ops.continuum_ops.galerkin_gram


@pytest.fixture
def on_cpu(monkeypatch):
    """nn.GalerkinAttention takes the operator on the CPU too; what it was called with."""
    calls = []
    attention = fused.attention
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    monkeypatch.setattr(fused, "attention", lambda *args: (calls.append(args), attention(*args))[1])
    return calls


def tensors(dtype=F64, norms="kv", pos=True, weights=True):
    shapes = {"k": (2, 3), "v": (2, 4)}
    return [
        draw((2, 2, 5, 3), dtype, 1),
        draw((2, 2, 5, 4), dtype, 2),
        draw((1, 5, 2), torch.promote_types(dtype, torch.float32), 3) if pos else None,
        draw((2, 1, 5), torch.promote_types(dtype, torch.float32), 4, positive=True) if weights else None,
        *(1 + draw(shapes[s], dtype, 5 + i) if s in norms else None for i, s in enumerate("kkvv")),
    ]


@pytest.mark.parametrize(
    "options", [{}, {"norms": "k"}, {"norms": "", "pos": False}, {"weights": False}], ids=str
)
def test_derivatives(options):
    given = tensors(**options)
    leaves = [t.requires_grad_() for t in given if t is not None]

    def function(*leaves):
        left = iter(leaves)
        return gram(*(None if t is None else next(left) for t in given), 1e-5)

    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    given = [t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t for t in tensors(dtype)]
    opcheck(gram, ([t.requires_grad_() for t in given] + [1e-5]))
    opcheck(gram, (*tensors(dtype, pos=False, weights=False), 1e-5))
    grad = draw((2, 2, 5, 6), torch.promote_types(dtype, torch.float32), 9)
    needs = [True, True, False, True, True, False, True, True]
    opcheck(
        torch.ops.continuum_ops.galerkin_gram_backward,
        (grad, *(t.detach() for t in given), 1e-5, needs),
    )


@pytest.mark.parametrize("kind", ["galerkin", "fourier"])
def test_the_layer_is_the_formula(kind, on_cpu):
    layer, (x, y, x_pos, y_pos) = make(kind), inputs()
    w = draw((B, M), F64, 5, positive=True)
    out = layer(x, y, query_pos=x_pos, key_pos=y_pos, weights=w)
    true = formula(layer, x, y, x_pos, y_pos, w.unsqueeze(1))
    torch.testing.assert_close(out, true, rtol=1e-12, atol=1e-12)
    assert len(on_cpu) == 1


def test_second_derivatives_of_the_layer(on_cpu):
    layer, (x, y, x_pos, y_pos) = make("galerkin"), inputs(3, 4)
    leaves = [t.requires_grad_() for t in (x, y, x_pos, y_pos, draw((4,), F64, 5, positive=True))]

    def function(x, y, x_pos, y_pos, w):
        return layer(x, y, query_pos=x_pos, key_pos=y_pos, weights=w)

    assert gradgradcheck(function, leaves, fast_mode=True)
    assert on_cpu


@pytest.mark.parametrize(
    "kind, options", [("galerkin", {"normalize": False}), ("linear", {}), ("softmax", {})]
)
def test_layers_that_have_nothing_to_fuse(kind, options, on_cpu):
    layer, (x, _, x_pos, _) = make(kind, **options), inputs()
    layer(x, query_pos=x_pos)
    assert on_cpu == []


def test_transforms_go_the_usual_way(on_cpu):
    layer, (x, _, x_pos, _) = make("galerkin"), inputs()
    mapped = torch.func.vmap(lambda u: layer(u[None], query_pos=x_pos)[0])(x)
    assert on_cpu == []
    torch.testing.assert_close(mapped, layer(x, query_pos=x_pos), rtol=1e-12, atol=1e-12)
    assert len(on_cpu) == 1


def test_dead_keys_have_no_gradient(on_cpu):
    given = tensors()
    given[3][..., 1] = 0
    given[0][..., 1, :] = float("nan")
    leaves = [t.requires_grad_() for t in given]
    grads = torch.autograd.grad(gram(*leaves, 1e-5).square().sum(), leaves)
    assert all(bool(g.isfinite().all()) for g in grads)
    assert all(not g.any() for g in (grads[0][..., 1, :], grads[1][..., 1, :], grads[3][..., 1]))


def test_errors_are_those_of_the_usual_way(on_cpu):
    layer, (x, _, x_pos, _) = make("galerkin"), inputs()
    n = x.shape[1]
    with pytest.raises(ValueError, match="weights must be >= 0 and finite, got -1"):
        layer(x, query_pos=x_pos, weights=-torch.ones(n, dtype=F64))
    with pytest.raises(TypeError, match=r"weights must be floating point, got torch\.int64"):
        layer(x, query_pos=x_pos, weights=torch.ones(n, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"key_pos must have shape \(7, 2\)"):
        layer(x, query_pos=x_pos, key_pos=x_pos[:3])
    with pytest.raises(ValueError, match=r"key_pos must have shape \(3, 2\)"):  # for the rows of value
        layer(x, value=x[:, :3], query_pos=x_pos)


def test_compile_fullgraph(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    layer = GalerkinEncoderLayer(6, 2, coord_dim=2, dtype=F64)
    x, _, x_pos, _ = inputs()
    w = torch.rand(x.shape[1], dtype=F64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, expected = compiled(x, x_pos, weights=w), layer(x, x_pos, weights=w)
    torch.testing.assert_close(found, expected)
    g = draw(found.shape, F64, 9)
    for a, b in zip(
        torch.autograd.grad(found, list(layer.parameters()), g),
        torch.autograd.grad(expected, list(layer.parameters()), g),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("value, devices", [("1", "('cuda',)"), (None, "()")])
def test_the_switch(value, devices):
    environment = {k: v for k, v in os.environ.items() if k != "CONTINUUM_OPS_FUSED_GALERKIN"}
    environment |= {"PYTHONPATH": str(ROOT), "CONTINUUM_OPS_NO_EXT": "1"}
    if value is not None:
        environment["CONTINUUM_OPS_FUSED_GALERKIN"] = value
    code = "from continuum_ops.ops import _galerkin_attention_fused as f; print(f.DEVICES)"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == devices, run.stderr
