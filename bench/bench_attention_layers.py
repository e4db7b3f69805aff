"""Attention layers beside neuraloperator's of the same mathematics: Galerkin attention, codomain attention.

``python bench/bench_attention_layers.py`` prints the table and writes it to bench/results/ as JSON.

Galerkin: ``co.nn.GalerkinAttention`` and neuraloperator's ``AttentionKernelIntegral``, no bias, the same
parameters, no output projection (theirs has none where the widths agree); gradients of the input and the
projections. Codomain: what ``co.nn.CodomainAttention`` and neuraloperator's ``CODALayer`` do between their
projections, which are different networks: query, key and value are given to its ``compute_attention``, in
its own layout; gradients of these.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import harness
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import continuum_ops as co

OP = "attention_layers"
OURS, PLAIN, NEURALOPERATOR = "continuum_ops", "(a) plain PyTorch", "(b) neuraloperator"
SIZE, DIM, HEADS = 8192, 128, 4  # Galerkin
SIDE, FUNCTIONS, CHANNELS = (
    208,
    8,
    16,
)  # codomain: functions on SIDE x SIDE points, channels of each in a head
BOUND = 1e-5
BLAS_BOUND = 1e-4  # BLAS sums the N D products of a codomain score in float32: 1e-5 at 208 x 208
PASSES = ("forward", "forward + backward")


class Form(NamedTuple):
    """A layer that is ready: a call of it, and the tensors whose gradients are asked for."""

    attend: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    grad_out: Tensor


@dataclass(frozen=True)
class Galerkin:
    """One layer on a function: x, grad_out (B, N, C); weights (N,) or None, 1 / N."""

    x: Tensor
    grad_out: Tensor
    projections: list[Tensor]  # of query, key, value
    weights: Tensor | None
    heads: int = HEADS

    def exact(self) -> dict[str, Tensor]:
        """out and the gradients of x and the projections in float64, the norms by their definition."""
        x, *projections = leaves = [t.double().requires_grad_() for t in (self.x, *self.projections)]
        n = x.shape[1]
        w = torch.full((n,), 1 / n).double() if self.weights is None else self.weights.double()
        q, k, v = (torch.einsum("bnc,dc->bnd", x, p).unflatten(-1, (self.heads, -1)) for p in projections)

        def normalized(y: Tensor) -> Tensor:
            centred = y - y.mean(-1, keepdim=True)
            return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()

        moments = torch.einsum("bnhi,n,bnhj->bhij", normalized(k), w, normalized(v))
        out = torch.einsum("bnhi,bhij->bnhj", q, moments).flatten(-2)
        gradients = torch.autograd.grad(out, leaves, self.grad_out.double())
        return {"out": out.detach(), **dict(zip(("x", "query", "key", "value"), gradients, strict=True))}

    def forms(self, backward: bool) -> dict[str, Callable[[], Form]]:
        return {
            OURS: lambda: self._ours(backward),
            PLAIN: lambda: self._plain(backward),
            NEURALOPERATOR: lambda: self._neuraloperator(backward),
        }

    def _leaves(self, layer: nn.Module, names: str, backward: bool) -> tuple[Tensor, list[Tensor]]:
        """x, and the layer's parameters, set to the projections."""
        x = self.x.clone().requires_grad_(backward)
        weights = [layer.get_submodule(names.format(name)).weight for name in "qkv"]
        for weight, projection in zip(weights, self.projections, strict=True):
            weight.data.copy_(projection)
            weight.requires_grad_(backward)
        return x, [x, *weights]

    def _ours(self, backward: bool) -> Form:
        layer = co.nn.GalerkinAttention(self.x.shape[-1], self.heads, bias=False).requires_grad_(False)
        layer.out_proj = nn.Identity()
        x, leaves = self._leaves(layer, "{}_proj", backward)
        return Form(lambda: layer(x, weights=self.weights), leaves, self.grad_out)

    def _plain(self, backward: bool) -> Form:
        x, *projections = (t.clone().requires_grad_(backward) for t in (self.x, *self.projections))

        def attend() -> Tensor:
            q, k, v = (F.linear(x, p).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in projections)
            k, v = F.layer_norm(k, k.shape[-1:]), F.layer_norm(v, v.shape[-1:])
            weighted = v / v.shape[-2] if self.weights is None else v * self.weights[:, None]
            return (q @ (k.mT @ weighted)).transpose(1, 2).flatten(-2)

        return Form(attend, [x, *projections], self.grad_out)

    def _neuraloperator(self, backward: bool) -> Form:
        from neuralop.layers.attention_kernel_integral import AttentionKernelIntegral

        # Its InstanceNorm1d, made for head_dim channels, is given N: a layer norm of each point.
        warnings.filterwarnings("ignore", "input's size at dim=1 does not match num_features")
        channels = self.x.shape[-1]
        layer = AttentionKernelIntegral(channels, channels, self.heads, channels // self.heads)
        x, leaves = self._leaves(layer, "to_{}", backward)
        points = torch.zeros(*x.shape[:2], 1)  # looked at by a positional embedding only
        weights = None if self.weights is None else self.weights.expand(x.shape[:2])
        return Form(lambda: layer(x, points, weights=weights), leaves, self.grad_out)


@dataclass(frozen=True)
class Codomain:
    """T functions that attend to each other: query, key, value, grad_out (B, T, N, H, D), N = side^2."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def exact(self) -> dict[str, Tensor]:
        q, k, v = leaves = [t.double().requires_grad_() for t in self.tensors()]
        a = (torch.einsum("btnhd,bsnhd->bhts", q, k) / q.shape[2]).softmax(-1)
        out = torch.einsum("bhts,bsnhd->btnhd", a, v)
        gradients = torch.autograd.grad(out, leaves, self.grad_out.double())
        return {"out": out.detach(), **dict(zip(("query", "key", "value"), gradients, strict=True))}

    def forms(self, backward: bool) -> dict[str, Callable[[], Form]]:
        return {
            OURS: lambda: self._ours(backward),
            PLAIN: lambda: self._plain(backward),
            NEURALOPERATOR: lambda: self._neuraloperator(backward),
        }

    def _ours(self, backward: bool) -> Form:
        q, k, v = leaves = [t.clone().requires_grad_(backward) for t in self.tensors()]
        n = q.shape[2]
        # As nn.CodomainAttention calls it; n patches of one point each would be attention between points.
        return Form(lambda: co.patch_attention(q, k, v, (1, n), scale=1 / n), leaves, self.grad_out)

    def _plain(self, backward: bool) -> Form:
        leaves = [t.clone().requires_grad_(backward) for t in self.tensors()]
        n, _, channels = self.query.shape[2:]

        def attend() -> Tensor:
            q, k, v = (t.permute(0, 3, 1, 2, 4).flatten(-2) for t in leaves)
            out = (q @ k.mT / n).softmax(-1) @ v
            return out.unflatten(-1, (n, channels)).permute(0, 2, 3, 1, 4)

        return Form(attend, leaves, self.grad_out)

    def _neuraloperator(self, backward: bool) -> Form:
        from neuralop.layers.coda_layer import CODALayer

        batch, functions, n, heads, channels = self.query.shape
        side = math.isqrt(n)

        def planes(t: Tensor) -> Tensor:
            """(B T, H D, side, side)."""
            return t.permute(0, 1, 3, 4, 2).reshape(batch * functions, heads * channels, side, side)

        leaves = [planes(t).contiguous().requires_grad_(backward) for t in self.tensors()]
        layer = CODALayer(
            [1, 1],
            heads,
            channels,
            channels,
            per_channel_attention=False,
            temperature=math.sqrt(n / channels),
        )
        layer.Query, layer.Key, layer.Value = (Given(t) for t in leaves)
        tokens = torch.empty(batch * functions, channels, side, side)
        return Form(
            lambda: layer.compute_attention(tokens, batch), leaves, planes(self.grad_out).contiguous()
        )


class Given(nn.Module):
    """In the place of a network that makes query, key or value of the functions."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tensor


Layer = Galerkin | Codomain


def make_galerkin(n: int, dim: int = DIM, heads: int = HEADS, *, weighted: bool = False) -> Galerkin:
    g = torch.Generator().manual_seed(1000 * dim + n)
    x, grad_out = (torch.randn(1, n, dim, generator=g) for _ in range(2))
    projections = [torch.randn(dim, dim, generator=g) / math.sqrt(dim) for _ in range(3)]
    weights = (0.5 + torch.rand(n, generator=g)) / n if weighted else None
    return Galerkin(x, grad_out, projections, weights, heads)


def make_codomain(side: int, functions: int = FUNCTIONS, heads: int = HEADS) -> Codomain:
    g = torch.Generator().manual_seed(side)
    shape = (1, functions, side * side, heads, CHANNELS)
    q, k, v, grad_out = (torch.randn(shape, generator=g) for _ in range(4))
    # Scores of the order of 1: an inner product of noise is as large as the root of its number of terms.
    return Codomain(q * (side / math.sqrt(CHANNELS)), k, v, grad_out)


def make_candidate(name: str, layer: Layer, passes: str, exact: dict[str, Tensor]) -> harness.Candidate:
    backward = passes != "forward"
    form = layer.forms(backward)[name]()
    expected = [t for key, t in exact.items() if backward or key == "out"]

    def run() -> tuple[Tensor, ...]:
        out = form.attend()
        if not backward:
            return (out,)
        return (out.detach(), *torch.autograd.grad(out, form.leaves, form.grad_out))

    def parity() -> tuple[Tensor, ...]:
        """Planes of functions as (B, T, N, H, D)."""
        if isinstance(layer, Galerkin) or name != NEURALOPERATOR:
            return run()
        batch, functions, _, heads, channels = layer.query.shape
        found = (t.flatten(-2).view(batch, functions, heads, channels, -1) for t in run())
        return tuple(t.permute(0, 1, 4, 2, 3) for t in found)

    bound = BLAS_BOUND if isinstance(layer, Codomain) and name != OURS else BOUND
    return harness.Candidate(name, run, expected, bound, parity=parity)


def find(name: str, layer: Layer, passes: str, exact: dict[str, Tensor]) -> harness.Candidate | str:
    """The candidate, or why a peer has none. neuraloperator 2.0.0 weighs the queries."""
    if name != NEURALOPERATOR:
        return make_candidate(name, layer, passes, exact)
    found = harness.attempt(lambda: make_candidate(name, layer, passes, exact))
    if isinstance(found, str) or not isinstance(layer, Galerkin) or layer.weights is None:
        return found
    try:
        harness.check_parity(found)
    except harness.ParityError:
        return "another result: weights at the queries"
    return found


def cases(args: argparse.Namespace) -> list[tuple[dict[str, str], Layer]]:
    of = {"layer": f"Galerkin, {HEADS} heads of {args.dim // HEADS}", "points": str(args.size)}
    core = {"layer": f"codomain (core), {FUNCTIONS} functions, {HEADS} heads of {CHANNELS}"}
    return [
        ({**of, "weights": "1/N"}, make_galerkin(args.size, args.dim)),
        ({**of, "weights": "w"}, make_galerkin(args.size, args.dim, weighted=True)),
        ({**core, "points": f"{args.side} x {args.side}", "weights": "1/N"}, make_codomain(args.side)),
    ]


def time_all(args: argparse.Namespace, allocator: str) -> list[dict[str, Any]]:
    rows = []
    for case, layer in cases(args):
        exact = layer.exact()
        for passes in PASSES:
            harness.progress(f"{', '.join(case.values())}, {passes}, {allocator} memory")
            label = {"table": f"{passes}, float32", "case": case, "allocator": allocator}
            candidates, skipped = [], []
            for name in layer.forms(False):
                found = find(name, layer, passes, exact)
                if isinstance(found, str):
                    skipped.append({"candidate": name, "skipped": found})
                else:
                    candidates.append(found)
            timed = harness.time_interleaved(candidates, rounds=args.rounds)
            ours = next(row["ms"] for row in timed if row["candidate"] == OURS)
            rows += [{**label, **row, "speedup": row["ms"] / ours} for row in timed]
            rows += [{**label, **row} for row in skipped]
    return rows


def parse(argv: Sequence[str]) -> argparse.Namespace:
    return harness.parse_counts(
        __doc__.splitlines()[0],
        argv,
        ("size", SIZE, "points of the Galerkin layer"),
        ("dim", DIM, f"its channels, a multiple of {HEADS}"),
        ("side", SIDE, "points per axis of the codomain layer"),
        ("threads", 2, "threads of torch, OpenMP and BLAS"),
        ("rounds", 7, "clean samples per candidate"),
    )


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    if args.worker is not None:
        harness.start_worker(args.threads)
        # After what the import of a peer prints.
        print("\n" + json.dumps(time_all(args, args.worker["allocator"])))
        return

    def worker(allocator: str) -> Any:
        arguments = [*argv, "--worker", json.dumps({"allocator": allocator})]
        return harness.run_worker(__file__, arguments, threads=args.threads, allocator=allocator)

    document = harness.new_document(OP, {"threads": args.threads, "B": 1, "rounds": args.rounds})
    document["rows"] = [row for allocator in harness.ALLOCATORS for row in worker(allocator)]
    harness.publish(document, harness.result_path(OP, document, args.out))


if __name__ == "__main__":
    main(sys.argv[1:])
