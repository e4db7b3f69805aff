"""What quadrature weights change: the figures of ``continuum-ops demo`` and ``convergence``, kept as results.

    python bench/run_weights.py                # both: 10 minutes on two quiet cores
    python bench/run_weights.py convergence    # the operators against their integrals alone: a minute
    python bench/plots.py                      # draws both into docs/figures/weights.svg

Errors do not depend on what else the machine does; the seconds of the demo do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import harness

from continuum_ops.demo import Settings
from continuum_ops.demo.experiment import measure as run_demo
from continuum_ops.experiments.convergence import measure as run_convergence


def demo(threads: int) -> dict[str, Any]:
    settings = Settings(threads=threads)
    document = harness.new_document("demo", asdict(settings))
    result, _ = run_demo(settings)
    return {**result, **document}


def convergence(threads: int) -> dict[str, Any]:
    document = harness.new_document("convergence", {"threads": threads, "seed": 0, "dtype": "float64"})
    return {**document, "rows": run_convergence(small=False, seed=0)}


ITEMS: dict[str, Callable[[int], dict[str, Any]]] = {"demo": demo, "convergence": convergence}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("item", nargs="?", choices=ITEMS, help="this one alone")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    for name in [args.item] if args.item else ITEMS:
        document = ITEMS[name](args.threads)
        path = harness.result_path(name, document, None)
        harness.write_json(path, document)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
