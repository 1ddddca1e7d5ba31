"""Writes and reads windows of files, whose elements ranks send to each other; see [Note: windows]."""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.pieces import Piece
from hf_zero.checkpoint.files.stored import StoredFile, Stretch, stored
from hf_zero.checkpoint.files.tensor_file import CHUNK_BYTES, Extent, Memory, Source, TensorInfo
from hf_zero.checkpoint.files.windows import Holder, Window, held_by, is_given, moved
from hf_zero.checkpoint.ranks.background import WRITING_S
from hf_zero.comm.agreements import Mail
from hf_zero.comm.exchange import Exchange
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError, CollectiveError

Pieces = Mapping[str, Sequence[Piece]]
_Parts = list[tuple[TensorInfo, Piece]]


class _Ranks:
    """The ranks that hold a model once, and what this one holds."""

    def __init__(self, sources: Mapping[str, Source], pieces: Pieces, world: World) -> None:
        self._sources, self._pieces, self.rank = sources, pieces, world.holders.rank
        self.memory = Memory(sources)
        places = {
            rank: Holder(shard, along) for shard, cell in enumerate(world.cells) for along, rank in enumerate(cell)
        }
        self.places = [places[rank] for rank in world.holders.ranks]
        # The right neighbour first, so that the ranks do not all send to the same one at once.
        self.peers = [*range(self.rank + 1, len(self.places)), *range(self.rank)]

    def parts(self, window: Window) -> _Parts:
        """What a window consists of, in an order that is the same on all ranks."""
        return list(moved(window, self._pieces))

    def held(self, parts: _Parts, holder: int, writer: int | None = None) -> _Parts:
        """What a rank holds of these parts.

        Args:
            parts: of a window.
            holder: the rank.
            writer: that gets them; given: without what it gets from others.
        """
        place, found = self.places[holder], _Parts()
        for tensor, piece in parts:
            source = self._sources[piece.source]
            if writer is None or is_given(source, place, self.places[writer]):
                found += ((tensor, part) for part in held_by(place, source, piece))
        return found


def _num_bytes(parts: _Parts) -> int:
    return sum(part.numel * tensor.dtype.itemsize for tensor, part in parts)


def _split(message: Tensor, parts: _Parts) -> Iterator[tuple[TensorInfo, Piece, Tensor]]:
    """The parts of a message, each with its elements."""
    at = 0
    for tensor, part in parts:
        size = tensor.dtype.itemsize
        data = message[at : at + part.numel * size]
        at += len(data)
        yield tensor, part, _elements(data, tensor.dtype).view(part.shape)


