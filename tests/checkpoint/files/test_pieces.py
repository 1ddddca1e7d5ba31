"""Movements of elements, followed on meta tensors, against the same movements of real ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_zero.checkpoint.files.pieces import Piece
from hf_zero.checkpoint.files.trace import Tracer
from hf_zero.layout import row_major


def rebuilt(pieces: tuple[Piece, ...], sources: dict[str, Tensor], numel: int) -> Tensor:
    """The flattened tensor that `pieces` describe; elements that none describes are -1."""
    flat = torch.full((numel,), -1)
    for piece in pieces:
        target = flat.as_strided(piece.shape, piece.target_strides, piece.target_offset)
        target.copy_(
            sources[piece.source].reshape(-1).as_strided(piece.shape, piece.source_strides, piece.source_offset)
        )
    return flat


@st.composite
def strided_pieces(draw: st.DrawFn) -> Piece:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    permuted = row_major(tuple(shape[dim] for dim in order))
    strides = tuple(permuted[order.index(dim)] for dim in range(len(shape)))
    return Piece(shape, "a", draw(st.integers(0, 5)), strides, draw(st.integers(0, 5)), row_major(shape))


@given(strided_pieces(), st.integers(0, 300), st.integers(0, 300))
def test_within_gives_just_the_elements_of_the_interval(piece: Piece, start: int, stop: int) -> None:
    source = torch.arange(600)
    for side in ("source", "target"):
        parts = tuple(piece.within(side, start, stop))
        found, whole = rebuilt(parts, {"a": source}, 600), rebuilt((piece,), {"a": source}, 600)
        is_in = torch.zeros(600, dtype=torch.bool)
        if side == "source":
            is_in = (whole >= start) & (whole < stop)
        else:
            is_in[start:stop] = True
        assert torch.equal(found, torch.where(is_in & (whole >= 0), whole, -1))
        assert sum(part.numel for part in parts) == int((found >= 0).sum())


@st.composite
def held_pieces(draw: st.DrawFn) -> tuple[Piece, tuple[int, ...], int, list[tuple[int, int]]]:
    """A piece of a source, and what a rank holds of the source: ranges on one of its dims."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    numel = torch.Size(shape).numel()
    views = [torch.arange(numel).view(shape)]
    for _ in range(draw(st.integers(0, 3))):
        view, dim = views[-1], draw(st.integers(0, max(views[-1].ndim - 1, 0)))
        size = view.shape[dim] if view.ndim else 1
        start = draw(st.integers(0, size - 1))
        moves = [view.transpose(0, dim) if view.ndim else view]
        moves += [view.narrow(dim, start, draw(st.integers(1, size - start)))] if view.ndim else []
        moves += [view.view(-1), view.view(1, -1)] if view.is_contiguous() else []
        moves += [view[..., ::2]] if view.ndim else []
        views.append(draw(st.sampled_from(moves)))
    view = views[-1]
    piece = Piece(tuple(view.shape), "a", int(view.storage_offset()), view.stride(), 0, row_major(tuple(view.shape)))
    dim = draw(st.integers(0, len(shape) - 1))
    ends = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=4)))
    return piece, shape, dim, list(zip(ends[::2], ends[1::2], strict=False))


@given(held_pieces())
def test_held_gives_just_what_a_rank_has_where_it_has_it(
    case: tuple[Piece, tuple[int, ...], int, list[tuple[int, int]]],
) -> None:
    piece, shape, dim, ranges = case
    source = torch.arange(torch.Size(shape).numel()).view(shape)
    own = torch.cat([source.narrow(dim, start, stop - start) for start, stop in ranges], dim).contiguous()
    parts = tuple(piece.held(shape, dim, ranges))
    found, whole = rebuilt(parts, {"a": own}, piece.numel), rebuilt((piece,), {"a": source}, piece.numel)
    assert torch.equal(found, torch.where(torch.isin(whole, own), whole, -1))
    assert sum(part.numel for part in parts) == int((found >= 0).sum())


def _movement(draw: st.DrawFn, tensors: list[Tensor], plan: list[tuple]) -> None:
    """Append one more tensor made of earlier ones, and note how."""
    index = draw(st.integers(0, len(tensors) - 1))
    tensor = tensors[index]
    kinds = ["transpose", "contiguous", "reshape", "chunk", "cat", "stack", "unbind"]
    kind = draw(st.sampled_from(kinds))
    dim = draw(st.integers(0, max(tensor.ndim - 1, 0)))
    other = draw(st.integers(0, max(tensor.ndim - 1, 0)))
    plan.append((kind, index, dim, other))
    tensors.append(_moved(kind, tensors, index, dim, other))


def _moved(kind: str, tensors: list[Tensor], index: int, dim: int, other: int) -> Tensor:
    tensor = tensors[index]
    if tensor.ndim == 0:
        return tensor.clone()
    if kind == "transpose":
        return tensor.transpose(dim, other)
    if kind == "contiguous":
        return tensor.contiguous()
    if kind == "reshape":
        return (
            tensor.reshape(-1, *tensor.shape[-1:])
            if other
            else tensor.reshape(2, -1)
            if tensor.numel() % 2 == 0
            else tensor
        )
    if kind == "chunk":
        return torch.chunk(tensor, 2, dim)[-1]
    if kind == "cat":
        return (
            torch.cat([tensor, tensors[0].reshape(tensor.shape), tensor], dim) if _fits(tensor, tensors[0]) else tensor
        )
    if kind == "stack":
        return torch.stack([tensor, tensor], dim)
    return torch.unbind(tensor, dim)[-1]


def _fits(tensor: Tensor, first: Tensor) -> bool:
    return tensor.numel() == first.numel()


@settings(max_examples=150)
@given(st.data())
def test_traced_movements_are_those_of_real_tensors(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    real, plan = [torch.arange(torch.Size(shape).numel()).view(shape)], []
    for _ in range(data.draw(st.integers(1, 5))):
        _movement(data.draw, real, plan)
    tracer = Tracer()
    traced = [tracer.source("a", shape, torch.int64)]
    with tracer:
        for step in plan:
            traced.append(_moved(step[0], traced, *step[1:]))
    for ours, theirs in zip(traced, real, strict=True):
        pieces = tracer.pieces(ours)
        if pieces is not None:  # some chains are not followed, and are gathered instead
            assert torch.equal(rebuilt(pieces, {"a": real[0]}, theirs.numel()), theirs.reshape(-1))


def _with(operation: str) -> tuple[Piece, ...] | None:
    tracer = Tracer()
    a, b = tracer.source("a", (6, 4), torch.float32), tracer.source("b", (2, 4), torch.float32)
    with tracer:
        results = {
            "chunked columns": lambda: torch.chunk(a, 2, 1)[1].contiguous(),
            "fused rows": lambda: torch.cat([a, b]),
            "fused columns of experts": lambda: torch.chunk(torch.cat([a.view(2, 3, 4), a.view(2, 3, 4)], 1), 2)[1],
            "heads": lambda: a.view(3, 2, 4).transpose(0, 1).reshape(6, 4),
            "sum": lambda: a + 1,
            "cast": lambda: a.to(torch.bfloat16),
        }
        return tracer.pieces(results[operation]())


@pytest.mark.parametrize("operation", ["chunked columns", "fused rows", "fused columns of experts", "heads"])
def test_movements_of_conversions_are_followed(operation: str) -> None:
    assert _with(operation) is not None


@pytest.mark.parametrize("operation", ["sum", "cast"])
def test_what_computes_has_no_pieces(operation: str) -> None:
    assert _with(operation) is None
