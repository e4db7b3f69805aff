"""examples/: the one for torchrun against the same training in one process, and the model of one's own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples/train_tno_sharded.py"
SMALL = ["--points", "150"]


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def losses_of_torchrun(arguments: list[str], ranks: int) -> list[float]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launch, str(SCRIPT), *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"^step \d+ loss ([\d.]+)$", done.stdout, re.MULTILINE)]


def test_losses_equal_those_of_one_process(tmp_path):
    """Twelve steps on two ranks, the last two of them in one process from the checkpoint."""
    example = loaded(SCRIPT)
    checkpoint = [*SMALL, "--checkpoint", str(tmp_path / "run.pt")]
    sharded = losses_of_torchrun(["--steps", "10", *checkpoint], 2)
    resumed = example.main(["--steps", "12", *checkpoint])
    single = example.main(["--steps", "12", *SMALL])
    assert (len(sharded), len(resumed), len(single)) == (10, 2, 12)
    assert single[-1] < single[0]
    np.testing.assert_allclose([*sharded, *resumed], single, rtol=0, atol=1e-5)


def test_own_model_learns_what_equal_weights_lose():
    """On the uneven mesh of its training and on a finer one."""
    errors = loaded(ROOT / "examples" / "own_model.py").main(steps=150)
    for mesh in ("as trained", "finer"):
        weighted, equal = errors[mesh]
        assert weighted < 0.3 and equal > 2 * weighted, (mesh, errors)


def test_examples_fit_a_screen():
    """What their first comment says and imports left out."""
    for path in (ROOT / "examples").glob("*.py"):
        body = path.read_text().split('"""', 2)[2]
        lines = [x for x in body.splitlines() if x and not x.startswith(("import ", "from "))]
        assert len(lines) <= 60, path.name
