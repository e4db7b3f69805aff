"""Losses between functions on a mesh."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_l2(pred: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Relative L2 error of each sample, its integrals by the quadrature of the mesh (CA equation 39).

    .. math::
        \frac{\|pred - target\|}{\|target\|}, \qquad
        \|f\|^2 = \int |f|^2 \approx \sum_i w_i \sum_c f_c(x_i)^2

    The norms belong to the functions, not to the samples: on a mesh that is denser in one place, errors there
    count by the length they cover. A constant factor of the weights cancels. The mean over the batch is the
    loss of CA (39). Where the two are equal the gradient is 0.

    Args:
        pred: (B, N, C), any floating dtype; sums are taken in float32 or wider.
        target: (B, N, C), pred's dtype and device.
        weights: (N,) or (B, N) quadrature weights >= 0 of the mesh, any floating dtype; None: equal.

    Returns:
        (B,), float32 (float64 for float64 inputs). A target that is 0 gives inf, or NaN if pred is 0 too.

    Raises:
        TypeError: an argument that is no tensor of a floating dtype, or pred and target of different dtypes.
        ValueError: a shape or device that does not fit.
    """
    named = {"pred": pred, "target": target}
    if weights is not None:
        named["weights"] = weights
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, was {type(value).__name__}")
        if not value.is_floating_point():
            raise TypeError(f"{name} must have a floating dtype, was {value.dtype}")
        if value.device != pred.device:
            raise ValueError(f"{name} must be on the device of pred, {pred.device}, was on {value.device}")
    if pred.ndim != 3:
        raise ValueError(f"pred must have shape (B, N, C), was {tuple(pred.shape)}")
    if target.shape != pred.shape:
        raise ValueError(
            f"target must have the shape of pred, {tuple(pred.shape)}, was {tuple(target.shape)}"
        )
    if target.dtype != pred.dtype:
        raise TypeError(f"target must have the dtype of pred, {pred.dtype}, was {target.dtype}")
    batch, n = pred.shape[:2]
    if weights is not None and tuple(weights.shape) not in ((n,), (batch, n)):
        raise ValueError(f"weights must have shape {(n,)} or {(batch, n)}, was {tuple(weights.shape)}")

    dtype = torch.promote_types(pred.dtype, torch.float32)
    difference, reference = pred.to(dtype) - target.to(dtype), target.to(dtype)
    if weights is not None:
        root = weights.to(dtype).sqrt().unsqueeze(-1)
        difference, reference = difference * root, reference * root
    # vector_norm, unlike a square root of a sum, has the gradient 0 at 0.
    norm = torch.linalg.vector_norm
    return norm(difference, dim=(1, 2)) / norm(reference, dim=(1, 2))
