"""Encoders on four kinds of attention, n = 8192, d = 128, 10 layers (GT table 1): time and peak memory.

``python bench/bench_galerkin_attention.py`` prints the tables and writes them to bench/results/ as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from continuum_ops.nn import GalerkinEncoderLayer

OP = "galerkin_attention"
TYPES = ("galerkin", "fourier", "linear", "softmax")
SIZE, DIM, HEADS, LAYERS, BATCH = 8192, 128, 1, 10, 1
BOUND = 2e-4  # ten layers of float32, and the gradient at the far end


class Encoder(nn.Module):
    """`layers` encoder layers without coordinates, weights 1 / n: GT table 1, "encoders only"."""

    def __init__(self, attention_type: Any, dim: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            GalerkinEncoderLayer(dim, HEADS, attention_type=attention_type, eta=1.0) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make_inputs(n: int, dim: int, batch: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * dim + n)
    x, grad_out = (torch.randn(batch, n, dim, generator=g) for _ in range(2))
    return x, grad_out


def make_encoder(attention_type: str, dim: int, layers: int) -> Encoder:
    torch.manual_seed(0)
    return Encoder(attention_type, dim, layers)


def attention_by_formula(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head (B, N, D), N x M formed for "softmax" only, in chunks of rows."""
    if kind in ("galerkin", "fourier"):
        return q @ (k.mT @ v / k.shape[1])
    if kind == "linear":
        return q.softmax(-1) @ (k.softmax(1).mT @ v)
    chunks = (q[:, i : i + 512] @ k.mT for i in range(0, q.shape[1], 512))
    return torch.cat([torch.softmax(c / math.sqrt(q.shape[-1]), -1) @ v for c in chunks], 1)


def exact(encoder: Encoder, kind: str, x: Tensor) -> Tensor:
    """The encoder's output in float64, from its parameters and the formulas of GT (4)-(6)."""
    y = x.double()
    for layer in encoder.layers:
        a = layer.attention

        def project(name: str, y: Tensor = y, a: Any = a) -> Tensor:
            linear, norm = getattr(a, f"{name}_proj"), getattr(a, f"{name}_norm")
            z = F.linear(y, linear.weight.double(), linear.bias.double())
            if isinstance(norm, nn.Identity):
                return z
            return F.layer_norm(z, z.shape[-1:]) * norm.weight.double() + norm.bias.double()

        out = attention_by_formula(kind, project("q"), project("k"), project("v"))
        y = y + F.linear(out, a.out_proj.weight.double(), a.out_proj.bias.double())
        hidden = F.silu(F.linear(y, layer.linear1.weight.double(), layer.linear1.bias.double()))
        y = y + F.linear(hidden, layer.linear2.weight.double(), layer.linear2.bias.double())
    return y.detach()


def make_run(encoder: Encoder, x: Tensor, grad_out: Tensor, passes: str) -> Callable[[], tuple[Tensor, ...]]:
    """A call that returns (out,); backward fills the gradients of the parameters, as in training."""

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (encoder(x),)

    def forward_backward() -> tuple[Tensor, ...]:
        encoder.zero_grad()
        out = encoder(x)
        out.backward(grad_out)
        return (out.detach(),)

    return forward if passes == "forward" else forward_backward


def make_candidate(
    kind: str, encoder: Encoder, inputs: tuple[Tensor, Tensor], passes: str, reference: Tensor
) -> harness.Candidate:
    return harness.Candidate(kind, make_run(encoder, *inputs, passes), [reference], BOUND)


def time_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    inputs = make_inputs(args.size, args.dim, args.batch)
    encoders = {kind: make_encoder(kind, args.dim, args.layers) for kind in TYPES}
    with torch.no_grad():
        references = {kind: exact(encoder, kind, inputs[0]) for kind, encoder in encoders.items()}
    rows = []
    for passes in ("forward", "forward + backward"):
        harness.progress(passes)
        candidates = [make_candidate(k, e, inputs, passes, references[k]) for k, e in encoders.items()]
        timed = harness.time_interleaved(candidates, rounds=args.rounds)
        ours = next(row["ms"] for row in timed if row["candidate"] == "galerkin")
        case = {"N": args.size, "d": args.dim, "layers": args.layers, "B": args.batch}
        label = {"table": f"{passes}, float32", "case": case, "allocator": "default"}
        rows += [{**label, **row, "speedup": row["ms"] / ours} for row in timed]
    return rows


def memory_row(kind: str, passes: str, n: int, dim: int, layers: int, batch: int) -> dict[str, Any]:
    """Peak memory of one call beyond its input, output and parameter gradients."""
    encoder = make_encoder(kind, dim, layers)
    make_run(encoder, *make_inputs(min(n, 64), dim, batch), passes)()
    inputs = make_inputs(n, dim, batch)
    growth, outputs = harness.peak_growth(make_run(encoder, *inputs, passes))
    given = inputs[: 1 if passes == "forward" else 2]
    return {
        "candidate": kind,
        "pass": passes,
        "shape": f"N = {n}, d = {dim}, {layers} layers, B = {batch}, float32",
        **harness.memory_fields(given, growth, outputs, 4.0 * batch * n * n),
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    return harness.parse_counts(
        __doc__.splitlines()[0],
        argv,
        ("size", SIZE, "points"),
        ("dim", DIM, "channels"),
        ("layers", LAYERS, "encoder layers"),
        ("batch", BATCH, "batch size (GT: 4)"),
        ("threads", 2, "threads of torch, OpenMP and BLAS"),
        ("rounds", 5, "clean samples per candidate"),
    )


def work(args: argparse.Namespace) -> None:
    harness.start_worker(args.threads)
    task = args.worker
    json.dump(memory_row(**task["memory"]) if "memory" in task else time_all(args), sys.stdout)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    if args.worker is not None:
        return work(args)

    def worker(task: dict[str, Any]) -> Any:
        arguments = [*argv, "--worker", json.dumps(task)]
        return harness.run_worker(__file__, arguments, threads=args.threads, allocator="default")

    settings = {"threads": args.threads, "H": HEADS, "rounds": args.rounds}
    document = harness.new_document(OP, settings)
    size = {"n": args.size, "dim": args.dim, "layers": args.layers, "batch": args.batch}
    document["memory"] = [
        worker({"memory": {"kind": kind, "passes": passes, **size}})
        for kind in TYPES
        for passes in ("forward", "forward + backward")
    ]
    document["rows"] = worker({})
    harness.publish(document, harness.result_path(OP, document, args.out))


if __name__ == "__main__":
    main(sys.argv[1:])
