"""Whether a unit's whole tensors may be read, by whom, and what becomes of its memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum
from typing import Protocol


class Residency(Enum):
    """Whether the whole tensors of a unit may be read.

        RELEASED --start_gather--> GATHERING --acquire--> WHOLE --give_back(keeps)--> KEPT
        RELEASED <------nobody used it------ GATHERING
                  units that stay whole:     GATHERING <------new rows------ WHOLE, KEPT
        RELEASED <-------last lease given back, or new rows----------------- WHOLE <--stop_keeping-- KEPT

    KEPT is WHOLE with or without a lease, until a backward of one of its calls has ended, or its parameters have changed.
    That is told by events which all ranks share, never by the life of a graph: ranks drop theirs at different times, and
    must gather alike.
    """

    RELEASED = "released"
    GATHERING = "gathering"
    WHOLE = "whole"
    KEPT = "kept"


class Tenure(Enum):
    """What becomes of a unit's memory when its tensors are released. Only RESIZED changes, and only to PINNED."""

    RESIZED = "comes and goes"
    PINNED = "stays, since somebody has kept a view of it; gathered like others, or this rank alone would not gather"
    OWNED = "stays, and the tensors are whole between uses"
    SHARED = "stays, since nobody can give back what the host's other ranks read"


WHOLE = (Residency.WHOLE, Residency.KEPT)

NEXT = {
    Residency.RELEASED: (Residency.GATHERING,),
    Residency.GATHERING: (Residency.WHOLE, Residency.RELEASED),
    Residency.WHOLE: (Residency.KEPT, Residency.RELEASED),
    Residency.KEPT: (Residency.WHOLE,),
}


class Leased(Protocol):
    """What can be leased: a unit."""

    def take_back(self, keeps: bool) -> None:
        """A lease ends."""


class LiveCall(Protocol):
    """A call of a module whose graph lives, see `Call`."""

    is_done: bool
    began: int
    session: object | None
    node: Callable[[], object | None]


class LiveCalls:
    """The calls of one unit whose graphs live, in their order; weak."""

    def __init__(self) -> None:
        self._calls: list[weakref.ref[LiveCall]] = []

    def add(self, call: LiveCall) -> None:
        """There is a new one."""
        self._calls.append(weakref.ref(call, self._calls.remove))

    def any_apart_from(self, session: object | None, holds: Callable[[LiveCall], bool]) -> bool:
        """Whether something holds of any whose backward was not in `session`."""
        for of in self._calls[:]:
            call = of()
            if call is not None and call.session is not session and holds(call):
                return True
        return False


class Lease:
    """The right to read a unit's whole tensors; given back once, or when nobody holds it any more."""

    def __init__(self, unit: Leased) -> None:
        self._unit: Leased | None = unit

    def give_back(self, keeps: bool = False) -> None:
        """Give the right back; a second call does nothing.

        Args:
            keeps: leave the unit whole until a backward of one of its calls has ended, or its parameters have changed.
        """
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.take_back(keeps)

    def __del__(self) -> None:
        self.give_back()
