"""Rows and offsets: against `torch.chunk`, and against what `DTensor` makes of `Shard(0)`."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard

from hf_zero.layout import ALIGNMENT_BYTES, RowLayout, place

_SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
_NUM_RANKS = st.integers(1, 7)


@given(_SHAPES, _NUM_RANKS)
def test_spans_are_the_chunks_of_torch(shape, num_ranks):
    layout = RowLayout(shape, num_ranks)
    whole = torch.arange(layout.numel).view(shape)
    chunks = list(whole.chunk(num_ranks)) if shape[0] else []
    for rank in range(num_ranks):
        start, stop = layout.span(rank)
        rows = whole.reshape(-1)[start:stop].view(layout.local_shape(rank))
        expected = chunks[rank] if rank < len(chunks) else whole[:0]
        assert rows.shape == expected.shape
        assert torch.equal(rows, expected)
        assert layout.local_numel(rank) == expected.numel()


@given(_SHAPES, _NUM_RANKS)
def test_local_rows_are_those_of_dtensor(shape, num_ranks):
    layout = RowLayout(shape, num_ranks)
    for rank in range(num_ranks):
        size, offset = Shard.local_shard_size_and_offset(shape[0], num_ranks, rank)
        assert layout.local_shape(rank) == (size, *shape[1:])
        if size and layout.row_numel:
            assert layout.span(rank)[0] == offset * layout.row_numel


@given(_SHAPES, _NUM_RANKS)
def test_padded_buffer_holds_chunks_at_equal_distances_and_the_whole_as_its_prefix(shape, num_ranks):
    layout = RowLayout(shape, num_ranks)
    whole = torch.arange(1, layout.numel + 1)
    padded = torch.zeros(layout.padded_numel, dtype=torch.int64)
    assert layout.padded_numel == layout.chunk_numel * num_ranks >= layout.numel
    for rank in range(num_ranks):
        rows = layout.elements_of(padded, rank)
        assert rows.numel() == 0 or rows.storage_offset() == rank * layout.chunk_numel
        assert rows.numel() == layout.local_numel(rank) <= layout.chunk_numel
        rows.copy_(layout.elements_of(whole, rank))
        assert torch.equal(layout.rows_of(padded, rank), layout.rows_of(whole.view(shape), rank))
    assert torch.equal(padded[: layout.numel], whole)
    assert not padded[layout.numel :].any()


@given(_NUM_RANKS)
def test_scalar_stays_whole_on_one_rank(rank):
    layout = RowLayout((), 1)
    assert (layout.numel, layout.padded_numel, layout.local_shape(rank)) == (1, 1, ())
    assert layout.span(rank) == (0, 1)


@given(st.lists(st.integers(0, 1000)))
def test_placed_blocks_are_aligned_and_apart(sizes):
    offsets, total = place(sizes)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)
    assert all(end <= following for end, following in zip(ends, [*offsets[1:], total], strict=False))
    assert total % ALIGNMENT_BYTES == 0
    assert sum(sizes) <= total < sum(sizes) + ALIGNMENT_BYTES * (len(sizes) + 1)
