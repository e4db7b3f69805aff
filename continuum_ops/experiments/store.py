"""Samples on disk: drawn in chunks, each a file that is whole or not there, each with a seed of its own."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..training import CheckpointError, load_checkpoint, save_checkpoint
from ..training.files import remove_leftovers
from ..training.progress import progress_bar, require
from .sources import Source, Split, Tensors

try:
    import fcntl
except ImportError:  # Windows: what a killed process left behind stays
    fcntl = None  # type: ignore[assignment]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def generate(source: Source, split: Split, folder: str | Path | None, workers: int = 1) -> Tensors:
    """All samples of a split; what the folder holds already is read, the rest drawn and kept there.

    The same source gives the same bytes, in one go or interrupted, with any number of workers: a chunk is
    drawn from a seed of its own and is a file that is whole or not there. Processes may share the folder.

    Args:
        folder: of the data of all sources; None: nothing is kept.
        workers: processes that draw.

    Raises:
        CheckpointError: a file in the folder that does not belong there.
    """
    require("the drawing of samples", "tqdm")
    chunks = list(_chunks(source, split))
    paths = [None if folder is None else path_of(source, split, i, Path(folder)) for i in range(len(chunks))]
    missing = [i for i, path in enumerate(paths) if path is None or not path.exists()]
    found: dict[int, Tensors] = {}
    if missing:
        title = f"{source.source}, {split}"
        with (
            _shared(paths),
            progress_bar(len(chunks), title, "chunk", initial=len(chunks) - len(missing)) as bar,
        ):
            for i, tensors in _drawn(source, split, missing, workers):
                found[i] = tensors
                path = paths[i]
                if path is not None:
                    save_checkpoint(path, {"kind": "samples", "tensors": tensors})
                bar.update()
    for i, path in enumerate(paths):
        if i not in found:
            assert path is not None
            found[i] = _load(path, chunks[i][1], source, split)
    return {name: torch.cat([found[i][name] for i in range(len(chunks))]) for name in found[0]}


@contextmanager
def _shared(paths: list[Path | None]) -> Iterator[None]:
    """The folder of the chunks, made; what killed processes left in it is deleted, if nobody writes there."""
    if not paths or paths[0] is None:
        yield
        return
    folder = paths[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            for path in paths:
                if path is not None:
                    remove_leftovers(path)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def path_of(source: Source, split: Split, index: int, folder: Path) -> Path:
    """Of a chunk: the folder's name is a hash of all that decides the samples."""
    content = asdict(source)
    decides = {k: v for k, v in content.items() if k not in SPLITS} | {"n": content[split], "split": split}
    text = json.dumps(decides, sort_keys=True)
    return (
        folder
        / f"{source.source}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        / f"{split}-{index:05}.pt"
    )


def _chunks(source: Source, split: Split) -> Iterator[tuple[int, int]]:
    """(seed, number) of each."""
    total = getattr(source, split)
    for i, start in enumerate(range(0, total, source.chunk)):
        state = np.random.SeedSequence([source.seed, SPLITS.index(split), i]).generate_state(1, np.uint64)
        yield int(state[0]) >> 1, min(source.chunk, total - start)


def _drawn(source: Source, split: Split, indices: list[int], workers: int) -> Iterator[tuple[int, Tensors]]:
    chunks = list(_chunks(source, split))
    if workers <= 1 or len(indices) == 1:
        for i in indices:
            yield i, source.draw(chunks[i][1], chunks[i][0], split)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = {pool.submit(source.draw, chunks[i][1], chunks[i][0], split): i for i in indices}
        for done in as_completed(running):
            yield running[done], done.result()


def _load(path: Path, n: int, source: Source, split: Split) -> Tensors:
    content = load_checkpoint(path)
    tensors: Any = content.get("tensors")
    if content.get("kind") != "samples" or not _fit(tensors, n, source, split):
        raise CheckpointError(f"{path} does not hold {n} samples: delete it, and it is drawn again")
    return tensors


def _fit(tensors: Any, n: int, source: Source, split: Split) -> bool:
    """Whether these are n finite samples of a source; of a test with other points and maybe more of them."""
    shapes = source.shapes()
    if not isinstance(tensors, dict) or not set(shapes) <= set(tensors):
        return False
    if split != "test" and len(tensors) > len(shapes):
        return False
    for name, t in tensors.items():
        if not isinstance(t, Tensor) or not t.is_floating_point() or t.ndim == 0 or len(t) != n:
            return False
        if name in shapes and t.ndim != len(shapes[name]) + 1:
            return False
        if (split != "test" and tuple(t.shape[1:]) != shapes[name]) or not bool(t.isfinite().all()):
            return False
    return True
