"""Gradients of one backward: reduced unit by unit in the agreed order, bounded in flight, added to the shards' `.grad`."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_zero.comm.collectives import Rows
from hf_zero.comm.copies import copies_of
from hf_zero.comm.exchange import Exchange
from hf_zero.engine.backward.landing import Landing
from hf_zero.engine.backward.votes import Report, Reports, bitmap, fingerprint, named_by
from hf_zero.engine.parameters.at_rest.known import values
from hf_zero.engine.parameters.records import ZeroParameter, add_gradients
from hf_zero.engine.ranks import hyperparameters
from hf_zero.engine.ranks.precision import GradientDtypes
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.keeping import UNLIMITED
from hf_zero.engine.units.schedule import ReductionOrder, ReductionSchedule, Turn
from hf_zero.engine.units.unit import Unit
from hf_zero.errors import CollectiveError


@dataclass(frozen=True)
class _Report(Report):
    """What one rank says of its reductions.

    Attributes:
        has_leftover: units have got gradients beyond the expected order.
        has_held: gradients have waited for their turn.
        sequence_hash: of all that it has gathered and reduced.
        offer: bytes of units that it could keep whole from a forward to its backward, see `Budget.offer`.
        staying: tells apart which would stay whole beyond the backward.
        values: tells apart which values computed from parameters it keeps, see [Note: made alone].
    """

    has_leftover: bool = False
    has_held: bool = False
    sequence_hash: int = 0
    offer: int = UNLIMITED
    staying: int = 0
    values: int = 0


def num_values_agreed(num_parameters: int) -> int:
    """How many numbers the ranks agree on at the end of a backward."""
    return len(_Report().pack(num_parameters))


def gradient_dtypes(p: ZeroParameter, world: World) -> GradientDtypes:
    """How the gradient of a parameter is reduced."""
    is_as_made = p.is_spread and world.shards_gradients
    shards = world.same_experts if p.computed.is_part else world.shards
    sends_as_given = shards.sends_rows_as_given and world.config.reduce_scatter is True
    return world.precision.gradient_dtypes(p.compute_dtype, is_as_made, sends_as_given)


@dataclass(eq=False)
class _InFlight:
    """A unit's gradients on their way: which parameter gets which rows, and which ones this rank has used."""

    unit: str
    num_bytes: int
    exchanges: list[Exchange]
    results: list[tuple[ZeroParameter, Tensor, bool]]

    def wait(self) -> None:
        """Wait until the rows are there."""
        for exchange in self.exchanges:
            exchange.wait()


