"""Builds continuum_ops._C: the CPU kernels against torch's stable ABI, the Python module with pybind11, by ninja.

torch is looked for, not imported: only its headers and libtorch_cpu.so are needed, so one build serves torch 2.11 and later.

Environment: CONTINUUM_OPS_NO_EXT=1     install without the extension (chunked PyTorch path)
             CONTINUUM_OPS_SANITIZE=1   AddressSanitizer and UndefinedBehaviorSanitizer
             CONTINUUM_OPS_EMULATED=1   also the kernels "emulated512": AVX-512's tiles in portable code (tests on other machines)
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
ON = ("1", "true", "yes")
NO_EXT = os.environ.get("CONTINUUM_OPS_NO_EXT", "").lower() in ON
SANITIZE = os.environ.get("CONTINUUM_OPS_SANITIZE", "").lower() in ON
EMULATED = os.environ.get("CONTINUUM_OPS_EMULATED", "").lower() in ON
TORCH_TARGET = "0x020b000000000000"  # 2.11: hides anything newer of the stable ABI

# Each instruction set is one compilation of the kernel sources, with its own flags and its own namespace.
X86 = platform.machine().lower() in ("x86_64", "amd64")
ISAS = {"generic": []}
if X86:
    ISAS["avx2"] = ["-mavx2", "-mfma"]
    ISAS["avx512"] = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
if EMULATED:
    ISAS["emulated512"] = ["-mavx2", "-mfma"] if X86 else []
KERNELS = ["continuum_attention_kernel.cpp"]
SOURCES = ["continuum_attention.cpp", "cpu_isa.cpp", "module.cpp"]


def torch_dir():
    """The torch of the interpreter that installs: pip's build isolation hides it from import, not from sysconfig."""
    spec = importlib.util.find_spec("torch")
    places = [Path(spec.origin).parent] if spec and spec.origin else []
    places += [Path(sysconfig.get_path(p)) / "torch" for p in ("purelib", "platlib")]
    for place in places:
        if (place / "include/torch/csrc/stable/library.h").is_file():
            return place
    raise SystemExit(
        "continuum_ops: no torch >= 2.11 was found in "
        + ", ".join(str(p) for p in places)
        + ".\nInstall torch first and run `pip install --no-build-isolation .`, "
        "or set CONTINUUM_OPS_NO_EXT=1 to install without compiled kernels."
    )


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
        raise SystemExit("continuum_ops: ninja was not found; `pip install ninja`, or set CONTINUUM_OPS_NO_EXT=1.")
    return found


class NinjaBuild(build_ext):
    """Writes build.ninja for the one extension and runs it."""

    def build_extension(self, ext):
        torch = torch_dir()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve() / "ninja"
        build.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        cxx = os.environ.get("CXX", "c++")
        if shutil.which(cxx.split()[0]) is None:
            raise SystemExit(f"continuum_ops: no C++ compiler ({cxx}); install one, or set CONTINUUM_OPS_NO_EXT=1.")

        includes = [ROOT / "csrc", pybind11_include(torch), torch / "include", Path(sysconfig.get_path("include"))]
        flags = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-Wno-uninitialized"]
        flags += ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"] if SANITIZE else ["-O3", "-DNDEBUG"]
        link = ["-shared", f"-L{torch / 'lib'}", "-ltorch_cpu"]
        if SANITIZE:
            link.append("-fsanitize=address,undefined")
        torch_flags = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", *(f"-isystem {q(i)}" for i in includes[1:])]
        if EMULATED:
            torch_flags.append("-DCO_WITH_EMULATED512")

        lines = [
            f"cxx = {cxx}",
            f"flags = {' '.join(flags)} -I{q(includes[0])}",
            "rule compile",
            "  command = $cxx $flags $extra -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            f"  command = $cxx $in -o $out {' '.join(link)}",
        ]
        objects = []

        def compile_(source, obj, extra):
            lines.extend([f"build {obj}: compile {q(ROOT / 'csrc' / source)}", f"  extra = {' '.join(extra)}"])
            objects.append(obj)

        for isa, isa_flags in ISAS.items():
            for source in KERNELS:  # -fno-math-errno: sqrt and log2 need no errno; every other rule of arithmetic is kept
                compile_(source, f"{Path(source).stem}_{isa}.o", [f"-DCO_ISA_{isa}", "-fno-math-errno", *isa_flags])
        for source in SOURCES:
            compile_(source, f"{Path(source).stem}.o", torch_flags)
        lines.append(f"build {q(target)}: link {' '.join(objects)}")
        (build / "build.ninja").write_text("\n".join(lines) + "\n")
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        subprocess.run([ninja(), "-C", str(build), *jobs], check=True, stdout=sys.stderr)


def q(path):
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


extensions = []
if not NO_EXT:
    torch_dir()  # a missing torch is an error now, not a package without kernels later
    extensions = [Extension("continuum_ops._C", [f"csrc/{s}" for s in (*KERNELS, *SOURCES)])]

setup(
    packages=[
        "continuum_ops",
        *(f"continuum_ops.{p}" for p in "data demo kernels models nn ops reference training".split()),
    ],
    package_dir={"continuum_ops.kernels": "kernels"},
    package_data={"continuum_ops": ["py.typed"]},
    ext_modules=extensions,
    cmdclass={"build_ext": NinjaBuild},
)
