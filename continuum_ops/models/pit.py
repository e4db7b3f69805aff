"""Position-induced transformer (PiT): position attention on any mesh of any dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..mesh import Grid, Mesh
from ..nn import PositionAttention
from ..nn.position_attention import RateFunction, mesh_period
from ..ops.quantile_radius import quantile_radius
from ._checks import check_integer, check_tensor
from .pit_latent import farthest_point_mesh, pool_mesh
from .pit_layer import MeshPair, PiTBlock, SelfAttention, Weights, attend
from .tno_layer import PointwiseNetwork

if TYPE_CHECKING:
    from ..distributed import ShardedMesh

Attention = Literal["position", "self-position", "self-a", "self-b"]
_ATTENTION = ("position", "self-position", "self-a", "self-b")
# Geometries kept by a model: training and test resolutions of a study, and a few more.
_KEPT = 16


class PiTGeometry(NamedTuple):
    """Meshes and radii of a forward pass, from `PiT.geometry`; takes the place of the mesh in a call."""

    encoder: MeshPair
    processor: MeshPair
    decoder: MeshPair
    output: MeshPair

    def shard(self, mesh: ShardedMesh, output_mesh: ShardedMesh | None = None) -> PiTGeometry:
        """This rank's part, for a model whose input and output meshes are spread over ranks.

        ::

            geometry = model.geometry(mesh)                        # of the whole mesh, on every rank
            parts = continuum_ops.distributed.shard(mesh)
            z = model(parts.select(u), geometry.shard(parts))      # at the points of this rank's part

        The latent mesh stays whole on every rank: the encoder adds up the ranks' parts of its integrals, by
        all-reduces of the latent mesh's size, the processor is computed by all ranks, the decoder sends
        nothing.

        Args:
            mesh: the input mesh of the geometry, spread over ranks.
            output_mesh: its output mesh likewise, over the same ranks; None: the input mesh.

        Raises:
            ValueError: another number of points; a geometry without a latent mesh of its own.
        """
        output_mesh = mesh if output_mesh is None else output_mesh
        if self.encoder.query is self.encoder.key:
            raise ValueError(
                "geometry must have a latent mesh of its own to be spread over ranks; this one works on the "
                "input mesh"
            )

        def part(name: str, spread: ShardedMesh, whole: Mesh | Tensor) -> Mesh:
            points = _points(whole)
            if points.shape[-2] != spread.total:
                raise ValueError(
                    f"{name} must be the one of the geometry with {points.shape[-2]} points, "
                    f"had {spread.total}"
                )
            return spread.to(dtype=points.dtype).part

        encoder = self.encoder._replace(key=part("mesh", mesh, self.encoder.key), group=mesh.group)
        outputs, radius = part("output_mesh", output_mesh, self.decoder.query), self.decoder.radius
        if radius is not None:
            radius = output_mesh.select(radius, -1)
        decoder = self.decoder._replace(query=outputs, radius=radius)
        return PiTGeometry(encoder, self.processor, decoder, self.output)


class PiT(nn.Module):
    """Position-induced transformer u -> z between functions on a domain of dimension d (PiT section 2.3).

    ::

        v = f(LINEAR(u(x), x))                  lift, at the points of the input mesh
        v = f(A_in(v))                          local cross attention to the latent mesh
        v = f(MLP(f(A(v))) + LINEAR(v))         num_layers times: global attention on the latent mesh
        z = f(A_out(v))                         local cross attention to the output mesh
        z = MLP(z)                              two linear maps with f between

    with f = GELU and A the position attention of :class:`continuum_ops.nn.PositionAttention`. Scores know
    positions alone, and with quadrature weights the sums are integrals, so one set of parameters serves every
    mesh: input and output meshes may be refined or replaced after training. The work on the input and output
    meshes grows in proportion to their points.

    Args:
        in_channels: channels of the input function; its coordinates are appended, coord_dim more.
        out_channels: channels of the output function.
        coord_dim: dimension d of the domain, any.
        width: channels inside (the paper's encoding dimension), divisible by num_heads.
        num_heads: heads of every attention layer.
        num_layers: blocks on the latent mesh.
        decoder_layers: blocks of global attention on the output mesh, after A_out (1-D presets).
        latent: the latent mesh where a call names none. None: the input mesh; a tuple: the input's Grid
            pooled to this shape (:func:`pool_mesh`); an int: that many points of the input mesh
            (:func:`farthest_point_mesh`).
        encoder_quantile, decoder_quantile: which keys A_in and A_out see, as a quantile of the distances of
            each query (PiT table 7); None: all.
        rate_function: how rates are kept positive: "tan_clamped", "square" (PiT C.1) or "tan_sin".
        initial_rate: of the global layers, initial_local_rate: of A_in and A_out: one number or one per head,
            in 1 / length^2; None: as `PositionAttention` draws them.
        heads: "split", or "concatenate", the form of the later published code: heads that mix all channels
            without a projection and a block MLP([v, heads]); there A_in acts on (u(x), x) itself, an MLP
            lifts what it gives, and no GELU stands between attention and MLP.
        attention: "position"; "self-position": eq. (12) in the blocks (Self-PiT); "self-a": vanilla
            self-attention (eq. 3) in place of every attention layer, all on the input mesh; "self-b": in
            place of that of the num_layers blocks (section 4.4).
        local_blocks: A_in and A_out are blocks f(MLP(f(A(v))) + LINEAR(v)) themselves, which needs latent
            and output meshes that are the input mesh (elasticity).
        period: length of the domain along each axis, inf where it is not periodic. None: what the Grids of a
            call say.
        device, dtype: of the parameters.

    Raises:
        ValueError: a number out of range, an unknown name, options that exclude each other.
        TypeError: a number of channels, heads or layers that is no int.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        coord_dim: int,
        *,
        width: int = 64,
        num_heads: int = 2,
        num_layers: int = 4,
        decoder_layers: int = 0,
        latent: int | Sequence[int] | None = None,
        encoder_quantile: float | None = 0.02,
        decoder_quantile: float | None = 0.05,
        rate_function: RateFunction = "tan_clamped",
        initial_rate: float | Sequence[float] | None = None,
        initial_local_rate: float | Sequence[float] | None = None,
        heads: Literal["split", "concatenate"] = "split",
        attention: Attention = "position",
        local_blocks: bool = False,
        period: Sequence[float] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, number, least in (
            ("in_channels", in_channels, 1),
            ("out_channels", out_channels, 1),
            ("coord_dim", coord_dim, 1),
            ("width", width, 1),
            ("num_heads", num_heads, 1),
            ("num_layers", num_layers, 1),
            ("decoder_layers", decoder_layers, 0),
        ):
            check_integer(name, number, least)
        if heads == "split" and width % num_heads:
            raise ValueError(f"width must be divisible by num_heads, was {width} with num_heads {num_heads}")
        if attention not in _ATTENTION:
            raise ValueError(f"attention must be one of {', '.join(_ATTENTION)}, was {attention!r}")
        if heads == "concatenate" and (attention != "position" or local_blocks or decoder_layers):
            raise ValueError(
                'heads must be "split" with attention other than "position", with local_blocks and with '
                'decoder_layers, was "concatenate"'
            )
        if local_blocks and latent is not None:
            raise ValueError(f"latent must be None with local_blocks, was {latent}")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.coord_dim = coord_dim
        self.latent = _check_latent(latent, coord_dim)
        self.encoder_quantile = encoder_quantile
        self.decoder_quantile = decoder_quantile
        self.attention = attention
        self.local_blocks = local_blocks
        self.period = _check_period(period, coord_dim)
        self._geometries: list[tuple[tuple[Any, ...], PiTGeometry]] = []

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        concatenate = heads == "concatenate"
        rates: dict[str, Any] = {"rate_function": rate_function, "initial_rate": initial_rate}
        local_rates: dict[str, Any] = {"rate_function": rate_function, "initial_rate": initial_local_rate}

        def position(features: int, quantile: float | None) -> PositionAttention:
            kind = rates if quantile is None else local_rates
            out = num_heads * features if concatenate else width
            return PositionAttention(
                features,
                out,
                num_heads,
                quantile=quantile,
                heads=heads,
                **kind,
                **factory,
            )

        def local(features: int, quantile: float | None) -> nn.Module:
            layer: PositionAttention | SelfAttention
            if attention == "self-a":
                layer = SelfAttention(width, num_heads, None, factory)
            else:
                layer = position(features, quantile)
            return PiTBlock(width, layer, False, factory) if local_blocks else layer

        def block(on_latent: bool) -> PiTBlock:
            layer: PositionAttention | SelfAttention
            if attention == "self-position":
                layer = SelfAttention(width, num_heads, rates, factory)
            elif attention == "self-a" or (attention == "self-b" and on_latent):
                layer = SelfAttention(width, num_heads, None, factory)
            else:
                layer = position(width, None)
            return PiTBlock(width, layer, concatenate, factory)

        features = in_channels + coord_dim
        self.lift = None if concatenate else nn.Linear(features, width, **factory)
        self.encoder = local(features if concatenate else width, encoder_quantile)
        self.lift_heads = (
            PointwiseNetwork(num_heads * features, width, width, F.gelu, **factory) if concatenate else None
        )
        self.layers = nn.ModuleList(block(True) for _ in range(num_layers))
        self.decoder = local(width, decoder_quantile)
        self.decoder_layers = nn.ModuleList(block(False) for _ in range(decoder_layers))
        self.projection = PointwiseNetwork(
            num_heads * width if concatenate else width,
            width,
            out_channels,
            F.gelu,
            **factory,
        )
        self._initialise()

    def forward(
        self,
        u: Tensor,
        mesh: Mesh | Tensor | PiTGeometry,
        output_mesh: Mesh | Tensor | None = None,
        *,
        latent_mesh: Mesh | Tensor | None = None,
        weights: Weights = "mesh",
    ) -> Tensor:
        """Evaluate the operator on one function per batch entry.

        Args:
            u: (B, N, in_channels), samples of the input function at the points of the mesh, in their order
                (a grid's is row-major), of the dtype of the parameters.
            mesh: a `Grid`, a `PointCloud` or another `Mesh` on the device of u, with points (N, d) or
                (B, N, d), one mesh per sample; or the points alone, (N,) too if d = 1, whose weights are
                then equal, or those of an enclosing `continuum_ops.nn.quadrature`. Between Grids attention
                works axis by axis. Or a geometry of :meth:`geometry`, also a part of one
                (`PiTGeometry.shard`): u and the result are then at this rank's points.
            output_mesh: where the output function is asked for, likewise; None: the input mesh.
            latent_mesh: likewise; None: as ``latent`` of the constructor says.
            weights: "mesh", quadrature weights of each mesh; "equal", the paper's sums over points.

        Returns:
            (B, N_out, out_channels), the output function at the points of the output mesh.

        Raises:
            ValueError: a shape, dtype or device that does not fit; meshes that the options exclude.
            TypeError: an argument of another type.
        """
        self._check_input(u)
        if weights not in ("mesh", "equal"):
            raise ValueError(f'weights must be "mesh" or "equal", was {weights!r}')
        if isinstance(mesh, PiTGeometry):
            if output_mesh is not None or latent_mesh is not None:
                raise ValueError("output_mesh and latent_mesh must be None where mesh is a PiTGeometry")
            geometry = mesh
            if geometry.encoder.group is not None and len(self.decoder_layers):
                raise ValueError(
                    "decoder_layers must be 0 for a mesh that is spread over ranks, "
                    f"was {len(self.decoder_layers)}"
                )
        else:
            geometry = self.geometry(mesh, output_mesh, latent_mesh)
        points = _points(geometry.encoder.key)
        batch, n = u.shape[:2]
        check_tensor("mesh", points, u, [(n, self.coord_dim), (batch, n, self.coord_dim)])

        v = torch.cat([u, points.to(u.dtype).expand(batch, n, self.coord_dim)], dim=-1)
        if self.lift is not None:
            v = F.gelu(self.lift(v))
        v = self._local(self.encoder, v, geometry.encoder, weights)
        if self.lift_heads is not None:
            v = F.gelu(self.lift_heads(v))
        for layer in self.layers:
            v = layer(v, geometry.processor, weights)
        v = self._local(self.decoder, v, geometry.decoder, weights)
        for layer in self.decoder_layers:
            v = layer(v, geometry.output, weights)
        return self.projection(v)

    # Radii and latent meshes are made once and kept by the identity of mesh objects: work for eager mode.
    @torch.compiler.disable(reason="pass PiT a geometry made outside: model(u, model.geometry(mesh))")
    def geometry(
        self,
        mesh: Mesh | Tensor,
        output_mesh: Mesh | Tensor | None = None,
        latent_mesh: Mesh | Tensor | None = None,
    ) -> PiTGeometry:
        """Latent mesh and quantile radii for an input and an output mesh, in the dtype of the parameters.

        The model keeps what it finds for the last 16 combinations of `Mesh` objects and finds it again as
        long as the objects are the same and their tensors were not written to. Nothing is kept for tensors,
        for coordinates that require a gradient, or inside a transform of torch.func; hold on to the result
        where these come again. torch.compile and torch.export do not see into this method: give a compiled
        model what it returns.

        Arguments and errors as of :meth:`forward`.
        """
        given = (mesh, output_mesh, latent_mesh)
        for name, value in zip(("mesh", "output_mesh", "latent_mesh"), given, strict=True):
            if value is None and name != "mesh":
                continue
            _check_mesh(name, value, self.coord_dim)
        parameter = next(self.parameters())
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        meshes = [m for m in given if isinstance(m, Mesh)]
        if any(isinstance(m, Tensor) for m in given) or any(map(_requires_grad, meshes)):
            return self._make_geometry(*given, dtype)
        key = (dtype, *given, *(version for m in meshes for version in _versions(m)))
        for known, geometry in self._geometries:
            if len(known) == len(key) and all(a is b or a == b for a, b in zip(known, key, strict=True)):
                return geometry
        geometry = self._make_geometry(*given, dtype)
        if torch._C._are_functorch_transforms_active():
            return geometry
        self._geometries = [*self._geometries[1 - _KEPT :], (key, geometry)]
        return geometry

    def _make_geometry(
        self,
        mesh: Mesh | Tensor,
        output_mesh: Mesh | Tensor | None,
        latent_mesh: Mesh | Tensor | None,
        dtype: torch.dtype,
    ) -> PiTGeometry:
        on_input_mesh = self.local_blocks or self.attention == "self-a"
        if on_input_mesh and not (output_mesh is None and latent_mesh is None):
            raise ValueError(
                'output_mesh and latent_mesh must be None: with local_blocks and with attention="self-a" the '
                "model works on the input mesh alone"
            )
        inputs = _in_dtype(mesh, self.coord_dim, dtype)
        outputs = inputs if output_mesh is None else _in_dtype(output_mesh, self.coord_dim, dtype)
        if latent_mesh is not None:
            latents = _in_dtype(latent_mesh, self.coord_dim, dtype)
        elif self.latent is None or on_input_mesh:
            latents = inputs
        elif isinstance(self.latent, int):
            period = self.period if self.period is not None else mesh_period(inputs, inputs)
            latents = farthest_point_mesh(inputs, self.latent, period=period)
        elif isinstance(inputs, Grid):
            latents = pool_mesh(inputs, self.latent)
        else:
            raise ValueError(
                f"latent_mesh must be given for a model with latent={self.latent} where mesh is no "
                "Grid: pool_mesh makes one of structured points, farthest_point_mesh of any"
            )

        def pair(query: Mesh | Tensor, key: Mesh | Tensor, quantile: float | None) -> MeshPair:
            period = self.period if self.period is not None else mesh_period(query, key)
            if quantile is None or self.attention == "self-a":
                return MeshPair(query, key, None, period)
            x, y = (m if isinstance(m, (Grid, Tensor)) else m.points for m in (query, key))
            with torch.no_grad():
                return MeshPair(query, key, quantile_radius(x, y, quantile, period=period), period)

        return PiTGeometry(
            pair(latents, inputs, self.encoder_quantile),
            pair(latents, latents, None),
            pair(outputs, latents, self.decoder_quantile),
            pair(outputs, outputs, None),
        )

    @staticmethod
    def _local(layer: nn.Module, v: Tensor, pair: MeshPair, weights: Weights) -> Tensor:
        if isinstance(layer, PiTBlock):
            return layer(v, pair, weights)
        assert isinstance(layer, (PositionAttention, SelfAttention))
        mixed = attend(layer, v, pair, weights)
        # The published form with concatenated heads has no activation there.
        concatenated = isinstance(layer, PositionAttention) and layer.heads == "concatenate"
        return mixed if concatenated else F.gelu(mixed)

    def _initialise(self) -> None:
        """Weights of variance 2 / fan-in, biases 0.

        With 1 / fan-in each GELU and each average would shrink what depends on u, until the network is
        almost linear in it and learns little else.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=(2.0 / module.in_features) ** 0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def _check_input(self, u: Tensor) -> None:
        if not isinstance(u, Tensor):
            raise TypeError(f"u must be a tensor, was {type(u).__name__}")
        if u.ndim != 3 or u.shape[-1] != self.in_channels:
            raise ValueError(f"u must have shape (B, N, {self.in_channels}), was {tuple(u.shape)}")
        expected = next(self.parameters()).dtype
        castable = u.is_floating_point() and torch.is_autocast_enabled(u.device.type)
        if u.dtype != expected and not castable:
            raise ValueError(f"u must have the dtype of the parameters, {expected}, was {u.dtype}")

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles find their geometries anew: the meshes of the original are other objects there.
        return {**self.__dict__, "_geometries": []}

    def extra_repr(self) -> str:
        return (
            f"in_channels={self.in_channels}, out_channels={self.out_channels}, coord_dim={self.coord_dim}, "
            f"latent={self.latent}, attention={self.attention!r}"
        )


def _check_latent(latent: int | Sequence[int] | None, coord_dim: int) -> int | tuple[int, ...] | None:
    if latent is None:
        return None
    if isinstance(latent, int):
        check_integer("latent", latent, 1)
        return latent
    shape = tuple(latent)
    if len(shape) != coord_dim or not all(isinstance(n, int) and n >= 1 for n in shape):
        raise ValueError(f"latent must be None, an int or {coord_dim} sizes of at least 1, was {latent}")
    return shape


def _check_period(period: Sequence[float] | None, coord_dim: int) -> tuple[float, ...] | None:
    if period is None:
        return None
    lengths = tuple(float(p) for p in period)
    if len(lengths) != coord_dim or not all(p > 0 for p in lengths):
        raise ValueError(f"period must be None or {coord_dim} positive numbers, was {period}")
    return lengths


def _check_mesh(name: str, mesh: Any, coord_dim: int) -> None:
    if not isinstance(mesh, (Mesh, Tensor)):
        raise TypeError(
            f"{name} must be a Grid, a PointCloud or a tensor of points, was {type(mesh).__name__}"
        )
    if isinstance(mesh, Tensor) and not mesh.is_floating_point():
        raise TypeError(f"{name} must have a floating dtype, was {mesh.dtype}")
    line = isinstance(mesh, Tensor) and mesh.ndim == 1 and coord_dim == 1
    points = mesh.shape if isinstance(mesh, Tensor) else (len(mesh), mesh.ndim)
    if not line and (len(points) not in (2, 3) or points[-1] != coord_dim):
        raise ValueError(
            f"{name} must have points of shape (N, {coord_dim}) or (B, N, {coord_dim}), was {tuple(points)}"
        )


def _points(mesh: Mesh | Tensor) -> Tensor:
    return mesh.points if isinstance(mesh, Mesh) else mesh


def _in_dtype(mesh: Mesh | Tensor, coord_dim: int, dtype: torch.dtype) -> Mesh | Tensor:
    if isinstance(mesh, Mesh):
        return mesh if mesh.dtype == dtype else mesh.to(dtype=dtype)
    return (mesh[:, None] if mesh.ndim == 1 and coord_dim == 1 else mesh).to(dtype)


def _tensors(mesh: Mesh) -> tuple[Tensor, ...]:
    # The points of a Grid are made on demand and may be many.
    return (*mesh.axes, *mesh.axis_weights) if isinstance(mesh, Grid) else (mesh.points, mesh.weights)


def _requires_grad(mesh: Mesh) -> bool:
    return any(t.requires_grad for t in _tensors(mesh))


def _versions(mesh: Mesh) -> tuple[int, ...]:
    return tuple(t._version for t in _tensors(mesh))
