"""The five operators seen alike: named tensors in, named outputs and gradients out, and the formula.

A case knows which of its tensors have an axis of keys, and how to take one batch entry and one head out.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import helpers
import numpy as np
import patch_helpers
import position_helpers
import torch
from helpers import draw, lse_dtype
from numpy.typing import NDArray
from torch import Tensor
from triton_support import INTERPRETED, interpret

import continuum_ops as co
from continuum_ops.ops import _direct as direct

Tensors = dict[str, Tensor]
LIBRARY = interpret() if INTERPRETED else None
patch_module = importlib.import_module("continuum_ops.ops.patch_attention")
LINEAR = ("galerkin_attention", "fourier_attention")
SERVED_BY_TRITON = ("continuum_attention", "position_attention")


def backends() -> list[str]:
    """Names that `backend` takes on this machine."""
    if INTERPRETED:
        return ["triton"]
    if not direct.KERNELS:
        return ["chunked"]
    from continuum_ops import _C

    return [*_C.isas(), "chunked"]


@contextmanager
def backend(name: str, scores: int | None = 2**8) -> Iterator[None]:
    """Serve the operators by the kernels of an instruction set, or by PyTorch in blocks of so many scores."""
    with ExitStack() as stack:
        if name == "chunked":

            def patch(target: Any, attribute: str, to: Any) -> None:
                stack.enter_context(mock.patch.object(target, attribute, to))

            patch(direct, "plain", lambda *_: None)
            patch(helpers.attention_module, "_kernel_serves", lambda *_: False)
            attend = torch.ops.continuum_ops.position_attention_chunked
            patch(position_helpers.position_module, "_attend", attend)
            patch(patch_module, "forward_op", _patches_in_pytorch)
            modules = (helpers.chunked_module, position_helpers.position_chunked, patch_helpers.chunked)
            for module in modules if scores is not None else ():
                patch(module, "CHUNK_SCORES", scores)
        elif name != "triton":
            from continuum_ops import _C

            stack.callback(_C.set_isa, _C.isa())
            _C.set_isa(name)
        yield


def _patches_in_pytorch(query, key, value, weights, sizes, scale):
    scale = 1.0 / max(math.prod(query.shape[1:-2]), 1) if scale is None else scale
    return patch_helpers._Chunked.apply(query, key, value, weights, sizes, scale)


@dataclass(frozen=True)
class Case:
    """An operator on drawn inputs; every float tensor of `tensors` is differentiated."""

    op: str
    tensors: Tensors
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def linear(self) -> bool:
        return self.op in LINEAR

    @property
    def patches(self) -> bool:
        return self.op == "patch_attention"

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["value"].dtype

    @property
    def keys(self) -> dict[str, int]:
        """Tensors that have an axis of keys (of points, for patches), and the axis."""
        if self.patches:
            places = {"query": -3, "key": -3, "value": -3, "weights": -1}
        else:
            places = {"key": -2, "value": -2, "weights": -1, "key_pos": -2}
        return {name: axis for name, axis in places.items() if name in self.tensors}

    @property
    def count(self) -> int:
        return self.tensors["value"].shape[self.keys["value"]]

    def with_tensors(self, **changed: Tensor) -> Case:
        return Case(self.op, self.tensors | changed, self.options)

    def gathered(self, index: Tensor) -> Case:
        """The keys `index`, in that order."""
        return self.with_tensors(**{n: self.tensors[n].index_select(a, index) for n, a in self.keys.items()})

    # --- the operator, its derivative and the formula --------------------------------------------

    def call(self, tensors: Tensors) -> Tensors:
        function = getattr(co, self.op)
        t = dict(tensors)
        if self.linear:
            return {"out": function(t["query"], t["key"], t["value"], t.get("weights"))}
        if self.patches:
            size = self.options["patch_size"]
            out = function(t.pop("query"), t.pop("key"), t.pop("value"), size, **t, **self._rest())
        else:
            out = function(**t, **self._rest())
        return dict(zip(("out", "lse"), out, strict=True))

    def _rest(self) -> dict[str, Any]:
        return {n: o for n, o in self.options.items() if n != "patch_size"} | {"return_lse": True}

    def shapes(self) -> dict[str, torch.Size]:
        return {name: t.shape for name, t in self.call(self.tensors).items()}

    def cotangents(self, seed: int = 11) -> Tensors:
        return {
            name: draw(shape, self.dtype if name == "out" else lse_dtype(self.dtype), seed + i)
            for i, (name, shape) in enumerate(self.shapes().items())
        }

    def results(self, cotangents: Tensors) -> Tensors:
        """Outputs, and under "d_NAME" the gradients."""
        leaves = {name: t.detach().clone().requires_grad_() for name, t in self.tensors.items()}
        outputs = self.call(leaves)
        grads = torch.autograd.grad(
            list(outputs.values()), list(leaves.values()), [cotangents[name] for name in outputs]
        )
        result = {name: t.detach() for name, t in outputs.items()}
        return result | {f"d_{name}": g for name, g in zip(leaves, grads, strict=True)}

    def exact(self, cotangents: Tensors) -> tuple[dict[str, NDArray], dict[str, float]]:
        """Results by the formula in longer arithmetic, and of each the size that rounding is relative to.

        That is max|value| for out, 1 or max|lse| for lse, and for a gradient its sum over absolute values.
        """
        true, terms = _formula(self, cotangents)
        value = self.tensors["value"].detach().double().nan_to_num(0).abs()
        size = {"out": float(value.max()) if value.numel() else 0.0}
        if self.linear:
            size["out"] = float(terms.pop("out").max(initial=0.0))
        if "lse" in true:
            size["lse"] = float(np.abs(true["lse"][np.isfinite(true["lse"])]).max(initial=1.0))
        for name, array in terms.items():
            size[name] = float(array.max(initial=0.0))
        return true, size

    def budget(self, cotangents: Tensors) -> dict[str, float]:
        """8 eps of that size for every result: the error that the design allows."""
        eps = 8 * torch.finfo(self.dtype).eps
        lse = 8 * torch.finfo(lse_dtype(self.dtype)).eps
        return {n: (lse if n == "lse" else eps) * s for n, s in self.exact(cotangents)[1].items()}


def _formula(case: Case, g: Tensors) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
    t, options = case.tensors, dict(case.options)
    if case.linear:
        args = [t["query"], t["key"], t["value"], t.get("weights")]
        true = _linear(*args, g["out"])
        sizes = _linear(*(a if a is None else a.abs() for a in args), g["out"].abs())
        return true, sizes
    if case.patches:
        true = patch_helpers.exact(
            t["query"], t["key"], t["value"], t.get("weights"), options.pop("patch_size"),
            grad_out=g["out"], grad_lse=g["lse"], **options,
        )  # fmt: skip
    elif case.op == "position_attention":
        true = position_helpers.exact(**t, **options, grad_out=g["out"], grad_lse=g["lse"])
    else:
        true = helpers.exact(**t, **options, grad_out=g["out"], grad_lse=g["lse"])
    terms = true.pop("terms")
    sizes = {f"d_{n}": helpers._sum_to(a, t[n].shape) for n, a in terms.items() if n in t}
    return {n if n in ("out", "lse") else f"d_{n}": a for n, a in true.items()}, sizes


def _linear(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, g: Tensor) -> dict[str, NDArray]:
    """out = (q k^T) W v and its derivatives, in the quadratic order of the formula."""
    query, key, value, grad = (helpers._long(x) for x in (q, k, v, g))
    full = np.full(key.shape[-2], 1.0 / max(key.shape[-2], 1)) if w is None else helpers._long(w)
    live = np.broadcast_to(full > 0, value.shape[:-1])[..., None]
    key, value = np.where(live, key, 0), np.where(live, value, 0)
    scores, back = query @ np.swapaxes(key, -1, -2), grad @ np.swapaxes(value, -1, -2)
    row = full[..., None, :]
    result = {
        "out": (scores * row) @ value,
        "d_query": (back * row) @ key,
        "d_key": np.swapaxes(back * row, -1, -2) @ query,
        "d_value": np.swapaxes(scores * row, -1, -2) @ grad,
    }
    if w is not None:
        result["d_weights"] = helpers._sum_to(np.where(live[..., 0], (scores * back).sum(-2), 0), w.shape)
    return result


# --- inputs --------------------------------------------------------------------------------------


def uniform(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Multiples of 1/64 in [0, 1): moving them by whole numbers is exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(64, shape, generator=generator).to(dtype) / 64


@dataclass(frozen=True)
class Sizes:
    batch: int = 2
    heads: int = 2
    n: int = 5
    m: int = 7
    d: int = 4
    dv: int = 3


def _qkv(s: Sizes, dtype: torch.dtype, seed: int) -> Tensors:
    leads = (s.batch, s.heads)
    return {
        "query": draw((*leads, s.n, s.d), dtype, seed),
        "key": draw((*leads, s.m, s.d), dtype, seed + 1),
        "value": draw((*leads, s.m, s.dv), dtype, seed + 2),
    }


def _weights(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return draw(shape, lse_dtype(dtype), seed + 3, positive=True)


def continuum(s: Sizes, dtype: torch.dtype, seed: int) -> Case:
    tensors = _qkv(s, dtype, seed)
    tensors["weights"] = _weights((s.batch, 1, s.m), dtype, seed)
    if seed % 2:
        acc, dims = lse_dtype(dtype), 1 + seed % 3
        tensors["query_pos"] = uniform((s.n, dims), acc, seed + 4)
        tensors["key_pos"] = uniform((s.m, dims), acc, seed + 5)
        tensors["rate"] = torch.linspace(0.5, 3.0, s.heads, dtype=acc)
    return Case("continuum_attention", tensors)


def position(s: Sizes, dtype: torch.dtype, seed: int) -> Case:
    acc, dims = lse_dtype(dtype), 1 + seed % 3
    lead = (s.batch,) if seed % 2 else ()
    value = (s.batch, s.m, s.dv) if seed % 4 < 2 else (s.batch, s.heads, s.m, s.dv)
    tensors = {
        "query_pos": uniform((*lead, s.n, dims), acc, seed + 4),
        "key_pos": uniform((*lead, s.m, dims), acc, seed + 5),
        "value": draw(value, dtype, seed + 2),
        "rate": torch.linspace(0.5, 8.0, s.heads, dtype=acc),
        "weights": _weights((*lead, s.m), dtype, seed),
    }
    return Case("position_attention", tensors)


def patches(s: Sizes, dtype: torch.dtype, seed: int) -> Case:
    """n patches of queries, 1 + m % 5 of keys, each of 1 + seed % 4 points, or of 2 x as many."""
    points, rows = 1 + seed % 4, (2 * s.n,) if seed % 2 else ()
    size = [2] * len(rows) + [points]
    kept = 1 + s.m % 5
    grid = (*rows, points * (1 if rows else s.n))
    kgrid = (*(2 for _ in rows), points * kept)
    tensors = {
        "query": draw((s.batch, *grid, s.heads, s.d), dtype, seed),
        "key": draw((s.batch, *kgrid, s.heads, s.d), dtype, seed + 1),
        "value": draw((s.batch, *kgrid, s.heads, s.dv), dtype, seed + 2),
        "weights": _weights((s.batch, *grid), dtype, seed) / math.prod(size),
    }
    return Case("patch_attention", tensors, {"patch_size": size, "scale": 0.5})


def galerkin(s: Sizes, dtype: torch.dtype, seed: int, op: str = "galerkin_attention") -> Case:
    tensors = _qkv(s, dtype, seed) | {"weights": _weights((s.batch, 1, s.m), dtype, seed) / s.m}
    return Case(op, tensors)


def fourier(s: Sizes, dtype: torch.dtype, seed: int) -> Case:
    return galerkin(s, dtype, seed, "fourier_attention")


CASES: dict[str, Callable[[Sizes, torch.dtype, int], Case]] = {
    "continuum_attention": continuum,
    "position_attention": position,
    "patch_attention": patches,
    "galerkin_attention": galerkin,
    "fourier_attention": fourier,
}


def part(case: Case, b: int, h: int) -> tuple[Case, dict[str, tuple[slice, ...]]]:
    """Batch entry b and head h alone, and where the results of that are among those of the whole case.

    Gradients of tensors that batch entries or heads share are left out.
    """
    batch, head, rest = slice(b, b + 1), slice(h, h + 1), slice(None)
    axes = case.tensors["value"].dim() - 3 if case.patches else 0
    own = (batch, *(rest,) * axes, head)
    shared = {"rate": (head,), "weights": (batch,)}
    taken, places = {}, {"out": own, "lse": (batch, head)}
    for name, t in case.tensors.items():
        if name in ("query_pos", "key_pos") or (name == "weights" and t.dim() == 1):
            at = (batch,) if t.dim() == 3 else ()
        elif case.op == "position_attention" and name == "value" and t.dim() == 3:
            at = (batch,)
        else:
            at = shared.get(name, own)
        taken[name] = t[at]
        if at == own:
            places[f"d_{name}"] = own
    return Case(case.op, taken, case.options), places
