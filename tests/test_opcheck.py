"""Every registered operator passes opcheck: here those whose own files have no check of them."""

from __future__ import annotations

import pytest
import torch
from helpers import draw
from torch.library import opcheck

from continuum_ops.ops import _direct as direct
from continuum_ops.ops import _fourier_patch_modes  # noqa: F401  (registers its operators)

ops = torch.ops.continuum_ops
ELSEWHERE = {
    *(
        f"{op}_attention_{part}"
        for op in ("continuum", "position")
        for part in ("forward", "backward", "chunked", "chunked_backward")
    ),
    *("patch_attention_forward", "patch_attention_backward", "galerkin_attention", "check_weights"),
    *("grid_product", "window_attention", "check_nonnegative", "quantile_radius"),
    *("patch_analysis", "patch_synthesis", "galerkin_gram", "galerkin_gram_backward"),
}
# Without a kernel of the CPU: checked on a GPU by bench/gpu_check.py.
CUDA = {f"{op}_attention_cuda_{part}" for op in ("position", "patch") for part in ("forward", "backward")}
INF = float("inf")


def plain(op, inputs, backward):
    """The three operators for plain tensors; backward: its arguments after grad_out, from out and records."""
    kept = getattr(ops, f"{op}_plain_forward")(*inputs)
    return {
        f"{op}_plain": inputs,
        f"{op}_plain_forward": inputs,
        f"{op}_plain_backward": (torch.randn_like(kept[0]), *backward(*kept)),
    }


def compiled_examples():
    q, k, v, w = draw((2, 1, 6, 4)), draw((3, 7, 4)), draw((2, 3, 7, 5)), draw((3, 7), positive=True)
    same = (draw((2, 3, 6, 4)), draw((2, 3, 7, 4)), v, w)
    points = (draw((6, 2)), draw((7, 2)), draw((2, 7, 3)), draw((2,), positive=True), w[0])
    grids = (draw((2, 4, 6, 3, 2)), draw((2, 2, 6, 3, 2)), draw((2, 2, 6, 3, 5)))
    patches = (*grids, 2, draw((4, 6), positive=True), None, 3)
    dft = ([2, 1], [3, 4], [2, 3])  # tables: 3 (points, rows) of the first axis, 2 of the last
    tables = draw((3 * 3 * 2 + 2 * 4 * 3,))
    return {
        **plain(
            "continuum_attention",
            (q, k, v, w, 0.5, True),
            lambda out, stats: (q, k, v, w, out, stats, 0.5, True, True),
        ),
        **plain(
            "position_attention",
            points,
            lambda out, stats: (*points, out, stats, [True, False, True, True, True]),
        ),
        **plain("patch_attention", patches, lambda out, p: (p, [True, True, False, True], *patches)),
        "galerkin_attention_small": same,
        "galerkin_attention_small_backward": (torch.randn(2, 3, 6, 5), *same, True),
        "axis_product": (draw((6, 5)), draw((2, 5, 3)), torch.zeros(2, 6, 3)),
        "axis_contraction": (draw((2, 6, 3)), draw((2, 5, 3))),
        "patch_dft": (draw((2, 6, 4, 3)), tables, *dft),
        "patch_dft_inverse": (draw((6, 2, 2, 2, 3)), tables, *dft),
    }


def examples():
    value, axes = draw((2, 1, 20, 3), torch.float64), [torch.linspace(0, 1, n).double() for n in (4, 5)]
    matrices = [draw((2, n, n), torch.float64, positive=True) for n in (4, 5)]
    rate, weights = torch.tensor([3.0, 1.0]).double(), draw((20,), torch.float64, positive=True)
    window = (value, axes, axes, rate, weights, torch.tensor(0.5).double(), [INF, INF], 1e-16)
    grads = draw((2, 2, 20, 3), torch.float64), draw((2, 2, 20), torch.float64)
    return {
        "grid_product_backward": (grads[0], value, matrices, [], True, True),
        "window_attention_backward": (*grads, *window),
        **(compiled_examples() if direct.KERNELS else {}),
    }


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_opcheck(name):
    opcheck(getattr(ops, name).default, EXAMPLES[name])


@pytest.mark.skipif(not direct.KERNELS, reason="without the extension its operators have no examples")
def test_none_is_forgotten():
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    registered = {name for namespace, name in names if namespace == "continuum_ops"}
    assert registered == {*EXAMPLES, *ELSEWHERE, *CUDA}
