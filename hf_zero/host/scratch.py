"""Memory on disk: a file without a name, mapped as tensors for everybody, and read and written past the page cache in steps.

[Note: scratch] A scratch file has no name in its folder, so the system frees it with its process, however that ends; it is
never a checkpoint. Its space is taken when it is made: a full disk shows before training is harmed. Whoever reads or writes
one of its tensors (a checkpoint, a user's edit, a gather) goes through the mapping, of which the system keeps in memory what
fits. A step streams through all of it, which no cache would help: it reads and writes positions of the file directly. The
kernel keeps both views of a file alike, as long as nobody uses them at the same time.

[Note: alignment] Direct reads and writes need positions, lengths and memory in multiples of the disk's blocks. All places in
a file are therefore multiples of `ALIGNMENT`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.errors import OffloadError
from hf_zero.layout import row_major

ALIGNMENT = 4096
_REQUEST_BYTES = 8 * 2**20  # of one read or write; several are under way at a time
_NUM_THREADS = 4
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")


def aligned(num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole blocks."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Scratch:
    """A file without a name, of a fixed size, all of it mapped.

    Args:
        folder: on a disk; exists.
        num_bytes: its size, which is taken at once; at least 1.

    Attributes:
        is_direct: reads and writes bypass the page cache; some file systems cannot.

    Raises:
        OffloadError: the folder cannot be written to, is in memory, or has too little space.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.num_bytes = aligned(num_bytes)
        self._file = _make(folder, self.num_bytes)
        fd = self._file.fileno()
        self._fd, self.is_direct = fd, False
        with contextlib.suppress(OSError, AttributeError):  # Linux; not every file system
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT)
            self.is_direct = True
            weakref.finalize(self, os.close, self._fd)
        self._map = mmap.mmap(fd, self.num_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def __deepcopy__(self, memo: dict[int, object]) -> Scratch:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor at a place; it keeps the file alive."""
        alias = self._bytes.untyped_storage()[offset : offset + math.prod(shape) * dtype.itemsize]
        return torch.empty(0, dtype=dtype, device="cpu").set_(alias, 0, shape, row_major(shape))

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`."""
        _move(os.preadv, self._fd, offset, buffer, "read")
        self._forget(offset, len(buffer))

    def write(self, offset: int, buffer: memoryview) -> None:
        """Write all of `buffer`."""
        _move(os.pwritev, self._fd, offset, buffer, "write")
        self._forget(offset, len(buffer))

    def _forget(self, offset: int, num_bytes: int) -> None:
        if not self.is_direct:
            os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def release(self, offset: int, num_bytes: int) -> None:
        """Take pages that were read or written through tensors out of this process; their values stay."""
        self._map.madvise(mmap.MADV_DONTNEED, offset, aligned(num_bytes))


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor lies in a scratch file.

    Attributes:
        file: that holds it.
        offset: in bytes, from its start.
        tensor: the same, mapped.
    """

    file: Scratch
    offset: int
    tensor: Tensor

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Take pages that were read or written through `tensor` out of this process; their values stay.

        Args:
            start: the first element, at a whole page.
            stop: the one behind the last; None: the end.
        """
        itemsize = self.tensor.dtype.itemsize
        num_bytes = ((self.tensor.numel() if stop is None else stop) - start) * itemsize
        if num_bytes:
            self.file.release(self.offset + start * itemsize, num_bytes)


def make_places(path: str, wanted: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> list[Place]:
    """Room on a disk for tensors, one behind the other in a file.

    Args:
        path: of the folder; made if it is missing.
        wanted: shapes and dtypes.

    Raises:
        OffloadError: the folder cannot be made or written to, is in memory, or there is no room.
    """
    tensors = list(wanted)
    sizes = [aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in tensors]
    ends = list(itertools.accumulate(sizes, initial=0))
    file = Scratch(_folder(path), max(ends[-1], 1))
    return [
        Place(file, offset, file.tensor(offset, shape, dtype))
        for offset, (shape, dtype) in zip(ends[:-1], tensors, strict=True)
    ]


def _folder(path: str) -> Path:
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OffloadError(f"offload.path {path!r} cannot be made: {error.strerror or error}") from error
    return folder


def _make(folder: Path, num_bytes: int) -> Any:
    kind = _kind_of_file_system(folder)
    if kind in _IN_MEMORY:
        raise OffloadError(
            f"offload.path {str(folder)!r} is on {kind}, which is memory, so nothing would be saved: name a folder on a disk"
        )
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (lives as long as this)
    except OSError as error:
        raise OffloadError(f"offload.path {str(folder)!r} cannot be written to: {error.strerror or error}") from error
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        free = os.statvfs(folder)
        raise OffloadError(
            f"offload.path {str(folder)!r} has no room for {num_bytes:,} bytes of this rank "
            f"({free.f_bavail * free.f_frsize:,} are free now): {error.strerror or error}"
        ) from error
    return file


def _kind_of_file_system(folder: Path) -> str:
    """The name of the file system that holds a folder ("ext4"); empty where the system does not say."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        real = folder.resolve()
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            mount = Path(left.split()[4].encode().decode("unicode_escape"))
            if real.is_relative_to(mount) and len(mount.parts) >= best:
                best, kind = len(mount.parts), right.split()[0]
    return kind


def _move(call: Any, fd: int, offset: int, buffer: memoryview, what: str) -> None:
    done = 0
    while done < len(buffer):
        try:
            moved = call(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise OffloadError(f"the disk cannot {what} offloaded states: {error.strerror or error}") from error
        if moved == 0:
            raise OffloadError(f"the disk cannot {what} offloaded states: the file ends at {offset + done:,}")
        done += moved


class Transfers:
    """Threads that read and write scratch files beside the computation."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "hf_zero-offload")

    def start(self, way: str, parts: Iterable[tuple[Scratch, int, memoryview]]) -> list[Future[None]]:
        """Begin to read or write.

        Args:
            way: "read" or "write".
            parts: files, places in them, and memory at multiples of `ALIGNMENT`.
        """
        return [
            self._threads.submit(getattr(file, way), offset + start, memory[start : start + _REQUEST_BYTES])
            for file, offset, memory in parts
            for start in range(0, len(memory), _REQUEST_BYTES)
        ]


class StepMemory:
    """Memory that a step computes in: at multiples of `ALIGNMENT`, of this process alone."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = aligned(num_bytes)
        try:
            self._memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise OffloadError(
                f"there is no memory for a slot of {num_bytes:,} bytes (offload.slot_bytes): {error}"
            ) from error
        self._view = memoryview(self._memory)
        self._storage = torch.frombuffer(self._memory, dtype=torch.uint8).untyped_storage()

    def memory(self, offset: int, num_bytes: int) -> memoryview:
        """A part of it, for a transfer."""
        return self._view[offset : offset + num_bytes]

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in it."""
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            self._storage, offset // dtype.itemsize, shape, row_major(shape)
        )
