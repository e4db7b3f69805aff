"""FANO's attention in mode space against its definition in space; pitfalls of the half spectrum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import draw

import continuum_ops as co
from continuum_ops.nn import FourierPatchAttention
from continuum_ops.ops import _fourier_patch_modes as mode_module

# patch shape, modes, patches: even and odd, up to Nyquist on the last axis and on the others
CASES = [
    ((16,), (4,), (3,)),
    ((16,), (9,), (5,)),
    ((15,), (8,), (3,)),
    ((1,), (1,), (4,)),
    ((2,), (2,), (4,)),
    ((8, 8), (3, 3), (3, 2)),
    ((8, 8), (4, 5), (2, 3)),
    ((8, 6), (1, 1), (2, 2)),
    ((8, 8), (3, 5), (2, 2)),
    ((8, 8), (4, 3), (2, 2)),
    ((9, 7), (3, 3), (2, 2)),
    ((9, 7), (4, 4), (2, 2)),
    ((7, 8), (3, 5), (2, 2)),
    ((32, 32), (9, 9), (2, 2)),
    ((4, 6, 4), (2, 2, 3), (2, 1, 2)),
    ((4, 3, 5), (2, 1, 3), (1, 2, 2)),
    ((6, 4, 6), (2, 2, 2), (2, 2, 1)),
]
IDS = [f"{'x'.join(map(str, p))}-{'x'.join(map(str, m))}" for p, m, _ in CASES]


def make(points, modes, embed_dim=6, heads=2, dtype=torch.float64, **options) -> FourierPatchAttention:
    """Generic weights, far from Hermitian."""
    torch.manual_seed(0)
    layer = FourierPatchAttention(embed_dim, heads, points, modes, dtype=dtype, **options)
    with torch.no_grad():
        if layer.out_proj.bias is not None:
            layer.out_proj.bias.normal_()
    return layer


def sharpen(layer, u, points=None) -> None:
    """Scale Q so that the largest score is 3: errors of the scores then show in the output."""
    with torch.no_grad():
        layer.in_proj_weight[0] *= 3.0 / abs(scores_of(layer, u, points)).max()


def field(points, patches, batch=2, channels=6, dtype=torch.float64):
    return draw((batch, *(n * p for n, p in zip(points, patches, strict=True)), channels), dtype)


def patches_of(x: np.ndarray, points) -> list[np.ndarray]:
    counts = [n // p for n, p in zip(x.shape[1:-1], points, strict=True)]
    cuts = itertools.product(*(range(c) for c in counts))
    return [
        x[(slice(None), *(slice(i * p, (i + 1) * p) for i, p in zip(cut, points, strict=True)))]
        for cut in cuts
    ]


def convolve(x: np.ndarray, w: np.ndarray, modes) -> np.ndarray:
    """irfftn(R rfftn(x)) of one patch (B, *points, C) with numpy, w (*rows, E, C) complex."""
    axes, points = tuple(range(1, x.ndim - 1)), x.shape[1:-1]
    spectrum = np.fft.rfftn(x, axes=axes, norm="forward")
    mixed = np.zeros((*spectrum.shape[:-1], w.shape[-2]), complex)
    ranges = []
    for n, m in zip(points[:-1], modes[:-1], strict=True):
        up = [(k, k) for k in range(m) if k <= (n - 1) // 2]
        ranges.append(up + [(-k, 2 * m - k) for k in range(1, m + 1) if k <= n // 2])
    ranges.append([(k, k) for k in range(modes[-1]) if k <= points[-1] // 2])
    for choice in itertools.product(*ranges):
        there, here = tuple(c[0] for c in choice), tuple(c[1] for c in choice)
        at = (slice(None), *there)
        mixed[at] = spectrum[at] @ w[here].T
    # numpy's inverse: complex along the leading axes, the real part of columns 0 and Nyquist along the last.
    return np.fft.irfftn(mixed, s=points, axes=axes, norm="forward")


def scores_of(layer, u, points=None, weights=None):
    return _definition(layer, u, points, weights)[1]


def definition(layer, u, points=None, weights=None):
    return _definition(layer, u, points, weights)[0]


def _definition(layer, u, points, weights):
    """CA eq. 62-64, 68: spectral convolutions of each patch, inner products in space, softmax, mixing."""
    points = layer.patch_size if points is None else points
    x = u.detach().numpy().astype(np.float64)
    w = layer.in_proj_weight.detach().numpy().astype(np.float64)
    w = w[..., 0, :] + 1j * w[..., 1, :]
    q, k, v = ([convolve(p, part, layer.modes) for p in patches_of(x, points)] for part in w)
    cells = math.prod(u.shape[1:-1])
    scale = (1 / cells if weights is None else 1.0) if layer.scale is None else layer.scale
    inner = None
    if weights is not None:
        full = np.broadcast_to(weights.detach().numpy(), u.shape[:-1])[..., None]
        inner = patches_of(full, points)
    batch, heads, dim, count = len(x), layer.num_heads, layer.head_dim, len(q)
    scores = np.zeros((batch, heads, count, count))
    for p, j in itertools.product(range(count), repeat=2):
        products = q[p] * k[j] * (1 if inner is None else inner[p])
        scores[:, :, p, j] = scale * products.reshape(batch, -1, heads, dim).sum((1, 3))
    a = np.exp(scores - scores.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    out = np.zeros_like(x)
    for p, place in enumerate(patches_of(out, points)):
        mixed = sum(
            np.repeat(a[:, :, p, j], dim, 1).reshape(batch, *[1] * len(points), -1) * v[j]
            for j in range(count)
        )
        place[...] = mixed @ layer.out_proj.weight.detach().numpy().astype(np.float64).T
        if layer.out_proj.bias is not None:
            place[...] += layer.out_proj.bias.detach().numpy()
    return out, scores


@pytest.fixture(params=["compiled", "products", "fft"])
def transform(request, monkeypatch):
    """The kernels of the extension, the same by torch's products, fast transforms."""
    choose = mode_module.choose_modes
    name = "continuum_ops.nn.fourier_patch_attention.choose_modes"
    monkeypatch.setattr(name, lambda *args: choose(*args, dense=request.param != "fft"))
    if request.param == "products":
        monkeypatch.setattr(mode_module, "_compiled", lambda *_: False)
    elif request.param == "compiled" and not co.backends()["cpu"].startswith("C++"):
        pytest.skip("the compiled extension is not built")
    return request.param


