"""How far this process is in what it does together with others: it tells whether a peer has passed a place in the program.

[Note: progress] All ranks run the same program. So the exchanges that a process has begun, counted by group and kind, say
how far it is: if a peer has begun one that this process has not, it will not come any more to where this process is now. A peer
that has begun no more may still come. Torch's default group counts too, since people wait in its barriers, and so do the groups
that it makes, in which ranks wait for each other. What is begun in those may be begun by other threads, so it counts only while
the program itself waits there. Meetings of all ranks before something that needs no exchange count too: see [Note: alone].
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from functools import partial

from hf_zero.comm.beside import waits
from hf_zero.comm.beside.in_torch import torch_waits
from hf_zero.comm.beside.waits import Place
from hf_zero.comm.groups import torch_groups
from hf_zero.comm.groups.process_groups import default_group

Progress = dict[str, dict[str, int]]

_REMEMBERED = 256  # exchanges of a kind
_MANY = sys.maxsize
_PROGRAM, _BEGUN, _GROUPS, _ENDED = "the program", "begun", "groups", "ended"


class Counts:
    """The exchanges that this process has begun in one group, by kind: how many, and what travels in the last few."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.by_kind: Counter[str] = Counter()
        self.units: defaultdict[str, deque[str]] = defaultdict(partial(deque, maxlen=_REMEMBERED))

    def unit_of(self, kind: str, number: int) -> str | None:
        """What travels in an exchange; None: it has not begun, or is long past."""
        units, back = list(self.units.get(kind, ())), self.by_kind[kind] - number
        return units[-1 - back] if 0 <= back < len(units) else None


class _Program:
    """What is counted under one default process group."""

    def __init__(self, group: object = None) -> None:
        self.group = (lambda: None) if group is None else weakref.ref(group)
        self.counted: list[weakref.ref[Counts]] = []


_program = _Program()


def counts_of(group: str) -> Counts:
    """New counts of a group of the program that is running now."""
    global _program
    default = default_group()
    if default is not None and _program.group() is not default:
        _program = _Program(default)
    waits.forget(group)
    counts = Counts(group)
    _program.counted.append(weakref.ref(counts))
    return counts


def leave_out(counts: Counts) -> None:
    """Count a group no more: its exchanges run beside the program, on a thread of their own."""
    _program.counted = [each for each in _program.counted if each() not in (counts, None)]


def progress() -> Progress:
    """How far this process is, by group and kind; may be called on any thread."""
    group = default_group()
    has_ended = group is None or _program.group() is not group
    found = {_PROGRAM: {_ENDED: 1}}
    if group is not None and not has_ended:
        begun, groups = torch_groups.sequence_number(group), torch_groups.num_groups_begun()
        found = {_PROGRAM: {_BEGUN: begun, _GROUPS: groups, _ENDED: 0}}
    for counts in [each() for each in _program.counted]:
        if counts is not None:
            found[counts.group] = dict(counts.by_kind.copy())
    return found


def numbers_in_groups() -> dict[str, int]:
    """How many exchanges this process has begun in each of the program's groups."""
    return {name: torch_groups.sequence_number(group) for name, group in torch_groups.groups_of_program().items()}


def is_waiting_beyond(numbers: Mapping[str, int]) -> bool:
    """Whether the program waits in one of its groups for an exchange that a process with these `numbers` has not begun."""
    waits_in = torch_waits()
    return waits_in is not None and not waits_in.is_between_two and numbers.get(waits_in.group, _MANY) < waits_in.number


def is_receiving_from(rank: int) -> bool:
    """Whether the program waits for a message of a rank, and changes nothing till then."""
    waits_in = torch_waits()
    return waits_in is not None and waits_in.receives_from(rank)


def unit_begun(place: Place) -> str | None:
    """What travels in the exchange that this process has begun at a place; None: it has begun none there."""
    for counts in [each() for each in _program.counted]:
        if counts is not None and counts.group == place.group:
            return counts.unit_of(place.kind, place.number)
    return None


def is_ahead(one: Progress, other: Progress) -> bool:
    """Whether a process that is as far as `one` has passed the place where another is."""
    shared = one.keys() & other.keys()  # one of them may have dropped a group, or made one more
    if other[_PROGRAM][_ENDED]:
        shared.discard(_PROGRAM)
    return any(number > other[group].get(kind, 0) for group in shared for kind, number in one[group].items())
