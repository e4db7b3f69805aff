"""Train a transformer neural operator on a 2-D mesh that is split over the ranks of torchrun.

    python examples/train_tno_sharded.py                                # one process
    torchrun --nproc-per-node=2 examples/train_tno_sharded.py           # the same losses to rounding
    torchrun --nproc-per-node=4 examples/train_tno_sharded.py --checkpoint run.pt --steps 100

The operator maps u to the solution z of z - (length)^2 Laplace(z) = u on the unit torus, sampled at scattered
points. u is a random trigonometric polynomial, so that z is known in closed form at every point. With
``--checkpoint`` a run writes the file every ``--every`` steps and goes on from it if it is there, also with
another number of ranks. A rank that dies stops the others after ``--timeout`` seconds at most; torchrun's
``--max-restarts`` then starts all of them again.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import continuum_ops as co
from continuum_ops.training.files import atomic_write

LENGTH = 0.1
WAVES = 3


def functions(points: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Samples of u and z, (samples, N, 1), at points (N, 2); the same functions whatever the points."""
    generator = torch.Generator().manual_seed(1)
    axis = torch.arange(-WAVES, WAVES + 1, dtype=points.dtype)
    k = torch.cartesian_prod(axis, axis)  # (modes, 2)
    k2 = k.square().sum(-1)
    a, b = torch.randn(2, samples, len(k), generator=generator, dtype=points.dtype) / (1.0 + k2)
    phase = 2.0 * math.pi * points @ k.T
    damping = 1.0 / (1.0 + (2.0 * math.pi * LENGTH) ** 2 * k2)
    cosines, sines = phase.cos().T, phase.sin().T
    return (
        (a @ cosines + b @ sines).unsqueeze(-1),
        ((damping * a) @ cosines + (damping * b) @ sines).unsqueeze(-1),
    )


def relative_error(z: Tensor, target: Tensor, weights: Tensor, spread: bool) -> Tensor:
    """Mean over the batch of ||z - target|| / ||target|| in L2 of the whole domain, on every rank."""
    squares = torch.stack([(z - target).square(), target.square().expand_as(z)])
    sums = (squares.squeeze(-1) * weights).sum(-1)
    if spread:
        sums = co.distributed.all_reduce(sums)
    return (sums[0] / sums[1]).sqrt().mean()


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--d-model", type=int, default=32)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a rank waits for another")
    args = parser.parse_args(argv)

    spread = "RANK" in os.environ  # torchrun sets it
    if spread:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=args.timeout))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    first = not spread or dist.get_rank() == 0

    # Every rank makes the whole problem and keeps its part.
    scattered = torch.rand(args.points, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, z = functions(scattered, args.samples)
    mesh = co.PointCloud.voronoi(scattered, [(0.0, 1.0), (0.0, 1.0)]).to(device, torch.float32)
    where, weights = mesh, mesh.weights  # where the functions are sampled
    if spread:
        where = co.distributed.shard(mesh)
        weights = where.part.weights
        u, z = where.select(u), where.select(z)
    u, z = u.to(device, torch.float32), z.to(device, torch.float32)

    torch.manual_seed(0)
    tno = co.models.TNO(1, 1, 2, d_model=args.d_model, num_heads=4, num_layers=2).to(device)
    optimizer = torch.optim.Adam(tno.parameters(), lr=1e-3)
    start = 0
    if args.checkpoint is not None and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        tno.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    # Every rank has the loss of the whole domain: its gradient is the mean of the ranks' gradients.
    model: nn.Module = DistributedDataParallel(tno) if spread else tno

    losses = []
    for step in range(start, args.steps):
        rows = torch.randint(
            args.samples, (args.batch,), generator=torch.Generator().manual_seed(step)
        )  # the same on all ranks
        optimizer.zero_grad()
        loss = relative_error(model(u[rows], where), z[rows], weights, spread)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if first:
            print(f"step {step + 1} loss {losses[-1]:.9f}", flush=True)
            if args.checkpoint is not None and (step + 1) % args.every == 0:
                state = {"model": tno.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                with atomic_write(args.checkpoint) as file:
                    torch.save(state, file)
    if spread:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
