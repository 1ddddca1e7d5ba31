"""Exchanges that are stuck on a device, where nothing can be raised: a thread says which, and which ranks have not come.

[Note: stuck on a device] An exchange on a device makes the compute stream wait, and not the process, which runs ahead until it
needs a result, and then waits somewhere inside torch. So an event is put behind each exchange, and a thread looks at the first
that has not passed. After a quarter of the time limit it writes into the program's store what this rank waits for; after half
of it, it reads what the others have written, and warns of who is missing; at the limit it logs that as an error. The watchdog
of the exchange's own process group ends the process later. But that of the program's group, where exchanges of the program
may be stuck behind this one, knows the program's limit alone: so the warning comes long before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hf_zero.comm.beside.store import Notes
from hf_zero.comm.exchange import told
from hf_zero.comm.groups.process_groups import default_group
from hf_zero.host import beside

logger = logging.getLogger(__name__)

_LOOKS_EVERY_S = 1.0
_WRITES_AFTER, _WARNS_AFTER = 0.25, 0.5  # of the time limit
_GONE = (RuntimeError, ValueError)  # the process that keeps the store is gone, or the program's group is


@dataclass(frozen=True)
class _Mark:
    """An event behind an exchange.

    Attributes:
        event: passes when the exchange is complete.
        what: the exchange.
        since: when the event was recorded, by the monotonic clock.
        timeout_s: that the exchange may take.
    """

    event: torch.Event
    what: str
    since: float
    timeout_s: float


class Watch:
    """The exchanges of a process group on a device.

    Args:
        group: its name, the same on all of its ranks and on no others.
        ranks: of the group, as they are numbered in the program.
        own: this rank.
        device: where they run.
    """

    def __init__(self, group: str, ranks: Sequence[int], own: int, device: torch.device) -> None:
        self._notes = Notes(f"watch {group}")
        self._ranks, self._own, self._device = ranks, own, device
        self._marks: deque[_Mark] = deque()
        self._passed_at = 0.0  # when the mark before the first was seen to have passed
        self._written: str | None = None
        self._told = 0.0  # what part of the limit was over, when something was last logged of the first mark
        self._thread: threading.Thread | None = None

    def follow(self, what: str, timeout_s: float) -> None:
        """The current stream has just been made to wait for an exchange.

        Args:
            what: the exchange, for errors.
            timeout_s: that it may take, from the time that the one before it was complete.
        """
        event = torch.Event(self._device)
        event.record()
        self._marks.append(_Mark(event, what, time.monotonic(), timeout_s))
        if self._thread is None:
            ended = threading.Event()
            self._thread = beside.start("hf_zero watch", partial(_look, weakref.ref(self), ended), ended.set)

    def look(self) -> None:
        """Forget what has passed, and tell of the first exchange that has not, if it is late."""
        if default_group() is None:  # the program has ended it, and with it its exchanges
            self._marks.clear()
        while self._marks and self._marks[0].event.query():
            self._marks.popleft()
            self._passed_at = time.monotonic()
            self._write(None)
            self._told = 0.0
        if not self._marks or self._told == 1:
            return
        mark = self._marks[0]
        waited = (time.monotonic() - max(mark.since, self._passed_at)) / mark.timeout_s
        if waited > _WRITES_AFTER:
            self._write(_without_number(mark.what))
        if waited > 1:
            self._told = 1.0
            logger.error("%s", self._error_of(mark))
        elif waited > _WARNS_AFTER > self._told:
            self._told = _WARNS_AFTER
            logger.warning("%s", self._error_of(mark, _WARNS_AFTER))

    def _write(self, what: str | None) -> None:
        """Let the others know what this rank waits for; None: nothing any more."""
        if what == self._written:
            return
        with contextlib.suppress(*_GONE):
            if what is None:
                self._notes.remove(self._own)
            else:
                self._notes.write(self._own, what)
        self._written = what

    def _error_of(self, mark: _Mark, share: float = 1.0) -> str:
        what, cause, absent = _without_number(mark.what), "timed out on the device", list[int]()
        if share < 1:
            cause = f"has not timed out on the device yet, but will after {mark.timeout_s:g} s"
        try:
            for rank in self._ranks:
                theirs = what if rank == self._own else self._notes.read(rank)
                if theirs != what:
                    absent.append(rank)
                if theirs not in (what, None):
                    cause += f"; rank {rank} waits in {theirs}"
        except _GONE as error:
            cause += f"; the others cannot be asked: {error}"
        return told(RuntimeError(cause), mark.what, absent or None, share * mark.timeout_s)


def _without_number(what: str) -> str:
    """Ranks count the exchanges of all kinds together, and each one may interleave the kinds in its own way."""
    return what.split(" (exchange ")[0]


def _look(watch_of: weakref.ref[Watch], ended: threading.Event) -> None:
    while (watch := watch_of()) is not None:
        watch.look()
        del watch
        if ended.wait(_LOOKS_EVERY_S):
            return
