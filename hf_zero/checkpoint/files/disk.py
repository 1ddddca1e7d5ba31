"""Every change that a checkpoint makes on disk, one function each, so that a test can end the process at any of them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

on_change: Callable[[str, Path], None] | None = None  # called before each; for fault injection


def _note(what: str, path: Path) -> None:
    if on_change is not None:
        on_change(what, path)


def make_folder(path: Path) -> None:
    """Make a folder that must not be there yet."""
    _note("make_folder", path)
    path.mkdir()


def write_file(path: Path, data: bytes, size: int | None = None, *, syncs: bool = True) -> None:
    """Write a file and sync it to disk.

    Args:
        path: replaced if it exists.
        data: its beginning.
        size: its length; what follows `data` is written later by `write_at`, into blocks that are reserved now.
        syncs: False for a file of a checkpoint, which is synced when that is committed.
    """
    _note("write_file", path)
    with path.open("wb") as file:
        file.write(data)
        if size is not None and size > len(data):
            file.flush()
            _reserve(file.fileno(), size)
        file.flush()
        if syncs:
            os.fsync(file.fileno())


def _reserve(fd: int, size: int) -> None:
    """Extend a file, reserving disk space if the file system can, so that a full disk is found before rows are written.

    By the system's own call: where a file system cannot, `os.posix_fallocate` writes a byte into every block instead, which
    for a checkpoint on a network takes minutes.
    """
    reserve = getattr(_LIBC, "fallocate64", None) or getattr(_LIBC, "fallocate", None)
    while reserve is not None and reserve(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            reserve = None
        elif code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    if reserve is None:
        os.truncate(fd, size)


@contextlib.contextmanager
def rows_file(path: Path) -> Iterator[int]:
    """A descriptor of a file that `write_file` has made, for `write_at`; on exit, what was written is synced to disk."""
    fd = os.open(path, os.O_WRONLY)
    try:
        yield fd
        _note("sync_rows", path)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_at(fd: int, path: Path, data: memoryview, offset: int) -> None:
    """Write all of `data`, starting at byte `offset` of the file."""
    _note("write_at", path)
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def sync_file(path: Path) -> None:
    """Sync a file that was written elsewhere to disk."""
    _note("sync_file", path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    _note("sync_folder", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(path: Path, new: Path) -> None:
    """Give a file or folder its new name, in one step."""
    _note("rename", path)
    os.replace(path, new)


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it."""
    _note("remove_tree", path)
    shutil.rmtree(path)


def remove_file(path: Path) -> None:
    """Remove a file, if it is there."""
    _note("remove_file", path)
    path.unlink(missing_ok=True)
