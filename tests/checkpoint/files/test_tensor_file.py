"""One safetensors file: written by ranks together, read by rows, damage named."""

import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_zero.checkpoint.files import disk, tensor_file
from hf_zero.checkpoint.files.manifest import record_of
from hf_zero.checkpoint.files.pieces import identity
from hf_zero.checkpoint.files.tensor_file import (
    Extent,
    Source,
    TensorInfo,
    layout_file,
    read_layout,
    read_rows,
    write_rows,
)
from hf_zero.errors import CheckpointError
from hf_zero.layout import RowLayout

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
