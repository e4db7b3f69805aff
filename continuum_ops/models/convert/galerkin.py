"""Checkpoints of the published code of GT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...nn.galerkin_attention import NORMALIZED, AttentionType
from ..galerkin_transformer import GalerkinTransformer
from ..tno_layer import Activation
from ._checkpoint import (
    Checkpoint,
    Coordinates,
    check_coordinates,
    choose,
    coordinates_last,
    fill,
    linear_entries,
)


def galerkin_transformer(
    state_dict: Mapping[str, Tensor],
    *,
    attention_type: AttentionType,
    num_heads: int | None = None,
    coordinates: Coordinates | None = None,
    residual: Literal["add", "minus"] = "add",
    num_points: int | None = None,
    coarsening: float | None = None,
    middle: Sequence[int] | None = None,
    activation: str | Activation = "relu",
    downsample_activation: str | Activation = "relu",
    upsample_activation: str | Activation = "silu",
    decoder_activation: str | Activation = "silu",
) -> GalerkinTransformer:
    """The model of a state dict of the published ``FourierTransformer`` or ``FourierTransformer2D``.

    Taken over exactly: "fourier" scores divided by the square root of the channels of a head, coordinates
    counted, and "linear" products divided by the number of points (both folded into ``out_proj``); layer norm
    around the layers (``layer_norm``), whose second skip connection carries the normalised values
    (``layer_norm="post"``), or inside the attention (``attn_norm``); convolutions between grids without
    skips, with the activation once more after each interpolation (``convolutions="plain"``); the linear map
    before the pointwise decoder, which has no activation (multiplied into the next one).

    Not taken over: the code applies dropout of probability 1/2 to the attention matrix in evaluation as well;
    this is its mean. Sums are over points: on a Grid give equal ``weights``. The output is that of the last
    layer, before a normaliser and before boundary values are set to 0. ``spacial_residual``, batch and
    instance norm, graph features, ``conv`` scalers and ``last_activation=False`` are not understood; the
    first and the last leave no trace in a state dict.

    Args:
        state_dict: names to tensors.
        attention_type: "galerkin", "fourier" ("integral", "local" there), "linear" ("global") or "softmax".
        num_heads: needed where the attention has no norms, whose number tells it.
        coordinates: where coordinates are among the channels of the first linear map: "first", "last", or
            "none" if it gets the function alone. None: as the published scripts have it, "none" in one
            dimension, "last" in two.
        residual: the published ``residual_type``; "minus" subtracts the attention.
        num_points: needed with "linear": points of the grid of the encoder in training.
        coarsening: needed with a downscaler: ratio of the spacings of the coarse and the fine grid.
        middle: as of :class:`GalerkinTransformer`; the code rounds the size of this grid in its own way.
        activation: of the feed-forward networks; the published settings leave ``attn_activation`` out, which
            is "relu".
        downsample_activation, upsample_activation, decoder_activation: ``downscaler_activation``,
            ``upscaler_activation``, ``regressor_activation``.

    Raises:
        ValueError: a key that is missing, unexpected, or of a wrong shape; an option missing or that does not
            fit.
        TypeError: no mapping of names to tensors.
    """
    choose("attention_type", attention_type, list(NORMALIZED))
    choose("residual", residual, ["add", "minus"])
    if (attention_type == "linear") != (num_points is not None):
        raise ValueError(
            f'num_points must be given with attention_type="linear" and with no other, was {num_points} with '
            f"{attention_type!r}"
        )
    state = Checkpoint(state_dict, "the published Galerkin or Fourier transformer")
    query = state.take("encoder_layers.0.attn.linears.0.weight", None, None)
    d_model = query.shape[0]
    normed = "KV" if NORMALIZED[attention_type] == "kv" else "QK"
    scheme: Any = "post" if "encoder_layers.0.layer_norm1.weight" in state else "galerkin"
    heads = _heads(state, num_heads, d_model, scheme)
    joined = state.take("encoder_layers.0.attn.fc.weight", d_model, None).shape[1] - d_model
    if joined < heads or joined % heads:
        raise ValueError(
            f"state_dict['encoder_layers.0.attn.fc.weight'] must have {d_model} columns and a multiple of "
            f"{heads} more, the coordinates of each head, was {(d_model, joined + d_model)}"
        )
    coord_dim = joined // heads
    factor = 1.0 if residual == "add" else -1.0
    if attention_type == "fourier":
        factor /= math.sqrt(d_model // heads + coord_dim)
    if num_points is not None:
        factor /= num_points

    new, settings = _input(state, d_model, coord_dim, coordinates, coarsening)
    layers = max(1, state.count("encoder_layers."))
    hidden: int | None = None
    for i in range(layers):
        old, layer = f"encoder_layers.{i}", f"layers.{i}"
        for j, name in enumerate("qkv"):
            entry = state.linear(f"{old}.attn.linears.{j}", d_model, d_model)
            new |= linear_entries(f"{layer}.attention.{name}_proj", entry)
        weight, bias = state.linear(f"{old}.attn.fc", d_model, d_model + joined)
        new |= linear_entries(
            f"{layer}.attention.out_proj", (factor * weight, bias * math.copysign(1, factor))
        )
        if scheme == "galerkin":
            for letter in normed:
                for kind in ("weight", "bias"):
                    rows = [
                        state.take(f"{old}.attn.norm_{letter}.{h}.{kind}", d_model // heads)
                        for h in range(heads)
                    ]
                    new[f"{layer}.attention.{letter.lower()}_norm.{kind}"] = torch.stack(rows)
        else:
            for number in (1, 2):
                for kind in ("weight", "bias"):
                    new[f"{layer}.norm{number}.{kind}"] = state.take(
                        f"{old}.layer_norm{number}.{kind}", d_model
                    )
        inner = state.linear(f"{old}.ff.lr1", hidden, d_model)
        hidden = inner[0].shape[0]
        new |= linear_entries(f"{layer}.linear1", inner)
        new |= linear_entries(f"{layer}.linear2", state.linear(f"{old}.ff.lr2", d_model, hidden))
    decoder, out_channels = _decoder(state, new, d_model, coord_dim)
    state.finish()
    model = GalerkinTransformer(
        out_channels=out_channels,
        coord_dim=coord_dim,
        d_model=d_model,
        num_heads=heads,
        num_layers=layers,
        dim_feedforward=hidden,
        attention_type=attention_type,
        layer_norm=scheme,
        middle=middle,
        activation=activation,
        downsample_activation=downsample_activation,
        upsample_activation=upsample_activation,
        decoder_activation=decoder_activation,
        device=query.device,
        dtype=query.dtype,
        **settings,
        **decoder,
    )
    fill(model, new)
    return model


def _heads(state: Checkpoint, num_heads: int | None, d_model: int, scheme: str) -> int:
    found = state.count("encoder_layers.0.attn.norm_K.")
    if scheme == "post" and found:
        raise ValueError(
            "state_dict must have the keys layer_norm1 or attn.norm_K in its layers, not both; had both"
        )
    if num_heads is None and not found:
        raise ValueError("num_heads must be given for a state_dict without attn.norm_K, was None")
    heads = found if num_heads is None else num_heads
    if heads < 1 or d_model % heads or (found and heads != found):
        told = f"the {found} of attn.norm_K" if found else f"a divisor of the {d_model} channels"
        raise ValueError(f"num_heads must be {told}, was {heads}")
    return heads


def _input(
    state: Checkpoint,
    d_model: int,
    coord_dim: int,
    coordinates: Coordinates | None,
    coarsening: float | None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters of the lift or the convolutions, and what they say about the model."""
    first = "downscaler.downsample.conv0.conv.0.weight"
    if (first in state) != (coarsening is not None):
        raise ValueError(
            f"coarsening must be given if and only if state_dict has the key {first!r}, was {coarsening}"
        )
    if coarsening is None:
        # The 1-D model and the 2-D model without a downscaler name their linear map differently.
        name = "downscaler.id" if "downscaler.id.weight" in state else "feat_extract.id"
        weight, bias = state.linear(name, d_model, None)
        order: Coordinates = ("none" if coord_dim == 1 else "last") if coordinates is None else coordinates
        channels = check_coordinates(order, weight.shape[1], coord_dim, f"{name}.weight")
        lift = linear_entries("lift", (coordinates_last(weight, coord_dim, order), bias))
        return lift, {"in_channels": channels}
    weight = state.take(first, d_model, None, 3, 3)
    new = {"downsample.conv.weight": weight}
    third = d_model // 3
    widths = [d_model, third, third, d_model - 2 * third]
    for i in range(3):
        new[f"downsample.blocks.{i}.conv.weight"] = state.take(
            f"downscaler.downsample.conv{i + 1}.conv.0.weight", widths[i + 1], widths[i], 3, 3
        )
    back = "upscaler.upsample.conv.0.conv.0.weight"
    if back in state:
        new["upsample.conv.weight"] = state.take(back, d_model, d_model, 3, 3)
    settings = {
        "in_channels": weight.shape[1],
        "coarsening": coarsening,
        "coarse_output": back not in state,
        "convolutions": "plain",
    }
    return new, settings


