"""Memory that cannot be had, threads, forks and leaks; each in a process of its own."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from continuum_ops.ops._memory import explained

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import memory  # noqa: E402

# Calls of every operator; limits of the address space; threads of the process.
PREPARE = """
import gc, os, re, resource, sys, threading
from pathlib import Path
import torch
import continuum_ops as co
from continuum_ops.ops import _direct as direct

def status(key):
    return int(re.search(rf"^{key}:\\s+(\\d+) kB$", Path("/proc/self/status").read_text(), re.M)[1]) * 1024

def threads():
    return len(os.listdir("/proc/self/task"))

class Limit:
    def __init__(self, more):
        self.bytes = status("VmSize") + more
    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (self.bytes, self.before[1]))
    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_AS, self.before)

def refused(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise SystemExit("nothing was refused")

def draw(*shape):
    return torch.randn(shape)

def calls(n, d, heads=2):
    q, k, v = (draw(1, heads, n, d) for _ in range(3))
    w, x, rate = torch.rand(n), torch.rand(n, 2), torch.ones(heads)
    masked = lambda q, k, v, mask: co.continuum_attention(q, k, v, attn_mask=mask)
    patches = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    return {
        "continuum_attention": (co.continuum_attention, (q, k, v, w)),
        "position_attention": (co.position_attention, (x, x, v[0], rate, w)),
        "patch_attention": (lambda q, k, v: co.patch_attention(q, k, v, n // 8), patches),
        "galerkin_attention": (co.galerkin_attention, (q, k, v, w)),
        "fourier_attention": (co.fourier_attention, (q, k, v, w)),
        "float mask": (masked, (q, k, v, torch.zeros(n))),
    }

def step(function, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
"""


def in_a_process(code: str, *, timeout: float = 300, **environment: str) -> str:
    kept = {n: v for n, v in os.environ.items() if n not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", PREPARE + code],
        env=kept
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def keep(name: str, text: str) -> None:
    """For bench/resources.py, which records it."""
    if "CONTINUUM_OPS_FIGURES" in os.environ:
        (Path(os.environ["CONTINUUM_OPS_FIGURES"]) / name).write_text(text)


# --- memory that cannot be had ---------------------------------------------------------------------

TOO_LARGE = """
torch.set_num_threads(1)
n, heads = 4096, 1024  # outputs of 2^28 numbers from expanded inputs of 2^18
x, w, rate = torch.rand(n, 2), torch.rand(n), torch.ones(heads)
few = [draw(1, 1, 8, 64).expand(1, heads, 8, 64) for _ in range(2)]
q = draw(1, 1, n, 64).expand(1, heads, n, 64)
p = draw(1, n, 1, 64).expand(1, n, heads, 64)
cases = {
    "continuum_attention": lambda: co.continuum_attention(q, *few),
    "position_attention": lambda: co.position_attention(x, x[:8], few[0][:, 0], rate),
    "patch_attention": lambda: co.patch_attention(p, p[:, :8], p[:, :8], 8),
    "galerkin_attention": lambda: co.galerkin_attention(q, *few),
    "fourier_attention": lambda: co.fourier_attention(q, *few),
    "float mask": lambda: co.continuum_attention(q, *few, attn_mask=torch.zeros(8)),
}
for function, tensors in calls(64, 16).values():  # what is loaded at the first call
    step(function, tensors)
"""


GRADIENTS_TOO_LARGE = """
heads = 256  # 2^26 numbers
shared = draw(1, 1, n, 64).requires_grad_()
few = [draw(1, 1, 8, 64).expand(1, heads, 8, 64) for _ in range(2)]
value = draw(1, 1, n, 64).expand(1, heads, n, 64).requires_grad_()
p = shared.transpose(1, 2).expand(1, n, heads, 64)
outs = {
    "continuum_attention": (co.continuum_attention(shared.expand(1, heads, n, 64), *few), shared),
    "position_attention": (co.position_attention(x[:8], x, value, torch.ones(heads)), value),
    "patch_attention": (co.patch_attention(p, p, p, n // 4), shared),
}
for name, (out, leaf) in outs.items():
    g = torch.ones(1, 1, 1, 1).expand_as(out)
    with Limit(64 * 2**20):
        print(name, "|", refused(lambda: torch.autograd.grad(out, leaf, g)))
"""


@pytest.mark.parametrize("no_ext", ["0", "1"], ids=["kernels", "pytorch"])
def test_what_does_not_fit(no_ext: str) -> None:
    """1 GiB of outputs where 100 MiB are left, 256 MiB of gradients where 64 are: an error with the size.

    The operators work afterwards.
    """
    code = (
        TOO_LARGE
        + """
with Limit(100 * 2**20):
    for name, call in cases.items():
        print(name, "|", refused(call))
"""
        + (GRADIENTS_TOO_LARGE if no_ext == "0" else "")
        + """
for function, tensors in calls(64, 16).values():
    assert all(t.isfinite().all() for t in step(function, tensors))
"""
    )
    lines = in_a_process(code, CONTINUUM_OPS_NO_EXT=no_ext).splitlines()
    ops = [
        "continuum_attention",
        "position_attention",
        "patch_attention",
        "galerkin_attention",
        "fourier_attention",
    ]
    assert [line.split(" |")[0] for line in lines] == [
        *ops,
        "float mask",
        *(ops[:3] if no_ext == "0" else ()),
    ]
    for line in lines:
        assert (
            "GiB (" in line and " bytes) cannot be allocated; fewer batch entries, heads or queries" in line
        ), line
        assert "need less (docs/memory.md)" in line, line


def test_lack_of_memory_is_explained() -> None:
    def lacking(error: RuntimeError) -> None:
        raise error

    cpu = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    cpu += "you tried to allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
    with pytest.raises(
        RuntimeError, match=r"^op: 2.000 GiB \(2147483648 bytes\) cannot be allocated; fewer batch"
    ):
        explained("op", lacking)(RuntimeError(cpu))
    with pytest.raises(
        torch.OutOfMemoryError, match=r"^op: CUDA out of memory. Tried .*; fewer batch entries"
    ):
        explained("op", lacking)(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    with pytest.raises(RuntimeError, match=r"^something else$"):
        explained("op", lacking)(RuntimeError("something else"))


def test_what_a_call_allocates() -> None:
    """The formulas of docs/memory.md, at tensors of 16 MiB: one more of them would show."""
    rows = memory.table()
    assert {(row["op"], row["pass"]) for row in rows} == set(itertools.product(memory.OPS, memory.PASSES))
    keep("memory", json.dumps(rows))
    for row in rows:
        assert abs(row["measured_mib"] - row["formula_mib"]) <= 1.5 + 0.03 * row["formula_mib"], row


# --- threads ---------------------------------------------------------------------------------------


def test_the_number_of_threads_is_torchs() -> None:
    """No operator starts a thread beyond torch.set_num_threads, and each that is large uses them."""
    code = """
before = threads()
for count in (1, 2, 3):
    torch.set_num_threads(count)
    for function, tensors in calls(512, 32).values():
        step(function, tensors)
    assert threads() - before == count - 1, (count, before, threads())
    assert torch.get_num_threads() == count
"""
    in_a_process(code)


def test_one_thread_in_the_workers_of_a_loader() -> None:
    """Workers that compute on one thread each, as torch sets it, also after the parent has used several."""
    code = """
class Attending(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        before = threads()
        for function, tensors in calls(512, 32).values():
            step(function, tensors)
        return os.getpid(), threads() - before, torch.get_num_threads()

torch.set_num_threads(2)
for function, tensors in calls(512, 32).values():
    step(function, tensors)
options = {"num_workers": 2, "batch_size": None, "multiprocessing_context": "fork", "timeout": 120}
loader = torch.utils.data.DataLoader(Attending(), **options)
items = [tuple(int(x) for x in item) for item in loader]
assert len({pid for pid, _, _ in items}) == 2 and os.getpid() not in {pid for pid, _, _ in items}
assert all(item[1:] == (0, 1) for item in items), items
"""
    in_a_process(code)


def test_fork_after_use() -> None:
    """A child of a parent that has used its threads computes the same, on one thread; the parent goes on.

    A child of a parent that has not keeps their number.
    """
    code = """
torch.set_num_threads(2)
torch.manual_seed(0)
pid = os.fork()
if pid == 0:
    os._exit(torch.get_num_threads() != 2)
assert os.waitpid(pid, 0)[1] == 0
work = calls(512, 32)
expected = {name: step(*call) for name, call in work.items()}

def agree():
    for name, call in work.items():
        for tensor, true in zip(step(*call), expected[name], strict=True):
            torch.testing.assert_close(tensor, true, rtol=0, atol=1e-5 * true.abs().max().item())

pid = os.fork()
if pid == 0:
    try:
        assert torch.get_num_threads() == 1
        agree()
        os._exit(0)
    finally:
        os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
assert torch.get_num_threads() == 2
agree()
"""
    in_a_process(code, timeout=120)


# --- leaks -----------------------------------------------------------------------------------------

LEAK = """
torch.set_num_threads(1)

def growth(run, calls):
    "Growth of the resident memory over so many calls, after as many as a quarter of them."
    for _ in range(calls // 4):
        run()
    gc.collect()
    before = status("VmRSS")
    for _ in range(calls):
        run()
    gc.collect()
    return status("VmRSS") - before
"""


def test_nothing_is_leaked() -> None:
    """An output kept by each call would be 8 KiB times the calls; ten times less is allowed."""
    code = (
        LEAK
        + f"""
count = {int(os.environ.get("CONTINUUM_OPS_LEAK_CALLS", "250"))}
for name, call in calls(64, 16).items():
    grown = growth(lambda: step(*call), count)
    assert grown <= max(2**20, count * 8 * 2**10 / 10), (name, grown)
    print(name, grown)
kept = []
function, tensors = calls(64, 16)["continuum_attention"]
assert growth(lambda: kept.append(function(*tensors)), count) > max(2**20, count * 8 * 2**10 / 10)
"""
    )
    lines = in_a_process(code, timeout=1200)
    assert len(lines.splitlines()) == 6
    keep("growth", lines)
