"""Mutation check: each mutant changes one thing in a kernel or formula; the tests named with it must fail.

    python ci/mutants.py [--short] [--record] [--only WORD ...] [--again]

A copy of the tree is changed, build/mutants/tree, never the checkout. All C++ mutants are built at once, each
behind a look at the environment (CO_MUTANT=7 is mutant 7), with -O1; objects that no mutant touches are those
of the checkout's own build where that is current. Mutants of Python and Triton are written into the copy one
at a time. The tests must pass without a mutant first. Killed mutants are kept in build/mutants/results.json
as long as they and their file are as they were, so that an interrupted run goes on.

--short runs SHORT, a few of each language; --only those whose name contains a word; --again forgets what was
found; --record writes the figures to bench/results/trust.json. Exit status 1: less than 95 % were killed, or
a mutant no longer fits the source.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
MARK = "§"  # around what a mutant replaces
COPIED = ("continuum_ops", "kernels", "tests")
GOAL = 0.95
LIMIT = 300  # seconds of the processor; a loop that no longer ends is a killed mutant
WAIT = 900  # seconds; so is one that waits for ever

SHORT = (
    "galerkin: weight of the values dropped",
    "galerkin: weights default to 1",
    "triton forward: maximum of a tile ignored",
    "triton position: rate of the wrong sign",
    "simplices: volume of d-simplices",
    "grid: weights transposed",
    "smoothing: inverse symbol",
)


class Mutant(NamedTuple):
    """`text` occurs once in `file`; what stands between the two marks becomes `new`; `tests` must fail."""

    name: str
    file: str
    text: str
    new: str
    tests: str

    @property
    def language(self) -> str:
        if self.file.startswith("csrc/"):
            return "C++"
        return "Triton" if self.file.startswith("kernels/") else "Python"


class Misfit(ValueError):
    """A mutant whose text the source does not hold, or holds more than once."""


def all_mutants() -> list[Mutant]:
    from mutant_list_cpp import SHARED
    from mutant_list_cpp_meshes import MESHES
    from mutant_list_python import PYTHON, TRITON

    found = [
        Mutant(name, file, text, new, tests)
        for group in (SHARED, MESHES, TRITON, PYTHON)
        for file, mutants in group.items()
        for name, text, new, tests in mutants
    ]
    names = [mutant.name for mutant in found]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    assert set(SHORT) <= set(names), sorted(set(SHORT) - set(names))
    return found


def place(mutant: Mutant, source: str) -> tuple[int, int]:
    """Where the source holds what the mutant replaces."""
    before, old, after = mutant.text.split(MARK)
    text = before + old + after
    if source.count(text) != 1:
        raise Misfit(f"{mutant.name}: {mutant.file} holds its text {source.count(text)} times: {text!r}")
    start = source.index(text) + len(before)
    return start, start + len(old)


def mutated(mutant: Mutant, source: str) -> str:
    start, stop = place(mutant, source)
    return source[:start] + mutant.new + source[stop:]


def guarded(numbered: Sequence[tuple[int, Mutant]], source: str) -> str:
    """The C++ source with all mutants, each behind its number; a text that ends in ; is a statement."""
    places = sorted((*place(mutant, source), number, mutant.new) for number, mutant in numbered)
    for (_, stop, number, _), (start, _, other, _) in itertools.pairwise(places):
        assert stop <= start, f"mutants {number} and {other} overlap"
    for start, stop, number, new in reversed(places):
        old, condition = source[start:stop], f"co_mutant == {number}"
        if old.rstrip().endswith(";"):
            text = f"if ({condition}) {{ {new} }} else {{ {old} }}"
        else:
            text = f"({condition} ? ({new}) : ({old}))"
        source = source[:start] + text + source[stop:]
    first = re.search(r"^#pragma once$|^#include", source, re.MULTILINE)
    assert first is not None
    at = first.end() + 1 if first[0].startswith("#pragma") else first.start()
    return source[:at] + '#include "mutant.h"\n' + source[at:]


GUARD = """#pragma once
#include <stdlib.h>
static const int co_mutant = [] { const char* s = getenv("CO_MUTANT"); return s ? atoi(s) : 0; }();
"""


def write(path: Path, text: str) -> None:
    """Only what differs, so that ninja compiles only that."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


