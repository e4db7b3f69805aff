"""Which kernels are loaded, which are not, and why."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from pathlib import Path
from types import ModuleType

import torch

# nn.GalerkinAttention on CUDA tensors: norms and k^T W v in one Triton kernel, not layer norms and BLAS.
# Not the default: which is faster has not been measured (bench/gpu_check.py does).
FUSED_GALERKIN = os.environ.get("CONTINUUM_OPS_FUSED_GALERKIN") == "1"
_BUILD = "pip install --no-build-isolation -e . (needs a C++ compiler) builds it"


@functools.cache
def extension() -> tuple[ModuleType | None, str]:
    """The compiled extension, which registers its kernels when imported, or None and the reason."""
    if os.environ.get("CONTINUUM_OPS_NO_EXT") == "1":
        return None, "CONTINUUM_OPS_NO_EXT=1"
    try:
        module = importlib.import_module("continuum_ops._C")
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=functools.partial(_do_without_lost_threads, module))
        return module, ""
    except ModuleNotFoundError as error:
        if error.name != "continuum_ops._C":
            return None, f"the compiled extension does not load: {error}"
        return None, "the compiled extension is not built"
    except ImportError as error:
        return None, f"the compiled extension does not load: {error}"


def _do_without_lost_threads(module: ModuleType) -> None:
    """One thread in a forked child whose parent has used several, as in the workers of a DataLoader.

    They are not there, and whatever torch cuts into parts would wait for them for ever.
    """
    if module.started_threads():
        torch.set_num_threads(1)


@functools.cache
def cuda_library() -> tuple[bool, str]:
    """Whether the compiled CUDA kernels are loaded, which registers them, or why not.

    The library is apart from the extension, so that one that does not load leaves the CPU as it is.
    """
    if os.environ.get("CONTINUUM_OPS_NO_EXT") == "1":
        return False, "CONTINUUM_OPS_NO_EXT=1"
    if torch.version.cuda is None:
        return False, "this build of PyTorch has no CUDA"
    path = Path(__file__).resolve().parent / "_C_cuda.so"
    if not path.is_file():
        return False, "the CUDA library is not built"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return False, f"the CUDA library does not load: {error}"
    return True, ""


@functools.cache
def warn_without_extension() -> None:
    """Say once per process that the CPU operators run without their kernels."""
    _, reason = extension()
    hint = "unset it to use the compiled kernels" if reason.startswith("CONTINUUM") else _BUILD
    warnings.warn(
        f"continuum_ops: the CPU operators run as chunked PyTorch ({reason}; {hint})",
        UserWarning,
        stacklevel=2,
    )


@functools.cache
def triton_kernels() -> tuple[bool, str]:
    """Whether the Triton kernels import, and Triton's version or the reason."""
    try:
        triton = importlib.import_module("triton")
        for op in ("continuum_attention", "position_attention", "galerkin_attention"):
            importlib.import_module(f"continuum_ops.kernels.{op}")
    except ImportError as error:
        return False, f"the Triton kernels do not load: {error}"
    return True, triton.__version__


@functools.cache
def warn_without_triton() -> None:
    """Say once per process that the CUDA operators run without their kernels."""
    warnings.warn(
        f"continuum_ops: the CUDA operators run as chunked PyTorch ({triton_kernels()[1]}; "
        "pip install triton, as PyTorch's CUDA builds do)",
        UserWarning,
        stacklevel=2,
    )


def backends() -> dict[str, str]:
    """What serves each device type, and if it is not a compiled kernel, why.

    Returns ``{"cpu": ..., "cuda": ...}``, e.g. ``{"cpu": "C++ (avx512)", "cuda": "not available: ..."}``.
    """
    module, reason = extension()
    cpu = f"chunked PyTorch: {reason}" if module is None else f"C++ ({module.isa()})"
    if torch.version.cuda is None:
        cuda = "not available: this build of PyTorch has no CUDA"
    elif not torch.cuda.is_available():
        cuda = "not available: no CUDA device"
    elif torch.cuda.get_device_capability() < (8, 0):
        cuda = "chunked PyTorch: the Triton kernels need compute capability 8.0"
    else:
        found, detail = triton_kernels()
        cuda = f"Triton {detail}" if found else f"chunked PyTorch: {detail}"
        loaded, reason = cuda_library()
        cuda += "; position_attention: C++" if loaded else f"; no C++ for position_attention: {reason}"
        if FUSED_GALERKIN and found:
            cuda += "; nn.GalerkinAttention: fused (CONTINUUM_OPS_FUSED_GALERKIN=1)"
    return {"cpu": cpu, "cuda": cuda}
