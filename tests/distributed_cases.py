"""Cases of the operators of continuum_ops.distributed: tensors, how they are cut, what a rank computes."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import Any

import helpers
import patch_helpers
import position_helpers
import torch
from helpers import draw, lse_dtype
from torch import Tensor

import continuum_ops as co
from continuum_ops.ops._philox import dropout_keep

ring_module = importlib.import_module("continuum_ops.distributed.continuum_attention")
forms_module = importlib.import_module("continuum_ops.distributed._forms")


@dataclass(frozen=True)
class Ranks:
    group: Any
    rank: int
    size: int

    def part(self, x: Tensor | None, axis: int, sizes: dict[int, tuple[int, ...]]) -> Tensor | None:
        """This rank's part of a tensor whose points are cut into `sizes`."""
        if x is None:
            return None
        mine = sizes[self.size]
        return x.narrow(axis, sum(mine[: self.rank]), mine[self.rank])


# Parts longer and shorter than what the derivative of a block may treat as short, and empty ones.
QUERIES = {2: (70, 3), 4: (70, 0, 1, 2)}
KEYS = {2: (300, 13), 4: (5, 300, 0, 8)}
NO_KEYS = {2: (0, 0), 4: (0, 0, 0, 0)}
DROPOUT_SEED = 11


@dataclass(frozen=True)
class Continuum:
    name: str
    weights: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64
    keys: dict[int, tuple[int, ...]] = field(default_factory=lambda: KEYS)
    key_leads: tuple[int, ...] = (2, 2)
    dead: slice | None = None
    options: dict[str, Any] = field(default_factory=dict)
    path: str = "kernel"
    mask: str = ""
    dropout: float = 0.0
    scattered: bool = False  # the rows of a rank are not neighbours in the whole
    small: str = ""  # "keys": they travel in pieces; "rows": masks are made for some queries at a time

    def tensors(self) -> list[Tensor | None]:
        n, m = sum(QUERIES[2]), sum(self.keys[2])
        q, k, v = (
            draw((2, 2, n, 5), self.dtype, 0),
            draw((*self.key_leads, m, 5), self.dtype, 1),
            draw((2, 2, m, 3), self.dtype, 2),
        )
        if self.weights is None:
            return [q, k, v, None]
        w = draw((*self.weights, m), lse_dtype(self.dtype), 3, positive=True)
        if self.dead is not None:
            w[..., self.dead] = 0.0
            k[..., self.dead, :] = math.nan
            v[..., self.dead, :] = math.inf
        return [q, k, v, w]

    def cotangents(self) -> tuple[Tensor, Tensor]:
        n = sum(QUERIES[2])
        return draw((2, 2, n, 3), self.dtype, 4), draw((2, 2, n), lse_dtype(self.dtype), 5)

    def places(self) -> list[Tensor]:
        """Of the queries and keys in the whole; the tensors are in the order of the ranks."""
        counts = [sum(QUERIES[2]), sum(self.keys[2])]
        if not self.scattered:
            return [torch.arange(count) for count in counts]
        found = [
            torch.randperm(count, generator=torch.Generator().manual_seed(i))
            for i, count in enumerate(counts)
        ]
        return [torch.arange(counts[0]) if self.path == "replicated" else found[0], found[1]]

    def attn_mask(self) -> Tensor | None:
        """A row for each query in the order of the ranks, a column for the place of each key."""
        n, m = sum(QUERIES[2]), sum(self.keys[2])
        if self.mask == "":
            return None
        if self.mask == "keys":
            return draw((2, 1, 1, m), torch.float64, 6) > 0.0
        if self.mask == "bool":
            mask = draw((n, m), torch.float64, 6) > 0.5
            mask[::5] = False
            return mask
        mask = draw((2, 1, n, m) if self.mask == "heads" else (n, m), self.dtype, 6)
        return mask.masked_fill(mask > 1.0, -math.inf)

    def hidden(self) -> dict[str, Any]:
        """Mask and dropout factor of the whole, keys in the order of the ranks, for the formula."""
        row, column = self.places()
        mask = self.attn_mask()
        result: dict[str, Any] = {} if mask is None else {"attn_mask": mask[..., column]}
        if self.options.get("is_causal"):
            result["attn_mask"] = row[:, None] >= column
        if self.dropout:
            torch.manual_seed(DROPOUT_SEED)
            seed = torch.randint(2**63 - 1, (1,))
            keep = dropout_keep(seed, self.dropout, (2, 2), 0, len(row), len(column))
            result["factor"] = keep[..., row, :][..., column].double() / (1.0 - self.dropout)
        return result

    def run(self, at: Ranks) -> dict[str, Tensor]:
        q, k, v, w = self.tensors()
        g, g_lse = self.cotangents()
        mask, (row, column) = self.attn_mask(), self.places()
        options: dict[str, Any] = {"group": at.group, "return_lse": True, **self.options}
        if self.path == "replicated":
            g, g_lse, options["query_replicated"] = g / at.size, g_lse / at.size, True
        else:
            q, g = (at.part(t, -2, QUERIES) for t in (q, g))
            g_lse, row = (at.part(t, -1, QUERIES) for t in (g_lse, row))
            mask = mask if self.mask == "keys" else at.part(mask, -2, QUERIES)
        k, v = (at.part(t, -2, self.keys) for t in (k, v))
        w, column = (at.part(t, -1, self.keys) for t in (w, column))
        if self.scattered:
            options |= {"query_index": row, "key_index": column}
        if self.dropout:
            # The first rank's generator counts.
            torch.manual_seed(DROPOUT_SEED + at.rank)
            options["dropout_p"] = self.dropout
        known, scores = ring_module._stats_are_known, forms_module.CHUNK_SCORES
        least = ring_module.LEAST_KEYS, ring_module.LEAST_QUERIES
        if self.path == "blocks":
            ring_module._stats_are_known = lambda *_: False
        if "keys" in self.small:
            ring_module.LEAST_KEYS, ring_module.LEAST_QUERIES = 40, 20
        if "rows" in self.small:
            forms_module.CHUNK_SCORES = 5000
        try:
            tensors = [q, k, v, w, mask]
            return helpers.run(co.distributed.continuum_attention, tensors, g, g_lse, **options)
        finally:
            ring_module._stats_are_known, forms_module.CHUNK_SCORES = known, scores
            ring_module.LEAST_KEYS, ring_module.LEAST_QUERIES = least


