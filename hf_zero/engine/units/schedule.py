"""The agreed order of reductions, and the recorded order of gathers. Pure bookkeeping over unit numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Turn(NamedTuple):
    """A reduction in the agreed order.

    Attributes:
        unit: number of the unit that is reduced.
        after: how often the ranks have waited for a gather, in this backward, before it may begin; it has begun before they
            wait once more. None if nobody has seen it yet: then it is after the last call of the unit.
    """

    unit: int
    after: int | None


@dataclass
class ReductionSchedule:
    """Which unit is reduced next in one backward, the same on every rank, whatever each rank's backward does.

    [Note: one order of waits] A rank waits for gathers, and, when much is under way, for reductions. What a rank waits for,
    its peers must begin without waiting for what this one begins only later. So reductions have their places among the waits
    for gathers, which all ranks make alike: a unit is reduced when its gradients are there, every one before it in the expected
    order has been reduced, *and* its turn has come; at the latest before the next wait. What a rank lacks then, it reduces
    with nothing to add; what comes later is left over, for the ranks to agree upon at the end.

    Attributes:
        expected: the order of reductions; a unit that is reduced twice stands there twice.
        is_over: whether all the calls of a unit have had their backward.
        seen: how this rank's backward really went.
        waiting: units with gradients whose turn has not come; after `rest()`, those beyond the expected order.
        has_held: gradients have waited for their turn.
    """

    expected: Sequence[Turn]
    is_over: Callable[[int], bool] = lambda unit: True
    seen: list[Turn] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    has_held: bool = False
    _num_waits: int = 0
    _position: int = 0

    def ready(self, unit: int) -> list[int]:
        """`unit` has gradients; returns the units to reduce now."""
        self.seen.append(Turn(unit, self._num_waits))
        self.waiting.append(unit)
        due = []
        while self._may_begin() and self.expected[self._position].unit in self.waiting:
            due.append(self._advance())
        self.has_held = self.has_held or bool(self.waiting)
        return due

    def before_wait(self) -> list[int]:
        """The ranks are about to wait for a gather; returns the units to reduce first, with or without gradients."""
        due = []
        while self._may_begin():
            due.append(self._advance())
        self._num_waits += 1
        return due

    def rest(self) -> list[int]:
        """The expected units that are still due, with or without gradients of this rank."""
        due = []
        while self._position < len(self.expected):
            due.append(self._advance())
        return due

    def _may_begin(self) -> bool:
        if self._position == len(self.expected):
            return False
        unit, after = self.expected[self._position]
        return self.is_over(unit) if after is None else after <= self._num_waits

    def _advance(self) -> int:
        unit = self.expected[self._position].unit
        self._position += 1
        if unit in self.waiting:
            self.waiting.remove(unit)
        return unit


@dataclass
class ReductionOrder:
    """The agreed order of reductions from one backward to the next: by where the last of the ranks had them ready.

    It changes at once when some rank had gradients left over, to later places only. When gradients had to wait on every rank,
    it changes to earlier places: in backwards one after the other, twice as many each time that this turned out to be wrong.

    Attributes:
        turns: the order.
    """

    turns: list[Turn]
    _patience: int = 1
    _num_held: int = 0

    @property
    def units(self) -> list[int]:
        """The units in the order of their reductions."""
        return [turn.unit for turn in self.turns]

    def is_to_change(self, has_leftover: bool, has_held: bool) -> bool:
        """A backward is over, in which some rank had gradients left over, or all had some that waited for their turn."""
        self._num_held = self._num_held + 1 if has_held else 0
        return has_leftover or self._num_held >= self._patience

    def change(self, seen: Sequence[Sequence[Turn]], has_leftover: bool) -> None:
        """Take the order in which the ranks, one after the other, have seen their gradients come."""
        places = _places(seen)
        if has_leftover:
            self._patience *= 2
            before = _places([self.turns])
            places = {key: max(place, before.get(key, place)) for key, place in places.items()}
            places |= {key: place for key, place in before.items() if key not in places}
        self._num_held = 0
        order = sorted(places, key=lambda key: (places[key], key))
        known = {unit for unit, _ in order}
        others = [Turn(unit, None) for unit in dict.fromkeys(self.units) if unit not in known]
        self.turns = [Turn(key[0], places[key][0]) for key in order] + others

    def forget_places(self) -> None:
        """The ranks will wait for other gathers than they did."""
        self.turns = [Turn(unit, None) for unit in self.units]


def _places(seen: Sequence[Sequence[Turn]]) -> dict[tuple[int, int], tuple[int, int]]:
    """Where the last of the ranks had what is reduced: (waits, position), by unit and how often it was reduced before."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for of_rank in seen:
        num_before: Counter[int] = Counter()
        for position, (unit, after) in enumerate(of_rank):
            key = (unit, num_before[unit])
            num_before[unit] += 1
            if after is not None:
                found[key] = max(found.get(key, (0, 0)), (after, position))
    return found


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
