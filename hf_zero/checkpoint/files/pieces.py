"""How elements of a tensor in a file map to elements of a parameter: strided pieces, and the parts that a rank owns.

[Note: pieces] What `save_pretrained` writes differs from the parameters only in names and in the places of elements: experts
are unstacked, fused projections split, heads permuted. Every such tensor consists of a few strided pieces of parameters. A
rank holds some indices on a dim of each parameter, hence a part of each piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hf_zero.layout import row_major

Side = Literal["source", "target"]


@dataclass(frozen=True)
class Piece:
    """Elements that two tensors share, walked in the same order in both. Offsets and strides are in elements; strides > 0.

    Attributes:
        shape: of the walk.
        source: the name of the parameter or state.
        source_offset, source_strides: where its elements lie in the flattened source.
        target_offset, target_strides: where they lie in the flattened tensor of the file.
    """

    shape: tuple[int, ...]
    source: str
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def _side(self, side: Side) -> tuple[int, tuple[int, ...]]:
        if side == "source":
            return self.source_offset, self.source_strides
        return self.target_offset, self.target_strides

    def span(self, side: Side) -> tuple[int, int]:
        """The first, and the last plus one, element on one side."""
        offset, strides = self._side(side)
        return offset, offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True))

    def narrow(self, dim: int, start: int, stop: int) -> Piece:
        """The part with indices `start` to `stop` of dimension `dim`."""
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        source = self.source_offset + start * self.source_strides[dim]
        target = self.target_offset + start * self.target_strides[dim]
        return replace(self, shape=shape, source_offset=source, target_offset=target)

    def within(self, side: Side, start: int, stop: int) -> Iterator[Piece]:
        """The parts whose elements on `side` lie in [start, stop)."""
        if not self.numel:
            return
        low, high = self.span(side)
        if start <= low and high <= stop:
            yield self
            return
        if high <= start or stop <= low:
            return
        _, strides = self._side(side)
        dim = max((d for d, n in enumerate(self.shape) if n > 1), key=lambda d: strides[d])
        stride, count = strides[dim], self.shape[dim]
        extent = high - low - (count - 1) * stride  # of one index
        first = min(max(-((low - start) // stride), 0), count)
        last = min(max((stop - extent - low) // stride + 1, first), count)
        if first < last:  # these indices lie within as a whole; those beside them may have to be cut further
            yield from self.narrow(dim, first, last).within(side, start, stop)
        for index in (*range(first), *range(last, count)):
            at = low + index * stride
            if at < stop and at + extent > start:
                yield from self.narrow(dim, index, index + 1).within(side, start, stop)

    def held(self, shape: tuple[int, ...], dim: int, ranges: Sequence[tuple[int, int]]) -> Iterator[Piece]:
        """The parts that a rank has which holds some indices of the source; their source is what the rank holds.

        Args:
            shape: of the whole source.
            dim: on which the rank holds some indices only.
            ranges: starts and ends of them, in the order in which the rank holds them, one after another.
        """
        inner = math.prod(shape[dim + 1 :])
        whole, own, at = shape[dim] * inner, sum(stop - start for start, stop in ranges) * inner, 0
        for start, stop in ranges:
            for part in self._within_periods(whole, start * inner, stop * inner):
                period, offset = divmod(part.source_offset, whole)
                strides = tuple(s // whole * own if s % whole == 0 else s for s in part.source_strides)
                yield replace(part, source_offset=period * own + at + offset - start * inner, source_strides=strides)
            at += (stop - start) * inner

    def _within_periods(self, period: int, low: int, high: int) -> Iterator[Piece]:
        """The parts whose elements in the source lie in [low, high) of a period; each dim stays in one, or walks whole ones."""
        if not self.numel or low == high:
            return
        phase = self.source_offset % period
        inside = [
            d for d, (n, s) in enumerate(zip(self.shape, self.source_strides, strict=True)) if n > 1 and s % period
        ]
        extent = 1 + sum((self.shape[d] - 1) * self.source_strides[d] for d in inside)
        if phase + extent <= period:
            first = replace(self, shape=tuple(n if d in inside else 1 for d, n in enumerate(self.shape)))
            base = self.source_offset - phase
            for part in first.within("source", base + low, base + high):
                shape = tuple(part.shape[d] if d in inside else n for d, n in enumerate(self.shape))
                yield replace(part, shape=shape)
            return
        dim = max(inside, key=lambda d: self.source_strides[d])
        stride, count, start = self.source_strides[dim], self.shape[dim], 0
        rest = extent - (count - 1) * stride  # of one index
        while start < count:  # as many indices as lie in one period
            phase = (self.source_offset + start * stride) % period
            stop = min(start + max((period - phase - rest) // stride + 1, 1), count)
            yield from self.narrow(dim, start, stop)._within_periods(period, low, high)
            start = stop

    def runs(self) -> tuple[Piece, int]:
        """The same piece with dimensions in the order of the target, and how many trailing ones are contiguous there."""
        order = sorted(range(len(self.shape)), key=lambda d: (-self.target_strides[d], d))
        order = [d for d in order if self.shape[d] != 1]
        ordered = replace(
            self,
            shape=tuple(self.shape[d] for d in order),
            source_strides=tuple(self.source_strides[d] for d in order),
            target_strides=tuple(self.target_strides[d] for d in order),
        )
        length, trailing = 1, 0
        for size, stride in zip(reversed(ordered.shape), reversed(ordered.target_strides), strict=True):
            if stride != length:
                break
            length, trailing = length * size, trailing + 1
        return ordered, trailing


def identity(source: str, shape: tuple[int, ...]) -> Piece:
    """All of a source, as it is."""
    return Piece(shape, source, 0, row_major(shape), 0, row_major(shape))
