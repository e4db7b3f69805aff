"""Running the Triton kernels without a GPU: where they are found, the interpreter on CPU tensors."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def kernels() -> ModuleType:
    """continuum_ops.kernels, from kernels/ where the checkout is not installed."""
    import continuum_ops

    name = "continuum_ops.kernels"
    if importlib.util.find_spec(name) is None:
        spec = importlib.util.spec_from_file_location(
            name, ROOT / "kernels/__init__.py", submodule_search_locations=[str(ROOT / "kernels")]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        continuum_ops.kernels = module  # type: ignore[attr-defined]
    return importlib.import_module("continuum_ops.kernels.continuum_attention")
