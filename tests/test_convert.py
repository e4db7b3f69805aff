"""Published checkpoints: the converted model computes what the formulas of `published` do, in float64."""

from __future__ import annotations

import math

import published
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import continuum_ops as co
from continuum_ops.models import convert

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def draw(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- TNO -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_tno_on_a_line(heads):
    s = published.tno_parameters(2, 3, 1, 8, heads, 2, 5)
    t = torch.linspace(0, 1, 11, dtype=torch.float64) ** 2
    grid, u = co.Grid(t), draw(2, 11, 2)
    right = published.tno(s, heads, u, t[:, None], co.quadrature.trapezoid(t))
    model = convert.tno(s)
    assert model.layers[0].self_attn.num_heads == heads
    torch.testing.assert_close(model(u, grid), right, **EXACT)


def test_tno_in_the_plane_has_equal_weights():
    s = published.tno_parameters(1, 1, 2, 8, 2, 1, 6)
    grid, u = co.Grid.uniform((4, 5)), draw(2, 20, 1)
    right = published.tno(s, 2, u, grid.points, torch.ones(20, dtype=torch.float64), activation=silu)
    torch.testing.assert_close(convert.tno(s, activation="silu")(u, grid, weights="equal"), right, **EXACT)
    assert not torch.allclose(convert.tno(s, activation="silu")(u, grid), right)


def test_tno_with_an_initial_condition_and_without_positions():
    s = published.tno_parameters(1, 2, 1, 8, 2, 1, 6, initial=2)
    t = torch.linspace(0, 2, 9, dtype=torch.float64)
    u, initial, w = draw(2, 9, 1), draw(2, 2, seed=4), co.quadrature.trapezoid(t)
    right = published.tno(s, 2, u, t[:, None], w, initial)
    torch.testing.assert_close(convert.tno(s)(u, co.Grid(t), initial), right, **EXACT)
    with pytest.raises(ValueError, match="append_position must be True with linear_in_initialcond"):
        convert.tno(s, append_position=False)
    s = published.tno_parameters(1, 2, 1, 8, 2, 1, 6)
    right = published.tno(s, 2, u, t[:, None], w, append=False)
    torch.testing.assert_close(convert.tno(s, append_position=False)(u, co.Grid(t)), right, **EXACT)


@pytest.mark.parametrize("wrapper", ["model.", "module.", "_orig_mod.", "module._orig_mod.model."])
def test_prefixes_of_wrappers(wrapper):
    s = published.tno_parameters(1, 1, 1, 4, 2, 1, 6)
    state = convert.tno({wrapper + key: value for key, value in s.items()}).state_dict()
    for key, value in convert.tno(s).state_dict().items():
        assert torch.equal(state[key], value)


def test_dtype_is_kept():
    s = {key: v.float() for key, v in published.tno_parameters(1, 1, 1, 4, 2, 1, 6).items()}
    assert {p.dtype for p in convert.tno(s).parameters()} == {torch.float32}


# --- PiT -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("coordinates", ["first", "last", "none"])
@pytest.mark.parametrize("form", ["concatenated", "split"])
def test_pit(form, coordinates):
    grid, latent, out = (
        co.Grid.uniform((5, 6)),
        co.Grid.uniform((3, 4)),
        co.Grid.uniform((4, 3), [(-0.2, 1.3), (0.0, 1.0)]),
    )
    u = draw(2, 30, 3)
    x = grid.points.expand(2, 30, 2)
    features = {"first": [x, u], "last": [u, x], "none": [u]}[coordinates]
    v = torch.cat(features, -1)
    s = getattr(published, f"pit_{form}_parameters")(v.shape[-1], 2, 6, 2, 2)
    formula = getattr(published, f"pit_{form}")
    right = formula(s, v, grid.points, latent.points, out.points, 0.2, 0.3)
    model = convert.pit(s, 2, encoder_quantile=0.2, decoder_quantile=0.3, coordinates=coordinates)
    got = model(u, grid, out, latent_mesh=latent, weights="equal")
    torch.testing.assert_close(got, right, **EXACT)
    other = convert.pit(s, 2, encoder_quantile=0.5, decoder_quantile=0.3, coordinates=coordinates)
    assert not torch.allclose(other(u, grid, out, latent_mesh=latent, weights="equal"), right)


def test_pit_of_positions_alone():
    s = published.pit_split_parameters(2, 1, 4, 2, 1)
    with pytest.raises(
        ValueError, match='coordinates must be "none" where the code gives its lift no channels'
    ):
        convert.pit(s, 2, encoder_quantile=None, decoder_quantile=None)
    with pytest.raises(
        ValueError,
        match=r'coordinates must be "first", "last" or "none", was .middle.',
    ):
        convert.pit(s, 2, encoder_quantile=None, decoder_quantile=None, coordinates="middle")


def test_rates_of_the_earlier_form_end_where_those_of_the_later_do():
    s = published.pit_split_parameters(3, 1, 4, 2, 1)
    s["down.r"] = torch.tensor([math.pi / 2, -math.pi / 2], dtype=torch.float64).reshape(1, 2, 1, 1)
    rates = convert.pit(s, 2, encoder_quantile=None, decoder_quantile=None).encoder.rate.detach()
    assert rates[0] == pytest.approx(math.tan(math.pi / 2 * (1 - 1e-7)), rel=1e-6)
    assert rates[1] == pytest.approx(0.0, abs=1e-12)


# --- Galerkin and Fourier transformers -----------------------------------------------------------


def equal(shape: tuple[int, ...]) -> co.Grid:
    """The unit box, both ends included, with the same weight for each point."""
    axes = [torch.linspace(0, 1, n, dtype=torch.float64) for n in shape]
    return co.Grid(*axes, weights=[torch.ones_like(x) for x in axes])


@pytest.mark.parametrize("post", [False, True], ids=["norms inside", "norms around"])
@pytest.mark.parametrize("kind", ["galerkin", "fourier", "linear", "softmax"])
def test_one_dimension(kind, post):
    s = published.galerkin_parameters(1, 6, 2, 1, 7, kind, post=post)
    grid, u = equal((12,)), draw(2, 12, 1)
    right = published.galerkin_transformer(s, u, grid.points, grid.points, 2, kind)
    extra = {"num_points": 12} if kind == "linear" else {}
    model = convert.galerkin_transformer(s, attention_type=kind, num_heads=2, **extra).eval()
    torch.testing.assert_close(model(u, grid), right, **EXACT)


def test_subtracted_attention():
    s = published.galerkin_parameters(1, 6, 2, 1, 7, "galerkin")
    grid, u = equal((12,)), draw(2, 12, 1)
    right = published.galerkin_transformer(s, u, grid.points, grid.points, 2, "galerkin", sign=-1.0)
    model = convert.galerkin_transformer(s, attention_type="galerkin", residual="minus").eval()
    torch.testing.assert_close(model(u, grid), right, **EXACT)


@pytest.mark.parametrize("coordinates", ["first", "last"])
def test_plane_without_scalers(coordinates):
    s = published.galerkin_parameters(3, 6, 2, 2, 7, "galerkin", fc=5, freq=5)
    grid, u = equal((7, 7)), draw(2, 49, 1)
    x = grid.points.expand(2, 49, 2)
    features = torch.cat([x, u] if coordinates == "first" else [u, x], -1)
    right = published.galerkin_transformer(s, features, grid.points, grid.points, 2, "galerkin")
    model = convert.galerkin_transformer(s, attention_type="galerkin", coordinates=coordinates).eval()
    torch.testing.assert_close(model(u, grid), right, **EXACT)


@pytest.mark.parametrize("middle", [(8, 8), (9, 9)])
@pytest.mark.parametrize("upscaled", [True, False])
def test_scalers(upscaled, middle):
    """The forward problem with both scalers; the inverse problem ends on the coarse grid, pointwise."""
    decoder = {} if upscaled else {"decoder": "pointwise", "post": True}
    s = published.galerkin_parameters(
        1, 7, 1, 2, 6, "galerkin", fc=5, scaled=True, upscaled=upscaled, **decoder
    )
    fine, coarse, u = equal((13, 13)), equal((5, 5)), draw(2, 169, 1)
    at = (fine if upscaled else coarse).points
    sizes = ((13, 13), middle, (5, 5))
    right = published.galerkin_transformer(s, u, coarse.points, at, 1, "galerkin", sizes=sizes)
    model = convert.galerkin_transformer(
        s, attention_type="galerkin", num_heads=1, coarsening=3.0, middle=middle
    ).eval()
    torch.testing.assert_close(model(u, fine), right, **EXACT)
    rule = convert.galerkin_transformer(s, attention_type="galerkin", num_heads=1, coarsening=3.0).eval()
    assert torch.equal(rule(u, fine), model(u, fine)) == (middle == (8, 8))  # round(sqrt(13 * 5))


@pytest.mark.parametrize("fc", [None, 5])
def test_pointwise_decoder(fc):
    s = published.galerkin_parameters(1, 6, 2, 1, 7, "galerkin", decoder="pointwise", fc=fc)
    grid, u = equal((9,)), draw(2, 9, 1)
    right = published.galerkin_transformer(s, u, grid.points, grid.points, 2, "galerkin")
    model = convert.galerkin_transformer(s, attention_type="galerkin").eval()
    torch.testing.assert_close(model(u, grid), right, **EXACT)


# --- ViT-NO and FANO -----------------------------------------------------------------------------


def convert_patches(kind: str, state: published.State, **options: object) -> torch.nn.Module:
    heads = {"num_heads": 2} if kind == "vitno" else {}
    options = {"num_patches": 2, "patch_size": 6, "norm_first": False, **heads, **options}
    return getattr(convert, kind)(state, **options).eval()


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "norm first"])
@pytest.mark.parametrize("modes", [(2, 3), (3, 4), (4, 4)], ids=["apart", "all", "overlapping"])
@pytest.mark.parametrize("kind", ["vitno", "fano"])
def test_patches(kind, modes, norm_first):
    s = published.patch_parameters(kind, 1, 8, 2, 5, 12, modes, 7)
    grid, u = co.Grid.uniform((12, 12), kind="periodic"), draw(2, 144, 1)
    x = grid.points.view(12, 12, 2)
    right = published.patch_model(s, kind, 2, u.view(2, 12, 12, 1), x, 2, norm_first)
    model = convert_patches(kind, s, norm_first=norm_first)
    torch.testing.assert_close(model(u, grid, weights="equal"), right.flatten(1, 2), **EXACT)
    other = convert_patches(kind, s, norm_first=not norm_first)
    assert not torch.allclose(other(u, grid, weights="equal"), right.flatten(1, 2))


