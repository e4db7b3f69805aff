"""How far every operator is from its formula: the worst error over fixed hard inputs.

For each backend, dtype and result, in units of eps of the dtype times the size of what is summed (max|value|
for the output, 1 or max|lse| for lse, the sum over absolute values for a gradient), against the formula in
float64 (longer for float64). Beside it stand plain PyTorch's and that of scaled_dot_product_attention with
log w (and the distance) in its mask, on the same inputs in the same dtype. The budget is max(2 x plain's, 8).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests"), str(ROOT)]

import helpers  # noqa: E402
import patch_helpers  # noqa: E402
import position_helpers  # noqa: E402
from gpu.record import write_json  # noqa: E402
from harness import describe_machine, progress  # noqa: E402
from operator_cases import INTERPRETED, SERVED_BY_TRITON, Case, Tensors, backend, backends  # noqa: E402
from trust import record  # noqa: E402

RESULT = ROOT / "bench" / "results" / "accuracy.json"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LIMIT = 1.25  # what CI allows of the committed error
LAST_ROUNDING = 0.5  # no implementation can be asked for less
Row = dict[str, Any]

# --- inputs --------------------------------------------------------------------------------------


def tensor(*shape: int, seed: int) -> Tensor:
    return helpers.draw(shape, torch.float64, seed)


def unit(*shape: int, seed: int) -> Tensor:
    return position_helpers.points(shape, torch.float64, seed)


def _attention(n: int, m: int, d: int = 16, dv: int = 8, *, factor: tuple[float, float] = (1, 1)) -> Tensors:
    return {
        "query": factor[0] * tensor(1, 2, n, d, seed=1),
        "key": factor[1] * tensor(1, 2, m, d, seed=2),
        "value": tensor(1, 2, m, dv, seed=3),
        "weights": helpers.draw((m,), torch.float64, 4, positive=True),
    }


def _graded(m: int) -> Tensor:
    return torch.logspace(-12, 0, m, dtype=torch.float64)


def _late(n: int, m: int) -> Tensors:
    t = _attention(n, m)
    t["query"][..., 0], t["key"][..., 0] = 1.0, torch.linspace(-30, 30, m, dtype=torch.float64) * 4
    return t


def _places(n: int, m: int, rate: float, offset: float = 0.0) -> Tensors:
    """Points of the unit square on multiples of 1/64, which float32 holds 1e5 away from the origin too."""
    places = {"query_pos": unit(n, 2, seed=5), "key_pos": unit(m, 2, seed=6)}
    rates = torch.tensor([rate, rate / 7], dtype=torch.float64)
    return {name: (p * 64).floor() / 64 + offset for name, p in places.items()} | {"rate": rates}


def _values(m: int) -> Tensors:
    return {"value": tensor(2, m, 3, seed=3), "weights": helpers.draw((m,), torch.float64, 4, positive=True)}


def _patched(grid: Sequence[int], *, factor: float = 1.0, graded: bool = False, d: int = 4) -> Tensors:
    names = ("query", "key", "value")
    t = {name: tensor(1, *grid, 2, d, seed=i) for i, name in enumerate(names)}
    t["query"] *= factor
    t["weights"] = helpers.draw(tuple(grid), torch.float64, 4, positive=True)
    if graded:
        t["weights"] = _graded(math.prod(grid)).reshape(tuple(grid)) * 100
    return t


Input = tuple[str, Tensors, dict[str, Any]]


def large_inputs(op: str) -> Iterator[Input]:
    """As many points as a grid of 416 x 416 has."""
    if op == "patch_attention":
        weights = {"weights": torch.full((416, 416), 1e-3, dtype=torch.float64)}
        yield "416 x 416 points", _patched((416, 416)) | weights, {"patch_size": [104, 104]}
        return
    for n, m in [(4, 173_056), (173_056, 4)]:
        tensors = _places(n, m, 10.0) | _values(m) if op == "position_attention" else _attention(n, m)
        yield f"{n} x {m}", tensors, {}


def inputs(op: str) -> Iterator[Input]:
    """Name, float64 tensors and options of each input."""
    many, few = 1025, 16
    if op == "patch_attention":
        yield "1 point", _patched((1,)), {"patch_size": [1]}
        yield "10 x 20 patches of 4 x 4", _patched((40, 80)), {"patch_size": [4, 4]}
        yield "graded weights", _patched((12, 20), graded=True), {"patch_size": [4, 4]}
        yield "large logits", _patched((40, 80), factor=1000.0), {"patch_size": [4, 4]}
        yield "129 patches of 1 point", _patched((129,)), {"patch_size": [1]}
        return
    if op == "position_attention":
        shapes = [(1, 1), (17, 129), (few, many), (many, few)]
        for n, m in shapes:
            yield f"{n} x {m}", _places(n, m, 10.0) | _values(m), {}
        yield "graded weights", _places(65, 130, 10.0) | _values(130) | {"weights": _graded(130)}, {}
        yield "rate 1e5", _places(65, 130, 1e5) | _values(130), {}
        yield "coordinates offset by 1e5", _places(65, 130, 10.0, 1e5) | _values(130), {}
        yield "both", _places(65, 130, 1e5, -1e5) | _values(130), {}
        return
    for n, m in [(1, 1), (17, 129), (few, many), (many, few)]:
        yield f"{n} x {m}", _attention(n, m), {}
    yield "graded weights", _attention(65, 130) | {"weights": _graded(130)}, {}
    # With softmax, many queries: where two keys are about to change places decides the error, and not every
    # implementation meets the same pair. Without it, what float16 can hold.
    n, large = (1025, (50, 10)) if op == "continuum_attention" else (65, (5, 2))
    yield "large logits", _attention(n, 130, factor=large), {}
    if op == "continuum_attention":
        yield "maximum arrives late", _late(33, 300), {}
        yield "rate 1e5", _attention(65, 130) | _places(65, 130, 1e5), {}
        yield "coordinates offset by 1e5", _attention(65, 130) | _places(65, 130, 10.0, 1e5), {}


def cast(op: str, tensors: Tensors, options: dict[str, Any], dtype: torch.dtype) -> Case:
    """Weights, positions and rate in float32 at least, the rest in dtype."""
    acc, narrow = helpers.lse_dtype(dtype), ("query", "key", "value")
    return Case(op, {n: t.to(dtype if n in narrow else acc) for n, t in tensors.items()}, options)


# --- what stands beside --------------------------------------------------------------------------


def plain(case: Case, t: Tensors) -> tuple[Tensor, ...]:
    """What a user would write in the same dtype, with an N x M matrix."""
    if case.op == "position_attention":
        return position_helpers.plain(**t)
    if case.op == "patch_attention":
        size = case.options["patch_size"]
        return patch_helpers.plain(t["query"], t["key"], t["value"], t["weights"], size)
    if case.op == "continuum_attention":
        return helpers.plain(**t)
    return (t["query"] @ (t["key"].mT @ (t["weights"].to(case.dtype)[..., None] * t["value"])),)


def peer(case: Case, t: Tensors) -> tuple[Tensor, ...] | None:
    """scaled_dot_product_attention with log w - rate cdist^2 as its mask; None for the linear operators."""
    attend = torch.nn.functional.scaled_dot_product_attention
    if case.op == "patch_attention":
        size, grid = case.options["patch_size"], t["query"].shape[1:-2]
        weighted = (t["weights"].to(case.dtype)[..., None, None] * t["query"], t["key"], t["value"])
        q, k, v = (
            patch_helpers.reference.patches(x, size).permute(0, 3, 1, 2, 4).flatten(-2) for x in weighted
        )
        out = attend(q, k, v, scale=1.0).unflatten(-1, (math.prod(size), -1)).permute(0, 2, 3, 1, 4)
        return (patch_helpers.reference.assemble(out, grid, size),)
    if case.linear:
        return None
    mask = t["weights"].log()[None, None, None]
    if "query_pos" in t:
        mask = mask - t["rate"][:, None, None] * torch.cdist(t["query_pos"], t["key_pos"]).square()
    mask = mask.to(case.dtype)
    if case.op == "continuum_attention":
        return (attend(t["query"], t["key"], t["value"], attn_mask=mask),)
    batch, heads, n, m = len(t["value"]), len(t["rate"]), len(t["query_pos"]), len(t["key_pos"])
    value = t["value"][:, None].expand(-1, heads, -1, -1)
    blank = [value.new_zeros(batch, heads, rows, 8) for rows in (n, m)]
    return (attend(*blank, value, attn_mask=mask),)


def derive(function: Callable[[Case, Tensors], Any], case: Case, grad_out: Tensor) -> Tensors | None:
    """Results by name with the gradients of sum(grad_out * out)."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in case.tensors.items()}
    outputs = function(case, leaves)
    if outputs is None:
        return None
    grads = torch.autograd.grad(outputs[0], list(leaves.values()), grad_out, allow_unused=True)
    found = dict(zip(("out", "lse"), (t.detach() for t in outputs), strict=False))
    return found | {f"d_{name}": g for name, g in zip(leaves, grads, strict=True) if g is not None}


