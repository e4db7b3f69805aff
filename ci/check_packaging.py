"""Build the sdist and the wheels, install each outside the checkout, and use it.

``TORCH="torch==2.13.0" python ci/check_packaging.py`` with an interpreter that has the extras
``[dev]`` and the editable installation of this checkout.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = shlex.split(os.environ.get("TORCH", "torch==2.13.0"))

# One call through the public function against the formula in numpy; argv[1] says what must serve it.
USE = """
import importlib.util, sys, warnings
from pathlib import Path
import numpy as np, torch
import continuum_ops as co
import continuum_ops.kernels

assert importlib.util.find_spec("kernels") is None, "a top-level package `kernels` is installed"
home = Path(co.__file__).resolve().parent
assert (home / "py.typed").is_file()
q, k, v = (torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (5, 7, 7))
w = torch.arange(7.0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    out = [co.continuum_attention(q, k, v, w) for _ in range(2)][0].double().numpy()
q, k, v, w = (x.double().numpy() for x in (q, k, v, w))
p = w * np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(8))
assert np.abs(out - (p / p.sum(-1, keepdims=True)) @ v).max() < 1e-5
told = [str(c.message) for c in caught if str(c.message).startswith("continuum_ops:")]
cpu = co.backends()["cpu"]
if sys.argv[1] == "compiled":
    assert cpu.startswith("C++") and not told, (cpu, told)
else:
    assert cpu.startswith("chunked PyTorch") and len(told) == 1, (cpu, told)
print("   ", home, "|", cpu)
"""


def step(text: str) -> None:
    print(f"-- {text}", flush=True)


def run(*command: object, cwd: Path, env: dict[str, str] | None = None, ok: bool = True) -> str:
    """Output of a command; ends the check with that output if its exit status is not the expected one."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "CONTINUUM_OPS_NO_EXT")
    }
    process = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if (process.returncode == 0) != ok:
        raise SystemExit(
            f"{shlex.join(map(str, command))}: exit status {process.returncode}\n{process.stdout}"
        )
    return process.stdout


def build(source: Path, out: Path, *kinds: str, env: dict[str, str] | None = None) -> str:
    return run(
        sys.executable, "-m", "build", "--no-isolation", *kinds, "-o", out, source, cwd=out.parent, env=env
    )


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def check_wheel(wheel: Path, *, compiled: bool) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"continuum_ops", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}, tops
    assert "continuum_ops/py.typed" in names, names
    assert "continuum_ops/kernels/__init__.py" in names, names
    extensions = [name for name in names if name.startswith("continuum_ops/_C") and name.endswith(".so")]
    # Another one besides where torch is a CUDA build and nvcc is there.
    assert len([name for name in extensions if "_C_cuda" not in name]) == compiled, extensions
    assert compiled or not extensions, extensions
    assert wheel.name.endswith("-none-any.whl") != compiled, wheel.name
    for package in (ROOT / "continuum_ops").rglob("*.py"):
        name = package.relative_to(ROOT).as_posix()
        assert name in names, f"{name} is not in {wheel.name}"


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "setup.py",
        "pyproject.toml",
        "PKG-INFO",
        "continuum_ops/py.typed",
    ]
    for folder in ("csrc", "kernels", "continuum_ops", "tests"):
        sources = (p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".h", ".cpp"))
        wanted += [p.relative_to(ROOT).as_posix() for p in sources]
    missing = [name for name in wanted if name not in names]
    assert not missing, f"not in the sdist: {missing}"
    built = [name for name in names if name.endswith((".so", ".o", ".pyc")) or name.startswith("build/")]
    assert not built, f"in the sdist: {built}"


def main() -> None:
    work = Path(tempfile.mkdtemp(prefix="continuum-ops-packaging-"))
    try:
        check(work)
    finally:
        shutil.rmtree(work)


def check(work: Path) -> None:
    step("editable installation, from outside the checkout")
    print(run(sys.executable, "-c", USE, "compiled", cwd=work), end="")

    step("sdist and wheel from the checkout")
    for stale in (*(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist*")):
        shutil.rmtree(stale)  # setuptools would pack whatever an earlier build left there
    build(ROOT, work / "tree", "--sdist", "--wheel")
    check_sdist(only(work / "tree", "*.tar.gz"))
    check_wheel(only(work / "tree", "*.whl"), compiled=True)

    step("wheel from the sdist")
    shutil.unpack_archive(only(work / "tree", "*.tar.gz"), work / "unpacked")
    source = only(work / "unpacked", "*")
    build(source, work / "sdist", "--wheel")
    check_wheel(only(work / "sdist", "*.whl"), compiled=True)

    step("wheels without the extension: CONTINUUM_OPS_NO_EXT=1, and no compiler")
    shutil.rmtree(source / "build")
    build(source, work / "no_ext", "--wheel", env={"CONTINUUM_OPS_NO_EXT": "1"})
    shutil.rmtree(source / "build")
    said = build(source, work / "no_compiler", "--wheel", env={"CXX": str(work / "no-such-compiler")})
    assert "WARNING: no C++ compiler" in said, said
    for kind in ("no_ext", "no_compiler"):
        check_wheel(only(work / kind, "*.whl"), compiled=False)

    step("a new virtual environment: without torch the build stops and says so")
    run(sys.executable, "-m", "venv", work / "venv", cwd=work)
    python = work / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    run(*pip, "setuptools>=77", "wheel", "ninja", cwd=work)
    said = run(*pip, "--no-build-isolation", source, cwd=work, ok=False)
    assert "no torch >= 2.11 was found" in said, said

    step(f"each wheel in it, with {shlex.join(TORCH)}")
    run(*pip, *TORCH, cwd=work)
    run(
        *pip, only(work / "tree", "*.whl"), cwd=work
    )  # with its dependencies; the others replace the package alone
    print(run(python, "-c", USE, "compiled", cwd=work), end="")
    for kind, served_by in (("sdist", "compiled"), ("no_ext", "chunked"), ("no_compiler", "chunked")):
        run(*pip, "--no-deps", "--force-reinstall", only(work / kind, "*.whl"), cwd=work)
        print(run(python, "-c", USE, served_by, cwd=work), end="")
    print("packaging check passed")


if __name__ == "__main__":
    main()
