"""Plots of the committed results, docs/figures/*.svg: what weights change, rooflines, cost against N.

    python bench/plots.py                 # every machine with results in bench/results/
    python bench/plots.py --machine NAME

A roofline bounds an operator by what the machine was measured to do: flops by the FMA rate, bytes by the
bandwidth of a triad. The shares count exponentials too: flops / FMA rate + exponentials / exp2 rate, over
the time.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "docs" / "figures"
COLOURS = ["#0b6e4f", "#c44900", "#2f4b7c", "#8f2d56", "#6c757d"]

Document = Mapping[str, Any]


PAIRS = ", pair by pair"  # of a form that computes every score, where the operator itself does not


def ours(document: Document, passes: str, form: str = "") -> list[Mapping[str, Any]]:
    """This package's rows of a pass, memory as it is by default, smallest N first."""
    rows = [
        row
        for row in document["rows"]
        if row.get("passes", row["table"].split(", ")[0]) == passes
        and row["candidate"] == document["op"] + form
        and row["allocator"] == "default"
        and "ms" in row
        and not any(word in row["table"] for word in ("weights too", "local"))
    ]
    return sorted(rows, key=lambda row: tuple(str(v).zfill(9) for v in row["case"].values()))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Exponent p of y ~ x^p by least squares of the logarithms."""
    x, y = ([math.log(v) for v in column] for column in zip(*points, strict=True))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def bytes_moved(document: Document, row: Mapping[str, Any]) -> float | None:
    """Inputs and outputs once each, float32; None where the case does not say."""
    case, backward = row["case"], 2 if row["passes"] != "forward" else 1
    if document["op"] == "continuum_attention":
        heads, batch = document["settings"]["H"], document["settings"]["B"]
        return 4.0 * batch * heads * case["N"] * 4 * case["d"] * backward
    if document["op"] == "position_attention" and "N" in case:
        return 4.0 * case["N"] * 8 * 64 * (1 + 2) * backward  # B = 8, C = 64: value, and H = 2 outputs
    return None


def roofline(documents: Sequence[Document], path: Path) -> None:
    """GFLOP/s against flops per byte, of each operator whose benchmark counts flops."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    ceilings = next(iter(documents[0]["ceilings"]["threads"].values()))
    peak, bandwidth = ceilings["fma_gflops"], ceilings["triad_gb_per_s"]
    intensities = [2.0**k for k in range(-1, 18)]
    axes.plot(intensities, [min(peak, bandwidth * i) for i in intensities], color="black", lw=1.5)
    axes.annotate(f"FMA {peak:.0f} GFLOP/s", (intensities[-1], peak), ha="right", va="bottom")
    axes.annotate(f"{bandwidth:.0f} GB/s", (1, bandwidth), ha="left", va="top")
    for document, colour in zip(documents, COLOURS, strict=False):
        for passes, marker in (("forward", "o"), ("forward + backward", "s")):
            points = []
            for row in [*ours(document, passes), *ours(document, passes, PAIRS)]:
                moved = bytes_moved(document, row)
                if moved and "gflops" in row:
                    points.append((row["gflops"] * row["ms"] * 1e6 / moved, row["gflops"]))
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    marker,
                    color=colour,
                    ms=5,
                    label=f"{document['op']}, {passes}",
                )
    axes.set(xscale="log", yscale="log", xlabel="flops per byte of inputs and outputs", ylabel="GFLOP/s")
    axes.set_ylim(bottom=1)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def cost(document: Document, path: Path) -> None:
    """Milliseconds against N, a line per d and pass, with the fitted exponent."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for passes, style in (("forward", "-o"), ("forward + backward", "--s")):
        colours = iter(COLOURS)
        for form in ("", PAIRS):
            rows = [row for row in ours(document, passes, form) if "N" in row["case"]]
            for d in dict.fromkeys(row["case"].get("d") for row in rows):
                points = [(row["case"]["N"], row["ms"]) for row in rows if row["case"].get("d") == d]
                if len(points) > 1:
                    label = f"{passes}{form}{'' if d is None else f', d = {d}'}: N^{slope(points):.2f}"
                    axes.plot(*zip(*points, strict=True), style, color=next(colours), ms=4, label=label)
    axes.set(xscale="log", yscale="log", xlabel="N = M", ylabel="ms", title=document["op"])
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def shares(documents: Sequence[Document], path: Path) -> None:
    """What fraction of the ceiling each case reaches, as bars."""
    import matplotlib.pyplot as plt

    bars = [
        (
            f"{row['candidate']}, {', '.join(f'{k} {v}' for k, v in row['case'].items())}, {passes}",
            row["ceiling_fraction"],
        )
        for document in documents
        for passes in ("forward", "forward + backward")
        for row in [*ours(document, passes), *ours(document, passes, PAIRS)]
        if "ceiling_fraction" in row
    ]
    figure, axes = plt.subplots(figsize=(8, 0.24 * len(bars) + 0.8), layout="constrained")
    names, values = zip(*reversed(bars), strict=True)
    axes.barh(range(len(bars)), values, color=COLOURS[0])
    axes.set_yticks(range(len(bars)), names, fontsize=7)
    axes.set(xlim=(0, 1), xlabel="fraction of what FMA and exp2 rates alone would allow")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def weights(convergence: Document, demo: Document, path: Path) -> None:
    """README.md's picture: errors on uneven meshes, of an operator and of a trained model, by weights."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    rules = {
        "equal weights, uneven points": "equal weights",
        "trapezoid, uneven points": "quadrature weights",
    }
    for (rule, label), colour, marker in zip(rules.items(), COLOURS[1::-1], "so", strict=True):
        (row,) = (
            r
            for r in convergence["rows"]
            if (r["operator"], r["dimension"], r["rule"]) == ("continuum attention, self", 1, rule)
        )
        left.plot(row["points"], row["errors"], f"-{marker}", color=colour, ms=4, label=label)
    left.set(xscale="log", yscale="log", xlabel="points of an uneven mesh", ylabel="relative error")
    left.set_title("attention against its integral", fontsize=10)
    left.legend(fontsize=8)
    names = list(dict.fromkeys(row["mesh"] for row in demo["meshes"]))
    for shift, (kind, colour) in zip((-0.2, 0.2), (("equal", 1), ("trapezoid", 0)), strict=True):
        medians = [100 * r["median"] for r in demo["meshes"] if r["weights"] == kind]
        bars = right.bar(
            [i + shift for i in range(len(names))],
            medians,
            0.38,
            color=COLOURS[colour],
            label=f"{kind} weights",
        )
        right.bar_label(bars, fmt="%.2f", fontsize=7)
    right.set_xticks(range(len(names)), [name.replace(" (", "\n(") for name in names], fontsize=8)
    right.set(ylabel="median error, %")
    right.set_title("a trained operator, by mesh of the test", fontsize=10)
    right.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def page(machine: Mapping[str, Any], name: str, costs: Sequence[str]) -> str:
    lines = [f"## {machine['cpu']}", "", report.render_machine(machine), ""]
    lines += [f"![Roofline](figures/roofline-{name}.svg)", "", f"![Shares](figures/shares-{name}.svg)", ""]
    for op in costs:
        lines += [f"![Cost](figures/cost-{op}-{name}.svg)", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", help="name of a machine (default: all)")
    wanted = parser.parse_args().machine
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "continuum_ops"  # the same results, the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    found: dict[str, list[Document]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        if isinstance(document, dict) and document.get("ceilings") and document.get("rows"):
            name = document["machine"]["name"]
            if wanted in (None, name):
                found.setdefault(name, []).append(document)
    FIGURES.mkdir(parents=True, exist_ok=True)
    weights(
        *(
            json.loads(
                sorted(RESULTS.glob(f"{op}-*.json"))[-1].read_text()
            )  # errors are those of any machine
            for op in ("convergence", "demo")
        ),
        FIGURES / "weights.svg",
    )
    text = [
        "# Rooflines and cost",
        "",
        "Written by `bench/plots.py` from `bench/results/`. No GPU figure is measured yet.",
        "",
    ]
    for name, documents in found.items():
        roofline(documents, FIGURES / f"roofline-{name}.svg")
        shares(documents, FIGURES / f"shares-{name}.svg")
        costs = [
            d for d in documents if len({row["case"].get("N") for row in ours(d, "forward")} - {None}) > 1
        ]
        for document in costs:
            cost(document, FIGURES / f"cost-{document['op']}-{name}.svg")
        text.append(page(documents[0]["machine"], name, [d["op"] for d in costs]))
    (ROOT / "docs" / "plots.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
