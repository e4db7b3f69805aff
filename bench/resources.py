"""Runs the tests of memory, threads, forks and leaks; figures go to bench/results/trust.json, "resources".

--long makes 10,000 calls of each operator where the tests make 250.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from trust import record

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--long", action="store_true")
    args = parser.parse_args()
    calls = 10_000 if args.long else 250
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"CONTINUUM_OPS_LEAK_CALLS": str(calls), "CONTINUUM_OPS_FIGURES": folder}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_resources.py"]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        kept = {file.name: file.read_text() for file in Path(folder).iterdir()}
    figures = {
        "tests_passed": sum(map(int, re.findall(r"(\d+) passed", done.stdout))),
        "tests_failed": sum(map(int, re.findall(r"(\d+) failed", done.stdout))),
        "calls_of_each_operator": calls,
        "growth_of_resident_memory_in_bytes": {
            name: int(size)
            for name, size in (line.rsplit(" ", 1) for line in kept.get("growth", "").splitlines())
        },
        "memory_of_a_call": json.loads(kept.get("memory", "[]")),
    }
    record("resources", {"long" if args.long else "short": figures})
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
