"""Fourier attention over a mesh that is spread over ranks: one all-reduce of a D x Dv matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ._group import Group
from .galerkin_attention import linear_attention


@torch.compiler.disable
def fourier_attention(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None = None, group: Group = None
) -> Tensor:
    r"""``continuum_ops.fourier_attention`` with the points spread over the ranks of a process group.

    .. math::
        out_i = \sum_m w_m (q_i \cdot k_m) \, v_m

    where m runs over the keys of all ranks (Cao, "Choose a Transformer: Fourier or Galerkin", equation 5),
    taken in the order q (k^T W v). Arguments, result, derivatives and errors are those of
    :func:`continuum_ops.distributed.galerkin_attention`.
    """
    return linear_attention("distributed.fourier_attention", query, key, value, weights, group)
