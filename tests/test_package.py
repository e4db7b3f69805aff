"""The names of the package."""

from __future__ import annotations

import continuum_ops as co


def test_dir_lists_what_is_public_and_it_is_there() -> None:
    names = dir(co)
    assert {"Grid", "continuum_attention", "nn", "models", "data", "quadrature"} <= set(names)
    assert all(hasattr(co, name) for name in names)
    assert not [name for name in names if name.startswith("_") and name != "__version__"]
