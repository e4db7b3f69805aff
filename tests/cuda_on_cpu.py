"""Builds the CUDA kernels for the CPU (cuda_shim/cuda_cpu.h: every CUDA thread is a fiber) and loads them."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "tests" / "cuda_shim"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@functools.cache
def build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("continuum_ops_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_shim(target: Path, *flags: str) -> None:
    """Kernels, launchers and binding in one library, which registers them for CPU tensors."""
    setup = build_script()
    toolkit, torch_dir = setup.cuda_home(), setup.torch_dir()
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if toolkit is None or shutil.which(compiler[0]) is None:
        pytest.skip("needs a C++ compiler and the headers of the CUDA toolkit (CUDA_HOME)")
    sources = [ROOT / "csrc" / name for name in (*setup.CUDA_SOURCES, *setup.CUDA_BINDINGS)]
    command = [
        *compiler,
        *["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas"],
        "-DCONTINUUM_OPS_CUDA_ON_CPU",
        f"-DTORCH_TARGET_VERSION={setup.TORCH_TARGET}",
        *flags,
        *(f"-I{folder}" for folder in (SHIM, ROOT / "csrc")),
        *(arg for folder in (toolkit, torch_dir) for arg in ("-isystem", str(folder / "include"))),
        *("-x", "c++", *map(str, sources), str(SHIM / "shim.cpp")),
        *("-o", str(target), f"-L{torch_dir / 'lib'}", "-ltorch_cpu"),
    ]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert not process.stderr, process.stderr  # no warnings


@functools.cache
def shim() -> ctypes.CDLL:
    """The library, loaded: its operators take CPU tensors, and set_seed orders the threads of a block."""
    flags = shlex.split(os.environ.get("CONTINUUM_OPS_SHIM_FLAGS", ""))
    if "libasan" in os.environ.get("LD_PRELOAD", "") and not flags:
        pytest.skip("fibers that are not instrumented; test_under_address_sanitizer has those that are")
    folder = Path(tempfile.mkdtemp(prefix="continuum-ops-shim-"))
    try:
        compile_shim(folder / "shim.so", *flags)
        torch.ops.load_library(folder / "shim.so")
        return ctypes.CDLL(str(folder / "shim.so"))
    finally:
        shutil.rmtree(folder)
