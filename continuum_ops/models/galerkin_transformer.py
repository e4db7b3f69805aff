"""Galerkin and Fourier transformers: operator learners on attention without softmax (GT section 4)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ..mesh import Grid, Mesh, PointCloud
from ..nn.galerkin_attention import AttentionType
from ..nn.galerkin_encoder_layer import GalerkinEncoderLayer, LayerNormScheme
from ..nn.spectral_conv import SpectralConv
from ._checks import check_even, is_spread
from .interpolation_cnn import Downsample, Upsample, coarse_axis
from .tno_layer import Activation, resolve_activation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..distributed import ShardedMesh


class GalerkinTransformer(nn.Module):
    """Operator learner u -> z of Cao, "Choose a Transformer: Fourier or Galerkin" (GT).

    ::

        v = lift(u, x)               at each point; or, with `coarsening`, a convolutional network
                                     from the fine to a coarse grid                     GT figures 4-6
        v = layer(v, x)              num_layers times, attention with coordinates in
                                     every head                                         GT (4)-(7)
        v = upsample(v)              with `coarsening`, back to the fine grid           GT figure 7
        z = decoder(v, x)            spectral convolutions and a pointwise network for
                                     smooth targets, a pointwise network for others     GT section 4

    The attention integrates over the mesh with its quadrature weights, divided by their sum (1/n on the
    even grids of the paper), so one set of parameters serves every grid size. Without `coarsening` the
    encoder takes any mesh of any dimension; the spectral decoder needs an evenly spaced `Grid`, the
    convolutional networks a 2-D one.

    Args:
        in_channels: channels of the input function u.
        out_channels: channels of the output function.
        coord_dim: dimension d of the domain.
        d_model, num_heads, num_layers, dim_feedforward, attention_type, layer_norm, eta, delta: of the
            encoder, as in :class:`continuum_ops.nn.GalerkinEncoderLayer`.
        coarsening: None, or the ratio r >= 1 between the spacings of the coarse grid of the encoder and the
            fine one: n_c = 1 + round((n_f - 1) / r) points per axis. Needs coord_dim=2.
        coarse_output: leave the upsampling out; the output lives on the coarse grid (GT 5.3).
        middle: points per axis of the grid halfway between the fine and the coarse one, for a model used at
            one resolution; None: the square root of their product, rounded.
        convolutions: "residual" as in GT figures 6 and 7; "plain", the form of the published code, without
            skips and with further activations (:mod:`continuum_ops.models.convert`).
        decoder: "spectral" (smooth targets), "pointwise" (targets that jump), or "linear", one linear map of
            v at each point as in :class:`TNO`: the encoder alone, which CA 6.2.1 compares with.
        decoder_layers: spectral or hidden pointwise layers.
        decoder_channels: their channels; None: d_model.
        decoder_lift: map (v, x) to decoder_channels at each point before the first layer; without it the
            first spectral layer maps from d_model itself. The pointwise decoder always has it.
        modes: kept modes of the spectral layers, the same number on each axis.
        head_channels: hidden channels of the pointwise network after the spectral layers; None:
            decoder_channels.
        attention_dropout, dropout, downsample_dropout, upsample_dropout, decoder_dropout: probabilities in
            the attention, the feed-forward networks, the convolutions and the decoder (GT table 7).
        activation, downsample_activation, upsample_activation, decoder_activation: names as in :class:`TNO`
            or functions; upsample_activation=None is `activation`. GT uses SiLU, and ReLU next to a function
            that jumps.
        device, dtype: of the parameters.

    Raises:
        ValueError: a number out of range, an unknown name, coarsening with coord_dim other than 2,
            coarse_output without coarsening.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        coord_dim: int,
        *,
        d_model: int = 96,
        num_heads: int = 1,
        num_layers: int = 4,
        dim_feedforward: int | None = None,
        attention_type: AttentionType = "galerkin",
        layer_norm: LayerNormScheme = "galerkin",
        eta: float = 1e-2,
        delta: float = 1e-2,
        coarsening: float | None = None,
        coarse_output: bool = False,
        middle: Sequence[int] | None = None,
        convolutions: Literal["residual", "plain"] = "residual",
        decoder: Literal["spectral", "pointwise", "linear"] = "spectral",
        decoder_layers: int = 2,
        decoder_channels: int | None = None,
        decoder_lift: bool = False,
        modes: int = 16,
        head_channels: int | None = None,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        downsample_dropout: float = 0.0,
        upsample_dropout: float = 0.0,
        decoder_dropout: float = 0.0,
        activation: str | Activation = "silu",
        downsample_activation: str | Activation = "silu",
        upsample_activation: str | Activation | None = None,
        decoder_activation: str | Activation = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width = d_model if decoder_channels is None else decoder_channels
        head = width if head_channels is None else head_channels
        for name, number, least in (
            ("in_channels", in_channels, 1),
            ("out_channels", out_channels, 1),
            ("coord_dim", coord_dim, 1),
            ("num_layers", num_layers, 1),
            ("decoder_layers", decoder_layers, 0),
            ("decoder_channels", width, 1),
            ("head_channels", head, 1),
        ):
            if number < least:
                raise ValueError(f"{name} must be at least {least}, was {number}")
        if decoder not in ("spectral", "pointwise", "linear"):
            raise ValueError(f'decoder must be "spectral", "pointwise" or "linear", was {decoder!r}')
        if coarsening is not None and not coarsening >= 1:
            raise ValueError(f"coarsening must be None or at least 1, was {coarsening}")
        if coarsening is not None and coord_dim != 2:
            raise ValueError(f"coord_dim must be 2 with coarsening, was {coord_dim}")
        if coarse_output and coarsening is None:
            raise ValueError("coarse_output must be False without coarsening, was True")
        if convolutions not in ("residual", "plain"):
            raise ValueError(f'convolutions must be "residual" or "plain", was {convolutions!r}')
        if middle is not None and (coarsening is None or len(middle) != 2 or min(middle) < 1):
            raise ValueError(f"middle must be None, or with coarsening 2 sizes of at least 1, was {middle}")
        plain = convolutions == "plain"
        self.middle = None if middle is None else tuple(middle)
        self.in_channels, self.out_channels, self.coord_dim = in_channels, out_channels, coord_dim
        self.coarsening, self.coarse_output = coarsening, coarse_output
        between = resolve_activation(activation)

        self.lift: nn.Linear | None = None
        self.downsample: Downsample | None = None
        self.upsample: Upsample | None = None
        if coarsening is None:
            self.lift = nn.Linear(in_channels + coord_dim, d_model, device=device, dtype=dtype)
        else:
            first = resolve_activation(downsample_activation)
            self.downsample = Downsample(
                in_channels, d_model, first, downsample_dropout, plain=plain, device=device, dtype=dtype
            )
            if not coarse_output:
                back = between if upsample_activation is None else resolve_activation(upsample_activation)
                self.upsample = Upsample(
                    d_model, back, upsample_dropout, plain=plain, device=device, dtype=dtype
                )
        self.layers = nn.ModuleList(
            GalerkinEncoderLayer(
                d_model,
                num_heads,
                dim_feedforward,
                attention_type=attention_type,
                coord_dim=coord_dim,
                layer_norm=layer_norm,
                attention_dropout=attention_dropout,
                dropout=dropout,
                activation=between,
                eta=eta,
                delta=delta,
                device=device,
                dtype=dtype,
            )
            for _ in range(num_layers)
        )
        last = resolve_activation(decoder_activation)
        self.decoder: SpectralDecoder | PointwiseDecoder | LinearDecoder
        if decoder == "spectral":
            self.decoder = SpectralDecoder(
                d_model,
                out_channels,
                coord_dim,
                channels=width,
                layers=decoder_layers,
                modes=modes,
                lift=decoder_lift,
                head_channels=head,
                dropout=decoder_dropout,
                activation=last,
                device=device,
                dtype=dtype,
            )
        elif decoder == "linear":
            self.decoder = LinearDecoder(d_model, out_channels, device=device, dtype=dtype)
        else:
            self.decoder = PointwiseDecoder(
                d_model + coord_dim,
                out_channels,
                channels=width,
                layers=decoder_layers,
                dropout=decoder_dropout,
                activation=last,
                device=device,
                dtype=dtype,
            )

    def coarse_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Points per axis of the encoder's grid for a fine grid of this shape."""
        if self.coarsening is None:
            return tuple(shape)
        return tuple(1 + round((n - 1) / self.coarsening) for n in shape)

    def forward(self, u: Tensor, mesh: Mesh | Tensor | ShardedMesh) -> Tensor:
        """Evaluate the operator on one function per batch entry.

        Args:
            u: (B, N, in_channels), samples at the points of the mesh, in their order (a grid's is
                row-major), in the dtype of the parameters.
            mesh: a `Grid`, a `PointCloud` or another `Mesh`; or the points alone, (N, d), (B, N, d) or, if
                d = 1, (N,), whose weights are then equal, or those of an enclosing
                `continuum_ops.nn.quadrature`. Or a `continuum_ops.distributed.ShardedMesh`: u and the output
                are then this rank's part, and the output is that of one process. The encoder's points stay
                spread over the ranks, with one all-reduce of d_k x d_k matrices a layer ("softmax": a ring).
                The spectral decoder and the convolutional networks need whole grids: every rank gathers
                their input, holds their fields, B N channels numbers each, and computes them for all points.
                Dropout there and at single points draws from each rank's own generator.

        Returns:
            (B, N, out_channels), or with coarse_output (B, N_c, out_channels) on the coarse grid, whose
            corners are those of the fine one.

        Raises:
            ValueError: a shape that does not fit; a mesh that is no evenly spaced `Grid` where one is needed;
                coarse_output with a mesh that is spread over ranks, which says nothing of the coarse grid.
        """
        if is_spread(mesh):
            return self._over_ranks(u, mesh)
        points = self._points(u, mesh)
        if self.downsample is not None:
            return self._on_two_grids(u, mesh, points)
        v = self._encode(self._lift(u, points), points, mesh.weights if isinstance(mesh, Mesh) else None)
        shape: tuple[int, ...] = (u.shape[1],)
        if isinstance(self.decoder, SpectralDecoder):
            shape = _even_grid(mesh).shape
        return self.decoder(v, points, shape)

    def _points(self, u: Tensor, mesh: Mesh | Tensor) -> Tensor:
        if u.dim() != 3 or u.shape[-1] != self.in_channels:
            raise ValueError(f"u must have shape (B, N, {self.in_channels}), was {tuple(u.shape)}")
        points = mesh.points if isinstance(mesh, Mesh) else mesh
        points = points[:, None] if points.dim() == 1 else points
        batch, n = u.shape[:2]
        expected = (n, self.coord_dim)
        if tuple(points.shape) not in (expected, (batch, *expected)):
            raise ValueError(
                f"mesh must have points of shape {expected} or {(batch, *expected)} for u of shape "
                f"{tuple(u.shape)}, was {tuple(points.shape)}"
            )
        return points.to(u.dtype)

    def _lift(self, u: Tensor, points: Tensor) -> Tensor:
        assert self.lift is not None
        return self.lift(torch.cat([u, points.expand(*u.shape[:2], -1)], dim=-1))

    def _encode(
        self, v: Tensor, points: Tensor, weights: Tensor | None, spread: ShardedMesh | None = None
    ) -> Tensor:
        if weights is not None:
            total = weights.sum(-1, keepdim=True)
            if spread is not None:
                from ..distributed import all_reduce

                total = all_reduce(total, spread.group)
            # A mesh without weight has nothing to integrate; 0 / 0 would make NaN of it.
            weights = weights / torch.where(total == 0, 1.0, total)
        for layer in self.layers:
            v = layer(v, points, weights=weights, group=spread)
        return v

    def _over_ranks(self, u: Tensor, mesh: ShardedMesh) -> Tensor:
        from .. import distributed

        points = self._points(u, mesh.part)
        if self.downsample is not None:
            if self.coarse_output:
                raise ValueError(
                    "coarse_output must be False for a mesh that is spread over ranks, which says nothing of "
                    "the coarse grid, was True"
                )
            grid = _grid(mesh.grid, "a model with coarsening")
            whole = self._on_two_grids(distributed.gather(u, mesh), grid, grid.points.to(u.dtype), mesh.group)
            return mesh.select(whole)
        v = self._encode(self._lift(u, points), points, mesh.part.weights, mesh)
        if not isinstance(self.decoder, SpectralDecoder):
            return self.decoder(v, points, (u.shape[1],))
        grid = _even_grid(mesh.grid)
        return mesh.select(self.decoder(distributed.gather(v, mesh), grid.points.to(u.dtype), grid.shape))

    def _encode_coarse(
        self, v: Tensor, points: Tensor, weights: Tensor, group: ProcessGroup | None
    ) -> Tensor:
        """On a grid that every rank holds, of which each takes a part."""
        if group is None:
            return self._encode(v, points, weights)
        from .. import distributed

        mesh = distributed.shard(PointCloud(points, weights), group)
        v = self._encode(mesh.select(v), mesh.part.points, mesh.part.weights, mesh)
        return distributed.gather(v, mesh)

    def _on_two_grids(
        self, u: Tensor, mesh: Mesh | Tensor, points: Tensor, group: ProcessGroup | None = None
    ) -> Tensor:
        assert self.downsample is not None
        grid = _grid(mesh, "a model with coarsening")
        if "periodic" in grid.kind:
            raise ValueError(
                'mesh must have axes of kind "endpoint" or "cell" with coarsening, was "periodic"'
            )
        coarse = self.coarse_shape(grid.shape)
        axes = [coarse_axis(x, n).to(u.dtype) for x, n in zip(grid.axes, coarse, strict=True)]
        weights = [coarse_axis(w, n) for w, n in zip(grid.axis_weights, coarse, strict=True)]
        coarse_points = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
        v = self.downsample(u.unflatten(1, grid.shape).movedim(-1, 1), coarse, self.middle)
        v = v.flatten(2).transpose(1, 2)
        v = self._encode_coarse(v, coarse_points, (weights[0][:, None] * weights[1]).flatten(), group)
        if self.upsample is None:
            return self.decoder(v, coarse_points, coarse)
        v = self.upsample(v.transpose(1, 2).unflatten(-1, coarse), grid.shape, self.middle)
        return self.decoder(v.flatten(2).transpose(1, 2), points, grid.shape)


