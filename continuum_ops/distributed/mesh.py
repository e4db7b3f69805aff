"""Meshes that are spread over ranks: balanced parts by coordinates, and fields put together again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh import Grid, Mesh, PointCloud, as_mesh
from ..nn._patches import patch_size, per_axis
from ..quadrature import Device
from ._group import Group, Link, link, sum_over, wanted


class ShardedMesh:
    """A mesh that is spread over ranks, as one of them sees it.

    It is no ``Mesh``: what sums over the points of a mesh would take those of one rank for all. A model that
    can run on all ranks together takes it in place of a mesh; else `part` and `group` are passed.

    Attributes:
        part: this rank's points, with the weights that they have in the whole mesh.
        group: the process group.
        index: (N_r,) int64, ascending: the places of this part's points in the user's order.
        indices: those of all ranks.
        total: number of points of all ranks.
        grid: the whole mesh where it is a Grid, which is its axes; else None.
        num_patches: of the part along each axis, where it is a box of whole patches; else None.
        all_patches: of the whole grid.
    """

    def __init__(
        self,
        part: Mesh,
        indices: list[Tensor],
        at: Link,
        grid: Grid | None = None,
        num_patches: tuple[int, ...] | None = None,
        all_patches: tuple[int, ...] | None = None,
    ) -> None:
        self.part, self.group, self.indices = part, at.group, indices
        self.grid, self.num_patches, self.all_patches = grid, num_patches, all_patches
        self.index = indices[at.rank]
        self.total = sum(index.numel() for index in indices)
        self._at = at

    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> ShardedMesh:
        """With the part on another device or in another float dtype; None keeps what is."""
        grid = None if self.grid is None else self.grid.to(device, dtype)
        part = self.part.to(device, dtype)
        return ShardedMesh(part, self.indices, self._at, grid, self.num_patches, self.all_patches)

    def select(self, field: Tensor, dim: int = -2) -> Tensor:
        """This part's rows of a field that has the N points of the whole mesh, in the user's order, at `dim`.

        Raises:
            TypeError: field is no tensor.
            ValueError: another number of points there.
        """
        _check_points("field", field, dim, self.total)
        return field.index_select(dim, self.index.to(field.device))

    def __repr__(self) -> str:
        return (
            f"ShardedMesh({self.index.numel()} of {self.total} points, "
            f"rank {self._at.rank} of {self._at.size}, part={self.part!r})"
        )


def shard(
    mesh: Mesh | Tensor, group: Group = None, *, num_patches: int | Sequence[int] | None = None
) -> ShardedMesh:
    """Split a mesh into one part for each rank, of sizes that differ by 1 at most, compact in space.

    Recursive coordinate bisection (Berger, Bokhari, "A Partitioning Strategy for Nonuniform Problems on
    Multiprocessors", 1987): the points are cut across the axis along which they extend farthest, in the
    ratio of the ranks on either side, and so on with both halves. Points with equal coordinates keep the
    user's order, so that all ranks find the same parts without communication but for a comparison.

    Args:
        mesh: the whole mesh, a Grid, a PointCloud or a tensor of points, the same on all ranks; points of
            shape (N, d), or (B, N, d), which are split by the mean over the batch. Fewer points than ranks
            leave ranks without points.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
        num_patches: the patches of a model on patches, along each axis of a Grid, an int for all: parts are
            boxes of whole patches then, cut in the same way across the axis with the most patches, and their
            sizes differ by more where the ranks do not divide them.

    Returns:
        This rank's part, with the weights of the whole mesh: their sum over all ranks is its volume. With
        num_patches it is a Grid.

    Raises:
        TypeError: mesh is no mesh, or is a part of one already; num_patches for a mesh that is no Grid.
        ValueError: patches that do not divide the grid, or are fewer than the ranks.
        RuntimeError, ValueError: as of :func:`continuum_ops.distributed.continuum_attention`; the mesh is not
            the same on all ranks.
    """
    at = link("distributed.shard", group)
    if num_patches is not None:
        return _shard_patches(mesh, num_patches, at)

    def look() -> Any:
        if isinstance(mesh, ShardedMesh):
            raise TypeError("distributed.shard: mesh must be a whole mesh, got a ShardedMesh")
        whole = as_mesh(mesh)
        points = whole.points.detach().double().cpu()
        points = points.mean(0) if points.dim() == 3 else points
        indices = bisect(points, at.size)
        # A sum with different factors: another order of the points is another mesh.
        mark = (points * torch.arange(1.0, 1.0 + points.numel()).view(points.shape).sin()).sum().item()
        return whole, indices, (tuple(whole.points.shape), mark)

    found: list[Any] = []

    def compared() -> Any:
        found.extend(look())
        return found[2]

    at.same("the mesh (shape of its points, a sum over them)", at.agree(compared))
    whole, indices, _ = found
    mine = indices[at.rank].to(whole.device)
    part = PointCloud(whole.points.index_select(-2, mine), whole.weights.index_select(-1, mine))
    return ShardedMesh(part, indices, at, whole if isinstance(whole, Grid) else None)


def bisect(points: Tensor, parts: int) -> list[Tensor]:
    """Indices of `parts` parts of (N, d) points, each ascending, of sizes that differ by 1 at most."""
    count = points.shape[0]
    sizes = [count // parts + (rank < count % parts) for rank in range(parts)]

    def split(index: Tensor, first: int, last: int) -> list[Tensor]:
        if last - first == 1:
            return [index.sort().values]
        middle = (first + last) // 2
        mine = points[index]
        if index.numel():
            axis = int((mine.amax(0) - mine.amin(0)).argmax())
            index = index[mine[:, axis].argsort(stable=True)]
        cut = sum(sizes[first:middle])
        return split(index[:cut], first, middle) + split(index[cut:], middle, last)

    return split(torch.arange(count), 0, parts)


def _shard_patches(mesh: Any, num_patches: int | Sequence[int], at: Link) -> ShardedMesh:
    boxes: list[list[slice]] = []
    counts: list[tuple[int, ...]] = []

    def look() -> Any:
        if not isinstance(mesh, Grid):
            raise TypeError(
                f"distributed.shard: mesh must be a Grid for num_patches, got {type(mesh).__name__}"
            )
        counts.append(per_axis("num_patches", num_patches, mesh.ndim))
        size = patch_size("mesh", mesh.shape, counts[0])
        if math.prod(counts[0]) < at.size:
            raise ValueError(
                f"distributed.shard: num_patches must be at least one for each of the {at.size} ranks, "
                f"got {counts[0]}"
            )
        boxes.extend(
            [slice(lo * n, hi * n) for (lo, hi), n in zip(box, size, strict=True)]
            for box in bisect_patches(counts[0], at.size)
        )
        axes = [x.detach().double().cpu() for x in mesh.axes]
        mark = sum((x * torch.arange(1.0, 1.0 + len(x)).sin()).sum().item() for x in axes)
        return mesh.shape, counts[0], mark

    at.same("the mesh (its shape, patches, a sum over its axes)", at.agree(look))
    own, places = boxes[at.rank], torch.arange(len(mesh)).view(mesh.shape)
    cut = [box.stop - box.start < n for box, n in zip(own, mesh.shape, strict=True)]
    part = Grid(
        *(x[box] for x, box in zip(mesh.axes, own, strict=True)),
        kind=["cell" if c else kind for c, kind in zip(cut, mesh.kind, strict=True)],
        weights=[w[box] for w, box in zip(mesh.axis_weights, own, strict=True)],
        period=[math.inf if c else length for c, length in zip(cut, mesh.period, strict=True)],
    )
    size = patch_size("mesh", mesh.shape, counts[0])
    mine = tuple((box.stop - box.start) // n for box, n in zip(own, size, strict=True))
    return ShardedMesh(part, [places[tuple(box)].flatten() for box in boxes], at, mesh, mine, counts[0])


Box = list[tuple[int, int]]


def bisect_patches(counts: Sequence[int], parts: int) -> list[Box]:
    """`parts` boxes, (first, last + 1) along each axis, none empty, that make up a grid of patches."""

    def split(box: Box, parts: int) -> list[Box]:
        if parts == 1:
            return [box]
        sizes = [hi - lo for lo, hi in box]
        axis = max(range(len(box)), key=lambda i: sizes[i])
        cut, across = sizes[axis] // 2, math.prod(sizes) // sizes[axis]
        # As many parts on a side as its share, and at most one for each of its patches.
        least, most = max(1, parts - (sizes[axis] - cut) * across), min(parts - 1, cut * across)
        few = min(max(round(parts * cut / sizes[axis]), least), most)
        lo, hi = box[axis]
        first, last = box.copy(), box.copy()
        first[axis], last[axis] = (lo, lo + cut), (lo + cut, hi)
        return split(first, few) + split(last, parts - few)

    return split([(0, n) for n in counts], parts)


def gather(field: Tensor, mesh: ShardedMesh, dim: int = -2) -> Tensor:
    """The whole field, in the user's order, on every rank, from the parts of all ranks.

    Args:
        field: this rank's part, with the N_r points of its part of the mesh at `dim`; the other sizes and
            the dtype are the same on all ranks.
        mesh: what :func:`shard` returned.
        dim: the axis of the points.

    Returns:
        The field with N points at `dim`. Its gradient is summed over the ranks (see
        ``continuum_ops.distributed``).

    Raises:
        TypeError: field is no tensor, or mesh is no ShardedMesh.
        ValueError: another number of points at `dim`; sizes or dtypes that differ between the ranks.
        RuntimeError: as of :func:`continuum_ops.distributed.continuum_attention`.
    """
    if not isinstance(mesh, ShardedMesh):
        raise TypeError(f"distributed.gather: mesh must be a ShardedMesh, got {type(mesh).__name__}")
    at = link("distributed.gather", mesh.group)

    def look() -> Any:
        _check_points("field", field, dim, mesh.index.numel())
        moved = field.movedim(dim, 0)
        return tuple(moved.shape[1:]), str(field.dtype), wanted(field)

    seen = at.agree(look)
    at.same("the sizes of field other than the points'", [sizes for sizes, _, _ in seen])
    at.same("the dtype of field", [dtype for _, dtype, _ in seen])
    at.same("whether field requires a gradient", [grad for _, _, grad in seen])
    return _Gather.apply(field.movedim(dim, 0), mesh, at).movedim(0, dim)


def _check_points(name: str, field: Any, dim: int, count: int) -> None:
    if not isinstance(field, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(field).__name__}")
    if not -field.dim() <= dim < field.dim() or field.shape[dim] != count:
        raise ValueError(
            f"{name} must have {count} points at dimension {dim}, got shape {tuple(field.shape)}"
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: ShardedMesh, at: Link) -> Tensor:
        ctx.mesh, ctx.at = mesh, at
        # Parts are of nearly one size, so they are sent at that of the largest.
        largest = max(index.numel() for index in mesh.indices)
        padded = part.new_zeros((largest, *part.shape[1:]))
        padded[: part.shape[0]] = part
        parts = [torch.empty_like(padded) for _ in mesh.indices]
        if at.size == 1:
            parts = [padded]
        elif padded.numel():
            with at.talking():
                dist.all_gather(parts, padded, group=at.group)
        whole = part.new_empty((mesh.total, *part.shape[1:]))
        for index, rows in zip(mesh.indices, parts, strict=True):
            whole[index.to(part.device)] = rows[: index.numel()]
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = sum_over(grad, ctx.at)
        return total.index_select(0, ctx.mesh.index.to(grad.device)), None, None
