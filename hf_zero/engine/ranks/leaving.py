"""The end of a rank's program: it goes on giving rows to ranks that have not come to the end of theirs. See [Note: alone].

[Note: leaving] Rank 0 may save alone at the very end, when the others have nothing left to do. So a rank that is about to
exit, or to destroy the process group, stays until the others are about to do so, too, or are gone, or wait for it in an
exchange, in vain. A rank that ends by an error does not stay. A `main()` drops its model as it returns: what is dropped
when no function of the program runs any more is kept until the exit.
"""

from __future__ import annotations

import atexit
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from hf_zero.changes import Changes
from hf_zero.comm.groups import default_group

_PACKAGE = str(Path(__file__).resolve().parents[2])

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


def no_function_runs() -> bool:
    """Whether nothing but the code of modules runs on this thread: the functions that the program has called have returned."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_launcher = code.co_filename.startswith(_PACKAGE) or code.co_filename == runpy.__file__
        if code.co_name != "<module>" and not is_launcher and not code.co_filename.startswith("<frozen"):
            return False
        frame = frame.f_back
    return True