@pytest.mark.parametrize("kind", ["vitno", "fano"])
def test_patches_at_another_resolution(kind):
    """The code then divides by the new number of points; its scale is saved as it was set last."""
    s = published.patch_parameters(kind, 2, 8, 2, 5, 24, (3, 4), 6)
    grid, u = co.Grid.uniform((24, 24), kind="cell"), draw(1, 576, 2)
    x = grid.points.view(24, 24, 2)
    right = published.patch_model(s, kind, 2, u.view(1, 24, 24, 2), x, 2, False)
    got = convert_patches(kind, s)(u, grid, weights="equal")
    torch.testing.assert_close(got, right.flatten(1, 2), **EXACT)


@pytest.mark.parametrize("kind", ["vitno", "fano"])
def test_complex_weights_as_pairs_and_without_smoothing(kind):
    s = published.patch_parameters(kind, 1, 8, 2, 5, 12, (2, 3), 5)
    pairs = {key: torch.view_as_real(v) if v.is_complex() else v for key, v in s.items()}
    state = convert_patches(kind, pairs).state_dict()
    for key, value in convert_patches(kind, s).state_dict().items():
        assert torch.equal(state[key], value)
    rough = {key: v for key, v in s.items() if not key.startswith("smoothing")}
    grid, u = co.Grid.uniform((12, 12), kind="periodic"), draw(1, 144, 1)
    right = published.patch_model(rough, kind, 2, u.view(1, 12, 12, 1), grid.points.view(12, 12, 2), 2, False)
    torch.testing.assert_close(convert_patches(kind, rough)(u, grid), right.flatten(1, 2), **EXACT)


