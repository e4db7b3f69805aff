"""Models of the published codes, from the formulas of the papers: functions of a dict of parameters.

Names and shapes of the parameters are those of the published state dicts; everything is plain PyTorch on
dense matrices, without this package.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, interpolate, layer_norm, linear, silu

State = dict[str, Tensor]


class Random:
    """Draws parameters: what a name gets is of the size that keeps activations of order 1."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.state: State = {}

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def linear(self, name: str, out: int, inner: int) -> None:
        self.state[f"{name}.weight"] = self.draw(out, inner) / math.sqrt(inner)
        self.state[f"{name}.bias"] = 0.3 * self.draw(out)

    def norm(self, name: str, size: int) -> None:
        self.state[f"{name}.weight"] = 1 + 0.3 * self.draw(size)
        self.state[f"{name}.bias"] = 0.3 * self.draw(size)


def affine(s: State, name: str, x: Tensor) -> Tensor:
    return linear(x, s[f"{name}.weight"], s[f"{name}.bias"])


def norm(s: State, name: str, x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], s[f"{name}.weight"], s[f"{name}.bias"])


def layers(s: State, prefix: str) -> int:
    return len({key.removeprefix(prefix).split(".")[0] for key in s if key.startswith(prefix)})


# --- CA: TNO -------------------------------------------------------------------------------------


