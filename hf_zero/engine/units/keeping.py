"""Which units stay whole from their forward to their backward, and within how many bytes.

[Note: kept units] Stage 3 gathers a unit for its forward and again for its backward. A unit that stays whole in between is
gathered once: with all of them kept, a step receives what plain data parallelism does (2Ψ, not 3Ψ). It costs memory.

- **How much.** A budget of bytes beside `prefetch_bytes`: none (`reshard_after_forward: true`), all (`false`), a size, or, by
  default (`auto`), half of what was still free at the peak. That is measured when a whole step has run: then the optimizer
  has made its states, and activations have been at their most. Each rank offers what it could give, in numbers that ranks
  exchange at the end of a backward anyway; the lowest offer counts. So all ranks have one budget, and gather alike.
- **Later.** Every few steps ranks offer again: longer batches, or other programs, may have taken memory. The budget becomes
  smaller then, and never greater, or units would come and go with what others do. After an out-of-memory error it is 0.
- **Which.** At the end of a forward all kept units are there at once, so any choice costs the same there. They are taken
  from the model's end backwards: those live shortest, and all the rest of a step needs less.
- **Until it changes.** [Note: until it changes] A unit that the budget keeps need not be gathered for the next micro-batch,
  nor for the next step what is frozen of it: it was whole at the peak anyway. So it stays beyond its backward, but for that of
  a step's last micro-batch (outside `no_sync`) where most of it trains. Where little does (adapters), only that is gathered
  after a step. Ranks must gather alike: units stay if all ranks have kept the same ones, which they tell each other at the end
  of a backward; no rank lets go of them alone.
- **Beside it.** A backward begins with the units that a forward ends with. Those that `prefetch_bytes` has room for, one at
  least, would be released only to be gathered ahead at once. They stay, whatever the budget, and count as gathered ahead.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.grouping import reads_in_backward
from hf_zero.host.room import room_at_peak

logger = logging.getLogger(__name__)

UNLIMITED = 2**62  # bytes; as an offer: nothing new
_EVERY = 8  # optimizer steps from one measurement to the next
_PART = 2  # one part of so many of what is free is taken

_NOTE = "hf_zero keeps units whole from their forward to their backward (reshard_after_forward):"

_budgets: weakref.WeakSet[Budget] = weakref.WeakSet()  # of this process
_measuring: weakref.WeakSet[Budget] = weakref.WeakSet()  # of them, those that share what is free


@dataclass(frozen=True)
class Candidate:
    """A unit that may stay.

    Attributes:
        index: its number.
        num_bytes: while it is whole.
        saves_gathers: a step gathers it less often if it stays.
        is_tied: several modules compute with it: a backward begins with the last of them, a head.
    """

    index: int
    num_bytes: int
    saves_gathers: bool
    is_tied: bool = False

    @classmethod
    def of(cls, index: int, num_bytes: int, entries: Sequence[nn.Module], accumulates: bool = False) -> Candidate:
        """Of a unit, by the modules that compute with it, and whether the next micro-batch does before anything changes."""
        num_reading, num_entries = sum(map(reads_in_backward, entries)), len(entries)
        saves = accumulates or num_entries > 1 or num_reading > 0
        return cls(index, num_bytes, saves, num_entries > 1 and num_reading > 0)


@dataclass(frozen=True)
class Kept:
    """Numbers of the units that stay whole from a forward to its backward, the same on every rank.

    Attributes:
        by_budget: from the end of their first call on.
        ahead: beside those, the ones that the backward begins with; they count as gathered ahead.
    """

    by_budget: frozenset[int] = frozenset()
    ahead: frozenset[int] = frozenset()

    @property
    def all(self) -> frozenset[int]:
        """Both."""
        return self.by_budget | self.ahead


def choose(units: Iterable[Candidate], num_bytes: int, prefetch_bytes: int) -> Kept:
    """The units that stay, see [Note: kept units].

    Args:
        units: that come and go, in the order in which a backward is done with them.
        num_bytes: the budget.
        prefetch_bytes: how many may be gathered ahead; one unit at least, unless 0.
    """
    order, left = sorted(units, key=lambda unit: not unit.is_tied), num_bytes
    by_budget: set[int] = set()
    for unit in order:
        if num_bytes == UNLIMITED or (unit.saves_gathers and unit.num_bytes <= left):
            by_budget.add(unit.index)
            left -= unit.num_bytes
    sums = itertools.accumulate(unit.num_bytes for unit in order)
    ahead = {unit.index for unit, total in zip(order, sums, strict=True) if total <= prefetch_bytes}
    if prefetch_bytes:
        ahead.update(unit.index for unit in order[:1])
    return Kept(frozenset(by_budget), frozenset(ahead - by_budget))


def is_mostly_frozen(nbytes: Iterable[int], trains: Iterable[bool]) -> bool:
    """Whether a unit stays for the next step, of whose parameters these are the bytes, and which train: see above."""
    sizes = list(nbytes)
    return 2 * sum(itertools.compress(sizes, trains)) < sum(sizes)


def asked_bytes(config: ZeroConfig) -> int:
    """The budget that a configuration asks for; 0 of "auto", before anything has been measured."""
    asked = config.reshard_after_forward
    if isinstance(asked, bool) or asked == "auto":
        return UNLIMITED if asked is False else 0
    return asked


class Budget:
    """The bytes of units that stay whole from their forward to their backward; the same on every rank.

    Args:
        world: the ranks.

    Attributes:
        num_bytes: now; `UNLIMITED` for all units.
        is_measured: whether it follows the memory that is free, and not the configuration alone.
        is_known: whether it has been measured, or need not be.
        kept_bytes: of the units that it keeps whole.
        is_asked_for: whether any units are to stay.
        accumulates: a step has had several micro-batches, as `no_sync` has told, which all ranks enter.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.num_bytes = asked_bytes(world.config)
        self.is_measured = world.config.reshard_after_forward == "auto" and world.shards_parameters
        self.is_known = not self.is_measured
        self.is_asked_for = world.config.reshard_after_forward is not True
        self.kept_bytes, self.accumulates, self._has_news = 0, False, False
        self._next = 1  # the number of steps at which to measure
        self._has_run_out = False
        _budgets.add(self)

    def offer(self, num_steps: int) -> int:
        """What this rank can give, for the agreement at the end of a backward; `UNLIMITED`: it has nothing to say.

        Args:
            num_steps: optimizer steps so far.
        """
        if self._has_run_out:
            return 0
        if not self.is_measured or num_steps < self._next:
            return UNLIMITED
        _measuring.add(self)
        room = room_at_peak(self._world.device, self._world.num_sharing_memory)
        # What is kept now was there at the peak.
        return 0 if room is None else (room + self.kept_bytes) // _PART // len(_measuring)

    def expect_micro_batches(self) -> None:
        """From now on, a step has several micro-batches."""
        self._has_news = self._has_news or not self.accumulates
        self.accumulates = True

    def take(self, lowest: int, num_steps: int) -> bool:
        """Take the lowest of all ranks' offers; whether other units may stay now."""
        has_news, self._has_news = self._has_news, False
        if lowest == UNLIMITED:
            return has_news
        before, self._has_run_out = self.num_bytes, False
        self.num_bytes = min(lowest, self.num_bytes) if self.is_known else lowest
        self.is_known, self._next = True, num_steps + _EVERY
        return has_news or self.num_bytes != before

    def tell(self, num_kept: int, num_units: int) -> None:
        """Log, on one rank, what all have agreed upon."""
        if self._world.rank == 0 and self.is_measured:
            logger.info(
                "%d of %d units (%s bytes) stay whole from their forward to their backward, within %s bytes: half of what was "
                "free at the peak on the rank that has least",
                num_kept,
                num_units,
                f"{self.kept_bytes:,}",
                f"{self.num_bytes:,}",
            )

    def run_out(self) -> None:
        """This rank has run out of memory: it offers nothing any more."""
        self._has_run_out = self.is_measured


def note_failure(error: BaseException | None) -> None:
    """A pass has broken off: if for want of memory, let the error say what is kept, and all ranks keep nothing if they may."""
    if error is None or not _is_out_of_memory(error) or _NOTE in "".join(getattr(error, "__notes__", ())):
        return
    keeping = [budget for budget in _budgets if budget.kept_bytes]
    for budget in keeping:
        budget.run_out()
    if keeping:
        total = sum(budget.kept_bytes for budget in keeping)
        error.add_note(f"{_NOTE} {total:,} bytes of them on this rank; `true` keeps none, a size no more than that")


def _is_out_of_memory(error: BaseException) -> bool:
    is_refused = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # by the CPU's allocator
    return is_refused or isinstance(error, (torch.OutOfMemoryError, MemoryError))
