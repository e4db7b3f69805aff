"""Layers: drop-in replacements for ``torch.nn`` that take quadrature weights."""

from .codomain_attention import CodomainAttention
from .fourier_patch_attention import FourierPatchAttention
from .galerkin_attention import GalerkinAttention
from .galerkin_encoder_layer import GalerkinEncoderLayer
from .multihead_attention import MultiheadAttention
from .patch_attention import PatchAttention
from .patch_spectral_conv import PatchSpectralConv
from .position_attention import PositionAttention
from .quadrature_context import quadrature
from .replace_attention import replace_attention
from .spectral_conv import SpectralConv
from .transformer import TransformerEncoder, TransformerEncoderLayer

__all__ = [
    "CodomainAttention",
    "FourierPatchAttention",
    "GalerkinAttention",
    "GalerkinEncoderLayer",
    "MultiheadAttention",
    "PatchAttention",
    "PatchSpectralConv",
    "PositionAttention",
    "SpectralConv",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "quadrature",
    "replace_attention",
]
