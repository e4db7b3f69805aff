"""The Triton kernels' numbers without a GPU: the tests of CUDA tensors below under Triton's interpreter.

The interpreter has to be chosen before triton is imported, so it runs in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from triton_support import ROOT

pytest.importorskip("triton", reason="triton is not installed")

FILES = (
    "test_continuum_attention_cuda.py",
    "test_continuum_attention_cuda_edge.py",
    "test_continuum_attention_cuda_split.py",
    "test_galerkin_attention_cuda.py",
)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_kernels_under_the_interpreter(file):
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "CONTINUUM_OPS_NO_EXT": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(
        [*command, str(ROOT / "tests" / file)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None and int(passed[1]) >= 40, run.stdout[-2000:]
