"""safetensors files that all ranks write and read together, each its own rows: headers, byte ranges, checksums.

Format: https://github.com/huggingface/safetensors (8 bytes of header length, a JSON header, row-major tensors).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.pieces import Piece
from hf_zero.checkpoint.files.stored import stored
from hf_zero.errors import CheckpointError
from hf_zero.layout import Cut, RowLayout

CHUNK_BYTES = 8 * 2**20  # of rows that are converted, checksummed and written at once
_DTYPES = {
    # In safetensors' order; it stores tensors of the last dtypes first.
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself


@dataclass(frozen=True)
class Extent:
    """A range of bytes of a file, with the CRC-32 of what was written there."""

    offset: int
    length: int
    crc: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file.

    Attributes:
        name: in the file.
        dtype: of its elements.
        shape: of the whole tensor.
        offset: of its first byte, from the start of the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file as it is to be written, or as it is on disk.

    Attributes:
        name: of the file, without folder.
        header: its first bytes, length prefix included.
        tensors: in the order of their bytes.
    """

    name: str
    header: bytes
    tensors: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Source:
    """This rank's part of a parameter, of an optimizer's state, or of a buffer.

    Attributes:
        rows: this rank's rows.
        layout: how the whole is cut; over one rank, if every rank holds it whole.
        cut: given where a tensor axis cuts it first, or could, or where it is cut on another dim than the first.
    """

    rows: Tensor
    layout: RowLayout
    cut: Cut | None = None


class Memory:
    """This rank's parts of sources as flat tensors, row-major: copies of those that lie in another order in memory."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self._flat: dict[str, Tensor] = {}

    def view(self, part: Piece, start: int = 0) -> Tensor:
        """The elements of a part of a source, in its order; counted from element `start` of the source."""
        flat = self._flat.get(part.source)
        if flat is None:
            rows = torch_compat.local_of(self._sources[part.source].rows)
            flat = self._flat[part.source] = rows.contiguous().view(-1)
        offset = int(flat.storage_offset()) + part.source_offset - start
        return flat.as_strided(part.shape, part.source_strides, offset)

    def put_back(self) -> None:
        """Give the sources what has been read into copies of them."""
        for name, flat in self._flat.items():
            rows = torch_compat.local_of(self._sources[name].rows)
            if flat.data_ptr() != rows.data_ptr():
                rows.copy_(flat.view(rows.shape))


def layout_file(name: str, tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> TensorFile:
    """Lay out a file byte for byte as `safetensors.torch.save_file` does."""
    rank_of = {dtype: rank for rank, dtype in enumerate(_DTYPES.values())}
    ordered = sorted(tensors, key=lambda tensor: (-rank_of[tensor.dtype], tensor.name))
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for tensor in ordered:
        span = [end, end + tensor.nbytes]
        entries[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        end = span[1]
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return TensorFile(name, header, tuple(_placed(ordered, len(header))))


def _placed(tensors: Sequence[TensorInfo], offset: int) -> Iterator[TensorInfo]:
    for tensor in tensors:
        yield TensorInfo(tensor.name, tensor.dtype, tensor.shape, offset)
        offset += tensor.nbytes


def read_layout(path: Path) -> TensorFile:
    """Read the header of a safetensors file, and check that the file has the length that the header promises.

    Raises:
        CheckpointError: it is not a whole safetensors file.
    """
    try:
        with stored(path) as file:
            if file.size < 8:
                raise ValueError(f"{file.size} bytes")
            prefix = bytearray(8)
            file.read_into(prefix, 0)
            length = int.from_bytes(prefix, "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, file.size - 8):
                raise ValueError(f"a header of {length} bytes")
            text = bytearray(length)
            file.read_into(text, 8)
            size = file.size
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        start = 8 + length
        tensors = [
            TensorInfo(name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), start + entry["data_offsets"][0])
            for name, entry in entries.items()
        ]
        end = max((start + entry["data_offsets"][1] for entry in entries.values()), default=start)
        tensors.sort(key=lambda t: (t.offset, t.nbytes))
        if not all(isinstance(size, int) and size >= 0 for t in tensors for size in t.shape):
            raise ValueError("shapes that are none")
        ends = [start, *(start + entries[t.name]["data_offsets"][1] for t in tensors)]
        if any((t.offset, t.offset + t.nbytes) != span for t, span in zip(tensors, pairwise(ends), strict=True)):
            raise ValueError("offsets that do not fit the shapes")
        if size != end:
            raise ValueError(f"{size} bytes where its header promises {end}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or not a safetensors file: {error}") from error
    return TensorFile(path.name, bytes(prefix + text), tuple(tensors))


def write_rows(
    folder: Path, file: TensorFile, pieces: Mapping[str, Sequence[Piece]], sources: Mapping[str, Source], rank: int
) -> list[Extent]:
    """Write this rank's part of a file that already has its header and length, and sync it to disk.

    Rank 0 writes what every rank holds whole. Besides the rows themselves, this needs about twice `CHUNK_BYTES`.

    Args:
        folder: where the file is.
        file: its layout; elements are converted to its dtypes.
        pieces: of each tensor.
        sources: by name.
        rank: this rank.

    Returns:
        What was written, in the order of the file.
    """
    path, extents, memory = folder / file.name, list[Extent](), Memory(sources)
    with disk.rows_file(path) as fd:
        for tensor in file.tensors:
            for part, view in _own_parts(pieces[tensor.name], sources, memory, rank, writes=True):
                for at, values in _runs(part, view, tensor.dtype.itemsize):
                    data = _bytes_of(values.to(tensor.dtype))
                    offset = tensor.offset + at * tensor.dtype.itemsize
                    disk.write_at(fd, path, data, offset)
                    _add(extents, Extent(offset, len(data), zlib.crc32(data)), data)
    return sorted(extents, key=lambda extent: extent.offset)


def _add(extents: list[Extent], new: Extent, data: memoryview) -> None:
    """Append an extent, or lengthen the last one if they touch; long ones stay separate so that ranks can share the reading."""
    last = extents[-1] if extents else None
    if last is None or last.offset + last.length != new.offset or last.length >= CHUNK_BYTES:
        extents.append(new)
    else:
        extents[-1] = Extent(last.offset, last.length + new.length, zlib.crc32(data, last.crc))


def read_rows(
    folder: Path, file: TensorFile, pieces: Mapping[str, Sequence[Piece]], sources: Mapping[str, Source], rank: int
) -> None:
    """Read this rank's rows of a file into `sources`, converted to their dtypes; see `write_rows`."""
    memory = Memory(sources)
    with stored(folder / file.name) as opened:
        for tensor in file.tensors:
            for part, view in _own_parts(pieces[tensor.name], sources, memory, rank, writes=False):
                for at, values in _runs(part, view, tensor.dtype.itemsize):
                    buffer = bytearray(values.numel() * tensor.dtype.itemsize)
                    opened.read_into(buffer, tensor.offset + at * tensor.dtype.itemsize)
                    values.copy_(torch.frombuffer(buffer, dtype=tensor.dtype).view(values.shape))
    memory.put_back()


