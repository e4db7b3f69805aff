"""Settings of the demonstration."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DarcySettings:
    """A PiT on Darcy flow (PiT A.3): trained on one grid, tested on nested ones.

    The training samples are solved on a grid of ``train_solver`` points an axis and read on one of
    ``resolutions[0]``; the test samples are solved on the finest, ``resolutions[-1]``, and read on all.
    Rates are 1 / length^2 on the unit square. Fixed steps, not time.
    """

    resolutions: tuple[int, ...] = (43, 85, 141, 211, 421)
    train_samples: int = 1000
    train_solver: int = 85
    validation_samples: int = 40
    test_samples: int = 20
    width: int = 48
    num_heads: int = 2
    num_layers: int = 4
    latent: int = 20
    encoder_quantile: float = 0.02
    decoder_quantile: float = 0.05
    rate_function: str = "tan_sin"
    initial_rate: tuple[float, ...] = (10.0, 300.0)
    initial_local_rate: tuple[float, ...] = (400.0, 2500.0)
    batch_size: int = 8
    steps: int = 700
    learning_rate: float = 4e-3
    weight_decay: float = 1e-4
    warm_up: float = 0.1
    validate_every: int = 100
    test_batch_size: int = 4


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of the demonstration; the same settings train the same models.

    The trajectories are those of CA 6.1: T = 2, ``intervals`` = 200 time steps of 0.01 for training. The
    number of steps is fixed, not the time, so that a slower machine gives the same result later.
    """

    seed: int = 0
    threads: int = 2
    learns: bool = True
    intervals: int = 200
    train_trajectories: int = 8000
    validation_trajectories: int = 100
    test_trajectories: int = 500
    d_model: int = 48
    num_heads: int = 4
    num_layers: int = 4
    batch_size: int = 16
    steps: int = 1900
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    warm_up: float = 0.2
    validate_every: int = 100
    test_batch_size: int = 100
    grid_side: int = 416
    grid_head_dim: int = 16
    darcy: DarcySettings = field(default_factory=DarcySettings)

    @classmethod
    def quick(cls, seed: int = 0, threads: int = 2) -> Settings:
        """A run of seconds that goes through every step and learns next to nothing."""
        return cls(
            seed=seed,
            threads=threads,
            learns=False,
            intervals=20,
            train_trajectories=64,
            validation_trajectories=16,
            test_trajectories=32,
            d_model=16,
            num_layers=1,
            steps=20,
            validate_every=10,
            grid_side=32,
            darcy=DarcySettings(
                resolutions=(11, 21, 41),
                train_samples=16,
                train_solver=11,
                validation_samples=4,
                test_samples=4,
                width=8,
                num_layers=1,
                latent=6,
                encoder_quantile=0.1,
                decoder_quantile=0.2,
                batch_size=4,
                steps=20,
                validate_every=10,
            ),
        )
