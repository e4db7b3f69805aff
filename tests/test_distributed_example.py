"""examples/train_tno_sharded.py under torchrun, against the same training in one process."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples/train_tno_sharded.py"
SMALL = ["--points", "150", "--samples", "8", "--batch", "4", "--d-model", "16"]


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
    spec = importlib.util.spec_from_file_location("train_tno_sharded", SCRIPT)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    checkpoint = [*SMALL, "--checkpoint", str(tmp_path / "run.pt")]
    sharded = losses_of_torchrun(["--steps", "10", *checkpoint], 2)
    resumed = example.main(["--steps", "12", *checkpoint])
    single = example.main(["--steps", "12", *SMALL])
    assert (len(sharded), len(resumed), len(single)) == (10, 2, 12)
    assert single[-1] < single[0]
    np.testing.assert_allclose([*sharded, *resumed], single, rtol=0, atol=1e-5)
