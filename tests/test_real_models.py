"""Published packages' models, built from their configurations, inside a quadrature block.

Expected values: the same model in float64 with scaled_dot_product_attention replaced by the plain formula.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import continuum_ops as co

pytestmark = pytest.mark.models
REASON = "needs tests/requirements-models.txt: make test-models"
_declared: list[torch.library.Library] = []


def package(name: str) -> ModuleType:
    if name in ("timm", "torchvision", "transformers"):
        _make_torchvision_importable()
    return pytest.importorskip(name, reason=REASON)


def _make_torchvision_importable() -> None:
    """Its compiled operators want a CUDA build of torch; elsewhere its import fails for two declarations."""
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _declared:
            raise
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


def formula(w):
    """A scaled_dot_product_attention that knows nothing but its formula, with weights w (..., M) or none."""

    def attend(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        assert dropout_p == 0.0
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (x[:, torch.arange(query.shape[-3]) // groups] for x in (key, value))
        s = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            s = s + attn_mask
        e = torch.exp(s - s.amax(-1, keepdim=True))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            e = torch.where(attn_mask, e, 0.0)
        if w is not None and w.shape[-1] == key.shape[-2]:
            e = e * (w if w.dim() == 1 else w[:, None, None, :])
        return e @ value / e.sum(-1, keepdim=True)

    return attend


def randomise(model, scale=0.2, seed=0):
    """Biases, norms and tokens too, which are zeros and ones at first."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype), alpha=scale)
    return model


def weights(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1


def gradients(model, out):
    loss = out.square().sum()
    pairs = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in pairs], allow_unused=True)
    return {n: g for (n, _), g in zip(pairs, found, strict=True) if g is not None}


def check(model, run, w, monkeypatch):
    """Output and gradients against the formula; equal weights give the model's own output, w another."""
    own = run(model)
    with co.nn.quadrature(torch.ones(w.shape[-1], dtype=torch.float64)):
        torch.testing.assert_close(run(model), own, rtol=1e-10, atol=1e-10)
    with co.nn.quadrature(w):
        out = run(model)
        actual = gradients(model, out)
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", formula(w))
        expected_out = run(model)
        expected = gradients(model, expected_out)
    torch.testing.assert_close(out, expected_out, rtol=1e-10, atol=1e-10)
    assert actual.keys() == expected.keys()
    # Of all parameters: that of a bias of the keys is 0.
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, g in expected.items():
        torch.testing.assert_close(actual[name], g, rtol=1e-8, atol=1e-10 * largest)
    assert (out - own).abs().max() > 1e-4 * own.abs().max()
    return out


VIT = {
    "class token": ({"global_pool": "token"}, 17),
    "no class token": ({"class_token": False, "global_pool": "avg"}, 16),
    "attention pooling, registers": ({"class_token": False, "global_pool": "map", "reg_tokens": 2}, 18),
    "norm of q and k": ({"qk_norm": True, "class_token": False, "global_pool": "avg"}, 16),
}


def timm_vit(**options):
    timm = package("timm")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    torch.manual_seed(0)
    return randomise(timm.models.vision_transformer.VisionTransformer(**sizes, **options).double())


