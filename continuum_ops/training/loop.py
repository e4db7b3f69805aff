"""The training loop: of the demonstration, the benchmarks and the experiments."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Fitted(NamedTuple):
    """What a training took, and its history: step, loss and validation at each validation."""

    seconds: float
    cpu_seconds: float
    history: list[dict[str, float]]


class Step(NamedTuple):
    """What a step gave; validation is None where none was due."""

    step: int
    loss: float
    learning_rate: float
    validation: float | None


class Training:
    """Minimises a mean over samples; its state can be saved after any step and goes on bit for bit.

    Batches are drawn from torch's generator, epoch by epoch without repetition; what is left of an epoch and
    fills no batch is dropped. Gradients are clipped by their norm.

    Args:
        parameters: to be trained.
        samples: number of samples, >= batch_size.
        optimizer: of the parameters.
        schedule: steps after each step of the optimiser; None: a constant learning rate.
        steps: optimiser steps, >= 1.
        batch_size: samples a step.
        max_norm: bound of the gradient's L2 norm; inf: none.
        generator: of the data order; None: torch's own.

    Raises:
        ValueError: fewer samples than a batch has.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        samples: int,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        *,
        steps: int,
        batch_size: int,
        max_norm: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if samples < batch_size:
            raise ValueError(f"samples must be at least batch_size = {batch_size}, was {samples}")
        self.parameters = list(parameters)
        self.samples, self.steps, self.batch_size, self.max_norm = samples, steps, batch_size, max_norm
        self.optimizer, self.schedule, self.generator = optimizer, schedule, generator
        self.step = 0
        self.order = torch.empty(0, dtype=torch.int64)
        self.history: list[dict[str, float]] = []

    def run(
        self,
        loss: Callable[[Tensor], Tensor],
        *,
        validate: Callable[[], float] | None = None,
        validate_every: int = 100,
        bar: Any = None,
        after: Callable[[Step], None] | None = None,
        average: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take the steps that are left.

        Args:
            loss: maps the indices of a batch, (batch_size,), to a scalar.
            validate: called every ``validate_every`` steps and at the end; its value goes into the history.
            validate_every: steps.
            bar: a tqdm bar that is advanced, or None.
            after: called after each step, when the state is that between two steps.
            average: of the loss over processes that train together.

        Raises:
            RuntimeError: a loss that is no finite number.
        """
        validation = self.history[-1]["validation"] if self.history else math.nan
        while self.step < self.steps:
            if len(self.order) < self.batch_size:
                self.order = torch.randperm(self.samples, generator=self.generator)
            rows, self.order = self.order[: self.batch_size], self.order[self.batch_size :]
            rate = self.optimizer.param_groups[0]["lr"]
            batch_loss = loss(rows)
            self.optimizer.zero_grad()
            batch_loss.backward()
            if self.max_norm < math.inf:
                nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            self.step += 1
            value = (batch_loss if average is None else average(batch_loss)).item()
            if not math.isfinite(value):
                raise RuntimeError(f"the training loss is {value} at step {self.step}")
            due = validate is not None and (self.step % validate_every == 0 or self.step == self.steps)
            if validate is not None and due:
                validation = validate()
                self.history.append({"step": self.step, "loss": value, "validation": validation})
            if bar is not None:
                bar.set_postfix_str(f"loss {value:.4f}, validation {validation:.2%}", refresh=False)
                bar.update()
            if after is not None:
                after(Step(self.step, value, float(rate), validation if due else None))

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, schedule, step, data order, history, torch's random numbers: tensors and plain data."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "step": self.step,
            "order": self.order.clone(),  # of the batches to come, not of the storage they are cut from
            "generator": None if self.generator is None else self.generator.get_state(),
            "history": [dict(entry) for entry in self.history],
            "random": {
                "cpu": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, the random numbers too. The model's parameters are the caller's to load.

        Raises:
            ValueError: a step, an order of the samples or a schedule that are not of this training. What
                else does not fit, torch or Python refuse.
        """
        step, order = state["step"], state["order"]
        if not isinstance(step, int) or not 0 <= step <= self.steps:
            raise ValueError(f"step must be an int from 0 to {self.steps}, was {step!r}")
        whole = isinstance(order, Tensor) and order.dtype == torch.int64 and order.ndim == 1
        if not whole or (len(order) and (int(order.min()) < 0 or int(order.max()) >= self.samples)):
            raise ValueError(f"order must be indices of {self.samples} samples")
        if not isinstance(state["random"], dict):
            raise ValueError("random must be the states of torch's random numbers")
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            if set(state["schedule"]) != set(self.schedule.state_dict()):
                raise ValueError("schedule must be the state of the same schedule")
            self.schedule.load_state_dict(state["schedule"])
        self.step, self.order = step, order
        self.history = [dict(entry) for entry in state["history"]]
        if self.generator is not None:
            self.generator.set_state(state["generator"])
        torch.set_rng_state(state["random"]["cpu"])
        if state["random"]["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["random"]["cuda"])


def one_cycle(
    optimizer: Optimizer,
    learning_rate: float,
    steps: int,
    warm_up: float = 0.1,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> LRScheduler:
    """torch's OneCycleLR: along a cosine from learning_rate / div_factor up, over ``warm_up`` of the steps.

    Then along another one down to the first value / final_div_factor; Adam's beta_1 goes 0.95, 0.85, 0.95.

    Raises:
        ValueError: fewer than two steps of warm-up.
    """
    if warm_up * steps < 2:
        raise ValueError(f"warm_up must be 2 steps at least, was {warm_up} of {steps} steps")
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        learning_rate,
        total_steps=steps,
        pct_start=warm_up,
        div_factor=div_factor,
        final_div_factor=final_div_factor,
    )


def fit(
    parameters: Iterable[nn.Parameter],
    loss: Callable[[Tensor], Tensor],
    samples: int,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float = 0.0,
    warm_up: float = 0.1,
    max_norm: float = 1.0,
    validate: Callable[[], float] | None = None,
    validate_every: int = 100,
    bar: Any = None,
) -> Fitted:
    """Minimise a mean over samples as :class:`Training` does: AdamW, one-cycle learning rate.

    Args:
        parameters: to be trained.
        loss: maps the indices of a batch, (batch_size,), to a scalar.
        samples: number of samples, >= batch_size.
        steps: optimiser steps, >= 1.
        batch_size: samples a step.
        learning_rate: its maximum; it rises from 1/25 of it over the first ``warm_up`` of the steps, then
            falls along a cosine to almost 0.
        weight_decay: of AdamW.
        warm_up: fraction of the steps, two steps at least.
        max_norm: bound of the gradient's L2 norm.
        validate: called every ``validate_every`` steps and at the end; its value goes into the history.
        validate_every: steps.
        bar: a tqdm bar that is advanced, or None.

    Raises:
        ValueError: fewer samples than a batch has, fewer than two steps of warm-up.
        RuntimeError: a loss that is no finite number.
    """
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=weight_decay)
    training = Training(
        trained,
        samples,
        optimizer,
        one_cycle(optimizer, learning_rate, steps, warm_up),
        steps=steps,
        batch_size=batch_size,
        max_norm=max_norm,
    )
    start, cpu_start = time.perf_counter(), time.process_time()
    training.run(loss, validate=validate, validate_every=validate_every, bar=bar)
    return Fitted(time.perf_counter() - start, time.process_time() - cpu_start, training.history)