class SpectralDecoder(nn.Module):
    """Layers act(SpectralConv(v) + linear(v)) on a grid, then a two-layer pointwise network."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        coord_dim: int,
        *,
        channels: int,
        layers: int,
        modes: int,
        lift: bool,
        head_channels: int,
        dropout: float,
        activation: Activation,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.lift: nn.Linear | None = None
        if lift:
            self.lift = nn.Linear(in_channels + coord_dim, channels, device=device, dtype=dtype)
        widths = [channels if lift else in_channels] + [channels] * layers
        pairs = list(itertools.pairwise(widths))
        self.convolutions = nn.ModuleList(
            SpectralConv(i, o, (modes,) * coord_dim, device=device, dtype=dtype) for i, o in pairs
        )
        self.linears = nn.ModuleList(nn.Linear(i, o, device=device, dtype=dtype) for i, o in pairs)
        self.head = nn.Linear(widths[-1], head_channels, device=device, dtype=dtype)
        self.out = nn.Linear(head_channels, out_channels, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation

    def forward(self, v: Tensor, points: Tensor, shape: Sequence[int]) -> Tensor:
        if self.lift is not None:
            v = self.lift(torch.cat([v, points.expand(*v.shape[:-1], -1)], dim=-1))
        v = v.unflatten(1, tuple(shape))
        for convolution, linear in zip(self.convolutions, self.linears, strict=True):
            v = self.activation(self.dropout(convolution(v)) + linear(v))
        return self.out(self.activation(self.head(v))).flatten(1, -2)


class PointwiseDecoder(nn.Module):
    """A network of `layers` hidden maps, the same at each point, of (v, x)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        channels: int,
        layers: int,
        dropout: float,
        activation: Activation,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        widths = [in_channels] + [channels] * (layers + 1)
        self.hidden = nn.ModuleList(
            nn.Linear(i, o, device=device, dtype=dtype) for i, o in itertools.pairwise(widths)
        )
        self.out = nn.Linear(channels, out_channels, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation

    def forward(self, v: Tensor, points: Tensor, shape: Sequence[int]) -> Tensor:
        v = torch.cat([v, points.expand(*v.shape[:-1], -1)], dim=-1)
        for linear in self.hidden:
            v = self.dropout(self.activation(linear(v)))
        return self.out(v)


class LinearDecoder(nn.Linear):
    """One linear map of v at each point."""

    def forward(self, v: Tensor, points: Tensor, shape: Sequence[int]) -> Tensor:  # type: ignore[override]
        return super().forward(v)


def _grid(mesh: Mesh | Tensor | None, who: str) -> Grid:
    if not isinstance(mesh, Grid):
        kind = "a part of another mesh" if mesh is None else type(mesh).__name__
        raise ValueError(f"mesh must be a Grid for {who}, was {kind}")
    return mesh


def _even_grid(mesh: Mesh | Tensor | None) -> Grid:
    grid = _grid(mesh, "the spectral decoder")
    check_even(grid, "the spectral decoder")
    return grid
