"""Who is missing, where an exchange has failed that does not tell: asked of torch's store, and of this host's processes.

[Note: roll call] In such an agreement a rank hears of most others through a few, so that one that is missing leaves the others
waiting for each other. A rank whose wait has failed closes its connections to all others, whose waits fail with it. Each then
writes into the store which agreement it is at, reads what the others have written, and names those that have not come.
Where nothing fails, nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_zero.comm.beside.store import Notes

_GRACE_S = 2.5  # that the others have to say where they are


def missing(group: str, number: int, ranks: Sequence[int], own: int, peer: int) -> list[int]:
    """The ranks that have not come to the agreement in which a wait of this one has failed.

    Args:
        group: its name, the same on all of its ranks and on no others.
        number: of the agreement, counted alike on every rank.
        ranks: of the group, as they are numbered in the program.
        own: this rank.
        peer: the rank that this one has waited for; named alone if it has not come, or if nothing else is known.
    """
    deadline = time.monotonic() + _GRACE_S
    absent = [rank for rank in ranks if rank != own]
    try:
        notes = Notes(f"roll call {group}")
        notes.write(own, str(number))
        while absent and time.monotonic() < deadline:
            absent = [rank for rank in absent if int(notes.read(rank) or -1) < number]
            time.sleep(0.05)
    except (RuntimeError, ValueError):  # the process that keeps the store is gone, or the program's group is
        return [peer]
    return [peer] if peer in absent or not absent else absent


def ended(processes: Mapping[int, int]) -> list[int]:
    """The ranks whose processes have ended, or do so in a moment: their connections are closed a little earlier.

    Args:
        processes: of this host, by rank.
    """
    deadline = time.monotonic() + _GRACE_S
    while not (gone := [rank for rank, process in processes.items() if not _is_alive(process)]):
        if not processes or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return gone


def _is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