def _elements(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as elements; a copy of them where they begin in the middle of one."""
    return (data if data.storage_offset() % dtype.itemsize == 0 else data.clone()).view(dtype)


def _message(views: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors on the host, one after another; of a single one without a copy where it is there."""
    # With a stride of 1 for a single element too, which may have any.
    flat = [view.cpu().contiguous().as_strided((view.numel(),), (1,)).view(torch.uint8) for view in views]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


@dataclass
class _Bytes:
    """What a window's bytes are put together in, or have been read into.

    Attributes:
        window: which bytes.
        data: they, [bytes].
        filled: how many of them have been put here.
    """

    window: Window
    data: Tensor
    filled: int = 0

    def view(self, tensor: TensorInfo, part: Piece) -> Tensor:
        """The elements of a part, in its order."""
        size = tensor.dtype.itemsize
        first = max(-(-(self.window.start - tensor.offset) // size), 0)  # element of the tensor that is here
        begin = tensor.offset + first * size - self.window.start
        flat = _elements(self.data[begin : begin + (len(self.data) - begin) // size * size], tensor.dtype)
        offset = int(flat.storage_offset()) + part.target_offset - first
        return flat.as_strided(part.shape, part.target_strides, offset)

    def put(self, tensor: TensorInfo, part: Piece, values: Tensor) -> None:
        """Put the elements of a part where they belong."""
        self.view(tensor, part).copy_(values)
        self.filled += part.numel * tensor.dtype.itemsize


class _InFlight:
    """Messages that are being sent.

    Args:
        limit: bytes of them, from which on the oldest ones are waited for before another is sent; None: as many as there are.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit, self._bytes = limit, 0
        self._waiting: deque[tuple[int, Exchange]] = deque()

    def add(self, num_bytes: int, exchange: Exchange) -> None:
        """Add one."""
        self._waiting.append((num_bytes, exchange))
        self._bytes += num_bytes
        while self._limit is not None and self._bytes > self._limit:
            self._next()

    def wait(self) -> None:
        """Wait for all."""
        while self._waiting:
            self._next()

    def _next(self) -> None:
        num_bytes, exchange = self._waiting.popleft()
        exchange.wait()
        self._bytes -= num_bytes


class _First:
    """The first error, which is raised at the end: the others go on exchanging, and would wait for this rank."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error of the block, and go on."""
        try:
            yield
        except CollectiveError:
            raise
        except Exception as error:
            self.error = self.error or error


@dataclass
class Writer:
    """Writes this rank's windows; see `write_windows`.

    Attributes:
        folder: where the files are.
        places: by file, the files on disk that it consists of; those of this rank are made here.
        makes: whether these are made here, and not by rank 0.
        extents: what has been written, by file on disk.
    """

    folder: Path
    places: Mapping[str, Sequence[tuple[int, Stretch]]]
    makes: bool
    extents: dict[str, list[Extent]] = field(default_factory=dict)
    _opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _at: tuple[Stretch, int] | None = None

    def write(self, window: Window, data: Tensor) -> None:
        """Write a window; the files are synced as the next one is opened, or by `close`."""
        stretch = next(each for _, each in self.places[window.file.name] if each.start <= window.start < each.stop)
        path = self.folder / stretch.path
        if self._at is None or self._at[0] != stretch:
            self.close()
            if self.makes:
                disk.write_file(path, b"", stretch.stop - stretch.start, syncs=False)
            self._at = stretch, self._opened.enter_context(disk.rows_file(path))
        view = memoryview(data.numpy())  # type: ignore[arg-type]
        offset = window.start - stretch.start
        disk.write_at(self._at[1], path, view, offset)
        self.extents.setdefault(stretch.path.name, []).append(Extent(offset, len(view), zlib.crc32(view)))

    def close(self) -> None:
        """Sync what has been written."""
        self._at = None
        self._opened.close()


@contextlib.contextmanager
def _breaking_off(world: World) -> Iterator[None]:
    """End the exchange on all ranks, should one not be able to go on: the others would wait for it."""
    try:
        yield
    except CollectiveError:
        raise
    except Exception as error:
        if world.holders.num_ranks == 1:
            raise
        world.holders.break_off()
        raise CollectiveError(f"rank {world.rank} cannot go on exchanging rows of files: {error!r}") from error


def write_windows(
    windows: Sequence[Sequence[Window]],
    pieces: Pieces,
    sources: Mapping[str, Source],
    writer: Writer,
    world: World,
) -> None:
    """Write windows of files; called together by the ranks that hold a model once.

    Besides what it holds, a rank needs about four times `CHUNK_BYTES`.

    Args:
        windows: by rank, the same on every rank.
        pieces: of each tensor.
        sources: by name, this rank's part.
        writer: gets this rank's windows.
        world: the ranks.

    Raises:
        Exception: what could not be done on this rank, once all have sent what the others wait for.
    """
    failed = _First()
    with _breaking_off(world):
        _exchange_to_write(windows, _Ranks(sources, pieces, world), writer, world, failed)
    with failed.noting():
        writer.close()
    if failed.error is not None:
        raise failed.error


def _exchange_to_write(
    windows: Sequence[Sequence[Window]], ranks: _Ranks, writer: Writer, world: World, failed: _First
) -> None:
    for number in range(max(map(len, windows), default=0)):
        mail = world.holders.mail("rows for files", "windows of files", WRITING_S)
        written = [_Written(window, ranks, mail) for window in windows[ranks.rank][number : number + 1]]
        leaving = _InFlight(CHUNK_BYTES)  # may be waited for: all ranks expect their messages before they send any
        for peer in ranks.peers:
            for window in windows[peer][number : number + 1]:
                own = ranks.held(ranks.parts(window), ranks.rank, peer)
                if own:
                    message = _message([ranks.memory.view(part).to(tensor.dtype) for tensor, part in own])
                    leaving.add(len(message), mail.send(message, peer))
        for each in written:
            each.receive()
        leaving.wait()
        with failed.noting():
            for each in written if failed.error is None else ():
                writer.write(each.window, each.complete())


class _Written:
    """A window that this rank writes, of what others send and of what it holds itself.

    Args:
        window: which.
        ranks: all of them.
        mail: by which it comes.
    """

    def __init__(self, window: Window, ranks: _Ranks, mail: Mail) -> None:
        self.window, self._ranks = window, ranks
        self._bytes = _Bytes(window, torch.empty(window.stop - window.start, dtype=torch.uint8, device="cpu"))
        self._parts = ranks.parts(window)
        self._arriving: list[tuple[Exchange, Tensor, _Parts]] = []
        for peer in ranks.peers:
            parts = ranks.held(self._parts, peer, ranks.rank)
            if parts:
                room = torch.empty(_num_bytes(parts), dtype=torch.uint8, device="cpu")
                self._arriving.append((mail.receive(room, peer), room, parts))

    def receive(self) -> None:
        """Wait for what others have sent, and put everything in its place."""
        for tensor, part in self._ranks.held(self._parts, self._ranks.rank, self._ranks.rank):
            self._bytes.put(tensor, part, self._ranks.memory.view(part))
        for exchange, room, parts in self._arriving:
            exchange.wait()
            for tensor, part, values in _split(room, parts):
                self._bytes.put(tensor, part, values)

    def complete(self) -> Tensor:
        """All bytes of the window, with the file's header where it begins."""
        header = bytearray(self.window.file.header[self.window.start : self.window.stop])
        if header:
            self._bytes.data[: len(header)].copy_(torch.frombuffer(header, dtype=torch.uint8))
        if self._bytes.filled + len(header) != len(self._bytes.data):
            name, start = self.window.file.name, self.window.start
            raise CheckpointError(f"{name}: bytes from {start} on were given twice or not at all")
        return self._bytes.data


def read_windows(
    windows: Sequence[Sequence[Window]], pieces: Pieces, sources: Mapping[str, Source], folder: Path, world: World
) -> None:
    """Read windows of files, and give every rank what it holds of them; see `write_windows`."""
    failed = _First()
    with _breaking_off(world):
        ranks = _Ranks(sources, pieces, world)
        _exchange_what_is_read(windows, ranks, folder, world, failed)
        ranks.memory.put_back()
    if failed.error is not None:
        raise failed.error


def _exchange_what_is_read(
    windows: Sequence[Sequence[Window]], ranks: _Ranks, folder: Path, world: World, failed: _First
) -> None:
    with contextlib.ExitStack() as stack:
        opened: dict[str, StoredFile] = {}
        for number in range(max(map(len, windows), default=0)):
            mail = world.holders.mail("rows from files", "windows of files")
            leaving = _InFlight()
            for window in windows[ranks.rank][number : number + 1]:
                ends = [tensor.offset + stop * tensor.dtype.itemsize for tensor, _, stop in window.tensors()]
                if not ends:
                    continue  # the end of an element that the window before has
                data = bytearray(max(ends) - window.start)
                with failed.noting():
                    if window.file.name not in opened:
                        opened[window.file.name] = stack.enter_context(stored(folder / window.file.name))
                    opened[window.file.name].read_into(data, window.start)
                read = _Bytes(window, torch.frombuffer(data, dtype=torch.uint8))
                parts = ranks.parts(window)
                for peer in ranks.peers:
                    theirs = ranks.held(parts, peer)
                    if theirs:
                        message = _message([read.view(tensor, part) for tensor, part in theirs])
                        leaving.add(len(message), mail.send(message, peer))
                for tensor, part in ranks.held(parts, ranks.rank):
                    ranks.memory.view(part).copy_(read.view(tensor, part))
            for peer in ranks.peers:
                for window in windows[peer][number : number + 1]:
                    own = ranks.held(ranks.parts(window), ranks.rank)
                    if own:
                        room = torch.empty(_num_bytes(own), dtype=torch.uint8, device="cpu")
                        mail.receive(room, peer).wait()
                        for _, part, values in _split(room, own):
                            ranks.memory.view(part).copy_(values)
            leaving.wait()
