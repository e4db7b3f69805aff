"""ViT-NO and FANO in numpy, patch by patch as CA B.2 and B.3 state them: what the tests compare with."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn


def drawn(kind_of_model, num_patches, patch_size, modes, **options) -> nn.Module:
    """A small model in float64, every parameter drawn: biases, norms and the final layer too."""
    torch.manual_seed(0)
    settings = {"d_model": 6, "num_heads": 2, "num_layers": 2, "dim_feedforward": 5, "activation": "tanh"}
    settings |= {"scale": 4.0, "dtype": torch.float64, **options}
    model = kind_of_model(
        2, 3, len(num_patches), num_patches=num_patches, patch_size=patch_size, modes=modes, **settings
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def array(tensor) -> NDArray:
    return tensor.detach().numpy()


def patches_of(shape, num_patches):
    """Slices of each patch in row-major order."""
    size = [n // p for n, p in zip(shape, num_patches, strict=True)]
    for index in itertools.product(*map(range, num_patches)):
        yield tuple(slice(i * s, (i + 1) * s) for i, s in zip(index, size, strict=True))


def convolve(kernel: dict[tuple[int, ...], NDArray], u: NDArray, out_channels: int) -> NDArray:
    """What an inverse real transform makes of the kept modes: u (*patch, C), matrices (C, out)."""
    shape = u.shape[:-1]
    axes = tuple(range(len(shape)))
    spectrum = np.fft.rfftn(u, axes=axes)
    out = np.zeros((*spectrum.shape[:-1], out_channels), complex)
    for mode, matrix in kernel.items():
        at = tuple(k % n for k, n in zip(mode, shape, strict=True))
        out[at] = spectrum[at] @ matrix
    return np.fft.irfftn(out, s=shape, axes=axes)


def spectral_conv_kernel(weight, modes) -> dict[tuple[int, ...], NDArray]:
    """Of `SpectralConv`: weight (2^(d-1), *modes, in, out, 2)."""
    w = array(weight)
    kernel, d = {}, len(modes)
    for block, index in itertools.product(range(w.shape[0]), itertools.product(*map(range, modes))):
        mode = tuple(
            i - m if axis < d - 1 and (block >> (d - 2 - axis)) & 1 else i
            for axis, (i, m) in enumerate(zip(index, modes, strict=True))
        )
        kernel[mode] = w[(block, *index)][..., 0] + 1j * w[(block, *index)][..., 1]
    return kernel


def fourier_attention_kernels(weight, modes) -> list[dict[tuple[int, ...], NDArray]]:
    """Of Q, K and V of `FourierPatchAttention`: (3, 2 modes_1, .., modes_d, out, 2, in)."""
    w = array(weight)
    sizes = [2 * m for m in modes[:-1]] + [modes[-1]]
    kernels: list[dict[tuple[int, ...], NDArray]] = [{}, {}, {}]
    for which, index in itertools.product(range(3), itertools.product(*map(range, sizes))):
        mode = tuple(i if i < m else i - 2 * m for i, m in zip(index, modes, strict=True))
        part = w[(which, *index)]
        kernels[which][mode] = (part[:, 0] + 1j * part[:, 1]).T
    return kernels


def linear(layer: nn.Linear, v: NDArray) -> NDArray:
    return v @ array(layer.weight).T + (0.0 if layer.bias is None else array(layer.bias))


def layer_norm(layer: nn.LayerNorm, v: NDArray) -> NDArray:
    mean, variance = v.mean(-1, keepdims=True), v.var(-1, keepdims=True)
    return (v - mean) / np.sqrt(variance + layer.eps) * array(layer.weight) + array(layer.bias)


def mix_patches(q, k, v, at, heads, w, scale) -> NDArray:
    """Definition 14 with (62): q, k, v (*grid, C), patches `at`, weights (*grid)."""
    out = np.zeros(v.shape)
    width = v.shape[-1] // heads
    for h in range(heads):
        c = slice(h * width, (h + 1) * width)
        for p in at:
            s = np.array([scale * (w[p][..., None] * q[p][..., c] * k[j][..., c]).sum() for j in at])
            a = np.exp(s - s.max())
            out[(*p, c)] = sum(x * v[j][..., c] for x, j in zip(a / a.sum(), at, strict=True))
    return out


def encode(layer, v: NDArray, attention) -> NDArray:
    """CA (10) with W1 = W2 = I, f = tanh."""

    def feed_forward(x: NDArray) -> NDArray:
        return linear(layer.linear2, np.tanh(linear(layer.linear1, x)))

    if layer.norm_first:
        v = v + attention(layer_norm(layer.norm1, v))
        return v + feed_forward(layer_norm(layer.norm2, v))
    v = layer_norm(layer.norm1, v + attention(v))
    return layer_norm(layer.norm2, v + feed_forward(v))


def finish(model, v: NDArray) -> NDArray:
    """(27), the final spectral layer, and the axes of the grid made one."""
    z = linear(model.projection, v)
    if model.final_spectral is not None:
        kernel = spectral_conv_kernel(model.final_spectral.weight, model.final_spectral.modes)
        z = z + convolve(kernel, z, z.shape[-1])
    return z.reshape(-1, z.shape[-1])


def inputs(u, grid) -> NDArray:
    """(14): (u, x) on the grid, of one sample (N, C)."""
    return np.concatenate([array(u), array(grid.points)], -1).reshape(*grid.shape, -1)


def vitno(model, u, grid, w, heads: int, scale: float) -> NDArray:
    """One sample u (N, C); weights w (*grid) of sum 1."""
    at = list(patches_of(grid.shape, model.num_patches))
    x = inputs(u, grid)
    v = np.zeros((*grid.shape, model.lift.out_channels))
    kernel = spectral_conv_kernel(model.lift.weight, model.lift.modes)
    for p in at:
        v[p] = convolve(kernel, x[p], v.shape[-1])
    for layer in model.layers:
        a = layer.attention

        def attention(x, a=a):
            q, k, y = (linear(m, x) for m in (a.q_proj, a.k_proj, a.v_proj))
            return linear(a.out_proj, mix_patches(q, k, y, at, heads, w, scale))

        v = encode(layer, v, attention)
    return finish(model, v)


def fano(model, u, grid, w, heads: int, scale: float) -> NDArray:
    """One sample u (N, C); weights w (*grid) of sum 1."""
    at = list(patches_of(grid.shape, model.num_patches))
    v = linear(model.lift, inputs(u, grid))
    for layer in model.layers:
        a = layer.attention
        kernels = fourier_attention_kernels(a.in_proj_weight, a.modes)

        def attention(x, a=a, kernels=kernels):
            q, k, y = (np.zeros(x.shape) for _ in range(3))
            for out, kernel in zip((q, k, y), kernels, strict=True):
                for p in at:
                    out[p] = convolve(kernel, x[p], x.shape[-1])
            return linear(a.out_proj, mix_patches(q, k, y, at, heads, w, scale))

        v = encode(layer, v, attention)
    return finish(model, v)


def order(coarse: float, fine: float, ratio: int) -> float:
    """Observed order of convergence of differences between grids refined by `ratio`."""
    return math.log(coarse / fine) / math.log(ratio)