@pytest.mark.parametrize("points, modes, patches", CASES, ids=IDS)
def test_is_the_definition(points, modes, patches, transform):
    layer, u = make(points, modes), field(points, patches)
    sharpen(layer, u)
    true = definition(layer, u)
    np.testing.assert_allclose(layer(u).detach().numpy(), true, rtol=0, atol=1e-12 * np.abs(true).max())
    u32 = layer.float()(u.float())
    assert u32.dtype == torch.float32
    np.testing.assert_allclose(u32.detach().numpy(), true, rtol=0, atol=1e-5 * np.abs(true).max())


@pytest.mark.parametrize("points, modes, patches", [CASES[0], CASES[6], CASES[10], CASES[14]], ids=str)
def test_gradients(points, modes, patches, transform):
    layer = make([min(n, 4) for n in points], [min(m, 2) for m in modes], 4, 2, scale=0.1)
    u = field(layer.patch_size, [min(p, 2) for p in patches], 1, 4).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def function(u, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (u,))

    leaves = (u, *(p.detach().requires_grad_() for p in layer.parameters()))
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_compile_fullgraph(transform):
    torch._dynamo.reset()
    layer, u = make((6, 8), (2, 3)), field((6, 8), (2, 2))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = layer(u)
    torch.testing.assert_close(compiled(u), expected)
    grads = [torch.autograd.grad(f(u).square().sum(), list(layer.parameters())) for f in (layer, compiled)]
    torch.testing.assert_close(grads[1], grads[0])


def _no_projection(weight, modes, scale):
    c = mode_module._column_weights(modes, False, weight.device).to(weight.dtype)
    return weight * (c * scale * modes.patch_points)[:, None, None, None]


def _two_everywhere(weight, modes, scale):
    return weight * (2 * scale * modes.patch_points)


def _mirrored_row(weight, modes, scale):
    """As if the row -modes had a partner: its column-0 entry is not halved."""
    folded = mode_module.fold_parseval(weight, modes, scale)
    row = modes.up[0]
    folded[row, 0] *= 2
    return folded


@pytest.mark.parametrize("wrong", [_no_projection, _two_everywhere, _mirrored_row])
def test_the_comparison_sees_each_pitfall(wrong, monkeypatch):
    """Non-Hermitian weights show what Hermitian ones would hide."""
    layer, u = make((8, 8), (3, 5)), field((8, 8), (2, 2))
    sharpen(layer, u)
    true = definition(layer, u)
    monkeypatch.setattr("continuum_ops.nn.fourier_patch_attention.fold_parseval", wrong)
    assert np.abs(layer(u).detach().numpy() - true).max() > 1e-3 * np.abs(true).max()


