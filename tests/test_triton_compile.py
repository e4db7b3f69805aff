"""The Triton kernels compile for the GPUs they are shipped for, within bounds of registers, spills and
memory."""

from __future__ import annotations

import pytest
import torch
from helpers import qkv
from triton_support import INTERPRETED, kernels

pytest.importorskip("triton", reason="triton is not installed")
if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton_dryrun import SHARED_MEMORY, dryrun, loops

# Bytes that a thread may spill. Wide float32 rows do not fit registers whatever the tile.
SPILLS = {16: 0, 64: 0, 128: 256, 256: 1024}


def launch(capability, dtype, width, monkeypatch, *, weights=True, distance=False, dropout=0.0, causal=False):
    """Forward and backward through the real launch code."""
    kernel = kernels()
    monkeypatch.setattr(kernel, "capability", lambda tensor: capability)
    monkeypatch.setattr(kernel, "SPLIT_FROM", 0)
    q, k, v = qkv((2, 2), 300, 300, width, width, dtype)
    w = torch.ones(2, 2, 300) if weights else None
    positions = torch.zeros(1, 1, 300, 2) if distance else None
    rate = torch.ones(1, 2) if distance else None
    seed = torch.tensor([1]) if dropout else None
    tensors = (q, k, v, w, None, positions, positions, rate, None, seed)
    options = (None, 0.25, dropout, causal)
    with dryrun(capability) as log:
        out, lse, stats = kernel.forward(*tensors, *options)
        kernel.backward(out, lse, *tensors, out, stats, *options, weights, distance, distance)
    return log


def assert_within_bounds(log, capability, width):
    assert {c.name for c in log.compiled} >= {"forward_kernel", "over_keys_kernel", "over_queries_kernel"}
    for kernel in log.compiled:
        assert kernel.registers <= 255
        assert kernel.spill_bytes <= SPILLS[width], kernel
    assert all(x.shared <= SHARED_MEMORY[capability] for x in log.launches)
    # Batch and heads are in the first axis of the grid, which alone may pass 65,535.
    assert all(x.grid[1:] == (1, 1) for x in log.launches)


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability, width, dtype",
    [
        (80, 16, torch.float32),
        (80, 64, torch.bfloat16),
        (80, 128, torch.float32),
        (90, 16, torch.bfloat16),
        (90, 64, torch.float32),
        (90, 128, torch.bfloat16),
        (90, 256, torch.float32),
        (100, 16, torch.bfloat16),
        (100, 64, torch.float32),
        (100, 256, torch.bfloat16),
    ],
    ids=str,
)
def test_shipped_configurations(capability, width, dtype, monkeypatch):
    log = launch(capability, dtype, width, monkeypatch)
    assert_within_bounds(log, capability, width)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"distance": True}, {"dropout": 0.5, "causal": True}, {"weights": False}, {"causal": True}],
    ids=["distance", "dropout and causal", "plain", "bounded"],
)
def test_options_compile(options, monkeypatch):
    monkeypatch.setattr(kernels(), "BOUNDED_FROM", 0)
    log = launch(90, torch.float16 if "dropout" in options else torch.bfloat16, 16, monkeypatch, **options)
    assert_within_bounds(log, 90, 16)