def tno_parameters(
    channels: int, out: int, dim: int, d: int, heads: int, depth: int, hidden: int, initial: int = 0
) -> State:
    r = Random()
    r.linear("linear_in", d, channels)
    r.linear("linear_in_position", d, channels + dim)
    if initial:
        r.linear("linear_in_initialcond", d, channels + dim + initial)
    r.linear("linear_out", out, d)
    for i in range(depth):
        for name in "qkvo":
            r.linear(f"encoder.layers.{i}.self_attn.W_{name}", d, d)
        scale = f"encoder.layers.{i}.self_attn.scaled_dot_product_attention.scale"
        r.state[scale] = torch.tensor([math.sqrt(d // heads)], dtype=torch.float64)
        r.linear(f"encoder.layers.{i}.feed_forward.fc1", hidden, d)
        r.linear(f"encoder.layers.{i}.feed_forward.fc2", d, hidden)
        r.norm(f"encoder.layers.{i}.norm1", d)
        r.norm(f"encoder.layers.{i}.norm2", d)
    r.state["pe_discrete"] = r.draw(1, 5, d)
    r.state["even_inds"] = torch.arange(0, d, 2)[None]
    r.state["odd_inds"] = torch.arange(1, d, 2)[None]
    return r.state


def tno(
    s: State,
    heads: int,
    u: Tensor,
    x: Tensor,
    weights: Tensor,
    initial: Tensor | None = None,
    append: bool = True,
    activation: Callable[[Tensor], Tensor] = gelu,
) -> Tensor:
    """CA (10)-(19) with heads (heads, d_k) and scores / sqrt(d_k); u (B, N, c), x (N, d), weights (N,)."""
    points = x.expand(len(u), *x.shape)
    if not append:
        v = affine(s, "linear_in", u)
    else:
        v = affine(s, "linear_in_position", torch.cat([u, points], -1))
    if initial is not None:
        first = torch.cat([u[:, 0], initial, points[:, 0]], -1)
        v = torch.cat([affine(s, "linear_in_initialcond", first)[:, None], v[:, 1:]], 1)
    for i in range(layers(s, "encoder.layers.")):
        p = f"encoder.layers.{i}"
        q, k, w = (
            affine(s, f"{p}.self_attn.W_{name}", v).unflatten(-1, (heads, -1)).transpose(1, 2)
            for name in "qkv"
        )
        score = q @ k.mT / math.sqrt(q.shape[-1])
        kernel = weights * (score - score.amax(-1, keepdim=True)).exp()
        mixed = (kernel / kernel.sum(-1, keepdim=True)) @ w
        v = norm(s, f"{p}.norm1", v + affine(s, f"{p}.self_attn.W_o", mixed.transpose(1, 2).flatten(2)))
        inner = activation(affine(s, f"{p}.feed_forward.fc1", v))
        v = norm(s, f"{p}.norm2", v + affine(s, f"{p}.feed_forward.fc2", inner))
    return affine(s, "linear_out", v)


# --- PiT: both forms of pit.py -------------------------------------------------------------------


def pit_concatenated_parameters(features: int, out: int, width: int, heads: int, depth: int) -> State:
    r = Random(1)
    for name in ("down", "up", *(f"conv.{i}" for i in range(depth))):
        r.state[f"{name}.lmda"] = r.draw(heads, 1, 1)
    for name, o, i in (
        ("en_layer", width, heads * features),
        ("de", out, heads * width),
        *((f"mlp.{i}", width, (1 + heads) * width) for i in range(depth)),
    ):
        r.linear(f"{name}.mlp1", width, i)
        r.linear(f"{name}.mlp2", o, width)
    return r.state


def pit_split_parameters(features: int, out: int, width: int, heads: int, depth: int) -> State:
    r = Random(2)
    r.linear("en_layer", width, features)
    for name in ("down", "up", *(f"PA.{i}" for i in range(depth))):
        r.state[f"{name}.r"] = r.draw(1, heads, 1, 1)
        r.state[f"{name}.weight"] = r.draw(heads, width, width // heads) / math.sqrt(width)
    for i in range(depth):
        r.linear(f"MLP.{i}.mlp1", width, width)
        r.linear(f"MLP.{i}.mlp2", width, width)
        r.linear(f"W.{i}", width, width)
    r.linear("de_layer.mlp1", width, width)
    r.linear("de_layer.mlp2", out, width)
    return r.state


def position_matrix(x: Tensor, y: Tensor, rate: Tensor, quantile: float | None) -> Tensor:
    """(H, N, M), PiT (5), (9), (10): a key counts whose scaled distance is at most the quantile."""
    distance = rate.reshape(-1, 1, 1) * (x[:, None] - y[None]).square().sum(-1)
    if quantile is not None:
        limit = torch.quantile(distance, quantile, dim=-1, keepdim=True)
        distance = distance.masked_fill(distance > limit, math.inf)
    return (-distance).softmax(-1)


def mlp(s: State, name: str, x: Tensor) -> Tensor:
    return affine(s, f"{name}.mlp2", gelu(affine(s, f"{name}.mlp1", x)))


def pit_concatenated(
    s: State, features: Tensor, x: Tensor, latent: Tensor, y: Tensor, en_loc: float, de_loc: float
) -> Tensor:
    def heads(name: str, to: Tensor, of: Tensor, v: Tensor, loc: float | None = None) -> Tensor:
        rate = torch.tan(math.pi / 4 * (1 - 1e-7) * (1 + torch.sin(s[f"{name}.lmda"])))
        mixed = torch.einsum("hnm,bmc->bnhc", position_matrix(to, of, rate, loc), v)
        return mixed.flatten(2)

    v = gelu(mlp(s, "en_layer", heads("down", latent, x, features, en_loc)))
    for i in range(layers(s, "conv.")):
        v = gelu(mlp(s, f"mlp.{i}", torch.cat([v, heads(f"conv.{i}", latent, latent, v)], -1)))
    return mlp(s, "de", heads("up", y, latent, v, de_loc))


def pit_split(
    s: State, features: Tensor, x: Tensor, latent: Tensor, y: Tensor, en_loc: float, de_loc: float
) -> Tensor:
    def attention(name: str, to: Tensor, of: Tensor, v: Tensor, loc: float | None = None) -> Tensor:
        rate = torch.tan(math.pi / 4 * (1 + torch.sin(s[f"{name}.r"])))
        value = torch.einsum("bmc,hcd->bhmd", v, s[f"{name}.weight"])
        return gelu((position_matrix(to, of, rate, loc) @ value).transpose(1, 2).flatten(2))

    v = attention("down", latent, x, gelu(affine(s, "en_layer", features)), en_loc)
    for i in range(layers(s, "PA.")):
        v = gelu(mlp(s, f"MLP.{i}", attention(f"PA.{i}", latent, latent, v)) + affine(s, f"W.{i}", v))
    return mlp(s, "de_layer", attention("up", y, latent, v, de_loc))


# --- GT ------------------------------------------------------------------------------------------


def galerkin_parameters(
    features: int,
    d: int,
    heads: int,
    dim: int,
    hidden: int,
    kind: str,
    *,
    depth: int = 2,
    post: bool = False,
    decoder: str = "spectral",
    fc: int | None = None,
    freq: int = 5,
    modes: int = 3,
    scaled: bool = False,
    upscaled: bool = True,
) -> State:
    r = Random(3)
    if scaled:
        third = d // 3
        widths = [features, d, third, third, d - 2 * third]
        for i in range(4):
            weight = r.draw(widths[i + 1], widths[i], 3, 3) / math.sqrt(9 * widths[i])
            r.state[f"downscaler.downsample.conv{i}.conv.0.weight"] = weight
        if upscaled:
            r.state["upscaler.upsample.conv.0.conv.0.weight"] = r.draw(d, d, 3, 3) / math.sqrt(9 * d)
    else:
        r.linear("feat_extract.id" if dim == 1 else "downscaler.id", d, features)
    for i in range(depth):
        p = f"encoder_layers.{i}"
        for j in range(3):
            r.linear(f"{p}.attn.linears.{j}", d, d)
        r.linear(f"{p}.attn.fc", d, d + heads * dim)
        if post:
            r.norm(f"{p}.layer_norm1", d)
            r.norm(f"{p}.layer_norm2", d)
        else:
            for letter in "KV" if kind in ("galerkin", "linear") else "KQ":
                for h in range(heads):
                    r.norm(f"{p}.attn.norm_{letter}.{h}", d // heads)
        r.linear(f"{p}.ff.lr1", hidden, d)
        r.linear(f"{p}.ff.lr2", d, hidden)
    width = d
    if fc is not None:
        r.linear("regressor.fc", fc, d + dim)
        width = fc
    if decoder == "pointwise":
        for i in range(2):
            r.linear(f"regressor.ff.{i}.0", width, width)
        r.linear("regressor.out", 2, width)
        return r.state
    for i in range(2):
        p = f"regressor.spectral_conv.{i}"
        r.linear(f"{p}.linear", freq, width)
        for block in [""] if dim == 1 else [".0", ".1"]:
            weight = r.draw(width, freq, *(modes,) * dim, 2) / math.sqrt(width)
            r.state[f"{p}.fourier_weight{block}"] = weight
        width = freq
    r.linear("regressor.regressor.0", 4, freq)
    r.linear("regressor.regressor.2", 2, 4)
    return r.state


def galerkin_layer(s: State, p: str, x: Tensor, pos: Tensor, heads: int, kind: str, sign: float) -> Tensor:
    """GT (4)-(7); the code divides Fourier scores by sqrt(d_k), and linear products by n."""
    n = x.shape[1]
    q, k, v = (
        affine(s, f"{p}.attn.linears.{j}", x).unflatten(-1, (heads, -1)).transpose(1, 2) for j in range(3)
    )

    def normed(letter: str, y: Tensor) -> Tensor:
        if f"{p}.attn.norm_{letter}.0.weight" not in s:
            return y
        return torch.stack([norm(s, f"{p}.attn.norm_{letter}.{h}", y[:, h]) for h in range(heads)], 1)

    where = pos.expand(*q.shape[:-1], pos.shape[-1])
    q, k, v = (torch.cat([where, normed(letter, y)], -1) for letter, y in zip("QKV", (q, k, v), strict=True))
    if kind == "softmax":
        out = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
    elif kind == "fourier":
        out = (q @ k.mT / math.sqrt(q.shape[-1]) / n) @ v
    elif kind == "linear":
        out = q.softmax(-1) @ (k.softmax(-2).mT @ v / n)
    else:
        out = q @ (k.mT @ v / n)
    x = x + sign * affine(s, f"{p}.attn.fc", out.transpose(1, 2).flatten(2))
    post = f"{p}.layer_norm1.weight" in s
    x = norm(s, f"{p}.layer_norm1", x) if post else x
    x = x + affine(s, f"{p}.ff.lr2", torch.relu(affine(s, f"{p}.ff.lr1", x)))
    return norm(s, f"{p}.layer_norm2", x) if post else x


def conv(s: State, name: str, x: Tensor) -> Tensor:
    return torch.conv2d(x, s[f"{name}.weight"], padding=1)


def resample(x: Tensor, size: tuple[int, int]) -> Tensor:
    return interpolate(x, size=size, mode="bilinear", align_corners=True)


def galerkin_transformer(
    s: State,
    features: Tensor,
    pos: Tensor,
    grid: Tensor,
    heads: int,
    kind: str,
    *,
    sizes: tuple[tuple[int, int], ...] = (),
    sign: float = 1.0,
) -> Tensor:
    """features (B, N, c); pos of the encoder, grid of the decoder (n, d); sizes fine, middle, coarse."""
    if sizes:
        fine, middle, coarse = sizes
        p = "downscaler.downsample.conv"
        v = features.unflatten(1, fine).movedim(-1, 1)
        v = torch.relu(resample(torch.relu(conv(s, f"{p}0.conv.0", v)), middle))
        one = torch.relu(conv(s, f"{p}1.conv.0", v))
        two = torch.relu(conv(s, f"{p}2.conv.0", one))
        three = torch.relu(conv(s, f"{p}3.conv.0", two))
        v = torch.relu(resample(torch.cat([one, two, three], 1), coarse)).flatten(2).mT
    else:
        v = affine(s, "feat_extract.id" if "feat_extract.id.weight" in s else "downscaler.id", features)
    for i in range(layers(s, "encoder_layers.")):
        v = galerkin_layer(s, f"encoder_layers.{i}", v, pos, heads, kind, sign)
    if "upscaler.upsample.conv.0.conv.0.weight" in s:
        v = silu(
            silu(conv(s, "upscaler.upsample.conv.0.conv.0", resample(v.mT.unflatten(-1, coarse), middle)))
        )
        v = resample(v, fine).flatten(2).mT
    if "regressor.fc.weight" in s:
        v = affine(s, "regressor.fc", torch.cat([v, grid.expand(len(v), *grid.shape)], -1))
    if "regressor.ff.0.0.weight" in s:
        for i in range(layers(s, "regressor.ff.")):
            v = silu(affine(s, f"regressor.ff.{i}.0", v))
        return affine(s, "regressor.out", v)
    dim = grid.shape[1]
    shape = (round(len(grid) ** (1 / dim)),) * dim
    v = v.unflatten(1, shape)
    for i in range(layers(s, "regressor.spectral_conv.")):
        p = f"regressor.spectral_conv.{i}"
        v = silu(spectral(s, f"{p}.fourier_weight", v) + affine(s, f"{p}.linear", v))
    inner = silu(affine(s, "regressor.regressor.0", v))
    return affine(s, "regressor.regressor.2", inner).flatten(1, -2)


def spectral(s: State, name: str, v: Tensor) -> Tensor:
    dims = tuple(range(1, v.dim() - 1))
    spectrum = torch.fft.rfftn(v, dim=dims, norm="ortho")
    if len(dims) == 1:
        weight = torch.view_as_complex(s[name])
        m = weight.shape[-1]
        out = spectrum.new_zeros(*spectrum.shape[:-1], weight.shape[1])
        out[:, :m] = torch.einsum("bxi,iox->bxo", spectrum[:, :m], weight)
    else:
        up, down = (torch.view_as_complex(s[f"{name}.{j}"]) for j in (0, 1))
        m = up.shape[-1]
        out = spectrum.new_zeros(*spectrum.shape[:-1], up.shape[1])
        out[:, :m, :m] = torch.einsum("bxyi,ioxy->bxyo", spectrum[:, :m, :m], up)
        out[:, -m:, :m] = torch.einsum("bxyi,ioxy->bxyo", spectrum[:, -m:, :m], down)
    return torch.fft.irfftn(out, s=v.shape[1:-1], dim=dims, norm="ortho")


# --- CA: ViT-NO and FANO -------------------------------------------------------------------------


def patch_parameters(
    kind: str, channels: int, d: int, heads: int, hidden: int, side: int, modes: tuple[int, int], final: int
) -> State:
    r = Random(4)

    def kernel(name: str, inner: int, out: int, sizes: tuple[int, ...]) -> None:
        for block in (1, 2):
            shape = (inner, out, *sizes)
            r.state[f"{name}.weights{block}"] = torch.complex(r.draw(*shape), r.draw(*shape)) / math.sqrt(
                inner
            )

    if kind == "vitno":
        kernel("linear_in", channels + 2, d, modes)
    else:
        r.linear("linear_in", d, channels + 2)
    for i in range(2):
        p = f"encoder.layers.{i}"
        r.state[f"{p}.self_attn.scaled_dot_product_attention.scale"] = torch.tensor([float(side**2)])
        if kind == "vitno":
            for letter in "qkvo":
                r.linear(f"{p}.self_attn.W_{letter}", d, d)
        else:
            for role in ("query", "key", "value"):
                kernel(f"{p}.self_attn.{role}_operator", d, d // heads, (*modes, heads))
            r.linear(f"{p}.self_attn.out_linear", d, d)
        r.linear(f"{p}.linear1", hidden, d)
        r.linear(f"{p}.linear2", d, hidden)
        r.norm(f"{p}.norm1", d)
        r.norm(f"{p}.norm2", d)
    r.linear("linear_out", 1, d)
    kernel("smoothing", 1, 1, (final, final))
    return r.state


def two_blocks(s: State, name: str, v: Tensor, formula: str) -> Tensor:
    """Spectral convolution over x, y of (.., x, y, c); the second block of rows is written last."""
    spectrum = torch.fft.rfft2(v, dim=(-3, -2))
    first, second = s[f"{name}.weights1"], s[f"{name}.weights2"]
    m, n = first.shape[2:4]
    top = torch.einsum(formula, spectrum[..., :m, :n, :], first)
    bottom = torch.einsum(formula, spectrum[..., -m:, :n, :], second)
    out = spectrum.new_zeros(*spectrum.shape[:-1], *top.shape[spectrum.dim() - 1 :])
    axis = spectrum.dim() - 3
    out.narrow(axis, 0, m).narrow(axis + 1, 0, n).copy_(top)
    out.narrow(axis, out.shape[axis] - m, m).narrow(axis + 1, 0, n).copy_(bottom)
    return torch.fft.irfft2(out, s=v.shape[-3:-1], dim=(axis, axis + 1))


def patch_model(
    s: State, kind: str, heads: int, u: Tensor, grid: Tensor, patches: int, norm_first: bool
) -> Tensor:
    """CA (20)-(28), (60)-(70); u (B, n, n, c), grid (n, n, 2): heads of ViT-NO and FANO are (d_k, heads)."""
    batch, n = u.shape[:2]
    v = torch.cat([u, grid.expand(batch, *grid.shape)], -1)
    size = n // patches
    v = v.reshape(batch, patches, size, patches, size, -1).transpose(2, 3).flatten(1, 2)
    v = two_blocks(s, "linear_in", v, "bpxyi,ioxy->bpxyo") if kind == "vitno" else affine(s, "linear_in", v)
    for i in range(2):
        p = f"encoder.layers.{i}"
        v = norm(s, f"{p}.norm1", v) if norm_first else v
        a = f"{p}.self_attn"
        if kind == "vitno":
            q, k, w = (affine(s, f"{a}.W_{letter}", v).unflatten(-1, (-1, heads)) for letter in "qkv")
        else:
            q, k, w = (
                two_blocks(s, f"{a}.{role}_operator", v, "bpxyi,ioxyh->bpxyoh")
                for role in ("query", "key", "value")
            )
        score = torch.einsum("bpxydh,bqxydh->bhpq", q, k) / n**2
        mixed = torch.einsum("bhpq,bqxydh->bpxydh", score.softmax(-1), w).flatten(-2)
        v = v + affine(s, f"{a}.W_o" if kind == "vitno" else f"{a}.out_linear", mixed)
        v = v if norm_first else norm(s, f"{p}.norm1", v)
        v = norm(s, f"{p}.norm2", v + affine(s, f"{p}.linear2", gelu(affine(s, f"{p}.linear1", v))))
    v = v.unflatten(1, (patches, patches)).transpose(2, 3).reshape(batch, n, n, -1)
    z = affine(s, "linear_out", v)
    return z + two_blocks(s, "smoothing", z, "bxyi,ioxy->bxyo") if "smoothing.weights1" in s else z
