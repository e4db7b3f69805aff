"""Checkpoints of the published code of PiT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..pit import PiT
from ._checkpoint import Checkpoint, Coordinates, check_coordinates, coordinates_last, fill, linear_entries


def pit(
    state_dict: Mapping[str, Tensor],
    coord_dim: int,
    *,
    encoder_quantile: float | None,
    decoder_quantile: float | None,
    coordinates: Coordinates = "first",
    latent: int | Sequence[int] | None = None,
    period: Sequence[float] | None = None,
) -> PiT:
    """The position-induced transformer of a state dict of the published PyTorch code.

    Two forms are understood. The later one (``down.lmda``, ``conv.0.lmda``) has heads that mix all channels
    without a projection; self attention gives [input, heads] to the network behind it, cross attention the
    heads alone: ``heads="concatenate"``. Its rates are tan(pi/4 (1 - 1e-7) (1 + sin l)). The earlier one
    (``down.r``, ``PA.0.weight``) is that of the paper, ``heads="split"``, with rates tan(pi/4 (1 + sin r));
    the parameters are converted to give the same rates, up to 1.3e7, where that of the later form ends.

    The code sums over points: call the model with ``weights="equal"``, and with the latent mesh of the
    training, ``latent_mesh=``. Keys count whose distance is at most the quantile, in both.

    Args:
        state_dict: names to tensors.
        coord_dim: dimension d of the domain (``space_dim``).
        encoder_quantile, decoder_quantile: ``en_loc`` and ``de_loc``; None: no limit.
        coordinates: where the code puts the coordinates among the channels of its first layer: "first",
            before the function, as in the published scripts; "last"; or "none", if it gets the function
            alone (which may be the positions, as for the airfoil).
        latent, period: as of :class:`PiT`; the state dict knows neither.

    Raises:
        ValueError: a key that is missing, unexpected, or of a wrong shape; an option that does not fit.
        TypeError: no mapping of names to tensors.
    """
    state = Checkpoint(state_dict, "the published PiT")
    convert = _split if "down.r" in state else _concatenated
    settings, new = convert(state, coord_dim, coordinates)
    state.finish()
    model = PiT(
        coord_dim=coord_dim,
        encoder_quantile=encoder_quantile,
        decoder_quantile=decoder_quantile,
        latent=latent,
        period=period,
        rate_function="tan_sin",
        **settings,
    )
    fill(model, new)
    return model


def _concatenated(
    state: Checkpoint, coord_dim: int, coordinates: Coordinates
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    down = state.take("down.lmda", None, 1, 1)
    heads = down.shape[0]
    new = {"encoder.rate_parameter": down.flatten()}
    first = state.linear("en_layer.mlp1", None, None)
    width, columns = first[0].shape
    if columns % heads:
        raise ValueError(
            f"state_dict['en_layer.mlp1.weight'] must have a multiple of {heads} columns, the number of "
            f"heads, was {tuple(first[0].shape)}"
        )
    channels = check_coordinates(coordinates, columns // heads, coord_dim, "en_layer.mlp1.weight per head")
    per_head = coordinates_last(first[0].unflatten(1, (heads, -1)), coord_dim, coordinates)
    new |= linear_entries("lift_heads.linear1", (per_head.flatten(1), first[1]))
    new |= linear_entries("lift_heads.linear2", state.linear("en_layer.mlp2", width, width))
    layers = max(1, state.count("conv."))
    for i in range(layers):
        new[f"layers.{i}.attention.rate_parameter"] = state.take(f"conv.{i}.lmda", heads, 1, 1).flatten()
        inner = state.linear(f"mlp.{i}.mlp1", width, (1 + heads) * width)
        new |= linear_entries(f"layers.{i}.mlp.linear1", inner)
        new |= linear_entries(f"layers.{i}.mlp.linear2", state.linear(f"mlp.{i}.mlp2", width, width))
    new["decoder.rate_parameter"] = state.take("up.lmda", heads, 1, 1).flatten()
    new |= linear_entries("projection.linear1", state.linear("de.mlp1", width, heads * width))
    out = state.linear("de.mlp2", None, width)
    new |= linear_entries("projection.linear2", out)
    return _settings(first[0], channels, out[0], width, heads, layers, "concatenate"), new


def _split(
    state: Checkpoint, coord_dim: int, coordinates: Coordinates
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    first = state.linear("en_layer", None, None)
    width, columns = first[0].shape
    channels = check_coordinates(coordinates, columns, coord_dim, "en_layer.weight")
    new = linear_entries("lift", (coordinates_last(first[0], coord_dim, coordinates), first[1]))
    heads = state.take("down.r", 1, None, 1, 1).shape[1]
    if width % heads:
        raise ValueError(
            f"state_dict['down.r'] must have a number of heads that divides the width {width}, was {heads}"
        )

    def attention(old: str, name: str) -> None:
        new[f"{name}.rate_parameter"] = _rate_parameter(state.take(f"{old}.r", 1, heads, 1, 1).flatten())
        weight = state.take(f"{old}.weight", heads, width, width // heads)
        new[f"{name}.value_proj.weight"] = weight.transpose(1, 2).flatten(0, 1)

    attention("down", "encoder")
    layers = max(1, state.count("PA."))
    for i in range(layers):
        attention(f"PA.{i}", f"layers.{i}.attention")
        new |= linear_entries(f"layers.{i}.mlp.linear1", state.linear(f"MLP.{i}.mlp1", width, width))
        new |= linear_entries(f"layers.{i}.mlp.linear2", state.linear(f"MLP.{i}.mlp2", width, width))
        new |= linear_entries(f"layers.{i}.linear", state.linear(f"W.{i}", width, width))
    attention("up", "decoder")
    new |= linear_entries("projection.linear1", state.linear("de_layer.mlp1", width, width))
    out = state.linear("de_layer.mlp2", None, width)
    new |= linear_entries("projection.linear2", out)
    return _settings(first[0], channels, out[0], width, heads, layers, "split"), new


def _settings(
    first: Tensor, channels: int, out: Tensor, width: int, heads: int, layers: int, form: str
) -> dict[str, Any]:
    return {
        "in_channels": channels,
        "out_channels": out.shape[0],
        "width": width,
        "num_heads": heads,
        "num_layers": layers,
        "heads": form,
        "device": first.device,
        "dtype": first.dtype,
    }


def _rate_parameter(r: Tensor) -> Tensor:
    """l with tan(pi/4 (1 - 1e-7) (1 + sin l)) = tan(pi/4 (1 + sin r))."""
    sine = (1.0 + torch.sin(r.double())) / (1.0 - 1e-7) - 1.0
    return torch.asin(sine.clamp(max=1.0)).to(r.dtype)
