"""The Fourier neural operator of the neuraloperator package, on this package's meshes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..mesh import Grid, Mesh
from ._checks import check_even, check_integer


class FNO(nn.Module):
    """Fourier neural operator u -> z of Li et al., as ``neuralop.models.FNO`` has it: a baseline.

    ::

        v_0 = P(u, x)                                 at each point, two layers
        v_l = gelu(W v_{l-1} + F^-1(R F v_{l-1}))     num_layers times, R on the lowest frequencies, each with
                                                      a pointwise network
        z   = Q(v_L)                                  at each point, two layers

    x are coordinates in [0, 1] along the axes of the grid. The Fourier transform takes every grid for
    periodic. Weights of the mesh are not used: on an even grid they are equal inside.

    Args:
        in_channels: channels of the input function u.
        out_channels: channels of the output function.
        coord_dim: dimension d of the domain.
        modes: frequencies that are kept on each axis, negative ones included (``n_modes``): `modes` of them,
            of the last axis, which is real, modes // 2 + 1.
        width: channels inside.
        num_layers: Fourier layers.
        lift_channels: hidden channels of P and Q.

    The parameters on the frequencies are complex numbers, and count once each.

    Raises:
        ValueError: a number out of range.
        TypeError: one that is no int.
        ImportError: neuraloperator is missing.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        coord_dim: int,
        *,
        modes: int = 12,
        width: int = 128,
        num_layers: int = 4,
        lift_channels: int = 128,
    ) -> None:
        super().__init__()
        numbers = {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "coord_dim": coord_dim,
            "modes": modes,
            "width": width,
            "num_layers": num_layers,
            "lift_channels": lift_channels,
        }
        for name, number in numbers.items():
            check_integer(name, number, 1)
        self.in_channels, self.out_channels, self.coord_dim = in_channels, out_channels, coord_dim
        self.network = _neuralop().FNO(
            n_modes=(modes,) * coord_dim,
            in_channels=in_channels,
            out_channels=out_channels,
            hidden_channels=width,
            n_layers=num_layers,
            # The package multiplies and truncates; half a channel keeps rounding from taking one away.
            lifting_channel_ratio=(lift_channels + 0.5) / width,
            projection_channel_ratio=(lift_channels + 0.5) / width,
        )

        # The package adds its arguments to the state, among them functions, which no checkpoint holds.
        self.register_state_dict_post_hook(_without_arguments)

    def forward(self, u: Tensor, mesh: Mesh) -> Tensor:
        """Evaluate the operator on one function per batch entry.

        Args:
            u: (B, N, in_channels), samples at the points of the mesh in row-major order, in the dtype of the
                parameters.
            mesh: an evenly spaced `Grid` of coord_dim axes.

        Returns:
            (B, N, out_channels).

        Raises:
            ValueError: a shape that does not fit; a mesh that is no evenly spaced `Grid`.
        """
        if not isinstance(mesh, Grid):
            raise ValueError(f"mesh must be a Grid for the FNO, was {type(mesh).__name__}")
        if len(mesh.shape) != self.coord_dim:
            raise ValueError(f"mesh must have {self.coord_dim} axes, was one of {len(mesh.shape)}")
        check_even(mesh, "the FNO")
        expected = (mesh.points.shape[0], self.in_channels)
        if u.dim() != 3 or tuple(u.shape[1:]) != expected:
            raise ValueError(f"u must have shape (B, {expected[0]}, {expected[1]}), was {tuple(u.shape)}")
        z: Tensor = self.network(u.transpose(1, 2).unflatten(-1, mesh.shape))
        return z.flatten(2).transpose(1, 2)


def _without_arguments(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state.pop("_metadata", None)


def _neuralop() -> Any:
    try:
        import neuralop.models
    except ImportError as error:
        raise ImportError(
            'the FNO is that of the neuraloperator package: pip install "continuum_ops[fno]"'
        ) from error
    return neuralop.models
