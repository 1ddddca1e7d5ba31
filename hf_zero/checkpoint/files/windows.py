"""Who writes and reads which bytes, where ranks collect rows instead of each writing its own.

[Note: windows] A rank's rows of a tensor are few bytes where there are many ranks: 64 KiB of a matrix of 64 MiB over 1,024 of
them. So files are divided into windows of 8 MiB, and windows that follow each other are one rank's, as many bytes as any
other's. Rank by rank sends what it holds of a window to the one that writes it, or gets it from the one that has read it. A
file is then opened by few ranks, and each byte is written, or read, once, together with millions of its neighbours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_zero.checkpoint.files.pieces import Piece
from hf_zero.checkpoint.files.stored import Stretch, part_name
from hf_zero.checkpoint.files.tensor_file import CHUNK_BYTES, Source, TensorFile, TensorInfo
from hf_zero.layout import RowLayout


@dataclass(frozen=True)
class Window:
    """Bytes of a file that one rank writes or reads at once; all but those at its ends are aligned to `CHUNK_BYTES`.

    Attributes:
        file: whose bytes.
        start: the first one.
        stop: the last plus one.
    """

    file: TensorFile
    start: int
    stop: int

    def tensors(self) -> Iterator[tuple[TensorInfo, int, int]]:
        """The tensors in it that have elements here, each with the first of them and the last plus one."""
        tensors = self.file.tensors
        first = bisect_right(tensors, self.start, key=lambda tensor: tensor.offset) - 1
        for tensor in tensors[max(first, 0) :]:
            if tensor.offset >= self.stop:
                return
            size = tensor.dtype.itemsize
            start = max(-(-(self.start - tensor.offset) // size), 0)
            stop = min(-(-(self.stop - tensor.offset) // size), tensor.nbytes // size)
            if start < stop:
                yield tensor, start, stop


def divided(
    ranges: Sequence[tuple[TensorFile, int, int]], num_ranks: int, *, whole_files: bool = False
) -> list[list[Window]]:
    """The windows of ranges of bytes, by rank.

    Args:
        ranges: of files, in order.
        num_ranks: that write, or read.
        whole_files: give each file to one rank.
    """
    total = max(sum(stop - start for _, start, stop in ranges), 1)
    found: list[list[Window]] = [[] for _ in range(num_ranks)]
    done, rank, last = 0, 0, None
    for file, first, end in ranges:
        start = first
        while start < end:
            stop = min((start // CHUNK_BYTES + 1) * CHUNK_BYTES, end)
            if not whole_files or file is not last:
                rank = done * num_ranks // total
            found[rank].append(Window(file, start, stop))
            done, start, last = done + stop - start, stop, file
    return found


def joined(ranges: Sequence[tuple[TensorFile, int, int]]) -> list[tuple[TensorFile, int, int]]:
    """The same ranges, those that touch as one."""
    found: list[tuple[TensorFile, int, int]] = []
    for file, start, stop in ranges:
        if found and found[-1][0] is file and found[-1][2] == start:
            found[-1] = file, found[-1][1], stop
        else:
            found.append((file, start, stop))
    return found


def on_disk(windows: Sequence[Sequence[Window]]) -> dict[str, list[tuple[int, Stretch]]]:
    """The files on disk of windows by rank, where no two ranks write one: for each file, who writes which part of it."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for rank, own in enumerate(windows):
        for window in own:
            parts = found.setdefault(window.file.name, [])
            if parts and parts[-1][0] == rank:
                parts[-1] = rank, parts[-1][1], window.stop
            else:
                parts.append((rank, window.start, window.stop))
    return {
        name: [
            (rank, Stretch(Path(name if len(parts) == 1 else part_name(name, number, len(parts))), start, stop))
            for number, (rank, start, stop) in enumerate(parts)
        ]
        for name, parts in found.items()
    }


@dataclass(frozen=True)
class Holder:
    """Where a rank is among those that hold a model once: its shard, and its place along the tensor axis."""

    shard: int
    along: int


def held_by(place: Holder, source: Source, piece: Piece) -> Iterator[Piece]:
    """The parts of a piece that the rank at a place holds; their source is its memory, row-major."""
    layout, pieces = source.layout, iter((piece,))
    if source.cut is not None:
        layout, tensor = source.cut.rows, source.cut.tensor
        if tensor is not None:
            pieces = piece.held(tensor.shape, tensor.dim, tensor.ranges(place.along))
            layout = RowLayout(tensor.local_shape(place.along), layout.num_ranks, dim=layout.dim)
    start, stop = layout.span(place.shard)
    if start == stop:
        return
    if stop - start == layout.numel:
        yield from pieces
        return
    rows = start // layout.row_numel, stop // layout.row_numel
    for each in pieces:
        yield from each.held(layout.shape, layout.dim, [rows])


def is_cut(source: Source) -> bool:
    """Whether a rank holds some of a source only."""
    return source.layout.num_ranks > 1 or (source.cut is not None and source.cut.tensor is not None)


def is_given(source: Source, holder: Holder, writer: Holder) -> bool:
    """Whether a writer gets what it lacks from a holder: where several hold the same, from the one on its own place."""
    rows = source.layout if source.cut is None else source.cut.rows
    is_cut = source.cut is not None and source.cut.tensor is not None
    return (rows.num_ranks > 1 or holder.shard == writer.shard) and (is_cut or holder.along == writer.along)


def moved(window: Window, pieces: Mapping[str, Sequence[Piece]]) -> Iterator[tuple[TensorInfo, Piece]]:
    """What a window consists of: parts of pieces, in an order that is the same on all ranks."""
    for tensor, start, stop in window.tensors():
        for piece in pieces[tensor.name]:
            for part in piece.within("target", start, stop):
                yield tensor, part
