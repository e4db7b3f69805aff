"""A Triton driver without a GPU: launches on CPU tensors are specialised, compiled for the target and
checked against
its shared memory, but not run; outputs are junk. Seen on triton 3.6.0. Not under TRITON_INTERPRET."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}  # opt-in bytes per block
_device_ids = itertools.count(1000)  # Triton caches kernels and limits by device: a new one each time


@dataclass
class Launch:
    name: str
    grid: tuple[int, int, int]
    shared: int


@dataclass
class Compiled:
    name: str
    spill_bytes: int
    registers: int


class Log:
    def __init__(self):
        self.launches: list[Launch] = []
        self.compiled: list[Compiled] = []
        self.cubins: list[tuple[str, bytes]] = []


def loops(cubin):
    """The instructions of each innermost loop that computes exponentials."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    code = [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", text)]
    back = [(int(to[1], 16), at) for at, line in code if (to := re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", line))]
    back = [(first, last) for first, last in back if first <= last]
    inner = [x for x in back if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in back)]
    bodies = [[line for at, line in code if first <= at <= last] for first, last in inner]
    return [body for body in bodies if any("MUFU.EX2" in line for line in body)]


class _Utils:
    def __init__(self, capability, log):
        self.capability, self.log = capability, log

    def get_device_properties(self, device):
        shared = SHARED_MEMORY[self.capability]
        names = ("sm_clock_rate", "mem_clock_rate", "mem_bus_width")
        fixed = {"max_num_regs": 65536, "multiprocessor_count": 108, "warpSize": 32}
        return {"max_shared_mem": shared, **fixed, **dict.fromkeys(names, 1)}

    def load_binary(self, name, kernel, shared, device):
        self.log.cubins.append((name, kernel))
        return (1, 1, 0, 0, 1024)  # module, function, registers, spills, most threads

    def unload_module(self, module):
        pass


class _Driver:
    def __init__(self, capability, log):
        device = next(_device_ids)
        self.capability, self.utils = capability, _Utils(capability, log)
        self.get_current_device = lambda: device
        self.get_current_stream = lambda device: 0
        self.set_current_device = lambda device: None
        self.get_device_capability = lambda device: divmod(capability, 10)

        class Launcher:
            def __init__(self, source, metadata):
                self.metadata = metadata

            def __call__(self, x, y, z, *args, **options):
                log.launches.append(Launch(self.metadata.name, (x, y, z), self.metadata.shared))

        self.launcher_cls = Launcher

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    @staticmethod
    def is_active():
        return True

    def map_python_to_cpp_type(self, kind):
        return kind


@contextlib.contextmanager
def dryrun(capability):
    log, output, knobs = Log(), io.StringIO(), triton.knobs
    before = (knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile, driver._active)
    # A kernel from the cache on disk would print no log of ptxas.
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    driver.set_active(_Driver(capability, log))
    try:
        with contextlib.redirect_stdout(output):
            yield log
    finally:
        knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile, driver._active = before
        pattern = r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
        for name, spill, registers in re.findall(pattern, output.getvalue(), re.S):
            log.compiled.append(Compiled(name, int(spill), int(registers)))
