"""The end of a rank's program: it goes on giving rows to ranks that have not come to the end of theirs. See [Note: alone].

[Note: leaving] Rank 0 may save alone at the very end, when the others have nothing left to do. So a rank that is about to
exit, or to destroy the process group, stays until the others are about to do so, too, or are gone, or wait for it in an
exchange, in vain. A rank that ends by an error does not stay. A `main()` drops its model and its optimizer as it returns: what
is dropped when no function of the program does anything more is kept until the exit.
"""

from __future__ import annotations

import atexit
import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

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

_changes = Changes()
_leavers: list[Callable[[], Callable[[], None] | None]] = []


def before_leaving(leave: Callable[[], Callable[[], None] | None]) -> None:
    """When this process is about to exit or to destroy its default group, call `leave()`, and what it returns, which stays.

    Not if it does so by an error. Everything leaves before the first stays: ranks may have come in different orders.
    """
    if not _leavers:
        atexit.register(_at_exit)
    _leavers.append(leave)
    if not _changes:
        _changes.keep()
        _changes.wrap(dist, "destroy_process_group", _destroy)


def _at_exit() -> None:
    if getattr(sys, "last_value", None) is None:  # the error that ended the program
        _stay()


def _destroy(original: Callable[..., None], group: Any = None) -> None:
    if group in (None, default_group()) and sys.exc_info()[0] is None:
        _stay()
    original(group)


def _stay() -> None:
    while _leavers:
        stays = [leave() for leave in reversed(_leavers)]
        _leavers.clear()
        for stay in stays:
            if stay is not None:
                stay()


def only_returns() -> bool:
    """Whether no function of the program does more than return, on this thread: modules' code and launchers do not count."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_launcher = code.co_filename.startswith((_PACKAGE, "<frozen")) or _is_launcher(frame)
        if code.co_name != "<module>" and not is_launcher and not _is_at_its_end(frame):
            return False
        frame = frame.f_back
    return True


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
