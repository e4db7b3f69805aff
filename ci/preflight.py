"""The rehearsal of a GPU run where there is no GPU: torch for CUDA, the CUDA extension, the kernels compiled.

``make preflight`` runs it in a venv with torch 2.11.0. It checks that the CUDA library was built and loads,
that every operator of the list has a CUDA kernel, that the benchmark's modules import, and runs the tests
of the Triton kernels that need no GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import continuum_ops

ROOT = Path(__file__).resolve().parent.parent
# Operators that a CUDA build serves by a kernel of its own.
CUDA_OPERATORS = (
    "continuum_attention_forward",
    "continuum_attention_backward",
    "position_attention_forward",
    "position_attention_backward",
)
TRITON_TESTS = "tests/test_triton_*.py"  # ahead of time for each architecture, and under the interpreter


def check_torch() -> None:
    version = torch.__version__.split("+")[0]
    if version != "2.11.0" or torch.version.cuda is None:
        raise SystemExit(f"torch 2.11.0 for CUDA is needed, found {torch.__version__}")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}")


def check_operators() -> None:
    """Registered for the key CUDA: the library is loaded and its schemas agree; that needs no GPU."""
    for name, said in continuum_ops.backends().items():
        print(f"{name}: {said}")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    missing = [name for name in CUDA_OPERATORS if not has(f"continuum_ops::{name}", "CUDA")]
    if missing:
        raise SystemExit(f"no CUDA kernel is registered for {', '.join(missing)}")
    print(f"registered for CUDA: {', '.join(CUDA_OPERATORS)}")


def run(*command: str) -> None:
    print("$", " ".join(command), flush=True)
    done = subprocess.run([sys.executable, *command], cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}")


def main() -> None:
    check_torch()
    check_operators()
    run("bench/gpu_check.py", "--plan")
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(TRITON_TESTS))
    if not files:
        raise SystemExit(f"no tests match {TRITON_TESTS}")
    run("-m", "pytest", "-q", *files)
    print("preflight passed")


if __name__ == "__main__":
    main()
