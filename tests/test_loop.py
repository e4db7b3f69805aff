"""The training loop on problems whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from continuum_ops.training import fit


def test_it_finds_the_least_squares_solution() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 3, dtype=torch.float64)
    truth = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return (x[rows] @ (weight - truth)).square().mean()

    values: list[float] = []

    def validate() -> float:
        values.append((weight - truth).norm().item())
        return values[-1]

    done = fit(
        [weight],
        loss,
        64,
        steps=600,
        batch_size=16,
        learning_rate=0.05,
        validate=validate,
        validate_every=250,
    )
    assert values[-1] < 1e-3
    assert [h["step"] for h in done.history] == [250, 500, 600]
    assert [h["validation"] for h in done.history] == values
    assert done.seconds > 0 and done.cpu_seconds > 0


def test_every_sample_once_an_epoch() -> None:
    weight = nn.Parameter(torch.zeros(1))
    seen: list[torch.Tensor] = []

    def loss(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows)
        return weight.sum()

    fit([weight], loss, 10, steps=20, batch_size=3, learning_rate=1e-3)
    for epoch in range(6):
        drawn = torch.cat(seen[3 * epoch : 3 * epoch + 3])
        assert len(drawn.unique()) == 9 and drawn.max() < 10
    assert len({tuple(rows.tolist()) for rows in seen}) > 10


def test_gradients_are_clipped_and_weights_decay() -> None:
    # The step of AdamW does not depend on the size of the gradient, decay alone does on the parameter's.
    kept, decayed = (nn.Parameter(torch.tensor([10.0])) for _ in range(2))
    for parameter, decay in ((kept, 0.0), (decayed, 1.0)):
        fit(
            [parameter],
            lambda rows, p=parameter: p.sum() * 0.0,
            4,
            steps=20,
            batch_size=2,
            learning_rate=0.1,
            weight_decay=decay,
        )
    assert kept.item() == 10.0 and 1.0 < decayed.item() < 5.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number(value: float) -> None:
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match=f"the training loss is {value} at step 1"):
        fit([weight], lambda rows: weight.sum() * value, 4, steps=20, batch_size=2, learning_rate=0.1)


def test_errors() -> None:
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="samples must be at least batch_size = 5, was 4"):
        fit([weight], lambda rows: weight.sum(), 4, steps=20, batch_size=5, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"warm_up must be 2 steps at least, was 0\.1 of 10 steps"):
        fit([weight], lambda rows: weight.sum(), 4, steps=10, batch_size=2, learning_rate=0.1)
