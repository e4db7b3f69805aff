"""Training an experiment into a folder, from where the folder's last checkpoint left it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from ..training import (
    CheckpointError,
    Step,
    Training,
    atomic_write,
    load_checkpoint,
    load_model,
    one_cycle,
    save_checkpoint,
    write_json,
)
from ..training.files import remove_leftovers
from ..training.progress import progress_bar, require
from .config import Config, ConfigError, config_from, read_file
from .operator import METRICS, Operator, build, loss_of
from .ranks import Ranks, ranks
from .sources import Frames, Samples
from .store import generate

try:
    import fcntl
except ImportError:  # Windows: nobody keeps a second process out
    fcntl = None  # type: ignore[assignment]

CONFIG, CHECKPOINT, LOG, EVENTS = "config.json", "checkpoint.pt", "log.jsonl", "tensorboard"
BUSY = "is being trained by another process"
# Of the noise in validation and tests.
NOISE_SEED = 1


class Run(NamedTuple):
    """A trained experiment: its folder, its operator in evaluation mode, and its log."""

    folder: Path
    config: Config
    operator: Operator
    log: list[dict[str, Any]]


def train(
    config: Config,
    out: str | Path,
    *,
    data: str | Path | None = None,
    workers: int = 1,
    tensorboard: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Run:
    """Train an experiment; a run that was interrupted in this folder goes on, bit for bit on the CPU.

    The folder holds config.json, checkpoint.pt and log.jsonl, one line of JSON for every so many steps. A
    checkpoint replaces the last one in one step; whatever ends the process, at worst the steps since the last
    checkpoint are taken again.

    With ``tensorboard`` the folder tensorboard/ holds the same numbers for TensorBoard.

    Under torchrun each process takes its share of every batch (DistributedDataParallel); the first writes.

    Args:
        config: of :func:`continuum_ops.experiments.load`.
        out: the folder; made if it is not there.
        data: folder where samples are kept between runs; None: drawn in memory.
        workers: processes that draw samples.
        tensorboard: also write events; needs ``continuum_ops[tensorboard]``.
        say: takes a line of text.

    Raises:
        ConfigError: settings that do not fit each other, or a folder with a run of another configuration.
        CheckpointError: a checkpoint of another model, or a file that is none.
        ImportError: a package of ``continuum_ops[train]`` is missing, or TensorBoard.
        OSError: a file cannot be written.
        RuntimeError: the loss is no finite number.
    """
    require("training", "tqdm")
    if tensorboard:
        require("the log of a training", "tensorboard", extra="tensorboard")
    folder = Path(out)
    device = _device(config)
    source = config.data
    blank = source.blank()
    build(config, source.read(blank, "train"), source.statistics(blank))
    with ranks(device) as processes:
        if config.training.batch_size % processes.size:
            raise ConfigError(
                f"training.batch_size must be a multiple of the {processes.size} processes, "
                f"was {config.training.batch_size}"
            )
        with _claimed(folder, config) if processes.first else nullcontext():
            if processes.first and data is not None:
                _samples(config, data, workers)
            processes.wait()
            found = _samples(config, data, workers)
            operator = _train(config, folder, processes, found, tensorboard, say)
            processes.wait()
    return Run(folder, config, operator.eval(), read_log(folder / LOG))


class _Data(NamedTuple):
    training: Samples
    statistics: Samples
    held_out: Samples


def _samples(config: Config, data: str | Path | None, workers: int) -> _Data:
    source = config.data
    drawn = generate(source, "train", data, workers)
    held_out = source.read(generate(source, "validation", data, workers), "validation")
    return _Data(source.read(drawn, "train"), source.statistics(drawn), held_out)


def _train(
    config: Config,
    folder: Path,
    processes: Ranks,
    data: _Data,
    tensorboard: bool,
    say: Callable[[str], None],
) -> Operator:
    with torch.random.fork_rng(devices=[]), _threads(config.training.threads):
        seed = config.training.seed
        torch.manual_seed(seed)
        operator = build(config, data.training, data.statistics).to(processes.device)
        # Dropout and noise of their own on every process.
        torch.manual_seed(seed + processes.rank)
        training = _training(config, operator, len(data.training.input))
        checkpoint = folder / CHECKPOINT
        if checkpoint.exists():
            _restore(checkpoint, config, operator, training, processes)
            if processes.first:
                say(f"goes on from step {training.step} of {training.steps}")
        steps = _Steps(config, operator, data, processes)
        log = None
        if processes.first:
            events = folder / EVENTS if tensorboard else None
            log = _Log(folder / LOG, training.step, config.training.log_every, events)

        def after(step: Step) -> None:
            if log is not None:
                log.add(step)
            if step.step % config.training.checkpoint_every == 0 or step.step == training.steps:
                content = _content(config, operator, training, processes)
                if processes.first:
                    save_checkpoint(checkpoint, content)

        operator.train()
        title = f"training {config.name}"
        with (
            log or nullcontext(),
            progress_bar(training.steps, title, "step", initial=training.step)
            if processes.first
            else nullcontext() as bar,
        ):
            training.run(
                steps.loss,
                validate=steps.validate,
                validate_every=config.training.validate_every,
                bar=bar,
                after=after,
                average=processes.mean,
            )
    return operator


def open_run(folder: str | Path, checkpoint: str | Path | None = None) -> Run:
    """A trained run, on the CPU; also one whose training has not ended.

    Args:
        folder: of :func:`train`.
        checkpoint: another file in place of the folder's.

    Raises:
        ConfigError: no run in this folder, or none with a checkpoint.
        CheckpointError: a file that is no checkpoint, or one of another model.
    """
    folder = Path(folder)
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{folder} holds no run: {folder / CONFIG} is missing")
    config = config_from(read_file(folder / CONFIG))
    path = folder / CHECKPOINT if checkpoint is None else Path(checkpoint)
    if not path.exists():
        why = "" if checkpoint is not None else "; the training has not reached its first checkpoint"
        raise ConfigError(f"{path}: no such file{why}")
    source = config.data
    blank = source.blank()
    operator = build(config, source.read(blank, "train"), source.statistics(blank))
    load_model(operator, _checkpoint(path, config)["model"], path)
    return Run(folder, config, operator.eval(), read_log(folder / LOG))


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log up to the first that is none; the last one may have been cut off."""
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
            math.isfinite(entry["step"] + entry["seconds"])
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            break
        entries.append(entry)
    return entries


