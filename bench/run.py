"""Every benchmark in one command, and how far its ratios are from the committed ones of the same machine.

    python bench/run.py            # all sizes: bench/results/, the tables and plots of README.md and docs/
    python bench/run.py --short    # fewer sizes and rounds, in build/bench; compares with bench/results/
    python bench/run.py --short --only position_attention overhead
    python bench/run.py --short --compare-only    # the comparison of the last short run once more
    python bench/run.py --list

Each row of README.md's table is printed with its ratio there, its ratio now and the deviation, then a
summary of all ratios that both results have. A deviation is reported, it never fails the run.

Each benchmark is a process of its own; one that fails is reported at the end, and the others run. A form
whose package is not there is "not installed", one that memory does not hold says how much it would need.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness
import readme
import report

BENCH = Path(__file__).resolve().parent
TOLERANCE = 0.2  # a ratio within this of the committed one is reproduced


class Benchmark(NamedTuple):
    script: str
    full: Sequence[str] = ()
    short: Sequence[str] | None = ()  # None: not in the short run


BENCHMARKS = {
    "continuum_attention": Benchmark(
        "bench_continuum_attention.py", ["--memory"], ["--short", "--sizes", "4096", "16384", "--dims", "16"]
    ),
    "position_attention": Benchmark("bench_position_attention.py", [], ["--short", "--grids"]),
    "patch_attention": Benchmark("bench_patch_attention.py", [], ["--sides", "416", "--rounds", "3"]),
    "fourier_patch_attention": Benchmark("bench_fourier_patch_attention.py", [], ["--rounds", "3"]),
    "galerkin_attention": Benchmark("bench_galerkin_attention.py", [], ["--rounds", "3"]),
    "fourier_attention": Benchmark("bench_fourier_attention.py", [], ["--rounds", "3"]),
    "attention_layers": Benchmark("bench_attention_layers.py", [], ["--side", "104", "--rounds", "3"]),
    "overhead": Benchmark("bench_overhead.py", [], ["--threads", "1", "--heads", "1", "8", "--rounds", "7"]),
    "patch_models": Benchmark("bench_patch_models.py", [], None),
    "distributed": Benchmark("bench_distributed.py", [], None),
}


class Ratio(NamedTuple):
    where: str
    before: float
    now: float

    @property
    def change(self) -> float:
        return self.now / self.before - 1


def ratios(document: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], float]]:
    """(Where, time over the time of the row's reference) for every row that has one, references left out."""
    for row in document.get("rows") or []:
        value = row.get("speedup", row.get("ratio"))
        if value is None or value == 1.0:
            continue
        yield (row["table"], tuple(row["case"].items()), row["candidate"], row["allocator"]), value


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Ratio]:
    """The ratios that both have."""
    known = dict(ratios(before))
    return [
        Ratio(
            f"{place[2]}; {place[0]}; {', '.join(f'{k} {v}' for k, v in place[1])}; {place[3]}",
            known[place],
            r,
        )
        for place, r in ratios(now)
        if place in known
    ]


def headlines(
    before: Mapping[str, readme.Document], now: Mapping[str, readme.Document], chosen: Sequence[str]
) -> str:
    """README.md's table of these benchmarks: its ratios, those just measured, and how far they are apart."""
    lines, near, rows = [], 0, [h for h in readme.HEADLINES if h.op in chosen]
    for h in rows:
        committed = h.ratio(before[h.op])
        cells = [h.what, h.title, f"{committed:.2f}"]
        try:
            # Also where the benchmark failed: a KeyError is a LookupError.
            ours, other = h.rows(now[h.op])
        except LookupError:
            lines.append([*cells, "not measured", ""])
            continue
        ratio = Ratio(h.what, committed, h.ratio(now[h.op]))
        near += abs(ratio.change) <= TOLERANCE
        disturbed = " ~" if min(ours["clean_samples"], other["clean_samples"]) < 2 else ""
        lines.append([*cells, f"{ratio.now:.2f}{disturbed}", f"{ratio.change:+.0%}"])
    header = ["forward + backward, float32", "beside", "README.md", "now", "deviation"]
    return (
        f"{report.table(header, lines)}\n\n{near} of {len(rows)} ratios of README.md within {TOLERANCE:.0%}; "
        "~ where other processes disturbed all samples but one."
    )


def render(found: Mapping[str, Sequence[Ratio]]) -> str:
    """A line per benchmark, then each ratio that is not reproduced."""
    lines, off = [], []
    for name, these in found.items():
        if not these:
            lines.append([name, "0", "", ""])
            continue
        near = sum(abs(r.change) <= TOLERANCE for r in these)
        middle = statistics.median(r.now / r.before for r in these)
        lines.append([name, str(len(these)), str(near), f"{middle:.2f}"])
        off += [[r.where, f"{r.before:.2f}", f"{r.now:.2f}"] for r in these if abs(r.change) > TOLERANCE]
    header = ["benchmark", "ratios in both", f"within {TOLERANCE:.0%}", "median now / committed"]
    text = report.table(header, lines)
    return f"{text}\n\n{report.table(['ratio', 'committed', 'now'], off)}" if off else text


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="fewer sizes and rounds; bench/results/ stays")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help="these alone")
    parser.add_argument("--out", type=Path, help="folder of the result files (short: build/bench)")
    parser.add_argument("--compare-only", action="store_true", help="measure nothing, compare what --out has")
    parser.add_argument("--list", action="store_true", help="what would run")
    args = parser.parse_args(argv)
    args.chosen = [
        name for name in args.only or BENCHMARKS if not args.short or BENCHMARKS[name].short is not None
    ]
    if args.out is None:
        args.out = harness.ROOT / "build" / "bench" if args.short else harness.RESULTS
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    commands = {}
    machine = harness.describe_machine()["name"]
    for name in args.chosen:
        benchmark = BENCHMARKS[name]
        options = benchmark.short if args.short else benchmark.full
        path = args.out / f"{name}-{machine}.json"
        commands[name] = [sys.executable, str(BENCH / benchmark.script), *(options or ()), "--out", str(path)]
    if args.list:
        for name, command in commands.items():
            print(f"{name}: {' '.join(command[1:])}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    committed = {name: harness.RESULTS / f"{name}-{machine}.json" for name in commands}
    before = {name: json.loads(path.read_text()) for name, path in committed.items() if path.is_file()}
    shown = readme.headline_machine()
    table = readme.headline_documents(shown)
    failed, now = [], {}
    for name, command in commands.items():
        path = Path(command[-1])
        if not args.compare_only:
            start = time.perf_counter()
            code = subprocess.run(command).returncode
            harness.progress(
                f"{name}: {time.perf_counter() - start:.0f} s{f', exit code {code}' if code else ''}"
            )
            if code:
                failed.append(name)
                continue
        if path.is_file():
            now[name] = json.loads(path.read_text())
    print(headlines(table, now, args.chosen))
    if shown != machine:
        print(f"README.md's ratios are of {shown}, these of {machine}.")
    found = {name: compare(before[name], now[name]) for name in now if name in before}
    print(f"\n{render(found) if found else f'no committed results of {machine}'}")
    if not (args.short or args.compare_only) and args.out == harness.RESULTS:
        for script in ("readme.py", "plots.py"):
            subprocess.run([sys.executable, str(BENCH / script)], check=True)
    if failed:
        harness.progress(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
