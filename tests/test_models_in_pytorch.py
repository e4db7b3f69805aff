"""Every model preset inside the machinery of PyTorch: autocast, checkpointing, copies, data loaders."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch
from model_cases import CLASSES, PRESETS, ModelCase, by_preset, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


def gradients(model: nn.Module, out: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.float().square().mean(), list(model.parameters())))


def relative(value: Tensor, right: Tensor) -> float:
    return float((value.double() - right).norm() / right.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@by_preset(PRESETS)
def test_autocast(case, dtype):
    """float32 parameters, meshes and inputs; the error is of the order of the dtype's rounding."""
    model, wide = case.model(), case.model(torch.float64)
    right = run(wide, case.inputs(torch.float64), case.grid(torch.float64))
    with torch.autocast("cpu", dtype=dtype):
        out = run(model, case.inputs(), case.grid())
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert relative(out.detach(), right.detach()) < 8 * eps
    got = torch.cat([g.flatten() for g in gradients(model, out)])
    wanted = torch.autograd.grad(right.square().mean(), list(wide.parameters()))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert got.dtype == torch.float32
    assert relative(got, torch.cat([g.flatten() for g in wanted])) < 16 * eps


@by_preset(PRESETS)
def test_float16_with_a_grad_scaler(case):
    """A scaled step moves the parameters as the same step without scaling does in float64."""
    model, wide = case.model(), case.model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = run(model, case.inputs(), case.grid()).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**6  # no overflow: the step was made
    run(wide, case.inputs(torch.float64), case.grid(torch.float64)).square().mean().backward()
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    wanted = torch.cat([-1e-2 * p.grad.flatten() for p in wide.parameters()])
    assert relative(moved, wanted) < 16 * torch.finfo(torch.float16).eps


@by_preset(PRESETS)
def test_checkpointing_gives_the_same_bits(case):
    model = case.model()
    inputs, mesh = case.inputs(), case.grid()
    wanted = gradients(model, run(model, inputs, mesh))
    whole = checkpoint(run, model, inputs, mesh, use_reentrant=False)
    for gradient, right in zip(gradients(model, whole), wanted, strict=True):
        assert torch.equal(gradient, right)
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    for gradient, right in zip(gradients(model, run(model, inputs, mesh)), wanted, strict=True):
        assert torch.equal(gradient, right)


DROPOUTS = {"tno-lorenz63": {"dropout": 0.3}, "galerkin-darcy": {"dropout": 0.3, "attention_dropout": 0.3}}


@pytest.mark.parametrize("preset", list(DROPOUTS))
def test_checkpointing_with_dropout(preset):
    case = next(case for case in PRESETS if case.preset == preset)
    model = case.model(**DROPOUTS[preset])
    inputs, mesh = case.inputs(), case.grid()
    results = []
    for forward in (run, functools.partial(checkpoint, run, use_reentrant=False)):
        torch.manual_seed(3)
        results.append(gradients(model, forward(model, inputs, mesh)))
    for gradient, right in zip(*results, strict=True):
        assert torch.equal(gradient, right)
    torch.manual_seed(4)
    assert not torch.equal(gradients(model, run(model, inputs, mesh))[0], results[0][0])


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved_whole(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, pickled, saved_whole])
@by_preset(PRESETS)
def test_copies_are_equal_and_independent(case, how):
    model = case.model()
    inputs, mesh = case.inputs(), case.grid()
    right = run(model, inputs, mesh)
    twin = how(model)
    assert torch.equal(run(twin, inputs, mesh), right)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(run(model, inputs, mesh), right)
    assert not torch.equal(run(twin, inputs, mesh), right)


@by_preset(PRESETS)
def test_state_dict_through_a_file_with_weights_only(case, tmp_path):
    model, other = case.model(), case.model(seed=7)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    inputs, mesh = case.inputs(), case.grid()
    assert torch.equal(run(other, inputs, mesh), run(model, inputs, mesh))


def test_channels_last_convolutions():
    case = next(case for case in PRESETS if case.preset == "galerkin-darcy")
    model, other = case.model(), case.model().to(memory_format=torch.channels_last)
    assert other.downsample.conv.weight.is_contiguous(memory_format=torch.channels_last)
    inputs, mesh = case.inputs(), case.grid()
    torch.testing.assert_close(run(other, inputs, mesh), run(model, inputs, mesh))


class Predictions(Dataset[Tensor]):
    """Items that a model computes in the worker process."""

    def __init__(self, case: ModelCase) -> None:
        self.model, self.mesh = case.model().eval(), case.grid()
        self.inputs = case.inputs(batch=6)

    def __len__(self) -> int:
        return 6

    @torch.no_grad()
    def __getitem__(self, index: int) -> Tensor:
        return run(self.model, tuple(t[index : index + 1] for t in self.inputs), self.mesh)[0]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@by_preset(CLASSES)
def test_data_loader_workers(case, start):
    """Also after the parent has used its threads, which a forked child does not have."""
    data = Predictions(case)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        large = case.inputs(side=4 * case.side)
        run(data.model, large, case.grid(side=4 * case.side)).sum().backward()
        expected = torch.stack([data[i] for i in range(len(data))])
        loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context=start, timeout=120)
        got = torch.cat(list(loader))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(got, expected)
