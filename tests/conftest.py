from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from cuda_on_cpu import needs_gpu, shim
from helpers import Path, attention_module, chunked_module
from hypothesis import settings
from position_helpers import position_chunked, position_module

from continuum_ops.backends import extension
from continuum_ops.ops import _direct as direct

# torch.compile's cache on disk outlives a changed operator schema: compiled tests must compile.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("dev", deadline=None, max_examples=60)
settings.register_profile("nightly", deadline=None, max_examples=3000)
settings.load_profile("dev" if os.environ.get("CONTINUUM_OPS_RANDOMIZE") == "1" else "ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--isa", help="run the CPU kernels of this instruction set (avx512, avx2, generic)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--isa"):
        from continuum_ops import _C

        _C.set_isa(config.getoption("--isa"))


@pytest.fixture(params=["kernel", "chunked"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A test that takes it runs through the kernel operator and the chunked one, in several blocks."""
    if request.param == "chunked":
        monkeypatch.setattr(direct, "plain", lambda *_: None)
        monkeypatch.setattr(attention_module, "_kernel_serves", lambda *_: False)
        monkeypatch.setattr(chunked_module, "CHUNK_SCORES", 2**14)
        monkeypatch.setattr(position_module, "_attend", torch.ops.continuum_ops.position_attention_chunked)
        monkeypatch.setattr(position_chunked, "CHUNK_SCORES", 2**14)
    return Path(request.param)


@pytest.fixture(params=["avx512", "avx2", "generic"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU kernels of each instruction set that this processor has."""
    kernels = extension()[0]
    if kernels is None:
        pytest.skip("the compiled extension is not built")
    if request.param not in kernels.isas():
        pytest.skip(f"this processor has no {request.param}")
    before = kernels.isa()
    kernels.set_isa(request.param)
    yield request.param
    kernels.set_isa(before)


@pytest.fixture(params=["shim", pytest.param("gpu", marks=[pytest.mark.gpu, needs_gpu])])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test of CUDA kernels runs them: on the CPU thread by thread, and on a GPU if there is one."""
    if request.param == "shim":
        shim()
    return request.param
