"""A minute of ci/fuzz.py on the installed extension; under sanitizers it is part of ``make asan``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import continuum_ops as co

FUZZ = Path(__file__).resolve().parent.parent / "ci" / "fuzz.py"


@pytest.mark.slow
@pytest.mark.skipif(not FUZZ.exists(), reason="ci/ is not in the sdist")
@pytest.mark.skipif(not co.backends()["cpu"].startswith("C++"), reason="the extension is not built")
def test_random_calls_of_the_entry_points(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(FUZZ), "--seconds", "60", "--threads", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(co.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    cases = re.match(r"(\d+) cases, 2 threads, no finding", run.stdout)
    assert cases is not None and int(cases[1]) >= 50, run.stdout
