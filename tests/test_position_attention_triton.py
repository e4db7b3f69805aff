"""The Triton kernels of position attention under the interpreter: values, gradients and edge rules.

Triton reads TRITON_INTERPRET when it is imported, so each run has a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

PREPARE = """
import importlib, sys, torch
import triton_support
triton_support.kernels()
kernel = importlib.import_module("continuum_ops.kernels.position_attention")
import position_cuda
from position_cuda import STEEP, check, equidistant, grads_for, inputs, steep

def run(device, x, grad_out, grad_lse, *, seed=0, tf32=False):
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    out, lse, stats = kernel.forward(*x)
    needs = [t is not None for t in x[:5]]
    grads = kernel.backward(grad_out, grad_lse, *x[:5], out, lse, stats, x.radius, x.period, needs)
    return position_cuda._named(x, out, lse, grads)

position_cuda.run = run
"""
INTERPRET = """
import triton_interpreter
triton_interpreter.install()
"""
VALUES = """
check("triton", inputs(value_heads=2, weights=1, radius=1))
check("triton", inputs(dtype=torch.bfloat16, weights=2, channels=8))
check("triton", inputs(dtype=torch.float16, geometries=2, d=1, period=[0.75]))
check("triton", inputs(heads=1, channels=40, m=40), tf32=True)
x = inputs(n=30, m=40, rate=50.0, geometries=2)
far = torch.tensor([1e5, -3e5], dtype=torch.float64)
check("triton", x._replace(query_pos=x.query_pos.double() + far, key_pos=x.key_pos.double() + far))
"""
STEEP = """
for case in STEEP:
    print(case)
    check("triton", steep(case))
x, out, lse = equidistant()
result = run("triton", x, *grads_for(x))
torch.testing.assert_close(result["out"], out)
torch.testing.assert_close(result["lse"].double(), lse, rtol=4e-7, atol=0)
"""
EDGES = """
inf, nan = float("inf"), float("nan")
x = inputs(weights=2, m=40, radius=1)
x.weights[:, 1], x.weights[0, 5], x.radius[0, 3] = 0, 0, 0
clean = check("triton", x)
assert (clean["out"][:, :, 3] == 0).all() and (clean["lse"][:, :, 3] == -inf).all()
assert all(clean[name].isfinite().all() for name in position_cuda.GRADS)
dirty = x._replace(value=x.value.clone(), key_pos=x.key_pos.clone())
dirty.value[:, :, 1], dirty.key_pos[:, 1] = nan, inf
result = run("triton", dirty, *grads_for(x))
for name in ("out", "lse", "value", "query_pos", "rate"):
    assert torch.equal(result[name], clean[name]), name
for name, rows in (("weights", slice(None)), ("rate", slice(None)), ("radius", slice(0, 1))):
    bad = inputs(weights=1, radius=1, m=40)._replace(radius=torch.full((1, 20), 2.0))
    getattr(bad, name).view(-1)[0] = -1.0
    assert run("triton", bad, *grads_for(bad))["out"][:, :1, rows].isnan().all(), name
for sizes in ({"n": 0}, {"m": 0}, {"channels": 0}, {"heads": 0}, {"n": 1, "m": 1}):
    x = inputs(**{"n": 3, "m": 3, **sizes})
    result = run("triton", x, *grads_for(x))
    assert result["out"].shape == (2, x.rate.shape[0], x.query_pos.shape[1], x.value.shape[-1])
    if sizes == {"m": 0}:
        assert (result["out"] == 0).all() and (result["lse"] == -inf).all()
"""


def in_a_process(code: str, **environment: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
            "CONTINUUM_OPS_NO_EXT": "1",
            **environment,
        },
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("cases", [VALUES, STEEP, EDGES], ids=["values", "steep", "edges"])
def test_interpreted(cases: str) -> None:
    in_a_process(INTERPRET + PREPARE + cases, TRITON_INTERPRET="1")
