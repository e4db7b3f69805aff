"""Every operator under torch.compile: one graph, static and dynamic sizes, no compilation for every N."""

from __future__ import annotations

import pytest
import torch
from helpers import draw
from position_helpers import points
from torch._dynamo.testing import CompileCounterWithBackend

import continuum_ops as co
from continuum_ops import reference


def _qkv(n, m=None):
    m = n if m is None else m
    return draw((2, 3, n, 4), seed=n), draw((2, 3, m, 4), seed=n + 1), draw((2, 3, m, 5), seed=n + 2)


def _on_grid(n):
    return tuple(draw((2, n, n, 2, 3), seed=n + i) for i in range(3))


def _weights(n):
    return draw((n,), seed=n, positive=True)


def _rates():
    return torch.tensor([1.0, 4.0, 9.0])


def _distance(function, q, k, v, x, rate, weights):
    options = {"query_pos": x, "key_pos": x, "rate": rate, "period": (1.0, 2.0), "radius": 0.7}
    return function.continuum_attention(q, k, v, weights, return_lse=True, **options)


def _grid(n, m):
    return co.Grid.uniform((n, m), dtype=torch.float32)


def _grids(function, x, y, v, rate, **options):
    weights = y.axis_weights
    if function is reference:
        x, y, weights = x.points, y.points, y.weights
    return function.position_attention(x, y, v, rate, weights, return_lse=True, **options)


# name: (a function of the package or of its reference and of the arguments, arguments for a size)
OPERATORS = {
    "continuum_attention": (
        lambda co, *a: co.continuum_attention(*a, return_lse=True),
        lambda n: (*_qkv(n, n + 1), _weights(n + 1)),
    ),
    "causal": (lambda co, *a: co.continuum_attention(*a, is_causal=True), _qkv),
    "float mask": (
        lambda co, q, k, v, mask: co.continuum_attention(q, k, v, attn_mask=mask),
        lambda n: (*_qkv(n), draw((n, n), seed=n)),
    ),
    "distance": (_distance, lambda n: (*_qkv(n), points((n, 2), seed=n), _rates(), _weights(n))),
    "position_attention": (
        lambda co, *a: co.position_attention(*a, return_lse=True),
        lambda n: (
            points((n, 2), seed=n),
            points((n + 1, 2)),
            draw((2, n + 1, 3)),
            _rates(),
            _weights(n + 1),
        ),
    ),
    "per sample, radius of a quantile": (
        lambda co, x, y, v, r: co.position_attention(x, y, v, r, radius=co.quantile_radius(x, y, 0.3)),
        lambda n: (points((2, n, 2), seed=n), points((2, n + 1, 2)), draw((2, n + 1, 3)), _rates()),
    ),
    "grids": (_grids, lambda n: (_grid(n, n + 1), _grid(n + 1, n), draw((2, n * n + n, 3)), _rates())),
    "grids within a radius": (
        lambda *a: _grids(*a, radius=0.5),
        lambda n: (_grid(n, n + 1), _grid(n + 1, n), draw((2, n * n + n, 3)), _rates()),
    ),
    # As many patches whatever the resolution: patch_size is a symbol too.
    "patch_attention": (
        lambda co, q, *a: co.patch_attention(q, *a, return_lse=True),
        lambda n: (*_on_grid(n), n // 3, _weights(n * n).view(n, n) / n**2),
    ),
    "patch_attention, the mean": (
        lambda co, q, *a: co.patch_attention(q, *a, (q.shape[1] // 3, q.shape[2] // 3), return_lse=True),
        _on_grid,
    ),
    "galerkin_attention": (
        lambda co, *a: co.galerkin_attention(*a),
        lambda n: (*_qkv(n, n + 1), _weights(n + 1) / 50),
    ),
    "fourier_attention": (lambda co, *a: co.fourier_attention(*a), lambda n: _qkv(n, n + 1)),
}


def _results(f, args):
    """Outputs and the gradient of every tensor."""
    leaves = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    out = f(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    wanted = [t for t in leaves if isinstance(t, torch.Tensor)]
    loss = sum(t.float().sin().sum() for t in out)
    return out, torch.autograd.grad(loss, wanted)


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@pytest.mark.parametrize("name", OPERATORS)
def test_one_graph_and_no_recompilation_when_n_changes(name, dynamic):
    function, make = OPERATORS[name]
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *a: function(co, *a), fullgraph=True, dynamic=dynamic, backend=backend)
    counts = []
    for n in (6, 9, 12):
        args = make(n)
        found = _results(compiled, args)
        expected = _results(lambda *a: function(reference, *a), args)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        counts.append(backend.frame_count)
    # The first sizes are constants if not told otherwise, the second ones make them variables.
    settled = counts[0 if dynamic else 1 :]
    assert len(set(settled)) == 1, counts


def test_quantile_radius():
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(co.quantile_radius, fullgraph=True, backend=backend)
    for n in (6, 9, 12, 17):
        x, y = points((n, 2), seed=n), points((2, n + 1, 2))
        torch.testing.assert_close(compiled(x, y, 0.3), reference.quantile_radius(x, y, 0.3))
    assert backend.frame_count == 2


@pytest.mark.parametrize("batch", [(), (3,)])
def test_opcheck_quantile_radius(batch):
    args = (points((*batch, 5, 2)), points((7, 2)), 0.3, [1.0, float("inf")])
    torch.library.opcheck(torch.ops.continuum_ops.quantile_radius, args)


@pytest.mark.parametrize("finite", [True, False])
def test_opcheck_check_nonnegative(finite):
    args = (points((5,)), "an operator", "weights", finite)
    torch.library.opcheck(torch.ops.continuum_ops.check_nonnegative, args)


def _jvp(f, x):
    return torch.func.jvp(f, (x,), (torch.cos(x),))[1]


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sin().sum())(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sin().sum()))(x),
    "jvp": _jvp,
    "jvp of jvp": lambda f, x: _jvp(lambda x: _jvp(f, x), x),
}


# torch 2.13 does not compile jvp of jvp of a product with a constant, which rate |x - y|^2 is.
@pytest.mark.parametrize(
    ("op", "transform"),
    [("continuum", t) for t in TRANSFORMS] + [("position", t) for t in TRANSFORMS if t != "jvp of jvp"],
)
def test_transforms_inside_a_compiled_function(op, transform):
    torch._dynamo.reset()
    k, v, x = draw((2, 7, 4)), draw((2, 7, 3), seed=1), points((3, 5, 4))

    def f(package):
        if op == "continuum":
            return lambda q: package.continuum_attention(q[..., None, :, :], k, v)
        return lambda q: package.position_attention(q.flatten(0, -2), k[0], v, _rates())

    compiled = torch.compile(lambda x: TRANSFORMS[transform](f(co), x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), TRANSFORMS[transform](f(reference), x), rtol=1e-4, atol=1e-5)