def images(batch=2):
    return torch.randn(batch, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", VIT)
@pytest.mark.parametrize("per_sample", [False, True])
def test_timm_vit(kind, per_sample, monkeypatch):
    options, tokens = VIT[kind]
    model, x = timm_vit(**options), images()
    check(model, lambda m: m(x), weights(*(2,) * per_sample, tokens), monkeypatch)


def test_timm_vit_without_gradients_and_on_another_grid(monkeypatch):
    """dynamic_img_size: one model on 4 x 4 and on 2 x 6 patches, each with its weights."""
    model = timm_vit(class_token=False, global_pool="avg", dynamic_img_size=True).eval()
    with torch.no_grad():
        for height, width in ((32, 32), (16, 48)):
            x = torch.randn(2, 3, height, width, dtype=torch.float64)
            w = weights(height * width // 64)
            with co.nn.quadrature(w):
                out = model(x)
            with monkeypatch.context() as patch:
                patch.setattr(F, "scaled_dot_product_attention", formula(w))
                torch.testing.assert_close(out, model(x), rtol=1e-10, atol=1e-10)


def test_timm_vit_in_bfloat16(monkeypatch):
    model, x, w = timm_vit(), images().float(), weights(17).float()
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", formula(w.double()))
            exact = model(x.double())
        model = model.float()
        with torch.autocast("cpu", torch.bfloat16):
            with co.nn.quadrature(w):
                out = model(x)
            with monkeypatch.context() as patch:
                patch.setattr(F, "scaled_dot_product_attention", formula(w))
                plain = model(x)
    bound = max(2 * float((plain - exact).abs().max()), 8 * 2**-8 * float(exact.abs().max()))
    assert float((out - exact).abs().max()) <= bound


def test_timm_vit_compiled_without_a_graph_break(monkeypatch):
    model, x = timm_vit(), images()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for seed in range(2):
        w = weights(17, seed=seed)
        with co.nn.quadrature(w):
            out = compiled(x)
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", formula(w))
            torch.testing.assert_close(out, model(x), rtol=1e-10, atol=1e-10)


def test_timm_vit_with_attention_written_out_warns():
    package("timm").layers.set_fused_attn(False)
    try:
        model = timm_vit()
    finally:
        package("timm").layers.set_fused_attn(True)
    message = "of length 17 were not used: no attention ran inside the block that could"
    with pytest.warns(UserWarning, match=message), co.nn.quadrature(weights(17)):
        model(images())


def test_checkpointed_timm_vit_trains_with_the_same_gradients():
    model, x, w = timm_vit(), images(), weights(17)
    found = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        with co.nn.quadrature(w):
            model(x).square().sum().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(g, found[1][n]) for n, g in found[0].items())


@pytest.mark.parametrize("replaced", [False, True])
def test_torchvision_vit(replaced, monkeypatch):
    """torch.nn.MultiheadAttention, replaced or not."""
    package("torchvision")
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    stock = randomise(VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5).double())
    x, w = images(), weights(17)
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", formula(w))
        expected = stock(x)
    model = co.nn.replace_attention(stock) if replaced else stock
    with co.nn.quadrature(w):
        torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), expected, rtol=1e-10, atol=1e-10)


TRANSFORMER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "attn_implementation": "sdpa",
}


def test_transformers_bert_with_padding(monkeypatch):
    package("transformers")
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = randomise(BertModel(BertConfig(vocab_size=50, **TRANSFORMER, **options)).double())
    ids = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(0))
    present = torch.arange(11) < torch.tensor([11, 7])[:, None]

    def run(m):
        return m(input_ids=ids, attention_mask=present.long()).last_hidden_state[present]

    w = weights(11)
    out = check(model, run, w, monkeypatch)
    # The same padding as quadrature's mask, instead of the model's.
    with co.nn.quadrature(w, mask=present):
        masked = model(input_ids=ids).last_hidden_state[present]
    torch.testing.assert_close(masked, out, rtol=1e-10, atol=1e-10)


def test_transformers_llama_causal_with_grouped_queries(monkeypatch):
    package("transformers")
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, num_key_value_heads=2, use_cache=False, **TRANSFORMER)
    model = randomise(LlamaModel(config).double())
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    check(model, lambda m: m(inputs_embeds=x).last_hidden_state, weights(2, 11), monkeypatch)


def test_transformers_vit(monkeypatch):
    package("transformers")
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(image_size=32, patch_size=8, **TRANSFORMER)
    model = randomise(ViTModel(config).double())
    x = images()
    check(model, lambda m: m(pixel_values=x).last_hidden_state, weights(17), monkeypatch)


def test_transformers_with_eager_attention_warns():
    package("transformers")
    from transformers import BertConfig, BertModel

    options = TRANSFORMER | {"attn_implementation": "eager"}
    model = BertModel(BertConfig(vocab_size=50, **options)).eval()
    message = 'were not used: .*attn_implementation="sdpa"'
    with pytest.warns(UserWarning, match=message), co.nn.quadrature(weights(11)):
        model(input_ids=torch.zeros(1, 11, dtype=torch.long))


