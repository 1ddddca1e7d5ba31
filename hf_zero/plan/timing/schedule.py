"""One step, played: what computes, and the exchanges beside it, in the engine's order. Pure arithmetic."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_zero.plan.timing.machines import Exchange

_MOST_AHEAD = 16  # parts of a pass that are looked at for what to gather ahead


@dataclass(frozen=True)
class Part:
    """What is computed while the same units are in use.

    Attributes:
        units: by number.
        seconds: of computing.
    """

    units: frozenset[int]
    seconds: float


@dataclass(frozen=True)
class UnitCosts:
    """What a unit is exchanged for.

    Attributes:
        num_bytes: of it when it is whole.
        gather: None where it stays whole between steps and nothing changes it.
        reduction: None where nothing of it trains.
        sent: bytes of its gradients.
        reads: calls whose backward reads the parameters; of a tied weight, those that come first in the backward.
        reduces_each_call: the gradients of a call are reduced after its backward, not those of all calls after the last.
    """

    num_bytes: int
    gather: Exchange | None
    reduction: Exchange | None
    sent: int
    reads: int = 1
    reduces_each_call: bool = False


@dataclass(frozen=True)
class Step:
    """What is played.

    Attributes:
        forward, backward: in order.
        units: by number.
        comes_and_goes: whether units are gathered for each use (stage 3), or once after a step.
        kept: units that stay whole from the call of a forward that the backward begins with, as if gathered ahead.
        kept_by_budget: units that stay whole from their forward to their backward, beside those.
        prefetch_bytes, bucket_bytes: as in the configuration.
        update: seconds of the optimizer.
        is_background: whether exchanges go on beside what computes; else each takes its time where it is waited for.
    """

    forward: Sequence[Part]
    backward: Sequence[Part]
    units: Sequence[UnitCosts]
    comes_and_goes: bool
    kept: frozenset[int]
    prefetch_bytes: int
    bucket_bytes: int
    update: float
    kept_by_budget: frozenset[int] = frozenset()
    is_background: bool = True


@dataclass(frozen=True)
class Played:
    """Seconds of a step.

    Attributes:
        total: of the step.
        computing: forward and backward.
        updating: the optimizer.
        waiting: for exchanges, with what they take from computing.
        gathered, reduced: the units, by number, in the order in which their exchanges begin.
    """

    total: float
    computing: float
    updating: float
    waiting: float
    gathered: tuple[int, ...]
    reduced: tuple[int, ...]


def play(step: Step) -> Played:
    """The second of two steps, which finds what the first has left under way."""
    player = _Player(step)
    player.run()
    before = player.now
    player.computing = player.waiting = 0.0
    player.gathered, player.reduced = [], []
    player.run()
    exchanged = (tuple(player.gathered), tuple(player.reduced))
    return Played(player.now - before, player.computing, step.update, player.waiting, *exchanged)


@dataclass
class _Player:
    """Two lanes: what computes, and the exchanges, one after the other.

    Attributes:
        now: on the lane that computes.
        link: when the last exchange begun is done.
        whole: when each unit that is gathered, or is being gathered, is there.
        in_flight: reductions: when each is done, and its bytes.
    """

    step: Step
    now: float = 0.0
    link: float = 0.0
    computing: float = 0.0
    waiting: float = 0.0
    whole: dict[int, float] = field(default_factory=dict)
    in_flight: deque[tuple[float, int]] = field(default_factory=deque)
    gathered: list[int] = field(default_factory=list)
    reduced: list[int] = field(default_factory=list)

    def run(self) -> None:
        """A forward, a backward, and the optimizer."""
        self._pass(self.step.forward, is_backward=False)
        self._pass(self.step.backward, is_backward=True)
        while self.in_flight:
            self._finish_oldest()
        self.now += self.step.update
        if not self.step.comes_and_goes:
            self.whole.clear()
            for number in _order(self.step.forward):
                self._gather(number)

    def _pass(self, parts: Sequence[Part], is_backward: bool) -> None:
        needed = self._needed(parts, is_backward)
        left = Counter(number for index in range(len(parts)) for number in _left_after(parts, index))
        for index, part in enumerate(parts):
            for number in needed[index]:
                self._need(number, list(dict.fromkeys(itertools.chain(*needed[index + 1 :][:_MOST_AHEAD]))))
            self.now += part.seconds
            self.computing += part.seconds
            for number in _left_after(parts, index):
                is_kept = number in self.step.kept and left[number] <= self.step.units[number].reads
                is_kept = not is_backward and (is_kept or number in self.step.kept_by_budget)
                left[number] -= 1
                if self.step.comes_and_goes and not is_kept:
                    self.whole.pop(number, None)
                if is_backward and (self.step.units[number].reduces_each_call or not left[number]):
                    self._reduce(number)

    def _needed(self, parts: Sequence[Part], is_backward: bool) -> list[list[int]]:
        """The units that each part reads."""
        calls: Counter[int] = Counter()
        needed = []
        for index, part in enumerate(parts):
            reading = (each for each in part.units if not is_backward or calls[each] < self.step.units[each].reads)
            needed.append(sorted(reading))
            calls.update(_left_after(parts, index))
        return needed

    def _need(self, number: int, coming: Sequence[int]) -> None:
        if number not in self.whole and (self.step.comes_and_goes or self.step.units[number].gather is not None):
            self._gather(number)
        if self.step.comes_and_goes:
            self._prefetch(coming)
        self._wait_until(self.whole.get(number, 0.0))

    def _prefetch(self, coming: Sequence[int]) -> None:
        ahead, has_one = sum(self.step.units[number].num_bytes for number in self.step.kept & self.whole.keys()), False
        for number in coming:
            ahead += 0 if number in self.step.kept & self.whole.keys() else self.step.units[number].num_bytes
            if not self.step.prefetch_bytes or (ahead > self.step.prefetch_bytes and has_one):
                return
            has_one = True
            if number not in self.whole:
                self._gather(number)

    def _gather(self, number: int) -> None:
        exchange = self.step.units[number].gather
        if exchange is not None:
            self.gathered.append(number)
            self.whole[number] = self._exchange(exchange)

    def _reduce(self, number: int) -> None:
        unit = self.step.units[number]
        if unit.reduction is None:
            return
        while self.in_flight and sum(sent for _, sent in self.in_flight) + unit.sent > self.step.bucket_bytes:
            self._finish_oldest()
        self.reduced.append(number)
        self.in_flight.append((self._exchange(unit.reduction), unit.sent))

    def _finish_oldest(self) -> None:
        done, _ = self.in_flight.popleft()
        self._wait_until(done)

    def _exchange(self, exchange: Exchange) -> float:
        """Begin an exchange; returns when it is done."""
        taken = exchange.busy if self.step.is_background else exchange.seconds
        self.now += taken
        self.waiting += taken
        if not self.step.is_background:
            return self.now
        self.link = max(self.link, self.now) + exchange.seconds - exchange.busy
        return self.link

    def _wait_until(self, moment: float) -> None:
        self.waiting += max(0.0, moment - self.now)
        self.now = max(self.now, moment)


def _left_after(parts: Sequence[Part], index: int) -> list[int]:
    """The units in use that are not in the next part's: a call of theirs has ended."""
    following = parts[index + 1].units if index + 1 < len(parts) else frozenset()
    return sorted(parts[index].units - following)


def _order(parts: Sequence[Part]) -> list[int]:
    """The units in the order of their first use."""
    return list(dict.fromkeys(number for part in parts for number in sorted(part.units)))