def own(case: Case, t: Tensors) -> tuple[Tensor, ...]:
    return tuple(case.call(t).values())


# --- the table -----------------------------------------------------------------------------------


def errors(
    found: Tensors | None, true: dict[str, Any], size: dict[str, float], dtype: torch.dtype
) -> dict[str, float]:
    if found is None:
        return {}
    scale = {
        n: torch.finfo(helpers.lse_dtype(dtype) if n == "lse" else dtype).eps * s for n, s in size.items()
    }
    return {
        name: helpers.error_of(found[name], exact) / scale[name] if scale[name] > 0 else 0.0
        for name, exact in true.items()
        if name in found
    }


def worst(op: str, dtype: torch.dtype, served: Sequence[str], given: Iterable[Input]) -> list[Row]:
    """A row for each backend and result: the worst error, on which input, plain's and the peer's worst."""
    rows: dict[tuple[str, str], Row] = {}
    beside: dict[tuple[str, str], float] = {}
    for name, tensors, options in given:
        if INTERPRETED and max(t.numel() for t in tensors.values()) > 5_000:
            continue
        case = cast(op, tensors, options, dtype)
        g = case.cotangents()
        zero = g | ({"lse": torch.zeros_like(g["lse"])} if "lse" in g else {})
        true, size = case.exact(zero)
        for who, function in (("plain", plain), ("peer", peer)):
            for result, error in errors(derive(function, case, g["out"]), true, size, dtype).items():
                beside[who, result] = max(beside.get((who, result), 0.0), error)
        for b in served:
            with backend(b, None):
                found = derive(own, case, g["out"])
            for result, error in errors(found, true, size, dtype).items():
                if not math.isfinite(error):
                    raise AssertionError(f"{op} {b} {dtype} {result}: not finite on {name}")
                row = rows.setdefault((b, result), {"error": -1.0})
                if error > row["error"]:
                    row |= {"error": error, "input": name}
    label = str(dtype).removeprefix("torch.")
    return [
        {"op": op, "backend": b, "dtype": label, "result": result, **row}
        | {who: _finite(beside.get((who, result))) for who in ("plain", "peer")}
        for (b, result), row in rows.items()
    ]