class FourierThenAttention(nn.Module):
    """neuraloperator's FNO (which computes in float32), then attention over its points in float64."""

    def __init__(self, fno, kind):
        super().__init__()
        self.fno = fno
        self.kind = kind
        self.qkv = nn.Linear(8, 24, dtype=torch.float64)
        self.stock = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
        self.out = nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, x, **others):
        u = self.fno(x).double().flatten(2).mT
        if self.kind == "sdpa":
            q, k, v = self.qkv(u).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            u = u + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        else:
            u = u + self.stock(u, u, u, need_weights=False)[0]
        return self.out(u).mT.unflatten(-1, x.shape[2:])


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(6, 1, 6, 5, generator=g)
        self.y = self.x.square().cumsum(-1) / 5

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


def fno(out_channels):
    package("neuralop")
    from neuralop.models import FNO

    torch.manual_seed(0)
    return FNO(n_modes=(4, 4), in_channels=1, out_channels=out_channels, hidden_channels=8, n_layers=2)


def fit(model):
    """Two epochs in neuraloperator's Trainer; returns its metrics."""
    from neuralop import LpLoss
    from neuralop.training import Trainer

    loader = torch.utils.data.DataLoader(Samples(), batch_size=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trainer = Trainer(model=model, n_epochs=2)
    loss = LpLoss(d=2)
    return trainer.train(loader, {"test": loader}, optimizer, scheduler, None, loss, {"l2": loss})


@pytest.mark.parametrize("kind", ["sdpa", "stock", "replaced"])
def test_neuraloperator_trainer(kind, monkeypatch):
    """Training and evaluation inside the block are those of the formula, step for step.

    The attentions agree in float64. Where their sums are rounded to the float32 of the FNO, in each of the
    four steps, they may part by one unit of its last place.
    """
    allowed = 4 * torch.finfo(torch.float32).eps
    start = FourierThenAttention(fno(8), kind)
    for part in (start.qkv, start.stock, start.out):
        randomise(part, 0.5)
    x, y = torch.linspace(0, 1, 6, dtype=torch.float64) ** 2, torch.linspace(0, 1, 5, dtype=torch.float64)
    mesh = co.Grid(x, y)
    model = co.nn.replace_attention(copy.deepcopy(start)) if kind == "replaced" else copy.deepcopy(start)
    with co.nn.quadrature(mesh):
        metrics = fit(model)
    expected = copy.deepcopy(start)
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", formula(mesh.weights))
        if kind != "sdpa":
            patch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
        expected_metrics = fit(expected)
    plain = copy.deepcopy(start)
    plain_metrics = fit(plain)
    assert metrics["avg_loss"] == pytest.approx(expected_metrics["avg_loss"], rel=allowed)
    assert metrics["test_l2"] == pytest.approx(float(expected_metrics["test_l2"]), rel=allowed)
    assert metrics["avg_loss"] != pytest.approx(plain_metrics["avg_loss"], rel=20 * allowed)
    for (name, p), e in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (p - e).abs().max() <= allowed * e.abs().max(), name


def test_an_fno_in_its_trainer_is_left_alone():
    """It has no attention: nothing changes, and the block says that its weights were not used."""
    plain, inside = fno(1), fno(1)
    metrics = fit(plain)
    message = "of length 30 were not used: no attention ran inside the block"
    with pytest.warns(UserWarning, match=message), co.nn.quadrature(weights(30)):
        found = fit(inside)
    assert found["avg_loss"] == metrics["avg_loss"]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), inside.parameters(), strict=True))


def test_the_example_of_the_docs(monkeypatch):
    """Putting it into your model: the second one."""
    package("timm")
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import timm" in b]
    names = {"torch": torch, "co": co}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="quadrature weights")
        exec(block, names)
    vit, area = names["vit"].double().eval(), names["area"].double()
    assert names["logits"].shape == (2, 1000)
    x = torch.randn(1, 3, 64, 96, dtype=torch.float64)
    with co.nn.quadrature(area):
        out = vit(x)
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", formula(area))
        torch.testing.assert_close(out, vit(x), rtol=1e-10, atol=1e-10)