def _own_parts(
    pieces: Sequence[Piece], sources: Mapping[str, Source], memory: Memory, rank: int, *, writes: bool
) -> Iterator[tuple[Piece, Tensor]]:
    """This rank's parts of a tensor's pieces, each with the view of its rows that has the part's shape."""
    for piece in pieces:
        source = sources[piece.source]
        if source.layout.num_ranks == 1 and writes and rank != 0:
            continue
        start, stop = source.layout.span(rank)
        for part in piece.within("source", start, stop):
            ordered, _ = part.runs()
            yield ordered, memory.view(ordered, start)


def _runs(part: Piece, view: Tensor, itemsize: int) -> Iterator[tuple[int, Tensor]]:
    """Cut a part into views of at most about `CHUNK_BYTES` that are contiguous in the target, with their offsets there."""
    _, trailing = part.runs()
    leading = len(part.shape) - trailing
    for index in product(*(range(size) for size in part.shape[:leading])):
        at = part.target_offset + sum(i * s for i, s in zip(index, part.target_strides, strict=False))
        yield from _chunks(at, view[index], max(CHUNK_BYTES // itemsize, 1))


def _chunks(at: int, view: Tensor, limit: int) -> Iterator[tuple[int, Tensor]]:
    if view.numel() <= limit:
        yield at, view
        return
    inner = view.numel() // view.shape[0]
    step = max(limit // inner, 1)
    for start in range(0, view.shape[0], step):
        chunk = view[start : start + step]
        if chunk.numel() > limit and chunk.shape[0] == 1:
            yield from _chunks(at + start * inner, chunk[0], limit)
        else:
            yield at + start * inner, chunk


def _bytes_of(values: Tensor) -> memoryview:
    flat = values.cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
