"""continuum_attention on the CPU against plain PyTorch, SDPA and FlexAttention, forward and with backward.

``python bench/bench_continuum_attention.py`` prints the tables and writes them to bench/results/ as JSON;
``--short`` stops at N = 4096, ``--memory`` measures peak memory at 416 x 416 points besides.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from ceilings import measure_ceilings
from torch import Tensor

import continuum_ops as co

OP = "continuum_attention"
BATCH, HEADS = 1, 8
SIZES, DIMS = (1024, 4096, 16384), (16, 32, 64)
WEIGHTS_GRAD_SIZE = 4096
LARGE_ROUNDS = 3  # at most, for N > 4096: a call takes seconds there
PARITY_ROWS = 512  # query rows compared with float64, and contributing to the compared gradients
GRID_POINTS = 416 * 416
# Largest error allowed, relative to the largest entry of the output or gradient.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
# Flops and exponentials per score: two products of 2 d each; the backward recomputes one and makes four more.
COST = {"forward": (4, 1), "forward + backward": (14, 2)}

Attention = Callable[..., Any]  # (query, key, value, weights) -> out


@dataclass(frozen=True)
class Inputs:
    """query, key, value, grad_out (B, H, N, D); weights (N,) float32, like the spacings of an uneven mesh.

    ``rows`` are the query rows of the parity check: outputs are compared there, and gradients for a grad_out
    that is zero elsewhere, whose float64 values need these rows only, for every query, key and value.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    grad_out: Tensor
    rows: Tensor

    def requiring_grad(self, *, weights: bool) -> Inputs:
        q, k, v = (x.detach().requires_grad_() for x in (self.query, self.key, self.value))
        return replace(self, query=q, key=k, value=v, weights=self.weights.detach().requires_grad_(weights))


def make_inputs(
    n: int, dim: int, *, heads: int = HEADS, dtype: torch.dtype = torch.float32, rows: int = PARITY_ROWS
) -> Inputs:
    """Seeded inputs; every query row is a parity row where n <= rows, one of each n / rows otherwise."""
    g = torch.Generator().manual_seed(1000 * dim + n)
    q, k, v, grad_out = (torch.randn(BATCH, heads, n, dim, generator=g).to(dtype) for _ in range(4))
    weights = (0.5 + torch.rand(n, generator=g)) / n
    count = min(n, rows)
    starts = torch.arange(count + 1) * n // count
    within = (torch.rand(count, generator=g) * starts.diff()).long()
    return Inputs(q, k, v, weights, grad_out, starts[:-1] + within)


def parity_grad_out(x: Inputs) -> Tensor:
    """grad_out, zero outside x.rows."""
    grad_out = torch.zeros_like(x.grad_out)
    grad_out[..., x.rows, :] = x.grad_out[..., x.rows, :]
    return grad_out