CONTINUUM = [
    Continuum("plain"),
    Continuum("weights", (), options={"scale": 0.7}),
    Continuum("weights of heads, keys shared", (2,), key_leads=(1, 2)),
    Continuum("dead keys", (), dead=slice(3, 40)),
    # The parts of whole ranks: of two ranks the first one's, of four the first two's.
    Continuum("dead ranks", (), dead=slice(0, 305)),
    Continuum("all keys dead", (2,), dead=slice(None)),
    Continuum("no keys", (), keys=NO_KEYS),
    Continuum("float32", (), torch.float32),
    Continuum("logits of 1e4", (), torch.float32, options={"scale": 2000.0}),
    Continuum("bfloat16", (), torch.bfloat16),
    Continuum("any backend", (), path="blocks"),
    Continuum("any backend, bfloat16", None, torch.bfloat16, path="blocks"),
    Continuum("replicated", (), path="replicated"),
    Continuum("replicated, dead ranks", (), dead=slice(0, 305), path="replicated"),
    Continuum("pieces", (2,), small="keys"),
    Continuum("pieces, float32", (), torch.float32, dead=slice(3, 40), small="keys, rows"),
    Continuum("causal", (), options={"is_causal": True}),
    Continuum("causal, scattered", None, scattered=True, small="keys, rows", options={"is_causal": True}),
    Continuum("causal, any backend", (2,), torch.float32, path="blocks", options={"is_causal": True}),
    Continuum("causal, chunks of queries", (), small="rows", options={"is_causal": True}),
    Continuum("mask", (), mask="bool"),
    Continuum("mask, scattered", (2,), mask="bool", scattered=True, small="keys, rows"),
    Continuum("mask of keys", (), torch.float32, dead=slice(3, 40), mask="keys"),
    Continuum("mask of keys, scattered", None, mask="keys", scattered=True),
    Continuum("float mask", (), torch.float32, mask="float"),
    Continuum("float mask of heads, scattered", None, mask="heads", scattered=True, small="keys, rows"),
    Continuum("dropout", (), dropout=0.4),
    Continuum(
        "dropout, causal, scattered",
        None,
        dropout=0.4,
        scattered=True,
        small="keys, rows",
        options={"is_causal": True},
    ),
    Continuum("dropout, mask, any backend", (), torch.float32, mask="bool", dropout=0.4, path="blocks"),
    Continuum("dropout, float mask", (2,), mask="float", dropout=0.4, scattered=True),
    Continuum("replicated, float mask", (), mask="float", scattered=True, path="replicated"),
    Continuum("replicated, dropout", (), mask="bool", dropout=0.4, scattered=True, path="replicated"),
]