# --- errors --------------------------------------------------------------------------------------

TNO = published.tno_parameters(1, 1, 1, 4, 2, 2, 6)
PIT = published.pit_concatenated_parameters(3, 1, 4, 2, 2)
OLD_PIT = published.pit_split_parameters(3, 1, 4, 2, 2)
GT = published.galerkin_parameters(1, 6, 2, 1, 7, "galerkin")


def load(code: str, state: published.State) -> object:
    if code == "tno":
        return convert.tno(state)
    if code in ("vitno", "fano"):
        return convert_patches(code, state)
    if code == "pit":
        return convert.pit(state, 2, encoder_quantile=0.1, decoder_quantile=0.1)
    return convert.galerkin_transformer(state, attention_type="galerkin")


VITNO, FANO = (published.patch_parameters(kind, 1, 4, 2, 5, 12, (2, 3), 4) for kind in ("vitno", "fano"))
STATES = [("tno", TNO), ("pit", PIT), ("pit", OLD_PIT), ("gt", GT), ("vitno", VITNO), ("fano", FANO)]
# Without these, another form of the code is understood, or nothing is missing.
OPTIONAL = {"pe_discrete", "even_inds", "odd_inds", "down.r"}
KEYS = [(code, state, key) for code, state in STATES for key in state if key not in OPTIONAL]


@pytest.mark.parametrize(("code", "state", "key"), KEYS, ids=[f"{code}-{key}" for code, _, key in KEYS])
def test_every_key_is_needed_and_its_shape_checked(code, state, key):
    """A key that is left out, and a tensor with one more axis or one more entry, are named."""
    without = {name: value for name, value in state.items() if name != key}
    with pytest.raises(ValueError, match=r"must have the key|must be given|num_heads must|no keys but"):
        load(code, without)
    value = state[key]
    for wrong in (value[None], torch.cat([value, value])):
        if key.startswith("linear_out") or wrong.shape[0] == 2 * value.shape[0]:
            continue
        with pytest.raises(ValueError, match=rf"state_dict\['{key}'\] must have shape \(.*\), was \("):
            load(code, {**state, key: wrong})


