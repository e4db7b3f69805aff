"""Train the Galerkin and Fourier transformers on Burgers' equation (GT 5.1), evaluate on other grids.

``python bench/train_galerkin_burgers.py`` trains "galerkin-burgers" and "fourier-burgers" on 512 points for
at most --minutes each, evaluates on 512, 2048 and 8192 points without retraining and writes
bench/results/train-galerkin-burgers-<machine>.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from continuum_ops import Grid
from continuum_ops.data import BurgersData, burgers
from continuum_ops.models import preset
from continuum_ops.training import relative_l2, relative_l2_h1

NAMES = ("galerkin-burgers", "fourier-burgers")
TRAIN, TEST = 1024, 100  # GT appendix C.1
TRAIN_SEED, TEST_SEED = 1, 2
POINTS, EVALUATE = 512, (512, 2048, 8192)


def evaluate(model: torch.nn.Module, data: BurgersData, batch: int = 10) -> dict[str, float]:
    """Mean, median and maximum over the samples of the relative L2 error."""
    model.eval()
    with torch.no_grad():
        parts = [
            relative_l2(
                model(data.input[i : i + batch], data.grid), data.target[i : i + batch], data.grid.weights
            )
            for i in range(0, len(data.input), batch)
        ]
    errors = torch.cat(parts)
    return {"mean": errors.mean().item(), "median": errors.median().item(), "max": errors.max().item()}


def subsample(data: BurgersData, every: int) -> BurgersData:
    grid = Grid.uniform(len(data.grid) // every, kind="periodic", dtype=data.grid.dtype)
    return BurgersData(grid, data.input[:, ::every], data.target[:, ::every])


def step_once(model: torch.nn.Module, data: BurgersData, rows: Tensor, optimizer: Any) -> float:
    """One step on the loss of GT section 3 with gamma = 0.1 h, gradients clipped at 1 (appendix C.1)."""
    prediction = model(data.input[rows], data.grid)
    loss = relative_l2_h1(prediction, data.target[rows], data.grid, 0.1 / len(data.grid)).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def seconds_per_step(name: str, data: BurgersData, args: argparse.Namespace, steps: int = 12) -> float:
    """On a model of its own, thrown away afterwards."""
    model = preset(name).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step_once(model, data, torch.arange(args.batch), optimizer)
        times.append(time.perf_counter() - start)
    return sorted(times)[steps // 2]


def train(
    name: str, data: BurgersData, tests: Sequence[BurgersData], args: argparse.Namespace
) -> dict[str, Any]:
    """1cycle (from and to 1e-4 of the maximum, warm-up 30 %) over the epochs that fit the time."""
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    model = preset(name)
    coarse = subsample(data, args.subsample)
    share = args.fine_share if args.subsample > 1 else 1.0
    pace = share * seconds_per_step(name, data, args) + (1 - share) * seconds_per_step(name, coarse, args)
    per_epoch = len(data.input) // args.batch
    epochs = max(1, min(args.epochs, int(0.9 * 60 * args.minutes / (pace * per_epoch))))
    first_fine = round((1 - share) * epochs)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        args.lr,
        total_steps=epochs * per_epoch,
        pct_start=0.3,
        div_factor=1e4,
        final_div_factor=1.0,
    )
    history: list[dict[str, float]] = []
    generator = torch.Generator().manual_seed(args.seed)
    out_of_time = False
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(len(data.input), generator=generator)
        losses = []
        for i in range(per_epoch):
            rows = order[i * args.batch : (i + 1) * args.batch]
            losses.append(step_once(model, data if epoch >= first_fine else coarse, rows, optimizer))
            schedule.step()
        spent = time.perf_counter() - began
        history.append({"epoch": epoch + 1, "loss": sum(losses) / len(losses), "seconds": spent})
        if epoch % 5 == 4 or epoch + 1 == epochs:
            harness.progress(
                f"{name}: epoch {epoch + 1} of {epochs}, loss {history[-1]['loss']:.5f}, {spent:.0f} s"
            )
        if spent > 60 * args.minutes:
            out_of_time = True
            break
    seconds = time.perf_counter() - began
    errors = {str(len(test.grid)): evaluate(model, test) for test in tests}
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": len(history),
        "epochs_planned": epochs,
        "out_of_time": out_of_time,
        "seconds": seconds,
        "relative_l2": errors,
        "history": history,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--minutes", type=float, default=10.0, help="limit for the training of each model")
    parser.add_argument("--epochs", type=int, default=100, help="at most (default: 100, as in GT)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3, help="maximum of the 1cycle schedule")
    parser.add_argument(
        "--subsample",
        type=int,
        default=4,
        help="train the first epochs on every SUBSAMPLE-th point (default: 4)",
    )
    parser.add_argument("--fine-share", type=float, default=0.3, help="share of the epochs on all points")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1127802, help="that of GT appendix C.1")
    parser.add_argument("--train", type=int, default=TRAIN, help="training samples")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    for name in ("minutes", "epochs", "batch", "lr", "threads", "train"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    if args.subsample < 1 or POINTS % args.subsample:
        parser.error(f"--subsample must divide {POINTS}, got {args.subsample}")
    if not 0 < args.fine_share <= 1:
        parser.error(f"--fine-share must be in (0, 1], got {args.fine_share}")
    if args.train < args.batch:
        parser.error(f"--train must be at least --batch, got {args.train} and {args.batch}")
    return args


def render(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| model | parameters | epochs | minutes | " + " | ".join(f"n = {n}" for n in EVALUATE) + " |"]
    lines.append("|" + "---|" * (4 + len(EVALUATE)))
    for row in rows:
        cells = [f"{100 * row['relative_l2'][str(n)]['mean']:.3f} %" for n in EVALUATE]
        head = f"| {row['model']} | {row['parameters']:,} | {row['epochs']} | {row['seconds'] / 60:.1f} | "
        lines.append(head + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    start = time.perf_counter()
    data = burgers(args.train, POINTS, seed=TRAIN_SEED)
    tests = [burgers(TEST, n, seed=TEST_SEED) for n in EVALUATE]
    made = time.perf_counter() - start
    harness.progress(f"data: {args.train} + {TEST} samples in {made:.1f} s")
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    document = harness.new_document("train-galerkin-burgers", {**settings, "data_seconds": made})
    document["rows"] = []
    for name in args.models:
        document["rows"].append(train(name, data, tests, args))
        if not math.isfinite(document["rows"][-1]["history"][-1]["loss"]):
            raise SystemExit(f"{name}: the loss is not finite")
    path = harness.result_path("train-galerkin-burgers", document, args.out)
    harness.write_json(path, document)
    print(render(document["rows"]))
    harness.progress(f"written to {path}")
    harness.progress(json.dumps({row["model"]: row["relative_l2"] for row in document["rows"]}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