def plain(query, key, value, weights=None, *, factor=None, **options):
    """`helpers.plain` with dropout."""
    keys = torch.eye(value.shape[-2], dtype=value.dtype)
    probabilities, lse = helpers.plain(query, key, keys, weights, **options)
    return (probabilities if factor is None else probabilities * factor.to(value.dtype)) @ value, lse


@dataclass(frozen=True)
class Linear:
    """Galerkin and Fourier attention; the second derivative too: of the sum of squares of the first."""

    name: str
    weighted: bool

    def tensors(self) -> list[Tensor | None]:
        n, m = sum(QUERIES[2]), sum(KEYS[2])
        q, k, v = (draw((2, length, 4), torch.float64, i) for i, length in enumerate((n, m, m)))
        return [q, k, v, draw((m,), torch.float64, 3, positive=True) if self.weighted else None]

    def run(self, at: Ranks) -> dict[str, Tensor]:
        q, k, v, w = self.tensors()
        g = at.part(draw(q.shape, torch.float64, 4), -2, QUERIES)
        parts = [at.part(q, -2, QUERIES), at.part(k, -2, KEYS), at.part(v, -2, KEYS), at.part(w, -1, KEYS)]
        leaves = [t.detach().requires_grad_() for t in parts if t is not None]
        function = getattr(co.distributed, self.name)
        out = function(*leaves, group=at.group)
        grads = torch.autograd.grad(out, leaves, g, create_graph=True)
        squares = sum((grad.square().sum() for grad in grads), torch.zeros(()))
        second = torch.autograd.grad(squares, leaves)
        names = ("query", "key", "value", "weights")
        result = {"out": out.detach(), **dict(zip(names, (t.detach() for t in grads), strict=False))}
        return result | {f"second {name}": t for name, t in zip(names, second, strict=False)}


LINEAR = [
    Linear("galerkin_attention", True),
    Linear("galerkin_attention", False),
    Linear("fourier_attention", True),
]


