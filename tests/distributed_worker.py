"""What the ranks of the tests of continuum_ops.distributed do: four processes, started once for all cases.

Every case runs on all four and on two pairs, ranks 0, 1 and ranks 2, 3. A rank works with its part of the
tensors and saves what it gets; the tests put the parts together and compare.
"""

from __future__ import annotations

import functools
import importlib
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import position_helpers
import torch
import torch.distributed as dist
from distributed_cases import CONTINUUM, LINEAR, PATCH, POSITION, Ranks
from helpers import draw
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import continuum_ops as co

RANKS = 4
attend_module = importlib.import_module("continuum_ops.distributed._attend")


# --- models ---------------------------------------------------------------------------------------

POINTS = 41
SETTINGS = {"d_model": 8, "num_heads": 2, "num_layers": 2, "dim_feedforward": 12, "dtype": torch.float64}


def tno() -> co.models.TNO:
    torch.manual_seed(0)
    return co.models.TNO(2, 1, 2, **SETTINGS)


def cloud(points: int = POINTS) -> co.PointCloud:
    return co.PointCloud(
        position_helpers.points((points, 2), torch.float64), draw((points,), torch.float64, 8, positive=True)
    )


def samples(points: int = POINTS) -> tuple[Tensor, Tensor]:
    return draw((2, points, 2), torch.float64, 9), draw((2, points, 1), torch.float64, 10)


def squares(z: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (w[:, None] * (z - y).square()).sum()


def run_tno(at: Ranks, points: int = POINTS) -> dict[str, Any]:
    """Output and gradients with a loss that every rank computes in full, under DDP on the same group."""
    model = DistributedDataParallel(tno(), process_group=at.group)
    mesh = co.distributed.shard(cloud(points), at.group)
    u, y = (mesh.select(t) for t in samples(points))
    z = model(u, mesh)
    loss = co.distributed.all_reduce(squares(z, y, mesh.part.weights), at.group)
    loss.backward()
    grads = {name: p.grad for name, p in model.module.named_parameters()}
    return {
        "out": co.distributed.gather(z.detach(), mesh),
        "loss": loss.detach(),
        "index": mesh.index,
        "volume": co.distributed.all_reduce(mesh.part.weights.sum(), at.group),
        **grads,
    }


def run_tno_small(at: Ranks) -> dict[str, Any]:
    """Three points, so that of four ranks one has none."""
    return run_tno(at, 3)


def checkpointed(model: co.models.TNO) -> co.models.TNO:
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def run_own_losses(at: Ranks) -> dict[str, Any]:
    """Each rank's loss is that of its own points; gradients are added. Layers are checkpointed."""
    model = tno()
    mesh = co.distributed.shard(cloud(), at.group)
    u, y = (mesh.select(t) for t in samples())
    squares(checkpointed(model)(u, mesh), y, getattr(mesh, "part", mesh).weights).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=at.group)
    return {name: p.grad for name, p in model.named_parameters()}


def run_gather(at: Ranks) -> dict[str, Any]:
    """A field and back; the gradient of a gathered field, of which every rank takes another function."""
    mesh = co.distributed.shard(cloud(), at.group)
    u, _ = samples()
    part = mesh.select(u).requires_grad_()
    whole = co.distributed.gather(part, mesh)
    (whole * (1.0 + at.rank)).square().sum().backward()
    by_rows = co.distributed.gather(mesh.select(u.movedim(1, 0), 0), mesh, dim=0)
    return {"whole": whole.detach(), "rows": by_rows, "gradient": part.grad, "index": mesh.index}


def run_mesh_2d(whole: Ranks) -> dict[str, Any]:
    """Samples over one dimension of a DeviceMesh, points over the other, one DDP over both."""
    devices = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("samples", "points"))
    model = DistributedDataParallel(tno())
    mesh = co.distributed.shard(cloud(), devices["points"])
    sample = devices.get_local_rank("samples")
    u, y = (mesh.select(t[sample : sample + 1]) for t in samples())
    loss = co.distributed.all_reduce(
        squares(model(u, mesh), y, getattr(mesh, "part", mesh).weights), devices["points"]
    )
    loss.backward()
    return {name: p.grad for name, p in model.module.named_parameters()}


