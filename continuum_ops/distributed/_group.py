"""A process group as one of its ranks sees it: agreement before a call, errors, differentiable sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

if TYPE_CHECKING:
    from .mesh import ShardedMesh

T = TypeVar("T")
Group: TypeAlias = "ProcessGroup | DeviceMesh | ShardedMesh | None"


class Link(NamedTuple):
    """The group, and the place of this process in it; `op` is the name that messages begin with."""

    op: str
    group: ProcessGroup
    rank: int
    size: int

    @contextmanager
    def talking(self, peers: str = "the other ranks") -> Iterator[None]:
        """Communication with `peers`; what the backend raises becomes an error that says what happened."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.op}: rank {self.rank} of {self.size} had no answer from {peers}: a rank died, "
                "raised, or did not make the same calls within the timeout of the process group "
                f"({str(error).strip().splitlines()[0]})"
            ) from error

    def agree(self, look: Callable[[], T]) -> list[T]:
        """What `look` returns on each rank. What it raises on one rank, all ranks raise, before any runs."""
        failure: Exception | None = None
        found: Any = None
        try:
            found = look()
        except Exception as error:
            failure = error
        if self.size == 1:
            everyone = [(self.op, None, found)]
        else:
            text = None if failure is None else f"{type(failure).__name__}: {failure}"
            everyone = [("", None, None)] * self.size
            with self.talking():
                dist.all_gather_object(everyone, (self.op, text, found), group=self.group)
        if failure is not None:
            raise failure
        for rank, (op, text, _) in enumerate(everyone):
            if op != self.op:
                raise RuntimeError(f"{self.op}: all ranks must make the same calls, rank {rank} called {op}")
            if text is not None:
                raise RuntimeError(f"{self.op}: rank {rank} of {self.size} refused its arguments: {text}")
        return [found for _, _, found in everyone]

    def same(self, what: str, values: list[T]) -> T:
        """The value that all ranks must have in common."""
        if any(value != values[0] for value in values):
            raise ValueError(
                f"{self.op}: {what} must be the same on all ranks, got {values} on ranks 0, 1, ..."
            )
        return values[0]


def link(op: str, group: Group) -> Link:
    """Checks and resolves the argument `group`; of a ShardedMesh it is the mesh's."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{op}: torch.distributed.init_process_group must be called first")
    group = getattr(group, "group", group)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{op}: group must be a DeviceMesh of one dimension, got {group.ndim}: take one of it, "
                "mesh[name]"
            )
        group = group.get_group()
    elif group is None:
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{op}: group must contain this process, got one of other processes")
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{op}: group must be a ProcessGroup, a DeviceMesh, a ShardedMesh or None, "
            f"got {type(group).__name__}"
        )
    return Link(op, group, dist.get_rank(group), dist.get_world_size(group))


def check_values(op: str, name: str, tensor: Tensor | None, finite: bool = True) -> None:
    """>= 0, no NaN, and finite where asked: on the CPU, where a look at the values is free."""
    if tensor is None or tensor.device.type != "cpu":
        return
    values = tensor.detach()
    if not bool((values >= 0).all()):
        raise ValueError(
            f"{op}: {name} must be >= 0 and not NaN, got a smallest value of {values.min().item()}"
        )
    if finite and bool((values == math.inf).any()):
        raise ValueError(f"{op}: {name} must be >= 0 and finite, got inf")


def wanted(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Of which of these a gradient will be asked."""
    grad = torch.is_grad_enabled()
    return tuple(grad and t is not None and t.requires_grad for t in tensors)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Link) -> Tensor:
        ctx.at = at
        total = x.clone(memory_format=torch.contiguous_format)
        if at.size > 1:
            with at.talking():
                dist.all_reduce(total, group=at.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.at), None


def sum_over(x: Tensor, at: Link) -> Tensor:
    return _Sum.apply(x, at)


@torch.compiler.disable
def largest(x: Tensor, group: Group) -> Tensor:
    """The elementwise maximum over the ranks, a constant."""
    at = link("largest", group)
    at.same("the shape and dtype of x", at.agree(lambda: (tuple(x.shape), str(x.dtype))))
    top = x.detach().clone(memory_format=torch.contiguous_format)
    if at.size > 1:
        with at.talking():
            dist.all_reduce(top, dist.ReduceOp.MAX, group=at.group)
    return top


@torch.compiler.disable
def first_of(x: Tensor, group: Group) -> Tensor:
    """What the first rank of the group has, a constant: one draw of random numbers for all ranks."""
    at = link("first_of", group)
    at.same("the shape and dtype of x", at.agree(lambda: (tuple(x.shape), str(x.dtype))))
    first = x.detach().clone(memory_format=torch.contiguous_format)
    if at.size > 1:
        with at.talking():
            dist.broadcast(first, group=at.group, group_src=0)
    return first


@torch.compiler.disable
def all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """The sum of a tensor over the ranks, differentiable any number of times.

    The gradient is that of the sum over the ranks of what each of them differentiates, which is the rule of
    this package (see ``continuum_ops.distributed``): the incoming gradients are summed over the ranks.

    Args:
        x: floating-point, of the same shape, dtype and kind of device on all ranks.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.

    Returns:
        A tensor of the shape and dtype of x, the same bits on all ranks.

    Raises:
        TypeError: x is no floating-point tensor.
        ValueError: shapes or dtypes differ.
        RuntimeError: another rank refused its arguments, died, or did not answer within the timeout.
    """
    at = link("all_reduce", group)

    def look() -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"all_reduce: x must be a floating-point tensor, got {got}")
        return tuple(x.shape), str(x.dtype), wanted(x)

    seen = at.agree(look)
    at.same("the shape of x", [shape for shape, _, _ in seen])
    at.same("the dtype of x", [dtype for _, dtype, _ in seen])
    at.same("whether x requires a gradient", [grad for _, _, grad in seen])
    return sum_over(x, at)
