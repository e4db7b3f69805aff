"""Quadrature weights for the attention inside a model whose forward cannot be changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ._quadrature_blocks import Block, Mesh, as_weights, current_weights
from ._weighted_calls import ANSWERS

__all__ = ["Mesh", "as_weights", "current_weights", "quadrature"]


@contextmanager
def quadrature(weights: Tensor | Mesh, mask: Tensor | None = None) -> Iterator[None]:
    """Give quadrature weights to the attention of any model that runs inside the block.

    ::

        with co.nn.quadrature(mesh.weights):
            y = model(x)

    They reach, if the number of keys equals ``weights.shape[-1]``,

    * calls of ``torch.nn.functional.scaled_dot_product_attention``, whoever makes them (timm, Hugging Face
      with ``attn_implementation="sdpa"``, ...): :func:`continuum_ops.continuum_attention` answers them, with
      their ``attn_mask``, ``dropout_p``, ``is_causal``, ``scale`` and ``enable_gqa``;
    * ``torch.nn.MultiheadAttention``, subclasses that keep its forward, and
      ``torch.nn.functional.multi_head_attention_forward``, also with ``need_weights=True`` (the probabilities
      are then those with weights, before dropout) and in eval mode (the fused inference path, which knows no
      weights, is not taken inside a block); the keys of ``add_bias_kv`` and ``add_zero_attn`` do not count
      and get the mean of the nonzero weights each;
    * the layers of ``continuum_ops.nn`` that were not called with ``weights=`` of their own.

    All else is left alone: other lengths, attention that is written out as softmax(q k^T) v,
    ``flex_attention``, other packages' kernels, scripted modules. Equal weights give the model's own output.
    A model that adds tokens (a class token) has more keys than points: give them weights too, such as the
    mean (``torch.cat([w.mean()[None], w])``). Averages over points that the model takes elsewhere (pooling,
    normalisation) stay as they are.

    Blocks nest: the innermost one whose length fits wins, and lengths that it does not have go to the blocks
    around it, so a model with two meshes takes two blocks. A block belongs to the current thread and asyncio
    task, is undone by an exception, and patches nothing. (A generator shares the context of its caller, who
    is inside the block too while the generator waits.) Under autocast, weights stay as they are. Activation
    checkpointing runs layers again during the backward pass: call ``backward()`` inside the block too.

    ``torch.compile``: call the compiled model inside the block; it compiles with ``fullgraph=True``, and
    other weights of the same shape compile nothing anew. Compiled code takes every block of its thread, those
    of other asyncio tasks too.

    Args:
        weights: floating point tensor (M,), (B, M) or (B, H, M), or a mesh (an object with ``.weights``),
            where M is the number of keys, B the batch (the first dimension of query and key) and H the number
            of heads; on the model's device. Only ratios matter.
        mask: bool, (M,) or (B, M), True where there is a point, False where there is padding, which then does
            not exist as a key whatever its values; the padding's own rows of the output mean nothing. Short
            for weights that are 0 there.

    Raises:
        TypeError, ValueError: ``weights`` or ``mask`` is not such a tensor or mesh. Inside the block, from
            the attention call: weights that do not fit its batch or heads, an ``attn_mask`` that is a
            ``CausalBias``, ``static_k`` or ``static_v``, nested tensors.

    Warns:
        UserWarning: the block ended and no attention had the length of the weights; it names the lengths
            seen.
    """
    block = Block(_masked(as_weights(weights), mask), ANSWERS)
    block.open()
    try:
        yield
    finally:
        block.close()
    if not block.matched:
        # 3: past this generator and contextlib's __exit__, to the with statement.
        warnings.warn(
            f"quadrature weights of length {block.weights.shape[-1]} were not used: {_what_was_seen(block)}",
            UserWarning,
            stacklevel=3,
        )


def _masked(weights: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return weights
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor (True where there is a point), got {got}")
    length = weights.shape[-1]
    batch = weights.shape[0] if weights.dim() > 1 else 1
    fits = mask.dim() in (1, 2) and mask.shape[-1] == length
    if not fits or (mask.dim() == 2 and 1 not in (batch, mask.shape[0]) and batch != mask.shape[0]):
        raise ValueError(
            f"mask must have shape ({length},) or (B, {length}) for weights of shape {tuple(weights.shape)}, "
            f"got {tuple(mask.shape)}"
        )
    if mask.device != weights.device:
        raise ValueError(f"mask must be on the device of weights, {weights.device}, got {mask.device}")
    mask = mask.unsqueeze(1) if mask.dim() == 2 and weights.dim() == 3 else mask
    return torch.where(mask, weights, 0.0)


def _what_was_seen(block: Block) -> str:
    reasons = []
    if block.lengths_seen:
        seen = ", ".join(map(str, sorted(block.lengths_seen)))
        reasons.append(f"the attention inside the block had {seen} keys")
    if block.met_compiled:
        reasons.append("compiled attention inside the block had other numbers of keys")
    return " and ".join(reasons) or (
        "no attention ran inside the block that could take them (layers of continuum_ops.nn without weights "
        "of their own, scaled_dot_product_attention, torch.nn.MultiheadAttention); attention that a model "
        'writes out is not seen, Hugging Face models take attn_implementation="sdpa"'
    )
