"""Commands with time limits, side by side; what each printed is kept. Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .record import Record

TAIL = 6000  # characters of a log that go into the result file
Summary = Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """A command, its limit in seconds, and what its log says in a few words."""

    name: str
    command: Sequence[str]
    limit: float
    env: dict[str, str] = field(default_factory=dict)
    summary: Summary = lambda text: {}
    companion: float | None = None  # seconds after which it ends with the last step that has none


def run_steps(steps: Sequence[Step], record: Record, logs: Path, *, cwd: Path, poll: float = 0.1) -> None:
    """Start all at once; record each as it ends, or kill it with its children at its limit."""
    logs.mkdir(parents=True, exist_ok=True)
    running: dict[str, tuple[Step, subprocess.Popen[bytes], float]] = {}
    try:
        for step in steps:
            with open(logs / f"{step.name}.log", "wb") as log:
                child = subprocess.Popen(
                    step.command,
                    cwd=cwd,
                    env={**os.environ, **step.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            running[step.name] = (step, child, time.monotonic())
        while running:
            for name, (step, child, start) in list(running.items()):
                seconds = time.monotonic() - start
                alone = all(other.companion is not None for other, _, _ in running.values())
                late = seconds > step.limit or (
                    alone and step.companion is not None and seconds > step.companion
                )
                if child.poll() is None and not late:
                    continue
                late = child.poll() is None
                kill_group(child)
                del running[name]
                # The benchmark writes the same file: read what it left before adding to it.
                record.document = Record.load(record.path).document
                record.put("steps", name, outcome(step, child, seconds, late, logs))
            time.sleep(poll)
    finally:
        for _, child, _ in running.values():
            kill_group(child)


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """The command led a session of its own: whatever it started and left behind ends with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def outcome(
    step: Step, child: subprocess.Popen[bytes], seconds: float, late: bool, logs: Path
) -> dict[str, Any]:
    text = (logs / f"{step.name}.log").read_text(errors="replace")
    return {
        "command": " ".join(step.command),
        "rc": None if late else child.returncode,
        "cut_short": late,
        "seconds": round(seconds, 1),
        "limit_s": round(step.limit, 1),
        **step.summary(text),
        "tail": text[-TAIL:],
    }


def pytest_summary(text: str) -> dict[str, Any]:
    """Counts from the lines of ``pytest -v``, so that a run cut short has them too, and what failed."""
    found = re.findall(
        r"(?:^|\s)(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b"
        r"|\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL) (\S+::.*)",
        text.split(" short test summary info ")[0],
    )
    outcomes = {(a or d).strip(): b or c for a, b, c, d in found}
    counts = {kind.lower(): list(outcomes.values()).count(kind) for kind in sorted(set(outcomes.values()))}
    return {"counts": counts, "failed": sorted(k for k, v in outcomes.items() if v in ("FAILED", "ERROR"))}


def sanitizer_summary(text: str) -> dict[str, Any]:
    errors = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    return {"errors": sum(map(int, errors)) if errors else None}


def smi(fields: Sequence[str]) -> dict[str, str]:
    """What nvidia-smi says of the first card; nothing where it is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (v.strip() for v in text.splitlines()[0].split(",")), strict=False))


def pip_install(limit: float, *, compiled: bool = True) -> Step:
    """For this card only, unless the caller has chosen: each further architecture takes as long again."""
    name = "install" if compiled else "install-without-extension"
    card = smi(["compute_cap"]).get("compute_cap")
    env = {} if card is None or "TORCH_CUDA_ARCH_LIST" in os.environ else {"TORCH_CUDA_ARCH_LIST": card}
    if not compiled:
        env["CONTINUUM_OPS_NO_EXT"] = "1"
    options = ["--no-build-isolation", "--no-deps", "--disable-pip-version-check", "-v", "-e", "."]
    return Step(name, [sys.executable, "-m", "pip", "install", *options], limit, env)


def gpu_tests(limit: float, *, workers: int) -> Step:
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--durations=10", "-p", "no:cacheprovider"]
    command += ["-n", str(workers)] if workers > 1 else []
    return Step("pytest", command, limit, {"OMP_NUM_THREADS": "1"}, pytest_summary)


def find_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or next(
        (p for p in ["/usr/local/cuda/bin/compute-sanitizer"] if os.access(p, os.X_OK)), None
    )


def sanitizer(tool: str, script: Path, ops: Sequence[str], limit: float) -> Step:
    """compute-sanitizer over one small case per kernel, each tensor an allocation of its own."""
    found = find_sanitizer()
    if found is None:
        raise FileNotFoundError("compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin")
    command = [found, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    command += [sys.executable, str(script), "--small", *ops]
    return Step(tool, command, limit, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, sanitizer_summary)
