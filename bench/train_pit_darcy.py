"""PiT on Darcy flow, trained at 43 x 43, tested without retraining up to 421 x 421 (PiT 4.3, F.3).

    python bench/train_pit_darcy.py     # prints the table, writes bench/results/pit_darcy-<machine>.json
    python bench/train_pit_darcy.py --steps 300 --train-samples 200 --out /tmp/short.json

Two models are trained from the same seed on the same data: one integrates with the trapezoid weights of each
mesh, one sums over the points as in the paper. Each is tested as it was trained, and the first also with its
weights taken away. Data are generated first, outside the time of the training.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import harness
import torch

from continuum_ops.data import DarcyFlow
from continuum_ops.demo import darcy
from continuum_ops.demo.settings import DarcySettings

# Chen and Wu, table 16 and section 4.3: 313,613 parameters, 500 epochs of 1024 samples, one RTX 3090.
PAPER = {43: 0.00974, 421: 0.0450}
# Less than ten minutes of training on two cores.
SETTINGS = DarcySettings(
    train_samples=1000,
    train_solver=211,
    validation_samples=40,
    test_samples=100,
    width=64,
    latent=22,
    steps=5000,
    learning_rate=3e-3,
    validate_every=250,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, help="result file; default: bench/results/pit_darcy-<machine>.json"
    )
    for field in fields(DarcySettings):
        default = getattr(SETTINGS, field.name)
        if isinstance(default, (int, float)):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    seed, threads, out = (options.pop(name) for name in ("seed", "threads", "out"))
    settings = DarcySettings(**{**asdict(SETTINGS), **options})
    torch.set_num_threads(threads)

    start = time.perf_counter()
    training, tests = darcy.training_data(settings, seed), darcy.test_data(settings, seed)
    document = harness.new_document(
        "pit_darcy", {"seed": seed, "threads": threads, **asdict(settings), "constant_mode": False}
    )
    document["data_seconds"] = time.perf_counter() - start
    document["paper"] = {str(resolution): error for resolution, error in PAPER.items()}
    document["models"] = [run(training, tests, settings, seed, weights) for weights in ("mesh", "equal")]
    path = harness.result_path("pit_darcy", document, out)
    harness.write_json(path, document)
    print(render(document))
    print(f"wrote {path}")


def run(
    training: DarcyFlow, tests: DarcyFlow, settings: DarcySettings, seed: int, weights: darcy.Weights
) -> dict[str, Any]:
    """Train with one kind of weights; test with it, and a model with weights also without them."""
    trained = darcy.train(training, settings, seed, weights)
    rows, _ = darcy.test(trained.model, tests, weights, settings)
    if weights == "mesh":
        rows += darcy.test(trained.model, tests, "equal", settings)[0]
    rates = {
        name: module.rate.tolist()
        for name, module in trained.model.model.named_modules()
        if hasattr(module, "rate_parameter")
    }
    return {
        "trained_with": "trapezoid" if weights == "mesh" else weights,
        "parameters": trained.parameters,
        **trained.fitted._asdict(),
        "rates": rates,
        "rows": rows,
    }


def render(document: dict[str, Any]) -> str:
    """Markdown: mean relative L2 error by grid, a column for each way of training and testing."""
    columns: dict[str, dict[int, float]] = {}
    for model in document["models"]:
        for row in model["rows"]:
            title = f"trained with {model['trained_with']} weights"
            if row["weights"] != model["trained_with"]:
                title += f", tested with {row['weights']} ones"
            columns.setdefault(title, {})[row["resolution"]] = row["mean"]
    paper = {int(resolution): error for resolution, error in document["paper"].items()}
    columns["paper (equal weights, 500 epochs, GPU)"] = paper
    lines = ["| grid | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for resolution in document["settings"]["resolutions"]:
        cells = [f"{100 * c[resolution]:.2f} %" if resolution in c else "" for c in columns.values()]
        lines.append(f"| {resolution} x {resolution} | " + " | ".join(cells) + " |")
    lines += [
        "",
        *(
            f"{m['trained_with']}: {m['parameters']:,} parameters, trained in {m['seconds']:.0f} s "
            f"({m['cpu_seconds']:.0f} s of CPU time)."
            for m in document["models"]
        ),
        f"Data: {document['data_seconds']:.0f} s.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
