"""What the build says when something is missing; the builds that succeed are in ci/check_packaging.py."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("continuum_ops_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where the build can find a torch."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_missing_torch_is_an_error(build: ModuleType, site_packages: Path) -> None:
    with pytest.raises(
        SystemExit, match=rf"no torch >= 2.11 was found in {site_packages}/torch\.\nInstall torch"
    ):
        build.torch_dir()


@pytest.mark.parametrize("version", ["2.10.1+cpu", "1.13.0"])
def test_torch_before_the_stable_abi_is_an_error(
    build: ModuleType, site_packages: Path, version: str
) -> None:
    (site_packages / "torch").mkdir()
    (site_packages / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    with pytest.raises(SystemExit, match=rf"torch must be 2.11 or later, got torch {version[:4]}"):
        build.torch_dir()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "3.0.0a0+git1"])
def test_torch_of_the_installing_interpreter(build: ModuleType, site_packages: Path, version: str) -> None:
    (site_packages / "torch").mkdir()
    (site_packages / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    assert build.torch_dir() == site_packages / "torch"


def test_missing_ninja_is_an_error(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ninja", None)  # makes the import fail
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="ninja was not found"):
        build.ninja()


def test_missing_python_header_is_an_error(build: ModuleType, site_packages: Path) -> None:
    with pytest.raises(SystemExit, match=rf"Python.h was not found in {site_packages}; install python3-dev"):
        build.python_include()


@pytest.mark.parametrize("command", ["no-such-compiler", "/no/such/compiler -O2"])
def test_missing_compiler_builds_without_the_extension(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(build, "NO_EXT", False)
    monkeypatch.setattr(build, "CXX", command)
    assert build.extensions() == []
    assert f"WARNING: no C++ compiler ({command}) was found" in capsys.readouterr().err


def test_no_extension_on_request_is_silent(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "NO_EXT", True)
    assert build.extensions() == []
    assert capsys.readouterr().err == ""


def test_compiler_that_fails_is_an_error(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("csrc", "continuum_ops", "kernels"):
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    process = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tmp_path,
        env={**os.environ, "CXX": "false", "CONTINUUM_OPS_NO_EXT": "0"},
        capture_output=True,
        text=True,
    )
    assert process.returncode != 0
    assert "continuum_ops: the extension did not compile" in process.stderr
    assert not list((tmp_path / "continuum_ops").glob("*.so"))


@pytest.fixture
def cpu_or_cuda(build: ModuleType, site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build with a torch of its own, and no CUDA toolkit."""
    (site_packages / "torch").mkdir()
    monkeypatch.setattr(build, "cuda_home", lambda: None)
    monkeypatch.setattr(build, "CUDA", "auto")
    monkeypatch.setattr(build, "SANITIZE", False)
    return build


def torch_version(site_packages: Path, cuda: str) -> None:
    text = f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\n"
    (site_packages / "torch/version.py").write_text(text)


def test_cpu_torch_builds_no_cuda_library_and_says_nothing(
    cpu_or_cuda: ModuleType, site_packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_version(site_packages, "None")
    assert not cpu_or_cuda.cuda_wanted()
    assert capsys.readouterr().err == ""


def test_cuda_torch_without_nvcc_warns(
    cpu_or_cuda: ModuleType, site_packages: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch_version(site_packages, "'13.0'")
    assert not cpu_or_cuda.cuda_wanted()
    assert "WARNING: torch is a CUDA build, but no CUDA toolkit" in capsys.readouterr().err
    cpu_or_cuda.cuda_home = lambda: tmp_path  # type: ignore[attr-defined]
    assert cpu_or_cuda.cuda_wanted()


def test_cuda_on_request(cpu_or_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_or_cuda, "CUDA", "1")
    with pytest.raises(SystemExit, match=r"CONTINUUM_OPS_CUDA=1, but no CUDA toolkit"):
        cpu_or_cuda.cuda_wanted()
    monkeypatch.setattr(cpu_or_cuda, "CUDA", "0")
    assert not cpu_or_cuda.cuda_wanted()
    monkeypatch.setattr(cpu_or_cuda, "CUDA", "yes")
    with pytest.raises(SystemExit, match="CONTINUUM_OPS_CUDA must be 0 or 1, got yes"):
        cpu_or_cuda.cuda_wanted()


def test_architectures(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert build.architectures() == [("80", False), ("90", False), ("100", True)]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6 9.0a+PTX;12.0")
    assert build.architectures() == [("86", False), ("90a", True), ("120", False)]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST must be like .* got 'Hopper'"):
        build.architectures()
