"""How far a run is, told by its processes to the one that started them, through a small file on each host.

A process that is killed says nothing any more, so each writes into memory that the file maps: what it last wrote stays.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FILE_VARIABLE, RUN_VARIABLE = "HF_ZERO_PROGRESS", "HF_ZERO_RUN"
_SLOT = struct.Struct("qqq")
_NUM_SLOTS = 1024
_NOTHING = -1


@dataclass(frozen=True)
class Progress:
    """Of one process.

    Attributes:
        step: optimizer steps that have begun, those before a resumed checkpoint included.
        saved: the step of the newest checkpoint that is whole; None if there is none.
    """

    step: int
    saved: int | None


def name_of_run() -> str | None:
    """What all starts of a run that heals have in common; None for any other run."""
    return os.environ.get(RUN_VARIABLE)


def make_file(path: Path) -> None:
    """Make the file, for the processes of this host."""
    path.write_bytes(_SLOT.pack(0, _NOTHING, 0) * _NUM_SLOTS)


def forget_steps(path: Path) -> None:
    """New processes begin: what the last have told of their steps is over, what they have saved is not."""
    with path.open("r+b") as file:
        slots = [_SLOT.pack(0, *saved) for _, *saved in _SLOT.iter_unpack(file.read())]
        file.seek(0)
        file.write(b"".join(slots))


def read(path: Path, local_rank: int) -> Progress:
    """What a process has told last."""
    with path.open("rb") as file:
        file.seek(local_rank * _SLOT.size)
        step, saved, _ = _SLOT.unpack(file.read(_SLOT.size))
    return Progress(step, None if saved == _NOTHING else saved)


class _Slot:
    """Where this process writes."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._at = (int(os.environ.get("LOCAL_RANK", "0")) % _NUM_SLOTS) * _SLOT.size
        _, self.saved, self.place = _SLOT.unpack_from(self._memory, self._at)  # by a process that was here before
        self.step = 0
        self.write()

    def write(self) -> None:
        _SLOT.pack_into(self._memory, self._at, self.step, self.saved, self.place)


@functools.cache
def _slot() -> _Slot | None:
    path = os.environ.get(FILE_VARIABLE)
    return None if path is None else _Slot(path)


def last_saved(folder: Path) -> int | None:
    """The step of the newest checkpoint that this run has saved, if it is in this folder, as this host knows."""
    slot = _slot()
    return None if slot is None or slot.saved == _NOTHING or slot.place != _place(folder) else slot.saved


def _place(folder: Path) -> int:
    return zlib.crc32(str(folder.absolute()).encode())


class _Steps:
    """Of the trainings that this process is in."""

    def __init__(self) -> None:
        self.begin(0, ())

    def begin(self, step: int, optimizers: Iterable[object]) -> None:
        self.first = self.newest = step
        self._first_of = weakref.WeakKeyDictionary(dict.fromkeys(optimizers, step))
        self._done = weakref.WeakKeyDictionary[object, weakref.WeakKeyDictionary[object, int]]()

    def note(self, optimizer: object, model: object) -> None:
        done = self._done.setdefault(optimizer, weakref.WeakKeyDictionary())
        done[model] = done.get(model, 0) + 1
        self.newest = max(self.newest, (0 if optimizer in self._first_of else self.first) + self.of(optimizer))

    def of(self, optimizer: object) -> int:
        done = max(self._done[optimizer].values()) if optimizer in self._done else 0
        return self._first_of.get(optimizer, 0) + done


_steps = _Steps()


def steps_of(optimizers: Iterable[object]) -> int:
    """Steps that the one of these has begun that has done most, with those before a checkpoint that was loaded into it."""
    return max(map(_steps.of, optimizers), default=0)


def note_step(optimizer: object, model: object) -> None:
    """A step of an optimizer begins, which several models hear of where it has parameters of several."""
    _steps.note(optimizer, model)
    _write_steps()


def note_begin(step: int, optimizers: Iterable[object] = ()) -> None:
    """A training begins, or goes on from a checkpoint of this step, with these optimizers if they are known."""
    _steps.begin(step, optimizers)
    _write_steps()


def _write_steps() -> None:
    slot = _slot()
    if slot is not None:
        slot.step = _steps.newest
        slot.write()


def note_saved(step: int, folder: Path) -> None:
    """A checkpoint in this folder is whole."""
    slot = _slot()
    if slot is not None:
        slot.saved, slot.place = step, _place(folder)
        slot.write()
