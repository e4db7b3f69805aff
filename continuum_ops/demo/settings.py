"""Settings of the demonstration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of the demonstration; the same settings train the same model.

    The trajectories are those of CA 6.1: T = 2, ``intervals`` = 200 time steps of 0.01 for training. The
    number of steps is fixed, not the time, so that a slower machine gives the same result later.
    """

    seed: int = 0
    threads: int = 2
    intervals: int = 200
    train_trajectories: int = 8000
    validation_trajectories: int = 100
    test_trajectories: int = 500
    d_model: int = 48
    num_heads: int = 4
    num_layers: int = 4
    batch_size: int = 16
    steps: int = 2200
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    warm_up: float = 0.2
    validate_every: int = 100
    test_batch_size: int = 100
    grid_side: int = 416
    grid_head_dim: int = 16

    @classmethod
    def quick(cls, seed: int = 0, threads: int = 2) -> Settings:
        """A run of seconds that goes through every step and learns next to nothing."""
        return cls(
            seed=seed,
            threads=threads,
            intervals=20,
            train_trajectories=64,
            validation_trajectories=16,
            test_trajectories=32,
            d_model=16,
            num_layers=1,
            steps=20,
            validate_every=10,
            grid_side=32,
        )
