"""examples/train_tno_sharded.py under torchrun, against the same training in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--points", "150", "--samples", "8", "--batch", "4", "--d-model", "16"]


def losses(arguments: list[str], ranks: int | None = None) -> list[float]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *launch, str(ROOT / "examples/train_tno_sharded.py"), *SMALL, *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"^step \d+ loss ([\d.]+)$", done.stdout, re.MULTILINE)]


def test_losses_equal_those_of_one_process(tmp_path):
    """Twelve steps on two ranks, the last two of them in one process from the checkpoint."""
    checkpoint = ["--checkpoint", str(tmp_path / "run.pt")]
    sharded = losses(["--steps", "10", *checkpoint], ranks=2)
    resumed = losses(["--steps", "12", *checkpoint])
    single = losses(["--steps", "12"])
    assert (len(sharded), len(resumed), len(single)) == (10, 2, 12)
    assert single[-1] < single[0]
    np.testing.assert_allclose([*sharded, *resumed], single, rtol=0, atol=1e-5)
