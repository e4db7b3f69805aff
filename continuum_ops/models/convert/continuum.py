"""Checkpoints of the published code of CA."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..tno import TNO
from ..tno_layer import Activation
from ._checkpoint import Checkpoint, coordinates_last, fill, linear_entries


def tno(
    state_dict: Mapping[str, Tensor],
    *,
    append_position: bool = True,
    activation: str | Activation = "gelu",
    dropout: float = 0.0,
) -> TNO:
    """The transformer neural operator of a state dict of the published ``SimpleEncoder``.

    The number of heads follows from the stored ``scale``, the square root of the channels of a head, by which
    the code divides scores; heads are split (heads, channels). The code has trapezoid weights in one
    dimension, which are those of a `Grid` of kind "endpoint", and equal ones in more: call the model with
    ``weights="equal"`` there. Layers are post-norm whatever ``norm_first`` said. A ``linear_in_initialcond``
    makes a model with `initial_channels`.

    Positional encodings (``use_positional_encoding``) leave no trace in a state dict and are not understood:
    the published runs append positions instead.

    Args:
        state_dict: names to tensors.
        append_position: the published ``append_position_to_x``; False: the model does not see coordinates.
        activation: of the feed-forward networks; the published runs have "gelu".
        dropout: of the new model.

    Raises:
        ValueError: a key that is missing, unexpected, or of a wrong shape.
        TypeError: no mapping of names to tensors.
    """
    state = Checkpoint(state_dict, "the published TNO")
    plain = state.linear("linear_in", None, None)
    d_model, in_channels = plain[0].shape
    placed = state.linear("linear_in_position", d_model, None)
    coord_dim = placed[0].shape[1] - in_channels
    if coord_dim < 1:
        raise ValueError(
            f"state_dict['linear_in_position.weight'] must have more columns than linear_in.weight, "
            f"{in_channels}, was {tuple(placed[0].shape)}"
        )
    new = linear_entries("lift", placed)
    if not append_position:
        new = linear_entries("lift", (coordinates_last(plain[0], coord_dim, "none"), plain[1]))
    out = state.linear("linear_out", None, d_model)
    new |= linear_entries("projection", out)
    initial_channels = 0
    if "linear_in_initialcond.weight" in state:
        if not append_position:
            raise ValueError(
                "append_position must be True with linear_in_initialcond in state_dict, was False"
            )
        first = state.linear("linear_in_initialcond", d_model, None)
        initial_channels = first[0].shape[1] - in_channels - coord_dim
        new |= linear_entries("lift_initial", first)

    num_layers = max(1, state.count("encoder.layers."))
    head_dim = hidden = 0
    for i in range(num_layers):
        old, layer = f"encoder.layers.{i}", f"layers.{i}"
        scale_key = f"{old}.self_attn.scaled_dot_product_attention.scale"
        found = round(float(state.take(scale_key, 1)) ** 2)
        if found < 1 or d_model % found or (head_dim and found != head_dim):
            raise ValueError(
                f"state_dict[{scale_key!r}] must be the square root of a number of channels that divides "
                f"{d_model}, the same in each layer, was that of {found}"
            )
        head_dim = found
        maps = [state.linear(f"{old}.self_attn.W_{name}", d_model, d_model) for name in "qkv"]
        new[f"{layer}.self_attn.in_proj_weight"] = torch.cat([weight for weight, _ in maps])
        new[f"{layer}.self_attn.in_proj_bias"] = torch.cat([bias for _, bias in maps])
        new |= linear_entries(
            f"{layer}.self_attn.out_proj", state.linear(f"{old}.self_attn.W_o", d_model, d_model)
        )
        inner = state.linear(f"{old}.feed_forward.fc1", hidden or None, d_model)
        hidden = inner[0].shape[0]
        new |= linear_entries(f"{layer}.linear1", inner)
        new |= linear_entries(f"{layer}.linear2", state.linear(f"{old}.feed_forward.fc2", d_model, hidden))
        for norm in ("norm1", "norm2"):
            for kind in ("weight", "bias"):
                new[f"{layer}.{norm}.{kind}"] = state.take(f"{old}.{norm}.{kind}", d_model)
    state.ignore("pe_discrete", "even_inds", "odd_inds")
    state.finish()
    model = TNO(
        in_channels,
        out[0].shape[0],
        coord_dim,
        d_model=d_model,
        num_heads=d_model // head_dim,
        num_layers=num_layers,
        dim_feedforward=hidden,
        dropout=dropout,
        activation=activation,
        initial_channels=initial_channels,
        device=plain[0].device,
        dtype=plain[0].dtype,
    )
    fill(model, new)
    return model