@torch.no_grad()
def predict(
    operator: Operator, samples: Samples, weights: str, batch_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Predictions (n, M, C) on the CPU in evaluation mode; the noise, if any, is always the same."""
    was = operator.training
    operator.eval()
    generator = torch.Generator().manual_seed(NOISE_SEED)
    samples = on_device(samples, device)
    rows = torch.arange(len(samples.input)).split(batch_size)
    parts = [operator(operator.perturb(select(samples, i), generator), weights).cpu() for i in rows]
    operator.train(was)
    return torch.cat(parts)


def roll_out(operator: Operator, frames: Frames, weights: str, batch_size: int) -> Tensor:
    """The frames after the known ones, (n, F - known, N, c), each predicted from predictions before it."""
    window = [frames.values[:, i] for i in range(frames.known)]
    predicted = []
    for i in range(frames.known, frames.values.shape[1]):
        samples = Samples(torch.cat(window, -1), frames.values[:, i], frames.mesh, frames.mesh)
        predicted.append(predict(operator, samples, weights, batch_size))
        window = [*window[1:], predicted[-1]]
    return torch.stack(predicted, 1)


def select(samples: Samples, rows: Tensor) -> Samples:
    """Some of the samples, on the same meshes."""
    return samples.each(lambda x: x[rows])


def on_device(samples: Samples, device: torch.device | str) -> Samples:
    """The samples and their meshes there; the same object where they are."""
    if torch.device(device).type == "cpu":
        return samples
    mesh = samples.mesh.to(device)
    target_mesh = mesh if samples.target_mesh is samples.mesh else samples.target_mesh.to(device)
    return samples.each(lambda x: x.to(device))._replace(mesh=mesh, target_mesh=target_mesh)


class _Steps:
    """Loss and validation of a training, this process's share of them."""

    def __init__(self, config: Config, operator: Operator, data: _Data, processes: Ranks) -> None:
        self.config, self.operator, self.processes = config, operator, processes
        self.samples, self.held_out = on_device(data.training, processes.device), data.held_out
        self.function = loss_of(config)
        if config.training.compile:
            operator.model.compile()
        # Its forward pass readies the sum of the gradients over the processes.
        self.model: nn.Module = operator
        if processes.size > 1:
            self.model = nn.parallel.DistributedDataParallel(operator)

    def loss(self, rows: Tensor) -> Tensor:
        own = self.processes.share(rows).to(self.processes.device)
        batch = self.operator.perturb(select(self.samples, own))
        with self._autocast():
            prediction = self.model(batch, self.config.model.weights)
        return self.function(prediction.to(batch.target.dtype), batch).mean()

    def validate(self) -> float:
        """The mean error, computed by the first process."""
        mean = torch.zeros((), dtype=torch.float64, device=self.processes.device)
        if self.processes.first:
            asked, held_out = self.config.training, self.held_out
            weights, device = self.config.model.weights, self.processes.device
            prediction = predict(self.operator, held_out, weights, asked.test_batch_size, device)
            metric = METRICS[self.config.loss.metric]
            mean += metric(prediction, held_out.target, held_out.target_mesh.weights).mean()
        return (self.processes.mean(mean) * self.processes.size).item()

    def _autocast(self) -> Any:
        if self.config.training.autocast == "none":
            return nullcontext()
        return torch.autocast(self.processes.device.type, getattr(torch, self.config.training.autocast))


class _Log:
    """JSON lines, those of steps that will be taken again left out; and events of TensorBoard in a folder."""

    def __init__(self, path: Path, step: int, every: int, events: Path | None) -> None:
        self.path, self.every, self.events = path, every, None
        if events is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(events), purge_step=step + 1)
        kept = [entry for entry in read_log(path) if entry["step"] <= step]
        with atomic_write(path) as file:
            file.writelines((json.dumps(entry) + "\n").encode() for entry in kept)
        self.before = kept[-1]["seconds"] if kept else 0.0

    def __enter__(self) -> None:
        self.start = time.perf_counter()
        self.file = self.path.open("a", encoding="utf-8")

    def __exit__(self, *_: object) -> None:
        self.file.close()
        if self.events is not None:
            self.events.close()

    def add(self, step: Step) -> None:
        if step.step % self.every and step.validation is None:
            return
        entry = {k: v for k, v in step._asdict().items() if v is not None}
        entry["seconds"] = round(self.before + time.perf_counter() - self.start, 3)
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
        if self.events is not None:
            for name in ("loss", "learning_rate", "validation"):
                if name in entry:
                    self.events.add_scalar(name, entry[name], step.step)
            self.events.flush()


