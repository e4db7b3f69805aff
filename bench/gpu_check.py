"""One command for a machine with an NVIDIA GPU: install, tests, sanitizer, benchmark, in a given time.

``python3 bench/gpu_check.py --out DIR`` takes at most 340 s and needs torch with CUDA, Triton, nvcc, ninja,
pybind11 and pytest, no network. DIR/gpu_check.json is rewritten after every measurement, so that a run cut
short leaves what it had. ``--tables FILE`` prints such a file as Markdown.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu import steps
from gpu.record import Budget, Record

ROOT = Path(__file__).resolve().parent.parent
OPS = ("continuum_attention", "position_attention", "patch_attention", "galerkin_attention")
WARMERS = 4  # processes that compile for the benchmark while the tests run
WARM_SECONDS = 60.0  # they have that long at least, and longer while the tests take longer
ATTEMPTS = 4  # processes of the benchmark: one that loses its CUDA context is replaced, past that case
SHARES = {"install": 0.35, "checks": 0.32}  # of the budget at most; the benchmark has the rest
CLOSING = 4.0  # seconds kept for ending processes and writing


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--budget", type=float, default=340.0, metavar="SECONDS", help="in all (default: 340)"
    )
    parser.add_argument("--only", choices=OPS, metavar="OP", help=f"one operator: {', '.join(OPS)}")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder (default: gpu_check)")
    parser.add_argument("--commit", help="recorded where the folder is no git checkout")
    parser.add_argument("--skip-checks", action="store_true", help="no tests and no compute-sanitizer")
    parser.add_argument("--skip-install", action="store_true", help="take the package as it is installed")
    parser.add_argument("--plan", action="store_true", help="print the cases in their order; run nothing")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="print a result file as Markdown")
    parser.add_argument("--small", nargs="+", choices=OPS, help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.budget > 0:
        parser.error(f"--budget must be positive, got {args.budget}")
    return args


def git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def new_document(args: argparse.Namespace, ops: Sequence[str]) -> dict[str, Any]:
    commit = args.commit or git("rev-parse", "HEAD") or "unknown"
    changed = bool(git("status", "--porcelain", "--untracked-files=no"))
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": {"budget_s": args.budget, "ops": list(ops)},
        "machine": {"commit": commit + " (changed)" * changed},
        "steps": {},
        "rates": {},
        "cases": {},
        "rows": [],
    }


def check_steps(ops: Sequence[str], limit: float, record: Record, *, tests: bool = True) -> list[steps.Step]:
    """Tests, compute-sanitizer and compilations for the benchmark: they share the card, nothing is timed."""
    script = Path(__file__).resolve()
    found = [steps.gpu_tests(limit, workers=4 if has_xdist() else 1)] if tests else []
    for tool in ("memcheck", "racecheck") if tests else ():
        try:
            found.append(steps.sanitizer(tool, script, ops, limit))
        except FileNotFoundError as error:
            record.put("steps", tool, {"skipped": str(error)})
    task = json.dumps({"names": list(ops)})
    command = [sys.executable, str(script), "--warm", task]
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
    found.append(steps.Step("warm", command, limit, env, warmed_summary, WARM_SECONDS))
    return found


def has_xdist() -> bool:
    from importlib.util import find_spec

    return find_spec("xdist") is not None


def warmed_summary(text: str) -> dict[str, Any]:
    return {"warmed": re.findall(r"^warmed (.*)$", text, re.MULTILINE)}


def benchmark_step(
    record: Record, ops: Sequence[str], deadline: float, limit: float, attempt: int
) -> steps.Step:
    warmed = [key for step in record.document["steps"].values() for key in step.get("warmed", [])]
    task = {"path": str(record.path), "deadline": deadline, "names": list(ops), "warmed": warmed}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(task)]
    return steps.Step(f"benchmark{attempt or ''}", command, limit)


def run_benchmark(record: Record, ops: Sequence[str], budget: Budget) -> None:
    """Until it ends by itself or time is up; after a broken process again, without the case that broke it."""
    for attempt in range(ATTEMPTS):
        limit = budget.limit(budget.left(), reserve=CLOSING)
        step = benchmark_step(record, ops, budget.deadline - CLOSING, limit, attempt)
        steps.run_steps([step], record, record.path.parent, cwd=ROOT)
        ended = record.document["steps"][step.name]
        if ended["rc"] == 0 or ended["cut_short"] or budget.left() < 3 * CLOSING:
            return


def install(record: Record, limit: float) -> None:
    """With every kernel; where that fails, without the compiled ones, so that Triton's are measured still."""
    for step in (steps.pip_install(limit), steps.pip_install(limit, compiled=False)):
        steps.run_steps([step], record, record.path.parent, cwd=ROOT)
        if record.document["steps"][step.name]["rc"] == 0:
            return


def check(args: argparse.Namespace) -> Record:
    budget = Budget(time.time() + args.budget)
    ops = OPS if args.only is None else (args.only,)
    out = args.out.resolve()
    record = Record(out / "gpu_check.json", new_document(args, ops))
    record.save()
    if not args.skip_install:
        install(record, budget.limit(SHARES["install"] * args.budget, reserve=CLOSING))
    limit = budget.limit(SHARES["checks"] * args.budget, reserve=CLOSING)
    steps.run_steps(check_steps(ops, limit, record, tests=not args.skip_checks), record, out, cwd=ROOT)
    run_benchmark(record, ops, budget)
    return record


def plan(args: argparse.Namespace) -> None:
    """The cases in their order, each with its candidates."""
    from gpu import benchmark

    chosen = benchmark.operators(OPS if args.only is None else (args.only,))
    cases = benchmark.interleave([operator.cases() for operator in chosen.values()])
    print("\n".join(f"{case.key}: {'; '.join(chosen[case.op].names(case))}" for case in cases))


def warm(names: Sequence[str]) -> int:
    """Processes that compile beside each other; their number of failures."""
    tasks = [{"names": list(names), "part": part, "parts": WARMERS} for part in range(WARMERS)]
    script = str(Path(__file__).resolve())
    children = [subprocess.Popen([sys.executable, script, "--warm", json.dumps(task)]) for task in tasks]
    return sum(child.wait() != 0 for child in children)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.tables is not None:
        from gpu import tables

        print(tables.render(json.loads(args.tables.read_text())), end="")
    elif args.plan:
        plan(args)
    elif args.worker is not None:
        from gpu import benchmark

        task = {**args.worker, "path": Path(args.worker["path"])}
        benchmark.work(**task)
    elif args.warm is not None and "part" not in args.warm:
        return warm(**args.warm)
    elif args.warm is not None:
        from gpu import benchmark

        benchmark.warm(**args.warm)
    elif args.small is not None:
        import torch
        from gpu import benchmark

        for operator in benchmark.operators(args.small).values():
            operator.small(torch.device("cuda"))
        torch.cuda.synchronize()
    else:
        from gpu import tables

        record = check(args)
        print(tables.render(record.document), end="")
        print(f"written to {record.path}", file=sys.stderr)
        return tables.exit_code(record.document)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
