"""Named model configurations from the papers."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from torch import nn

from .fano import FANO
from .fno import FNO
from .galerkin_transformer import GalerkinTransformer
from .pit import PiT
from .tno import TNO
from .vitno import ViTNO

# CA 6.1 and 6.2.2: d_model 128 and 6 encoder layers; CA (18): a feed-forward network as wide as d_model. The
# paper does not state the number of heads and the activation; 8 and GELU are those of its published runs, and
# neither changes the number of parameters.
_TNO: dict[str, Any] = {
    "d_model": 128,
    "num_heads": 8,
    "num_layers": 6,
    "dim_feedforward": 128,
    "activation": "gelu",
}

# CA 6.2.2 and 6.2.3: 128 channels, 12 modes for ViT-NO and 9 for FANO, 64 modes in the final spectral layer.
# 13 patches an axis have 32 points each at 416 x 416. CA table 4 has 6 layers; heads and patch size are ours.
_PATCHES: dict[str, Any] = {
    "in_channels": 1,
    "out_channels": 1,
    "coord_dim": 2,
    "num_patches": 13,
    "patch_size": 32,
    "final_spectral": 64,
    **_TNO,
}


def _pit(
    in_channels: int,
    coord_dim: int,
    width: int,
    num_heads: int,
    latent: tuple[int, ...] | None,
    quantiles: tuple[float, float],
    rate_function: str,
    **settings: Any,
) -> tuple[type[nn.Module], dict[str, Any]]:
    """PiT tables 3 (rates), 7 (quantiles), 8 (latent meshes), 9 (the rest): four blocks, one output."""
    encoder_quantile, decoder_quantile = quantiles
    return PiT, {
        "in_channels": in_channels,
        "out_channels": 1,
        "coord_dim": coord_dim,
        "width": width,
        "num_heads": num_heads,
        "num_layers": 4,
        "latent": latent,
        "encoder_quantile": encoder_quantile,
        "decoder_quantile": decoder_quantile,
        "rate_function": rate_function,
        **settings,
    }


# GT table 5 states layers, d_model, heads, spectral layers with channels and modes, and the activation, table
# 7 the dropouts. Widths that the paper leaves open (feed-forward networks, decoder heads) are chosen so that
# the counts are those of table 5.
_BURGERS: dict[str, Any] = {
    "in_channels": 1,
    "out_channels": 1,
    "coord_dim": 1,
    "d_model": 96,
    "num_heads": 1,
    "num_layers": 4,
    "decoder_channels": 48,
    "head_channels": 32,
    "modes": 16,
}
_DARCY: dict[str, Any] = {
    "in_channels": 1,
    "out_channels": 1,
    "coord_dim": 2,
    "d_model": 128,
    "num_heads": 4,
    "num_layers": 6,
    "coarsening": 3.5,
    "decoder_channels": 32,
    "decoder_lift": True,
    "modes": 12,
    "attention_dropout": 0.1,
    "downsample_dropout": 0.05,
    "downsample_activation": "relu",
}
_DARCY_INVERSE: dict[str, Any] = {
    "in_channels": 1,
    "out_channels": 1,
    "coord_dim": 2,
    "d_model": 192,
    "num_heads": 4,
    "num_layers": 6,
    "dim_feedforward": 512,
    "coarsening": 3.0,
    "coarse_output": True,
    "decoder": "pointwise",
    "decoder_activation": "relu",
    "attention_dropout": 0.05,
    "dropout": 0.05,
    "downsample_dropout": 0.05,
    "decoder_dropout": 0.05,
}

_PRESETS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "tno-lorenz63": (
        TNO,
        {"in_channels": 1, "out_channels": 2, "coord_dim": 1, "initial_channels": 2, **_TNO},
    ),
    "tno-cde": (TNO, {"in_channels": 1, "out_channels": 1, "coord_dim": 1, **_TNO}),
    "tno-darcy64": (TNO, {"in_channels": 1, "out_channels": 1, "coord_dim": 2, **_TNO}),
    "vitno-darcy416": (ViTNO, {**_PATCHES, "modes": 12}),
    "fano-darcy416": (FANO, {**_PATCHES, "modes": 9}),
    "vitno-kolmogorov": (ViTNO, {**_PATCHES, "modes": 12}),
    "fano-kolmogorov": (FANO, {**_PATCHES, "modes": 9}),
    "pit-inviscid-burgers": _pit(1, 1, 64, 2, (1024,), (0.01, 0.08), "tan_clamped", decoder_layers=1),
    "pit-shock-tube": _pit(3, 1, 64, 2, (1024,), (0.04, 0.02), "square", decoder_layers=1),
    "pit-darcy": _pit(1, 2, 128, 2, (32, 32), (0.02, 0.05), "tan_clamped"),
    "pit-vorticity": _pit(10, 2, 256, 1, (16, 16), (0.01, 0.08), "square"),
    "pit-naca": _pit(2, 2, 256, 2, (111, 26), (0.005, 0.02), "tan_clamped"),
    "pit-elasticity": _pit(42, 2, 512, 8, None, (0.02, 0.02), "square", local_blocks=True),
    "galerkin-burgers": (GalerkinTransformer, {**_BURGERS, "attention_type": "galerkin"}),
    "fourier-burgers": (GalerkinTransformer, {**_BURGERS, "attention_type": "fourier", "dropout": 0.05}),
    "galerkin-darcy": (GalerkinTransformer, {**_DARCY, "attention_type": "galerkin", "dropout": 0.05}),
    "fourier-darcy": (GalerkinTransformer, {**_DARCY, "attention_type": "fourier", "dropout": 0.1}),
    "galerkin-darcy-inverse": (GalerkinTransformer, {**_DARCY_INVERSE, "attention_type": "galerkin"}),
}


# What CA compares with. FNO: 12 modes an axis and 128 channels, two hidden layers of 128 (CA 6.2.2 and table
# 4). The Galerkin transformer's encoder with Fourier attention between the linear maps of TNO (CA 6.2.1): 128
# channels; table 1 counts 6.04e5 parameters, those of 6 layers with 4 heads and the feed-forward network of
# CA (18), where the text has 4 layers.
_PRESETS |= {
    "fno-1d": (FNO, {"in_channels": 1, "out_channels": 1, "coord_dim": 1, "modes": 32, "width": 64}),
    "fno-2d": (FNO, {"in_channels": 1, "out_channels": 1, "coord_dim": 2, "modes": 12, "width": 128}),
    "fourier-tno-darcy64": (
        GalerkinTransformer,
        {
            "in_channels": 1,
            "out_channels": 1,
            "coord_dim": 2,
            "attention_type": "fourier",
            "decoder": "linear",
            "d_model": 128,
            "num_heads": 4,
            "num_layers": 6,
            "dim_feedforward": 128,
        },
    ),
}


def preset_names() -> list[str]:
    """The names that `preset` knows, sorted."""
    return sorted(_PRESETS)


def preset(name: str, **overrides: Any) -> nn.Module:
    """A freshly initialised model in the configuration of a published experiment.

    ====================== =================== ============================================= ==========
    name                   model               operator                                      parameters
    ====================== =================== ============================================= ==========
    pit-inviscid-burgers   PiT                 u(x, 0) -> u(x, 0.1), PiT A.1                 95,503
    pit-shock-tube         PiT                 rho, rho u, E at 0 -> E at 1.5, PiT A.2       95,631
    pit-darcy              PiT                 a(x) -> u(x), Darcy flow, PiT A.3             313,613
    pit-vorticity          PiT                 ten snapshots -> the next, PiT A.4            1,252,103
    pit-naca               PiT                 positions of a C-mesh -> Mach number, PiT A.6 1,250,061
    pit-elasticity         PiT                 42 numbers of the shape -> stress, PiT A.5    6,586,929
    galerkin-burgers       GalerkinTransformer u(x, 0) -> u(x, 1), GT 5.1                    529,601
    fourier-burgers        GalerkinTransformer the same                                      529,601
    galerkin-darcy         GalerkinTransformer a(x) -> u(x), grid 141 or 211, GT 5.2         2,217,565
    fourier-darcy          GalerkinTransformer the same                                      2,217,565
    galerkin-darcy-inverse GalerkinTransformer u(x) -> a(x) on the coarse grid, GT 5.3       2,384,833
    vitno-darcy416         ViTNO               a(x) -> u(x), 416 x 416 points, CA 6.2.2      835,201
    fano-darcy416          FANO                the same                                      95,868,801
    vitno-kolmogorov       ViTNO               vorticity at T -> at T + 0.1, CA 6.2.3        835,201
    fano-kolmogorov        FANO                the same                                      95,868,801
    fourier-tno-darcy64    GalerkinTransformer a(x) -> u(x), what CA table 1 compares with   604,289
    fno-1d                 FNO                 any on a 1-D grid; FNO1d of GT table 5        see below
    fno-2d                 FNO                 any on a 2-D grid; FNO of CA table 1          see below
    ====================== =================== ============================================= ==========

    The second task of CA 6.1, x(t) -> y(t), is
    ``preset("tno-lorenz63", out_channels=1, initial_channels=0)``: 598,017 parameters.

    The 598,145 of "tno-darcy64" (CA table 1: 5.98e5), with d = d_model = 128, every linear map with a bias:

    * lift of (a, x_1, x_2): 3 d + d = 512;
    * 6 encoder layers of 99,584 each, 597,504 in all: query, key and value 3 (d^2 + d) = 49,536; output of
      the heads d^2 + d = 16,512; feed-forward network 2 (d^2 + d) = 33,024; two layer norms 4 d = 512. W1
      and W2 are the identity, and no norm follows the last layer;
    * projection: d + 1 = 129.

    The models on patches. With d = d_model = 128 and m modes an axis, of which the half spectrum has 2 m^2
    complex numbers, twice as many real ones:

    * "vitno-": lift of (u, x_1, x_2), m = 12: 3 d * 288 * 2 = 221,184; the encoder of "tno-darcy64", 597,504;
      projection 129; final spectral layer, m = 64: 8192 * 2 = 16,384.
    * "fano-": lift 3 d + d = 512; 6 layers of 15,975,296, 95,851,776 in all: query, key and value, m = 9,
      3 d^2 * 162 * 2 = 15,925,248, output of the heads 16,512, feed-forward network 33,024, norms 512;
      projection 129; final spectral layer 16,384.

    The two experiments have the same configuration. Figure 18 of CA adds ``smoothing="periodic"`` to
    "fano-kolmogorov", figure 19 ``periodic_extension=True``. Take grids of kind "periodic" or "cell".

    PiT (tables 7 to 9). With d = width, c channels of u and coordinates together and h heads, the 313,613 of
    "pit-darcy" (d = 128, c = 3, h = 2) are: lift c d + d = 512; six attention layers d^2 + h = 16,386 each,
    98,316; four blocks' MLP and LINEAR 3 (d^2 + d) = 49,536 each, 198,144; projection d^2 + d + d + 1 =
    16,641. The 1-D presets have a fifth block on the output mesh. "pit-naca" takes the structured 221 x 51
    mesh as a Grid of the unit square and the positions of its points as u: 4 channels with the coordinates.
    "pit-elasticity", one mesh per sample, has a MLP and a LINEAR after A_in and A_out as well, as in the
    published code: 6 (d^2 + d) more than table 9 spells out. ``attention="self-a"``, ``"self-b"`` and
    ``"self-position"`` make the models of PiT table 2 and eq. (12).

    The "fno-" models are neuraloperator's (extra ``fno``), whose version decides the number of parameters:
    5.7e6 of "fno-2d", complex ones counted once, as CA table 1 does.

    Args:
        name: one of `preset_names()`.
        **overrides: arguments of the model's constructor that take the place of the preset's.

    Raises:
        ValueError: an unknown name (the message lists the known ones and the closest).
        TypeError: an override that is not an argument of the model's constructor.
        ImportError: an "fno-" model without neuraloperator.
    """
    model, settings, known = preset_parts(name)
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise TypeError(
            f"overrides must be arguments of {model.__name__} ({', '.join(known)}), was {', '.join(unknown)}"
        )
    return model(**{**settings, **overrides})


def preset_parts(name: str) -> tuple[type[nn.Module], dict[str, Any], list[str]]:
    """A preset's model, its settings, and the names of all arguments that the model takes.

    Raises:
        ValueError: an unknown name (the message lists the known ones and the closest).
    """
    if name not in _PRESETS:
        close = difflib.get_close_matches(str(name), _PRESETS, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"name must be one of {', '.join(preset_names())}, was {name!r}{hint}")
    model, settings = _PRESETS[name]
    return model, dict(settings), list(inspect.signature(model).parameters)
