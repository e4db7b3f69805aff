"""A published state dict, read key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Coordinates = Literal["first", "last", "none"]
# What data parallelism, torch.compile and training frameworks put before every name.
_WRAPPERS = ("module.", "_orig_mod.", "model.")


class Checkpoint:
    """The tensors of a state dict. Each key is taken or ignored; what is left at the end is unexpected.

    Raises:
        TypeError: no mapping of names to tensors.
    """

    def __init__(self, state_dict: Mapping[str, Tensor], code: str) -> None:
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict must be a mapping of names to tensors, was {type(state_dict).__name__}"
            )
        for key, value in state_dict.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"state_dict must hold tensors, but state_dict[{key!r}] was {type(value).__name__}; "
                    "where a file holds more than a state dict, pass the entry with the parameters"
                )
        tensors = dict(state_dict)
        while tensors:
            wrapper = next((w for w in _WRAPPERS if all(key.startswith(w) for key in tensors)), None)
            if wrapper is None:
                break
            tensors = {key.removeprefix(wrapper): value for key, value in tensors.items()}
        self._tensors, self._code, self._used = tensors, code, set[str]()

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def take(self, key: str, *shape: int | None) -> Tensor:
        """The tensor of this name, whose shape is as given; None stands for any size."""
        if key not in self._tensors:
            raise ValueError(f"state_dict must have the key {key!r} of {self._code}, which is missing")
        value = self._tensors[key].detach()
        fits = value.dim() == len(shape) and all(
            n in (None, m) for n, m in zip(shape, value.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            raise ValueError(f"state_dict[{key!r}] must have shape ({wanted}), was {tuple(value.shape)}")
        self._used.add(key)
        return value

    def linear(self, name: str, out_features: int | None, in_features: int | None) -> tuple[Tensor, Tensor]:
        """Weight and bias of a linear map."""
        weight = self.take(f"{name}.weight", out_features, in_features)
        return weight, self.take(f"{name}.bias", weight.shape[0])

    def complex(self, key: str, heads: bool) -> Tensor:
        """Complex weights (in, out, modes, modes[, heads]) as pairs of real numbers, stored as either."""
        if key in self._tensors and not self._tensors[key].is_complex():
            return self.take(key, *(None,) * (5 if heads else 4), 2)
        return torch.view_as_real(self.take(key, *(None,) * (5 if heads else 4)))

    def count(self, prefix: str) -> int:
        """How many of prefix0., prefix1., .. there are; at least one, or taking it says what is missing."""
        i = 0
        while any(key.startswith(f"{prefix}{i}.") for key in self._tensors):
            i += 1
        return i

    def ignore(self, *keys: str) -> None:
        """Keys that may be there and change nothing."""
        self._used.update(keys)

    def finish(self) -> None:
        left = sorted(set(self._tensors) - self._used)
        if left:
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            raise ValueError(
                f"state_dict must have no keys but those of {self._code} with these options, had "
                f"{', '.join(map(repr, left[:8]))}{more}"
            )


def fill(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Give a model all of its parameters, as the table of a converter made them."""
    model.load_state_dict({key: value.to(model.state_dict()[key].dtype) for key, value in parameters.items()})


def linear_entries(name: str, weight_and_bias: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    weight, bias = weight_and_bias
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def coordinates_last(weight: Tensor, coord_dim: int, coordinates: Coordinates) -> Tensor:
    """Columns of (u, x), coordinates behind, of a weight (..., features) in the published order.

    "first": it has columns of (x, u); "last": of (u, x); "none": of u alone, and those of x become 0.
    """
    if coordinates == "first":
        return torch.cat([weight[..., coord_dim:], weight[..., :coord_dim]], dim=-1)
    if coordinates == "none":
        return torch.cat([weight, weight.new_zeros(*weight.shape[:-1], coord_dim)], dim=-1)
    return weight


def check_coordinates(coordinates: str, features: int, coord_dim: int, key: str) -> int:
    """The number of channels of u."""
    if coordinates not in ("first", "last", "none"):
        raise ValueError(f'coordinates must be "first", "last" or "none", was {coordinates!r}')
    channels = features if coordinates == "none" else features - coord_dim
    if channels < 1:
        raise ValueError(
            f'coordinates must be "none" where the code gives its lift no channels but the coordinates: '
            f"{key} has {features} columns for coord_dim {coord_dim}, was {coordinates!r}"
        )
    return channels


def choose(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, was {value!r}")
