"""Fourier attention neural operator (FANO): patch attention with spectral Q, K and V."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..mesh import Grid
from .patch_layer import ExtendedAttention, FourierAttention
from .patch_model import Patches, PatchModel, Weights

if TYPE_CHECKING:
    from ..distributed import ShardedMesh


class FANO(PatchModel):
    """Fourier attention neural operator u -> z between functions on a box of dimension 1, 2 or 3.

    ::

        v_0 = W_in (u, x)    at each point: linear map of (u(x), x)               CA (14), (20), (30)
        v_l = E(v_(l-1))     num_layers times: multi-head patch attention, Q, K, V spectral convolutions
                             on each patch, pointwise feed-forward network        CA (10), (68)-(70)
        z   = W_out v_L      at each point                                        CA (27), (28)

    One set of parameters serves every resolution: Q, K, V work on Fourier modes and scores are integrals.
    What must stay the same are the patches, so grids of one study should be of one kind:

    * "cell": patch i of P covers [i / P, (i + 1) / P] of the domain at every resolution, and its integrals
      are midpoint rules. Refining by an odd factor keeps the points; the output converges there with order 2.
    * "periodic", also for the half-open grid a + i (b - a) / n of a function that is not periodic: the same
      patches, every refinement keeps the points, and integrals over a patch are left-hand sums: order 1.
    * "endpoint": n points span n - 1 gaps, so patches move by up to a gap and points near their edges change
      patch. Elsewhere the output converges with order 1.

    Modes that a coarser patch, or the grid of ``final_spectral``, lacks are left out and each other one is
    used once; in training mode ``final_spectral`` and ``periodic_extension`` make them an error. Source: CA
    section 4.4, appendix B.3.

    Args:
        in_channels: channels of the input function u.
        out_channels: channels of the output function.
        coord_dim: dimension d of the domain.
        num_patches: patches along each axis, an int for all; the same at every resolution.
        patch_size: points of a patch along each axis in training, an int for all: what the modes are checked
            against. 13 patches of 32 points make a grid of 416; the model then also takes 208 and 832.
        modes: kept Fourier modes of Q, K and V along each axis, an int for all.
        d_model: channels inside the encoder, divisible by num_heads.
        num_heads: attention heads, each with d_model / num_heads channels.
        num_layers: encoder layers.
        dim_feedforward: hidden channels of the feed-forward network; None: d_model, as in CA (25).
        dropout: probability, placed as in ``torch.nn.TransformerEncoderLayer``.
        activation: "gelu", "relu", "silu", "tanh" or a function of a tensor.
        norm_first: normalise before a sub-layer instead of after the sum of CA (10).
        norm_residual: with norm_first, the residual too: v <- norm1(v), v <- W1 v + A(v), v <- norm2(W2 v +
            F(v)), as the published code has it.
        residual_weights: learnable W1, W2 of CA (10), which start as the identity. CA section 6 uses the
            identity itself: False.
        scale: factor of the integrals in the scores; CA (63) has 1, and its integrals over one of P patches
            are P times smaller than means over a patch.
        periodic_extension: mirror each patch behind its ends before the convolutions of Q, K and V, as in
            :class:`continuum_ops.nn.PatchSpectralConv` (CA 6.2.3).
        final_spectral: kept modes along each axis of z -> z + K z with a spectral convolution K on the whole
            grid, which starts as 0; None: no such layer.
        smoothing: the boundary, "periodic" or "dirichlet", one for all axes or one per axis, of a last layer
            :class:`continuum_ops.models.Smoothing` (CA 29); None: no such layer.
        smoothing_eps, smoothing_alpha: of it, as in CA 6.2.3; eps in units of length squared.
        pad: lengthen axes that the patches do not divide, at their end: u repeats its last values there, the
            integrals leave them out and so does the output. False: an error.
        device, dtype: of the parameters.

    Raises:
        ValueError: a number out of range, d_model not divisible by num_heads, an unknown name; more modes
            than a patch has in training, where they would overlap: along the last axis patch_size // 2 + 1,
            along others patch_size // 2; with periodic_extension patch_size + 1 and patch_size.
        TypeError: a number of channels, heads, layers, patches or modes that is no int; an activation that is
            no function.
    """

    none_is_equal = True

    def _make_lift(self, patches: Patches) -> nn.Module:
        return nn.Linear(patches.channels, patches.d_model, device=patches.device, dtype=patches.dtype)

    def _make_attention(self, patches: Patches) -> nn.Module:
        if patches.periodic_extension:
            return ExtendedAttention(
                patches.d_model,
                patches.num_heads,
                patches.modes,
                patches.num_patches,
                factor=patches.scale,
                device=patches.device,
                dtype=patches.dtype,
            )
        return FourierAttention(
            patches.d_model,
            patches.num_heads,
            patches.patch_size,
            patches.modes,
            patches.num_patches,
            factor=patches.scale,
            device=patches.device,
            dtype=patches.dtype,
        )

    def forward(self, u: Tensor, mesh: Grid | ShardedMesh, *, weights: Weights = "equal") -> Tensor:
        """As :meth:`ViTNO.forward`, but that weights are equal unless asked for.

        With equal weights, no extension and no padding the attention works in mode space; otherwise Q, K and
        V are evaluated at the points, which takes several times as long. On an evenly spaced grid of kind
        "periodic" or "cell" equal weights are the grid's.
        """
        return super().forward(u, mesh, weights=weights)
