"""Operators, meshes and models spread over the ranks of a ``torch.distributed`` process group.

Every rank holds its part of the points, of any size, and calls the same functions in the same order (SPMD).
The engine is torch.distributed: gloo on CPUs, NCCL on GPUs.

The rule of gradients: what is differentiated is the sum over the ranks of what each of them calls
``backward`` on. So with a loss on each rank of its own points only, the gradient of a parameter is the sum
over the ranks of the gradients found there. With a loss that every rank computes in full, from sums over the
ranks (:func:`all_reduce`) or a gathered field (:func:`gather`), it is their mean: that is what
``DistributedDataParallel`` takes.

Where a call draws random numbers for all ranks (dropout of attention weights), each rank draws from its own
generator and the first rank's numbers count. Dropout at single points (``torch.nn.Dropout``) is each rank's
own: give the ranks different seeds, or their parts drop the same places.

A call first compares shapes, dtypes and options over the ranks, so that what would make ranks wait for each
other for ever, or differ silently, is an error on all of them. If a rank dies or does something else, the
others raise a RuntimeError within the timeout of the process group (``init_process_group(timeout=)``; with
NCCL its watchdog may end the process instead). The group is of no use after that: end the processes and go on
from a checkpoint, on any number of ranks, as torchrun's ``--max-restarts`` does.
"""

from __future__ import annotations

from ._group import all_reduce
from .continuum_attention import continuum_attention
from .fourier_attention import fourier_attention
from .galerkin_attention import galerkin_attention
from .mesh import ShardedMesh, gather, shard
from .patch_attention import patch_attention
from .position_attention import position_attention

__all__ = [
    "ShardedMesh",
    "all_reduce",
    "continuum_attention",
    "fourier_attention",
    "galerkin_attention",
    "gather",
    "patch_attention",
    "position_attention",
    "shard",
]
