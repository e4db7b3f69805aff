"""Runs the property tests and records how many cases were tried: bench/results/trust.json, "properties".

--long draws 50 times as many, differently each time, and runs the tests of edge cases by the kernels of every
instruction set too.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

from trust import record

ROOT = Path(__file__).resolve().parent.parent
EDGES = ["continuum_attention", "position_attention", "patch_attention"]


def run_pytest(arguments: list[str], interpreted: bool = False) -> tuple[int, str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if interpreted:
        environment |= {"TRITON_INTERPRET": "1", "CONTINUUM_OPS_NO_EXT": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    print(re.sub(r"(?ms)^=+ Hypothesis Statistics =+.*?(?=^=+ |\Z)", "", done.stdout)[-4000:], flush=True)
    return done.returncode, done.stdout


def count(pattern: str, text: str) -> int:
    return sum(int(n) for n in re.findall(pattern, text))


def isas() -> list[str]:
    from continuum_ops import _C

    return list(_C.isas())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--long", action="store_true")
    args = parser.parse_args()
    form = "long" if args.long else "short"
    profile = ["--hypothesis-profile=nightly"] if args.long else []
    tests = ["tests/test_properties.py", "--hypothesis-show-statistics", *profile]
    runs = [run_pytest(["tests/test_properties_of_patches.py", *tests]), run_pytest(tests, interpreted=True)]
    if args.long:
        files = [
            str(f.relative_to(ROOT))
            for op in EDGES
            for f in sorted((ROOT / "tests").glob(f"test_{op}_edge.py"))
        ]
        runs += [run_pytest([*files, "--isa", isa, "-m", "not slow and not gpu"]) for isa in isas()]
    text = "\n".join(output for _, output in runs)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "cases_tried": count(r"(\d+) passing examples", text),
        "cases_failed": count(r"(\d+) failing examples", text),
        "tests_passed": count(r"(\d+) passed", text),
        "tests_failed": count(r"(\d+) failed", text),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
    }
    record("properties", {form: figures})
    sys.exit(max(code for code, _ in runs))


if __name__ == "__main__":
    main()
