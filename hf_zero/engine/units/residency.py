"""Whether a unit's whole tensors may be read, and what becomes of its memory."""

from __future__ import annotations

from enum import Enum


class Residency(Enum):
    """Whether the whole tensors of a unit may be read.

        RELEASED --start_gather--> GATHERING --acquire--> WHOLE --give_back(keeps)--> KEPT
        RELEASED <------nobody used it------ GATHERING
                  units that stay whole:     GATHERING <------new rows------ WHOLE
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


NEXT = {
    Residency.RELEASED: (Residency.GATHERING,),
    Residency.GATHERING: (Residency.WHOLE, Residency.RELEASED),
    Residency.WHOLE: (Residency.KEPT, Residency.RELEASED),
    Residency.KEPT: (Residency.WHOLE,),
}