@dataclass(eq=False)
class Reducer:
    """Reduces the gradients of one backward pass: within each replica, and then over the replicas.

    [Note: agreed reductions] Ranks may use different parameters: an expert that got no token, a branch not taken. All
    of them reduce the same units in the same order nevertheless; who has no gradient adds zeros. At the end they agree
    which parameters anybody used: the others keep `.grad = None`, since an optimizer step with a zero gradient is not a
    step without one (weight decay, moments).

    Args:
        units: all units with a parameter that takes part, by number.
        takes_part: whether a parameter may have a gradient to be reduced.
        world: the ranks.
        order: of reductions, the same on every rank; changed at the end.
        is_over: whether all the calls of a unit, by its number, have had their backward.
        gradient_dtypes: of every parameter of the model, trainable or not.
        num_steps: optimizer steps so far, which tell whether the ranks are in the same one.
        landing: where gradients come down of parameters that rest in host memory.
        offer: gives this rank's offer, see `Budget.offer`.
        staying: gives the units that would stay whole beyond the backward.
        advice: what to do where ranks have not gathered alike; all of them ask.

    Attributes:
        lowest_offer: of all ranks, once it has finished.
        stays_alike: whether the same units would stay on all ranks, once it has finished.
    """

    units: dict[int, Unit]
    takes_part: Callable[[ZeroParameter], bool]
    world: World
    order: ReductionOrder
    is_over: Callable[[int], bool]
    gradient_dtypes: Mapping[ZeroParameter, GradientDtypes]
    num_steps: int = 0
    landing: Landing | None = None
    offer: Callable[[], int] = lambda: UNLIMITED
    staying: Callable[[], list[int]] = list
    advice: Callable[[], str] = str
    lowest_offer: int = field(default=UNLIMITED, init=False)
    stays_alike: bool = field(default=False, init=False)
    _schedule: ReductionSchedule = field(init=False)
    _gradients: dict[int, deque[dict[ZeroParameter, Tensor]]] = field(default_factory=dict)
    _in_flight: deque[_InFlight] = field(default_factory=deque)
    _between_replicas: deque[_InFlight] = field(default_factory=deque)
    _used: set[ZeroParameter] = field(default_factory=set)
    _unused: dict[ZeroParameter, Tensor] = field(default_factory=dict)
    given: dict[ZeroParameter, None] = field(default_factory=dict)  # what has got a gradient

    def __post_init__(self) -> None:
        expected = [turn for turn in self.order.turns if turn.unit in self.units]
        self._schedule = ReductionSchedule(expected, self.is_over)

    def ready(self, unit: Unit, gradients: dict[ZeroParameter, Tensor]) -> None:
        """A unit's whole gradients are there.

        Args:
            unit: the unit.
            gradients: of the whole shape; never written to. Those not used are missing.
        """
        self._used.update(gradients)
        self._gradients.setdefault(unit.index, deque()).append(gradients)
        for index in self._schedule.ready(unit.index):
            self._start(index)

    def sends_sums(self, p: ZeroParameter) -> bool:
        """Whether what this rank has added up of a parameter's gradients travels as it is."""
        return self.gradient_dtypes[p].send_sums(self.world.config.wire.reduce)

    def before_wait(self) -> None:
        """The ranks are about to wait for a gather: see [Note: one order of waits]."""
        for index in self._schedule.before_wait():
            self._start(index)

    def finish(self) -> None:
        """Reduce what is left, agree on what was used, and add everything to `.grad`."""
        for index in self._schedule.rest():
            self._start(index)
        leftover = self._schedule.waiting.copy()
        parameters = [p for index in sorted(self.units) for p in filter(self.takes_part, self.units[index].parameters)]
        reports = self._agree(parameters, bool(leftover))
        has_leftover, self.lowest_offer = reports.highest.has_leftover, reports.lowest.offer
        self.stays_alike = reports.are_alike("staying")
        values.settle(self.world.serving, self.world.everyone, reports.are_alike("values"))
        if has_leftover:
            self._reduce_leftover(leftover)
        while self._in_flight:
            self._complete()
        while self._between_replicas:
            self._complete_replicas()
        for shards in (self.world.shards, self.world.same_experts):
            shards.settle()
        for p in named_by(reports.highest.used, parameters):
            self.given[p] = None
        self._give([(p, self._unused[p]) for p in self.given if p in self._unused])
        self._unused.clear()
        if self.landing is not None:
            self.landing.wait()
        if self.order.is_to_change(has_leftover, reports.lowest.has_held):
            self.order.change(self._seen_by_all(), has_leftover)

    def abandon(self) -> None:
        """The backward broke off: wait for what is under way, and drop it."""
        for item in [*self._in_flight, *self._between_replicas]:
            item.wait()
        self._in_flight.clear()
        self._between_replicas.clear()
        if self.landing is not None:
            self.landing.abandon()

    def _start(self, index: int) -> None:
        unit = self.units[index]
        waiting = self._gradients.get(index)
        gradients = waiting.popleft() if waiting else {}
        sharded: list[Rows] = []
        outputs: list[Tensor] = []
        summed: list[Tensor] = []
        results: list[tuple[ZeroParameter, Tensor, bool]] = []
        num_bytes = 0
        for p, flat in self._flats(filter(self.takes_part, unit.parameters), gradients):
            grad, dtypes = gradients.get(p), self.gradient_dtypes[p]
            num_bytes += p.computed.layout.numel * dtypes.sent.itemsize
            if p.is_spread:
                # Fresh: kept from one backward to the next, it cost 4/N bytes a parameter at the peak, and no time was saved.
                result = flat.new_empty(p.local_numel, dtype=dtypes.summed)
                sharded.append(Rows(flat, p.computed.layout))
                outputs.append(result)
            else:
                result = flat
                summed.append(result)
            results.append((p, result, grad is not None))
        while self._in_flight and self._bytes_in_flight() + num_bytes > self.world.config.bucket_bytes:
            self._complete()
        exchanges = []
        if sharded:
            exchanges.append(self._reduce_rows(sharded, outputs, unit))
        if summed:
            exchanges.append(unit.axes.whole.all_reduce(summed, unit.name, self._divisor))
        self._in_flight.append(_InFlight(unit.name, num_bytes, exchanges, results))

    def _reduce_rows(self, items: list[Rows], outputs: list[Tensor], unit: Unit) -> Exchange:
        """Begin the exchange that the configuration asks for."""
        divisor = self._divisor if self.world.replicas.num_ranks == 1 else 1
        match self.world.config.reduce_scatter:
            case True:
                return unit.axes.wired.reduce_scatter(items, outputs, unit.name, divisor)
            case False:
                return unit.axes.shards.reduce_whole(items, outputs, unit.name, divisor)
            case "to_owner":
                return unit.axes.shards.reduce_to_owners(items, outputs, unit.name, divisor)

    @property
    def _divisor(self) -> int:
        return self.world.data.num_ranks if self.world.config.gradient_reduction == "mean" else 1

    def _flats(
        self, parameters: Iterable[ZeroParameter], gradients: dict[ZeroParameter, Tensor]
    ) -> list[tuple[ZeroParameter, Tensor]]:
        """What is reduced of a unit's parameters: flat, and copied, all by one launch, where it is not as it has to be."""
        flats: dict[ZeroParameter, Tensor] = {}
        copied: list[ZeroParameter] = []
        for p in parameters:
            grad, dtypes = gradients.get(p), self.gradient_dtypes[p]
            if grad is None:
                flats[p] = torch.zeros(p.computed.layout.numel, dtype=dtypes.given, device=self.world.device)
                continue
            flats[p] = flat = grad if grad.ndim == 1 and grad.is_contiguous() else p.computed.layout.flat(grad)
            # What stays whole is summed in place, and autograd may have handed its own to somebody else.
            is_autograds = not p.is_spread and flat.data_ptr() == grad.data_ptr()
            is_sum = flat.dtype == dtypes.summed != dtypes.given and self.sends_sums(p)
            if is_autograds or not (flat.dtype == dtypes.given or is_sum):
                copied.append(p)
        given = [self.gradient_dtypes[p].given for p in copied]
        flats.update(zip(copied, copies_of([flats[p] for p in copied], given), strict=True))
        return list(flats.items())

    def _bytes_in_flight(self) -> int:
        return sum([item.num_bytes for item in self._in_flight])

    def _complete(self) -> None:
        """Wait for the oldest reduction within the replica; its rows go on to the other replicas, or to the gradients."""
        item = self._in_flight.popleft()
        item.wait()
        if self.world.replicas.num_ranks == 1:
            self._add(item)
            return
        rows = [rows for p, rows, _ in item.results if p.is_spread]
        exchange = self.world.replicas.all_reduce(rows, item.unit, self._divisor)
        self._between_replicas.append(replace(item, exchanges=[exchange]))
        while len(self._between_replicas) > 1:
            self._complete_replicas()

    def _complete_replicas(self) -> None:
        """Wait for the oldest sum over the replicas, and add its rows to the gradients."""
        item = self._between_replicas.popleft()
        item.wait()
        self._add(item)

    def _add(self, item: _InFlight) -> None:
        self._give([(p, rows) for p, rows, is_used in item.results if is_used])
        for p, rows, is_used in item.results:
            if is_used:
                continue
            if p in self._unused:
                self._unused[p].add_(rows)
            else:
                self._unused[p] = rows

    def _give(self, results: Sequence[tuple[ZeroParameter, Tensor]]) -> None:
        """Add reduced rows to gradients."""
        add_gradients([(p, rows) for p, rows in results if p.host is None])
        down = [(p, rows) for p, rows in results if p.host is not None]
        if down:
            assert self.landing is not None
            self.landing.take(down)

    def _agree(self, parameters: list[ZeroParameter], has_leftover: bool) -> Reports[_Report]:
        report = _Report(
            used=bitmap(parameters, self._used),
            num_steps=self.num_steps,
            trained=fingerprint(parameters),
            stepped=hyperparameters.fingerprint(self.world),
            has_leftover=has_leftover,
            has_held=self._schedule.has_held,
            sequence_hash=self.world.shards.sequence_hash,
            offer=self.offer(),
            staying=zlib.crc32(str(self.staying()).encode()),
            values=values.fingerprint(self.world.serving),
        )
        reports = report.agree(self.world.everyone, len(self.gradient_dtypes))
        hyperparameters.check(self.world, reports.are_alike("stepped"))
        if not reports.are_alike("sequence_hash"):
            raise CollectiveError(
                "the ranks have gathered or reduced other units, or in another order, so parameters may have been mixed up: "
                f"in stage 3 every rank must call the same modules in the same order. {self.advice()}"
            )
        return reports

    def _reduce_leftover(self, leftover: list[int]) -> None:
        """Reduce units once more, as often as the rank that has most is waiting with them."""
        indices = sorted(self.units)
        counts = self.world.everyone.combine([leftover.count(index) for index in indices], "units reduced again")
        for index, count in zip(indices, counts.highest, strict=True):
            for _ in range(count):
                self._start(index)

    def _seen_by_all(self) -> list[list[Turn]]:
        """How the backward went on every rank."""
        seen = [number for turn in self._schedule.seen for number in turn if number is not None]
        lengths = self.world.everyone.agree([len(seen)], "length of the order of reductions")
        longest = max(length for (length,) in lengths)
        rows = self.world.everyone.agree(seen + [-1] * (longest - len(seen)), "order of reductions")
        return [
            [Turn(*pair) for pair in zip(row[:length:2], row[1:length:2], strict=True)]
            for row, (length,) in zip(rows, lengths, strict=True)
        ]
