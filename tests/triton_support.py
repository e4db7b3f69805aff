"""The Triton kernels without a GPU: where they are found, and the interpreter in the place of CUDA."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

import continuum_ops

ROOT = Path(__file__).resolve().parent.parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def kernels(op: str = "continuum_attention") -> ModuleType:
    """continuum_ops.kernels.<op>, from kernels/ where the checkout is not installed."""
    name = "continuum_ops.kernels"
    if importlib.util.find_spec(name) is None:
        spec = importlib.util.spec_from_file_location(
            name, ROOT / "kernels/__init__.py", submodule_search_locations=[str(ROOT / "kernels")]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        continuum_ops.kernels = module
    return importlib.import_module(f"continuum_ops.kernels.{op}")


def interpret() -> torch.library.Library:
    """Let CPU tensors take the way of CUDA tensors through the interpreter, as long as the result lives.

    Position attention takes that of a machine whose CUDA library is not built.
    """
    import triton_interpreter

    from continuum_ops.ops import _continuum_attention_cuda as cuda
    from continuum_ops.ops import _galerkin_attention_fused as fused

    assert continuum_ops.backends()["cpu"].startswith("chunked"), "the C++ kernels must not be loaded"
    triton_interpreter.install()
    for op in ("continuum_attention", "galerkin_attention"):
        kernels(op).capability = lambda tensor: 90  # type: ignore[attr-defined]
    library = torch.library.Library("continuum_ops", "IMPL")
    library.impl("galerkin_gram", fused.cuda, "CPU")
    library.impl("galerkin_gram_backward", fused.cuda_backward, "CPU")
    library.impl("continuum_attention_forward", cuda.forward, "CPU")
    library.impl("continuum_attention_backward", cuda.backward, "CPU")
    position = importlib.import_module("continuum_ops.kernels.position_attention")
    library.impl("position_attention_forward", position.forward, "CPU")
    library.impl("position_attention_backward", position.backward, "CPU")
    return library
