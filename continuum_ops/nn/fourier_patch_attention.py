"""Multi-head attention between patches whose Q, K and V are spectral convolutions (FANO)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops._fourier_patch_modes import PatchModes, choose_modes, fold_parseval, from_modes, to_modes
from ..ops.patch_attention import patch_attention

if TYPE_CHECKING:
    from ..distributed import ShardedMesh

# Values that Q, K, V and out_proj are applied to at a time: fresh memory costs more than the arithmetic.
BLOCK = 2**18


class FourierPatchAttention(nn.Module):
    r"""Attention between the patches of a grid, with spectral Q, K and V, in mode space (CA 4.4, B.3).

    The grid is cut into patches of equal shape; on patch p the query of head h is the truncated spectral
    convolution (CA eq. 68, 69)

    .. math::
        q_p = F^{-1}(R^Q_h \cdot F u_p), \qquad (R^Q_h)_\kappa \in C^{head\_dim \times embed\_dim},

    likewise k and v, and the output of the head (CA def. 13, 14, eq. 62, 63)

    .. math::
        s_{pj} = scale \sum_{x} q_p(x) \cdot k_j(x), \qquad
        out_p(x) = \sum_j softmax_j(s_{pj}) \, v_j(x);

    ``out_proj`` maps the concatenated heads pointwise. Each patch is taken as one period; along its last axis
    the modes 0 .. modes - 1 of the half spectrum are kept, along each axis before it 0 .. modes - 1 and
    -modes .. -1, and the transform carries 1/n, as in ``SpectralConv``.

    Q, K and V never leave mode space: scores are sums over the kept modes (Parseval), values are mixed and
    ``out_proj`` is applied there, and one inverse transform ends it. This is the definition to rounding,
    also for modes that an inverse real transform drops in part: its Hermitian projection of column 0 (and of
    Nyquist, where kept), the weights 2 and 1 of the columns and the scale are folded into the weights of Q.
    Scores take P * P numbers per head, P patches.

    With quadrature weights inside the patches the modes are not orthogonal: Q, K and V are then transformed
    back, three inverse transforms, and meet in space, in ``continuum_ops.patch_attention``.

    Patches may be finer or coarser than ``patch_size``: keep their number, and a layer trained on 13 x 13
    patches of 32 x 32 points serves 13 x 13 patches of 16 x 16 or 64 x 64 points. Modes that a coarser
    patch lacks are left out and each other mode is used once.

    The complex matrices are one real parameter ``in_proj_weight`` (3, 2 modes_1, .., 2 modes_{d-1}, modes_d,
    embed_dim, 2, embed_dim): Q, K, V; the frequencies of each axis, 0 .. modes - 1 before -modes .. -1;
    output channels, head by head; real and imaginary parts; input channels. So DistributedDataParallel,
    optimizers and torch.compile see real numbers. All is computed in float32 (float64 for float64 inputs)
    also under autocast; the result then has the autocast dtype, else that of the input.

    Args:
        embed_dim: channels, divisible by num_heads.
        num_heads: number of heads.
        patch_size: points of a patch along each axis, 1 to 3 axes, in training; an int makes a 1-D layer.
        modes: kept modes, one number per axis, or an int for all.
        bias: of out_proj; Q, K and V have none.
        scale: factor of the scores. None: 1 / (points of the grid), the cell volume of the unit domain, so
            that scores are integrals over the unit domain; 1 with quadrature weights, which hold the volumes.
        device, dtype: of the parameters.

    Raises:
        ValueError: a number below 1, other than 1 to 3 axes, embed_dim not divisible by num_heads, more
            modes than the patch has (modes > n // 2 on an axis of n points, n // 2 + 1 on the last one):
            they would overlap.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        patch_size: int | Sequence[int],
        modes: int | Sequence[int],
        *,
        bias: bool = True,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.patch_size = (patch_size,) if isinstance(patch_size, int) else tuple(patch_size)
        d = len(self.patch_size)
        if not 1 <= d <= 3:
            raise ValueError(f"patch_size must be one number for each of 1 to 3 axes, got {patch_size!r}")
        self.modes = (modes,) * d if isinstance(modes, int) else tuple(modes)
        if len(self.modes) != d:
            raise ValueError(f"modes must be one number for each of the {d} axes, got {modes!r}")
        for name, number in (
            ("embed_dim", embed_dim),
            ("num_heads", num_heads),
            *((f"patch_size[{i}]", n) for i, n in enumerate(self.patch_size)),
            *((f"modes[{i}]", m) for i, m in enumerate(self.modes)),
        ):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}")
        for i, (n, m) in enumerate(zip(self.patch_size, self.modes, strict=True)):
            most = n // 2 + 1 if i == d - 1 else n // 2
            if m > most:
                raise ValueError(
                    f"modes[{i}] must be at most {most} for a patch of {n} points along that axis, where "
                    f"more would overlap, got {m}"
                )
        self.embed_dim, self.num_heads, self.scale = embed_dim, num_heads, scale
        self.head_dim = embed_dim // num_heads
        rows = (*(2 * m for m in self.modes[:-1]), self.modes[-1])
        shape = (3, *rows, embed_dim, 2, embed_dim)
        self.in_proj_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Real and imaginary parts of variance 1 / (2 embed_dim); Xavier for out_proj."""
        nn.init.normal_(self.in_proj_weight, std=1.0 / math.sqrt(2 * self.embed_dim))
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        u: Tensor,
        weights: Tensor | None = None,
        *,
        patch_size: int | Sequence[int] | None = None,
        group: ShardedMesh | None = None,
    ) -> Tensor:
        """Attend between the patches of a function on an evenly spaced grid.

        Args:
            u: (B, n_1, .., n_d, embed_dim), channels last.
            weights: quadrature weights >= 0 of the points, (n_1, .., n_d) or (B, n_1, .., n_d). They enter
                the inner products only, as in ``patch_attention``. None: equal weights, in mode space.
            patch_size: points of a patch along each axis, dividing the grid. None: that of the constructor.
            group: a grid that is spread over ranks in boxes of whole patches
                (``continuum_ops.distributed.shard`` with num_patches); u and weights are then this rank's
                part. The modes of the keys and values, or with weights their points, go round a ring.

        Returns:
            (B, n_1, .., n_d, embed_dim).

        Raises:
            ValueError: a shape that does not fit, a grid that the patches do not divide, negative weights.
            TypeError: u or weights is not a floating-point tensor.
        """
        d = len(self.patch_size)
        if not isinstance(u, Tensor) or not u.is_floating_point():
            raise TypeError(f"u must be a floating-point tensor, got {getattr(u, 'dtype', type(u).__name__)}")
        if u.dim() != d + 2 or u.shape[-1] != self.embed_dim:
            raise ValueError(
                f"u must have shape (B, {', '.join(f'n_{i + 1}' for i in range(d))}, {self.embed_dim}), "
                f"got {tuple(u.shape)}"
            )
        grid = u.shape[1:-1]
        points = self._points(patch_size)
        for i, (n, p) in enumerate(zip(grid, points, strict=True)):
            if n % p or n == 0:
                raise ValueError(
                    f"patch_size[{i}] must divide the grid's {n} points along that axis, got {p}; a grid of "
                    "another resolution takes forward(..., patch_size=) with as many patches as in training"
                )
        counts = (
            self._counts(grid, points)
            if group is None
            else [n // p for n, p in zip(grid, points, strict=True)]
        )
        modes = choose_modes(counts, points, self.modes)
        device = u.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        out_dtype = u.dtype
        if autocast and u.dtype != torch.float64:
            out_dtype = torch.get_autocast_dtype(device)
        u = u.to(torch.promote_types(u.dtype, torch.float32))
        if not autocast:
            return self._attend(u, modes, weights, group).to(out_dtype)
        with torch.autocast(device, enabled=False):
            return self._attend(u, modes, weights, group).to(out_dtype)

    def _counts(self, grid: Sequence[int], points: Sequence[int]) -> Sequence[int]:
        """Patches along each axis."""
        return [n // p for n, p in zip(grid, points, strict=True)]

    def _points(self, patch_size: int | Sequence[int] | None) -> tuple[int, ...]:
        if patch_size is None:
            return self.patch_size
        points = (patch_size,) * len(self.patch_size) if isinstance(patch_size, int) else tuple(patch_size)
        if len(points) != len(self.patch_size) or min(points) < 1:
            raise ValueError(
                f"patch_size must be one number >= 1 for each of the {len(self.patch_size)} axes, "
                f"got {patch_size!r}"
            )
        return points

    def _weights(self, modes: PatchModes, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (*rows, embed_dim, 2, embed_dim) of Q, K and V for the modes that the patch has."""
        weight = self.in_proj_weight.to(dtype)
        for axis, (up, down) in enumerate(zip(modes.up, modes.down, strict=True)):
            full = weight.shape[axis + 1]
            if up + down < full:
                parts = weight.narrow(axis + 1, 0, up), weight.narrow(axis + 1, full - down, down)
                weight = torch.cat(parts, axis + 1) if down else parts[0]
        q, k, v = weight.unbind(0)
        return q, k, v

    def _attend(
        self, u: Tensor, modes: PatchModes, weights: Tensor | None, group: ShardedMesh | None
    ) -> Tensor:
        if weights is not None:
            return self._attend_weighted(u, modes, weights, group)
        batch = u.shape[0]
        kept, patches = math.prod(modes.rows), math.prod(modes.patches)
        z = to_modes(u, modes)
        total = math.prod(u.shape[1:-1]) if group is None else group.total
        scale = 1.0 / total if self.scale is None else self.scale
        wq, wk, wv = self._weights(modes, u.dtype)
        qkv = (fold_parseval(wq, modes, scale), wk, wv)
        q, k, v = self._heads(z, [w.reshape(kept, self.embed_dim, 2 * self.embed_dim) for w in qkv])
        del z
        if group is None:
            out = v @ (q.mT @ k).softmax(-1).mT
        else:  # patches are points whose channels are the modes
            from ..distributed import continuum_attention

            rows = continuum_attention(q.mT, k.mT, v.mT, group=group.group, scale=1.0)
            assert isinstance(rows, Tensor)
            out = rows.mT.contiguous()
        del q, k, v
        out = out.view(batch, self.num_heads, kept, self.head_dim, 2, patches)
        out = self._out_proj(out)
        if self.out_proj.bias is not None:
            out[0, 0] += self.out_proj.bias.to(u.dtype)
        return from_modes(out, modes)

    def _heads(self, z: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """Complex products of each mode: (modes, 2, B, P, C) -> (B, H, modes head_dim 2, P) each."""
        kept, _, batch, patches, _ = z.shape

        def product(weight: Tensor, pairs: Tensor) -> Tensor:
            x = torch.bmm(weight, pairs.mT).view(
                weight.shape[0], self.num_heads, self.head_dim, 2, batch, patches
            )
            return x.permute(4, 1, 0, 2, 3, 5)

        shape = (batch, self.num_heads, kept, self.head_dim, 2, patches)
        flat = (batch, self.num_heads, kept * self.head_dim * 2, patches)
        blocks = _blocks(z)
        if len(blocks) <= 1:
            pairs = _pairs(z)
            return [product(w, pairs).reshape(flat) for w in weights]
        out = [z.new_empty(shape) for _ in weights]
        for block in blocks:
            pairs = _pairs(z[block])
            for x, weight in zip(out, weights, strict=True):
                x[:, :, block] = product(weight[block], pairs)
        return [x.view(flat) for x in out]

    def _out_proj(self, x: Tensor) -> Tensor:
        """(B, H, modes, head_dim, 2, P) -> (modes, 2, B, P, embed_dim).

        A pointwise linear map commutes with the inverse transform.
        """
        batch, _, kept, _, _, patches = x.shape
        matrix = self.out_proj.weight.to(x.dtype).t()
        x = x.permute(2, 1, 3, 4, 0, 5)

        def product(x: Tensor, out: Tensor | None = None) -> Tensor:
            x = x.reshape(x.shape[0], self.embed_dim, 2 * batch * patches)
            return torch.bmm(x.mT, matrix.expand(x.shape[0], *matrix.shape), out=out)

        blocks = _blocks(x)
        if len(blocks) <= 1:
            return product(x).view(kept, 2, batch, patches, self.embed_dim)
        out = x.new_empty(kept, 2 * batch * patches, self.embed_dim)
        for block in blocks:
            product(x[block], out[block])
        return out.view(kept, 2, batch, patches, self.embed_dim)

    def _attend_weighted(
        self, u: Tensor, modes: PatchModes, weights: Tensor, group: ShardedMesh | None
    ) -> Tensor:
        pairs = _pairs(to_modes(u, modes))

        def in_space(weight: Tensor) -> Tensor:
            product = torch.bmm(weight.reshape(-1, self.embed_dim, 2 * self.embed_dim), pairs.mT)
            z = product.mT.unflatten(1, (2, u.shape[0], math.prod(modes.patches)))
            return from_modes(z, modes).unflatten(-1, (self.num_heads, self.head_dim))

        q, k, v = (in_space(w) for w in self._weights(modes, u.dtype))
        if group is None:
            out = patch_attention(q, k, v, modes.points, weights, scale=self.scale)
        else:
            from .. import distributed

            out = distributed.patch_attention(
                *(q, k, v, modes.points, weights, group.group), scale=self.scale
            )
        assert isinstance(out, Tensor)
        bias = self.out_proj.bias
        matrix = self.out_proj.weight.to(u.dtype)
        return F.linear(out.flatten(-2), matrix, None if bias is None else bias.to(u.dtype))

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, patch_size={self.patch_size}, "
            f"modes={self.modes}, scale={self.scale}"
        )


def _blocks(x: Tensor) -> list[slice]:
    """Modes, the first dimension of x, in pieces that stay in the cache: on the CPU and without a graph."""
    kept, step = x.shape[0], x.shape[0]
    if x.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        step = max(1, BLOCK * kept // max(1, x.numel()))
    return [slice(i, min(kept, i + step)) for i in range(0, kept, step)]


def _pairs(z: Tensor) -> Tensor:
    """(modes, 2, B, P, C) -> (modes, 2BP, 2C): z and i z, for products with [Re R, Im R]."""
    turned = torch.stack([-z[:, 1], z[:, 0]], dim=1)
    return torch.cat([z, turned], dim=-1).flatten(1, 3)