def _finite(error: float | None) -> float | str | None:
    """JSON has no infinity: a result that is not finite where the true one is has no error to state."""
    return error if error is None or math.isfinite(error) else "not finite"


def table(
    given: Callable[[str], Iterable[Input]],
    served: Sequence[str],
    ops: Sequence[str],
    dtypes: Sequence[torch.dtype],
) -> list[Row]:
    torch.set_num_threads(1)
    rows = []
    for op in ops:
        for dtype in dtypes:
            progress(f"{op} {dtype}")
            rows += worst(op, dtype, served, given(op))
    return rows


OPS = (
    "continuum_attention",
    "position_attention",
    "patch_attention",
    "galerkin_attention",
    "fourier_attention",
)


def cpu_table() -> list[Row]:
    return table(inputs, backends(), OPS, DTYPES)


def large_table() -> list[Row]:
    """Without float64, whose reference in longer arithmetic would take minutes."""
    return table(large_inputs, backends(), OPS, DTYPES[1:])


def interpreted_table() -> list[Row]:
    """The Triton kernels under the interpreter, which has to be chosen before triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CONTINUUM_OPS_NO_EXT": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--interpreted"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def merged(rows: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    """Of each row the worse of the two, plain PyTorch's and the peer's worst too."""
    more, found = {key_of(row): row for row in others}, []
    for row in rows:
        other = more.get(key_of(row), row)
        beside = {}
        for who in ("plain", "peer"):
            known = [r[who] for r in (row, other)]
            texts = [x for x in known if isinstance(x, str) or x is None]
            beside[who] = texts[0] if texts else max(known)
        found.append({**max(row, other, key=lambda r: r["error"]), **beside})
    return found


def key_of(row: Row) -> tuple[str, ...]:
    return row["op"], row["backend"], row["dtype"], row["result"]


def beyond(row: Row) -> bool:
    """Whether the error is beyond the budget."""
    rough = row["plain"]
    return row["error"] > max(8.0, 2 * rough if isinstance(rough, float) else 0.0)


def regressions(rows: Sequence[Row], committed: Sequence[Row]) -> list[str]:
    """The rows that are more than LIMIT times as far off as the committed ones, or that have none."""
    known, found = {key_of(row): row["error"] for row in committed}, []
    for row in rows:
        if key_of(row) not in known:
            found.append(f"{' '.join(key_of(row))}: not in the committed table")
        elif row["error"] > max(LIMIT * known[key_of(row)], LAST_ROUNDING):
            text = f"{row['error']:.3g} eps on {row['input']}, committed {known[key_of(row)]:.3g}"
            found.append(f"{' '.join(key_of(row))}: {text}")
    return found


def markdown(rows: Sequence[Row]) -> str:
    """One line for each operator, dtype and result: backends in columns, then plain PyTorch and SDPA."""
    served = list(dict.fromkeys(row["backend"] for row in rows))
    lines = [
        f"| operator | dtype | result | {' | '.join(served)} | plain PyTorch | SDPA |",
        "|---" * (5 + len(served)) + "|",
    ]
    cells: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        cell = cells.setdefault((row["op"], row["dtype"], row["result"]), {})
        cell |= {row["backend"]: row["error"]}
        if row["backend"] != "triton":  # which has seen the small inputs only
            cell |= {"plain": row["plain"], "peer": row["peer"]}
    for (op, dtype, result), cell in cells.items():
        shown = [cell.get(name) for name in (*served, "plain", "peer")]
        texts = [f"{x:.2g}" if isinstance(x, float) else x or "-" for x in shown]
        lines.append(f"| {op} | {dtype} | {result.replace('d_', 'gradient of ')} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--short", action="store_true", help="up to 1,025 points, compared with the committed file"
    )
    parser.add_argument("--interpreted", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.interpreted:
        print(json.dumps(table(inputs, ["triton"], SERVED_BY_TRITON, DTYPES[1:])))
        return
    if args.short:
        rows = cpu_table()
        print(markdown(rows))
        found = regressions(rows, json.loads(RESULT.read_text())["short"])
        sys.exit("\n".join(found) if found else 0)
    document: dict[str, Any] = {
        "unit": "eps of the dtype times the size of the terms",
        "machine": describe_machine(),
    }
    document["short"] = cpu_table()
    write_json(RESULT, document)
    document["full"] = merged(document["short"], large_table())
    write_json(RESULT, document)
    interpreted = interpreted_table()
    document["short"] += interpreted
    document["full"] += interpreted
    write_json(RESULT, document)
    print(markdown(document["full"]))
    record("accuracy", figures(document))


def figures(document: dict[str, Any]) -> dict[str, Any]:
    form = "full" if "full" in document else "short"
    rows = document[form]
    worst_of = {
        op: {
            dtype: max(
                r["error"] for r in rows if r["op"] == op and r["dtype"] == dtype and r["result"] == "out"
            )
            for dtype in dict.fromkeys(r["dtype"] for r in rows if r["op"] == op)
        }
        for op in OPS
    }
    return {
        "form": form,
        "rows": len(rows),
        "rows_beyond_the_budget": [
            f"{r['op']} {r['backend']} {r['dtype']} {r['result']}" for r in rows if beyond(r)
        ],
        "worst_out_in_eps": worst_of,
        "limit_in_ci": LIMIT,
        "file": "bench/results/accuracy.json",
        "commit": document["machine"]["commit"],
    }


if __name__ == "__main__":
    main()