class Tree:
    """The copy of the checkout in which mutants live."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "tree"

    def copy(self) -> None:
        wanted = {Path("pyproject.toml"), Path("setup.py")}
        for top in COPIED:
            wanted |= {p.relative_to(ROOT) for p in (ROOT / top).rglob("*") if p.is_file()}
        wanted = {p for p in wanted if p.suffix not in (".so", ".pyc")}
        for top in COPIED:  # what the checkout no longer has
            for path in (self.root / top).glob("**/*.py"):
                if path.relative_to(self.root) not in wanted:
                    path.unlink()
        for relative in wanted:
            source, target = ROOT / relative, self.root / relative
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        link = self.root / "continuum_ops" / "kernels"  # before an editable installation's own
        if not link.is_symlink():
            link.symlink_to("../kernels")

    def build(self, numbered: Sequence[tuple[int, Mutant]]) -> None:
        """The extension with all C++ mutants; raises CalledProcessError where it does not compile."""
        files = {mutant.file for _, mutant in numbered}
        for path in (ROOT / "csrc").iterdir():
            file, text = f"csrc/{path.name}", path.read_text(encoding="utf-8")
            here = [(number, mutant) for number, mutant in numbered if mutant.file == file]
            write(self.root / file, guarded(here, text) if here else text)
        write(self.root / "csrc" / "mutant.h", GUARD)
        setup = _setup()
        own = ROOT / "build" / f"ninja-{setup.sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        setup.ROOT, setup.OPTIMISED = self.root, "-O1 -DNDEBUG"
        target = self.root / "continuum_ops" / f"_C{setup.sysconfig.get_config_var('EXT_SUFFIX')}"
        lines = setup.ninja_file(target, setup.torch_dir()).splitlines()
        text = "\n".join(_with_objects(lines, own, {Path(file).name for file in files}))
        objects = self.folder / "objects"
        objects.mkdir(parents=True, exist_ok=True)
        write(objects / "build.ninja", text + "\n")
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        subprocess.run([setup.ninja(), "-C", str(objects), *jobs], check=True, stdout=sys.stderr)

    def run(self, tests: str, language: str, number: int = 0) -> tuple[int, str]:
        """Exit status of pytest on a selection, or -signal, and its last words.

        In a fork of this process, which has imported what takes seconds and has no thread yet.
        """
        env = {"CO_MUTANT": str(number), "OMP_NUM_THREADS": "1"}
        if language == "Triton":
            env |= {"TRITON_INTERPRET": "1", "CONTINUUM_OPS_NO_EXT": "1"}
        words = [f"tests/{word}" if ".py" in word else word for word in shlex.split(tests)]
        marks = "not gpu" if language == "Triton" else "not slow and not gpu"
        options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks]
        output = self.folder / "output.txt"
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            self._child([*options, *words], env, output)
        # A thread only from here to the end of the wait: none is there at a fork.
        killer = threading.Timer(WAIT, os.kill, (child, signal.SIGKILL))
        killer.start()
        _, status = os.waitpid(child, 0)
        killer.cancel()
        killer.join()
        out = output.read_text(encoding="utf-8", errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", out, re.MULTILINE)
        said = failed[0] if failed else out.strip().splitlines()[-1] if out.strip() else ""
        return os.waitstatus_to_exitcode(status), said

    def _child(self, options: list[str], env: dict[str, str], output: Path) -> NoReturn:
        code: int = 3
        try:
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 10))
            os.chdir(self.root)
            os.environ.update(env, PYTHONPATH=str(self.root))
            sys.path[:0] = [str(self.root), str(self.root / "tests")]
            import pytest

            code = int(pytest.main(options))
            sys.stdout.flush()
        finally:
            os._exit(code)


def preload() -> None:
    """What takes seconds to import and is the same for every mutant."""
    for name in ("pytest", "numpy", "torch", "hypothesis", "scipy.sparse.linalg", "torch.testing"):
        importlib.import_module(name)


def _setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_of_the_checkout", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _with_objects(lines: Iterable[str], own: Path, changed: set[str]) -> list[str]:
    """build.ninja with the checkout's objects in the place of those that would be the same."""
    kept: list[str] = []
    taken: dict[str, str] = {}
    skip = False
    for line in lines:
        found = re.fullmatch(r"build (\S+\.o): compile (.*)", line)
        if found:
            source = ROOT / "csrc" / Path(found[2]).name
            needed, made = includes(source), own / found[1]
            current = made.exists() and made.stat().st_mtime > max(p.stat().st_mtime for p in needed)
            skip = current and not changed & {p.name for p in needed}
            if skip:
                taken[found[1]] = str(made)
                continue
        elif skip and line.startswith("  extra ="):
            continue
        elif line.startswith("build ") and ": link " in line:
            head, objects = line.split(": link ")
            line = f"{head}: link {' '.join(taken.get(name, name) for name in objects.split())}"
        kept.append(line)
    return kept


