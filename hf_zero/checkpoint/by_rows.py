"""What ranks hold of a parameter that two axes cut, exchanged for rows of the whole, as files have them; and back.

[Note: rows for files] A rank's rows are one range of bytes of a file. What the tensor axis leaves a rank are parts of rows, or
rows here and there. So before a tensor is written, the ranks that hold a model exchange what they have of it, and each gets as
many whole rows as any other; after reading, they exchange it back. Nobody ever has more than its share of one tensor twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.checkpoint.tensor_file import Source
from hf_zero.engine.world import World
from hf_zero.layout import Cut, RowLayout, TensorCut

_Range = tuple[int, int]


def is_exchanged(source: Source) -> bool:
    """Whether ranks hold anything else than the rows that they write, and read."""
    return source.cut is not None and (source.cut.tensor is not None or source.cut.rows.num_ranks > 1)


def empty_rows(source: Source, world: World) -> Source:
    """Room for this rank's rows of the whole, for files."""
    layout = _layout(source, world)
    rows = torch.empty(layout.local_shape(world.holders.rank), dtype=source.rows.dtype, device=source.rows.device)
    return Source(rows, layout)


def to_rows(source: Source, name: str, world: World) -> Source:
    """This rank's rows of the whole; called by all ranks that hold the model together.

    Args:
        source: what this rank holds of it.
        name: of the tensor, for the ledger and for errors.
        world: the ranks.
    """
    found = empty_rows(source, world)
    _exchange(source, found, name, world, to_files=True)
    return found


def from_rows(rows: Source, source: Source, name: str, world: World) -> None:
    """Give every rank what it holds of the whole, from the ranks' rows of it: see `to_rows`."""
    _exchange(source, rows, name, world, to_files=False)


def _layout(source: Source, world: World) -> RowLayout:
    assert source.cut is not None
    return RowLayout(source.cut.shape, world.holders.num_ranks)


def _exchange(source: Source, rows: Source, name: str, world: World, *, to_files: bool) -> None:
    assert source.cut is not None
    kept, filed = torch_compat.local_of(source.rows), rows.rows
    held = kept.contiguous()  # a user's optimizer may keep its states in another order
    own = world.holders.rank
    places = [(shard, along) for shard, cell in enumerate(world.cells) for along in range(len(cell))]
    place_of = {world.cells[shard][along]: (shard, along) for shard, along in places}
    ordered = [place_of[rank] for rank in world.holders.ranks]
    whole_cut = source.cut
    if whole_cut.rows.dim:  # then there is no tensor axis: to files, this is as if it were one
        whole_cut, ordered = _along_dim(whole_cut), [(along, shard) for shard, along in ordered]
    here: list[list[Tensor]] = [[] for _ in ordered]  # by peer: this rank's side of what they share
    there: list[list[tuple[Tensor, Tensor, TensorCut | None, int]]] = [[] for _ in ordered]
    for peer, place in enumerate(ordered):
        # What this rank holds, and the peer has in its rows of the file.
        for start, stop, _ in _shared(whole_cut, ordered[own], place, rows.layout, peer, to_files):
            here[peer].append(held[start:stop].reshape(-1))
        # What the peer holds, and this rank has in its rows.
        cut = _at(whole_cut, place)
        for start, stop, first in _shared(whole_cut, place, ordered[own], rows.layout, own, to_files):
            part = filed[first : first + stop - start]
            tensor = None if cut.tensor is None or not cut.tensor.dim else replace(cut.tensor, shape=tuple(part.shape))
            shape = tuple(part.shape) if tensor is None else tensor.local_shape(place[1])
            values = part.new_empty(math.prod(shape))
            if not to_files:
                values.copy_((part if tensor is None else tensor.part_of(part, place[1])).reshape(-1))
            there[peer].append((values.view(shape), part, tensor, place[1]))
    flat = [[values.view(-1) for values, *_ in parts] for parts in there]
    for mine, theirs in zip(here[own], flat[own], strict=True):
        (theirs if to_files else mine).copy_(mine if to_files else theirs)
    sent, received = (here, flat) if to_files else (flat, here)
    world.holders.all_to_all(sent, received, "rows for files" if to_files else "rows from files", name).wait()
    for values, part, tensor, along in (each for parts in there for each in parts) if to_files else ():
        if tensor is None:
            part.copy_(values)
        else:
            tensor.put(part, values, along)
    if not to_files and held is not kept:
        kept.copy_(held)


def _along_dim(cut: Cut) -> Cut:
    """A cut on another dim than the first as one of the tensor axis, which leaves each rank all rows of the first."""
    tensor = TensorCut(cut.shape, cut.rows.dim, cut.rows.num_ranks)
    return Cut(cut.shape, RowLayout(tensor.local_shape(cut.shard_rank), 1), 0, tensor, cut.shard_rank)


def _at(cut: Cut, place: tuple[int, int]) -> Cut:
    """How the rank at another place cuts the same tensor."""
    shape = cut.shape if cut.tensor is None else cut.tensor.local_shape(place[1])
    return replace(cut, rows=RowLayout(shape, cut.rows.num_ranks), shard_rank=place[0], tensor_rank=place[1])


def _shared(
    cut: Cut, holder: tuple[int, int], filer: tuple[int, int], layout: RowLayout, filer_rank: int, to_files: bool
) -> Iterator[tuple[int, int, int]]:
    """What the rank at `holder` holds of the rows of the one at `filer`: the first and last row there, and the first here.

    Where several hold the same, a rank that writes gets it from one of them: the one on its own place of that axis.
    """
    if to_files and cut.rows.num_ranks == 1 and holder[0] != filer[0]:
        return
    if to_files and cut.tensor is None and holder[1] != filer[1]:
        return
    if not layout.row_numel:
        return
    first, last = (at // layout.row_numel for at in layout.span(filer_rank))
    at = 0
    for start, stop in _row_ranges(_at(cut, holder)):
        low, high = max(start, first), min(stop, last)
        if low < high:
            yield at + low - start, at + high - start, low - first
        at += stop - start


def _row_ranges(cut: Cut) -> Iterator[_Range]:
    """The rows of the whole, or of parts of them, that a rank holds, in the order in which it holds them."""
    part = cut.rows
    start, stop = (at // part.row_numel for at in part.span(cut.shard_rank)) if part.row_numel else (0, 0)
    if cut.tensor is None or cut.tensor.dim:
        yield start, stop
        return
    at = 0
    for first, last in cut.tensor.ranges(cut.tensor_rank):
        low, high = max(start, at), min(stop, at + last - first)
        if low < high:
            yield first + low - at, first + high - at
        at += last - first