@contextmanager
def _claimed(folder: Path, config: Config) -> Iterator[None]:
    """Make the folder this configuration's, unless it is another one's, and keep other processes out."""
    folder.mkdir(parents=True, exist_ok=True)
    path, content = folder / CONFIG, config.to_dict()
    if path.exists():
        there = config_from(read_file(path)).to_dict()
        different = list(_differences(there, content))
        if different:
            raise ConfigError(
                f"{folder} holds a run of another configuration ({'; '.join(different)}): choose another "
                "folder, or remove this one"
            )
    elif (folder / CHECKPOINT).exists():
        raise ConfigError(f"{folder} holds a checkpoint without {CONFIG}: choose another folder")
    else:
        write_json(path, content)
    with path.open("rb") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{folder} {BUSY}") from None
        for name in (CONFIG, CHECKPOINT, LOG):
            remove_leftovers(folder / name)
        yield


def _differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """ "training.steps: 10 there, 20 here" for each value that differs."""
    for key in {**a, **b}:
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            yield from _differences(x, y, f"{prefix}{key}.")
        elif x != y:
            yield f"{prefix}{key}: {x} there, {y} here"


def _training(config: Config, operator: Operator, samples: int) -> Training:
    asked, steps = config.optimizer, config.training.steps
    kind = torch.optim.Adam if asked.name == "adam" else torch.optim.AdamW
    optimizer = kind(operator.parameters(), lr=asked.learning_rate, weight_decay=asked.weight_decay)
    return Training(
        operator.parameters(),
        samples,
        optimizer,
        _schedule(config, optimizer),
        steps=steps,
        batch_size=config.training.batch_size,
        max_norm=asked.clip or float("inf"),
        generator=torch.Generator().manual_seed(config.training.seed),
    )