def run_ddp_of_samples(whole: Ranks) -> dict[str, Any]:
    """DDP over the samples alone, gradients of own points added over the points; both layers checkpointed."""
    devices = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("points", "samples"))
    model = DistributedDataParallel(checkpointed(tno()), process_group=devices["samples"].get_group())
    mesh = co.distributed.shard(cloud(), devices["points"])
    sample = devices.get_local_rank("samples")
    u, y = (mesh.select(t[sample : sample + 1]) for t in samples())
    squares(model(u, mesh), y, mesh.part.weights).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=devices["points"].get_group())
    return {name: p.grad for name, p in model.module.named_parameters()}


def run_fsdp(whole: Ranks) -> dict[str, Any]:
    """As before, parameters spread over the samples' dimension by FSDP, which takes the mean over both."""
    devices = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("points", "samples"))
    model = checkpointed(tno())
    for layer in model.layers:
        fully_shard(layer, mesh=devices)
    fully_shard(model, mesh=devices)
    mesh = co.distributed.shard(cloud(), devices["points"])
    sample = devices.get_local_rank("samples")
    u, y = (mesh.select(t[sample : sample + 1]) for t in samples())
    loss = co.distributed.all_reduce(squares(model(u, mesh), y, mesh.part.weights), devices["points"])
    loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def pit() -> co.models.PiT:
    torch.manual_seed(0)
    sizes = {"width": 8, "num_heads": 2, "num_layers": 1, "encoder_quantile": 0.3, "decoder_quantile": 0.4}
    return co.models.PiT(2, 1, 2, **sizes, dtype=torch.float64)


LATENT = co.Grid.uniform((3, 4))


def run_pit(at: Ranks) -> dict[str, Any]:
    """From one mesh to another by a latent mesh that all ranks hold."""
    model = DistributedDataParallel(pit(), process_group=at.group)
    meshes = (cloud(), cloud(23))
    geometry = model.module.geometry(*meshes, LATENT)
    mesh, outputs = (co.distributed.shard(m, at.group) for m in meshes)
    u, y = mesh.select(samples()[0]), outputs.select(samples(23)[1])
    z = model(u, geometry.shard(mesh, outputs))
    co.distributed.all_reduce(squares(z, y, outputs.part.weights), at.group).backward()
    grads = {name: p.grad for name, p in model.module.named_parameters()}
    return {"out": co.distributed.gather(z.detach(), outputs), **grads}


GRID = (12, 10)
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    # constructor, its options; options of the call
    "vitno": (co.models.ViTNO, {"scale": 3.0}, {}),
    "vitno, spectral end": (
        co.models.ViTNO,
        {"periodic_extension": True, "final_spectral": 2, "smoothing": "dirichlet", "pad": True},
        {"weights": "equal"},
    ),
    "fano": (co.models.FANO, {"scale": 2.0}, {}),
    "fano, weights": (co.models.FANO, {}, {"weights": "mesh"}),
    "fano, extended": (co.models.FANO, {"periodic_extension": True, "scale": 2.0}, {}),
    "galerkin": (co.models.GalerkinTransformer, {"modes": 3}, {}),
    "galerkin, pointwise": (
        co.models.GalerkinTransformer,
        {"decoder": "pointwise", "attention_type": "softmax"},
        {},
    ),
    "galerkin, two grids": (co.models.GalerkinTransformer, {"coarsening": 2, "modes": 3}, {}),
}


def grid_model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    make, options, _ = MODELS[name]
    sizes: dict[str, Any] = {"d_model": 6, "num_heads": 2, "num_layers": 2, "dtype": torch.float64}
    if make is not co.models.GalerkinTransformer:
        sizes |= {"num_patches": (3, 2), "patch_size": (4, 5), "modes": 2}
    model = make(2, 1, 2, **sizes, **options)
    with torch.no_grad():  # final_spectral starts as 0
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def grid_samples() -> tuple[Tensor, Tensor, co.Grid]:
    grid = co.Grid.uniform(GRID)
    return draw((2, len(grid), 2), torch.float64, 12), draw((2, len(grid), 1), torch.float64, 13), grid


def run_grid_models(at: Ranks) -> dict[str, Any]:
    """Models on grids, by patches or by points, with a loss that every rank computes in full, under DDP."""
    u, y, grid = grid_samples()
    results = {}
    for name, (make, _, options) in MODELS.items():
        patches = None if make is co.models.GalerkinTransformer else (3, 2)
        mesh = co.distributed.shard(grid, at.group, num_patches=patches)
        model = DistributedDataParallel(grid_model(name), process_group=at.group)
        z = model(mesh.select(u), mesh, **options)
        co.distributed.all_reduce(squares(z, mesh.select(y), mesh.part.weights), at.group).backward()
        results[f"{name}: out"] = co.distributed.gather(z.detach(), mesh)
        for key, parameter in model.module.named_parameters():
            results[f"{name}: {key}"] = parameter.grad
    return results