@pytest.mark.parametrize("points, modes, patches", [c for c in CASES if c[0] != (1,)], ids=IDS[:3] + IDS[4:])
def test_folded_queries_give_the_scores(points, modes, patches):
    """The scores themselves, relative to the largest."""
    layer, u = make(points, modes, bias=False), field(points, patches)
    true = scores_of(layer, u)
    kept = mode_module.choose_modes(patches, points, modes)
    z = torch.view_as_complex(mode_module.to_modes(u, kept).movedim(1, -1).contiguous())  # (M, B, P, C)
    q, k, _ = layer._weights(kept, torch.float64)
    q = mode_module.fold_parseval(q, kept, 1 / math.prod(u.shape[1:-1]))
    heads = []
    for weight in (q, k):
        w = torch.complex(weight[..., 0, :], weight[..., 1, :]).flatten(0, -3)
        heads.append(torch.einsum("mbpc,mec->bpme", z, w).unflatten(-1, (2, 3)))
    scores = torch.einsum("bpmhe,bqmhe->bhpq", heads[0], heads[1].conj()).real
    np.testing.assert_allclose(scores.detach().numpy(), true, rtol=0, atol=2e-14 * np.abs(true).max())


@pytest.mark.parametrize("points", [(16, 16), (8, 8), (12, 12), (24, 48), (5, 3), (1, 2)], ids=str)
def test_other_resolutions_of_the_same_patches(points, transform):
    """CASES 28: modes that a coarser patch lacks are left out, each other one is used once."""
    layer, u = make((16, 16), (7, 9)), field(points, (2, 3))
    sharpen(layer, u, points)
    true = definition(layer, u, points)
    np.testing.assert_allclose(
        layer(u, patch_size=points).detach().numpy(), true, rtol=0, atol=1e-12 * np.abs(true).max()
    )


