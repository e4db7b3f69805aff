"""Position attention of the CUDA kernels, by the shim or on a GPU, against the formula in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from cuda_on_cpu import shim
from torch import Tensor

import continuum_ops.ops  # noqa: F401  (the operators)

OPS = torch.ops.continuum_ops
GRADS = ("query_pos", "key_pos", "value", "rate", "weights")


class Inputs(NamedTuple):
    """As in the schema."""

    query_pos: Tensor
    key_pos: Tensor
    value: Tensor
    rate: Tensor
    weights: Tensor | None = None
    radius: Tensor | None = None
    period: list[float] | None = None

    @property
    def accumulation(self) -> torch.dtype:
        return torch.float64 if self.value.dtype == torch.float64 else torch.float32

    @property
    def groups(self) -> int:
        geometry = [t for t in (self.query_pos, self.key_pos, self.weights, self.radius) if t is not None]
        return 1 if all(t.shape[0] == 1 for t in geometry) else self.value.shape[0]


def inputs(
    *,
    batch=2,
    heads=2,
    value_heads=1,
    n=20,
    m=70,
    d=2,
    channels=5,
    dtype=torch.float32,
    geometries=1,
    weights=0,
    radius=0,
    period=None,
    rate=10.0,
    seed=0,
) -> Inputs:
    """Points in the unit cube; weights, radius: 0 (none), 1 or the batch."""
    g = torch.Generator().manual_seed(seed)
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64).to(accumulation)

    return Inputs(
        uniform(geometries, n, d),
        uniform(geometries, m, d),
        torch.randn(batch, value_heads, m, channels, generator=g, dtype=torch.float64).to(dtype),
        uniform(heads) * rate,
        uniform(weights, m) + 0.01 if weights else None,
        0.2 + 0.3 * uniform(radius, n) if radius else None,
        period,
    )


def steep(case: str) -> Inputs:
    """-rate |x - y|^2 is hundreds for the nearest key already, and of the same size for some others.

    Coordinates are multiples of 2^-14 and weights over many decades powers of 2: squared distances and those
    logarithms are exact.
    """
    options = {
        "weights": {"weights": 1},
        "no weights": {},
        "radius": {"weights": 2, "radius": 2},
        "period": {"weights": 1, "geometries": 2, "period": [0.125, float("inf")]},
        "graded": {"weights": 1},
        "nearest comes last": {"d": 1, "weights": 1},
        "dead keys are nearer": {"weights": 1},
    }
    x = inputs(n=30, m=70, rate=1e5, **options[case])
    x = x._replace(query_pos=(x.query_pos * 256).floor() / 8192, key_pos=(x.key_pos * 256).floor() / 8192)
    x.query_pos[..., 0] += 2**-14  # no two points are half a period apart
    x.key_pos[..., 0] += 2 / 32 if case == "period" else 4 / 32
    if case == "radius":
        x.radius.mul_(2).add_(3.5).div_(32)
    elif case == "graded":
        x.weights[:] = 2.0 ** -torch.linspace(0, 100, 70).round()
    elif case == "nearest comes last":
        x.key_pos[..., 0] = torch.arange(197, 127, -1) / 1024
        x.weights[:, :35], x.weights[:, 35:] = 2.0**60, 2.0**-80
    elif case == "dead keys are nearer":
        x.key_pos[:, :30], x.weights[:, :30] = x.query_pos, 0
    return x


STEEP = ("weights", "no weights", "radius", "period", "graded", "nearest comes last", "dead keys are nearer")


def equidistant() -> tuple[Inputs, Tensor, Tensor]:
    """Two keys 1000 to the left and the right of the query, a farther one, and a dead one where the query is.

    out is (v_0 + 3 v_1) / 4, lse log 4 - 1e6 rate, whatever the rate.
    """
    rate = torch.tensor([1e5, 1.0])
    value = torch.tensor([[1.0, -2.0], [3.0, 5.0], [7e3, 1e4], [torch.nan, torch.nan]])[None, None]
    places = torch.tensor([1000.0, -1000.0, 1001.0, 0.0])[None, :, None]
    weights = torch.tensor([[1.0, 3.0, 9.0, 0.0]])
    out = (value[..., :1, :] + 3 * value[..., 1:2, :]) / 4
    lse = torch.log(torch.tensor(4.0, dtype=torch.float64)) - 1e6 * rate.double()
    return (
        Inputs(torch.zeros(1, 1, 1), places, value, rate, weights),
        out.expand(1, 2, 1, 2),
        lse[None, :, None],
    )


def grads_for(x: Inputs, seed: int = 9) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    batch, heads, n, channels = x.value.shape[0], x.rate.shape[0], x.query_pos.shape[-2], x.value.shape[-1]
    out = torch.randn(batch, heads, n, channels, generator=g, dtype=torch.float64).to(x.value.dtype)
    return out, torch.randn(x.groups, heads, n, generator=g, dtype=torch.float64).to(x.accumulation)


def exact(x: Inputs, grad_out: Tensor, grad_lse: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The formula and its derivatives, and the same sums over absolute values, the measure of rounding."""
    batch, heads = x.value.shape[0], x.rate.shape[0]
    points = [p.double().expand(batch, -1, -1) for p in (x.query_pos, x.key_pos)]
    w = torch.ones(1, x.key_pos.shape[-2]) if x.weights is None else x.weights
    w = w.double().expand(batch, -1)
    dead = w == 0
    points[1] = points[1].masked_fill(dead[..., None], 0.0)
    v = x.value.double().expand(-1, heads, -1, -1).masked_fill(dead[:, None, :, None], 0.0)
    rate = x.rate.double()[:, None, None]
    step = points[0][:, :, None] - points[1][:, None]
    if x.period is not None:
        for axis, length in enumerate(x.period):
            if length != float("inf"):
                step[..., axis] -= (step[..., axis] / length).round() * length
    d2 = step.square().sum(-1)[:, None]
    keep = ~dead[:, None, None, :] & torch.ones_like(d2, dtype=torch.bool)
    if x.radius is not None:
        reach = x.radius.double().square() * (1 + 8 * torch.finfo(x.accumulation).eps)
        keep &= d2 <= reach.expand(batch, -1)[:, None, :, None]
    s = (-rate * d2 + w.masked_fill(dead, 1.0).log()[:, None, None]).masked_fill(~keep, -torch.inf)
    lse = s.logsumexp(-1)
    live = ~lse.isneginf()[..., None]
    p = torch.where(live, (s - lse[..., None].masked_fill(~live, 0.0)).exp(), 0.0)
    g, gl = grad_out.double(), grad_lse.double()
    gl = torch.where(
        live,
        (gl if x.groups == batch else torch.cat([gl, gl.new_zeros(batch - 1, *gl.shape[1:])]))[..., None],
        0.0,
    )
    gp = g @ v.mT
    row = (p * gp).sum(-1, keepdim=True)
    size = p * (gp.abs() + row.abs() + gl.abs())
    result = {"out": p @ v, "lse": lse[: x.groups]}
    terms = {"out": v.abs().amax().reshape(1) if v.numel() else v.new_zeros(1), "lse": lse.new_ones(1)}
    like = dict(zip(GRADS, x[:5], strict=True))
    for into, gs, sign in ((result, p * (gp - row + gl), 1.0), (terms, size, torch.nan)):
        a = (lambda t: t) if sign == 1.0 else torch.abs
        gx = torch.einsum("bhnm,bnmd,h->bnmd", gs, a(2 * step), rate[:, 0, 0])
        grads = {
            "query_pos": -gx.sum(2),
            "key_pos": gx.sum(1),
            "value": p.mT @ a(g),
            "rate": -(gs * d2).sum((0, 2, 3)),
            "weights": torch.where(dead, 0.0, gs.sum((1, 2)) / w.masked_fill(dead, 1.0)),
        }
        for name, grad in grads.items():
            if like[name] is not None:
                into[name] = grad.sum_to_size(like[name].shape)
    return result, terms


