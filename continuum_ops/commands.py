"""The commands of ``continuum-ops``; this module needs click."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__

if TYPE_CHECKING:
    from .experiments import Config


class UsageProblem(click.ClickException):
    """What the user can mend: a missing package, a wrong configuration, a file that does not fit."""

    exit_code = 2


class Folder(click.Path):
    """A directory, made later if it is not there: what stands in its way is found before the work starts."""

    def __init__(self, writable: bool = False) -> None:
        super().__init__(file_okay=False, writable=writable, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        folder = Path(os.fsdecode(super().convert(value, param, ctx)))
        for path in (folder, *folder.parents):
            if os.path.lexists(path) and not path.is_dir():
                self.fail(f"Directory '{folder}' cannot be made: '{path}' is no directory.", param, ctx)
        return folder


@contextmanager
def reported() -> Iterator[None]:
    """Errors that a user can mend as one line and exit code 2, a training that failed as one and 1."""
    from .experiments import ConfigError
    from .training import CheckpointError

    try:
        yield
    except (ConfigError, CheckpointError) as error:
        raise UsageProblem(str(error)) from error
    except ImportError as error:
        if 'pip install "continuum_ops[' not in str(error):
            raise
        raise UsageProblem(str(error)) from error
    except RuntimeError as error:
        if not str(error).startswith("the training loss"):
            raise
        raise click.ClickException(str(error)) from error


@click.group(name="continuum-ops", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="continuum-ops")
def commands() -> None:
    """Attention on functions: operators that respect the mesh."""


@commands.command()
@click.option(
    "--out",
    type=Folder(writable=True),
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
    with reported():
        run(settings, out, click.echo)


_small = click.option("--small", is_flag=True, help="The settings for two cores and minutes.")
_set = click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Another value, as in --set training.steps=500; may be repeated.",
)
_data = click.option(
    "--data",
    type=Folder(),
    default="data",
    show_default=True,
    help="Directory of the samples, which runs share.",
)
_workers = click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that draw samples."
)


@commands.command()
@click.argument("config")
@_small
@_set
@click.option(
    "--out",
    type=Folder(),
    help="Directory of the run.  [default: runs/NAME]",
)
@click.option("--tensorboard", is_flag=True, help="Also write events for TensorBoard.")
@_data
@_workers
def train(
    config: str,
    small: bool,
    changes: tuple[str, ...],
    out: Path | None,
    tensorboard: bool,
    data: Path,
    workers: int,
) -> None:
    """Train the experiment of a TOML file, or one of the papers' by its name.

    A run that was interrupted goes on when it is started again. `continuum-ops experiments` lists the names.
    """
    with reported():
        from .experiments import train as run

        found = _load(config, small, changes)
        folder = Folder().convert(Path("runs") / found.name, None, None) if out is None else out
        done = run(found, folder, data=data, workers=workers, tensorboard=tensorboard, say=click.echo)
        last = done.log[-1]
        click.echo(f"{folder}: {last['step']} steps, validation error {100 * last['validation']:.2f} %")
        click.echo(f"continuum-ops evaluate {folder} tests it on every mesh")


@commands.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Another checkpoint than the run's.")
@click.option("--out", type=Folder(), help="Directory of the files.  [default: RUN]")
@click.option("--no-plots", is_flag=True, help="The table alone, as text and JSON.")
@click.option(
    "--point",
    metavar="X[,Y]",
    help="Where the attention is drawn from.  [default: the middle of the domain]",
)
@_data
@_workers
def evaluate(
    run: Path,
    checkpoint: Path | None,
    out: Path | None,
    no_plots: bool,
    point: str | None,
    data: Path,
    workers: int,
) -> None:
    """Test a trained RUN on every mesh: a table, plots and one page of HTML."""
    with reported():
        from .experiments import evaluate as test

        done = test(
            run,
            data=data,
            checkpoint=checkpoint,
            out=out,
            workers=workers,
            plots=not no_plots,
            point=_coordinates(point),
        )
        click.echo(done.text)
        for path in done.files:
            click.echo(f"wrote {path}")


@commands.command()
@click.argument("name")
@_small
@_set
@_data
@_workers
def generate(name: str, small: bool, changes: tuple[str, ...], data: Path, workers: int) -> None:
    """Draw the samples of an experiment, NAME or a TOML file, before it is trained.

    What is there already is kept, so an interrupted generation goes on when it is started again.
    """
    with reported():
        from .experiments import SPLITS
        from .experiments import generate as draw

        source = _load(name, small, changes).data
        for split in SPLITS:
            found = draw(source, split, data, workers)
            shapes = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in found.items())
            click.echo(f"{split}: {shapes}")


@commands.command()
@click.option(
    "--out",
    type=Folder(),
    default="convergence",
    show_default=True,
    help="Directory of the table and the plot.",
)
@click.option("--small", is_flag=True, help="Coarser meshes, in seconds.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of random points.")
@click.option("--no-plots", is_flag=True, help="The table alone, as text and JSON.")
def convergence(out: Path, small: bool, seed: int, no_plots: bool) -> None:
    """Refine the mesh: the error of each operator and quadrature rule, and its order.

    The theorems in numbers: CA 6 and 12 of attention on functions, PiT 2.1 of position attention.
    """
    with reported():
        from .experiments import convergence as report

        done = report(out, small=small, seed=seed, plot=not no_plots)
        click.echo(done.text)
        for path in done.files:
            click.echo(f"wrote {path}")


@commands.command()
@click.argument("table", required=False)
@click.option("--small", is_flag=True, help="Runs at the settings for two cores and minutes.")
@click.option(
    "--runs",
    type=Folder(),
    default="runs",
    show_default=True,
    help="Directory of the directories of runs.",
)
@click.option(
    "--out",
    type=Folder(),
    default="tables",
    show_default=True,
    help="Directory of the files.",
)
@click.option("--train", "training", is_flag=True, help="Train the runs that are missing, one by one.")
@click.option("--no-plots", is_flag=True, help="The table alone, as Markdown and JSON.")
@_data
@_workers
def tables(
    table: str | None,
    small: bool,
    runs: Path,
    out: Path,
    training: bool,
    no_plots: bool,
    data: Path,
    workers: int,
) -> None:
    """Fill a TABLE or figure of the papers from runs; without TABLE: list them and what they need.

    A cell holds our value and, in brackets, the paper's. It is empty where nothing was run, with the command
    that would train it. With --train what was interrupted goes on when it is started again.
    """
    with reported():
        from .experiments import TABLES, fill_table
        from .experiments.tables import listed

        if table is None:
            for name in TABLES:
                click.echo(listed(name, small))
            return
        done = fill_table(
            table,
            small=small,
            runs=runs,
            out=out,
            data=data,
            train=training,
            workers=workers,
            plots=not no_plots,
            say=click.echo,
        )
        click.echo(done.text)
        for path in done.files:
            click.echo(f"wrote {path}")


@commands.command()
def experiments() -> None:
    """The names that train and generate know."""
    from .experiments import BASELINES, EXPERIMENTS, load

    for name in (*EXPERIMENTS, *BASELINES):
        config = load(name)
        click.echo(
            f"{name:<25} {config.model.preset} on {config.data.source}, {config.training.steps:,} steps"
        )


def _coordinates(point: str | None) -> list[float] | None:
    if point is None:
        return None
    try:
        found = [float(x) for x in point.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise UsageProblem(f"--point must be numbers with commas between them, was {point!r}")
    return found


def _load(name: str, small: bool, changes: tuple[str, ...]) -> Config:
    from .experiments import ConfigError, load
    from .experiments.config import merge, parse_toml

    sections: dict[str, Any] = {}
    for change in changes:
        key, found, text = change.partition("=")
        section, dot, entry = key.strip().partition(".")
        if not (found and dot):
            raise ConfigError(f"--set must be SECTION.KEY=VALUE, was {change!r}")
        try:
            value = parse_toml(f"value = {text}")["value"]
        except ValueError:
            value = text  # a word without quotation marks
        sections = merge(sections, {section: {entry: value}})
    return load(name, small=small, sections=sections)


@commands.command()
@click.argument("file", type=click.Path(path_type=Path))
def inspect(file: Path) -> None:
    """What a published data FILE holds: its arrays, or fields, grid and times of PDEBench and The Well."""
    from .data import layout_of, read_arrays, read_pdebench, read_the_well

    try:
        layout = layout_of(file) if file.suffix in (".h5", ".hdf5") else None
        if layout is None:
            for name, array in read_arrays(file).items():
                click.echo(f"{name:<25} {tuple(array.shape)} {str(array.dtype).removeprefix('torch.')}")
            return
        read = read_pdebench if layout == "pdebench" else read_the_well
        first = read(file, samples=slice(0, 1))
    except FileNotFoundError as error:
        raise UsageProblem(f"{file}: no such file") from error
    except (ValueError, ImportError, OSError) as error:
        raise UsageProblem(str(error)) from error
    grid = " x ".join(map(str, first.grid.shape))
    click.echo(f"layout  {'PDEBench' if layout == 'pdebench' else 'The Well'}")
    click.echo(f"fields  {', '.join(first.names)}")
    click.echo(f"grid    {grid}, {', '.join(first.grid.kind)}")
    click.echo(f"frames  {len(first.times)}, t = {first.times[0]:g} to {first.times[-1]:g}")


@commands.command()
def info() -> None:
    """Versions, backends, machine and the packages of the extras."""
    from .demo.machine import machine, packages

    found = machine()
    loaded = {f"{device} backend": kind for device, kind in found.pop("backends").items()}
    for name, value in {**found, **loaded, **packages()}.items():
        click.echo(f"{name:<14} {value}")
