"""The papers' experiments: data, training, evaluation, plots; ``continuum-ops train`` and its sisters.

::

    from continuum_ops import experiments

    config = experiments.load("pit-darcy", small=True, sections={"training": {"seed": 1}})
    run = experiments.train(config, "runs/pit-darcy-small", data="data")
    result = experiments.evaluate("runs/pit-darcy-small", data="data")
    print(result.text)
    samples = config.data.read(experiments.generate(config.data, "test", "data"), "test")
    prediction = experiments.predict(run.operator, samples, "mesh", batch_size=10)
"""

from .attention import LayerAttention, attention_of
from .config import Config, ConfigError, config_from
from .conservation_laws import InviscidBurgers, ShockTube
from .convergence import convergence
from .evaluation import Evaluation, evaluate
from .navier_stokes import Kolmogorov, Vorticity
from .presets import BASELINES, EXPERIMENTS, experiment_names, load
from .running import Run, open_run, predict, read_log, roll_out, train
from .scattered import ElasticCell, JoukowskiAirfoil
from .sources import SOURCES, Case, Frames, Samples, Source
from .store import SPLITS, generate
from .tables import TABLES
from .tables import fill as fill_table

__all__ = [
    "BASELINES",
    "EXPERIMENTS",
    "SOURCES",
    "SPLITS",
    "TABLES",
    "Case",
    "Config",
    "ConfigError",
    "ElasticCell",
    "Evaluation",
    "Frames",
    "InviscidBurgers",
    "JoukowskiAirfoil",
    "Kolmogorov",
    "LayerAttention",
    "Run",
    "Samples",
    "ShockTube",
    "Source",
    "Vorticity",
    "attention_of",
    "config_from",
    "convergence",
    "evaluate",
    "experiment_names",
    "fill_table",
    "generate",
    "load",
    "open_run",
    "predict",
    "read_log",
    "roll_out",
    "train",
]
