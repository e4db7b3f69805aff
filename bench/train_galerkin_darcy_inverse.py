"""Recover the coefficient of Darcy flow on a coarse grid from a noisy pressure on a fine one (GT 5.3).

``python bench/train_galerkin_darcy_inverse.py`` trains on pressures with 85 x 85 points and coefficients with
29 x 29 points for at most --minutes per noise level, compares with the best constant and writes
bench/results/train-galerkin-darcy-inverse-<machine>.json. The model is "galerkin-darcy-inverse" with fewer
channels and layers, so that 20 minutes on two cores hold enough epochs; --full takes the preset as it is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from continuum_ops import Grid
from continuum_ops.data import darcy, with_noise
from continuum_ops.models import preset
from continuum_ops.training import relative_l2

FINE, COARSE = 85, 29
TRAIN, TEST = 1024, 100  # GT appendix C.1
TRAIN_SEED, TEST_SEED, NOISE_SEED = 1, 2, 3
SMALL = {"d_model": 96, "num_layers": 4, "dim_feedforward": 192}


@dataclass(frozen=True)
class Inverse:
    """Pressures (n, 85^2, 1) and coefficients (n, 29^2, 1) on their grids."""

    pressure: Tensor
    coefficient: Tensor
    fine: Grid
    coarse: Grid


@dataclass(frozen=True)
class Scales:
    """Of the training samples: the pressure at each point, the coefficient at all points together."""

    mean: Tensor
    deviation: Tensor
    coefficient_mean: float
    coefficient_deviation: float


def make_data(n: int, seed: int) -> Inverse:
    data = darcy(n, FINE, seed=seed)
    coarse = data.at(COARSE)
    return Inverse(data.solution, coarse.coefficient, data.grid, coarse.grid)


def make_scales(data: Inverse) -> Scales:
    a = data.coefficient
    return Scales(data.pressure.mean(0), data.pressure.std(0), a.mean().item(), a.std().item())


def noisy_input(u: Tensor, scales: Scales, noise: float, generator: torch.Generator) -> Tensor:
    """(u + noise * N(0, c_i) - mean_i) / sqrt(c_i), c_i the variance of u at point i (GT 23)."""
    perturbed = with_noise(u, noise, seed=generator, deviation=scales.deviation)
    # On the boundary the pressure is 0 in every sample.
    return (perturbed - scales.mean) / torch.where(scales.deviation == 0, 1.0, scales.deviation)


def predict(model: torch.nn.Module, x: Tensor, data: Inverse, scales: Scales) -> Tensor:
    return model(x, data.fine) * scales.coefficient_deviation + scales.coefficient_mean


def evaluate(model: torch.nn.Module, data: Inverse, scales: Scales, noise: float, batch: int = 10) -> Tensor:
    """Relative L2 error of each sample."""
    model.eval()
    generator = torch.Generator().manual_seed(NOISE_SEED)
    errors = []
    with torch.no_grad():
        for i in range(0, len(data.pressure), batch):
            x = noisy_input(data.pressure[i : i + batch], scales, noise, generator)
            a = data.coefficient[i : i + batch]
            errors.append(relative_l2(predict(model, x, data, scales), a, data.coarse.weights))
    return torch.cat(errors)


def constant_errors(data: Inverse, constant: float) -> Tensor:
    return relative_l2(torch.full_like(data.coefficient, constant), data.coefficient, data.coarse.weights)


def best_constant(data: Inverse) -> float:
    """The constant with the smallest mean error on the training samples, to 0.1."""
    low, high = data.coefficient.min().item(), data.coefficient.max().item()
    tried = torch.linspace(low, high, 1 + round(10 * (high - low))).tolist()
    return min(tried, key=lambda c: constant_errors(data, c).mean().item())


def train(data: Inverse, test: Inverse, noise: float, args: argparse.Namespace) -> dict[str, Any]:
    """1cycle over the epochs that fit the time (at most --epochs); noise is drawn anew for every batch."""
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    scales = make_scales(data)
    overrides = {} if args.full else {**SMALL, "decoder_channels": SMALL["d_model"]}
    model = preset("galerkin-darcy-inverse", **overrides)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(args.seed)
    per_epoch = len(data.pressure) // args.batch

    def step(rows: Tensor, update: bool) -> float:
        model.train()
        x = noisy_input(data.pressure[rows], scales, noise, generator)
        prediction = predict(model, x, data, scales)
        loss = relative_l2(prediction, data.coefficient[rows], data.coarse.weights).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if update:
            optimizer.step()
        return loss.item()

    times = []
    for _ in range(6):  # to see how many epochs fit; nothing is learned
        start = time.perf_counter()
        step(torch.arange(args.batch), update=False)
        times.append(time.perf_counter() - start)
    pace = sorted(times)[3] * per_epoch
    epochs = max(1, min(args.epochs, int(0.9 * 60 * args.minutes / pace)))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        args.lr,
        total_steps=epochs * per_epoch,
        pct_start=0.3,
        div_factor=1e4,
        final_div_factor=1.0,
    )
    history: list[dict[str, float]] = []
    for epoch in range(epochs):
        order = torch.randperm(len(data.pressure), generator=generator)
        losses = []
        for i in range(per_epoch):
            losses.append(step(order[i * args.batch : (i + 1) * args.batch], update=True))
            schedule.step()
        spent = time.perf_counter() - began
        history.append({"epoch": epoch + 1, "loss": sum(losses) / len(losses), "seconds": spent})
        if epoch % 5 == 4 or epoch + 1 == epochs:
            harness.progress(
                f"noise {noise}: epoch {epoch + 1} of {epochs}, loss {history[-1]['loss']:.4f}, {spent:.0f} s"
            )
        if spent > 60 * args.minutes:
            break
    seconds = time.perf_counter() - began
    errors = evaluate(model, test, scales, noise)
    constant = constant_errors(test, best_constant(data))
    return {
        "noise": noise,
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": len(history),
        "epochs_planned": epochs,
        "seconds": seconds,
        "mean": errors.mean().item(),
        "median": errors.median().item(),
        "constant_mean": constant.mean().item(),
        "factor": (constant.mean() / errors.mean()).item(),
        "history": history,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.01], help="levels (GT: 0, 0.01, 0.1)")
    parser.add_argument("--full", action="store_true", help="the preset with its 2.38 million parameters")
    parser.add_argument("--minutes", type=float, default=20.0, help="limit for each noise level")
    parser.add_argument("--epochs", type=int, default=100, help="at most (default: 100, as in GT)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3, help="maximum of the 1cycle schedule")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1127802, help="that of GT appendix C.1")
    parser.add_argument("--train", type=int, default=TRAIN, help="training samples")
    parser.add_argument("--test", type=int, default=TEST, help="test samples")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    for name in ("minutes", "epochs", "batch", "lr", "threads", "train", "test"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    if args.train < max(args.batch, 2):
        parser.error(f"--train must be at least --batch and 2, got {args.train} and {args.batch}")
    if min(args.noise) < 0:
        parser.error(f"--noise must be >= 0, got {args.noise}")
    return args


def render(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| noise | parameters | epochs | minutes | relative L2 | best constant | factor |",
        "|" + "---|" * 7,
    ]
    for r in rows:
        cells = [f"{r['noise']:g}", f"{r['parameters']:,}", str(r["epochs"]), f"{r['seconds'] / 60:.1f}"]
        cells += [f"{100 * r['mean']:.2f} %", f"{100 * r['constant_mean']:.1f} %", f"{r['factor']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    start = time.perf_counter()
    data, test = make_data(args.train, TRAIN_SEED), make_data(args.test, TEST_SEED)
    made = time.perf_counter() - start
    harness.progress(f"data: {args.train} + {args.test} samples in {made:.1f} s")
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    document = harness.new_document("train-galerkin-darcy-inverse", {**settings, "data_seconds": made})
    document["rows"] = [train(data, test, noise, args) for noise in args.noise]
    path = harness.result_path("train-galerkin-darcy-inverse", document, args.out)
    harness.write_json(path, document)
    print(render(document["rows"]))
    harness.progress(f"written to {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
