"""Builds continuum_ops._C: CPU kernels against torch's stable ABI, the Python module with pybind11, by ninja;
and continuum_ops/_C_cuda.so: CUDA kernels (nvcc), a library that torch loads.

torch is looked for, not imported: only its headers and libtorch_cpu.so are needed, so one build serves torch
2.11 and later. Objects stay in build/ninja-*, so that a repeated build compiles what changed.

Without a C++ compiler the package is built without the extension and a warning is printed. A missing torch,
ninja or Python.h, or a compiler that fails, is an error.

The CUDA kernels are built where torch is a CUDA build and nvcc is found; a CUDA torch without nvcc gets a
warning, a CPU torch nothing. They need nvcc but not a CUDA torch: with CONTINUUM_OPS_CUDA=1 they are built
whatever torch is there, and a missing nvcc is an error.

Environment: CXX, MAX_JOBS              compiler (default c++), parallel compilations
             CONTINUUM_OPS_NO_EXT=1     install without the extensions (chunked PyTorch path)
             CONTINUUM_OPS_CUDA=0 | 1   without the CUDA kernels, or with them in any case
             CUDA_HOME                  the CUDA toolkit (default: /usr/local/cuda, or nvcc's own)
             TORCH_CUDA_ARCH_LIST       architectures, as torch reads it (default "8.0;9.0;10.0+PTX")
             CONTINUUM_OPS_SANITIZE=1 | thread   AddressSanitizer and UndefinedBehaviorSanitizer, or
                                        ThreadSanitizer (GCC)
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
SANITIZE = os.environ.get("CONTINUUM_OPS_SANITIZE", "").lower()
SANITIZE = {"thread": "thread", **dict.fromkeys(ON, "address,undefined")}.get(SANITIZE, "")
CUDA = os.environ.get("CONTINUUM_OPS_CUDA", "auto").lower()
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
KERNELS = [
    "axis_product_kernel.cpp",
    "continuum_attention_kernel.cpp",
    "patch_attention_kernel.cpp",
    "patch_dft_kernel.cpp",
    "position_attention_kernel.cpp",
    "position_transform_kernel.cpp",
    "galerkin_attention_kernel.cpp",
]
SOURCES = [
    "axis_product.cpp",
    "continuum_attention.cpp",
    "patch_attention.cpp",
    "patch_dft.cpp",
    "position_attention.cpp",
    "position_transform.cpp",
    "galerkin_attention.cpp",
    "cpu_isa.cpp",
    "module.cpp",
]

CUDA_SOURCES = [
    *("position_attention.cu", "position_attention_backward.cu"),
    *("patch_attention.cu", "patch_attention_backward.cu"),
    *("patch_attention_products.cu", "patch_attention_mix.cu"),
]
CUDA_BINDINGS = ["position_attention_cuda.cpp", "patch_attention_cuda.cpp"]
CUDA_ARCHITECTURES = "8.0;9.0;10.0+PTX"

WARNINGS = "-Wall -Wno-psabi -Wno-uninitialized"
COMMON = f"-std=c++17 -fPIC -fvisibility=hidden {WARNINGS}"
OPTIMISED = "-O3 -DNDEBUG"
SANITIZER = f"-fsanitize={SANITIZE}"
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


class NinjaFile:
    """The text of build.ninja: compilations of C++, then one link of all objects."""

    def __init__(self, torch, link_flags=()):
        link = ["-shared", f"-L{shlex.quote(str(torch / 'lib'))}", "-ltorch_cpu", *link_flags]
        flags = f"{COMMON} {SANITIZED if SANITIZE else OPTIMISED} -I{shlex.quote(str(ROOT / 'csrc'))}"
        self.objects = []
        self.lines = [
            f"cxx = {dollars(shlex.join(compiler()))}",
            f"flags = {dollars(flags)}",
            "rule compile",
            "  command = $cxx $flags $extra -MD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            f"  command = $cxx $in -o $out {dollars(' '.join(link))}",
        ]

    def add(self, source, obj, extra, rule="compile"):
        self.lines.append(f"build {obj}: {rule} {ninja_path(ROOT / 'csrc' / source)}")
        self.lines.append(f"  extra = {dollars(extra)}")
        self.objects.append(obj)

    def text(self, target):
        link = f"build {ninja_path(target)}: link {' '.join(self.objects)}"
        return "\n".join([*self.lines, link]) + "\n"


def torch_flags(includes):
    isystem = (f"-isystem {shlex.quote(str(i))}" for i in includes)
    return " ".join([f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", *isystem])


def ninja_file(target, torch):
    """The CPU kernels once per instruction set, the other sources once."""
    file = NinjaFile(torch, [SANITIZER] if SANITIZE else [])
    includes = [pybind11_include(torch), torch / "include", python_include()]
    for isa, isa_flags in ISAS.items():
        for source in KERNELS:
            # -fno-math-errno: sqrt and log2 need no errno; every other rule of arithmetic is kept.
            file.add(source, f"{Path(source).stem}_{isa}.o", f"-DCO_ISA_{isa} -fno-math-errno {isa_flags}")
    for source in SOURCES:
        file.add(source, f"{Path(source).stem}.o", torch_flags(includes))
    return file.text(target)


def cuda_home():
    """The CUDA toolkit, or None: a folder with nvcc, the runtime's headers and its static library."""
    found = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places += [str(Path(found).resolve().parent.parent)] if found else []
    for place in map(Path, filter(None, places)):
        if (place / "bin/nvcc").is_file() and (place / "include/cuda_runtime.h").is_file():
            return place
    return None


