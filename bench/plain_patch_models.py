"""ViT-NO and FANO in plain PyTorch, the usual way: rearranged patches, rfft2 / irfft2, einsum, softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from continuum_ops import Grid


def forward(model: nn.Module, u: Tensor, grid: Grid) -> Tensor:
    """What a 2-D `ViTNO` or `FANO` with post-norm and equal weights computes, from the same parameters."""
    rows, columns = model.num_patches
    height, width = (n // p for n, p in zip(grid.shape, (rows, columns), strict=True))
    batch = u.shape[0]
    points = grid.points.to(u.dtype).expand(batch, -1, -1)
    v = torch.cat([u, points], -1).view(batch, rows, height, columns, width, -1)
    v = v.permute(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, height, width, -1)
    if isinstance(model.lift, nn.Linear):
        v = model.lift(v)
    else:
        v = spectral(v, spectral_conv_weight(model.lift.weight))
    for layer in model.layers:
        attention = layer.attention
        if hasattr(attention, "in_proj_weight"):
            q, k, y = (spectral(v, w) for w in torch.view_as_complex(_last(attention.in_proj_weight)))
            factor = attention.factor
        else:
            q, k, y = attention.q_proj(v), attention.k_proj(v), attention.v_proj(v)
            factor = attention.scale
        q, k, y = (heads(x, attention.num_heads) for x in (q, k, y))
        scores = torch.einsum("bhpc,bhjc->bhpj", q, k) * (factor / len(grid))
        out = torch.einsum("bhpj,bhjc->bhpc", scores.softmax(-1), y)
        out = out.unflatten(-1, (height, width, -1)).permute(0, 2, 3, 4, 1, 5).flatten(-2)
        v = layer.norm1(v + attention.out_proj(out))
        v = layer.norm2(v + layer.linear2(layer.activation(layer.linear1(v))))
    v = v.view(batch, rows, columns, height, width, -1).permute(0, 1, 3, 2, 4, 5)
    z = model.projection(v.reshape(batch, *grid.shape, -1))
    if model.final_spectral is not None:
        whole = spectral(z.unsqueeze(1), spectral_conv_weight(model.final_spectral.weight))
        z = z + whole.squeeze(1)
    return z.flatten(1, 2)


def heads(x: Tensor, number: int) -> Tensor:
    """(B, P, h, w, H D) -> (B, H, P, h w D)."""
    return x.unflatten(-1, (number, -1)).permute(0, 4, 1, 2, 3, 5).flatten(3)


def spectral(v: Tensor, weight: Tensor) -> Tensor:
    """(B, P, h, w, C) -> (B, P, h, w, E): weight (2 m, m', C, E), rows 0 .. m - 1 and -m .. -1."""
    m, columns = weight.shape[0] // 2, weight.shape[1]
    spectrum = torch.fft.rfft2(v, dim=(2, 3), norm="forward")
    out = spectrum.new_zeros(*spectrum.shape[:-1], weight.shape[-1])
    for there, part in ((slice(0, m), weight[:m]), (slice(-m, None), weight[m:])):
        out[:, :, there, :columns] = torch.einsum("bpxyi,xyio->bpxyo", spectrum[:, :, there, :columns], part)
    return torch.fft.irfft2(out, s=v.shape[2:4], dim=(2, 3), norm="forward")


def spectral_conv_weight(weight: Tensor) -> Tensor:
    """Of a `SpectralConv`: (2, m, m', C, E, 2) -> (2 m, m', C, E)."""
    return torch.view_as_complex(weight).flatten(0, 1)


def _last(weight: Tensor) -> Tensor:
    """Of a `FourierPatchAttention`: (3, 2 m, m', E, 2, C) -> (3, 2 m, m', C, E, 2)."""
    return weight.permute(0, 1, 2, 5, 3, 4).contiguous()


def parity(model: nn.Module, grid: Grid) -> float:
    """Largest error of a float64 model and its gradients against this file, relative to the largest entry."""
    torch.manual_seed(1)
    u = torch.randn(2, len(grid), model.in_channels, dtype=torch.float64)
    results = []
    for run in (lambda: model(u, grid), lambda: forward(model, u, grid)):
        model.zero_grad()
        out = run()
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
    scale = [max(b.abs().max().item(), 1e-6) for b in results[1]]
    worst = (((a - b).abs().max() / s).item() for a, b, s in zip(*results, scale, strict=True))
    return max(worst, default=math.nan)
