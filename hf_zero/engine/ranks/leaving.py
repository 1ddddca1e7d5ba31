"""The end of a rank's program: it goes on giving rows to ranks that have not come to the end of theirs. See [Note: alone].

[Note: leaving] Rank 0 may save alone at the very end, when the others have nothing left to do. So a rank that is about to
exit, or to destroy the process group, stays until the others are about to do so, too, or are gone, or wait for it in an
exchange, in vain. After it has destroyed the group, it goes on, and stays once more at its exit: rank 0 may save in between
(`accelerator.end_training()` destroys the group). A rank that ends by an error does not stay. A `main()` drops its model and
its optimizer as it returns: what is dropped when no function of the program does anything more is kept until the exit. The
lines of a module may go on after `main()`, and call it again: so it is kept until the ranks meet to make another model, since
none of them can ask any more then. What these lines drop themselves (`del model`, `gc.collect()`) is gone.
"""

from __future__ import annotations

import atexit
import dis
import gc
import sys
import weakref
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from hf_zero.changes import Changes
from hf_zero.comm.groups.process_groups import default_group

_PACKAGE = str(Path(__file__).resolve().parents[2])

_LAUNCHERS = (
    "runpy.",
    "multiprocessing.",
    "torch.multiprocessing.",
    "torch.distributed.elastic.",
    "absl.app.",
    "click.",
    "typer.",
    "fire.",
    "hydra.",
)
_DOES_NOTHING = ("CACHE", "NOP", "POP_TOP", "LOAD_CONST")

Target = TypeVar("Target")


class Leaves(IntEnum):
    """What a process is about to leave, or has left."""

    NOTHING = 0
    GROUP = 1
    PROGRAM = 2


Leaver = Callable[[Leaves], Callable[[], None] | None]

_changes = Changes()
_leavers: list[Leaver] = []
_without_group: list[Leaver] = []  # that have left it, and not the program yet
_is_collecting = False  # garbage


class Lasting(Generic[Target]):
    """A weak reference, called for its target, that may be made to last."""

    def __init__(self, target: Target) -> None:
        self._target, self._kept = weakref.ref(target), list[Target]()

    def __call__(self) -> Target | None:
        """The target, as long as it lives."""
        return self._kept[0] if self._kept else self._target()

    def keep(self, target: Target) -> None:
        """Let the target live, which is about to be gone."""
        self._kept = [target]

    def let_go(self) -> None:
        """Let it be gone."""
        self._kept = []


def before_leaving(leave: Leaver) -> None:
    """When this process is about to destroy its default group, and to exit, call `leave`, and what it returns, which stays.

    Not if it does so by an error. Everything leaves before the first stays: ranks may have come in different orders.
    """
    _leavers.append(leave)
    if not _changes:
        atexit.register(_at_exit)
        gc.callbacks.append(_note_collection)
        _changes.keep()
        _changes.wrap(dist, "destroy_process_group", _destroy)


def _at_exit() -> None:
    if getattr(sys, "last_value", None) is None:  # the error that ended the program
        _stay(Leaves.PROGRAM)


def _destroy(original: Callable[..., None], group: Any = None) -> None:
    if group in (None, default_group()) and sys.exc_info()[0] is None:
        _stay(Leaves.GROUP)
    original(group)


def _stay(leaves: Leaves) -> None:
    leaving = [*(_without_group if leaves is Leaves.PROGRAM else ()), *_leavers]
    _without_group.extend(_leavers)
    _leavers.clear()
    stays = [leave(leaves) for leave in reversed(leaving)]
    for stay in stays:
        if stay is not None:
            stay()


def only_returns() -> bool:
    """Whether no function of the program does more than return, on this thread: see above. Launchers do not count."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_ours = frame.f_code.co_filename.startswith((_PACKAGE, "<frozen"))
        if not (is_ours or _is_launcher(frame) or _has_called_from_module(frame) or _is_at_its_end(frame)):
            return False
        frame = frame.f_back
    return True


def _note_collection(phase: str, _: dict[str, int]) -> None:
    global _is_collecting
    _is_collecting = phase == "start"


def _has_called_from_module(frame: FrameType) -> bool:
    """Whether a line of a module has called what returns now, and not the garbage collector."""
    if frame.f_code.co_name != "<module>" or _is_collecting:
        return False
    at = frame.f_lasti
    while at > 0 and dis.opname[frame.f_code.co_code[at]] == "CACHE":  # beside the instruction that is under way
        at -= 2
    return dis.opname[frame.f_code.co_code[at]].startswith("CALL")


def _is_launcher(frame: FrameType) -> bool:
    name = f"{frame.f_globals.get('__name__', '')}."
    return name.startswith(_LAUNCHERS)


def _is_at_its_end(frame: FrameType) -> bool:
    """Whether the call that a function is in is the last thing that it does: `main_worker(args)` at the end of `main`."""
    follow = frame.f_lasti + 1
    for step in dis.get_instructions(frame.f_code):  # jumps go forward
        if step.offset < follow:
            continue
        if step.opname == "JUMP_FORWARD":
            follow = step.argval
        elif step.opname not in _DOES_NOTHING:
            return step.opname.startswith("RETURN_")
    return False