def multihead() -> tuple[co.nn.MultiheadAttention, Tensor, Tensor, Tensor]:
    """The layer, points, an additive mask of the scores and one of the keys."""
    torch.manual_seed(0)
    layer = co.nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True, dtype=torch.float64)
    return (
        layer,
        draw((2, POINTS, 6), torch.float64, 14),
        draw((4, POINTS, POINTS), torch.float64, 15),
        draw((2, POINTS), torch.float64, 16).masked_fill(draw((2, POINTS), torch.float64, 17) > 1.0, -100.0),
    )


MASKS = ("none", "scores", "keys", "kept keys", "causal")


def masks(name: str, scores: Tensor, keys: Tensor) -> dict[str, Any]:
    return {
        "none": {},
        "scores": {"attn_mask": scores > 0.5},
        "keys": {"key_padding_mask": keys, "attn_mask": scores},
        "kept keys": {"key_padding_mask": keys < 0.0},
        "causal": {"is_causal": True},
    }[name]


def run_masked_layers(at: Ranks) -> dict[str, Any]:
    """Multi-head attention in training, and the Galerkin layers' dropout, on a mesh in the user's order."""
    mesh = co.distributed.shard(cloud(), at.group)
    layer, points, scores, keys = multihead()
    x, scores, keys = mesh.select(points).requires_grad_(), mesh.select(scores), mesh.select(keys, -1)
    results = {}
    for name in MASKS:
        torch.manual_seed(3 + at.rank)
        options = masks(name, scores, keys)
        out, _ = layer(x, x, x, need_weights=False, weights=mesh.part.weights, group=mesh, **options)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        results[name] = co.distributed.gather(torch.cat([out.detach(), grad], -1), mesh)
    for kind in KINDS:
        attention = galerkin_attention(kind)
        torch.manual_seed(3 + at.rank)
        out = attention(x, weights=mesh.part.weights, group=mesh)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        results[kind] = co.distributed.gather(torch.cat([out.detach(), grad], -1), mesh)
    return results


def galerkin_attention(kind: str) -> co.nn.GalerkinAttention:
    torch.manual_seed(0)
    return co.nn.GalerkinAttention(6, 2, attention_type=kind, dropout=0.3, eta=1.0, dtype=torch.float64)


KINDS = ("galerkin", "fourier", "linear", "softmax")


def galerkin_layer(kind: str) -> co.nn.GalerkinEncoderLayer:
    torch.manual_seed(0)
    options = {"attention_type": kind, "coord_dim": 2, "eta": 1.0, "dtype": torch.float64}
    return co.nn.GalerkinEncoderLayer(6, 2, **options)


def run_galerkin_layers(at: Ranks) -> dict[str, Any]:
    """With the mesh's weights, and without; losses of own points."""
    mesh = co.distributed.shard(cloud(), at.group)
    v = mesh.select(draw((2, POINTS, 6), torch.float64, 11)).requires_grad_()
    results = {}
    for kind in KINDS:
        for weights in (mesh.part.weights, None):
            layer = galerkin_layer(kind)
            out = layer(v, mesh.part.points, weights=weights, group=at.group)
            (grad,) = torch.autograd.grad(out.square().sum(), v)
            name = f"{kind} {weights is not None}"
            results[name] = co.distributed.gather(torch.cat([out.detach(), grad], -1), mesh)
    return results


STEPS = 2


def train(model, optimizer, u, y, mesh, group=None) -> list[float]:
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = squares(model(u, mesh), y, getattr(mesh, "part", mesh).weights)
        if group is not None:
            loss = co.distributed.all_reduce(loss, group)
        loss.backward()
        for parameter in model.parameters():
            if group is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_resumed(pair: Ranks, whole: Ranks, folder: Path) -> dict[str, Any]:
    """Two steps on two ranks, and from their checkpoint two more on four."""
    losses, checkpoint_file = [], folder / f"checkpoint{whole.rank // 2}.pt"
    for at in (pair, whole):
        model = tno()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        if at is whole:
            model_state, optimizer_state = torch.load(folder / "checkpoint0.pt", weights_only=True)
            model.load_state_dict(model_state)
            optimizer.load_state_dict(optimizer_state)
        mesh = co.distributed.shard(cloud(), at.group)
        u, y = (mesh.select(t) for t in samples())
        losses += train(model, optimizer, u, y, mesh, at.group)
        if at is pair and pair.rank == 0:
            torch.save((model.state_dict(), optimizer.state_dict()), checkpoint_file)
        dist.barrier()
    return {"losses": torch.tensor(losses, dtype=torch.float64)}