@pytest.mark.slow
@pytest.mark.parametrize("capability, width, most", [(90, 16, 14), (90, 32, 15)])
def test_float16_parts_take_few_instructions(capability, width, most, monkeypatch):
    """Per score, in the loop over keys without masks. TF32 products, split in each tile, take 29 and 34."""
    kernel = kernels()
    monkeypatch.setattr(kernel, "capability", lambda tensor: capability)
    monkeypatch.setattr(kernel, "SPLIT_FROM", 0)
    q, k, v = qkv((1,), 300, 300, width, width)
    with dryrun(capability) as log:
        kernel.forward(q, k, v, torch.ones(1, 300), *[None] * 7, 0.25, 0.0, False)
    config = kernel.split_config(width, capability, False)
    scores = config.queries * config.keys / (32 * config.num_warps)
    parts, _ = (cubin for name, cubin in log.cubins if name == "forward_kernel")
    plain, edge = (len(body) / scores for body in loops(parts))
    assert plain <= most and plain < edge, (plain, edge)


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability, dtype, precision, everything",
    [
        (80, torch.float32, "high", False),
        (80, torch.bfloat16, "highest", True),
        (90, torch.float32, "highest", True),
        (90, torch.bfloat16, "highest", True),
        (100, torch.float32, "high", True),
        (100, torch.bfloat16, "highest", False),
    ],
    ids=str,
)
def test_shipped_configurations_of_position_attention(capability, dtype, precision, everything, monkeypatch):
    """everything: weights, radius, period and float64 positions. No kernel spills."""
    kernel = kernels("position_attention")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    positions = torch.zeros(2, 100, 2, dtype=torch.float64 if everything else torch.float32)
    value, rate = torch.zeros(2, 1, 100, 40, dtype=dtype), torch.ones(2)
    given = torch.ones(2, 100) if everything else None
    tensors = (positions, positions, value, rate, given)
    options = (given, [1.0, 0.5] if everything else None)
    with dryrun(capability) as log:
        out, lse, stats = kernel.forward(*tensors, *options)
        needs = [True] * 4 + [everything]
        kernel.backward(out, lse, *tensors, out, lse, stats, *options, needs)
    assert [c.name for c in log.compiled] == ["weighted_sum_kernel"] * 2 + ["score_sums_kernel"] * 2
    assert all(c.registers <= 255 and c.spill_bytes == 0 for c in log.compiled), log.compiled
    assert all(x.shared <= SHARED_MEMORY[capability] and x.grid[1:] == (1, 1) for x in log.launches)


# Those of the fused nn.GalerkinAttention, forward and backward.
GRAM_SPILLS = {16: 0, 64: 0, 128: 64, 256: 1024}


def launch_gram(capability, dtype, width, monkeypatch, *, pos=True, weights=True, norms=True, moments=False):
    """Forward and backward; moments: with the gradients of positions and weights."""
    kernel = kernels("galerkin_attention")
    monkeypatch.setattr(kernel, "capability", lambda tensor: capability)
    rows = torch.zeros(2, 300, 3, width, dtype=dtype).transpose(1, 2)
    tensors = (
        rows,
        rows,
        torch.zeros(1, 300, 2) if pos else None,
        torch.ones(1, 1, 300) if weights else None,
        *[torch.ones(3, width) if norms else None] * 4,
    )
    with dryrun(capability) as log:
        out = kernel.forward(*tensors, 1e-5)
        kernel.backward(out, *tensors, 1e-5, [True, True, moments, moments, *[norms] * 4])
    return log


def assert_gram_within_bounds(log, capability, width):
    assert [c.name for c in log.compiled] == ["gram_kernel", "gram_backward_kernel"]
    assert all(c.registers <= 255 and c.spill_bytes <= GRAM_SPILLS[width] for c in log.compiled), log.compiled
    assert all(x.shared <= SHARED_MEMORY[capability] for x in log.launches)
    # Two chunks of each of six heads, in the first axis of the grid, which alone may pass 65,535.
    assert log.launches[0].grid == (2 * 6 * max(1, width // 128) ** 2, 1, 1)
    assert log.launches[1].grid == (2 * 6, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability, width, dtype",
    [
        (80, 16, torch.float32),
        (80, 64, torch.bfloat16),
        (80, 128, torch.float32),
        (90, 64, torch.float32),
        (90, 256, torch.bfloat16),
        (100, 16, torch.bfloat16),
        (100, 128, torch.float32),
    ],
    ids=str,
)
def test_shipped_configurations_of_galerkin_attention(capability, width, dtype, monkeypatch):
    log = launch_gram(capability, dtype, width, monkeypatch)
    assert_gram_within_bounds(log, capability, width)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"moments": True}, {"pos": False, "weights": False}, {"norms": False}],
    ids=["moments", "plain", "no norms"],
)
def test_options_of_galerkin_attention_compile(options, monkeypatch):
    log = launch_gram(90, torch.float32, 16, monkeypatch, **options)
    assert_gram_within_bounds(log, 90, 16)
