"""Random calls of the C++ entry points, for a build with sanitizers (ci/fuzz.sh) or any other.

    python ci/fuzz.py [--seconds 60] [--first SEED] [--cases N] [--threads 1] [--record]

A case is a seed: shapes (empty ones too), dtypes, and for each tensor a layout: contiguous, permuted, with
gaps, at an offset, expanded, overlapping, or with strides beyond 2^31 elements. The result must be that of
contiguous copies. Every sixth case has an argument of a wrong shape, dtype or number of dimensions, or values
that are no weights, and must end in an exception or a result. A sanitizer ends the process at its first
finding; the case is then the one in build/fuzz-cases.log, and `--first SEED --cases 1` repeats it.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import continuum_ops  # noqa: F401  (registers the operators)
from continuum_ops.backends import extension

ROOT = Path(__file__).resolve().parent.parent
OPS = torch.ops.continuum_ops
KERNELS = extension()[0]
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
HUGE = 2**31 + 64  # elements between two rows
HUGE_ROWS = 3
LAYOUTS = ("contiguous", "permuted", "gaps", "offset", "expanded", "overlapping", "huge")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Mismatch(AssertionError):
    """Strides changed a result."""


class Case:
    """One call, drawn from a seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.folder = folder
        self.wild = self.random.random() < 0.15  # numbers of any size, NaN and infinities among them
        self.wrong = self.random.random() < 1 / 6
        self.known: dict[tuple[int, ...], Tensor] = {}

    def size(self, most: int = 70) -> int:
        """Small sizes, those around a block's, and now and then 0."""
        return self.random.choice((0, 1, 2, 3, 5, 8, 16, 17, 31, 33, 64, 65, self.random.randint(1, most)))

    def maybe(self, share: float = 0.5) -> bool:
        return self.random.random() < share

    def numbers(self, shape: tuple[int, ...], dtype: torch.dtype, positive: bool) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if positive:
            x = x.abs()
            x[x < 0.2] = 0.0
        if self.wild and x.numel():
            x = x * 10.0 ** self.random.randint(-40, 40)
            if not positive and self.maybe():
                x.view(-1)[self.random.randrange(x.numel())] = self.random.choice(
                    (math.nan, math.inf, -math.inf)
                )
        if dtype == torch.bool:
            return x > -0.5
        return x.clamp(-1e30, 1e30).to(dtype) if positive else x.to(dtype)

    def tensor(self, *shape: int, dtype: torch.dtype, positive: bool = False, plain: bool = False) -> Tensor:
        """Numbers of a shape in a layout of any kind."""
        layout = "contiguous" if plain else self.random.choice(LAYOUTS)
        dims = len(shape)
        if layout == "permuted" and dims > 1:
            order = self.random.sample(range(dims), dims)
            stored = self.numbers(tuple(shape[i] for i in order), dtype, positive)
            return stored.permute([order.index(i) for i in range(dims)])
        if layout == "gaps" and dims:
            steps = [self.random.randint(1, 3) for _ in shape]
            stored = self.numbers(tuple(n * s for n, s in zip(shape, steps, strict=True)), dtype, positive)
            return stored[tuple(slice(None, None, s) for s in steps)]
        if layout == "offset":
            skipped, count = self.random.randint(1, 5), math.prod(shape)
            return self.numbers((skipped + count,), dtype, positive)[skipped:].view(shape)
        if layout == "expanded" and dims:
            kept = tuple(1 if n > 1 and self.maybe() else n for n in shape)
            return self.numbers(kept, dtype, positive).expand(shape)
        if layout == "overlapping" and dims and min(shape) > 0:
            strides = [self.random.randint(0, 3) for _ in shape]
            span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            return self.numbers((span,), dtype, positive).as_strided(shape, strides)
        if layout == "huge" and dims > 1 and 0 < shape[-2] <= HUGE_ROWS and math.prod(shape) < 1000:
            return self._huge(self.numbers(shape, dtype, positive))
        return self.numbers(shape, dtype, positive)

    def _huge(self, values: Tensor) -> Tensor:
        """The same numbers with the last axis but one at strides beyond 2^31, in a file of holes."""
        count = math.prod(values.shape[:-2]) * values.shape[-1]
        size = HUGE * (values.shape[-2] - 1) + count
        file = tempfile.NamedTemporaryFile(dir=self.folder)  # noqa: SIM115  (open as long as the storage)
        storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=size * values.element_size())
        strides = [0] * values.dim()
        strides[-1], strides[-2], step = 1, HUGE, values.shape[-1]
        for i in range(values.dim() - 3, -1, -1):
            strides[i], step = step, step * values.shape[i]
        view = torch.empty(0, dtype=values.dtype).set_(storage, 0, values.shape, tuple(strides))  # type: ignore[call-overload]
        view.copy_(values)
        return view

    def spoiled(self, args: list[Any]) -> list[Any]:
        """One tensor of another shape, dtype, number of dimensions, or with values that are no weights."""
        places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        place = self.random.choice(places)
        t = args[place]
        kinds = ["dtype", "scalar", "flat", "empty"] + (
            ["longer", "shorter", "negative", "batched"] if t.dim() else []
        )
        kind = self.random.choice(kinds)
        if kind == "dtype":
            t = t.to(self.random.choice((*DTYPES, torch.int64, torch.bool, torch.complex64)))
        elif kind == "scalar":
            t = t.new_zeros(())
        elif kind == "flat":
            t = t.reshape(-1)
        elif kind == "empty":
            t = t.new_empty(0)
        elif kind == "batched":
            t = t[None]
        elif kind == "negative":
            t = -t.clone() if t.dtype != torch.bool else ~t
        else:
            axis = self.random.randrange(t.dim())
            n = t.shape[axis]
            t = (
                t.narrow(axis, 0, n - 1)
                if kind == "shorter" and n
                else torch.cat([t, t[(slice(None),) * axis + (slice(0, 1),)]], axis)
            )
        return [*args[:place], t, *args[place + 1 :]]


def accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def call(case: Case, op: Callable[..., Any], args: list[Any]) -> tuple[Tensor, ...] | None:
    """The op's results, compared with those of contiguous copies; None where a spoiled call was refused."""
    spoiled = case.wrong and case.maybe()
    if spoiled:
        case.wrong = False
        args = case.spoiled(args)
    try:
        found = op(*args)
    except REFUSALS:
        if spoiled or case.wild:
            return None
        raise
    found = (found,) if isinstance(found, Tensor) else tuple(found)
    if not spoiled and not case.wild:
        copies = op(*(a.contiguous().clone() if isinstance(a, Tensor) else a for a in args))
        copies = (copies,) if isinstance(copies, Tensor) else tuple(copies)
        for i, (a, b) in enumerate(zip(found, copies, strict=True)):
            # The record of a forward is the kernel's own: a mask read as one of keys changes what it is
            # relative to, and neither out nor lse.
            if i < 2 or "forward" not in str(op):
                compare(f"{op} result {i}", a, b)
    return None if spoiled else found


def compare(name: str, a: Tensor, b: Tensor) -> None:
    """Sums in another order, no more: a few roundings of the largest number."""
    if a.shape != b.shape:
        raise Mismatch(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    x, y = a.double(), b.double()
    finite = x.isfinite() & y.isfinite()
    if not torch.equal(x[~finite].nan_to_num(7.0, 8.0, 9.0), y[~finite].nan_to_num(7.0, 8.0, 9.0)):
        raise Mismatch(f"{name}: NaN or infinity at different places")
    if not finite.any():
        return
    size = max(1.0, float(y[finite].abs().max()))
    apart = float((x - y)[finite].abs().max())
    if apart > 64 * torch.finfo(a.dtype).eps * size:
        raise Mismatch(f"{name}: {apart:.3e} apart, largest number {size:.3e}")


def continuum(case: Case) -> None:
    dtype = case.random.choice(DTYPES)
    acc = accumulation(dtype)
    leads = tuple(case.random.choice((1, 1, 2, 3)) for _ in range(case.random.randint(0, 2)))
    n, m, d, dv = case.size(), case.size(700) if case.maybe(0.2) else case.size(), case.size(), case.size()
    q = case.tensor(*leads, n, d, dtype=dtype)
    k, v = case.tensor(*leads, m, d, dtype=dtype), case.tensor(*leads, m, dv, dtype=dtype)
    w = case.tensor(*leads, m, dtype=acc, positive=True) if case.maybe() else None
    mask = case.tensor(*leads, n, m, dtype=torch.bool) if case.maybe(0.3) else None
    shared = tuple(1 if case.maybe() else size for size in leads)
    dims = case.random.randint(1, 4)
    positions = case.maybe(0.4)
    x = case.tensor(*shared, n, dims, dtype=acc) if positions else None
    y = case.tensor(*shared, m, dims, dtype=acc) if positions else None
    rate = case.tensor(*shared, dtype=acc, positive=True) if positions and case.maybe(0.7) else None
    radius = case.tensor(*shared, n, dtype=acc, positive=True) if positions and case.maybe(0.3) else None
    period = (
        [case.random.choice((1.5, math.inf)) for _ in range(dims)] if positions and case.maybe(0.3) else None
    )
    dropout = case.random.choice((0.0, 0.0, 0.0, 0.3, 1.0))
    seed = torch.tensor(case.random.randrange(2**62)) if dropout else None
    options = [period, case.random.choice((1.0, 0.1, -0.5, 0.0)), dropout, case.maybe(0.3)]
    inputs = [q, k, v, w, mask, x, y, rate, radius, seed]
    results = call(case, OPS.continuum_attention_forward, [*inputs, *options])
    if not positions and mask is None and case.maybe(0.3):
        call(case, OPS.continuum_attention_plain, [q, k, v, w, None, options[3]])
    if results is None:
        return
    out, lse, stats = results
    grad_out = case.tensor(*out.shape, dtype=dtype)
    grad_lse = case.tensor(*lse.shape, dtype=acc) if case.maybe() else None
    needs = [case.maybe(), case.maybe(), case.maybe()]
    call(case, OPS.continuum_attention_backward, [grad_out, grad_lse, *inputs, out, stats, *options, *needs])


def patch(case: Case) -> None:
    dtype = case.random.choice(DTYPES)
    acc = accumulation(dtype)
    axes = case.random.randint(1, 3)
    size = [case.random.randint(1, 4) for _ in range(axes)]
    grid = [s * case.random.choice((0, 1, 2, 3) if case.maybe(0.1) else (1, 2, 3, 5)) for s in size]
    other = grid if case.maybe() else [s * case.random.choice((1, 2, 4)) for s in size]
    batch, heads = case.random.choice((0, 1, 2) if case.maybe(0.1) else (1, 2)), case.random.choice((1, 2, 3))
    d, dv = (case.random.choice((0, 1, 3, 8, 16, 17, 130)) for _ in range(2))
    q = case.tensor(batch, *grid, heads, d, dtype=dtype)
    k, v = (case.tensor(batch, *other, heads, c, dtype=dtype) for c in (d, dv))
    w = case.tensor(case.random.choice((1, batch)), *grid, dtype=acc, positive=True) if case.maybe() else None
    scale = case.random.choice((None, 0.1, -0.2))
    results = call(case, OPS.patch_attention_forward, [q, k, v, w, size, scale])
    if results is None:
        return
    out, lse, probabilities = results
    grad_out = case.tensor(*out.shape, dtype=dtype)
    grad_lse = case.tensor(*lse.shape, dtype=acc) if case.maybe() else None
    needs = [case.maybe(0.7) for _ in range(4)]
    call(
        case,
        OPS.patch_attention_backward,
        [grad_out, grad_lse, q, k, v, w, lse, probabilities, size, scale, needs],
    )


def position(case: Case) -> None:
    dtype = case.random.choice(DTYPES)
    acc = accumulation(dtype)
    batch, heads = (
        case.random.choice((0, 1, 2, 3) if case.maybe(0.2) else (1, 2, 3)),
        case.random.choice((1, 2, 3)),
    )
    n, m, d, channels = case.size(300), case.size(300), case.random.randint(0, 4), case.size()
    geometry = case.random.choice((1, batch))
    places = torch.float64 if case.maybe(0.3) else acc
    x, y = case.tensor(geometry, n, d, dtype=places), case.tensor(geometry, m, d, dtype=places)
    value = case.tensor(batch, case.random.choice((1, heads)), m, channels, dtype=dtype)
    rate = case.tensor(heads, dtype=acc, positive=True)
    w = case.tensor(case.random.choice((1, batch)), m, dtype=acc, positive=True) if case.maybe() else None
    radius = (
        case.tensor(case.random.choice((1, batch)), n, dtype=acc, positive=True) if case.maybe(0.4) else None
    )
    period = [case.random.choice((1.5, math.inf)) for _ in range(d)] if case.maybe(0.3) else None
    if KERNELS is not None:
        KERNELS.set_grids(KERNELS.Grids.when_possible if case.maybe() else KERNELS.Grids.when_faster)
    results = call(case, OPS.position_attention_forward, [x, y, value, rate, w, radius, period])
    if results is None:
        return
    out, lse, stats = results
    grad_out = case.tensor(*out.shape, dtype=dtype)
    grad_lse = case.tensor(*lse.shape, dtype=acc) if case.maybe() else None
    needs = [case.maybe(0.7) for _ in range(5)]
    call(
        case,
        OPS.position_attention_backward,
        [grad_out, grad_lse, x, y, value, rate, w, out, lse, stats, radius, period, needs],
    )
    if case.maybe(0.3):
        flat = [case.tensor(n, d, dtype=acc), case.tensor(m, d, dtype=acc)]
        weights = case.tensor(m, dtype=acc, positive=True) if case.maybe() else None
        call(case, OPS.position_attention_plain, [*flat, value, rate, weights])


def galerkin(case: Case) -> None:
    dtype = case.random.choice((torch.float32, torch.float64))
    leads = tuple(case.random.choice((1, 2, 3)) for _ in range(case.random.randint(0, 2)))
    n, m, d, dv = (case.size(40) for _ in range(4))
    q, k, v = (case.tensor(*leads, *s, dtype=dtype) for s in ((n, d), (m, d), (m, dv)))
    w = (
        case.tensor(*leads[case.random.randint(0, len(leads)) :], m, dtype=dtype, positive=True)
        if case.maybe()
        else None
    )
    if call(case, OPS.galerkin_attention_small, [q, k, v, w]) is None:
        return
    grad_out = case.tensor(*leads, n, dv, dtype=dtype)
    call(case, OPS.galerkin_attention_small_backward, [grad_out, q, k, v, w, case.maybe()])


def transform(case: Case) -> None:
    dtype = case.random.choice((torch.float32, torch.float64))
    d = case.random.randint(1, 3)
    patches, points, rows = ([case.random.randint(1, 4) for _ in range(d)] for _ in range(3))
    batch, channels = case.random.randint(0, 3), case.size(40)
    entries = sum((3 if i + 1 < d else 2) * points[i] * rows[i] for i in range(d))
    tables = case.tensor(entries, dtype=dtype, plain=True)
    u = case.tensor(
        batch, *(p * n for p, n in zip(patches, points, strict=True)), channels, dtype=dtype, plain=True
    )
    results = call(case, OPS.patch_dft, [u, tables, patches, points, rows])
    if results is not None:
        call(case, OPS.patch_dft_inverse, [results[0], tables, patches, points, rows])


def axis(case: Case) -> None:
    dtype = case.random.choice((torch.float32, torch.float64))
    before, columns = case.random.randint(0, 3), case.size()
    m, n = case.size(300), case.size(300)
    x, grad = (case.tensor(before, rows, columns, dtype=dtype, plain=True) for rows in (n, m))
    matrix = case.tensor(m, n, dtype=dtype)

    def product(matrix: Tensor, x: Tensor, out: Tensor) -> Tensor:
        OPS.axis_product(matrix, x, out)
        return out

    call(case, product, [matrix, x, torch.zeros(before, m, columns, dtype=dtype)])
    call(case, OPS.axis_contraction, [grad, x])


KINDS = (axis, continuum, continuum, patch, position, position, galerkin, transform)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--cases", type=int, metavar="N")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="keep the figures in bench/results/trust.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    log = ROOT / "build" / "fuzz-cases.log"
    log.parent.mkdir(exist_ok=True)
    end, seed, counts = (
        time.monotonic() + options.seconds,
        options.first,
        dict.fromkeys((k.__name__ for k in KINDS), 0),
    )
    with tempfile.TemporaryDirectory() as folder, log.open("w") as file:
        while time.monotonic() < end and (options.cases is None or seed < options.first + options.cases):
            case = Case(seed, Path(folder))
            kind = case.random.choice(KINDS)
            file.seek(0)
            print(
                f"--first {seed} --cases 1 --threads {options.threads}  # {kind.__name__}",
                file=file,
                flush=True,
            )
            file.truncate()
            try:
                kind(case)
            except Exception:
                print(f"case {seed} ({kind.__name__})", file=sys.stderr)
                raise
            counts[kind.__name__] += 1
            seed += 1
    print(f"{seed - options.first} cases, {options.threads} threads, no finding:", counts)
    if options.record:
        sys.path.insert(0, str(ROOT / "bench"))
        from trust import record

        from continuum_ops import _C

        build = _C.build_info().get("sanitizer", "none")
        figures = {"cases": seed - options.first, "seconds": options.seconds, "threads": options.threads}
        figures |= {"kernels": _C.isa(), "calls": counts, "findings": 0}
        record("fuzzing", {f"sanitizer {build}": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
