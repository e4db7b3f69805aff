"""Builds continuum_ops._C: CPU kernels against torch's stable ABI, the Python module with pybind11, by ninja.

torch is looked for, not imported: only its headers and libtorch_cpu.so are needed, so one build serves torch
2.11 and later. Objects stay in build/ninja-*, so that a repeated build compiles what changed.

Without a C++ compiler the package is built without the extension and a warning is printed. A missing torch,
ninja or Python.h, or a compiler that fails, is an error.

Environment: CXX, MAX_JOBS              compiler (default c++), parallel compilations
             CONTINUUM_OPS_NO_EXT=1     install without the extension (chunked PyTorch path)
             CONTINUUM_OPS_SANITIZE=1   AddressSanitizer and UndefinedBehaviorSanitizer (GCC)
"""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

ROOT = Path(__file__).resolve().parent
ON = ("1", "true", "yes")
NO_EXT = os.environ.get("CONTINUUM_OPS_NO_EXT", "").lower() in ON
SANITIZE = os.environ.get("CONTINUUM_OPS_SANITIZE", "").lower() in ON
CXX = os.environ.get("CXX", "c++")
TORCH_MINIMUM = (2, 11)
TORCH_TARGET = "0x020b000000000000"  # 2.11: hides anything newer of the stable ABI

# Each instruction set is one compilation of the kernel sources, with its own flags and its own namespace.
X86 = platform.machine().lower() in ("x86_64", "amd64")
AVX2 = "-mavx2 -mfma"
AVX512 = "-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mprefer-vector-width=512"
ISAS = {"generic": ""}
if X86:
    ISAS |= {"avx2": AVX2, "avx512": AVX512}
KERNELS = ["continuum_attention_kernel.cpp", "position_attention_kernel.cpp"]
SOURCES = ["continuum_attention.cpp", "position_attention.cpp", "cpu_isa.cpp", "module.cpp"]

WARNINGS = "-Wall -Wno-psabi -Wno-uninitialized"
COMMON = f"-std=c++17 -fPIC -fvisibility=hidden {WARNINGS}"
OPTIMISED = "-O3 -DNDEBUG"
SANITIZER = "-fsanitize=address,undefined"
SANITIZED = f"-g -O1 -fno-omit-frame-pointer {SANITIZER} -fno-sanitize-recover=undefined"


def fail(message):
    raise SystemExit(f"continuum_ops: {message}")


def compiler():
    """The command of the C++ compiler, or None if there is none."""
    command = shlex.split(CXX)
    return command if command and shutil.which(command[0]) else None


def torch_dir():
    """The torch of the installing interpreter: pip's isolation hides it from import, not from sysconfig."""
    spec = importlib.util.find_spec("torch")
    places = [Path(spec.origin).parent] if spec and spec.origin else []
    places += [Path(sysconfig.get_path(p)) / "torch" for p in ("purelib", "platlib")]
    places = list(dict.fromkeys(places))
    minimum = ".".join(map(str, TORCH_MINIMUM))
    remedy = (
        "Install torch first and run `pip install --no-build-isolation .`, "
        "or set CONTINUUM_OPS_NO_EXT=1 to install without compiled kernels."
    )
    for place in places:
        if not (place / "version.py").is_file():
            continue
        found = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", (place / "version.py").read_text())
        if found is None or (int(found[2]), int(found[3])) < TORCH_MINIMUM:
            version = "of unknown version" if found is None else found[1]
            fail(f"torch must be {minimum} or later, got torch {version} in {place}.\n{remedy}")
        return place
    fail(f"no torch >= {minimum} was found in {', '.join(map(str, places))}.\n{remedy}")


def python_include():
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        fail(f"Python.h was not found in {include}; install python3-dev, or set CONTINUUM_OPS_NO_EXT=1.")
    return include


def pybind11_include(torch):
    try:
        import pybind11
    except ImportError:
        return torch / "include"  # torch ships pybind11's headers
    return Path(pybind11.get_include())


