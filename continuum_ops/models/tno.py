"""Transformer neural operator (TNO): an encoder of continuum attention on any mesh of any dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ..mesh import Mesh
from ._checks import check_integer, check_tensor, is_spread
from .tno_layer import Activation, PointwiseNetwork, TNOEncoderLayer, resolve_activation

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from ..distributed import ShardedMesh


class TNO(nn.Module):
    """Transformer neural operator u -> z between functions on a domain D of dimension d.

    ::

        v_0 = T_in(u)        at each point: lift of (u(x), x)                    CA (14), (15)
        v_l = E(v_{l-1})     num_layers times: multi-head continuum attention,
                             pointwise feed-forward network                      CA (10), (11), (16)-(18)
        z   = T_out(v_L)     at each point                                       CA (19)

    The integrals of the attention are sums over the mesh with its quadrature weights (CA appendix B.1, eq.
    57-59 for trapezoid weights), so one set of parameters serves every mesh: as a mesh is refined the output
    converges, at the order of the quadrature rule. Scores carry 1 / sqrt(d_model / num_heads), which CA (59)
    leaves to the query's matrix. Source: CA section 4.2 and appendix B.1.

    Args:
        in_channels: channels of the input function u.
        out_channels: channels of the output function.
        coord_dim: dimension d of the domain.
        d_model: channels inside the encoder, divisible by num_heads.
        num_heads: attention heads, each with d_model / num_heads channels.
        num_layers: encoder layers.
        dim_feedforward: hidden channels of the feed-forward network; None: d_model, as in CA (18).
        dropout: probability, placed as in ``torch.nn.TransformerEncoderLayer``.
        activation: "gelu", "relu", "silu", "tanh" or a function of a tensor.
        norm_first: normalise before a sub-layer instead of after the sum of CA (10). Not with "universal".
        initial_channels: channels of an initial condition; 0: none. The mesh point with index 0 then has
            more known channels than the others and a lift of its own, of (u(x_0), initial, x_0); the other
            points keep theirs (CA 6.1). The others see it with the quadrature weight of that one point.
        variant: "standard" as above, or "universal", the form of the universal approximation theorems 22
            and 23 of CA section 5: no layer norm, learnable W1 and W2, and a two-layer lift and projection
            that both take the coordinates, hidden width d_model (CA 31-34). The theorems ask for a smooth
            activation that is no polynomial, which "relu" is not.
        residual_weights: learnable W1, W2 of CA (10), which start as the identity. CA section 6 uses the
            identity itself: False. "universal" has them in either case.
        device, dtype: of the parameters.

    Raises:
        ValueError: a number out of range, d_model not divisible by num_heads, an unknown name, or norm_first
            with the variant "universal".
        TypeError: a number of channels, heads or layers that is no int; an activation that is no function.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        coord_dim: int,
        *,
        d_model: int = 128,
        num_heads: int = 8,
        num_layers: int = 6,
        dim_feedforward: int | None = None,
        dropout: float = 0.0,
        activation: str | Activation = "gelu",
        norm_first: bool = False,
        initial_channels: int = 0,
        variant: Literal["standard", "universal"] = "standard",
        residual_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dim_feedforward = d_model if dim_feedforward is None else dim_feedforward
        for name, number, least in (
            ("in_channels", in_channels, 1),
            ("out_channels", out_channels, 1),
            ("coord_dim", coord_dim, 1),
            ("d_model", d_model, 1),
            ("num_heads", num_heads, 1),
            ("num_layers", num_layers, 1),
            ("dim_feedforward", dim_feedforward, 1),
            ("initial_channels", initial_channels, 0),
        ):
            check_integer(name, number, least)
        if d_model % num_heads:
            raise ValueError(
                f"d_model must be divisible by num_heads, was {d_model} with num_heads {num_heads}"
            )
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must be a probability between 0 and 1, was {dropout}")
        if variant not in ("standard", "universal"):
            raise ValueError(f'variant must be "standard" or "universal", was {variant!r}')
        universal = variant == "universal"
        if universal and norm_first:
            raise ValueError(
                'norm_first must be False with variant="universal", which has no layer norm; was True'
            )
        function = resolve_activation(activation)

        self.in_channels = in_channels
        self.out_channels = out_channels
        self.coord_dim = coord_dim
        self.initial_channels = initial_channels
        self.variant = variant

        def pointwise(in_features: int, out_features: int) -> nn.Module:
            if universal:
                return PointwiseNetwork(
                    in_features, d_model, out_features, function, device=device, dtype=dtype
                )
            return nn.Linear(in_features, out_features, device=device, dtype=dtype)

        self.lift = pointwise(in_channels + coord_dim, d_model)
        self.lift_initial = (
            pointwise(in_channels + initial_channels + coord_dim, d_model) if initial_channels else None
        )
        self.layers = nn.ModuleList(
            TNOEncoderLayer(
                d_model,
                num_heads,
                dim_feedforward,
                dropout,
                function,
                norm_first=norm_first,
                layer_norm=not universal,
                residual_weights=universal or residual_weights,
                device=device,
                dtype=dtype,
            )
            for _ in range(num_layers)
        )
        self.projection = pointwise(d_model + (coord_dim if universal else 0), out_channels)

    def forward(
        self,
        u: Tensor,
        mesh: Mesh | Tensor | ShardedMesh,
        initial: Tensor | None = None,
        *,
        weights: Tensor | Literal["mesh", "equal"] = "mesh",
        group: ProcessGroup | DeviceMesh | ShardedMesh | None = None,
    ) -> Tensor:
        """Evaluate the operator on one function per batch entry.

        Args:
            u: (B, N, in_channels), samples of the input function at the points of the mesh, in their order
                (a grid's is row-major), of the dtype of the parameters.
            mesh: a `Grid`, a `PointCloud` or another `Mesh` on the device of u, with points (N, d) or
                (B, N, d). Or the points alone, (N,) too if d = 1; their weights are then equal, or those of
                an enclosing `continuum_ops.nn.quadrature`.
            initial: (B, initial_channels), the further channels known at the mesh point with index 0, of
                the dtype of u.
            weights: "mesh", the weights of the mesh; "equal", the same weight for every point, to compare
                with plain softmax attention; or a tensor (N,) or (B, N) of quadrature weights >= 0 in
                place of the mesh's. Only their ratios matter.
            group: the ranks that the mesh is spread over: u, mesh and weights are this rank's part, of N
                points of its own, also none, and so is the output, which is that of the whole mesh on one
                process. Not with initial_channels. In training the attention's dropout is that of one
                process; dropout at single points draws from each rank's own generator, so give the ranks
                different seeds. None: the ranks of a `continuum_ops.distributed.ShardedMesh`; for any other
                mesh, this process has all of it.

        Returns:
            (B, N, out_channels), the output function at the same points.

        Raises:
            ValueError: a shape, dtype or device that does not fit; initial missing, or not asked for; with a
                group, initial_channels.
            TypeError: an argument of another type.
        """
        self._check_input(u, initial)
        if is_spread(mesh):
            group = mesh if group is None else group
            mesh = mesh.part
        if group is not None and self.initial_channels:
            raise ValueError(
                "initial_channels must be 0 on a mesh that is spread over ranks, one of which has the "
                f"initial point, was {self.initial_channels}"
            )
        points, w = self._geometry(u, mesh, weights)
        inputs = torch.cat([u, points], dim=-1)
        if self.lift_initial is None or initial is None:
            v = self.lift(inputs)
        else:
            first = torch.cat([u[:, :1], initial[:, None, :], points[:, :1]], dim=-1)
            v = torch.cat([self.lift_initial(first), self.lift(inputs[:, 1:])], dim=1)
        for layer in self.layers:
            v = layer(v, weights=w, group=group)
        if self.variant == "universal":
            v = torch.cat([v, points], dim=-1)
        return self.projection(v)

    def _check_input(self, u: Tensor, initial: Tensor | None) -> None:
        if not isinstance(u, Tensor):
            raise TypeError(f"u must be a tensor, was {type(u).__name__}")
        if u.ndim != 3 or u.shape[-1] != self.in_channels:
            hint = "; the axes of a grid are one: u.flatten(1, -2)" if u.ndim > 3 else ""
            raise ValueError(f"u must have shape (B, N, {self.in_channels}), was {tuple(u.shape)}{hint}")
        expected = next(self.parameters()).dtype
        castable = u.is_floating_point() and torch.is_autocast_enabled(u.device.type)
        if u.dtype != expected and not castable:
            raise ValueError(f"u must have the dtype of the parameters, {expected}, was {u.dtype}")
        if self.initial_channels == 0:
            if initial is not None:
                raise ValueError("initial must be None for a model with initial_channels=0, was a tensor")
            return
        if initial is None:
            raise ValueError(
                f"initial must be a tensor of shape (B, {self.initial_channels}) for a model with "
                f"initial_channels={self.initial_channels}, was None"
            )
        check_tensor("initial", initial, u, [(u.shape[0], self.initial_channels)])
        if initial.dtype != u.dtype:
            raise ValueError(f"initial must have the dtype of u, {u.dtype}, was {initial.dtype}")
        if u.shape[1] == 0:
            raise ValueError("u must have at least one point where initial is given, was empty")

    def _geometry(
        self, u: Tensor, mesh: Mesh | Tensor | ShardedMesh, weights: Tensor | Literal["mesh", "equal"]
    ) -> tuple[Tensor, Tensor | None]:
        """Points (B, N, d) in the dtype of u and weights (N,), (B, N) or None in float32 or wider."""
        batch, n = u.shape[:2]
        shapes = [(n, self.coord_dim), (batch, n, self.coord_dim)]
        w: Tensor | None = None
        if isinstance(mesh, Mesh):
            points, w = mesh.points, mesh.weights
            check_tensor("mesh.points", points, u, shapes)
        elif isinstance(mesh, Tensor):
            points = mesh[:, None] if mesh.ndim == 1 and self.coord_dim == 1 else mesh
            check_tensor("mesh", points, u, shapes)
        else:
            raise TypeError(
                f"mesh must be a Grid, a PointCloud or a tensor of points, was {type(mesh).__name__}"
            )
        name = "mesh.weights"
        if isinstance(weights, Tensor):
            name, w = "weights", weights
        elif not isinstance(weights, str):
            raise TypeError(f'weights must be "mesh", "equal" or a tensor, was {type(weights).__name__}')
        elif weights == "equal":
            # Explicit ones: a surrounding co.nn.quadrature must not put other weights in their place.
            w = u.new_ones(n, dtype=torch.float32)
        elif weights != "mesh":
            raise ValueError(f'weights must be "mesh", "equal" or a tensor, was {weights!r}')
        if w is not None:
            check_tensor(name, w, u, [(n,), (batch, n)])
            w = w.to(torch.promote_types(u.dtype, torch.float32))
        return points.to(u.dtype).expand(batch, n, self.coord_dim), w

    def extra_repr(self) -> str:
        return (
            f"in_channels={self.in_channels}, out_channels={self.out_channels}, coord_dim={self.coord_dim}, "
            f"initial_channels={self.initial_channels}, variant={self.variant!r}"
        )
