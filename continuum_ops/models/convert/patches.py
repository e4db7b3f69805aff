"""Checkpoints of the published code of CA for the models on patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..fano import FANO
from ..tno_layer import Activation
from ..vitno import ViTNO
from ._checkpoint import Checkpoint, fill, linear_entries


def vitno(
    state_dict: Mapping[str, Tensor],
    *,
    num_heads: int,
    num_patches: int,
    patch_size: int,
    norm_first: bool,
    activation: str | Activation = "gelu",
    dropout: float = 0.0,
) -> ViTNO:
    """The vision transformer neural operator of a state dict of the published ``SimpleEncoder`` of ViT-NO.

    Channels of the heads are split (channels, heads) there, (heads, channels) here: rows and columns are
    reordered. Scores are divided by the number of points of the grid, the stored ``scale``, in both. With
    ``norm_first`` the code takes residuals from the normalised values (``norm_residual=True``).

    The code keeps the same number of modes in both directions of the rows. Where a patch in training has
    fewer than twice as many rows, they overlap and the later ones win; the model has those that win, and so
    is the same function on patches of ``patch_size`` points, but not at other resolutions. The same holds for
    the ``smoothing`` of the whole grid, which is `final_spectral` here.

    Square grids in two dimensions, u of one or more channels before the coordinates, which come in the order
    of the axes. Call the model with ``weights="equal"``. ``do_layer_norm=False`` is not understood.

    Args:
        state_dict: names to tensors.
        num_heads: ``nhead``, which leaves no trace.
        num_patches: patches along each axis, im_size / patch_size.
        patch_size: points of a patch along each axis in training.
        norm_first: as in the published settings.
        activation, dropout: of the feed-forward networks; the published runs have "gelu".

    Raises:
        ValueError: a key that is missing, unexpected, or of a wrong shape; an option that does not fit.
        TypeError: no mapping of names to tensors.
    """
    state = Checkpoint(state_dict, "the published ViT-NO")
    kernel = _spectral(state, "linear_in", patch_size)
    channels, d_model = kernel.shape[-3:-1]
    if num_heads < 1 or d_model % num_heads:
        raise ValueError(f"num_heads must be a divisor of the {d_model} channels, was {num_heads}")
    new = {"lift.weight": kernel}

    def attention(old: str, name: str) -> None:
        for letter in "qkv":
            weight, bias = state.linear(f"{old}.W_{letter}", d_model, d_model)
            reordered = _heads_first(weight, num_heads, 0), _heads_first(bias, num_heads, 0)
            new.update(linear_entries(f"{name}.{letter}_proj", reordered))
        weight, bias = state.linear(f"{old}.W_o", d_model, d_model)
        new.update(linear_entries(f"{name}.out_proj", (_heads_first(weight, num_heads, 1), bias)))

    settings = _common(state, new, d_model, num_patches, patch_size, attention)
    state.finish()
    model = ViTNO(
        channels - 2,
        coord_dim=2,
        modes=kernel.shape[1:3],
        num_heads=num_heads,
        norm_first=norm_first,
        norm_residual=norm_first,
        activation=activation,
        dropout=dropout,
        device=kernel.device,
        dtype=kernel.dtype,
        **settings,
    )
    fill(model, new)
    return model


def fano(
    state_dict: Mapping[str, Tensor],
    *,
    num_patches: int,
    patch_size: int,
    norm_first: bool,
    activation: str | Activation = "gelu",
    dropout: float = 0.0,
) -> FANO:
    """The Fourier attention neural operator of a state dict of the published ``SimpleEncoder`` of FANO.

    The number of heads is the last size of ``query_operator.weights1``. The code hands the heads to its last
    linear map in the order (channels, heads); columns are reordered. Scores, residuals, modes that overlap,
    coordinates and arguments are as of :func:`vitno`; ``smoothing`` may be missing.

    Raises:
        ValueError: a key that is missing, unexpected, or of a wrong shape; an option that does not fit.
        TypeError: no mapping of names to tensors.
    """
    state = Checkpoint(state_dict, "the published FANO")
    lift = state.linear("linear_in", None, None)
    d_model, channels = lift[0].shape
    if channels < 3:
        raise ValueError(
            f"state_dict['linear_in.weight'] must have columns for the function and two coordinates, was "
            f"{tuple(lift[0].shape)}"
        )
    new = linear_entries("lift", lift)
    found: dict[str, Any] = {}

    def attention(old: str, name: str) -> None:
        parts = []
        for role in ("query", "key", "value"):
            weights = f"state_dict['{old}.{role}_operator.weights1']"
            kernel = _spectral(state, f"{old}.{role}_operator", patch_size, heads=True)
            # (2, m, m, in, channels, heads, 2) there; (2 m, m, heads * channels, 2, in) here.
            found["heads"] = heads = kernel.shape[5]
            if found.setdefault("shape", kernel.shape) != kernel.shape or kernel.shape[3] != d_model:
                raise ValueError(
                    f"{weights} must have {d_model} input channels and the shape of the other operators, was "
                    f"of {kernel.shape[3]} input channels and {tuple(kernel.shape[1:3])} modes"
                )
            if kernel.shape[4] * heads != d_model:
                raise ValueError(
                    f"{weights} must have {d_model} / {heads} channels for each of {heads} heads, had "
                    f"{kernel.shape[4]}"
                )
            parts.append(kernel.flatten(0, 1).permute(0, 1, 4, 3, 5, 2).flatten(2, 3))
        new[f"{name}.in_proj_weight"] = torch.stack(parts)
        weight, bias = state.linear(f"{old}.out_linear", d_model, d_model)
        new.update(linear_entries(f"{name}.out_proj", (_heads_first(weight, found["heads"], 1), bias)))

    settings = _common(state, new, d_model, num_patches, patch_size, attention)
    state.finish()
    model = FANO(
        channels - 2,
        coord_dim=2,
        modes=tuple(found["shape"][1:3]),
        num_heads=found["heads"],
        norm_first=norm_first,
        norm_residual=norm_first,
        activation=activation,
        dropout=dropout,
        device=lift[0].device,
        dtype=lift[0].dtype,
        **settings,
    )
    fill(model, new)
    return model


def _common(
    state: Checkpoint,
    new: dict[str, Tensor],
    d_model: int,
    num_patches: int,
    patch_size: int,
    attention: Any,
) -> dict[str, Any]:
    """The layers but for their lift and attention, which `attention` adds; settings of the model."""
    layers = max(1, state.count("encoder.layers."))
    hidden: int | None = None
    for i in range(layers):
        old, layer = f"encoder.layers.{i}", f"layers.{i}"
        key = f"{old}.self_attn.scaled_dot_product_attention.scale"
        side = round(float(state.take(key, 1)) ** 0.5)
        if side < 1 or side % num_patches:
            raise ValueError(
                f"state_dict[{key!r}] must be the number of points of a square grid of {num_patches} x "
                f"{num_patches} patches, was that of {side} x {side} points"
            )
        attention(f"{old}.self_attn", f"{layer}.attention")
        inner = state.linear(f"{old}.linear1", hidden, d_model)
        hidden = inner[0].shape[0]
        new |= linear_entries(f"{layer}.linear1", inner)
        new |= linear_entries(f"{layer}.linear2", state.linear(f"{old}.linear2", d_model, hidden))
        for norm in ("norm1", "norm2"):
            for kind in ("weight", "bias"):
                new[f"{layer}.{norm}.{kind}"] = state.take(f"{old}.{norm}.{kind}", d_model)
    out = state.linear("linear_out", None, d_model)
    new |= linear_entries("projection", out)
    final = None
    if "smoothing.weights1" in state:
        kernel = _spectral(state, "smoothing", num_patches * patch_size)
        if tuple(kernel.shape[-3:-1]) != (out[0].shape[0],) * 2:
            raise ValueError(
                f"state_dict['smoothing.weights1'] must have {out[0].shape[0]} channels, as linear_out, was "
                f"{tuple(kernel.shape[-3:-1])}"
            )
        final = tuple(kernel.shape[1:3])
        new["final_spectral.weight"] = kernel
    state.ignore("pe_discrete", "even_inds", "odd_inds")
    return {
        "out_channels": out[0].shape[0],
        "num_patches": num_patches,
        "patch_size": patch_size,
        "d_model": d_model,
        "num_layers": layers,
        "dim_feedforward": hidden,
        "final_spectral": final,
    }


def _spectral(state: Checkpoint, name: str, points: int, *, heads: bool = False) -> Tensor:
    """(2, modes_1, modes_2, in, out[, heads], 2): the rows 0 .. modes_1 - 1 and -modes_1 .. -1 on a period.

    The code writes the second block over the first where they overlap on its rows.
    """
    first = state.complex(f"{name}.weights1", heads)
    second = state.complex(f"{name}.weights2", heads)
    if first.shape != second.shape:
        raise ValueError(
            f"state_dict[{f'{name}.weights2'!r}] must have the shape of weights1, {tuple(first.shape)}, was "
            f"{tuple(second.shape)}"
        )
    up, down = (w.movedim((2, 3), (0, 1)) for w in (first, second))
    modes, most = up.shape[0], points // 2
    if modes > points or up.shape[1] > points // 2 + 1:
        raise ValueError(
            f"state_dict[{f'{name}.weights1'!r}] must have at most {points} and {points // 2 + 1} modes on "
            f"{points} points, was {tuple(up.shape[:2])}"
        )
    if modes > most:
        if points % 2:
            raise ValueError(
                f"state_dict[{f'{name}.weights1'!r}] must have at most {most} modes on {points} points, "
                f"an odd number, was {modes}"
            )
        rows = torch.cat([up, up.new_zeros(points - modes, *up.shape[1:])])
        rows[points - modes :] = down
        up, down = rows[:most], rows[points - most :]
    return torch.stack([up, down])


def _heads_first(x: Tensor, heads: int, axis: int) -> Tensor:
    """(channels, heads) to (heads, channels) along an axis."""
    return x.unflatten(axis, (-1, heads)).transpose(axis, axis + 1).flatten(axis, axis + 1)
