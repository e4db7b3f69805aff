"""The commands of ``continuum-ops``; this module needs click."""

from __future__ import annotations

from pathlib import Path

import click

from . import __version__


class MissingPackage(click.ClickException):
    exit_code = 2


@click.group(name="continuum-ops", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="continuum-ops")
def commands() -> None:
    """Attention on functions: operators that respect the mesh."""


@commands.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    default="demo-output",
    show_default=True,
    help="Directory for demo.json and the plots.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Data and model.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="CPU threads.")
@click.option(
    "--quick",
    is_flag=True,
    help="Seconds instead of minutes; learns next to nothing: its figures mean nothing.",
)
def demo(out: Path, seed: int, threads: int, quick: bool) -> None:
    """Train neural operators on Lorenz-63 and on Darcy flow, then test them on other meshes.

    Takes at most eight minutes on two cores. A transformer neural operator: training on one mesh, tests
    without retraining on coarser, finer and uneven ones, with and without quadrature weights. A
    position-induced transformer: training on 43 x 43 points, tests up to 421 x 421. And one head of attention
    on 173,056 points.
    """
    from .demo import Settings, run

    settings = Settings.quick(seed, threads) if quick else Settings(seed=seed, threads=threads)
    try:
        run(settings, out, click.echo)
    except ImportError as error:
        if "continuum_ops[train]" not in str(error):
            raise
        raise MissingPackage(str(error)) from error


@commands.command()
def info() -> None:
    """Versions, backends and machine."""
    from .demo.machine import machine

    found = machine()
    loaded = {f"{device} backend": kind for device, kind in found.pop("backends").items()}
    for name, value in {**found, **loaded}.items():
        click.echo(f"{name:<14} {value}")
