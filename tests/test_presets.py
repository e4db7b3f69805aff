"""Published configurations: parameter counts by the piece, errors, overrides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import continuum_ops as co
from continuum_ops.models import FANO, TNO, PiT, ViTNO, preset, preset_names


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# 6 layers of: query, key, value; output of the heads; two feed-forward maps; two layer norms.
ENCODER = 6 * (3 * (128**2 + 128) + (128**2 + 128) + 2 * (128**2 + 128) + 2 * 2 * 128)


@pytest.mark.parametrize(
    ("name", "total", "lift", "lift_initial", "projection"),
    [
        ("tno-lorenz63", 598_786, 2 * 128 + 128, 4 * 128 + 128, 2 * 128 + 2),
        ("tno-cde", 598_017, 2 * 128 + 128, 0, 128 + 1),
        ("tno-darcy64", 598_145, 3 * 128 + 128, 0, 128 + 1),
    ],
)
def test_parameter_counts(name: str, total: int, lift: int, lift_initial: int, projection: int) -> None:
    model = preset(name)
    assert isinstance(model, TNO)
    assert count(model) == total
    assert count(model.layers) == ENCODER
    assert count(model.lift) == lift
    assert count(model.projection) == projection
    assert lift + lift_initial + ENCODER + projection == total


@pytest.mark.parametrize(
    ("name", "kind", "total", "lift", "layer"),
    [
        ("vitno-darcy416", ViTNO, 835_201, 3 * 128 * 2 * 12**2 * 2, ENCODER // 6),
        ("vitno-kolmogorov", ViTNO, 835_201, 3 * 128 * 2 * 12**2 * 2, ENCODER // 6),
        ("fano-darcy416", FANO, 95_868_801, 4 * 128, 3 * 128**2 * 2 * 9**2 * 2 + 16_512 + 33_024 + 512),
        ("fano-kolmogorov", FANO, 95_868_801, 4 * 128, 3 * 128**2 * 2 * 9**2 * 2 + 16_512 + 33_024 + 512),
    ],
)
def test_parameter_counts_of_the_models_on_patches(
    name: str, kind, total: int, lift: int, layer: int
) -> None:
    model = preset(name, device="meta")  # FANO's parameters take 383 MB
    assert isinstance(model, kind)
    assert count(model) == total == lift + 6 * layer + 129 + 2 * 64**2 * 2
    assert count(model.lift) == lift
    assert all(count(encoder) == layer for encoder in model.layers)
    assert model.num_patches == (13, 13) and model.final_spectral.modes == (64, 64)
    assert f"{total:,}" in (preset.__doc__ or "")


def test_patched_presets_map_a_field_on_a_grid() -> None:
    """Small versions, on a grid that is coarser than that of the training: 13 patches of 2 points."""
    torch.manual_seed(0)
    grid = co.Grid.uniform((26, 26), kind="cell", dtype=torch.float32)
    for name in ("vitno-darcy416", "fano-darcy416", "vitno-kolmogorov", "fano-kolmogorov"):
        model = preset(name, d_model=8, num_layers=1, dim_feedforward=8).eval()
        out = model(torch.rand(2, 26**2, 1), grid)
        assert out.shape == (2, 26**2, 1) and torch.isfinite(out).all(), name


# PiT tables 9 and 2: position attention, self-attention everywhere (A), in the processor (B). The counts of A
# for the three presets on grids of the plane are not in the paper: its runs did not fit in memory.
PIT = {
    "pit-inviscid-burgers": (95_503, 152_833, 128_263),
    "pit-shock-tube": (95_631, 152_961, 128_391),
    "pit-darcy": (313_613, None, 444_677),
    "pit-vorticity": (1_252_103, None, 1_776_387),
    "pit-naca": (1_250_061, None, 1_774_341),
    "pit-elasticity": (6_586_929, 9_732_609, 8_684_049),
}


@pytest.mark.parametrize("name", PIT)
def test_parameter_counts_of_pit(name: str) -> None:
    position, everywhere, processor = PIT[name]
    assert count(preset(name)) == position
    assert count(preset(name, attention="self-b")) == processor
    if everywhere is not None:
        assert count(preset(name, attention="self-a")) == everywhere
    # Eq. (12) adds query and key projections to the layers on one mesh: four, five in one dimension.
    model = preset(name)
    blocks = len(model.layers) + len(model.decoder_layers)
    assert (
        count(preset(name, attention="self-position")) == position + blocks * 2 * model.lift.out_features**2
    )


@pytest.mark.parametrize(
    ("name", "quantiles", "latent", "heads"),
    [
        ("pit-inviscid-burgers", (0.01, 0.08), (1024,), 2),
        ("pit-shock-tube", (0.04, 0.02), (1024,), 2),
        ("pit-darcy", (0.02, 0.05), (32, 32), 2),
        ("pit-vorticity", (0.01, 0.08), (16, 16), 1),
        ("pit-naca", (0.005, 0.02), (111, 26), 2),
        ("pit-elasticity", (0.02, 0.02), None, 8),
    ],
)
def test_quantiles_and_latent_meshes_of_pit(name: str, quantiles, latent, heads: int) -> None:
    model = preset(name)
    assert isinstance(model, PiT)
    found = [m.quantile for m in model.modules() if isinstance(m, co.nn.PositionAttention) and m.quantile]
    assert tuple(found) == quantiles == (model.encoder_quantile, model.decoder_quantile)
    assert model.latent == latent
    assert {m.num_heads for m in model.modules() if isinstance(m, co.nn.PositionAttention)} == {heads}


def test_pit_on_the_meshes_of_its_benchmarks() -> None:
    """Small versions of the six: each takes the channels and the kind of mesh that the paper has."""
    torch.manual_seed(0)
    line = co.Grid.uniform(24, (-5, 5), kind="cell")
    square, torus = co.Grid.uniform((9, 9)), co.Grid.uniform((8, 8), kind="periodic")
    clouds = co.PointCloud(torch.rand(2, 20, 2))
    for name, channels, mesh, latent in (
        ("pit-inviscid-burgers", 1, line, (24,)),
        ("pit-shock-tube", 3, line, (12,)),
        ("pit-darcy", 1, square, (4, 4)),
        ("pit-vorticity", 10, torus, (4, 4)),
        ("pit-naca", 2, co.Grid.uniform((9, 7)), (5, 4)),
        ("pit-elasticity", 42, clouds, None),
    ):
        out = preset(name, latent=latent)(torch.rand(2, len(mesh), channels), mesh)
        assert out.shape == (2, len(mesh), 1) and torch.isfinite(out).all(), name


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("galerkin-burgers", 523_000, 530_000),
        ("fourier-burgers", 523_000, 530_000),
        ("galerkin-darcy", 2_215_000, 2_225_000),
        ("fourier-darcy", 2_215_000, 2_225_000),
        ("galerkin-darcy-inverse", 2_375_000, 2_385_000),
    ],
)
def test_parameter_counts_of_gt_table_5(name: str, low: int, high: int) -> None:
    model = preset(name)
    assert isinstance(model, co.models.GalerkinTransformer)
    assert low <= count(model) < high
    assert f"{count(model):,}" in (preset.__doc__ or "")


def test_darcy64_maps_a_field_on_a_grid() -> None:
    torch.manual_seed(0)
    axis = torch.linspace(0, 1, 5)
    out = preset("tno-darcy64")(torch.rand(2, 25, 1), co.Grid(axis, axis))
    assert out.shape == (2, 25, 1)
    assert torch.isfinite(out).all()


def test_lorenz63_takes_an_initial_condition() -> None:
    torch.manual_seed(0)
    out = preset("tno-lorenz63")(torch.rand(2, 9, 1), co.Grid(torch.linspace(0, 2, 9)), torch.rand(2, 2))
    assert out.shape == (2, 9, 2)


def test_overrides_take_the_place_of_settings() -> None:
    model = preset("tno-lorenz63", out_channels=1, initial_channels=0)
    assert model.lift_initial is None
    assert count(model) == 598_017
    assert count(preset("tno-darcy64", num_layers=1)) == 512 + ENCODER // 6 + 129
    assert next(preset("tno-cde", dtype=torch.float64).parameters()).dtype == torch.float64


def test_names_are_listed() -> None:
    names = preset_names()
    assert names == sorted(names)
    assert {
        *PIT,
        "vitno-darcy416",
        "fano-kolmogorov",
        "tno-cde",
        "tno-darcy64",
        "tno-lorenz63",
        "galerkin-burgers",
    } <= set(names)
    assert co.models.preset is preset


def test_unknown_name_lists_the_names_and_the_closest() -> None:
    names = ", ".join(preset_names())
    with pytest.raises(ValueError, match=f"one of {names}, was 'tno-lorenz'; did you mean 'tno-lorenz63'"):
        preset("tno-lorenz")
    with pytest.raises(ValueError, match=r"was 'qqqq'$"):
        preset("qqqq")


def test_unknown_override_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"overrides must be arguments of TNO \(in_channels, .*\), was heads, width$"
    ):
        preset("tno-cde", width=3, heads=2)


def test_override_is_checked_by_the_model() -> None:
    with pytest.raises(ValueError, match="num_layers must be at least 1, was 0"):
        preset("tno-cde", num_layers=0)
