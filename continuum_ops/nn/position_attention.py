"""Multi-head position attention: values mixed between two meshes by Gaussians of the distance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ..mesh import Grid, Mesh, product_weights
from ..ops.position_attention import position_attention
from ..ops.quantile_radius import quantile_radius
from .quadrature_context import current_weights

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

RateFunction = Literal["tan_clamped", "tan_sin", "square"]
Weights = Tensor | Literal["mesh", "equal"]

# tan has a pole at pi / 2, which float32 rounds upwards; beyond this rate a length is below 1e-3.
MAX_RATE = 1e6
_TAN_SIN_SCALE = math.pi / 4 * (1 - 1e-7)


class PositionAttention(nn.Module):
    r"""Position attention between meshes (PiT eq. 5, 9, 10; several heads eq. 22).

    .. math::
        out_i = \operatorname{concat}_h \frac{\sum_k w_k e^{-r_h |x_i - y_k|^2} (u_k W_h)}
                                             {\sum_k w_k e^{-r_h |x_i - y_k|^2}}

    over the keys k within the radius of query i, if there is one. The score knows positions alone, so it is
    shared by the batch and linear in u. Global attention on one mesh is eq. (5), between two meshes ("cross")
    eq. (9), within a radius ("local") eq. (10). With quadrature weights w the sums are integrals over the
    domain whatever the density of the points; without them they are the paper's, integrals against it.

    The trainable rate is r = 1 / length^2 in the unit of the positions. ``rate_function`` says how it comes
    from the parameter ``rate_parameter`` (H,), called l here:

    * "tan_clamped": tan(l), l clamped so that 0 <= r <= 1e6 (PiT C.1, constrained optimisation). The clamp
      lets gradients through as if it were not there, so that a rate at its bound can come back.
    * "square": l^2 (PiT C.1).
    * "tan_sin": tan(pi/4 (1 - 1e-7) (1 + sin l)), of the published code.

    Args:
        in_features: channels of u.
        out_features: channels of the output, divisible by num_heads; None: in_features, or num_heads *
            in_features with heads="concatenate".
        num_heads: heads H, each with a rate of its own.
        quantile: in [0, 1]: each query sees the keys within this quantile of its distances to all keys
            (:func:`continuum_ops.quantile_radius`; PiT 2.2, table 7). None: all keys.
        rate_function: "tan_clamped", "square" or "tan_sin".
        heads: "split", each head has a projection W_h to out_features / num_heads channels (eq. 22); or
            "concatenate", each head mixes u itself and there is no projection, as in the published code of
            later date.
        initial_rate: rates to start with, > 0 and below 1e6, one number or one per head. None: l uniform
            on (0, 1).
        device, dtype: of the parameters.

    Raises:
        ValueError: a number out of range, an unknown name, an out_features that does not fit.
        TypeError: a number of features or heads that is no int.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | None = None,
        num_heads: int = 1,
        *,
        quantile: float | None = None,
        rate_function: RateFunction = "tan_clamped",
        heads: Literal["split", "concatenate"] = "split",
        initial_rate: float | Sequence[float] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if heads not in ("split", "concatenate"):
            raise ValueError(f'heads must be "split" or "concatenate", was {heads!r}')
        for name, number in (("in_features", in_features), ("num_heads", num_heads)):
            _check_count(name, number)
        if out_features is None:
            out_features = in_features if heads == "split" else num_heads * in_features
        _check_count("out_features", out_features)
        if heads == "split" and out_features % num_heads:
            raise ValueError(
                f"out_features must be divisible by num_heads, was {out_features} with num_heads {num_heads}"
            )
        if heads == "concatenate" and out_features != num_heads * in_features:
            raise ValueError(
                f"out_features must be num_heads * in_features = {num_heads * in_features} with "
                f'heads="concatenate", was {out_features}'
            )
        if quantile is not None and not 0.0 <= quantile <= 1.0:
            raise ValueError(f"quantile must be None or a number between 0 and 1, was {quantile}")
        if rate_function not in _RATES:
            raise ValueError(f"rate_function must be one of {', '.join(_RATES)}, was {rate_function!r}")
        self.in_features = in_features
        self.out_features = out_features
        self.num_heads = num_heads
        self.quantile = quantile
        self.rate_function = rate_function
        self.heads = heads
        self.initial_rate = _initial_rates(initial_rate, num_heads)
        self.rate_parameter = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.value_proj = (
            nn.Linear(in_features, out_features, bias=False, device=device, dtype=dtype)
            if heads == "split"
            else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projection with variance 1 / in_features, and the rates as ``initial_rate`` says."""
        with torch.no_grad():
            if self.initial_rate is None:
                self.rate_parameter.uniform_(0.0, 1.0)
            else:
                _, inverse = _RATES[self.rate_function]
                values = [inverse(rate) for rate in self.initial_rate]
                self.rate_parameter.copy_(torch.tensor(values, dtype=torch.float64))
        if self.value_proj is not None:
            nn.init.normal_(self.value_proj.weight, std=self.in_features**-0.5)

    @property
    def rate(self) -> Tensor:
        """(H,), the rates r_h >= 0."""
        function, _ = _RATES[self.rate_function]
        return function(self.rate_parameter)

    def forward(
        self,
        value: Tensor,
        query_pos: Mesh | Tensor,
        key_pos: Mesh | Tensor | None = None,
        *,
        weights: Weights = "mesh",
        radius: Tensor | float | None = None,
        period: Sequence[float] | None = None,
        group: ProcessGroup | DeviceMesh | None = None,
        query_replicated: bool = False,
    ) -> Tensor:
        """Carry functions from the mesh of the keys to that of the queries.

        Args:
            value: (B, M, in_features), u at the points of the keys.
            query_pos: the points x, a `Grid`, another `Mesh` or a tensor (N, d), or (B, N, d) with one mesh
                per sample. Between two Grids the operator works axis by axis.
            key_pos: the points y likewise, M of them; None: query_pos.
            weights: "mesh", the weights of the mesh of the keys (where key_pos is a tensor: those of an
                enclosing `continuum_ops.nn.quadrature` of length M, else equal ones); "equal"; or a tensor
                (M,) or (B, M) of weights >= 0.
            radius: the radius in place of the quantile's: a float, (N,) or (B, N). Pass it where the
                meshes stay the same, since the quantile's is computed in every call.
            period: length of the domain along each axis, inf where it is not periodic; None: what the Grids
                say, else not periodic.
            group: the ranks that the points are spread over; value and the points are then this rank's part
                (:func:`continuum_ops.distributed.position_attention`), and the radius has to be given where
                the layer has a quantile, which is one of all keys. None: this process has all points.
            query_replicated: with group, the points x are the same on all ranks, and so is the result.

        Returns:
            (B, N, out_features).

        Raises:
            ValueError, TypeError: an argument of a wrong type, shape or dtype.
        """
        key_pos = query_pos if key_pos is None else key_pos
        if not isinstance(value, Tensor):
            raise TypeError(f"value must be a tensor, was {type(value).__name__}")
        x, y = _positions("query_pos", query_pos), _positions("key_pos", key_pos)
        points = len(y) if isinstance(y, Grid) else y.shape[-2]
        if value.ndim != 3 or value.shape[1] != points or value.shape[2] != self.in_features:
            raise ValueError(
                f"value must have shape (B, {points}, {self.in_features}) for {points} keys, "
                f"was {tuple(value.shape)}"
            )
        if period is None:
            period = mesh_period(query_pos, key_pos)
        if radius is None and self.quantile is not None:
            if group is not None:
                raise ValueError(
                    "radius must be given where group is, the quantile being one of the keys of all ranks"
                )
            radius = quantile_radius(x, y, self.quantile, period=period)
        w = _key_weights(weights, query_pos, key_pos, points)
        if self.value_proj is None:
            v = value
        else:
            v = self.value_proj(value).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if group is None:
            out = position_attention(x, y, v, self.rate, w, radius=radius, period=period)
        else:
            from ..distributed import position_attention as over_ranks

            x, y = (p.points if isinstance(p, Grid) else p for p in (x, y))
            w = product_weights(w) if isinstance(w, tuple) else w
            out = over_ranks(
                x,
                y,
                v,
                self.rate,
                w,
                group,
                radius=radius,
                period=period,
                query_replicated=query_replicated,
            )
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_heads={self.num_heads}, "
            f"quantile={self.quantile}, rate_function={self.rate_function!r}, heads={self.heads!r}"
        )


def mesh_period(query_pos: Mesh | Tensor, key_pos: Mesh | Tensor) -> tuple[float, ...] | None:
    """The period of the Grids among the two meshes, or None where they have none.

    Raises:
        ValueError: two Grids of different periods.
    """
    periods = {mesh.period for mesh in (query_pos, key_pos) if isinstance(mesh, Grid)}
    if len(periods) > 1:
        raise ValueError(
            f"query_pos and key_pos must be Grids of the same period, were {' and '.join(map(str, periods))}"
        )
    return next((period for period in periods if not all(map(math.isinf, period))), None)


def _positions(name: str, mesh: Mesh | Tensor) -> Grid | Tensor:
    """What the operator takes: a Grid as it is, of another mesh its points."""
    if isinstance(mesh, Grid):
        return mesh
    points = mesh.points if isinstance(mesh, Mesh) else mesh
    if not isinstance(points, Tensor):
        raise TypeError(
            f"{name} must be a Grid, another Mesh or a tensor of points, was {type(mesh).__name__}"
        )
    if not points.is_floating_point():
        raise TypeError(f"{name} must have a floating dtype, was {points.dtype}")
    if points.ndim not in (2, 3):
        raise ValueError(f"{name} must have shape (N, d) or (B, N, d), was {tuple(points.shape)}")
    return points


def _key_weights(
    weights: Weights, query_pos: Mesh | Tensor, key_pos: Mesh | Tensor, points: int
) -> Tensor | tuple[Tensor, ...] | None:
    if isinstance(weights, Tensor):
        if weights.shape[-1:] != (points,):
            raise ValueError(
                f"weights must have shape ({points},) or (B, {points}) for {points} keys, "
                f"was {tuple(weights.shape)}"
            )
        return weights
    if not isinstance(weights, str):
        raise TypeError(f'weights must be "mesh", "equal" or a tensor, was {type(weights).__name__}')
    if weights == "equal":
        return None
    if weights != "mesh":
        raise ValueError(f'weights must be "mesh", "equal" or a tensor, was {weights!r}')
    if isinstance(key_pos, Grid) and isinstance(query_pos, Grid):
        return key_pos.axis_weights
    return key_pos.weights if isinstance(key_pos, Mesh) else current_weights(points)


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, was {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, was {value}")


def _initial_rates(rate: float | Sequence[float] | None, num_heads: int) -> tuple[float, ...] | None:
    if rate is None:
        return None
    rates = (float(rate),) * num_heads if isinstance(rate, (int, float)) else tuple(map(float, rate))
    if len(rates) != num_heads or not all(0.0 < r < MAX_RATE for r in rates):
        raise ValueError(
            f"initial_rate must be a number or {num_heads} numbers above 0 and below {MAX_RATE:g}, was {rate}"
        )
    return rates


def _tan_clamped(parameter: Tensor) -> Tensor:
    # With the gradient of clamp, which is 0 outside, a rate that was driven to 0 would stay there.
    clamped = parameter.detach().clamp(0.0, math.atan(MAX_RATE))
    return torch.tan(parameter + (clamped - parameter.detach()))


def _tan_sin(parameter: Tensor) -> Tensor:
    return torch.tan(_TAN_SIN_SCALE * (1.0 + torch.sin(parameter)))


def _inverse_tan_sin(rate: float) -> float:
    return math.asin(math.atan(rate) / _TAN_SIN_SCALE - 1.0)


# The rate as a function of the parameter, and its inverse.
_RATES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], float]]] = {
    "tan_clamped": (_tan_clamped, math.atan),
    "tan_sin": (_tan_sin, _inverse_tan_sin),
    "square": (torch.square, math.sqrt),
}