def architectures():
    """[("90", False), ("100", True)]: GPU architectures, and whether PTX is kept for later ones."""
    listed = (os.environ.get("TORCH_CUDA_ARCH_LIST") or CUDA_ARCHITECTURES).replace(";", " ").split()
    found = [re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch) for arch in listed]
    if not all(found):
        fail(f'TORCH_CUDA_ARCH_LIST must be like "{CUDA_ARCHITECTURES}", got {" ".join(listed)!r}')
    return [(m[1] + m[2] + m[3], m[4] is not None) for m in found]


def cuda_ninja_file(target, torch):
    """nvcc compiles the kernels, without torch; the C++ compiler compiles torch's side, without CUDA."""
    home = cuda_home()
    libraries = [home / "lib64", home / "lib", home / "targets" / f"{platform.machine()}-linux" / "lib"]
    link = [f"-L{shlex.quote(str(path))}" for path in libraries]
    # torch brings a CUDA runtime of its own; this one is hidden, and they share the device's primary context.
    file = NinjaFile(torch, [*link, "-Wl,--exclude-libs,ALL", "-lcudart_static", "-ldl", "-lrt", "-lpthread"])
    codes = []
    for arch, ptx in architectures():
        codes.append(
            f"-gencode=arch=compute_{arch},code=" + (f"[sm_{arch},compute_{arch}]" if ptx else f"sm_{arch}")
        )
    jobs = min(len(codes), int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))
    file.lines += [
        f"nvcc = {dollars(shlex.quote(str(home / 'bin' / 'nvcc')))}",
        "rule cuda",
        "  command = $nvcc $extra -MD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat $out.log; exit 1)",
        "  depfile = $out.d",
        "  deps = gcc",
    ]
    # The log holds registers, spills and shared memory of every kernel.
    flags = ["-std=c++17", "-O3", f"--threads={jobs}", "-Xptxas=-v", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    for source in CUDA_SOURCES:
        file.add(source, f"{Path(source).stem}.cu.o", shlex.join([*flags, *codes]), rule="cuda")
    for source in CUDA_BINDINGS:
        file.add(source, f"{Path(source).stem}.o", torch_flags([torch / "include"]))
    return file.text(target)


class NinjaBuild(build_ext):
    """Writes build.ninja for each extension and runs it."""

    def get_ext_filename(self, name):
        # Not a Python module: torch.ops.load_library takes it, under any Python.
        if name.endswith("_C_cuda"):
            return f"{Path(*name.split('.'))}.so"
        return super().get_ext_filename(name)

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        kind = f"-{SANITIZE.partition(',')[0]}" if SANITIZE else ""
        cuda = ext.name.endswith("_C_cuda")
        tag = "cuda" if cuda else sys.implementation.cache_tag
        build = ROOT / "build" / f"ninja-{sysconfig.get_platform()}-{tag}{kind}"
        build.mkdir(parents=True, exist_ok=True)
        text = (cuda_ninja_file if cuda else ninja_file)(target, torch_dir())
        (build / "build.ninja").write_text(text)
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        if subprocess.run([ninja(), "-C", str(build), *jobs], stdout=sys.stderr).returncode != 0:
            fail("the extension did not compile; see above, or set CONTINUUM_OPS_NO_EXT=1.")


class DistInfo(dist_info):
    """pip asks for the metadata first: report a missing torch before it downloads the dependencies."""

    def run(self):
        if self.distribution.has_ext_modules():
            torch_dir()
        super().run()


def cuda_wanted():
    if CUDA not in ("auto", "0", "1"):
        fail(f"CONTINUUM_OPS_CUDA must be 0 or 1, got {CUDA}")
    if CUDA == "0" or SANITIZE:
        return False
    if CUDA == "1":
        if cuda_home() is None:
            fail("CONTINUUM_OPS_CUDA=1, but no CUDA toolkit (nvcc and its headers) was found; set CUDA_HOME.")
        return True
    version = (torch_dir() / "version.py").read_text()
    if not re.search(r"^cuda\b.*= '", version, re.MULTILINE):
        return False
    if cuda_home() is None:
        print(
            f"{'*' * 80}\ncontinuum_ops: WARNING: torch is a CUDA build, but no CUDA toolkit (nvcc and"
            "\nits headers) was found. The package is built WITHOUT its CUDA C++ kernels; others serve its"
            f"\ntensors. Set CUDA_HOME and install again, or CONTINUUM_OPS_CUDA=0 to do without.\n{'*' * 80}",
            file=sys.stderr,
        )
        return False
    return True


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
    found = [Extension("continuum_ops._C", [f"csrc/{source}" for source in (*KERNELS, *SOURCES)])]
    if cuda_wanted():
        sources = [f"csrc/{source}" for source in (*CUDA_SOURCES, *CUDA_BINDINGS)]
        found.append(Extension("continuum_ops._C_cuda", sources))
    return found


if __name__ == "__main__":
    setup(
        packages=[
            "continuum_ops",
            "continuum_ops.data",
            "continuum_ops.demo",
            "continuum_ops.distributed",
            "continuum_ops.experiments",
            "continuum_ops.experiments.papers",
            "continuum_ops.experiments.tables",
            "continuum_ops.kernels",
            "continuum_ops.models",
            "continuum_ops.models.convert",
            "continuum_ops.nn",
            "continuum_ops.ops",
            "continuum_ops.reference",
            "continuum_ops.training",
        ],
        package_dir={"continuum_ops.kernels": "kernels"},
        package_data={"continuum_ops": ["py.typed"]},
        ext_modules=extensions(),
        cmdclass={"build_ext": NinjaBuild, "dist_info": DistInfo},
    )
