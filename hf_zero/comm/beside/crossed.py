"""Ranks that wait for each other for good: found in seconds, and not at the time limit.

[Note: crossed waits] All ranks make the same exchanges in the same order. Where they do not, because one has no image in its
batch and leaves a part of the model out, or has a batch less, each waits for what the other will never send. A thread looks
every second whether the program is still in the same wait. After a few, it asks the services of the ranks that take part:

- which exchange of this kind they have begun under the same number: if it is of another unit, they are out of step;
- and what they wait for themselves, here or in a call of torch's own (a barrier): if neither has begun what the other waits
  for, and that is so at two looks, nobody goes on.

Then all of these ranks are told, and each breaks its group off where it waits in it, and raises the same error. A rank that
merely computes for long looks like neither. Nothing is asked as long as no wait takes seconds. On a device, nobody waits in an
exchange: see [Note: stuck on a device].
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

from hf_zero.comm.beside import waits
from hf_zero.comm.beside.in_torch import torch_waits
from hf_zero.comm.beside.progress import numbers_in_groups, unit_begun
from hf_zero.comm.beside.service import Answer, Peers, answer
from hf_zero.comm.beside.waits import ADVICE, FEWER, Place
from hf_zero.errors import CollectiveError
from hf_zero.host import beside

_PLACE, _VERDICT = "what it waits for", "who waits for whom"
LOOKS_EVERY_S = 1.0
PATIENCE = 5  # looks that find the same wait, before anybody is asked

_peers: Peers | None = None
_thread: threading.Thread | None = None


def watch(peers: Peers) -> None:
    """Look for crossed waits from now on."""
    global _peers, _thread
    answer(_PLACE, _answer_place)
    answer(_VERDICT, _answer_verdict)
    _peers = peers.with_sockets_of_its_own(_peers)
    if _thread is None or not _thread.is_alive():
        ended = threading.Event()
        _thread = beside.start("hf_zero crossed waits", lambda: _run(ended), ended.set)


def _run(ended: threading.Event) -> None:
    looking = _Looking()
    while not ended.wait(LOOKS_EVERY_S):
        looking.look()


class _Looking:
    """Looks at what the program waits for; keeps nothing of it alive."""

    def __init__(self) -> None:
        self._last: weakref.ref[waits.Waiting] | None = None
        self._looks = 0  # that have found it since
        self._seen: dict[int, Place] = {}  # what peers waited for at the last one, for what this rank has not begun

    def look(self) -> None:
        """Ask the others, if it has waited for long."""
        waiting = waits.of_program()
        if waiting is not None and waits.verdict_on(waiting.place) is not None:
            _break_off(waiting)  # a peer's broken connections may be none that this wait depends on
        elif waiting is None or self._last is None or waiting is not self._last():
            self._last, self._looks, self._seen = None if waiting is None else weakref.ref(waiting), 0, {}
        elif self._looks < PATIENCE:
            self._looks += 1
        else:
            self._seen = _look(waiting, self._seen)


def _look(waiting: waits.Waiting, seen: dict[int, Place]) -> dict[int, Place]:
    """Ask the other ranks of an exchange; what they wait for that this rank has not begun."""
    place, peers, found = waiting.place, _peers, {}
    if place is None or peers is None or waiting.break_off is None:
        return {}
    for rank in [rank for rank in waiting.ranks if rank in peers.others]:
        with contextlib.suppress(CollectiveError):  # it is gone, and the wait will fail
            (unit, theirs), _ = peers.ask(rank, _PLACE, (place, peers.own))
            ours = f"rank {peers.own} is at {place}, but rank {rank} is at"
            if place.kind in waits.ORDERED_KINDS and unit not in (None, place.unit):
                _end(waiting, peers, f"{ours} {place.kind} of {unit!r}: {ADVICE}")
                return {}
            if unit is None and theirs is not None and not _has_begun(theirs):
                if seen.get(rank) == theirs:
                    _end(waiting, peers, f"{ours} {theirs}, and each waits for the other: {FEWER}")
                    return {}
                found[rank] = theirs
    return found


def _end(waiting: waits.Waiting, peers: Peers, verdict: str) -> None:
    """Let all ranks of an exchange raise."""
    assert waiting.place is not None
    group = waiting.place.group
    for rank in [rank for rank in waiting.ranks if rank in peers.others]:
        with contextlib.suppress(CollectiveError):
            peers.ask(rank, _VERDICT, (group, verdict))
    waits.tell(group, verdict)
    _break_off(waiting)


def _break_off(waiting: waits.Waiting) -> None:
    break_off = waiting.break_off
    if break_off is not None and waits.of_program() is waiting:
        break_off()


def _has_begun(place: Place) -> bool:
    if place.unit:
        return unit_begun(place) is not None
    return numbers_in_groups().get(place.group, place.number) >= place.number


def _answer_place(question: Any) -> Answer:
    """The unit of the exchange that this rank has begun at a place of the asker's, and what it waits for."""
    place, asker = question
    waiting = waits.of_program()
    return (unit_begun(place), _in_torch(asker) if waiting is None else waiting.place), None


def _in_torch(asker: int) -> Place | None:
    """The call in which the program waits, if that is one of torch's that ends only when the asker has come."""
    waits_in = torch_waits()
    if waits_in is None or not waits_in.needs(asker):
        return None
    return Place(waits_in.group, f"torch.distributed.{waits_in.name}", waits_in.number, "")


def _answer_verdict(told: Any) -> Answer:
    waits.tell(*told)
    return None, None
