"""The agreed order of reductions, and the recorded order of gathers. Pure bookkeeping over unit numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class ReductionSchedule:
    """Which unit is reduced next, the same on every rank, whatever each rank's backward does.

    A unit is reduced when its gradients are there *and* every unit before it in the expected order has been. What a
    rank lacks at the end of its backward it reduces then, with nothing to add; what came beyond the expected order is
    left over, for the ranks to agree upon.

    Attributes:
        expected: unit numbers in the order of reduction; a unit that is reduced twice stands there twice.
        seen: the order in which this rank's backward really went.
        waiting: units with gradients whose turn has not come; after `rest()`, those beyond the expected order.
    """

    expected: list[int]
    seen: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    _position: int = 0

    def ready(self, unit: int) -> list[int]:
        """`unit` has gradients; returns the units to reduce now."""
        self.seen.append(unit)
        self.waiting.append(unit)
        due = []
        while self._position < len(self.expected) and self.expected[self._position] in self.waiting:
            due.append(self._advance())
        return due

    def _advance(self) -> int:
        unit = self.expected[self._position]
        self._position += 1
        if unit in self.waiting:
            self.waiting.remove(unit)
        return unit

    def rest(self) -> list[int]:
        """The expected units that are still due, with or without gradients of this rank."""
        due = []
        while self._position < len(self.expected):
            due.append(self._advance())
        return due

    def is_unexpected(self) -> bool:
        """Whether this rank's backward went in another order; merely skipping units is not one."""
        remaining = iter(self.expected)
        return not all(unit in remaining for unit in self.seen)


def first_uses(reductions: Sequence[int]) -> list[int]:
    """Units in the order in which a forward first needs them: what is reduced last is used first.

    Args:
        reductions: the agreed order of reductions, with every unit. What a rank has recorded of its own forward will not do:
            ranks may use other units, and must gather alike.
    """
    return list(dict.fromkeys(reversed(reductions)))


@dataclass
class GatherSchedule:
    """Remembers in which order units were gathered in a pass, and tells which ones come next.

    Attributes:
        recorded: the last complete pass of each kind ("forward", "backward", ...).
    """

    recorded: dict[str, list[int]] = field(default_factory=dict)
    _kind: str | None = None
    _now: list[int] = field(default_factory=list)
    _expected: Sequence[int] = ()
    _position: int = 0

    def begin(self, kind: str) -> None:
        """A pass of this kind begins."""
        self._kind, self._now, self._position = kind, [], 0
        self._expected = self.recorded.get(kind, ())

    def end(self) -> None:
        """The pass is complete: it is the record for the next one of its kind."""
        if self._kind is not None and self._now:
            self.recorded[self._kind] = self._now
        self.abandon()

    def abandon(self) -> None:
        """The pass broke off: the record stays as it was."""
        self._kind, self._now, self._expected, self._position = None, [], (), 0

    def use(self, unit: int) -> Iterable[int]:
        """`unit` is needed now; returns the ones that followed it in the record, nearest first, none if it left it."""
        if self._kind is None:
            return ()
        self._now.append(unit)
        if self._position < len(self._expected) and self._expected[self._position] == unit:
            self._position += 1
            return map(self._expected.__getitem__, range(self._position, len(self._expected)))
        self._expected = ()
        return ()