def _schedule(config: Config, optimizer: Optimizer) -> LRScheduler | None:
    asked, steps = config.schedule, config.training.steps
    if asked.name == "one-cycle":
        rate = config.optimizer.learning_rate
        return one_cycle(optimizer, rate, steps, asked.warm_up, asked.div_factor, asked.final_div_factor)
    return CosineAnnealingLR(optimizer, steps) if asked.name == "cosine" else None


def _content(config: Config, operator: Operator, training: Training, processes: Ranks) -> dict[str, Any]:
    state = training.state_dict()
    return {
        "kind": "training",
        "config": config.to_dict(),
        "model": operator.state_dict(),
        "training": {**state, "random": processes.gather(state["random"])},
    }


def _checkpoint(path: Path, config: Config) -> dict[str, Any]:
    """A checkpoint of this configuration's model."""
    content = load_checkpoint(path)
    if content.get("kind") != "training":
        raise CheckpointError(f"{path} must be a checkpoint of a training, was one of {content.get('kind')}")
    for name in ("config", "model", "training"):
        if not isinstance(content.get(name), dict):
            raise CheckpointError(
                f"{path} must hold {name!r}, a dict, was {type(content.get(name)).__name__}"
            )
    here = config.to_dict()
    for section in ("model", "normalizers"):
        there = content["config"].get(section)
        if not isinstance(there, dict):
            raise CheckpointError(f"{path} must hold {section!r} of its configuration, was {there!r}")
        different = list(_differences(there, here[section], f"{section}."))
        if different:
            raise CheckpointError(f"{path} is a checkpoint of another model ({'; '.join(different)})")
    return content


def _restore(path: Path, config: Config, operator: Operator, training: Training, processes: Ranks) -> None:
    content = _checkpoint(path, config)
    different = list(_differences(content["config"], config.to_dict()))
    if different:
        raise CheckpointError(f"{path} is a checkpoint of another configuration ({'; '.join(different)})")
    state, random = content["training"], content["training"].get("random")
    if not isinstance(random, list | tuple) or len(random) != processes.size:
        there = len(random) if isinstance(random, list | tuple) else "no"
        raise CheckpointError(
            f"{path} is a checkpoint of a training by {there} processes, not {processes.size}"
        )
    load_model(operator, content["model"], path)
    try:
        training.load_state_dict({**state, "random": random[processes.rank]})
    except Exception as error:  # torch's optimisers and schedules look at little before they use it
        raise CheckpointError(
            f"{path} does not fit this training: {type(error).__name__}: {error}".splitlines()[0]
        ) from error


def _device(config: Config) -> torch.device:
    try:
        device = torch.device(config.training.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"training.device must be a device of this machine, was {config.training.device!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return device


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
