"""Published configurations: parameter counts by the piece, errors, overrides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import continuum_ops as co
from continuum_ops.models import TNO, preset, preset_names


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
    assert preset_names() == sorted(preset_names())
    assert {"tno-cde", "tno-darcy64", "tno-lorenz63", "galerkin-burgers"} <= set(preset_names())
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
