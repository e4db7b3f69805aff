"""The mutation check: every mutant still fits the sources, a few are killed, a survivor would be told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.multiprocessing as mp

import continuum_ops as co

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "ci" / "mutants.py").exists(), reason="ci/ is not in the sdist")


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import mutants

    return mutants


def test_every_mutant_fits_its_source(mutants) -> None:
    found = mutants.all_mutants()
    assert len(found) >= 60
    for language in ("C++", "Triton", "Python"):
        assert sum(mutant.language == language for mutant in found) >= 10
    for mutant in found:
        source = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert mutants.mutated(mutant, source) != source
        for word in mutant.tests.split():
            assert ".py" not in word or (ROOT / "tests" / word.partition("::")[0]).exists(), mutant.name


def test_a_text_that_is_missing_or_twice(mutants) -> None:
    mutant = mutants.Mutant("m", "csrc/x.h", "a = §b§;", "c", "test_x.py")
    with pytest.raises(mutants.Misfit, match=r"m: csrc/x\.h holds its text 0 times"):
        mutants.mutated(mutant, "a = d;")
    with pytest.raises(mutants.Misfit, match="2 times"):
        mutants.mutated(mutant, "a = b; a = b;")


def test_expressions_and_statements_behind_their_numbers(mutants) -> None:
    source = "#pragma once\nvoid f() {\n  a = b;\n  g();\n}\n"
    numbered = [
        (3, mutants.Mutant("e", "csrc/x.h", "a = §b§;", "c", "")),
        (7, mutants.Mutant("s", "csrc/x.h", "  §g();§\n", "", "")),
    ]
    assert mutants.guarded(numbered, source) == (
        '#pragma once\n#include "mutant.h"\nvoid f() {\n'
        "  a = (co_mutant == 3 ? (c) : (b));\n  if (co_mutant == 7) {  } else { g(); }\n}\n"
    )


def outcomes(_: int, folder: Path) -> None:
    """On a tree of its own: a mutant that a test sees, one that none sees, one whose test fails anyway."""
    sys.path.insert(0, str(ROOT / "ci"))
    import mutants

    tests = {
        "test_right.py": "from f import f\ndef test_f(): assert f(2) == 4\n",
        "test_wrong.py": "def test_f(): assert False\n",
    }
    mutants.ROOT = folder / "own"
    tree = mutants.Tree(folder / "scratch")
    for root in (folder / "own", tree.root):
        (root / "tests").mkdir(parents=True)
        (root / "f.py").write_text("def f(x): return x * x\n")
        for name, text in tests.items():
            (root / "tests" / name).write_text(text)
    check = mutants.Check(tree, again=False)
    cases = [
        ("seen", "x * x * x", "test_right.py"),
        ("unseen", "x + x", "test_right.py"),
        ("broken", "x", "test_wrong.py"),
        ("none", "x", "test_right.py -k nothing"),
    ]
    found = [
        check.one(mutants.Mutant(name, "f.py", "§x * x§", new, test), i)
        for i, (name, new, test) in enumerate(cases)
    ]
    mutants.WAIT = 5
    stuck = mutants.Mutant("stuck", "f.py", "§x * x§", "__import__('time').sleep(999)", "test_right.py")
    found.append(check.one(stuck, 4))
    seen, unseen, *neither, waits = [r["outcome"] for r in found]
    assert (seen, unseen, waits) == ("killed", "survived", "killed") and neither == ["not applicable"] * 2
    assert found[0]["why"].startswith("test_right.py::test_f") and "test_wrong.py" in found[2]["why"]
    assert found[4]["why"] == "SIGKILL"
    assert (tree.root / "f.py").read_text() == "def f(x): return x * x\n"
    counted = mutants.figures(found)
    assert (counted["killed"], counted["survived"], counted["Python"]) == (2, 1, "2 of 5 killed")


def test_a_survivor_is_told(tmp_path: Path) -> None:
    mp.spawn(outcomes, (tmp_path,))  # a process that forks must not have threads: one of pytest may


@pytest.mark.slow
@pytest.mark.skipif(not co.backends()["cpu"].startswith("C++"), reason="the extension is not built")
def test_a_few_mutants_are_killed() -> None:
    """ci/mutants.py --short: seven mutants of the three languages, about a minute."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "mutants.py"), "--short", "--again"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.count("\nkilled") + run.stdout.startswith("killed") == 7, run.stdout
