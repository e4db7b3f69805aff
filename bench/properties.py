"""Runs the property tests and records how many cases were tried: bench/results/trust.json, "properties".

--long draws 50 times as many, differently each time, and runs the tests of edge cases by the kernels of every
instruction set too. Each stage is recorded when it ends.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
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


def counted(text: str) -> dict[str, int]:
    """Cases, where hypothesis drew any, and tests, in pytest's output."""
    words = {"tests_passed": "passed", "tests_failed": "failed"}
    if "= Hypothesis Statistics =" in text:
        words = {"cases_tried": "passing", "cases_failed": "failing"} | words
    return {key: sum(map(int, re.findall(rf"(\d+) {word}\b", text))) for key, word in words.items()}


def cpu_seconds() -> float:
    """Of the processes that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def isas() -> list[str]:
    from continuum_ops import _C

    return list(_C.isas())


def stages(long: bool) -> Iterator[tuple[str, list[str], bool]]:
    """Name, pytest's arguments, and whether the Triton kernels run under the interpreter."""
    tests = ["tests/test_properties.py", "--hypothesis-show-statistics"]
    if long:  # an interpreted test draws 100 cases
        tests += ["--hypothesis-profile=nightly", "-o", "faulthandler_timeout=3600"]
    yield "kernels", ["tests/test_properties_of_patches.py", *tests], False
    yield "Triton interpreter", tests, True
    if long:
        files = [f"tests/test_{op}_edge.py" for op in EDGES]
        for isa in isas():
            yield f"edges {isa}", [*files, "--isa", isa, "-m", "not slow and not gpu"], False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--only", metavar="WORD", default="", help="stages whose name holds a word")
    args = parser.parse_args()
    codes = [0]
    for name, arguments, interpreted in stages(args.long):
        if args.only not in name:
            continue
        before = cpu_seconds()
        code, text = run_pytest(arguments, interpreted)
        codes.append(code)
        if code not in (0, 1):  # not ended by pytest: what it had counted is no figure
            print(f"{name}: ended with {code}, nothing is recorded", flush=True)
            continue
        figures = counted(text) | {"cpu_seconds": round(cpu_seconds() - before, 1)}
        record("properties", {f"{'long' if args.long else 'short'}, {name}": figures})
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
