"""The CUDA kernels of patch attention: values, gradients and edge rules.

Each test runs on the CPU, where the shim executes the kernels' own code thread by thread in a random order,
and again on a GPU where there is one (marked `gpu`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from cuda_on_cpu import ROOT, build_script, needs_gpu, shim
from patch_cuda import GRADS, OPS, Inputs, check, exact, grads_for, inputs, run

import continuum_ops.ops._patch_attention_cuda as cuda
from continuum_ops import reference

INF = float("inf")


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 2), (75,)])
def test_any_order_of_threads_gives_the_same_bits(
    counts: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    shim()
    patch = (3, 4) if len(counts) == 2 else (8,)
    x = inputs(counts=counts, patch=patch, batch=1, heads=1, channels=8, weights=1, dtype=dtype)
    result = check("shim", x, seed=seed)
    for name, tensor in run("shim", x, *grads_for(x), seed=seed + 17).items():
        assert torch.equal(tensor, result[name]), name


CASES = {
    "2-D": {},
    "1-D": {"counts": (5,), "patch": (3,)},
    "3-D": {"counts": (2, 1, 3), "patch": (1, 2, 3), "weights": 1},
    "cross": {"key_counts": (3, 1), "weights": 2},
    "weights": {"weights": 1},
    "own weights": {"weights": 2, "channels": 4, "value_channels": 12},
    "bfloat16": {"dtype": torch.bfloat16, "weights": 2, "channels": 16, "patch": (3, 4)},
    "float16": {"dtype": torch.float16, "weights": 1, "channels": 24, "value_channels": 8},
    "float64": {"dtype": torch.float64, "weights": 2, "channels": 6, "value_channels": 2, "scale": 0.1},
    "odd channels": {"channels": 5, "value_channels": 7, "weights": 1},
    "odd bfloat16": {"dtype": torch.bfloat16, "channels": 3, "value_channels": 5, "weights": 1},
    "one channel": {"channels": 1, "value_channels": 1, "weights": 1, "patch": (4, 5)},
    "many channels": {"channels": 136, "value_channels": 256, "weights": 1, "heads": 1, "scale": 0.05},
    "points that straddle tiles": {"channels": 48, "value_channels": 40, "weights": 2, "patch": (3, 3)},
    "large tiles": {"counts": (11, 7), "patch": (2, 1), "weights": 1, "batch": 1},
    "large tiles bfloat16": {"counts": (11, 7), "weights": 1, "batch": 1, "dtype": torch.bfloat16},
    "large tiles float16": {"counts": (90,), "patch": (2,), "batch": 1, "channels": 5, "dtype": torch.half},
    "beyond a large tile": {"counts": (197,), "key_counts": (70,), "patch": (3,), "heads": 1, "batch": 1},
    "chunks": {"counts": (85,), "patch": (2,), "heads": 2, "batch": 1, "channels": 4, "weights": 1},
    "chunks bfloat16": {"counts": (70,), "patch": (1,), "heads": 1, "batch": 1, "dtype": torch.bfloat16},
    "chunks float64": {"counts": (70,), "key_counts": (66,), "patch": (2,), "dtype": torch.float64},
    "chunks of groups": {"counts": (40,), "patch": (1,), "channels": 2, "batch": 3, "weights": 3},
    "negative scale": {"scale": -0.7, "weights": 1},
    "scale 0": {"scale": 0.0, "weights": 1},
    "one patch": {"counts": (1, 1), "patch": (2, 3), "weights": 1},
    "many points": {"counts": (2,), "patch": (300,), "heads": 1, "batch": 1, "weights": 1, "scale": 0.01},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(device: str, case: str) -> None:
    check(device, inputs(**CASES[case]))


def test_probabilities_are_kept_where_they_are_few() -> None:
    shim()
    forward = OPS.patch_attention_cuda_forward
    x = inputs(counts=(6,), patch=(3,), channels=2, weights=1)  # 36 of a head beside 36 of query
    probabilities = forward(*x, False)[2]
    assert probabilities.shape == (2, 2, 6, 6)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 2, 6))
    x = inputs(counts=(7,), patch=(3,), channels=2, weights=1)
    assert forward(*x, False)[2].shape == (0,)
    fake = OPS.patch_attention_forward(*(None if t is None else t.to("meta") for t in x[:4]), *x[4:])
    assert [t.shape for t in fake] == [t.shape for t in forward(*x, False)]


def test_no_scale_is_the_volume_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """What serves CUDA tensors, with the operators of the shim."""
    shim()
    found: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {}
    registry = SimpleNamespace(impl=lambda name, function, _: found.update({name: function}))
    monkeypatch.setattr(cuda, "LIBRARY", registry)
    monkeypatch.setattr(cuda, "cuda_library", lambda: (True, ""))
    cuda.register(lambda *_: (), lambda *_: ())
    x = inputs()
    out, lse, kept = found["patch_attention_forward"](*x[:5], None)
    grad_out, _ = grads_for(x)
    needs = [True, True, True, False]
    backward = found["patch_attention_backward"]
    grads = backward(grad_out, None, *x[:4], lse, kept, x.patch_size, None, needs)[:3]
    leaves = [t.double().requires_grad_() for t in x[:3]]
    true = reference.patch_attention(*leaves, x.patch_size)
    right = torch.autograd.grad(true, leaves, grad_out.double())
    torch.testing.assert_close((out, *grads), (true, *right), check_dtype=False)


@pytest.mark.parametrize("counts", [(3, 2), (75,)])
def test_tf32(device: str, counts: tuple[int, ...]) -> None:
    x = inputs(counts=counts, patch=(4,) * len(counts), batch=1, weights=1)
    result = check(device, x, tf32=True)
    accurate = run(device, x, *grads_for(x), tf32=False)
    assert not torch.equal(result["out"], accurate["out"]), "the flag changes nothing"


@pytest.mark.parametrize("patches", [1, 2, 15, 17, 63, 65])
def test_sizes_around_a_tile(device: str, patches: int) -> None:
    check(device, inputs(counts=(patches,), key_counts=(3,), patch=(3,), heads=1, channels=4, batch=1))
    check(device, inputs(counts=(3,), key_counts=(patches,), patch=(3,), heads=1, batch=1, weights=1))


@pytest.mark.parametrize("channels", [1, 2, 3, 15, 16, 17, 31, 33, 127, 129])
def test_channels_around_a_step(device: str, channels: int) -> None:
    check(device, inputs(heads=1, batch=1, channels=channels, value_channels=9, weights=1, scale=0.1))
    check(device, inputs(heads=1, batch=1, channels=4, value_channels=channels, dtype=torch.bfloat16))


@pytest.mark.parametrize("zero", ["batch", "heads", "counts", "key_counts", "channels", "value_channels"])
def test_nothing_to_attend_to(device: str, zero: str) -> None:
    sizes = {
        "batch": 2,
        "heads": 2,
        "counts": (2, 3),
        "key_counts": (2, 2),
        "channels": 2,
        "value_channels": 2,
    }
    sizes[zero] = (0, 2) if zero.endswith("counts") else 0
    x = inputs(**sizes, weights=1)
    result = run(device, x, *grads_for(x))
    assert result["out"].shape == (*x.query.shape[:-1], x.value.shape[-1])
    if zero == "key_counts":
        assert (result["out"] == 0).all() and (result["lse"] == -INF).all()
    for name in GRADS:
        assert result[name].shape == getattr(x, name).shape
        if zero not in ("channels", "value_channels"):
            assert (result[name] == 0).all(), name
    if zero in ("channels", "value_channels"):
        check(device, x)


def test_points_of_weight_zero_are_not_looked_at(device: str) -> None:
    x = inputs(weights=2, counts=(2, 2), patch=(2, 3))
    x.weights[:, 1], x.weights[0, :, 4] = 0, 0
    clean = check(device, x)
    dirty = x._replace(query=x.query.clone())
    dirty.query[:, 1], dirty.query[0, 2, 4] = torch.nan, INF
    # rows 1 and 3 lie at the same place of their patches, so that no query looks at it
    x.weights[:, 3] = 0
    result = run(device, dirty, *grads_for(x))
    clean = run(device, x, *grads_for(x))
    dirty.key[:, 1], dirty.key[:, 3] = torch.nan, -INF
    for name, tensor in run(device, dirty, *grads_for(x)).items():
        if name != "key":
            torch.testing.assert_close(tensor, result[name], rtol=1e-5, atol=1e-6, msg=name)
    for name in ("out", "lse", "query", "value", "weights"):
        torch.testing.assert_close(result[name], clean[name], rtol=1e-6, atol=1e-6)
    assert (result["weights"][:, 1] == 0).all() and (result["query"][:, 1] == 0).all()
    assert (result["query"][0, :, 4] == 0).all()
    assert result["key"].isfinite().all()


def test_all_weights_zero_give_equal_attention(device: str) -> None:
    x = inputs(weights=1)
    x.weights.zero_()
    result = check(device, x)
    for name in ("query", "key", "weights"):
        assert (result[name] == 0).all(), name
    assert (result["lse"] - torch.tensor(6.0).log()).abs().max() < 1e-6


@pytest.mark.parametrize("value", [-1.0, torch.nan, INF])
def test_bad_weights_become_nan(device: str, value: float) -> None:
    x = inputs(weights=1)
    good = run(device, x, *grads_for(x))
    x.weights[0, 0, 0] = value
    result = run(device, x, *grads_for(x))
    assert result["out"][:, :2, :2].isnan().all() and result["lse"][:, :, 0].isnan().all()
    assert torch.equal(result["out"][:, 2:], good["out"][:, 2:])
    assert torch.equal(result["lse"][:, :, 1:], good["lse"][:, :, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [0, 1])
def test_nan_comes_out(device: str, weights: int, dtype: torch.dtype) -> None:
    x = inputs(weights=weights, dtype=dtype)
    good = run(device, x, *grads_for(x))
    for name in ("query", "key", "value"):
        bad = x._replace(**{name: getattr(x, name).clone()})
        getattr(bad, name)[0, 0, 0, 0, 3] = torch.nan
        out = run(device, bad, *grads_for(x))["out"]
        assert torch.equal(out[1], good["out"][1]) and torch.equal(
            out[0, ..., 1, :], good["out"][0, ..., 1, :]
        )
        mine = out[0, ..., 0, :]
        if name == "query":
            assert mine[:2, :2].isnan().all() and torch.equal(mine[2:], good["out"][0, 2:, :, 0])
        elif name == "key":
            assert mine.isnan().all()
        else:
            assert mine[::2, ::2, 3].isnan().all() and mine[..., 0].isfinite().all()


def test_infinity_stays_infinity(device: str) -> None:
    """Three TF32 products have an infinity and finite remainders: no NaN of infinity times zero."""
    x = inputs(counts=(3,), patch=(4,), heads=1, batch=1)
    x.value[0, 1, 0, 2], x.value[0, 6, 0, 1] = INF, -INF
    out = run(device, x, *grads_for(x))["out"][0, :, 0]
    assert (out[1::4, 2] == INF).all() and (out[2::4, 1] == -INF).all()
    assert out.isinf().sum() == 6 and not out.isnan().any()
    low = inputs(counts=(3,), patch=(4,), heads=1, batch=1)
    low.query[..., 0], low.key[0, 5, 0, 0] = (
        low.query[..., 0].abs() + 0.1,
        -INF,
    )  # no score for the second patch
    result = run(device, low, *grads_for(low))
    value = low.value[:, [0, 1, 2, 3, 8, 9, 10, 11]]
    few = low._replace(key=low.key[:, [0, 1, 2, 3, 8, 9, 10, 11]], value=value)
    torch.testing.assert_close(result["out"], run(device, few, *grads_for(low))["out"])


def test_weights_of_any_size(device: str) -> None:
    """A cell of a fine grid has weight 1e-6, and 1e-6 in float16 has one digit."""
    x = inputs(weights=1, dtype=torch.float16, channels=16, patch=(4, 4))
    same = check(device, x)
    small = x._replace(weights=x.weights * 2.0**-20, scale=x.scale * 2.0**20)
    result = run(device, small, *grads_for(x))
    for name in ("out", "lse", "query", "key", "value"):
        torch.testing.assert_close(result[name], same[name], rtol=1e-3, atol=1e-5, msg=name)
    torch.testing.assert_close(result["weights"] * 2.0**-20, same["weights"], rtol=1e-3, atol=1e-5)


def test_gradients_beyond_the_range_of_float16(device: str) -> None:
    """Gradients of probabilities, sums over a whole patch, leave float16 while those of query do not."""
    x = inputs(dtype=torch.float16, patch=(8, 8), counts=(2, 2), heads=1, batch=1, scale=1e-5)
    grad_out = torch.full_like(x.value, 60.0) * x.value.sign()
    result = check(device, x, grad_out=grad_out)
    assert (exact(x, *grads_for(x))[0]["out"].abs() < 10).all() and result["query"].abs().max() > 1e-2
    tiny = run(device, x._replace(scale=1.0), grad_out * 2.0**-24, None)
    assert (tiny["query"] != 0).any()


@pytest.mark.parametrize("needs", [[i == j for j in range(4)] for i in range(4)])
@pytest.mark.parametrize("counts", [(2, 3), (10, 8)])
def test_gradients_one_by_one(device: str, counts: tuple[int, int], needs: list[bool]) -> None:
    x = inputs(counts=counts, patch=(2, 1), weights=1, batch=1, channels=2)
    everything = run(device, x, *grads_for(x))
    for name, tensor in run(device, x, *grads_for(x), needs=needs).items():
        assert torch.equal(tensor, everything[name]), name


def test_without_the_gradient_of_lse(device: str) -> None:
    x = inputs(weights=1)
    grad_out, grad_lse = grads_for(x)
    none, zero = run(device, x, grad_out, None), run(device, x, grad_out, torch.zeros_like(grad_lse))
    assert all(torch.equal(none[name], zero[name]) for name in none)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides(device: str, dtype: torch.dtype) -> None:
    """Channels first, slices of a wider tensor, an expanded batch, an offset: the same numbers."""
    x = inputs(weights=2, dtype=dtype)
    same, (grad_out, _) = check(device, x), grads_for(x)

    def inside(t: torch.Tensor) -> torch.Tensor:
        """In a buffer of NaN, axes in another order, not aligned."""
        order = [t.dim() - 1, 0, *range(1, t.dim() - 1)]
        shape = [t.shape[i] + 1 for i in order]
        buffer = torch.full(shape, torch.nan, dtype=t.dtype)
        view = buffer[tuple(slice(1, None) for _ in order)].permute([order.index(i) for i in range(t.dim())])
        return view.copy_(t)

    moved = Inputs(*(inside(t) for t in x[:4]), x.patch_size, x.scale)
    result = check(device, moved, grad_out=inside(grad_out))
    for name, tensor in result.items():
        torch.testing.assert_close(tensor, same[name], rtol=1e-5, atol=1e-6)
    # query, key and value of one projection, as layers have them: vectors, but not contiguous
    whole = torch.cat([x.query, x.key, x.value], -1)
    parts = Inputs(*whole.split(8, -1), x.weights, x.patch_size, x.scale)
    for name, tensor in run(device, parts, grad_out, grads_for(x)[1]).items():
        assert torch.equal(tensor, same[name]), name
    one = x._replace(key=x.key[:1, :1].expand_as(x.key), weights=x.weights[:1].expand(2, -1, -1))
    check(device, one, grad_out=torch.ones((), dtype=dtype).expand_as(grad_out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_give_the_same_bits(device: str, dtype: torch.dtype) -> None:
    x = inputs(dtype=dtype, weights=1, counts=(4, 5), patch=(8, 4))
    first = run(device, x, *grads_for(x))
    for _ in range(30 if device == "gpu" else 1):
        again = run(device, x, *grads_for(x))
        assert all(torch.equal(again[name], first[name]) for name in first)


def test_large_scores(device: str) -> None:
    x = inputs(scale=1e4, counts=(4, 4))
    result = check(device, x)
    assert result["out"].isfinite().all() and result["lse"].abs().max() > 1e4


@pytest.mark.gpu
@needs_gpu
def test_many_small_problems_and_long_patches() -> None:
    check("gpu", inputs(batch=65_600, heads=1, counts=(2,), patch=(2,), channels=4, weights=1))
    check("gpu", inputs(counts=(3, 3), patch=(70, 70), channels=16, weights=1, scale=1e-3))
    check(
        "gpu", inputs(counts=(13, 13), patch=(16, 16), channels=16, heads=8, batch=1, weights=1, scale=4e-3)
    )
    check("gpu", inputs(counts=(2100,), patch=(1,), channels=16, heads=1, batch=1, weights=1))  # chunks


@pytest.mark.gpu
@needs_gpu
def test_more_than_2_31_elements() -> None:
    """A value of 2^31 + elements behind a stride; its last patch carries all the weight."""
    n, channels = 2**20 + 4, 8
    whole = torch.zeros(1, n, 1, 2080, dtype=torch.bfloat16, device="cuda")
    value = whole[..., -channels:]
    value[0, n // 2 :, 0] = torch.arange(channels, device="cuda", dtype=torch.bfloat16)
    key = torch.zeros(1, n, 1, 8, dtype=torch.bfloat16, device="cuda")
    key[0, n // 2 :] = 1
    query = torch.ones(1, n, 1, 8, dtype=torch.bfloat16, device="cuda")
    out = OPS.patch_attention_forward(query, key, value, None, [n // 2], 1.0)[0]
    assert torch.equal(out[0, [0, -1], 0].float().cpu(), torch.arange(8.0).expand(2, 8))


@pytest.mark.gpu
@needs_gpu
def test_the_library_serves_cuda_tensors() -> None:
    from continuum_ops.backends import cuda_library

    assert cuda_library() == (True, "")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("continuum_ops::patch_attention_forward", "CUDA")


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    shim()
    x = inputs(weights=1)
    forward = OPS.patch_attention_cuda_forward
    with pytest.raises(RuntimeError, match="in the accumulation dtype"):
        forward(*x._replace(weights=x.weights.double()), False)
    with pytest.raises(RuntimeError, match="must divide the grids"):
        forward(*x._replace(patch_size=[3, 2]), False)
    with pytest.raises(RuntimeError, match="one for each axis"):
        forward(*x._replace(patch_size=[2]), False)
    with pytest.raises(RuntimeError, match="one dtype"):
        forward(*x._replace(key=x.key.double()), False)
    with pytest.raises(RuntimeError, match="do not fit"):
        forward(*x._replace(key=x.key[..., :4]), False)
    with pytest.raises(RuntimeError, match="the grid of query"):
        forward(*x._replace(weights=x.weights[:, :2]), False)


@pytest.mark.slow
def test_under_address_sanitizer() -> None:
    """The same kernels in a process with AddressSanitizer: sizes that are no multiple of anything."""
    code = """
import torch
from patch_cuda import check, inputs
check("shim", inputs(counts=(3, 5), patch=(3, 1), channels=9, value_channels=5, weights=1, heads=1))
check("shim", inputs(counts=(71,), patch=(3,), channels=8, weights=1, heads=1, batch=1, dtype=torch.bfloat16))
check("shim", inputs(counts=(66,), patch=(1,), channels=4, value_channels=12, heads=1, batch=1))
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
    x = inputs(dtype=torch.float64, weights=2, key_counts=(1, 4))
    leaves = [t.requires_grad_() for t in x[:4]]
    grad_out, grad_lse = grads_for(x)
    out, lse = reference.patch_attention(*x[:3], x.patch_size, x.weights, scale=x.scale, return_lse=True)
    grads = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))
    true, _ = exact(Inputs(*(t.detach() for t in x[:4]), *x[4:]), grad_out, grad_lse)
    for name, tensor in zip(("out", "lse", *GRADS), (out, lse, *grads), strict=True):
        torch.testing.assert_close(true[name], tensor)
