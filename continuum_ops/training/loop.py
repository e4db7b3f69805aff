"""The training loop of the demonstration and the benchmarks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Fitted(NamedTuple):
    """What a training took, and its history: step, loss and validation at each validation."""

    seconds: float
    cpu_seconds: float
    history: list[dict[str, float]]


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
    """Minimise a mean over samples: AdamW, one-cycle learning rate, gradients clipped by their norm.

    Batches are drawn from torch's generator, epoch by epoch without repetition; what is left of an epoch and
    fills no batch is dropped.

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
    if samples < batch_size:
        raise ValueError(f"samples must be at least batch_size = {batch_size}, was {samples}")
    if warm_up * steps < 2:
        raise ValueError(f"warm_up must be 2 steps at least, was {warm_up} of {steps} steps")
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=warm_up
    )
    start, cpu_start = time.perf_counter(), time.process_time()
    history: list[dict[str, float]] = []
    order, validation = torch.empty(0, dtype=torch.int64), math.nan
    for step in range(1, steps + 1):
        if len(order) < batch_size:
            order = torch.randperm(samples)
        rows, order = order[:batch_size], order[batch_size:]
        batch_loss = loss(rows)
        optimizer.zero_grad()
        batch_loss.backward()
        nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()
        schedule.step()
        value = batch_loss.item()
        if not math.isfinite(value):
            raise RuntimeError(f"the training loss is {value} at step {step}")
        if validate is not None and (step % validate_every == 0 or step == steps):
            validation = validate()
            history.append({"step": step, "loss": value, "validation": validation})
        if bar is not None:
            bar.set_postfix_str(f"loss {value:.4f}, validation {validation:.2%}", refresh=False)
            bar.update()
    return Fitted(time.perf_counter() - start, time.process_time() - cpu_start, history)
