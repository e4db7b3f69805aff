"""Spectral convolution against a sum over modes in numpy; low precision, coarse grids, DDP."""

from __future__ import annotations

import itertools
import math
import os
import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import draw

from continuum_ops.nn import SpectralConv

SHAPES = [
    ((16,), (4,)),
    ((15,), (8,)),
    ((16,), (9,)),
    ((12, 9), (3, 5)),
    ((11, 10), (5, 6)),
    ((6, 7, 8), (2, 3, 4)),
]


def make(modes, i=3, o=2, dtype=torch.float64) -> SpectralConv:
    torch.manual_seed(0)
    return SpectralConv(i, o, modes, dtype=dtype)


def by_sums(layer: SpectralConv, u: np.ndarray) -> np.ndarray:
    """Every kept mode by its own sum over the points; the real part taken as an inverse real transform does.

    A mode of the half spectrum stands for itself and its conjugate partner, but for the columns 0 and
    Nyquist of the last axis, where the inverse transform takes the mean with the conjugate of the partner.
    """
    shape, modes = u.shape[1:-1], layer.modes
    w = layer.weight.detach().numpy()
    w = w[..., 0] + 1j * w[..., 1]
    at = np.stack(np.meshgrid(*(np.arange(n) / n for n in shape), indexing="ij"), -1)
    out = np.zeros((*u.shape[:-1], layer.out_channels))
    ranges = []
    for n, m in zip(shape[:-1], modes[:-1], strict=True):
        both = [(f, 0, f) for f in range(m) if f <= (n - 1) // 2]
        both += [(-f, 1, m - f) for f in range(1, m + 1) if f <= n // 2]
        ranges.append(both)
    n = shape[-1]
    for last in range(min(modes[-1], n // 2 + 1)):
        single = last == 0 or 2 * last == n
        for rest in itertools.product(*ranges):
            frequency = np.array([*(r[0] for r in rest), last])
            block = int("".join(str(r[1]) for r in rest) or "0", 2)
            matrix = w[(block, *(r[2] for r in rest), last)]
            wave = np.exp(2j * np.pi * (at @ frequency))
            mode = (
                np.tensordot(u, wave.conj(), (tuple(range(1, u.ndim - 1)), tuple(range(wave.ndim))))
                / wave.size
            )
            field = wave[None, ..., None] * (mode @ matrix).reshape(len(u), *[1] * len(shape), -1)
            out += field.real * (1 if single else 2)
    return out


@pytest.mark.parametrize("shape, modes", SHAPES, ids=str)
def test_is_the_sum_over_its_modes(shape, modes):
    layer, u = make(modes), draw((2, *shape, 3), torch.float64)
    np.testing.assert_allclose(layer(u).detach().numpy(), by_sums(layer, u.numpy()), rtol=0, atol=1e-12)
    u32 = layer.float()(u.float())
    assert u32.dtype == torch.float32
    np.testing.assert_allclose(u32.detach().numpy(), by_sums(layer, u.numpy()), rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [(16, 16), (12, 10), (17, 9), (16, 33), (3, 4), (1, 1)], ids=str)
def test_coarser_grids_drop_the_modes_they_lack(shape):
    """CASES 28: 9 modes and 16 rows: an error to train on, in evaluation each existing mode is used once."""
    layer, u = make((9, 9)), draw((2, *shape, 3), torch.float64)
    if shape[0] < 18 or shape[1] < 16:
        with pytest.raises(ValueError, match=r"modes\[.\] must be at most .* to train on an axis of"):
            layer(u)
    layer.eval()
    np.testing.assert_allclose(layer(u).detach().numpy(), by_sums(layer, u.numpy()), rtol=0, atol=1e-12)


def test_one_function_on_every_resolution():
    """A trigonometric polynomial of the kept modes gives the same function at each resolution."""
    layer = make((3, 3)).eval()

    def at(n: int):
        x, y = torch.meshgrid(*[torch.arange(n, dtype=torch.float64) / n] * 2, indexing="ij")
        waves = [torch.cos(2 * math.pi * (a * x + b * y)) for a, b in ((1, 0), (2, 1), (-1, 2))]
        return layer(torch.stack(waves, -1)[None])

    torch.testing.assert_close(at(64)[:, ::4, ::4], at(16), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [85, 416])
@pytest.mark.parametrize("how", ["autocast", "input", "module"])
def test_low_precision_transforms_in_float32(n, how):
    """CASES 26: bfloat16 at 416 x 416 and 85 x 85; the error is that of rounding input and output."""
    layer = make((4, 4), 1, 1, torch.float32).eval()
    u = draw((1, n, n, 1))
    rounded = u.bfloat16().float() if how != "autocast" else u
    if how == "module":
        layer = layer.bfloat16()
        low = layer(u.bfloat16())
        layer = layer.float()
    elif how == "input":
        low = layer(u.bfloat16())
    else:
        with torch.autocast("cpu", torch.bfloat16):
            low = layer(u)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, layer(rounded).bfloat16())


def test_gradients():
    layer, u = make((2, 3)), draw((1, 5, 6, 3), torch.float64).requires_grad_()

    def function(u, weight):
        return torch.func.functional_call(layer, {"weight": weight}, (u,))

    leaves = (u, layer.weight.detach().requires_grad_())
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    assert layer.weight.is_floating_point() and layer.weight.shape == (2, 2, 3, 3, 2, 2)


def test_compile_fullgraph():
    torch._dynamo.reset()
    layer, u = make((4,)), draw((2, 16, 3), torch.float64)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(u), layer(u))


def test_non_contiguous_input():
    layer, u = make((3, 3)), draw((2, 3, 8, 9), torch.float64).permute(0, 2, 3, 1)
    torch.testing.assert_close(layer(u), layer(u.contiguous()), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3, 2, (1, 2, 3, 4)), "modes must be one number for each of 1 to 3 axes"),
        ((3, 2, (4, 0)), r"modes\[1\] must be at least 1, got 0"),
        ((0, 2, 4), "in_channels must be at least 1, got 0"),
    ],
)
def test_constructor_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        SpectralConv(*arguments)


def test_input_errors():
    with pytest.raises(ValueError, match=r"u must have shape \(B, n_1, n_2, 3\), got \(2, 8, 3\)"):
        make((2, 2))(torch.ones(2, 8, 3))


def _step(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    layer = torch.nn.parallel.DistributedDataParallel(make((2, 3)))
    layer(draw((4, 6, 7, 3), torch.float64)[2 * rank : 2 * rank + 2]).square().mean().backward()
    torch.save(layer.module.weight.grad, os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_give_the_gradient_of_one(tmp_path):
    """CASES 27: imaginary parts too."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_step, (port, str(tmp_path)), nprocs=2)
    layer = make((2, 3))
    layer(draw((4, 6, 7, 3), torch.float64)).square().mean().backward()
    assert layer.weight.grad[..., 1].abs().max() > 0
    for rank in range(2):
        torch.testing.assert_close(
            torch.load(tmp_path / f"{rank}.pt"), layer.weight.grad, rtol=1e-12, atol=1e-14
        )
