"""ViT-NO and FANO on Darcy flow, trained at 104 x 104, tested without retraining at 208 and 416 (CA 6.2.2).

    python bench/train_patch_darcy.py     # prints the table, writes bench/results/patch_darcy-<machine>.json
    python bench/train_patch_darcy.py --models fano --fano-steps 200 --train-samples 200 --out /tmp/short.json

The samples lie at cell centres, (i + 1/2) / n. Those are the odd nodes of a grid with 2 n + 1 nodes, on which
the equation is solved, so the coefficient of a test sample is one function and 104, 208 and 416 cells cut
the square into the same 13 x 13 patches, of 8, 16 and 32 points an axis. Data are generated first, outside
the time of the training.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor, nn

from continuum_ops import Grid
from continuum_ops.data import DarcyFlow, darcy
from continuum_ops.data.darcy import HIGH, LOW
from continuum_ops.models import FANO, ViTNO
from continuum_ops.training import PointwiseNormalizer, fit, relative_l2
from continuum_ops.training.progress import progress_bar

MODELS = {"vitno": ViTNO, "fano": FANO}
CELLS = (104, 208, 416)


@dataclass(frozen=True)
class Settings:
    """Less than ten minutes of training each on two cores. Fixed steps, not time.

    ViT-NO and FANO differ in the steps, by their speed, and in how a patch becomes periodic: ViT-NO's lift
    mirrors it (CA 6.2.3) and keeps all modes that it then has; in FANO's attention that would cost several
    times as much.
    """

    train_samples: int = 1000
    validation_samples: int = 20
    test_samples: int = 40
    num_patches: int = 13
    vitno_modes: int = 8
    fano_modes: int = 4
    d_model: int = 32
    num_heads: int = 4
    num_layers: int = 4
    dim_feedforward: int = 64
    scale: float = 169.0  # mean over a patch, 13 x 13 of them
    waves: int = 3
    final_spectral: int = 16
    smoothing_eps: float = 1e-3  # as in CA 6.2.3; patches leave jumps between them
    batch_size: int = 1
    vitno_steps: int = 3600
    fano_steps: int = 2600
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    warm_up: float = 0.1
    validate_every: int = 600


class ScaledModel(nn.Module):
    """A model between normalised functions.

    The two values of the coefficient become -1 and 1; the model gives what the solution has beyond the mean
    of the training samples at each point, in units of its root mean square. The mean is known at nodes and
    interpolated. All are 0 on the boundary, like what the smoothing lets pass.

    The input function has, beside the coefficient, sin and cos of pi 2^k x along each axis, k < waves: from
    the coordinates alone, which the model appends, attention learns slowly which patches are near.
    """

    def __init__(self, model: nn.Module, solution: PointwiseNormalizer, waves: int) -> None:
        super().__init__()
        self.model = model
        self.solution = solution
        self.waves = waves
        self.register_buffer("spread", solution.std.square().mean().sqrt())

    def forward(self, coefficient: Tensor, grid: Grid) -> Tensor:
        """Coefficients (B, N, 1) at the points of a grid -> solutions (B, N, 1)."""
        u = (coefficient - (HIGH + LOW) / 2) * (2 / (HIGH - LOW))
        if self.waves:
            angles = [math.pi * 2**k * grid.points.to(u.dtype) for k in range(self.waves)]
            positions = torch.cat([f(x) for x in angles for f in (torch.sin, torch.cos)], dim=-1)
            u = torch.cat([u, positions.expand(len(u), -1, -1)], dim=-1)
        return self.solution.center(grid) + self.spread * self.model(u, grid)


def at_cells(data: DarcyFlow, cells: int) -> tuple[Tensor, Tensor, Grid]:
    """Coefficients and solutions (n, cells^2, 1) at the centres of cells x cells cells, and their grid."""
    nodes = data.at(2 * cells + 1)

    def centres(samples: Tensor) -> Tensor:
        return samples.unflatten(1, nodes.grid.shape)[:, 1::2, 1::2].flatten(1, 2)

    grid = Grid.uniform((cells, cells), kind="cell", dtype=nodes.solution.dtype)
    return centres(nodes.coefficient), centres(nodes.solution), grid


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cells", nargs="+", type=int, default=list(CELLS), help="the first is trained on")
    parser.add_argument(
        "--out", type=Path, help="result file; default: bench/results/patch_darcy-<machine>.json"
    )
    for field in fields(Settings):
        default = field.default
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    seed, threads, models, cells, out = (
        options.pop(name) for name in ("seed", "threads", "models", "cells", "out")
    )
    settings = Settings(**options)
    torch.set_num_threads(threads)

    start = time.perf_counter()
    samples = settings.train_samples + settings.validation_samples
    learned = darcy(samples, 2 * cells[0] + 1, seed=2 * seed, constant_mode=False, progress=True)
    unseen = darcy(
        settings.test_samples, 2 * cells[-1] + 1, seed=2 * seed + 1, constant_mode=False, progress=True
    )
    tests = {n: at_cells(unseen, n) for n in cells}
    document = harness.new_document(
        "patch_darcy", {"seed": seed, "threads": threads, "constant_mode": False, **asdict(settings)}
    )
    document["data_seconds"] = time.perf_counter() - start
    document["models"] = [run(name, learned, tests, settings, cells[0], seed) for name in models]
    path = harness.result_path("patch_darcy", document, out)
    harness.write_json(path, document)
    print(render(document))
    print(f"wrote {path}")


def run(
    name: str,
    learned: DarcyFlow,
    tests: dict[int, tuple[Tensor, Tensor, Grid]],
    settings: Settings,
    cells: int,
    seed: int,
) -> dict[str, Any]:
    """Train one model on one grid, test it on all."""
    torch.manual_seed(seed)
    vitno = name == "vitno"
    steps = settings.vitno_steps if vitno else settings.fano_steps
    network = MODELS[name](
        1 + 4 * settings.waves,
        1,
        2,
        num_patches=settings.num_patches,
        patch_size=cells // settings.num_patches,
        modes=settings.vitno_modes if vitno else settings.fano_modes,
        periodic_extension=vitno,
        d_model=settings.d_model,
        num_heads=settings.num_heads,
        num_layers=settings.num_layers,
        dim_feedforward=settings.dim_feedforward,
        scale=settings.scale,
        norm_first=True,
        final_spectral=settings.final_spectral or None,
        smoothing="dirichlet",
        smoothing_eps=settings.smoothing_eps,
    )
    n = settings.train_samples
    model = ScaledModel(
        network,
        PointwiseNormalizer(learned[:n].at(cells + 1).solution, learned.at(cells + 1).grid),
        settings.waves,
    )
    coefficient, solution, grid = at_cells(learned, cells)

    def loss(rows: Tensor) -> Tensor:
        return relative_l2(model(coefficient[rows], grid), solution[rows], grid.weights).mean()

    def validate() -> float:
        return errors(model, coefficient[n:], solution[n:], grid).median().item()

    with progress_bar(steps, f"training {name}", "step") as bar:
        fitted = fit(
            model.parameters(),
            loss,
            n,
            steps=steps,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            warm_up=settings.warm_up,
            validate=validate,
            validate_every=settings.validate_every,
            bar=bar,
        )
    rows = []
    for resolution, (a, u, on) in tests.items():
        start = time.perf_counter()
        error = errors(model, a, u, on)
        rows.append(
            {
                "cells": resolution,
                "median": error.median().item(),
                "mean": error.mean().item(),
                "worst": error.max().item(),
                "seconds": time.perf_counter() - start,
            }
        )
    parameters = sum(p.numel() for p in model.parameters())
    return {"model": name, "parameters": parameters, **fitted._asdict(), "rows": rows}


@torch.no_grad()
def errors(model: ScaledModel, coefficient: Tensor, solution: Tensor, grid: Grid) -> Tensor:
    """Relative L2 errors (n,), in evaluation mode: modes that a patch lacks would be an error in training."""
    model.eval()
    predictions = [model(a, grid) for a in coefficient.split(4 if len(grid) < 2e4 else 1)]
    model.train()
    return relative_l2(torch.cat(predictions), solution, grid.weights)


def render(document: dict[str, Any]) -> str:
    """Markdown: relative L2 error by grid, median (worst), a column for each model."""
    models = document["models"]
    cells = [row["cells"] for row in models[0]["rows"]]
    lines = ["| grid | " + " | ".join(m["model"] for m in models) + " |", "|---" * (len(models) + 1) + "|"]
    for i, n in enumerate(cells):
        rows = [m["rows"][i] for m in models]
        texts = [f"{100 * r['median']:.2f} % ({100 * r['worst']:.1f} %)" for r in rows]
        lines.append(f"| {n} x {n} | " + " | ".join(texts) + " |")
    lines += [
        "",
        *(
            f"{m['model']}: {m['parameters']:,} parameters, trained in {m['seconds']:.0f} s "
            f"({m['cpu_seconds']:.0f} s of CPU time)."
            for m in models
        ),
        f"Data: {document['data_seconds']:.0f} s.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
