"""What an experiment is: data, model, normalisers, loss, optimiser, schedule, training; from TOML or not."""

from __future__ import annotations

import difflib
import json
import math
import stat
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from .sources import SOURCES, Source

MOST_BYTES = 2**20  # of a configuration file
LARGEST_INT = 2**53  # what float64, and so JSON, holds exactly


class ConfigError(ValueError):
    """A configuration, or a file that it names, that cannot be used; the message is one line."""


Weights = Literal["mesh", "equal"]
LossName = Literal["relative_l1", "relative_l2", "relative_h1", "relative_l2_h1"]


@dataclass(frozen=True)
class ModelConfig:
    """``continuum_ops.models.preset(preset, **settings)``, evaluated with quadrature weights or equal ones.

    In a file the settings stand beside the other keys.
    """

    preset: str
    weights: Weights = "mesh"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NormalizersConfig:
    """Of input and target: none, pointwise (mean and deviation at each point), standard, rms, range, log."""

    input: Literal["none", "pointwise", "standard", "rms", "range", "log"] = "none"
    target: Literal["none", "pointwise", "standard", "rms", "range", "log"] = "none"


@dataclass(frozen=True)
class LossConfig:
    """The loss, and the metric of validation and evaluation.

    gamma: of relative_l2_h1, in units of the spacing h of the first axis (GT: 0.1 and 0.5).
    flux: weigh its gradient with the coefficient of the equation, where the data have one.
    """

    name: LossName = "relative_l2"
    gamma: float = 0.0
    flux: bool = False
    metric: Literal["relative_l1", "relative_l2"] = "relative_l2"

    def __post_init__(self) -> None:
        _at_least(self, 0, "gamma")


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam or AdamW; gradients are clipped to an L2 norm of clip, 0: not at all."""

    name: Literal["adam", "adamw"] = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        _above(self, 0, "learning_rate")
        _at_least(self, 0, "weight_decay", "clip")


@dataclass(frozen=True)
class ScheduleConfig:
    """one-cycle (warm_up, div_factor and final_div_factor of torch's OneCycleLR), cosine or constant.

    cosine falls from the learning rate to 0 over all steps.
    """

    name: Literal["one-cycle", "cosine", "constant"] = "one-cycle"
    warm_up: float = 0.1
    div_factor: float = 25.0
    final_div_factor: float = 1e4

    def __post_init__(self) -> None:
        _at_least(self, 0, "warm_up")
        _above(self, 0, "div_factor", "final_div_factor")
        if not self.warm_up <= 1:
            raise ValueError(f"warm_up must be at most 1, was {self.warm_up}")


@dataclass(frozen=True)
class TrainingConfig:
    """Steps of the optimiser; every so many of them a validation, a checkpoint, a line of the log.

    threads: of the CPU, 0: as torch has them; another number may change the last bits.
    autocast: the dtype of ``torch.autocast``. compile: with ``torch.compile``, which rounds in its own way.
    """

    steps: int
    batch_size: int
    seed: int = 0
    validate_every: int = 100
    checkpoint_every: int = 100
    log_every: int = 10
    test_batch_size: int = 10
    device: str = "cpu"
    threads: int = 0
    autocast: Literal["none", "bfloat16"] = "none"
    compile: bool = False

    def __post_init__(self) -> None:
        _at_least(self, 0, "seed", "threads")
        names = ("steps", "batch_size", "validate_every", "checkpoint_every", "log_every", "test_batch_size")
        _at_least(self, 1, *names)


@dataclass(frozen=True)
class Config:
    """A whole experiment, from :func:`continuum_ops.experiments.load`; equal ones give equal results."""

    name: str
    data: Source
    model: ModelConfig
    normalizers: NormalizersConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    training: TrainingConfig

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :func:`config_from` reads back."""
        content = asdict(self)
        content["data"] = {"source": self.data.source, **content["data"]}
        content["model"] = {**content["model"].pop("settings"), **content["model"]}
        return json.loads(json.dumps(content))


SECTIONS = ("data", "model", "normalizers", "loss", "optimizer", "schedule", "training")


def config_from(content: Mapping[str, Any]) -> Config:
    """A configuration of nested plain data, as a TOML file holds it.

    Raises:
        ConfigError: an unknown key (with the closest known one), a missing one, a value of the wrong type or
            out of range.
    """
    check_keys("", content, ("name", *SECTIONS))
    sections = {name: _mapping(name, content.get(name, {})) for name in SECTIONS}
    for name in ("data", "model", "training"):
        if name not in content:
            raise ConfigError(f"the section [{name}] is missing")
    source = sections["data"].pop("source", None)
    if not isinstance(source, str) or source not in SOURCES:
        raise ConfigError(
            f"data.source must be one of {', '.join(SOURCES)}, was {source!r}{hint(source, SOURCES)}"
        )
    config = Config(
        name=_value("name", str, content.get("name", "experiment")),
        data=_build("data", SOURCES[source], sections["data"]),
        model=_model(sections["model"]),
        normalizers=_build("normalizers", NormalizersConfig, sections["normalizers"]),
        loss=_build("loss", LossConfig, sections["loss"]),
        optimizer=_build("optimizer", OptimizerConfig, sections["optimizer"]),
        schedule=_build("schedule", ScheduleConfig, sections["schedule"]),
        training=_build("training", TrainingConfig, sections["training"]),
    )
    _check_together(config)
    return config


def _model(section: dict[str, Any]) -> ModelConfig:
    from ..models.presets import preset_names, preset_parts

    own: dict[str, Any] = {k: section.pop(k) for k in ("preset", "weights") if k in section}
    config = _build("model", ModelConfig, own)
    if config.preset not in preset_names():
        raise ConfigError(
            f"model.preset must be one of {', '.join(preset_names())}, was {config.preset!r}"
            f"{hint(config.preset, preset_names())}"
        )
    model, _, known = preset_parts(config.preset)
    check_keys("model", section, ("preset", "weights", *known), f" of {model.__name__}")
    try:
        json.dumps(section, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model must hold finite numbers, strings, true, false and lists of these, was {section}"
        ) from error
    return ModelConfig(config.preset, config.weights, section)


def _check_together(config: Config) -> None:
    training, data, schedule = config.training, config.data, config.schedule
    if data.train < training.batch_size:
        raise ConfigError(
            f"data.train must be at least training.batch_size = {training.batch_size}, was {data.train}"
        )
    if schedule.name == "one-cycle" and schedule.warm_up * training.steps < 2:
        raise ConfigError(
            f"schedule.warm_up must be 2 steps at least, was {schedule.warm_up} of "
            f"training.steps = {training.steps}"
        )
    if config.loss.gamma and config.loss.name != "relative_l2_h1":
        raise ConfigError(
            f"loss.gamma must be 0 with loss.name = {config.loss.name}, was {config.loss.gamma}"
        )


def read_file(path: Path) -> dict[str, Any]:
    """The content of a TOML file, or of a JSON file such as a run's config.json.

    Raises:
        ConfigError: no such file, or one that cannot be parsed.
        ImportError: Python 3.10 without tomli.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():  # a pipe would be waited for
            raise ConfigError(f"{path} cannot be read: it is no regular file")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path} cannot be read: a configuration has at most {MOST_BYTES:,} bytes")
    try:
        text = data.decode()
        content = json.loads(text) if path.suffix == ".json" else parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read: its tables or lists are nested too deeply") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a table, was a {type(content).__name__}")
    return content


def parse_toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError as error:
            raise ImportError('TOML files need tomli: pip install "continuum_ops[train]"') from error
    return tomllib.loads(text)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over`` in their places, section by section."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def hint(word: Any, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the closest of the known words, or nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_keys(section: str, content: Mapping[str, Any], known: Iterable[str], what: str = "") -> None:
    names = list(known)
    for key in content:
        if key not in names:
            where = f"[{section}]" if section else "the configuration"
            raise ConfigError(
                f"unknown key {key!r} in {where}{hint(key, names)} (known{what}: {', '.join(names)})"
            )


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a table, was {value!r}")
    return dict(value)


def _build(section: str, cls: Any, content: Mapping[str, Any]) -> Any:
    """A dataclass of a table: keys and types checked."""
    known = {f.name: f for f in fields(cls)}
    check_keys(section, content, [name for name in known if name != "settings"])
    hints = typing.get_type_hints(cls)
    for name, f in known.items():
        if name not in content and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{section}.{name} is missing")
    values = {k: _value(f"{section}.{k}", hints[k], v) for k, v in content.items()}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{section}.{error}") from error


def _value(name: str, kind: Any, value: Any) -> Any:
    """`value` as the type that a field asks for: bool, int, float, str, Literal or a tuple of these."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ConfigError(
                f"{name} must be one of {', '.join(choices)}, was {value!r}{hint(value, choices)}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name} must be a list, was {value!r}")
        inner = typing.get_args(kind)[0]
        return tuple(_value(f"{name}[{i}]", inner, v) for i, v in enumerate(value))
    if origin is dict:
        return _mapping(name, value)
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ConfigError(f"{name} must be between -2^53 and 2^53, was an int of {value.bit_length()} bits")
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{name} must be finite, was {value}")
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} must be {_NAMES[kind]}, was {value!r}")
    return value


_NAMES = {int: "an int", float: "a number", str: "a string", bool: "true or false"}


def _at_least(config: Any, least: float, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(f"{name} must be at least {least}, was {getattr(config, name)}")


def _above(config: Any, low: float, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > low:
            raise ValueError(f"{name} must be above {low}, was {getattr(config, name)}")