def ninja():
    try:
        import ninja

        found = Path(ninja.BIN_DIR) / "ninja"
        if found.exists():
            return str(found)
    except ImportError:
        pass
    found = shutil.which("ninja")
    if found is None:
        fail("ninja was not found; `pip install ninja`, or set CONTINUUM_OPS_NO_EXT=1.")
    return found


def dollars(text):
    return text.replace("$", "$$")


def ninja_path(path):
    return dollars(str(path)).replace(" ", "$ ").replace(":", "$:")


def ninja_file(target, torch):
    """The text of build.ninja: the kernels once per instruction set, the other sources once, one link."""
    includes = [pybind11_include(torch), torch / "include", python_include()]
    torch_flags = [
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
        *(f"-isystem {shlex.quote(str(i))}" for i in includes),
    ]
    link = [
        "-shared",
        f"-L{shlex.quote(str(torch / 'lib'))}",
        "-ltorch_cpu",
        *([SANITIZER] if SANITIZE else []),
    ]
    flags = f"{COMMON} {SANITIZED if SANITIZE else OPTIMISED} -I{shlex.quote(str(ROOT / 'csrc'))}"
    lines = [
        f"cxx = {dollars(shlex.join(compiler()))}",
        f"flags = {dollars(flags)}",
        "rule compile",
        "  command = $cxx $flags $extra -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = $cxx $in -o $out {dollars(' '.join(link))}",
    ]
    objects = []

    def add(source, obj, extra):
        lines.append(f"build {obj}: compile {ninja_path(ROOT / 'csrc' / source)}")
        lines.append(f"  extra = {dollars(extra)}")
        objects.append(obj)

    for isa, isa_flags in ISAS.items():
        for source in KERNELS:
            # -fno-math-errno: sqrt and log2 need no errno; every other rule of arithmetic is kept.
            add(source, f"{Path(source).stem}_{isa}.o", f"-DCO_ISA_{isa} -fno-math-errno {isa_flags}")
    for source in SOURCES:
        add(source, f"{Path(source).stem}.o", " ".join(torch_flags))
    lines.append(f"build {ninja_path(target)}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext):
    """Writes build.ninja for the one extension and runs it."""

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        kind = "-sanitized" * SANITIZE
        build = ROOT / "build" / f"ninja-{sysconfig.get_platform()}-{sys.implementation.cache_tag}{kind}"
        build.mkdir(parents=True, exist_ok=True)
        (build / "build.ninja").write_text(ninja_file(target, torch_dir()))
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        if subprocess.run([ninja(), "-C", str(build), *jobs], stdout=sys.stderr).returncode != 0:
            fail("the extension did not compile; see above, or set CONTINUUM_OPS_NO_EXT=1.")


class DistInfo(dist_info):
    """pip asks for the metadata first: report a missing torch before it downloads the dependencies."""

    def run(self):
        if self.distribution.has_ext_modules():
            torch_dir()
        super().run()


def extensions():
    if NO_EXT:
        return []
    if compiler() is None:
        print(
            f"{'*' * 80}\ncontinuum_ops: WARNING: no C++ compiler ({CXX}) was found. The package is built"
            "\nWITHOUT its compiled kernels; the operators will run as chunked PyTorch, many times slower."
            f"\nInstall g++ (or set CXX) and install again.\n{'*' * 80}",
            file=sys.stderr,
        )
        return []
    return [Extension("continuum_ops._C", [f"csrc/{source}" for source in (*KERNELS, *SOURCES)])]


if __name__ == "__main__":
    setup(
        packages=[
            "continuum_ops",
            *(
                f"continuum_ops.{p}"
                for p in ("data", "demo", "models", "nn", "ops", "reference", "training", "kernels")
            ),
        ],
        package_dir={"continuum_ops.kernels": "kernels"},
        package_data={"continuum_ops": ["py.typed"]},
        ext_modules=extensions(),
        cmdclass={"build_ext": NinjaBuild, "dist_info": DistInfo},
    )
