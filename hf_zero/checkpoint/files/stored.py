"""Files of tensors as they lie on disk: in one file, or in several parts that follow each other.

[Note: parts] Where several ranks must not write one file (`checkpoint_files: per_writer`), a large `NAME` is written as
`NAME.00001-of-00012` and so on, whose bytes follow each other: `cat NAME.*` is the file itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hf_zero.errors import CheckpointError

_PART = re.compile(r"(?P<name>.+)\.(?P<number>\d{5,})-of-(?P<count>\d{5,})")


@dataclass(frozen=True)
class Stretch:
    """A range of bytes of a file that has a file on disk of its own.

    Attributes:
        path: of the file on disk.
        start: its first byte in the whole.
        stop: its last plus one.
    """

    path: Path
    start: int
    stop: int


def part_name(name: str, number: int, count: int) -> str:
    """The name of a part, counted from 0."""
    return f"{name}.{number + 1:05d}-of-{count:05d}"


def whole_name(name: str) -> str:
    """The name of the file that a file is a part of; its own if it is none."""
    found = _PART.fullmatch(name)
    return name if found is None else found["name"]


def is_stored(path: Path) -> bool:
    """Whether a file is there, or parts of it."""
    return any(forms_of(path))


def forms_of(path: Path) -> list[Path]:
    """The files on disk that hold a file: itself, or its parts; both only where an older one was left beside a newer one."""
    return [*([path] if path.is_file() else []), *_parts(path)]


def _parts(path: Path) -> list[Path]:
    found = path.parent.glob(f"{path.name}.*-of-*")
    return sorted((each for each in found if whole_name(each.name) == path.name), key=lambda each: each.name)


class StoredFile:
    """A file to read from; its parts are opened when they are needed. Made by `stored`.

    Args:
        path: of the whole.
        stretches: what it consists of, in order.
    """

    def __init__(self, path: Path, stretches: Sequence[Stretch], files: ExitStack) -> None:
        self.path, self.size = path, stretches[-1].stop
        self._stretches, self._files = stretches, files
        self._opened: dict[Path, int] = {}

    def read_into(self, buffer: bytearray | memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        Raises:
            CheckpointError: the file ends before.
        """
        view = memoryview(buffer)
        for stretch in self._stretches:
            while view and stretch.start <= offset < stretch.stop:
                count = os.preadv(self._fd(stretch.path), [view[: stretch.stop - offset]], offset - stretch.start)
                if not count:
                    break
                view, offset = view[count:], offset + count
        if view:
            raise CheckpointError(
                f"{self.path} ends at byte {offset}: it is truncated; take an older checkpoint, or copy it again"
            )

    def _fd(self, path: Path) -> int:
        if path not in self._opened:
            fd = self._opened[path] = os.open(path, os.O_RDONLY)
            self._files.callback(os.close, fd)
        return self._opened[path]


@contextmanager
def stored(path: Path) -> Iterator[StoredFile]:
    """A file, or the parts that it consists of, for reading.

    Raises:
        CheckpointError: it is missing, or a part of it is, or it is there as one file and in parts.
    """
    with ExitStack() as files:
        yield StoredFile(path, _stretches(path), files)


def _stretches(path: Path) -> list[Stretch]:
    parts = _parts(path)
    if path.is_file():
        if parts:
            raise CheckpointError(
                f"{path} is there as one file and in parts ({parts[0].name}): remove the older of them"
            )
        return [Stretch(path, 0, path.stat().st_size)]
    if not parts:
        raise CheckpointError(f"{path} is missing: take another checkpoint, or copy it here")
    last = _PART.fullmatch(parts[-1].name)
    assert last is not None
    count, found, start = int(last["count"]), list[Stretch](), 0
    for number in range(count):
        part = path.parent / part_name(path.name, number, count)
        if part not in parts:
            raise CheckpointError(f"{part} is missing: copy it here from the host that wrote it")
        found.append(Stretch(part, start, start + part.stat().st_size))
        start = found[-1].stop
    if len(parts) != count:
        raise CheckpointError(
            f"{path}: its parts belong to two files, as {parts[0].name} and {parts[-1].name}: remove the older"
        )
    return found