# --- faults ---------------------------------------------------------------------------------------


def qkv(rows: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [draw((1, rows, 4), dtype, seed).requires_grad_() for seed in range(3)]


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(at: Ranks) -> dict[str, str]:
    """Wrong arguments on the last rank, or arguments that differ: all ranks must raise, and go on."""
    ring, last = co.distributed.continuum_attention, at.rank == at.size - 1
    q, k, v = qkv()
    w = torch.ones(3, dtype=torch.float64)
    other = co.distributed.galerkin_attention if last else ring
    single = [t.detach().float() if last else t.detach() for t in (q, k, v)]
    cases: dict[str, Callable[[], Any]] = {
        "shape": lambda: ring(q, k[..., :3] if last else k, v, group=at.group),
        "value": lambda: ring(q, k, v, -w if last else w, at.group),
        "dtype": lambda: ring(*single, group=at.group),
        "weights": lambda: ring(q, k, v, None if last else w, at.group),
        "scale": lambda: ring(q, k, v, group=at.group, scale=0.5 if last else None),
        "gradient": lambda: ring(q.detach() if last else q, k, v, group=at.group),
        "operator": lambda: other(q, k, v, group=at.group),
        "mesh": lambda: co.distributed.shard(cloud(5 if last else 6), at.group),
        "after": lambda: ring(q, k, v, group=at.group)[..., 0].sum().backward(),
    }
    return {name: message(call) for name, call in cases.items()}


class Broken(ArithmeticError):
    pass


def raises_in_the_middle(at: Ranks) -> str:
    """The last rank of a pair raises while it computes, and is caught; the other one waits in vain."""

    def broken(*_: Any) -> None:
        raise Broken("something else")

    add = attend_module._Merged.add
    if at.rank == at.size - 1:
        attend_module._Merged.add = broken
    try:
        return message(lambda: co.distributed.continuum_attention(*qkv(), group=at.group).sum().backward())
    finally:
        attend_module._Merged.add = add


ON_BOTH: tuple[Callable[[Ranks], Any], ...] = (
    run_tno,
    run_tno_small,
    run_own_losses,
    run_pit,
    run_galerkin_layers,
    run_grid_models,
    run_masked_layers,
    run_gather,
    refusals,
)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    path = Path(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    results: dict[tuple[str, str, int], Any] = {}

    def keep(kind: str, name: str, size: int, call: Callable[[], Any]) -> None:
        try:
            results[kind, name, size] = call()
        except Exception:
            results[kind, name, size] = traceback.format_exc()

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    hurried = [dist.new_group(two, timeout=timedelta(seconds=2)) for two in ([0, 1], [2, 3])]
    whole, pair = Ranks(dist.group.WORLD, rank, RANKS), Ranks(pairs[rank // 2], rank % 2, 2)
    for at in (pair, whole):
        for case in (*CONTINUUM, *POSITION, *PATCH):
            keep(type(case).__name__, case.name, at.size, lambda case=case, at=at: case.run(at))
        for case in LINEAR:
            keep("Linear", f"{case.name} {case.weighted}", at.size, lambda case=case, at=at: case.run(at))
        for function in ON_BOTH:
            keep(function.__name__, "", at.size, lambda function=function, at=at: function(at))
    keep(
        "again",
        "",
        4,
        lambda: CONTINUUM[2].run(whole) | {"x" + k: v for k, v in POSITION[0].run(whole).items()},
    )
    keep("run_mesh_2d", "", 4, lambda: run_mesh_2d(whole))
    keep("run_ddp_of_samples", "", 4, lambda: run_ddp_of_samples(whole))
    keep("run_fsdp", "", 4, lambda: run_fsdp(whole))
    keep("run_resumed", "", 4, lambda: run_resumed(pair, whole, path))
    fast = Ranks(hurried[rank // 2], rank % 2, 2)
    keep("raises", "", 2, lambda: raises_in_the_middle(fast))
    out = co.distributed.continuum_attention(*qkv())
    if rank == RANKS - 1:
        torch.save(results, path / f"rank{rank}.pt")
        os._exit(0)
    keep("dies", "", 4, lambda: message(lambda: out.sum().backward()))
    torch.save(results, path / f"rank{rank}.pt")
    os._exit(0)  # without the farewells that a broken group would wait for
