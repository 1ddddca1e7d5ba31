"""Movements of elements, followed on meta tensors, against the same movements of real ones; and rows of files."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_zero.checkpoint import disk, tensor_file
from hf_zero.checkpoint.manifest import record_of
from hf_zero.checkpoint.pieces import Piece, identity
from hf_zero.checkpoint.tensor_file import Extent, Source, TensorInfo, layout_file, read_layout, read_rows, write_rows
from hf_zero.checkpoint.trace import Tracer
from hf_zero.engine.layout import RowLayout, row_major
from hf_zero.errors import CheckpointError


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


@settings(max_examples=300)
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


# ---- files ----------------------------------------------------------------------------------------------------------

_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float16, torch.float64]


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 3), (1, 4), (6,), (), (0, 5), (2, 2, 2), (5, 1)]
    return {
        f"t{i}{'é' * (i % 2)}": torch.randint(0, 100, shape, generator=generator).to(_DTYPES[i % len(_DTYPES)])
        for i, shape in enumerate(shapes * 2)
    }


def _rows(tensor: Tensor, rank: int, num_ranks: int) -> Source:
    layout = RowLayout(tuple(tensor.shape), num_ranks if tensor.ndim else 1)
    start, stop = layout.span(rank)
    return Source(tensor.reshape(-1)[start:stop].view(layout.local_shape(rank)).clone(), layout)


def _write(folder: Path, tensors: dict[str, Tensor], num_ranks: int) -> list[Extent]:
    infos = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    file = layout_file("a.safetensors", infos, {"format": "pt"})
    disk.write_file(folder / file.name, file.header, file.nbytes)
    pieces = {info.name: (identity(info.name, info.shape),) for info in infos}
    extents = []
    for rank in range(num_ranks):
        sources = {name: _rows(tensor, rank, num_ranks) for name, tensor in tensors.items()}
        extents += write_rows(folder, file, pieces, sources, rank)
    return extents


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_ranks_write_the_file_of_safetensors_and_read_it(num_ranks: int, tmp_path: Path) -> None:
    tensors = _tensors()
    save_file(tensors, tmp_path / "expected.safetensors", metadata={"format": "pt"})
    extents = _write(tmp_path, tensors, num_ranks)
    written = (tmp_path / "a.safetensors").read_bytes()
    assert written == (tmp_path / "expected.safetensors").read_bytes()
    file = read_layout(tmp_path / "a.safetensors")
    record = record_of(tmp_path / "a.safetensors", [*extents, Extent(0, len(file.header), 0)])
    assert record.size == len(written)
    pieces = {info.name: (identity(info.name, info.shape),) for info in file.tensors}
    for rank in range(num_ranks):
        sources = {name: _rows(torch.zeros_like(tensor), rank, num_ranks) for name, tensor in tensors.items()}
        read_rows(tmp_path, file, pieces, sources, rank)
        for name, tensor in tensors.items():
            assert torch.equal(sources[name].rows, _rows(tensor, rank, num_ranks).rows), name


def test_long_rows_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 64)
    sizes: list[int] = []
    monkeypatch.setattr(
        disk,
        "write_at",
        lambda fd, path, data, offset, write=disk.write_at: (sizes.append(len(data)), write(fd, path, data, offset)),
    )
    tensors = {"a": torch.arange(300.0).view(3, 100), "b": torch.arange(40.0).view(20, 2), "c": torch.zeros(2, 0)}
    _write(tmp_path, tensors, 2)
    assert max(sizes) <= 64
    found = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_gaps_and_overlaps_of_extents_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    for extents in ([Extent(0, 4, 0), Extent(5, 5, 0)], [Extent(0, 6, 0), Extent(5, 5, 0)], [Extent(0, 9, 0)]):
        with pytest.raises(CheckpointError):
            record_of(path, extents)


@pytest.mark.parametrize("damage", ["short", "header", "length", "shape", "empty", "long"])
def test_damaged_files_are_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(3, 4)}, path)
    data = path.read_bytes()
    changed = {
        "short": data[:-1],
        "long": data + b"0",
        "header": data.replace(b'"shape"', b'"shapf"'),
        "length": b"\xff" * 8 + data[8:],
        "shape": data.replace(b"[3,4]", b"[3,5]"),
        "empty": b"",
    }
    path.write_bytes(changed[damage])
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged"):
        read_layout(path)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(CheckpointError, match="is missing"):
        read_layout(Path(folder) / "b.safetensors")