def run(
    device: str, x: Inputs, grad_out: Tensor, grad_lse: Tensor, *, seed=0, tf32=False
) -> dict[str, Tensor]:
    """Outputs and every gradient, by the registered operators, on the CPU."""
    if device == "gpu":
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        try:
            return _run_gpu(x, grad_out, grad_lse)
        finally:
            torch.set_float32_matmul_precision(before)
    shim().set_seed(seed)
    out, lse, stats = OPS.position_attention_cuda_forward(*x, tf32)
    needs = [t is not None for t in x[:5]]
    grads = OPS.position_attention_cuda_backward(
        grad_out, grad_lse, *x[:5], out, lse, stats, x.radius, x.period, needs, tf32
    )
    return _named(x, out, lse, grads)


def _named(x: Inputs, out: Tensor, lse: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    result = {"out": out, "lse": lse, **dict(zip(GRADS, grads, strict=True))}
    if x.weights is None:
        assert result.pop("weights").shape == (0,)
    return {name: t.cpu() for name, t in result.items()}


def _on_gpu(t: Tensor | None) -> Tensor | None:
    """With the same strides and offset in a copy of the whole storage."""
    if t is None:
        return None
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return whole.cuda().as_strided(t.shape, t.stride(), t.storage_offset())


def _run_gpu(x: Inputs, grad_out: Tensor, grad_lse: Tensor) -> dict[str, Tensor]:
    moved = Inputs(*(t if isinstance(t, list) else _on_gpu(t) for t in x))
    out, lse, stats = OPS.position_attention_forward(*moved)
    needs = [t is not None for t in x[:5]]
    grads = OPS.position_attention_backward(
        _on_gpu(grad_out), _on_gpu(grad_lse), *moved[:5], out, lse, stats, moved.radius, x.period, needs
    )
    return _named(x, out, lse, grads)


def check(device: str, x: Inputs, *, seed=0, tf32=False, grad_out: Tensor | None = None) -> dict[str, Tensor]:
    """Every result within 8 eps of the sum of its terms' sizes, for the output of max|value|."""
    drawn, grad_lse = grads_for(x)
    grad_out = drawn if grad_out is None else grad_out
    result = run(device, x, grad_out, grad_lse, seed=seed, tf32=tf32)
    true, terms = exact(x, grad_out, grad_lse)
    eps = 2.0**-10 if tf32 else torch.finfo(x.value.dtype).eps
    assert result.keys() == true.keys()
    for name, actual in result.items():
        assert actual.shape == true[name].shape, f"{name}: shape {tuple(actual.shape)}"
        if actual.numel() == 0:
            continue
        infinite = true[name].isinf()
        assert torch.equal(actual.double().isinf(), infinite), name
        error = (actual.double() - true[name]).masked_fill(infinite, 0.0).abs().max().item()
        scale = eps if name != "lse" else torch.finfo(x.accumulation).eps
        if name == "lse":
            size = max(1.0, true[name].masked_fill(infinite, 0.0).abs().max().item())
        else:
            size = terms[name].abs().max().item()
        assert error <= 8 * scale * size, f"{name}: error {error:.2e}, allowed {8 * scale * size:.2e}"
    return result
