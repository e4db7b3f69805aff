"""One training step of ViT-NO and FANO at 416 x 416 beside a plain PyTorch model of the same definition.

    python bench/bench_patch_models.py    # prints the table, writes bench/results/patch_models-<machine>.json
    python bench/bench_patch_models.py --cells 104 --patch-size 8 --rounds 1 --out /tmp/short.json

The presets "vitno-darcy416" and "fano-darcy416" with d_model = dim_feedforward = 64, B = 1, float32: forward,
relative L2 loss, backward, AdamW. Both forms have the same parameters; before the timing they are compared in
float64, outputs and gradients. Every row comes from a fresh process; the memory is the growth of its
resident peak in the first step, without the model. Modes that the patch lacks are cut to those it has.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import harness
import plain_patch_models as plain
import torch
from torch import nn

from continuum_ops import Grid
from continuum_ops.models import preset
from continuum_ops.training import relative_l2

PRESETS = {"vitno": "vitno-darcy416", "fano": "fano-darcy416"}
MODES = {"vitno": 12, "fano": 9}
FORMS = ("ours", "plain")
PARITY = 1e-9


def build(name: str, d_model: int, patch_size: int, cells: int, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return preset(
        PRESETS[name],
        d_model=d_model,
        dim_feedforward=d_model,
        patch_size=patch_size,
        modes=min(MODES[name], patch_size // 2),
        final_spectral=min(64, cells // 2),
        **options,
    )


def worker(options: argparse.Namespace) -> None:
    harness.start_worker(options.threads)
    name, form = options.worker
    small = build(name, 16, 8, 24, num_patches=3, num_layers=2, dtype=torch.float64)
    for parameter in small.parameters():  # biases and the final layer too
        nn.init.normal_(parameter, std=0.3)
    error = plain.parity(small, Grid.uniform((24, 24), kind="cell"))
    if not error <= PARITY:
        raise harness.ParityError(f"{name}: ours and plain differ by {error:.2e}, the bound is {PARITY:.0e}")

    model = build(name, options.d_model, options.patch_size, options.cells)
    grid = Grid.uniform((options.cells, options.cells), kind="cell", dtype=torch.float32)
    u, target = torch.randn(2, 1, len(grid), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> list[torch.Tensor]:
        optimizer.zero_grad()
        out = model(u, grid) if form == "ours" else plain.forward(model, u, grid)
        relative_l2(out, target).mean().backward()
        optimizer.step()
        return []

    growth, _ = harness.peak_growth(step)
    samples = [harness.take_sample(step, 0.0) for _ in range(options.rounds)]
    row = {
        "model": name,
        "form": form,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parity": error,
        "seconds": statistics.median(s.seconds for s in samples),
        "seconds_all": [s.seconds for s in samples],
        "other_cpu": [s.other_cpu for s in samples],
        "peak_mib": growth / harness.MIB,
    }
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--cells", type=int, default=416, help="points an axis")
    parser.add_argument("--patch-size", type=int, default=32, help="13 patches an axis make the cells")
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allocators", nargs="+", choices=harness.ALLOCATORS, default=["default", "kept"])
    parser.add_argument(
        "--out", type=Path, help="result file; default: bench/results/patch_models-<machine>.json"
    )
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cells != 13 * options.patch_size:
        parser.error(f"--cells must be 13 times --patch-size, was {options.cells}")
    if options.worker:
        worker(options)
        return
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "worker")}
    document = harness.new_document("patch_models", settings)
    document["rows"] = []
    shared = [f"--{k.replace('_', '-')}={settings[k]}" for k in ("cells", "patch_size", "d_model", "rounds")]
    for name in options.models:
        for allocator in options.allocators:
            for form in FORMS:
                harness.progress(f"{name}, {form}, allocator {allocator}")
                arguments = [*shared, f"--threads={options.threads}", "--worker", name, form]
                row = harness.run_worker(
                    str(Path(__file__).resolve()), arguments, threads=options.threads, allocator=allocator
                )
                harness.progress(f"  {row['seconds']:.2f} s, {row['peak_mib']:.0f} MiB")
                document["rows"].append({"allocator": allocator, **row})
    path = harness.result_path("patch_models", document, options.out)
    harness.write_json(path, document)
    print(render(document))
    print(f"wrote {path}")


def render(document: dict[str, Any]) -> str:
    """Markdown: seconds and peak memory of a step, ours beside plain."""
    lines = [
        "| model | parameters | allocator | ours, s | plain, s | ours, MiB | plain, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = document["rows"]
    for ours, other in zip(rows[::2], rows[1::2], strict=True):
        lines.append(
            f"| {ours['model']} | {ours['parameters']:,} | {ours['allocator']} | {ours['seconds']:.2f} | "
            f"{other['seconds']:.2f} | {ours['peak_mib']:.0f} | {other['peak_mib']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