def exact(x: Inputs, *, weighted: bool, chunk_bytes: int = 2**25) -> dict[str, Tensor]:
    """out at x.rows and, for parity_grad_out, the gradients of query, key, value, weights, in float64.

    Closed form, in chunks of query rows. With p the attention matrix, g the gradient of out and
    delta_i = g_i . out_i: dv = p^T g, ds = p (g v^T - delta), dq = scale ds k, dk = scale ds^T q,
    dw_k = sum_i ds_ik / w_k.
    """
    q, k, v, g = (t.detach().double() for t in (x.query, x.key, x.value, x.grad_out))
    n, dim = q.shape[-2:]
    scale = dim**-0.5
    log_w = (
        x.weights.detach().double().log()
        if weighted
        else torch.zeros(n, dtype=torch.float64, device=q.device)
    )
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    out = torch.zeros_like(v[..., x.rows, :])
    dlog_w = torch.zeros_like(log_w)
    rows = max(1, chunk_bytes // (8 * n))
    for head in range(q.shape[1]):
        key, value = k[0, head], v[0, head]
        for i in range(0, len(x.rows), rows):
            at = x.rows[i : i + rows]
            query, grad = q[0, head, at], g[0, head, at]
            p = torch.softmax(scale * (query @ key.T) + log_w, -1)
            out[0, head, i : i + rows] = p @ value
            dv[0, head] += p.T @ grad
            ds = p * (grad @ value.T - (grad * out[0, head, i : i + rows]).sum(-1, keepdim=True))
            dq[0, head, at] = scale * (ds @ key)
            dk[0, head] += scale * (ds.T @ query)
            dlog_w += ds.sum(0)
    return {"out": out, "query": dq, "key": dk, "value": dv, "weights": dlog_w / log_w.exp()}


def dense(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None) -> Tensor:
    scores = q.shape[-1] ** -0.5 * (q @ k.transpose(-2, -1))
    return torch.softmax(scores if w is None else scores + w.log().to(q.dtype), -1) @ v


def sdpa_mask(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, None if w is None else w.log().to(q.dtype)[None, None, None]
    )


def sdpa_channel(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None) -> Tensor:
    """[q, 1] . [k, log w / scale], with the scale of the unextended head dimension.

    The value gets a zero channel: SDPA takes its flash path only for equal head dimensions.
    """
    assert w is not None
    scale = q.shape[-1] ** -0.5
    channel = (w.log() / scale).to(k.dtype)[:, None].expand(*k.shape[:-1], 1)
    extended = torch.cat([q, torch.ones_like(q[..., :1])], -1), torch.cat([k, channel], -1), F.pad(v, (0, 1))
    return F.scaled_dot_product_attention(*extended, scale=scale)[..., :-1]


def sdpa_unweighted(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@functools.cache
def compiled(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One kernel per shape, as a user of fixed meshes has it; dynamo would stop after eight of them."""
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    return torch.compile(attend, dynamic=False, fullgraph=True)


def _flex_scores(q: Tensor, k: Tensor, v: Tensor, log_w: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + log_w[key]

    return flex_attention(q, k, v, score_mod=score_mod)


def flex(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None) -> Tensor:
    """Compiled. log w is an input of it: inductor's CPU kernel reads what score_mod takes from memory."""
    assert w is not None
    return compiled(_flex_scores)(q, k, v, w.log())


FLEX = "(e) FlexAttention, score_mod"
FORMS: dict[str, Attention] = {
    OP: co.continuum_attention,
    "(a) plain PyTorch": dense,
    "(b) SDPA, log w mask": sdpa_mask,
    "(c) SDPA, log w channel": sdpa_channel,
    "(d) SDPA, no weights": sdpa_unweighted,
    FLEX: flex,
}
DENSE, UNWEIGHTED = "(a) plain PyTorch", "(d) SDPA, no weights"


def sdpa_path(form: str, x: Inputs) -> str:
    """The path SDPA takes where it is not flash: a mask that requires grad, for one, sends it to "math"."""
    if form == "(b) SDPA, log w mask":
        mask = x.weights.log().to(x.query.dtype)[None, None, None]
        choice = torch._fused_sdp_choice(x.query, x.key, x.value, attn_mask=mask)
    elif form in ("(c) SDPA, log w channel", UNWEIGHTED):
        choice = torch._fused_sdp_choice(x.query, x.key, x.value)
    else:
        return ""
    return {0: "math", 1: ""}.get(int(choice), f"path {int(choice)}")


def make_run(form: str, x: Inputs, passes: str) -> Callable[[], tuple[Tensor, ...]]:
    """A call that returns (out,) or (out, dq, dk, dv), and dw if the weights require a gradient."""
    attend = FORMS[form]
    wanted = [t for t in (x.query, x.key, x.value, x.weights) if t.requires_grad]

    def forward() -> tuple[Tensor, ...]:
        return (attend(x.query, x.key, x.value, x.weights),)

    def forward_backward() -> tuple[Tensor, ...]:
        out = attend(x.query, x.key, x.value, x.weights)
        return (out.detach(), *torch.autograd.grad(out, wanted, x.grad_out))

    return forward if passes == "forward" else forward_backward


def make_candidate(form: str, x: Inputs, passes: str, reference: dict[str, Tensor]) -> harness.Candidate:
    """``run`` with the whole grad_out is what is timed; parity takes x.rows and parity_grad_out."""
    names = ["out"]
    if passes != "forward":
        names += ["query", "key", "value"] + ["weights"] * x.weights.requires_grad
    run = make_run(form, x, passes)

    def parity() -> tuple[Tensor, ...]:
        out, *gradients = make_run(form, replace(x, grad_out=parity_grad_out(x)), passes)()
        return (out[..., x.rows, :], *gradients)

    return harness.Candidate(
        form, run, [reference[k] for k in names], BOUNDS[x.query.dtype], sdpa_path(form, x), parity
    )


def dense_bytes(n: int, dtype: torch.dtype) -> int:
    """Plain PyTorch holds three score-size buffers at once: the product, the sum with log w, the softmax."""
    return 3 * BATCH * HEADS * n * n * dtype.itemsize


def flex_candidate(
    x: Inputs, passes: str, reference: dict[str, Tensor], flex_size: int
) -> harness.Candidate | str:
    if x.query.shape[-2] > flex_size:
        return "not run"
    found = harness.attempt(lambda: make_candidate(FLEX, x, passes, reference))
    if found == "NotImplementedError" and passes != "forward":
        return f"no backward on CPUs ({found})"
    return found


def time_case(
    forms: Sequence[str],
    x: Inputs,
    passes: str,
    references: dict[bool, dict[str, Tensor]],
    rounds: int,
    flex_size: int,
) -> list[dict[str, Any]]:
    """Rows of one case. What does not fit, or what FlexAttention has not, is left out with the reason."""
    candidates, skipped = [], []
    for form in forms:
        need, free = dense_bytes(x.query.shape[-2], x.query.dtype), harness.available_bytes()
        reference = references[form != UNWEIGHTED]
        if form == DENSE and need >= 0.8 * free:
            found: harness.Candidate | str = f"would need {need / 1e9:.1f} GB of {free / 1e9:.1f}"
        elif form == FLEX:
            found = flex_candidate(x, passes, reference, flex_size)
        else:
            found = make_candidate(form, x, passes, reference)
        if isinstance(found, str):
            skipped.append({"candidate": form, "skipped": found})
        else:
            candidates.append(found)
    return harness.time_interleaved(candidates, rounds=rounds) + skipped


def time_all(args: argparse.Namespace, allocator: str) -> list[dict[str, Any]]:
    """All rows of one process; with kept memory only what depends on it, plain PyTorch, beside our op."""
    forms = list(FORMS) if allocator == "default" else [OP, DENSE]
    dtypes = [torch.float32] + [torch.bfloat16] * args.bfloat16
    at = max((n for n in args.sizes if n <= WEIGHTS_GRAD_SIZE), default=min(args.sizes))
    rows = []
    for dtype in dtypes:
        for dim in args.dims:
            for n in args.sizes:
                x = make_inputs(n, dim, dtype=dtype)
                if forms == [OP, DENSE] and dense_bytes(n, dtype) >= 0.8 * harness.available_bytes():
                    continue
                plain = {f != UNWEIGHTED for f in forms}
                references = {weighted: exact(x, weighted=weighted) for weighted in plain}
                cases = [("forward", forms, x)]
                cases.append(("forward + backward", forms, x.requiring_grad(weights=False)))
                if n == at and dim == args.dims[0] and dtype == torch.float32:
                    weighted_forms = [f for f in forms if f != UNWEIGHTED]
                    cases.append(
                        ("forward + backward, weights too", weighted_forms, x.requiring_grad(weights=True))
                    )
                for title, chosen, inputs in cases:
                    name = str(dtype).removeprefix("torch.")
                    harness.progress(f"{name}, {title}, N = {n}, d = {dim}, {allocator} memory")
                    passes = "forward" if title == "forward" else "forward + backward"
                    rounds = args.rounds if n <= 4096 else min(args.rounds, LARGE_ROUNDS)
                    timed = time_case(chosen, inputs, passes, references, rounds, args.flex_size)
                    label = {"table": f"{title}, {name}", "passes": passes, "case": {"d": dim, "N": n}}
                    rows += [{**label, "allocator": allocator, **row} for row in timed]
    return rows


def memory_row(form: str, passes: str, n: int) -> dict[str, Any]:
    """Peak memory of one call beyond its inputs and outputs, H = 1, d = 16."""
    dim = 16

    def prepare(size: int) -> Inputs:
        x = make_inputs(size, dim, heads=1)
        return x if passes == "forward" else x.requiring_grad(weights=False)

    make_run(form, prepare(min(n, 256)), passes)()
    x = prepare(n)
    growth, outputs = harness.peak_growth(make_run(form, x, passes))
    tensors = [x.query, x.key, x.value, x.weights] + [x.grad_out] * (passes != "forward")
    return {
        "candidate": form,
        "pass": passes,
        "shape": f"N = M = {n}, H = 1, d = {dim}, float32",
        **harness.memory_fields(tensors, growth, outputs, 4.0 * n * n),
    }


def finish_rows(rows: list[dict[str, Any]], ceilings: dict[str, float] | None) -> None:
    """Add what follows from the times: time over the time of our op, GFLOP/s, fraction of the ceiling."""
    ours = {}
    for row in rows:
        key = (row["table"], *row["case"].values(), row["allocator"])
        if row["candidate"] == OP:
            ours[key] = row["ms"]
        if "skipped" in row:
            continue
        dim, n = row["case"]["d"], row["case"]["N"]
        flops, exps = (BATCH * HEADS * n * n * c for c in COST[row["passes"]])
        row["gflops"] = flops * dim / row["ms"] * 1e-6
        row["speedup"] = row["ms"] / ours[key]
        if ceilings is not None and row["table"].endswith("float32"):
            ideal = flops * dim / ceilings["fma_gflops"] + exps / ceilings["exp2_giga_per_s"]
            row["ceiling_fraction"] = ideal * 1e-6 / row["ms"]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help="N <= 4096 and 3 rounds, not the published protocol"
    )
    parser.add_argument("--sizes", type=int, nargs="+", help=f"N = M (default: {SIZES})")
    parser.add_argument(
        "--dims", type=int, nargs="+", default=list(DIMS), help=f"head dims (default: {DIMS})"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of torch, OpenMP and BLAS (default: 2)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"clean samples per candidate (default: 7, short: 3; N > 4096: at most {LARGE_ROUNDS})",
    )
    parser.add_argument(
        "--flex-size", type=int, help="largest N of FlexAttention (default: 16384, short: 4096)"
    )
    parser.add_argument("--bfloat16", action="store_true", help="bfloat16 rows besides float32")
    parser.add_argument("--memory", action="store_true", help="peak memory at --memory-size points besides")
    parser.add_argument("--memory-size", type=int, default=GRID_POINTS, help=f"(default: {GRID_POINTS})")
    parser.add_argument("--no-ceilings", action="store_true", help="leave the fraction of the ceiling out")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/OP-MACHINE.json)")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.sizes is None:
        args.sizes = [n for n in SIZES if n <= 4096 or not args.short]
    if args.rounds is None:
        args.rounds = 3 if args.short else 7
    if args.flex_size is None:
        args.flex_size = 4096 if args.short else max(SIZES)
    for name in ("sizes", "dims"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    for name in ("rounds", "threads", "memory_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    return args


def work(args: argparse.Namespace) -> None:
    harness.start_worker(args.threads)
    task = args.worker
    result = memory_row(**task["memory"]) if "memory" in task else time_all(args, task["allocator"])
    json.dump(result, sys.stdout)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    if args.worker is not None:
        return work(args)

    def worker(task: dict[str, Any]) -> Any:
        arguments = [*argv, "--worker", json.dumps(task)]
        return harness.run_worker(
            __file__, arguments, threads=args.threads, allocator=task.get("allocator", "default")
        )

    settings = {"threads": args.threads, "B": BATCH, "H": HEADS, "rounds": args.rounds, "short": args.short}
    document = harness.new_document(OP, settings)
    ceilings = None if args.no_ceilings else measure_ceilings([args.threads])
    document["ceilings"] = ceilings
    if args.memory:  # first: it fails at once where the op forms N x N
        forms, passes = (OP, "(b) SDPA, log w mask"), tuple(COST)
        tasks = [{"form": f, "passes": p, "n": args.memory_size} for f in forms for p in passes]
        document["memory"] = [worker({"memory": task}) for task in tasks]
    document["rows"] = [row for allocator in harness.ALLOCATORS for row in worker({"allocator": allocator})]
    finish_rows(document["rows"], ceilings and ceilings["threads"][str(args.threads)])
    suffix = "-short" if args.short else ""
    harness.publish(document, harness.result_path(OP, document, args.out, suffix))


if __name__ == "__main__":
    main(sys.argv[1:])