def test_one_function_on_every_resolution():
    """A trigonometric polynomial of the kept modes gives the same function at each resolution."""
    layer = make((16, 16), (4, 5), channels := 4, 2, scale=None)

    def at(n: int) -> torch.Tensor:
        x, y = torch.meshgrid(*[torch.arange(2 * n, dtype=torch.float64) / n] * 2, indexing="ij")
        waves = [
            torch.cos(2 * math.pi * (a * x + b * y)) * (1 + (x >= 1) + 2 * (y >= 1))
            for a, b in ((1, 0), (2, 1), (-1, 3), (0, 0))
        ]
        return layer(torch.stack(waves[:channels], -1)[None], patch_size=(n, n))

    fine = at(64)
    for n in (16, 32):
        torch.testing.assert_close(fine[:, :: 64 // n, :: 64 // n], at(n), rtol=0, atol=1e-12)


@pytest.mark.parametrize("points, modes, patches", [CASES[0], CASES[6], CASES[11], CASES[14]], ids=str)
@pytest.mark.parametrize("per_sample", [False, True])
def test_quadrature_weights_inside_the_patch(points, modes, patches, per_sample):
    layer, u = make(points, modes), field(points, patches)
    w = draw(u.shape[:-1] if per_sample else u.shape[1:-1], torch.float64, 7).square() * 0.1
    true = definition(layer, u, weights=w)
    np.testing.assert_allclose(layer(u, w).detach().numpy(), true, rtol=0, atol=1e-12 * np.abs(true).max())
    cells = torch.full(u.shape[1:-1], 1 / math.prod(u.shape[1:-1]), dtype=torch.float64)
    torch.testing.assert_close(layer(u, cells), layer(u), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        layer(u, torch.zeros_like(cells)), make(points, modes, scale=0.0)(u), rtol=0, atol=1e-12
    )


def test_gradient_of_weights():
    layer, u = make((4, 6), (2, 2), 4, 2), field((4, 6), (2, 1), 1, 4).requires_grad_()
    w = draw((8, 6), torch.float64, 5).square().requires_grad_()
    assert torch.autograd.gradcheck(layer, (u, w), fast_mode=True)
    assert torch.autograd.gradgradcheck(layer, (u, w), fast_mode=True)


def test_scale_zero_is_honoured():
    layer, u = make((8,), (3,), scale=0.0), field((8,), (4,))
    np.testing.assert_allclose(layer(u).detach().numpy(), definition(layer, u), rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["autocast", "input", "module"])
def test_low_precision_transforms_in_float32(how, transform):
    """CASES 26: the error is that of rounding the input, the parameters and the output."""
    layer, u = make((8, 8), (3, 4), dtype=torch.float32), field((8, 8), (2, 2), dtype=torch.float32)
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            low = layer(u)
            low.float().sum().backward()
        assert layer.in_proj_weight.grad.dtype == torch.float32
    elif how == "input":
        u = u.bfloat16().float()
        low = layer(u.bfloat16())
    else:
        layer, u = layer.bfloat16(), u.bfloat16().float()
        low, layer = layer(u.bfloat16()), layer.float()
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, layer(u).bfloat16())


@pytest.mark.parametrize("points, modes, patches", [CASES[0], CASES[6], CASES[14]], ids=str)
def test_blocks_of_modes(points, modes, patches, transform, monkeypatch):
    """Without a graph the modes are taken a few at a time."""
    layer, u = make(points, modes), field(points, patches)
    sharpen(layer, u)
    monkeypatch.setattr("continuum_ops.nn.fourier_patch_attention.BLOCK", 200)
    monkeypatch.setattr(mode_module, "BLOCK", 200)
    true = definition(layer, u)
    with torch.no_grad():
        np.testing.assert_allclose(layer(u).numpy(), true, rtol=0, atol=1e-12 * np.abs(true).max())


def test_weights_change_between_calls():
    """Nothing derived from the parameters outlives a call, however they are changed."""
    layer, u = make((8, 8), (3, 4)), field((8, 8), (2, 2))
    with torch.no_grad():
        layer(u)
        layer.in_proj_weight.data.mul_(1.5)
        true = definition(layer, u)
        np.testing.assert_allclose(layer(u).numpy(), true, rtol=0, atol=1e-12 * np.abs(true).max())


def test_strided_input_and_repeatable():
    layer, u = make((8, 6), (3, 4)), field((8, 6), (2, 2))
    turned = u.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
    assert torch.equal(layer(turned), layer(u)) and torch.equal(layer(u), layer(u))
    out = torch.cat([layer(u.requires_grad_()), u], 1)  # a strided gradient
    (grad,) = torch.autograd.grad(out.sum(), u)
    (plain,) = torch.autograd.grad(layer(u).sum() + u.sum(), u)
    torch.testing.assert_close(grad, plain, rtol=0, atol=1e-12)


def test_no_samples():
    layer, u = make((8, 8), (3, 4)), torch.zeros(0, 16, 16, 6, dtype=torch.float64)
    out = layer(u)
    out.sum().backward()
    assert out.shape == u.shape and not layer.in_proj_weight.grad.any()
    assert layer(u, torch.ones(16, 16, dtype=torch.float64)).shape == u.shape


def test_many_patches():
    """1024 patches: the scores are 1024 x 1024 per head; one patch against numpy."""
    layer, u = make((4,), (2,), 4, 2), field((4,), (1024,), 1, 4)
    sharpen(layer, u[:, :64])
    w = layer.in_proj_weight.detach().numpy()
    w = w[..., 0, :] + 1j * w[..., 1, :]
    x = u.numpy().reshape(1024, 4, 4)
    q, k, v = (convolve(x, part, (2,)).reshape(1024, 4, 2, 2) for part in w)
    s = np.einsum("xhd,pxhd->hp", q[5], k) / 4096
    a = np.exp(s - s.max(1, keepdims=True))
    a /= a.sum(1, keepdims=True)
    out = np.einsum("hp,pxhd->xhd", a, v).reshape(4, 4) @ layer.out_proj.weight.detach().numpy().T
    out += layer.out_proj.bias.detach().numpy()
    np.testing.assert_allclose(layer(u)[0, 20:24].detach().numpy(), out, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "points, modes, dense",
    [
        ((32, 32), (9, 9), True),
        ((128, 128), (9, 9), True),
        ((128, 128), (64, 65), False),
        ((1024,), (256,), False),
    ],
)
def test_transform_is_chosen_by_size(points, modes, dense):
    assert mode_module.choose_modes([1] * len(points), points, modes).dense is dense


def test_operators_pass_opcheck():
    modes = mode_module.choose_modes((2, 2), (6, 8), (2, 3))
    u = field((6, 8), (2, 2)).requires_grad_()
    torch.library.opcheck(torch.ops.continuum_ops.patch_analysis.default, (u, *modes, True))
    z = mode_module.to_modes(u, modes).detach().requires_grad_()
    torch.library.opcheck(torch.ops.continuum_ops.patch_synthesis.default, (z, *modes, False))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((6, 4, (8, 8), 2), "embed_dim must be divisible by num_heads, got 6 and 4"),
        ((6, 2, (8,) * 4, 2), "patch_size must be one number for each of 1 to 3 axes"),
        ((6, 2, (8, 8), (2, 2, 2)), "modes must be one number for each of the 2 axes"),
        ((6, 2, (8, 8), (2, 0)), r"modes\[1\] must be at least 1, got 0"),
        ((0, 2, (8, 8), 2), "embed_dim must be at least 1, got 0"),
        (
            (6, 2, (16, 16), 9),
            r"modes\[0\] must be at most 8 for a patch of 16 points along that axis.*got 9",
        ),
        ((6, 2, 16, 10), r"modes\[0\] must be at most 9 for a patch of 16 points"),
    ],
)
def test_constructor_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        FourierPatchAttention(*arguments)


