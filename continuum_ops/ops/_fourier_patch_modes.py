"""Fourier modes of the patches of a grid: the truncated transform, its adjoint, and Parseval's weights.

Each patch is taken as one period. Of its half spectrum the modes 0 .. up - 1 and -down .. -1 of every axis
but the last, and 0 .. up - 1 of the last one, are kept. With these frequencies k and column weights w,

    analysis    Z_k = w_k sum_x u(x) exp(-i k x)
    synthesis   y(x) = Re sum_k w_k Z_k exp(i k x)

are adjoint to each other. Two choices of w are used: 1 / n for the transform of a function, and c_k = 1 for
a column that is its own conjugate (0, and Nyquist on an even axis), else 2, for the inverse real transform.
Modes are real tensors (modes, 2, B, patches, C) of real and imaginary parts: no complex dtype is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import extension
from ._library import LIBRARY

# Values of a grid that are transformed at a time on the CPU: the intermediate results stay in the cache.
BLOCK = 2**18
# Multiplications for each value up to which products with tables take less time than fast transforms. They
# break even near 100 (1-D) to 300 (3-D); 32 x 32 points and 9 modes take 38.
DENSE = 128


class PatchModes(NamedTuple):
    """The kept modes of a grid of patches, and how they are computed."""

    patches: tuple[int, ...]  # number of patches along each axis
    points: tuple[int, ...]  # points of a patch along each axis
    up: tuple[int, ...]  # frequencies 0 .. up - 1
    down: tuple[int, ...]  # frequencies -down .. -1; 0 on the last axis
    dense: bool  # products with small matrices instead of fast transforms

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of kept frequencies of each axis."""
        return tuple(u + d for u, d in zip(self.up, self.down, strict=True))

    @property
    def patch_points(self) -> int:
        return math.prod(self.points)

    def products_per_point(self) -> float:
        """Multiplications of the transform by tables, axis by axis from the last one, for each value."""
        d = len(self.points)
        work = (
            math.prod(self.points[: i + 1]) * math.prod(self.rows[i:]) * (4 if i + 1 < d else 2)
            for i in range(d)
        )
        return sum(work) / self.patch_points

    def frequencies(self, axis: int, device: torch.device) -> Tensor:
        down = torch.arange(-self.down[axis], 0, device=device)
        return torch.cat([torch.arange(self.up[axis], device=device), down])

    def self_conjugate(self) -> tuple[int, ...]:
        """Columns of the half spectrum whose conjugates lie in the same column."""
        n, m = self.points[-1], self.up[-1]
        return (0, n // 2) if m == n // 2 + 1 and n % 2 == 0 and n > 1 else (0,)


def choose_modes(
    patches: Sequence[int], points: Sequence[int], modes: Sequence[int], dense: bool | None = None
) -> PatchModes:
    """The modes that a patch of so many points has among 0 .. modes - 1 and -modes .. -1 of each axis."""
    leading = list(zip(points[:-1], modes[:-1], strict=True))
    up = (*(min(m, (n + 1) // 2) for n, m in leading), min(modes[-1], points[-1] // 2 + 1))
    down = (*(min(m, n // 2) for n, m in leading), 0)
    kept = PatchModes(tuple(patches), tuple(points), up, down, True)
    return kept._replace(dense=kept.products_per_point() <= DENSE if dense is None else dense)


def _column_weights(modes: PatchModes, mean: bool, device: torch.device) -> Tensor:
    if mean:
        return torch.full((modes.up[-1],), 1.0 / modes.patch_points, dtype=torch.float64, device=device)
    weights = torch.full((modes.up[-1],), 2.0, dtype=torch.float64, device=device)
    for column in modes.self_conjugate():
        weights[column] = 1.0
    return weights


def _tables(modes: PatchModes, mean: bool, like: Tensor) -> list[Tensor]:
    """(2, rows, points) of each axis: cos and sin; of the last one w cos and -w sin."""
    tables = []
    for axis, n in enumerate(modes.points):
        k = modes.frequencies(axis, like.device)
        turns = (k[:, None] * torch.arange(n, device=like.device)) % n  # whole turns cancel exactly
        angle = turns.to(torch.float64) * (2 * math.pi / n)
        tables.append(torch.stack([angle.cos(), angle.sin()]))
    w = _column_weights(modes, mean, like.device)[:, None]
    tables[-1] = torch.stack([w * tables[-1][0], -w * tables[-1][1]])
    return [t.to(like.dtype) for t in tables]


def _product(matrix: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """matrix (m, n) times each of x (b, n, c)."""
    return torch.bmm(matrix.expand(x.shape[0], *matrix.shape), x, out=out)


def _analyze_dense(x: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """(b, n_1, p_2, n_2, .., p_d, n_d, C) -> (b, R_1, p_2, R_2, .., p_d, 2, m, C)."""
    shape, c = list(x.shape), x.shape[-1]
    m = tables[-1].shape[1]
    y = _product(tables[-1].flatten(0, 1), x.reshape(-1, shape[-2], c))
    shape[-2:] = [2, m, c]
    for axis in range(len(tables) - 2, -1, -1):
        table, at = tables[axis], 2 * axis + 1
        before, after = math.prod(shape[:at]), math.prod(shape[at + 1 : -3])
        u = _product(table.flatten(0, 1), y.reshape(before, shape[at], -1))
        u = u.view(before, 2, -1, after, 2, m * c)  # cos and sin; real and imaginary part
        real = u[:, 0, :, :, 0] + u[:, 1, :, :, 1]
        imag = u[:, 0, :, :, 1] - u[:, 1, :, :, 0]
        y, shape[at] = torch.stack([real, imag], dim=3), table.shape[1]
    return y.view(shape)


def _synthesize_dense(z: Tensor, tables: Sequence[Tensor], out: Tensor) -> None:
    """(b, R_1, p_2, R_2, .., p_d, 2, m, C) -> out (b, n_1, p_2, n_2, .., p_d, n_d, C)."""
    shape, (m, c) = list(z.shape), z.shape[-2:]
    y = z
    for axis in range(len(tables) - 1):
        table, at = tables[axis], 2 * axis + 1
        before, after = math.prod(shape[:at]), math.prod(shape[at + 1 : -3])
        y = y.reshape(before, shape[at], after, 2, m * c)
        turned = torch.stack([-y[:, :, :, 1], y[:, :, :, 0]], dim=3)  # i y
        pair = torch.stack([y, turned], dim=1).view(before, 2 * shape[at], -1)
        shape[at] = table.shape[2]
        y = _product(table.flatten(0, 1).t().contiguous(), pair)
    last = tables[-1].flatten(0, 1).t().contiguous()
    _product(last, y.reshape(-1, 2 * m, c), out.view(-1, last.shape[0], c))


def _analyze_fft(x: Tensor, modes: PatchModes, mean: bool) -> Tensor:
    dims = tuple(range(1, x.dim() - 1, 2))
    y = torch.fft.rfftn(x, dim=dims, norm="forward" if mean else "backward")
    for axis, dim in enumerate(dims):
        y = y.index_select(dim, modes.frequencies(axis, x.device) % modes.points[axis])
    y = torch.view_as_real(y)
    if not mean:
        y = y * _column_weights(modes, False, x.device).to(x.dtype)[:, None, None]
    return y.movedim(-1, -3)


def _synthesize_fft(z: Tensor, modes: PatchModes, mean: bool) -> Tensor:
    y = z.movedim(-3, -1)
    n = modes.points[-1]
    if mean:
        w = _column_weights(modes, True, z.device) / _column_weights(modes, False, z.device)
        y = y * w.to(z.dtype)[:, None, None]
    y = torch.view_as_complex(y.contiguous())
    dims = tuple(range(1, z.dim() - 2, 2))
    for axis, dim in enumerate(dims[:-1]):
        full = y.new_zeros((*y.shape[:dim], modes.points[axis], *y.shape[dim + 1 :]))
        y = full.index_copy(dim, modes.frequencies(axis, z.device) % modes.points[axis], y)
        y = torch.fft.ifft(y, dim=dim, norm="forward")
    # What an inverse real transform makes of an imaginary part in these columns is not defined everywhere.
    parts = torch.view_as_real(y).clone()
    for column in modes.self_conjugate():
        parts[..., column, :, 1] = 0.0
    return torch.fft.irfft(torch.view_as_complex(parts), n=n, dim=dims[-1], norm="forward")


def _blocks(rows: int, size: int, x: Tensor) -> Iterator[slice]:
    step = rows
    if x.device.type == "cpu":
        step = max(1, BLOCK * rows // max(1, size))
    return (slice(i, min(rows, i + step)) for i in range(0, rows, step))


def _order(d: int) -> list[int]:
    """(b, R_1, p_2, .., R_{d-1}, p_d, 2, m, C) permuted to (R_1, .., m, 2, b, p_2, .., p_d, C)."""
    return [*range(1, 2 * d - 2, 2), 2 * d, 2 * d - 1, *range(0, 2 * d - 1, 2), 2 * d + 1]


def _compiled(x: Tensor, modes: PatchModes) -> bool:
    return modes.dense and x.device.type == "cpu" and extension()[0] is not None


def _flat_tables(modes: PatchModes, mean: bool, like: Tensor, inverse: bool) -> Tensor:
    """The tables as the compiled kernels take them: cos, sin, -sin of an axis; transposed for the inverse."""
    *leading, last = _tables(modes, mean, like)
    tables = [torch.cat([t, -t[1:]]) for t in leading] + [last.flatten(0, 1)]
    return torch.cat([(t.mT if inverse else t).flatten() for t in tables])


def _analyze(u: Tensor, modes: PatchModes, mean: bool) -> Tensor:
    if _compiled(u, modes):
        flat = _flat_tables(modes, mean, u, False)
        return torch.ops.continuum_ops.patch_dft(u.contiguous(), flat, *modes[:2], modes.rows)
    d, batch, c = len(modes.points), u.shape[0], u.shape[-1]
    split = [s for pair in zip(modes.patches, modes.points, strict=True) for s in pair]
    rows = batch * modes.patches[0]
    x = u.reshape(rows, *split[1:], c)
    tables = _tables(modes, mean, u) if modes.dense else []
    z = u.new_empty(*modes.rows, 2, rows, *modes.patches[1:], c)
    for block in _blocks(rows, u.numel(), u):
        part = x[block]
        y = _analyze_dense(part, tables) if modes.dense else _analyze_fft(part, modes, mean)
        z[(slice(None),) * (d + 1) + (block,)] = y.permute(_order(d))
    return z.view(math.prod(modes.rows), 2, batch, math.prod(modes.patches), c)


def _synthesize(z: Tensor, modes: PatchModes, mean: bool) -> Tensor:
    if _compiled(z, modes):
        flat = _flat_tables(modes, mean, z, True)
        return torch.ops.continuum_ops.patch_dft_inverse(z.contiguous(), flat, *modes[:2], modes.rows)
    d, batch, c = len(modes.points), z.shape[2], z.shape[-1]
    split = [s for pair in zip(modes.patches, modes.points, strict=True) for s in pair]
    rows = batch * modes.patches[0]
    back = [_order(d).index(i) for i in range(2 * d + 2)]
    x = z.reshape(*modes.rows, 2, rows, *modes.patches[1:], c)
    tables = _tables(modes, mean, z) if modes.dense else []
    out = z.new_empty(rows, *split[1:], c)
    for block in _blocks(rows, out.numel(), z):
        part = x[(slice(None),) * (d + 1) + (block,)].permute(back)
        if modes.dense:
            _synthesize_dense(part, tables, out[block])
        else:
            out[block] = _synthesize_fft(part, modes, mean)
    grid = [p * n for p, n in zip(modes.patches, modes.points, strict=True)]
    return out.view(batch, *grid, c)


def _analysis(u: Tensor, *fields: Any) -> Tensor:
    with torch.autocast(u.device.type, enabled=False):
        return _analyze(u, PatchModes(*map(_plain, fields[:-1])), fields[-1])


def _synthesis(z: Tensor, *fields: Any) -> Tensor:
    with torch.autocast(z.device.type, enabled=False):
        return _synthesize(z, PatchModes(*map(_plain, fields[:-1])), fields[-1])


def _plain(field: Any) -> Any:
    return field if isinstance(field, bool) else tuple(field)


LIBRARY.impl("patch_analysis", _analysis, "CompositeExplicitAutograd")
LIBRARY.impl("patch_synthesis", _synthesis, "CompositeExplicitAutograd")


@torch.library.register_fake("continuum_ops::patch_analysis", lib=LIBRARY)
def _(u: Tensor, *fields: Any) -> Tensor:
    modes = PatchModes(*fields[:-1])
    return _fake_modes(u, modes.patches, modes.rows)


@torch.library.register_fake("continuum_ops::patch_synthesis", lib=LIBRARY)
def _(z: Tensor, *fields: Any) -> Tensor:
    modes = PatchModes(*fields[:-1])
    return _fake_grid(z, modes.patches, modes.points)


@torch.library.register_fake("continuum_ops::patch_dft", lib=LIBRARY)
def _(u: Tensor, tables: Tensor, patches: list[int], points: list[int], rows: list[int]) -> Tensor:
    return _fake_modes(u, patches, rows)


@torch.library.register_fake("continuum_ops::patch_dft_inverse", lib=LIBRARY)
def _(z: Tensor, tables: Tensor, patches: list[int], points: list[int], rows: list[int]) -> Tensor:
    return _fake_grid(z, patches, points)


def _fake_modes(u: Tensor, patches: Sequence[int], rows: Sequence[int]) -> Tensor:
    return u.new_empty(math.prod(rows), 2, u.shape[0], math.prod(patches), u.shape[-1])


def _fake_grid(z: Tensor, patches: Sequence[int], points: Sequence[int]) -> Tensor:
    return z.new_empty(z.shape[2], *(p * n for p, n in zip(patches, points, strict=True)), z.shape[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.fields = inputs[1:]


def _analysis_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.continuum_ops.patch_synthesis(grad, *ctx.fields), *(None,) * len(ctx.fields)


def _synthesis_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.continuum_ops.patch_analysis(grad, *ctx.fields), *(None,) * len(ctx.fields)


# Linear and each the adjoint of the other: derivatives of every order.
torch.library.register_autograd(
    "continuum_ops::patch_analysis", _analysis_derivative, setup_context=_setup, lib=LIBRARY
)
torch.library.register_autograd(
    "continuum_ops::patch_synthesis", _synthesis_derivative, setup_context=_setup, lib=LIBRARY
)


def to_modes(u: Tensor, modes: PatchModes) -> Tensor:
    """Kept modes of each patch, 1 / n in the transform: (B, *grid, C) -> (modes, 2, B, patches, C)."""
    return torch.ops.continuum_ops.patch_analysis(u, *modes, True)


def from_modes(z: Tensor, modes: PatchModes) -> Tensor:
    """The inverse real transform: (modes, 2, B, patches, C) -> (B, *grid, C)."""
    return torch.ops.continuum_ops.patch_synthesis(z, *modes, False)


def fold_parseval(weight: Tensor, modes: PatchModes, scale: float) -> Tensor:
    """Weights of the queries with which a plain sum over the kept modes is scale * sum_x q(x) . k(x).

    By Parseval sum_x q k = n sum_k c_k Re(q_k conj k_k). In a column that is its own conjugate the inverse
    real transform drops the anti-Hermitian part of the modes: an orthogonal projection, so that projecting
    q is enough, and linear in the weights, since the input is real: (R_k + conj R_-k) / 2, R_-k = 0 where
    -k is not kept.

    Args:
        weight: (*modes.rows, E, 2, C), real and imaginary parts.
    """
    rows, factor = modes.rows[:-1], scale * modes.patch_points
    partner, kept = _partners(modes, weight.device)
    sign = weight.new_tensor([1.0, -1.0])[:, None]
    flat = weight.reshape(math.prod(rows), *weight.shape[len(rows) :])
    mask = kept.to(weight.dtype)[:, None, None, None]
    parts, start = [], 0
    for column in modes.self_conjugate():
        if column > start:
            parts.append(flat[:, start:column] * (2.0 * factor))
        own = flat[:, column]
        parts.append((own + own[partner] * (mask * sign)).unsqueeze(1) * (0.5 * factor))
        start = column + 1
    parts.append(flat[:, start:] * (2.0 * factor))
    return torch.cat(parts, dim=1).view(weight.shape)


def _partners(modes: PatchModes, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row of a column the index of its negative, and whether that is kept (else the index is 0)."""
    index = torch.zeros(1, dtype=torch.long, device=device)
    kept = torch.ones(1, dtype=torch.bool, device=device)
    for axis, n in enumerate(modes.points[:-1]):
        k = modes.frequencies(axis, device)
        same = (k[:, None] + k) % n == 0
        there = same.any(1)
        index = (index[:, None] * len(k) + same.to(torch.long).argmax(1)).flatten()
        kept = (kept[:, None] & there).flatten()
    return torch.where(kept, index, 0), kept
