"""The CUDA kernels of position attention: values, gradients and edge rules.

Each test runs on the CPU, where the shim executes the kernels' own code thread by thread in a random order,
and again on a GPU where there is one (marked `gpu`).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from cuda_on_cpu import ROOT, build_script, needs_gpu, shim
from position_cuda import GRADS, OPS, STEEP, Inputs, check, equidistant, exact, grads_for, inputs, run, steep

INF = float("inf")


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_order_of_threads_gives_the_same_bits(dtype: torch.dtype, seed: int) -> None:
    shim()
    x = inputs(n=66, m=40, value_heads=2, channels=8, dtype=dtype, weights=1, radius=1)
    result = check("shim", x, seed=seed)
    for name, tensor in run("shim", x, *grads_for(x), seed=seed + 17).items():
        assert torch.equal(tensor, result[name]), name


CASES = {
    "shared": {},
    "heads": {"value_heads": 2, "channels": 8, "weights": 1},
    "bfloat16": {"dtype": torch.bfloat16, "weights": 2, "value_heads": 2, "channels": 8},
    "float16": {"dtype": torch.float16, "weights": 2, "radius": 1, "channels": 16},
    "float64": {
        "dtype": torch.float64,
        "geometries": 2,
        "d": 3,
        "weights": 2,
        "radius": 2,
        "period": [1.0, INF, 0.75],
    },
    "own mesh": {"geometries": 2, "d": 1, "channels": 40, "rate": 100.0},
    "own radius": {"radius": 2, "d": 3, "weights": 1},
    "five coordinates": {"d": 5, "weights": 1, "period": [0.5] * 5},
    "no coordinates": {"d": 0, "weights": 1},
    "wide bfloat16": {"dtype": torch.bfloat16, "heads": 1, "batch": 3, "channels": 96},
    "wide float32": {"heads": 1, "batch": 3, "channels": 24},
    "very wide float16": {"dtype": torch.float16, "heads": 1, "channels": 264, "m": 40},
    "rate 0": {"rate": 0.0, "radius": 1},
    "rate 1e5": {"d": 1, "n": 70, "m": 130, "rate": 1e5, "weights": 1},
    "one query, one key": {"n": 1, "m": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(device: str, case: str) -> None:
    check(device, inputs(**CASES[case]))


@pytest.mark.parametrize("case", STEEP)
def test_steep_rates(device: str, case: str) -> None:
    """The rounding of -rate |x - y|^2, and of its sum with log w, is no error of the probabilities."""
    check(device, steep(case))


def test_the_weights_of_equidistant_keys_count_at_any_rate(device: str) -> None:
    x, out, lse = equidistant()
    result = run(device, x, *grads_for(x))
    torch.testing.assert_close(result["out"], out)
    torch.testing.assert_close(result["lse"].double(), lse, rtol=4e-7, atol=0)


@pytest.mark.parametrize("channels", [8, 72, 264])
def test_tf32(device: str, channels: int) -> None:
    x = inputs(heads=1, channels=channels, batch=1, m=40)
    result = check(device, x, tf32=True)
    accurate = run(device, x, *grads_for(x), tf32=False)
    assert not torch.equal(result["out"], accurate["out"]), "the flag changes nothing"


@pytest.mark.parametrize("points", [0, 1, 2, 15, 17, 63, 65])
def test_sizes_around_a_tile(device: str, points: int) -> None:
    check(device, inputs(n=points, m=3, heads=1, channels=3))
    check(device, inputs(n=3, m=points, heads=1, channels=3, weights=1))


@pytest.mark.parametrize("zero", ["batch", "heads", "n", "m", "channels"])
@pytest.mark.parametrize("geometries", [1, 2])
def test_nothing_to_attend_to(device: str, zero: str, geometries: int) -> None:
    sizes = {"batch": 2, "heads": 2, "n": 3, "m": 3, "channels": 2, "geometries": geometries}
    sizes[zero] = 0
    if zero == "batch" and geometries == 2:
        sizes["geometries"] = 0
    x = inputs(**sizes, weights=1)
    result = run(device, x, *grads_for(x))
    assert result["out"].shape == (sizes["batch"], sizes["heads"], sizes["n"], sizes["channels"])
    if zero == "m":
        assert (result["out"] == 0).all() and (result["lse"] == -INF).all()
    for name in GRADS:
        assert result[name].shape == getattr(x, name).shape
        if zero in ("heads", "n", "m"):  # otherwise lse is there and has a gradient
            assert (result[name] == 0).all(), name


def test_dead_keys_may_hold_anything(device: str) -> None:
    x = inputs(weights=2, m=70)
    x.weights[:, 1], x.weights[0, 5], x.weights[1, 64:] = 0, 0, 0
    clean = check(device, x)
    dirty = x._replace(value=x.value.clone(), key_pos=x.key_pos.expand(2, -1, -1).clone())
    for entry, key in [(0, 1), (1, 1), (0, 5), (1, 64), (1, 69)]:
        dirty.value[entry, :, key], dirty.key_pos[entry, key] = torch.nan, INF
    result = run(device, dirty, *grads_for(x))
    for name in ("out", "lse", "query_pos", "value", "rate", "weights"):
        assert torch.equal(result[name], clean[name]), name
    for entry, key in [(0, 1), (1, 1), (0, 5), (1, 64)]:
        assert (result["key_pos"][entry, key] == 0).all() and (result["value"][entry, :, key] == 0).all()
        assert result["weights"][entry, key] == 0


def test_rows_without_keys(device: str) -> None:
    x = inputs(weights=2, m=30, radius=1)
    x.weights[0] = 0
    x.radius[0, 3] = 0.0
    result = check(device, x)
    assert (result["out"][0] == 0).all() and (result["lse"][0] == -INF).all()
    assert (result["out"][1, :, 3] == 0).all() and (result["lse"][1, :, 3] == -INF).all()
    assert all(result[name].isfinite().all() for name in GRADS)


def test_first_tiles_dead(device: str) -> None:
    x = inputs(m=150, weights=1, heads=1)
    x.weights[:, :128] = 0
    result = check(device, x)
    few = Inputs(x.query_pos, x.key_pos[:, 128:], x.value[:, :, 128:], x.rate, x.weights[:, 128:])
    torch.testing.assert_close(result["out"], run(device, few, *grads_for(x))["out"])


def test_radius_of_zero_and_ties(device: str) -> None:
    points = torch.arange(9, dtype=torch.float32)[None, :, None] / 8
    x = inputs(n=9, m=9, d=1)._replace(query_pos=points, key_pos=points, radius=torch.zeros(1, 9))
    result = check(device, x)
    torch.testing.assert_close(result["out"], x.value.expand(-1, 2, -1, -1))
    check(device, x._replace(radius=torch.full((1, 9), 1 / 8)))


@pytest.mark.parametrize(
    ("name", "value", "rows"),
    [
        ("weights", -1.0, 20),
        ("weights", torch.nan, 20),
        ("rate", -1.0, 20),
        ("rate", torch.nan, 20),
        ("radius", -1.0, 1),
    ],
)
def test_bad_numbers_become_nan(device: str, name: str, value: float, rows: int) -> None:
    x = inputs(weights=1, radius=1)._replace(radius=torch.full((1, 20), 2.0))
    good = run(device, x, *grads_for(x))
    getattr(x, name).view(-1)[0] = value
    result = run(device, x, *grads_for(x))
    heads = slice(0, 1) if name == "rate" else slice(None)
    assert result["out"][:, heads, :rows].isnan().all() and result["lse"][:, heads, :rows].isnan().all()
    if name == "rate":
        assert torch.equal(result["out"][:, 1], good["out"][:, 1])
        assert result["rate"][0].isnan() and torch.equal(result["rate"][1], good["rate"][1])
    if name == "radius":
        assert torch.equal(result["out"][:, :, 1:], good["out"][:, :, 1:])


@pytest.mark.parametrize("name", ["query_pos", "key_pos", "value"])
def test_nan_comes_out(device: str, name: str) -> None:
    x = inputs(radius=1)
    x.radius.fill_(2.0)
    good = run(device, x, *grads_for(x))
    getattr(x, name)[0, ..., 3, :] = torch.nan
    result = run(device, x, *grads_for(x))
    if name == "query_pos":
        assert result["out"][:, :, 3].isnan().all()
        rest = torch.arange(20) != 3
        assert torch.equal(result["out"][:, :, rest], good["out"][:, :, rest])
    else:
        assert result["out"][0].isnan().all()


def test_weights_scaled(device: str) -> None:
    x = inputs(weights=1, m=40)
    one, two = (run(device, y, *grads_for(x)) for y in (x, x._replace(weights=x.weights * 1024)))
    torch.testing.assert_close(two["out"], one["out"])
    torch.testing.assert_close(two["lse"], one["lse"] + 10 * math.log(2))


def test_offset_coordinates_and_coincident_points(device: str) -> None:
    x = inputs(n=40, m=40, rate=1e3)
    x = x._replace(query_pos=(x.query_pos * 64).round() / 64 + 4096)
    x = x._replace(key_pos=x.query_pos.clone())
    result = check(device, x)
    assert all(tensor.isfinite().all() for tensor in result.values())
    d1 = x._replace(
        query_pos=torch.tensor([[[512_695.0]]]),
        key_pos=torch.tensor([[[512_804.0]]]),
        value=x.value[:, :, :1],
    )
    lse = run(device, d1, *grads_for(d1))["lse"]
    torch.testing.assert_close(lse[0, :, 0], -x.rate * 109.0**2)


def test_positions_in_float64_keep_their_differences(device: str) -> None:
    x = inputs(n=30, m=40, rate=50.0, geometries=2)
    offset = torch.tensor([1e5, -3e5], dtype=torch.float64)
    x = x._replace(query_pos=x.query_pos.double() + offset, key_pos=x.key_pos.double() + offset)
    result = check(device, x)
    assert result["query_pos"].dtype == torch.float64


def test_strides(device: str) -> None:
    torch.manual_seed(0)
    x = inputs(value_heads=2, channels=8, weights=2, geometries=2)
    same = check(device, x)

    def inside(t: torch.Tensor) -> torch.Tensor:
        """The same numbers in the middle of a buffer of NaN, the last two axes exchanged, not aligned."""
        buffer = torch.full((t.numel() * 4 + 64,), torch.nan, dtype=t.dtype)
        view = buffer.as_strided(
            t.shape, [*t.mT.contiguous().stride()[:-2], 1, 2 * t.shape[-2]][: t.dim()], 3
        )
        strides, step = [], 1
        for size in (t.shape[-2], t.shape[-1], *reversed(t.shape[:-2])):
            strides.append(step)
            step *= size + (step == 1)
        view = buffer.as_strided(t.shape, [*reversed(strides[2:]), strides[0], strides[1]], 3)
        return view.copy_(t)

    moved = Inputs(*(inside(t) if isinstance(t, torch.Tensor) and t.dim() > 1 else t for t in x))
    assert not any(t.is_contiguous() for t in (moved.value, moved.key_pos, moved.weights))
    grad_out = inside(grads_for(x)[0])
    result = check(device, moved, grad_out=grad_out)
    for name, tensor in result.items():
        torch.testing.assert_close(tensor, same[name], rtol=1e-6, atol=1e-6)
    expanded = x._replace(value=x.value[:1, :1].expand(2, 2, -1, -1), weights=x.weights[:1].expand(2, -1))
    check(device, expanded, grad_out=torch.ones(()).expand(2, 2, 20, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_give_the_same_bits(device: str, dtype: torch.dtype) -> None:
    x = inputs(dtype=dtype, weights=1, m=90, channels=8)
    first = run(device, x, *grads_for(x))
    for _ in range(30 if device == "gpu" else 1):
        again = run(device, x, *grads_for(x))
        assert all(torch.equal(again[name], first[name]) for name in first)


def test_far_tiles_change_nothing(device: str) -> None:
    """Points in order, so that most tiles are far from each other; a radius, then the rate alone."""
    points = torch.linspace(0, 1, 320)[None, :, None]
    x = inputs(n=320, m=320, d=1, heads=1, batch=1, channels=4)
    x = x._replace(query_pos=points, key_pos=points, rate=torch.tensor([3e4]))
    check(device, x)
    check(device, x._replace(rate=torch.tensor([1.0]), radius=torch.full((1, 320), 0.1)))
    check(device, x._replace(rate=torch.tensor([300.0]), period=[1.0]))


@pytest.mark.gpu
@needs_gpu
def test_many_small_problems_and_long_rows() -> None:
    check("gpu", inputs(batch=65_600, heads=1, n=16, m=16, geometries=65_600, channels=2))
    check("gpu", inputs(n=1025, m=4097, weights=1, channels=64, rate=1e3))
    x = inputs(n=64, m=65_537, heads=1, batch=1, channels=16, weights=1)
    check("gpu", x)


@pytest.mark.gpu
@needs_gpu
def test_more_than_2_31_elements() -> None:
    """A value of 2^31 + elements behind a stride; its last rows carry all the weight."""
    m, channels = 2**20 + 3, 4
    whole = torch.zeros(m, 2080, dtype=torch.bfloat16, device="cuda")
    value = whole[None, None, :, -channels:]
    value[..., -1, :] = torch.arange(channels, device="cuda", dtype=torch.bfloat16)
    weights = torch.zeros(1, m, device="cuda")
    weights[:, -1] = 1.0
    points = torch.rand(1, m, 1, device="cuda")
    out, *_ = OPS.position_attention_forward(
        points[:, :8], points, value, torch.ones(1, device="cuda"), weights, None, None
    )
    assert torch.equal(out[0, 0].float().cpu(), torch.arange(4.0).expand(8, 4))


@pytest.mark.gpu
@needs_gpu
def test_the_library_serves_cuda_tensors() -> None:
    from continuum_ops.backends import cuda_library

    assert cuda_library() == (True, "")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("continuum_ops::position_attention_forward", "CUDA")


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    shim()
    x = inputs(weights=1)
    forward = OPS.position_attention_cuda_forward
    with pytest.raises(RuntimeError, match="in the accumulation dtype"):
        forward(*x._replace(rate=x.rate.double()), False)
    with pytest.raises(RuntimeError, match="do not fit"):
        forward(*x._replace(weights=x.weights[:, 1:]), False)
    with pytest.raises(RuntimeError, match="period: d numbers"):
        forward(*x._replace(period=[1.0]), False)


@pytest.mark.slow
def test_under_address_sanitizer() -> None:
    """The same kernels in a process with AddressSanitizer: sizes that are no multiple of anything."""
    code = """
import torch
from position_cuda import check, inputs
check("shim", inputs(n=67, m=35, channels=9, weights=1, radius=1, heads=1))
check("shim", inputs(dtype=torch.bfloat16, n=5, m=67, channels=8, d=4, geometries=2, period=[0.5] * 4))
print("clean")
"""
    compiler = build_script().compiler()
    libraries = [
        subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(os.path.isabs(name) for name in libraries):
        pytest.skip("the compiler has no AddressSanitizer runtime")
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "LD_PRELOAD": os.pathsep.join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
            "CONTINUUM_OPS_SHIM_FLAGS": "-fsanitize=address",
            "CONTINUUM_OPS_NO_EXT": "1",
        },
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0 and process.stdout == "clean\n", process.stdout + process.stderr


def test_oracle_agrees_with_the_reference() -> None:
    from continuum_ops import reference

    x = inputs(dtype=torch.float64, geometries=2, weights=2, radius=2, period=[1.0, INF])
    true, _ = exact(x, *grads_for(x))
    out, lse = reference.position_attention(*x[:5], radius=x.radius, period=x.period, return_lse=True)
    torch.testing.assert_close(true["out"], out)
    torch.testing.assert_close(true["lse"], lse)
