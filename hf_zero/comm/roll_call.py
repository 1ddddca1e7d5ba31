"""Who has come to an agreement among many ranks: asked through torch's store, and only where one has failed.

[Note: roll call] In such an agreement a rank hears of most others through a few, so that one that is missing leaves the others
waiting for each other. A rank that has waited for a while therefore writes into the store which agreement it is at; one whose
wait has failed reads what the others have written, and names those that have not come. Where nobody waits, nothing is written.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Sequence

from hf_zero import torch_compat

_LATE_S = 1.0  # a rank that has waited for so long says where it is
_LOOK_S = 0.5
_GRACE_S = 2.5  # more than the two together: whoever waits has said so by then


class RollCall:
    """What the ranks of one group have said about where they wait.

    Args:
        group: its name, the same on all of its ranks and on no others.
        ranks: their numbers in the program.
        rank: this rank's place among them.
    """

    def __init__(self, group: str, ranks: Sequence[int], rank: int) -> None:
        self._group, self._ranks, self._own = group, ranks, ranks[rank]
        self._number = 0
        self._began = 0.0
        self._has_said = False

    @contextlib.contextmanager
    def at(self, number: int) -> Iterator[RollCall]:
        """Within: this rank waits in its agreement `number`, counted alike on every rank."""
        _start_to_watch()
        self._number, self._began, self._has_said = number, time.monotonic(), False
        _waiting[id(self)] = self
        try:
            yield self
        finally:
            _waiting.pop(id(self), None)

    def say_if_late(self) -> None:
        """Write down where this rank waits, if it has waited long and has not done so."""
        if not self._has_said and time.monotonic() - self._began > _LATE_S:
            self._say()

    def _say(self) -> None:
        self._has_said = True
        torch_compat.program_store().set(self._key(self._own), str(self._number))

    def missing(self, peer: int) -> list[int]:
        """The ranks that have not come to the agreement that this one waits in.

        Args:
            peer: the rank that this one has waited for itself; named alone if it has not come, or if nothing else is known.
        """
        deadline = time.monotonic() + _GRACE_S
        absent = [rank for rank in self._ranks if rank != self._own]
        try:
            self._say()
            while absent and time.monotonic() < deadline:
                absent = [rank for rank in absent if not self._has_come(rank)]
                time.sleep(0.05)
        except (RuntimeError, ValueError):  # the process that keeps the store is gone, or the program's group is
            return [peer]
        return [peer] if peer in absent or not absent else absent

    def _has_come(self, rank: int) -> bool:
        store, key = torch_compat.program_store(), self._key(rank)
        return store.check([key]) and int(store.get(key)) >= self._number

    def _key(self, rank: int) -> str:
        return f"hf_zero roll call {self._group} {rank}"


_waiting: dict[int, RollCall] = {}


@functools.cache
def _start_to_watch() -> None:
    threading.Thread(target=_watch, name="hf_zero roll call", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(_LOOK_S)
        for each in list(_waiting.values()):
            with contextlib.suppress(RuntimeError, ValueError):  # no store: whoever asks it finds out
                each.say_if_late()
