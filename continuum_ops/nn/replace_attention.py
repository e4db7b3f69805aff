"""Swap the attention layers of a model that was written for ``torch.nn``."""

from __future__ import annotations

import warnings
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

from .multihead_attention import MultiheadAttention
from .transformer import TransformerEncoderLayer, forbid_fast_path

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def replace_attention(model: ModuleT) -> ModuleT:
    """Turn every ``torch.nn.MultiheadAttention`` of ``model`` into this package's, in place.

    The modules stay the same objects, only their class changes: parameters (and with them optimizers),
    buffers, hooks, training mode, device, dtype, and modules used in several places all stay as they are,
    and so do the outputs until weights are given by :func:`quadrature`.
    Parametrized layers (spectral norm, weight norm, ...) keep their parametrizations.
    ``torch.nn.TransformerEncoderLayer`` becomes this package's too; it, subclasses of it and
    ``torch.nn.TransformerEncoder`` are kept off the fused inference paths, which bypass the attention
    module. (So an encoder in eval mode no longer zeroes the padded positions of its output, as in training
    mode.) Layers of this package are left alone: calling it twice is harmless.

    A :func:`quadrature` block also reaches models that were not replaced. What replacing adds: the
    ``weights`` argument, padding masks without an N x M mask, and 0, not NaN, where no key is left.

    Args:
        model: any module; it may itself be an attention layer.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: an attention layer cannot be swapped, because it is of an unknown subclass of
            ``torch.nn.MultiheadAttention`` or has a ``forward`` set on the instance. All such layers are
            named, and nothing is changed.

    Warns:
        UserWarning: the model has no ``torch.nn.MultiheadAttention`` at all.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    attention = {n: m for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    stock = {n: m for n, m in attention.items() if not isinstance(m, MultiheadAttention)}
    refused = [f"{name or 'the model itself'} ({why})" for name, m in stock.items() if (why := _obstacle(m))]
    if refused:
        raise ValueError(
            f"model has attention layers that cannot be replaced: {'; '.join(refused)}. A quadrature block "
            "reaches them as they are where they call torch.nn.MultiheadAttention.forward or "
            "scaled_dot_product_attention"
        )
    if not attention:
        warnings.warn(
            "model has no torch.nn.MultiheadAttention: nothing was replaced (calls of "
            "scaled_dot_product_attention take weights from a quadrature block without it)",
            UserWarning,
            stacklevel=2,
        )

    for layer in stock.values():
        layer.__class__ = _our_class(layer)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and isinstance(
            module.self_attn, MultiheadAttention
        ):
            forbid_fast_path(module)
            if type(module) is nn.TransformerEncoderLayer and "forward" not in vars(module):
                module.__class__ = TransformerEncoderLayer
        elif isinstance(module, nn.TransformerEncoder):
            # It would hand nested tensors to its layers in eval mode.
            module.use_nested_tensor = False
    return model


def _our_class(module: nn.MultiheadAttention) -> type[MultiheadAttention]:
    if not parametrize.is_parametrized(module):
        return MultiheadAttention
    # Parametrizing made a class of the module's own, with a property for each parametrized tensor.
    own = type(module)
    return type(own.__name__, (MultiheadAttention,), dict(vars(own)))


def _obstacle(module: nn.MultiheadAttention) -> str | None:
    cls = type(module)
    if parametrize.is_parametrized(module):
        cls = cls.__bases__[0]
    if cls is not nn.MultiheadAttention:
        return f"a {cls.__module__}.{cls.__qualname__}, whose forward may differ from torch.nn's"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    return None
