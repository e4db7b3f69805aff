"""Layers: drop-in replacements for ``torch.nn`` that take quadrature weights."""

from .multihead_attention import MultiheadAttention
from .position_attention import PositionAttention
from .quadrature_context import quadrature
from .replace_attention import replace_attention
from .transformer import TransformerEncoder, TransformerEncoderLayer

__all__ = [
    "MultiheadAttention",
    "PositionAttention",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "quadrature",
    "replace_attention",
]