def includes(source: Path) -> set[Path]:
    """A source of csrc/ and the headers there that it includes."""
    found, left = {source}, [source]
    while left:
        for name in re.findall(r'^#include "(.*)"', left.pop().read_text(encoding="utf-8"), re.MULTILINE):
            path = ROOT / "csrc" / name
            if path.exists() and path not in found:
                found.add(path)
                left.append(path)
    return found


class Check:
    """Runs mutants and keeps what was found."""

    def __init__(self, tree: Tree, again: bool) -> None:
        self.tree = tree
        self.file = tree.folder / "results.json"
        known = self.file.exists() and not again
        self.found: dict[str, dict[str, Any]] = json.loads(self.file.read_text()) if known else {}
        self.passing: dict[tuple[str, str], str | None] = {}

    def digest(self, mutant: Mutant) -> str:
        content = (ROOT / mutant.file).read_bytes()
        return hashlib.sha256(content + repr(mutant).encode()).hexdigest()[:16]

    def complaint(self, mutant: Mutant) -> str | None:
        """Why the tests of a mutant say nothing: they do not pass without it."""
        key = (mutant.tests, "Triton" if mutant.language == "Triton" else "")
        if key not in self.passing:
            code, said = self.tree.run(mutant.tests, mutant.language)
            self.passing[key] = None if code == 0 else f"without the mutant: {said}"
        return self.passing[key]

    def one(self, mutant: Mutant, number: int) -> dict[str, Any]:
        digest = self.digest(mutant)
        known = self.found.get(mutant.name, {})
        if known.get("digest") == digest and known["outcome"] == "killed":  # tests may be new to a survivor
            return known
        start = time.monotonic()
        complaint = self.complaint(mutant)
        if complaint is not None:
            outcome, why = "not applicable", complaint
        else:
            code, why = self._run(mutant, number)
            outcome = "survived" if code == 0 else "killed"
            if code in (4, 5):  # pytest found no such tests
                outcome = "not applicable"
            if code < 0:
                why = signal.Signals(-code).name
        result = {"digest": digest, "language": mutant.language, "outcome": outcome, "why": why}
        result["seconds"] = round(time.monotonic() - start, 1)
        if outcome != "not applicable":
            self.found[mutant.name] = result
            write(self.file, json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")
        return result

    def _run(self, mutant: Mutant, number: int) -> tuple[int, str]:
        if mutant.language == "C++":
            return self.tree.run(mutant.tests, mutant.language, number)
        path = self.tree.root / mutant.file
        source, before = path.read_text(encoding="utf-8"), path.stat()
        try:
            path.write_text(mutated(mutant, source), encoding="utf-8")
            os.utime(path, (number, number))  # compiled files are told apart by size and second
            return self.tree.run(mutant.tests, mutant.language)
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def figures(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What trust.json holds."""
    counted: dict[str, Any] = {"mutants": len(results)}
    for outcome in ("killed", "survived", "not applicable"):
        counted[outcome.replace(" ", "_")] = sum(r["outcome"] == outcome for r in results)
    for language in ("C++", "Triton", "Python"):
        here = [r["outcome"] for r in results if r["language"] == language]
        counted[language] = f"{here.count('killed')} of {len(here)} killed"
    return counted


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[])
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args(args)
    mutants = all_mutants()
    if options.short:
        mutants = [mutant for mutant in mutants if mutant.name in SHORT]
    tree = Tree(ROOT / "build" / ("mutants-short" if options.short else "mutants"))
    tree.copy()
    compiled = [(i, m) for i, m in enumerate(mutants, 1) if m.language == "C++"]
    tree.build(compiled)
    preload()
    check = Check(tree, options.again)
    results = []
    for number, mutant in enumerate(mutants, 1):
        if options.only and not any(word in mutant.name for word in options.only):
            continue
        result = check.one(mutant, number)
        results.append(result)
        print(
            f"{result['outcome']:<14} {result['seconds']:6.1f} s  {mutant.name}: {result['why']}", flush=True
        )
    counted = figures(results)
    print(json.dumps(counted, ensure_ascii=False))
    if options.record:
        sys.path.insert(0, str(ROOT / "bench"))
        from trust import record

        record("mutants", counted)
    enough = counted["killed"] >= GOAL * len(results) and counted["not_applicable"] == 0
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
