"""What the models on patches, ViT-NO and FANO, share: everything but the lift and the attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..mesh import Grid, Mesh
from ..nn import PatchSpectralConv
from ..nn._patches import crop, patch_size, patches_of, per_axis
from ._checks import check_even, check_integer, check_tensor, is_spread
from .patch_layer import FinalSpectral, PatchEncoderLayer
from .smoothing import Smoothing
from .tno_layer import Activation, resolve_activation

if TYPE_CHECKING:
    from ..distributed import ShardedMesh

Weights: TypeAlias = Tensor | Literal["mesh", "equal"]


class Patches(NamedTuple):
    """What the lift and the attention of a model are made of, checked; per axis what may differ by axis."""

    channels: int  # of (u, x)
    d_model: int
    num_heads: int
    num_patches: tuple[int, ...]
    patch_size: tuple[int, ...]
    modes: tuple[int, ...]
    scale: float
    periodic_extension: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class PatchModel(nn.Module):
    """T_out o E_L o T_in of CA (9) on the patches of a grid; `ViTNO` and `FANO` make lift and attention."""

    # Whether the attention takes None for equal weights, from no enclosing co.nn.quadrature.
    none_is_equal = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        coord_dim: int,
        *,
        num_patches: int | Sequence[int],
        patch_size: int | Sequence[int],
        modes: int | Sequence[int],
        d_model: int = 128,
        num_heads: int = 8,
        num_layers: int = 6,
        dim_feedforward: int | None = None,
        dropout: float = 0.0,
        activation: str | Activation = "gelu",
        norm_first: bool = False,
        norm_residual: bool = False,
        residual_weights: bool = False,
        scale: float = 1.0,
        periodic_extension: bool = False,
        final_spectral: int | Sequence[int] | None = None,
        smoothing: str | Sequence[str] | None = None,
        smoothing_eps: float = 1e-3,
        smoothing_alpha: float = 1.001,
        pad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dim_feedforward = d_model if dim_feedforward is None else dim_feedforward
        for name, number in (
            ("in_channels", in_channels),
            ("out_channels", out_channels),
            ("coord_dim", coord_dim),
            ("d_model", d_model),
            ("num_heads", num_heads),
            ("num_layers", num_layers),
            ("dim_feedforward", dim_feedforward),
        ):
            check_integer(name, number, 1)
        if coord_dim > 3:
            raise ValueError(f"coord_dim must be 1, 2 or 3, was {coord_dim}")
        if d_model % num_heads:
            raise ValueError(
                f"d_model must be divisible by num_heads, was {d_model} with num_heads {num_heads}"
            )
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must be a probability between 0 and 1, was {dropout}")
        if norm_residual and not norm_first:
            raise ValueError("norm_first must be True with norm_residual, was False")
        points = per_axis("patch_size", patch_size, coord_dim)
        kept = per_axis("modes", modes, coord_dim)
        _check_modes(points, kept, periodic_extension)
        smooth = None
        if smoothing is not None:
            smooth = Smoothing(smoothing, smoothing_eps, smoothing_alpha)
            if len(smooth.boundary) not in (1, coord_dim):
                raise ValueError(
                    f"smoothing must be one name or one per axis of {coord_dim}, was {smoothing!r}"
                )
        patches = Patches(
            in_channels + coord_dim,
            d_model,
            num_heads,
            per_axis("num_patches", num_patches, coord_dim),
            points,
            kept,
            scale,
            periodic_extension,
            device,
            dtype,
        )
        layer_activation = resolve_activation(activation)
        final_modes = (
            None if final_spectral is None else per_axis("final_spectral", final_spectral, coord_dim)
        )
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_patches, self.pad = patches.num_patches, pad
        self.lift = self._make_lift(patches)
        self.layers = nn.ModuleList(
            PatchEncoderLayer(
                self._make_attention(patches),
                d_model,
                dim_feedforward,
                dropout,
                layer_activation,
                norm_first=norm_first,
                norm_residual=norm_residual,
                residual_weights=residual_weights,
                device=device,
                dtype=dtype,
            )
            for _ in range(num_layers)
        )
        self.projection = nn.Linear(d_model, out_channels, device=device, dtype=dtype)
        self.final_spectral: FinalSpectral | None = None
        if final_modes is not None:
            self.final_spectral = FinalSpectral(out_channels, final_modes, device=device, dtype=dtype)
        self.smoothing = smooth

    def _make_lift(self, patches: Patches) -> nn.Module:
        raise NotImplementedError

    def _make_attention(self, patches: Patches) -> nn.Module:
        raise NotImplementedError

    def forward(self, u: Tensor, mesh: Grid | ShardedMesh, *, weights: Weights = "mesh") -> Tensor:
        """Evaluate the operator on one function per batch entry.

        Args:
            u: (B, N, in_channels), samples of the input function at the points of the grid in row-major
                order, of the dtype of the parameters.
            mesh: an evenly spaced `Grid` of coord_dim axes on the device of u, n_i points along axis i, a
                multiple of num_patches[i] unless the model pads. Or such a grid that is spread over ranks in
                boxes of whole patches, ``continuum_ops.distributed.shard(grid, group, num_patches=...)``: u,
                weights and the output are then this rank's part, and the output is that of one process. The
                keys and values of the attention go round a ring; ``final_spectral`` and ``smoothing``, which
                transform the whole grid, gather the output first, B N out_channels numbers on every rank,
                and every rank computes them for all points. Dropout draws from each rank's own generator.
            weights: of the integrals within the patches: "mesh", the grid's; "equal", the same for every
                point, CA (63); or a tensor (N,) of weights >= 0. They are divided by their sum, so that
                the domain has volume 1 whatever its units. On an evenly spaced grid of kind "periodic" or
                "cell" the two names say the same.

        Returns:
            (B, N, out_channels), the output function at the same points.

        Raises:
            ValueError: a shape, dtype or device that does not fit; an uneven grid; a number of points that
                the patches do not divide; in training mode, modes that a patch or the grid lacks.
            TypeError: an argument of another type.
        """
        if is_spread(mesh):
            return self._over_ranks(u, mesh, weights)
        self._check(u, mesh)
        shape = mesh.shape
        extra = tuple(-n % patches for n, patches in zip(shape, self.num_patches, strict=True))
        if not self.pad:
            patch_size("mesh", shape, self.num_patches)
            extra = (0,) * len(shape)
        v = torch.cat([_repeat_ends(u.unflatten(1, shape), extra), _points(mesh, extra, u)], dim=-1)
        w = self._weights(u, mesh, weights, extra)
        v = self.lift(v)
        for layer in self.layers:
            v = layer(v, w)
        return self._finish(self.projection(crop(v, shape)), mesh).flatten(1, -2)

    def _finish(self, z: Tensor, mesh: Grid) -> Tensor:
        """The layers that transform the whole grid."""
        if self.final_spectral is not None:
            z = self.final_spectral(z)
        if self.smoothing is not None:
            z = self.smoothing(z, mesh)
        return z

    def _over_ranks(self, u: Tensor, mesh: ShardedMesh, weights: Weights) -> Tensor:
        from .. import distributed

        patches_of(mesh, self.num_patches)
        box, whole = mesh.part, mesh.grid
        assert isinstance(box, Grid) and whole is not None
        self._check(u, box)
        check_even(whole, f"{type(self).__name__}")
        none = (0,) * box.ndim
        v = torch.cat([u.unflatten(1, box.shape), _points(box, none, u)], dim=-1)
        w = self._weights(u, box, weights, none, mesh)
        v = self.lift(v, group=mesh) if isinstance(self.lift, PatchSpectralConv) else self.lift(v)
        for layer in self.layers:
            v = layer(v, w, mesh)
        z = self.projection(v).flatten(1, -2)
        if self.final_spectral is None and self.smoothing is None:
            return z
        z = distributed.gather(z, mesh).unflatten(1, whole.shape)
        return mesh.select(self._finish(z, whole).flatten(1, -2))

    def _check(self, u: Tensor, mesh: Grid) -> None:
        if not isinstance(u, Tensor):
            raise TypeError(f"u must be a tensor, was {type(u).__name__}")
        if u.ndim != 3 or u.shape[-1] != self.in_channels:
            hint = "; the axes of a grid are one: u.flatten(1, -2)" if u.ndim > 3 else ""
            raise ValueError(f"u must have shape (B, N, {self.in_channels}), was {tuple(u.shape)}{hint}")
        expected = self.projection.weight.dtype
        castable = u.is_floating_point() and torch.is_autocast_enabled(u.device.type)
        if u.dtype != expected and not castable:
            raise ValueError(f"u must have the dtype of the parameters, {expected}, was {u.dtype}")
        if not isinstance(mesh, Grid):
            known = isinstance(mesh, (Mesh, Tensor))
            why = "; patches need a tensor-product grid" if known else ""
            raise TypeError(f"mesh must be a Grid, was {type(mesh).__name__}{why}")
        if mesh.ndim != len(self.num_patches):
            raise ValueError(f"mesh must have {len(self.num_patches)} axes, had {mesh.ndim}")
        if len(mesh) != u.shape[1]:
            raise ValueError(f"mesh must have the {u.shape[1]} points of u, had {mesh.shape}")
        if mesh.device != u.device:
            raise ValueError(f"mesh must be on the device of u, {u.device}, was on {mesh.device}")
        check_even(mesh, f"{type(self).__name__}")

    def _weights(
        self,
        u: Tensor,
        mesh: Grid,
        weights: Weights,
        extra: tuple[int, ...],
        spread: ShardedMesh | None = None,
    ) -> Tensor | None:
        """Of sum 1 in the shape of the padded grid, 0 where it is padded; None: the same everywhere."""
        if self.none_is_equal and isinstance(weights, str) and weights == "equal" and not any(extra):
            return None
        wide = torch.promote_types(u.dtype, torch.float32)
        n = len(mesh)
        if isinstance(weights, Tensor):
            check_tensor("weights", weights, u, [(n,)])
            w = weights
        elif not isinstance(weights, str):
            raise TypeError(f'weights must be "mesh", "equal" or a tensor, was {type(weights).__name__}')
        elif weights == "mesh":
            w = mesh.weights
        elif weights == "equal":
            w = u.new_ones(n, dtype=wide)
        else:
            raise ValueError(f'weights must be "mesh", "equal" or a tensor, was {weights!r}')
        w = w.to(wide)
        total = w.sum()
        if spread is not None:
            from ..distributed import all_reduce

            total = all_reduce(total, spread.group)
        # A grid without weight has nothing to integrate; 0 / 0 would make NaN of it.
        w = (w / torch.where(total == 0, 1.0, total)).view(mesh.shape)
        for axis, more in enumerate(extra):
            if more:
                gap = [more if i == axis else size for i, size in enumerate(w.shape)]
                w = torch.cat([w, w.new_zeros(gap)], dim=axis)
        return w

    def extra_repr(self) -> str:
        return (
            f"in_channels={self.in_channels}, out_channels={self.out_channels}, "
            f"num_patches={self.num_patches}, pad={self.pad}"
        )


def _check_modes(points: Sequence[int], kept: Sequence[int], periodic_extension: bool) -> None:
    for i, (n, m) in enumerate(zip(points, kept, strict=True)):
        period = 2 * n if periodic_extension else n
        most = period // 2 + 1 if i == len(points) - 1 else period // 2
        if m > most:
            raise ValueError(
                f"modes[{i}] must be at most {most} for patches of {n} points along that axis in training, "
                f"where more would overlap, was {m}"
            )


def _repeat_ends(v: Tensor, extra: Sequence[int]) -> Tensor:
    """(B, *grid, C) with `extra` more points behind the end of each axis that repeat the last one."""
    for axis, more in enumerate(extra, start=1):
        if more:
            size = list(v.shape)
            size[axis] = more
            v = torch.cat([v, v.narrow(axis, v.shape[axis] - 1, 1).expand(size)], dim=axis)
    return v


def _points(mesh: Grid, extra: Sequence[int], u: Tensor) -> Tensor:
    """(B, *padded grid, d) coordinates in the dtype of u, the spacing going on behind the end."""
    if not any(extra):
        return mesh.points.to(u.dtype).view(*mesh.shape, -1).expand(u.shape[0], *mesh.shape, -1)
    axes = []
    for x, more in zip(mesh.axes, extra, strict=True):
        step = (x[-1] - x[0]) / max(len(x) - 1, 1)
        steps = torch.arange(1, more + 1, dtype=x.dtype, device=x.device)
        axes.append(torch.cat([x, x[-1] + step * steps]))
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).to(u.dtype)
    return points.expand(u.shape[0], *points.shape)
