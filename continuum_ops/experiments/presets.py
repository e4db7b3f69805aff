"""Experiments by name: those of the papers, what these compare with, and files that start from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import Config, ConfigError, config_from, hint, merge, read_file
from .papers import BASELINES, EXPERIMENTS, Content

_ALL = {**EXPERIMENTS, **BASELINES}


def experiment_names() -> list[str]:
    """The names that :func:`load` knows, sorted."""
    return sorted(_ALL)


def load(
    experiment: str | Path | Mapping[str, Any],
    *,
    small: bool = False,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """The configuration of an experiment.

    Args:
        experiment: one of :func:`experiment_names`; a TOML file (or a run's config.json); or what such a file
            holds. A file may start from an experiment and change parts of it::

                experiment = "pit-darcy"
                small = true
                [training]
                steps = 2000

        small: the settings for two cores; only with the name of an experiment, or a file that has one.
        sections: values that take the place of others, ``{"training": {"steps": 2000}}``.

    Raises:
        ConfigError: an unknown name, key or value, with the closest known one; a file that is missing.
    """
    name, content = _content(experiment)
    if small and name is None:
        raise ConfigError("small needs an experiment: the configuration names none")
    small = small or bool(content.pop("small", False))
    base: Content = {}
    if name is not None:
        paper, less = _known(name)
        base = {"name": f"{name}-small" if small else name, **(merge(paper, less) if small else paper)}
    return config_from(merge(merge(base, content), sections or {}))


def _content(experiment: str | Path | Mapping[str, Any]) -> tuple[str | None, Content]:
    if isinstance(experiment, Mapping):
        content = dict(experiment)
    elif str(experiment) in _ALL:
        return str(experiment), {}
    else:
        path = Path(experiment)
        if not path.exists() and path.suffix not in (".toml", ".json"):
            _known(str(experiment))
        content = read_file(path)
    name = content.pop("experiment", None)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"experiment must be a name, was {name!r}")
    if not isinstance(content.get("small", False), bool):
        raise ConfigError(f"small must be true or false, was {content['small']!r}")
    return name, content


def _known(name: str) -> tuple[Content, Content]:
    if name not in _ALL:
        raise ConfigError(
            f"experiment must be a TOML file or one of {', '.join(experiment_names())}, was {name!r}"
            f"{hint(name, _ALL)}"
        )
    return _ALL[name]
