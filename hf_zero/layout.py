"""Which rank owns which rows, and where a parameter lies in its unit's memory. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT_BYTES = (
    256  # what cuBLASLt's fastest kernels ask of a matrix, and torch's allocator gives to a tensor of its own
)
_WELL_BALANCED = 1.05  # of what the greatest rank holds over the mean: less is not worth another order in memory
_WORTH_BALANCING = 2**16  # elements of a tensor


@dataclass(frozen=True)
class RowLayout:
    """How a tensor is cut on one dim over `num_ranks` ranks, as `DTensor`'s `Shard(dim)` does.

    Every rank owns `chunk_rows = ceil(rows / num_ranks)` rows, except the last ones, which may own fewer or none. A buffer
    of `padded_numel` elements therefore holds all chunks at equal distances, with the whole tensor as its prefix. A *row* is
    one index on the dim. Buffers and messages hold row after row, also where the dim is another than the first: a whole
    tensor then has its dims in another order in memory, as after `movedim`, and is not copied. A rank's rows at rest are an
    ordinary contiguous tensor in any case.

    Attributes:
        shape: the whole tensor's shape.
        num_ranks: ranks that the rows are cut over; 1 means that the tensor stays whole.
        dim: that is cut.
    """

    shape: tuple[int, ...]
    num_ranks: int
    dim: int = field(default=0, kw_only=True)

    @classmethod
    def balanced(cls, shape: tuple[int, ...], num_ranks: int) -> RowLayout:
        """The layout by the first dim, or by the one that divides best where the first one does not divide well.

        As for stacked experts, `[8, 14336, 4096]` over 64 ranks: by the first dim, 8 ranks would hold all of it, and a buffer
        would take eight times its size.
        """
        first = cls(shape, num_ranks)
        if first.numel < _WORTH_BALANCING or first.padding <= _WELL_BALANCED:
            return first
        return min((cls(shape, num_ranks, dim=dim) for dim in range(len(shape))), key=lambda each: each.padding)

    @property
    def padding(self) -> float:
        """Elements of a padded buffer over those of the tensor; also what the greatest rank holds over the mean."""
        return self.padded_numel / max(self.numel, 1)

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def row_numel(self) -> int:
        """Elements of one row."""
        return math.prod(self._row_shape)

    @property
    def _row_shape(self) -> tuple[int, ...]:
        return self.shape[: self.dim] + self.shape[self.dim + 1 :]

    @property
    def _rows(self) -> int:
        return self.shape[self.dim] if self.shape else 1

    @cached_property
    def chunk_numel(self) -> int:
        """Elements from the start of one rank's rows to the start of the next rank's."""
        return -(-self._rows // self.num_ranks) * self.row_numel

    @cached_property
    def padded_numel(self) -> int:
        """Elements of a buffer that holds every rank's chunk."""
        return self.chunk_numel * self.num_ranks

    def span(self, rank: int) -> tuple[int, int]:
        """First and last-plus-one element that `rank` owns, counted row after row, in the tensor as in a padded buffer."""
        if self.num_ranks == 1:
            return 0, self.numel
        start = min(rank * self.chunk_numel, self.numel)
        return start, min(start + self.chunk_numel, self.numel)

    def local_numel(self, rank: int) -> int:
        """Elements that `rank` owns."""
        start, stop = self.span(rank)
        return stop - start

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the rows that `rank` owns."""
        if self.num_ranks == 1:
            return self.shape
        rows = self.local_numel(rank) // self.row_numel if self.row_numel else self._empty_row_count(rank)
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    def elements_of(self, flat: Tensor, rank: int) -> Tensor:
        """The view of the elements that `rank` owns; `flat` is the tensor, row after row, or a padded buffer."""
        start, stop = self.span(rank)
        return flat[start:stop]

    def rows_of(self, whole: Tensor, rank: int) -> Tensor:
        """The rows that `rank` owns; a view if `whole`, of this shape or a padded buffer, is contiguous."""
        if not self.dim:
            return self.elements_of(whole.reshape(-1), rank).view(self.local_shape(rank))
        if whole.ndim == 1:
            return self.in_shape(self.elements_of(whole, rank), self.local_shape(rank))
        first = min(rank * -(-self._rows // self.num_ranks), self._rows)
        return whole.narrow(self.dim, first, self.local_shape(rank)[self.dim])

    def in_shape(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The view of elements, row after row, as a tensor of `shape`: the whole's, or that of some rows."""
        if not self.dim:
            return flat.view(shape)
        return flat.view(shape[self.dim], *self._row_shape).movedim(0, self.dim)

    def flat(self, values: Tensor) -> Tensor:
        """The whole tensor, or some of its rows, row after row, contiguous; a view where memory has them so."""
        return (values.movedim(self.dim, 0) if self.dim else values).reshape(-1).contiguous()

    def _empty_row_count(self, rank: int) -> int:
        chunk_rows = -(-self._rows // self.num_ranks)
        start = min(rank * chunk_rows, self._rows)
        return min(start + chunk_rows, self._rows) - start


@dataclass(frozen=True)
class OwnerLayout(RowLayout):
    """A tensor of any shape that lies whole on one of `num_ranks` ranks, while the others hold none of it.

    Attributes:
        owner: the rank.
    """

    owner: int

    def span(self, rank: int) -> tuple[int, int]:
        """First and last-plus-one element that `rank` holds."""
        return (0, self.numel) if rank == self.owner else (0, 0)


@dataclass(frozen=True)
class PlacedLayout(RowLayout):
    """A tensor cut on one dim over some of `num_ranks` ranks, while the others hold none of it.

    Attributes:
        places: the ranks that hold it, in the order of their rows.
    """

    places: tuple[int, ...]

    def span(self, rank: int) -> tuple[int, int]:
        """First and last-plus-one element that `rank` holds."""
        if rank not in self.places:
            return 0, 0
        return RowLayout(self.shape, len(self.places), dim=self.dim).span(self.places.index(rank))


@dataclass(frozen=True)
class TensorCut:
    """How tensor parallelism cuts a tensor on one dim, before its rows are cut: as `Shard` and `_StridedShard` of `DTensor` do.

    The dim is divided into groups (a fused gate and up projection has two), and each group over the ranks. A rank's
    parts lie one after the other.

    Attributes:
        shape: the whole tensor's shape.
        dim: that is cut.
        num_ranks: of the tensor axis.
        num_groups: that the dim is divided into first.
    """

    shape: tuple[int, ...]
    dim: int
    num_ranks: int
    num_groups: int = 1

    @property
    def divides(self) -> bool:
        """Whether groups, and what the ranks hold of each, are equally long; several groups that are not have no order."""
        return self.shape[self.dim] % (self.num_groups * self.num_ranks) == 0

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Starts and ends, on the dim, of what `rank` holds, in the order in which it holds them."""
        size = self.shape[self.dim]
        width = -(-size // self.num_groups)
        found = []
        for first in range(0, size, max(width, 1)):
            last = min(first + width, size)
            chunk = -(-(last - first) // self.num_ranks)
            start = min(first + rank * chunk, last)
            found.append((start, min(start + chunk, last)))
        return tuple(found)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what `rank` holds."""
        held = sum(stop - start for start, stop in self.ranges(rank))
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])

    def part_of(self, whole: Tensor, rank: int) -> Tensor:
        """What `rank` holds of the whole tensor: a view where that is one range."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges(rank)]
        if len(parts) == 1:
            return parts[0]
        part = whole.new_empty(self.local_shape(rank))
        at = 0
        for each in parts:
            part.narrow(self.dim, at, each.shape[self.dim]).copy_(each)
            at += each.shape[self.dim]
        return part

    def put(self, whole: Tensor, part: Tensor, rank: int) -> None:
        """Write what `rank` holds into the whole tensor."""
        at = 0
        for start, stop in self.ranges(rank):
            whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, at, stop - start))
            at += stop - start


@dataclass(frozen=True)
class Cut:
    """Which elements of a parameter one rank holds: the rows that are its own of what tensor parallelism leaves it.

    Attributes:
        shape: the whole tensor's shape.
        rows: how what the tensor axis leaves is cut by rows.
        shard_rank: whose rows.
        tensor: how the tensor axis cuts; None where each of its ranks has the whole.
        tensor_rank: whose part.
    """

    shape: tuple[int, ...]
    rows: RowLayout
    shard_rank: int
    tensor: TensorCut | None = None
    tensor_rank: int = 0

    def part_of(self, whole: Tensor) -> Tensor:
        """What the tensor axis leaves of `whole`, before rows are cut."""
        return whole if self.tensor is None else self.tensor.part_of(whole, self.tensor_rank)

    def of(self, whole: Tensor) -> Tensor:
        """This rank's elements of `whole`."""
        return self.rows.rows_of(self.part_of(whole), self.shard_rank)


def place(sizes_bytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Lay out blocks of `sizes_bytes` one after another, each aligned to `ALIGNMENT_BYTES`.

    Returns:
        The offset of every block, and the total number of bytes.
    """
    offsets, end = [], 0
    for size in sizes_bytes:
        offsets.append(end)
        end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(offsets), end


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
