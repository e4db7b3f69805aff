"""Our models in other packages' training loops, whose batches are dicts; and the events of TensorBoard.

Expected values: the same steps written out, to the last bit.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from experiment_cases import tiny
from model_cases import CLASSES, ModelCase, by_preset
from torch import Tensor, nn

from continuum_ops.experiments import train
from continuum_ops.training import relative_l2

pytestmark = pytest.mark.models
REASON = "needs tests/requirements-models.txt: make test-models"
RATE, EPOCHS = 0.05, 2


def package(name: str) -> ModuleType:
    return pytest.importorskip(name, reason=REASON)


class Functions(torch.utils.data.Dataset):
    """Six pairs of functions, and what the model takes besides."""

    def __init__(self, case: ModelCase) -> None:
        u, *rest = case.inputs(batch=6)
        self.batch = dict(zip(("x", "initial"), (u, *rest), strict=False))
        with torch.no_grad():
            self.batch["y"] = Model(case, seed=1)(**self.batch) + 0.1

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: values[i] for name, values in self.batch.items()}


class Model(nn.Module):
    """A model on its mesh, called with the entries of a batch."""

    def __init__(self, case: ModelCase, seed: int = 0) -> None:
        super().__init__()
        self.model, self.mesh = case.model(seed=seed), case.grid()

    def forward(self, x: Tensor, initial: Tensor | None = None, **_: Any) -> Tensor:
        return self.model(x, self.mesh, *([] if initial is None else [initial]))


def by_hand(model: nn.Module, batches: Any, loss: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    seen = []
    model.train()
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            seen.append(value.item())
    return seen


@by_preset(CLASSES)
def test_lightning(case: ModelCase, tmp_path: Path) -> None:
    lightning = package("lightning")
    data = Functions(case)
    loader = torch.utils.data.DataLoader(data, batch_size=3)

    def error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return relative_l2(model(**batch), batch["y"]).mean()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.seen = Model(case), []

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            value = error(self.inner, batch)
            self.seen.append(value.item())
            return value

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    module, expected = Module(), Model(case)
    options = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", default_root_dir=tmp_path, **options)
    torch.manual_seed(0)
    trainer.fit(module, loader)
    torch.manual_seed(0)
    seen = by_hand(expected, loader, error)
    assert module.seen == seen and len(seen) == 4 and seen[-1] != seen[0]
    for (name, p), e in zip(module.inner.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, e), name
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    again = Model(case, seed=2)
    again.load_state_dict({name.removeprefix("inner."): value for name, value in state.items()})
    assert all(map(torch.equal, again.parameters(), expected.parameters()))


@by_preset(CLASSES)
def test_neuraloperators_trainer(case: ModelCase) -> None:
    package("neuralop")
    from neuralop import LpLoss
    from neuralop.training import Trainer

    loader = torch.utils.data.DataLoader(Functions(case), batch_size=3)
    loss = LpLoss(d=2)  # over the points and the channels
    start = Model(case)
    model, expected = copy.deepcopy(start), copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = Trainer(model=model, n_epochs=EPOCHS)
    metrics = trainer.train(loader, {"test": loader}, optimizer, schedule, None, loss, {"l2": loss})
    by_hand(expected, loader, lambda m, batch: loss(m(**batch), batch["y"]))
    for (name, p), e in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(p, e[1]), name
    with torch.no_grad():
        truth, found = (
            torch.cat(parts).double()
            for parts in zip(*((b["y"], expected.eval()(**b)) for b in loader), strict=True)
        )
    relative = (found - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
    assert float(metrics["test_l2"]) == pytest.approx(float(relative.mean()), rel=1e-5)


def test_tensorboard_reads_the_log(tmp_path: Path) -> None:
    package("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(tiny("tno-cde"), tmp_path / "run", data=tmp_path / "data", tensorboard=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in ("loss", "learning_rate", "validation"):
        expected = [(entry["step"], entry[name]) for entry in run.log if name in entry]
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in expected] and found
        torch.testing.assert_close(
            torch.tensor([value for _, value in found]), torch.tensor([value for _, value in expected])
        )