@pytest.mark.parametrize(("code", "state"), STATES)
def test_an_unexpected_key_is_named(code, state):
    with pytest.raises(
        ValueError, match=r"must have no keys but those of the published .* had 'surplus\.weight'"
    ):
        load(code, {**state, "surplus.weight": torch.ones(2)})


def test_a_missing_key_is_named():
    for key in ("linear_in.bias", "encoder.layers.0.self_attn.W_k.weight", "encoder.layers.1.norm2.weight"):
        state = {name: value for name, value in TNO.items() if name != key}
        with pytest.raises(
            ValueError, match=f"must have the key '{key}' of the published TNO, which is missing"
        ):
            convert.tno(state)


def test_shapes_that_do_not_go_together():
    key = "encoder.layers.1.feed_forward.fc2.weight"
    with pytest.raises(ValueError, match=rf"state_dict\['{key}'\] must have shape \(4, 6\), was \(4, 7\)"):
        convert.tno({**TNO, key: torch.zeros(4, 7)})
    key = "encoder.layers.1.self_attn.scaled_dot_product_attention.scale"
    with pytest.raises(ValueError, match=r"must be the square root of a number of channels that divides 4"):
        convert.tno({**TNO, key: torch.tensor([2.0])})
    with pytest.raises(ValueError, match=r"'linear_in_position.weight'\] must have more columns"):
        convert.tno({**TNO, "linear_in_position.weight": torch.zeros(4, 1)})
    with pytest.raises(ValueError, match=r"'en_layer.mlp1.weight'\] must have a multiple of 2 columns"):
        load("pit", {**PIT, "en_layer.mlp1.weight": torch.zeros(4, 7)})
    wrong = {**OLD_PIT, "down.r": torch.zeros(1, 3, 1, 1)}
    with pytest.raises(ValueError, match=r"'down.r'\] must have a number of heads that divides the width 4"):
        load("pit", wrong)
    with pytest.raises(ValueError, match=r"'encoder_layers.0.attn.fc.weight'\] must have 6 columns and"):
        load("gt", {**GT, "encoder_layers.0.attn.fc.weight": torch.zeros(6, 7)})


def test_options_of_the_galerkin_transformer():
    def with_options(state: published.State, **options: object) -> None:
        convert.galerkin_transformer(state, **options)

    post = published.galerkin_parameters(1, 6, 2, 1, 7, "galerkin", post=True)
    scaled = published.galerkin_parameters(1, 6, 2, 2, 7, "galerkin", fc=5, scaled=True)
    narrow = published.galerkin_parameters(1, 6, 2, 1, 7, "galerkin", fc=6)
    for state, options, message in (
        (GT, {"attention_type": "cosine"}, "attention_type must be one of .*, was 'cosine'"),
        (GT, {"attention_type": "galerkin", "residual": "plus"}, "residual must be one of 'add', 'minus'"),
        (GT, {"attention_type": "linear"}, 'num_points must be given with attention_type="linear"'),
        (GT, {"attention_type": "galerkin", "num_points": 4}, "num_points must be given with"),
        (GT, {"attention_type": "galerkin", "num_heads": 3}, "num_heads must be the 2 of attn.norm_K, was 3"),
        (
            post,
            {"attention_type": "galerkin"},
            "num_heads must be given for a state_dict without attn.norm_K",
        ),
        (
            post,
            {"attention_type": "galerkin", "num_heads": 4},
            "num_heads must be a divisor of the 6 channels",
        ),
        (scaled, {"attention_type": "galerkin"}, "coarsening must be given if and only if"),
        (GT, {"attention_type": "galerkin", "coarsening": 2.0}, "coarsening must be given if and only if"),
        (GT, {"attention_type": "fourier"}, "must have the key 'encoder_layers.0.attn.norm_Q.0.weight'"),
        (narrow, {"attention_type": "galerkin"}, r"'regressor.fc.weight'\] must have 5 rows"),
        (
            {**GT, **post},
            {"attention_type": "galerkin"},
            "layer_norm1 or attn.norm_K in its layers, not both",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            with_options(state, **options)


def test_what_is_no_state_dict():
    with pytest.raises(TypeError, match="state_dict must be a mapping of names to tensors, was list"):
        convert.tno([])
    with pytest.raises(TypeError, match=r"state_dict\['model_state'\] was dict; where a file holds more"):
        convert.tno({"model_state": TNO})
    with pytest.raises(ValueError, match=r"must have the key 'linear_in\.weight'"):
        convert.tno({})
