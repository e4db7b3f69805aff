"""``nox``: the sdist and the wheel, installed and used under each Python that is there.

``TORCH="torch==2.13.0"`` is the torch that is installed first, with pip options if it needs any.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent / "ci"))
from check_packaging import USE

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
TORCH = shlex.split(os.environ.get("TORCH", "torch==2.13.0"))
BUILD = ("setuptools>=77", "wheel", "pybind11>=2.12", "ninja", "build>=1.2")

nox.options.error_on_missing_interpreters = False
nox.options.default_venv_backend = "venv"


@nox.session(python=PYTHONS)
@nox.parametrize("kind", ["sdist", "wheel"])
def install(session: nox.Session, kind: str) -> None:
    """pip install, then one call through the public function against the formula, outside the checkout."""
    session.install(*TORCH, *BUILD)
    out = Path(session.create_tmp())
    for stale in out.iterdir():
        if stale.is_file():
            stale.unlink()
    session.run("python", "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), ".")
    (built,) = (path for path in out.iterdir() if path.suffix in (".whl", ".gz"))
    session.install("--no-build-isolation", str(built))
    session.chdir(out)
    session.run("python", "-c", USE, "compiled")
    session.run("continuum-ops", "--version", success_codes=[0, 2])  # 2: click is an extra