@dataclass(frozen=True)
class Position:
    name: str
    weighted: bool = True
    dtype: torch.dtype = torch.float64
    rate: tuple[float, ...] = (3.0, 40.0)
    radius: Any = None
    period: tuple[float, ...] | None = None
    per_sample: bool = False
    replicated: bool = False
    clusters: bool = False

    def tensors(self) -> list[Tensor | None]:
        n, m = sum(QUERIES[2]), sum(KEYS[2])
        rate = torch.tensor(self.rate, dtype=torch.float64)
        x, y, v, rate = position_helpers.scene(
            n, m, 2, rate=rate, dtype=self.dtype, per_sample=self.per_sample
        )
        # In the order of the first coordinate, so that parts are apart.
        x, y = (t.gather(-2, t[..., :1].argsort(-2).expand(t.shape)) for t in (x, y))
        if self.clusters:
            for t in (x, y):
                t[..., 0] += 3.0 * (4.0 * t[..., 0]).floor()
        w = draw((2, m) if self.per_sample else (m,), lse_dtype(self.dtype), 7, positive=True)
        return [x, y, v, rate, w if self.weighted else None]

    def cuts(self) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        """Parts of the queries and the keys: of four ranks a cluster each, of two two."""
        if not self.clusters:
            return QUERIES, KEYS
        counts = [[int((t[..., 0] // 3.0 == i).sum()) for i in range(4)] for t in self.tensors()[:2]]
        return tuple({2: (a + b, c + d), 4: (a, b, c, d)} for a, b, c, d in counts)

    def reach(self) -> Any:
        """The radius, a tensor of which is written (least, largest)."""
        if not isinstance(self.radius, tuple):
            return self.radius
        return torch.linspace(*self.radius, sum(QUERIES[2]), dtype=lse_dtype(self.dtype))

    def cotangents(self) -> tuple[Tensor, Tensor]:
        n, heads = sum(QUERIES[2]), len(self.rate)
        return draw((2, heads, n, 3), self.dtype, 3), draw((2, heads, n), lse_dtype(self.dtype), 4)

    def run(self, at: Ranks) -> dict[str, Tensor]:
        x, y, v, rate, w = self.tensors()
        g, g_lse = self.cotangents()
        radius = self.reach()
        queries, keys = self.cuts()
        if self.replicated:
            g, g_lse = g / at.size, g_lse / at.size
        else:
            x, g = (at.part(t, -2, queries) for t in (x, g))
            g_lse = at.part(g_lse, -1, queries)
            radius = at.part(radius, -1, queries) if isinstance(radius, Tensor) else radius
        y, v = (at.part(t, -2, keys) for t in (y, v))
        w = at.part(w, -1, keys)
        return position_helpers.run(
            co.distributed.position_attention,
            [x, y, v, rate, w],
            g,
            g_lse,
            group=at.group,
            return_lse=True,
            radius=radius,
            period=self.period,
            query_replicated=self.replicated,
        )


POSITION = [
    Position("global"),
    Position("equal weights, float32", weighted=False, dtype=torch.float32),
    Position("radius", radius=0.15),
    Position("radius, clusters", radius=0.15, clusters=True),
    Position("radius over clusters", radius=3.6, clusters=True),
    Position("radius of each query", radius=(0.02, 0.4)),
    Position("periodic", radius=0.2, period=(1.0, math.inf)),
    Position("clusters", rate=(8.0, 20.0), clusters=True),
    # The first cluster is as near to the last one as to the second.
    Position("clusters, periodic", rate=(9.0,), period=(13.0, 1.0), dtype=torch.float32, clusters=True),
    Position("clusters that reach each other", rate=(0.3, 20.0), clusters=True),
    Position("one rate of 3000", rate=(3000.0,)),
    Position("mesh of each sample", per_sample=True),
    Position("replicated", replicated=True, radius=(0.02, 0.4)),
]


@dataclass(frozen=True)
class Patch:
    """Slabs of whole patches along the first axis; self attention and between two grids."""

    name: str
    grid: tuple[int, ...]
    kgrid: tuple[int, ...]
    patch: tuple[int, ...]
    weights: str
    slabs: dict[int, tuple[int, ...]]
    key_slabs: dict[int, tuple[int, ...]]
    dtype: torch.dtype = torch.float64
    scale: float | None = None

    def tensors(self) -> list[Tensor | None]:
        return patch_helpers.scene(self.grid, self.kgrid, dv=2, dtype=self.dtype, weights=self.weights)

    def run(self, at: Ranks) -> dict[str, Tensor]:
        q, k, v, w = self.tensors()
        g, g_lse = patch_helpers.cotangents(q, v, list(self.patch))
        rows = {
            size: tuple(n // self.patch[0] * math.prod(self.counts()[1:]) for n in slabs)
            for size, slabs in self.slabs.items()
        }
        q, g = (at.part(t, 1, self.slabs) for t in (q, g))
        k, v = (at.part(t, 1, self.key_slabs) for t in (k, v))
        w = at.part(w, 0 if self.weights == "grid" else 1, self.slabs)
        options = {"group": at.group, "return_lse": True, "scale": self.scale}

        def function(q, k, v, w, sizes, **options):
            return co.distributed.patch_attention(q, k, v, sizes, w, **options)

        return patch_helpers.run(
            function, [q, k, v, w], list(self.patch), g, at.part(g_lse, -1, rows), **options
        )

    def counts(self) -> list[int]:
        return [n // size for n, size in zip(self.grid, self.patch, strict=True)]


SLABS = {2: (9, 3), 4: (3, 6, 0, 3)}
PATCH = [
    Patch("plane", (12, 8), (12, 8), (3, 4), "none", SLABS, SLABS),
    Patch("weights", (12, 8), (12, 8), (3, 4), "grid", SLABS, SLABS),
    Patch("two grids", (12,), (6,), (3,), "batch", SLABS, {2: (0, 6), 4: (0, 0, 3, 3)}, scale=0.3),
    Patch("float32", (12, 8), (12, 8), (3, 2), "none", SLABS, SLABS, torch.float32),
]