def test_input_errors():
    layer, u = make((8, 8), (3, 4)), field((8, 8), (2, 2))
    with pytest.raises(TypeError, match=r"u must be a floating-point tensor, got torch\.int64"):
        layer(u.long())
    with pytest.raises(ValueError, match=r"u must have shape \(B, n_1, n_2, 6\), got \(16, 16, 6\)"):
        layer(u[0])
    with pytest.raises(ValueError, match=r"patch_size\[1\] must divide the grid's 15 points"):
        layer(u[:, :, :15])
    with pytest.raises(ValueError, match=r"patch_size must be one number >= 1 for each of the 2 axes"):
        layer(u, patch_size=(4, 4, 4))
    # Weights are patch_attention's to check.
    with pytest.raises(
        ValueError, match=r"weights must have the shape of the query grid, \(16, 16\), .* got \(16,\)"
    ):
        layer(u, torch.ones(16))
    with pytest.raises(TypeError, match=r"weights must be .* got torch\.int64"):
        layer(u, torch.ones(16, 16, dtype=torch.long))
    with pytest.raises(ValueError, match=r"weights must be >= 0"):
        layer(u, -torch.ones(16, 16, dtype=torch.float64))


@pytest.mark.parametrize("isa", ["avx512", "avx2", "generic"])
@pytest.mark.parametrize("channels", [1, 3, 8, 20])
def test_kernels_of_each_instruction_set(isa, channels):
    """Channels that fill no vector, and what lies behind a patch stays as it is."""
    if not co.backends()["cpu"].startswith("C++"):
        pytest.skip("the compiled extension is not built")
    from continuum_ops import _C

    if isa not in _C.isas():
        pytest.skip(f"this processor does not run {isa}")
    before = _C.isa()
    _C.set_isa(isa)
    try:
        for points, modes, patches in (
            ((13,), (7,), (3,)),
            ((9, 16), (4, 8), (2, 3)),
            ((4, 5, 6), (2, 2, 3), (2, 1, 2)),
        ):
            for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
                u = field(points, patches, 2, channels, dtype)
                kernel = mode_module.choose_modes(patches, points, modes, dense=True)
                fast = kernel._replace(dense=False)
                z = mode_module.to_modes(u, kernel)
                torch.testing.assert_close(z, mode_module.to_modes(u, fast), rtol=0, atol=bound)
                back = mode_module.from_modes(z, kernel)
                torch.testing.assert_close(back, mode_module.from_modes(z, fast), rtol=0, atol=8 * bound)
    finally:
        _C.set_isa(before)


def test_kernel_refuses_what_does_not_fit():
    modes = mode_module.choose_modes((2,), (4,), (2,))
    if not mode_module._compiled(torch.zeros(1), modes):
        pytest.skip("the compiled extension is not built")
    u, tables = torch.zeros(1, 8, 3), torch.zeros(16)
    call = torch.ops.continuum_ops.patch_dft
    assert call(u, tables, [2], [4], [2]).shape == (2, 2, 1, 2, 3)
    for arguments, message in (
        ((u, torch.zeros(15), [2], [4], [2]), "tables: 3"),
        ((u, tables.double(), [2], [4], [2]), "tables: one contiguous row"),
        ((u, tables, [3], [4], [2]), "a grid of patches"),
        ((u.mT.contiguous().mT, tables, [2], [4], [2]), "contiguous"),
        ((u, tables, [2, 1], [4], [2]), "one for each of 1 to 3 axes"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(*arguments)
