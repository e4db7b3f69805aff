"""Compile the CUDA kernels for every architecture, with nvcc and any torch, and hold what ptxas reports.

``python ci/check_cuda.py``: no kernel spills a register; the library loads and registers its operators.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = {"sm_80", "sm_90", "sm_100"}
LOAD = """
import torch, continuum_ops
torch.ops.load_library("continuum_ops/_C_cuda.so")
for name in ("position_attention", "patch_attention"):
  for name in (f"{name}_cuda_forward", f"{name}_cuda_backward"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"continuum_ops::{name}", "CUDA"), name
print("continuum_ops/_C_cuda.so loads with torch", torch.__version__)
"""


def kernels(log: str) -> list[tuple[str, str, int, int, int]]:
    """(kernel, architecture, registers, bytes spilled, static shared memory) out of the log of ptxas -v."""
    found = []
    for part in re.split(r"(?=ptxas info *: Compiling entry function)", log)[1:]:
        name = re.search(r"'(?:_ZN13continuum_ops4cuda)?\d*(\w+?)I(\w*)' for '(sm_\d+)'", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        assert spills is not None and used is not None, part
        shared = re.search(r"(\d+) bytes smem", part)
        arch = re.search(r"for '(sm_\d+)'", part)
        assert arch is not None, part
        kernel = name[1] if name else part.split("'")[1]
        spilled = int(spills[1]) + int(spills[2])
        found.append((kernel, arch[1], int(used[1]), spilled, int(shared[1]) if shared else 0))
    return found


def main() -> None:
    os.chdir(ROOT)
    environment = {**os.environ, "CONTINUUM_OPS_CUDA": "1"}
    environment.pop("TORCH_CUDA_ARCH_LIST", None)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    logs = sorted((ROOT / "build").glob("ninja-*-cuda/*.log"))
    found = [kernel for log in logs for kernel in kernels(log.read_text())]
    assert {arch for _, arch, *_ in found} == ARCHITECTURES, {arch for _, arch, *_ in found}
    spilled = [kernel for kernel in found if kernel[3]]
    assert not spilled, f"kernels that spill registers: {spilled}"
    most: dict[tuple[str, str], tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
    for name, arch, registers, _, shared in found:
        count, r, s = most[name, arch]
        most[name, arch] = (count + 1, max(r, registers), max(s, shared))
    print(f"{'kernel':20}{'architecture':14}{'versions':>9}{'registers':>11}{'static shared':>15}")
    for (name, arch), (count, registers, shared) in sorted(most.items()):
        print(f"{name:20}{arch:14}{count:9}{registers:11}{shared:15}")
    subprocess.run([sys.executable, "-c", LOAD], check=True)
    print("CUDA check passed: no spills")


if __name__ == "__main__":
    main()
