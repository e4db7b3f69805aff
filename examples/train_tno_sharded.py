"""Train a transformer neural operator on scattered points that are split over the ranks of torchrun.

    python examples/train_tno_sharded.py                                # one process
    torchrun --nproc-per-node=2 examples/train_tno_sharded.py           # the same losses to rounding
    torchrun --nproc-per-node=4 --max-restarts=3 examples/train_tno_sharded.py --checkpoint run.pt --steps 100

It maps waves u to the solution z of z - Laplace(z) / 100 = u on the unit torus. A run goes on from its
checkpoint, also with another number of ranks.
"""

import argparse
import math
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import continuum_ops as co


def waves(points: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """u and z, (count, N, 1), at points (N, 2)."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randint(-3, 4, (count, 2), generator=generator).to(points)
    phase = torch.rand(count, generator=generator, dtype=points.dtype)
    u = torch.sin(2 * math.pi * (points @ k.T + phase)).T.unsqueeze(-1)
    return u, u / (1 + (0.2 * math.pi) ** 2 * k.square().sum(-1))[:, None, None]


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args(argv)
    spread = "RANK" in os.environ  # torchrun sets it
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    )
    if device != "cpu":
        torch.cuda.set_device(device)
    if spread:
        dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=timedelta(minutes=1))

    # Every rank makes the whole mesh and keeps its part.
    points = torch.rand(args.points, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mesh = co.PointCloud.voronoi(points, [(0.0, 1.0), (0.0, 1.0)]).to(device, torch.float32)
    where = co.distributed.shard(mesh) if spread else mesh
    part = where.part if spread else mesh

    torch.manual_seed(0)
    tno = co.models.TNO(1, 1, 2, d_model=16, num_heads=4, num_layers=2).to(device)
    optimizer, start = torch.optim.Adam(tno.parameters(), lr=1e-3), 0
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        tno.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    model = DistributedDataParallel(tno) if spread else tno
    losses = []
    for step in range(start, args.steps):
        u, z = waves(part.points, 8, step)
        squares = (model(u, where) - z).squeeze(-1).square() @ part.weights
        if spread:  # of the whole domain: its gradient is the mean of the ranks' gradients
            squares = co.distributed.all_reduce(squares)
        loss = squares.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not spread or dist.get_rank() == 0:
            print(f"step {step + 1} loss {losses[-1]:.9f}", flush=True)
            if args.checkpoint and (step + 1) % 10 == 0:
                state = {"model": tno.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, args.checkpoint.with_suffix(".new"))
                args.checkpoint.with_suffix(".new").replace(args.checkpoint)
    if spread:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
