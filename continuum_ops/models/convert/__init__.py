"""Models from checkpoints of the papers' published codes.

Each function takes a published state dict, reads sizes off the shapes of its tensors, and returns a model of
this package that computes the same function. What a state dict cannot say, such as activations, is an
argument. What changes numbers between the published code and the paper is either taken over exactly (by the
model's options, or folded into its parameters) or named here:

================================ ============================================================================
function                         published code (names as in its state dicts)
================================ ============================================================================
:func:`tno`                      CA: ``SimpleEncoder`` with ``linear_in_position`` and ``encoder.layers``, its
                                 attention with ``W_q``, ``W_k``, ``W_v``, ``W_o`` and ``scale``
:func:`vitno`                    CA: ``SimpleEncoder`` with ``linear_in.weights1``, spectral, ``W_q`` and
                                 ``smoothing.weights1``
:func:`fano`                     CA: ``SimpleEncoder`` with ``self_attn.query_operator.weights1``
:func:`pit`                      PiT in PyTorch: ``pit.py`` with ``down.lmda`` (heads concatenated), and
                                 its earlier form with ``down.r`` (heads split the width)
:func:`galerkin_transformer`     GT: ``FourierTransformer`` (1-D) and ``FourierTransformer2D`` with
                                 ``encoder_layers.0.attn.linears``; decoders ``ifft``, ``ifft2``,
                                 ``pointwise``
================================ ============================================================================

Names may carry the prefixes that wrappers add to all of them: ``module.``, ``_orig_mod.``, ``model.``. A
missing or unexpected key and a wrong shape are a ValueError that names the key. Normalisers of inputs and
outputs, and boundary values set after the last layer, are no part of the state dicts.
"""

from .continuum import tno
from .galerkin import galerkin_transformer
from .patches import fano, vitno
from .position_induced import pit

__all__ = ["fano", "galerkin_transformer", "pit", "tno", "vitno"]