def _decoder(
    state: Checkpoint, new: dict[str, Tensor], d_model: int, coord_dim: int
) -> tuple[dict[str, Any], int]:
    """Adds the decoder's parameters; its settings, and the number of output channels."""
    lifted = "regressor.fc.weight" in state
    if "regressor.ff.0.0.weight" in state:
        return _pointwise(state, new, d_model, coord_dim, lifted)
    features = d_model
    if lifted:
        fc = state.linear("regressor.fc", None, d_model + coord_dim)
        features = fc[0].shape[0]
        new |= linear_entries("decoder.lift", fc)
    layers = max(1, state.count("regressor.spectral_conv."))
    channels = modes = None
    for i in range(layers):
        old = f"regressor.spectral_conv.{i}"
        linear = state.linear(f"{old}.linear", channels, features)
        channels = linear[0].shape[0]
        new |= linear_entries(f"decoder.linears.{i}", linear)
        keys = [f"{old}.fourier_weight"] if coord_dim == 1 else [f"{old}.fourier_weight.{j}" for j in (0, 1)]
        blocks = []
        for key in keys:
            blocks.append(state.take(key, features, channels, *(modes,) * coord_dim, 2))
            modes = blocks[0].shape[2]
        # (in, out, modes.., 2) there, (block, modes.., in, out, 2) here.
        new[f"decoder.convolutions.{i}.weight"] = torch.stack(blocks).movedim((1, 2), (-3, -2))
        features = channels
    assert channels is not None
    if lifted and fc[0].shape[0] != channels:
        raise ValueError(
            f"state_dict['regressor.fc.weight'] must have {channels} rows, the channels of the spectral "
            f"convolutions, was {tuple(fc[0].shape)}"
        )
    head = state.linear("regressor.regressor.0", None, channels)
    out = state.linear("regressor.regressor.2", None, head[0].shape[0])
    new |= linear_entries("decoder.head", head)
    new |= linear_entries("decoder.out", out)
    settings = {
        "decoder": "spectral",
        "decoder_layers": layers,
        "decoder_channels": channels,
        "decoder_lift": lifted,
        "modes": modes,
        "head_channels": head[0].shape[0],
    }
    return settings, out[0].shape[0]


def _pointwise(
    state: Checkpoint, new: dict[str, Tensor], d_model: int, coord_dim: int, lifted: bool
) -> tuple[dict[str, Any], int]:
    weight, bias = state.linear("regressor.ff.0.0", None, None if lifted else d_model)
    channels = weight.shape[0]
    if lifted:
        before, shift = state.linear("regressor.fc", weight.shape[1], d_model + coord_dim)
        bias = bias.double() + weight.double() @ shift.double()
        weight = weight.double() @ before.double()
    else:
        weight = coordinates_last(weight, coord_dim, "none")
    new |= linear_entries("decoder.hidden.0", (weight, bias))
    count = state.count("regressor.ff.")
    for i in range(1, count):
        new |= linear_entries(f"decoder.hidden.{i}", state.linear(f"regressor.ff.{i}.0", channels, channels))
    out = state.linear("regressor.out", None, channels)
    new |= linear_entries("decoder.out", out)
    settings = {"decoder": "pointwise", "decoder_layers": count - 1, "decoder_channels": channels}
    return settings, out[0].shape[0]
