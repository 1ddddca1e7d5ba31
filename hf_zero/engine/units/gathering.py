"""Which units are whole: gathered before they are needed, dropped afterwards, gathered again when they have changed."""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.engine.parameters.quantised import as_shown
from hf_zero.engine.parameters.records import ZeroParameter, as_seen, pop, push
from hf_zero.engine.ranks.home import Home
from hf_zero.engine.ranks.offers import ChangeCount
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.calls.call import Call, Entry
from hf_zero.engine.units.calls.forward_alone import ForwardsAlone
from hf_zero.engine.units.calls.writes import Reads, Written, check_same_on_all_ranks, check_written
from hf_zero.engine.units.keeping import UNLIMITED, Budget, Candidate, Kept, choose, is_mostly_frozen
from hf_zero.engine.units.schedule import GatherSchedule, ReductionOrder, Turn, first_uses
from hf_zero.engine.units.storage.for_graphs import ForGraphs
from hf_zero.engine.units.storage.memory import GatheredMemory
from hf_zero.engine.units.storage.residency import Lease, Residency
from hf_zero.engine.units.unit import Unit
from hf_zero.errors import UsageError
from hf_zero.host import progress
from hf_zero.under_way import is_method_running

_MOST_AHEAD = 16  # units that are looked at when one is used, however small they are


class Gathering:
    """The units of one model.

    Args:
        world: the ranks.
        parameters: all of the model.

    Attributes:
        units: the sets of parameters gathered together, in the model's order.
        home: the stream on which all this is queued.
        memory: counts the bytes of gathered units.
        schedule: the record of gathers.
        reductions: the agreed order of reductions.
        before_wait: of the backward under way: hears that all ranks are about to wait for each other, for a gather.
        budget: how many bytes of units may stay whole from a forward to its backward.
        kept: those that do.
        is_refreshed: plain parameters have been cast again for the forward under way, see `Unit.refresh`.
        num_steps: optimizer steps so far; the same on every rank.
        reads: what was read outside its call, in the running pass.
        alone: forwards that this rank computes alone.
        changes: counts steps and edits by hand, before rows change.
        edited: by hand, since whole tensors were made, with a mark of how; a step's edits have none.
    """

    def __init__(self, world: World, parameters: list[ZeroParameter]) -> None:
        self._world = world
        self.units: list[Unit] = []
        self.home, self.memory = Home(world.device), GatheredMemory()
        self.schedule, self.reductions = GatherSchedule(), ReductionOrder([])
        self.before_wait: Callable[[], None] | None = None
        self.budget, self.kept = Budget(world), Kept()
        self.reads, self.changes, self.alone = Reads(), ChangeCount(), ForwardsAlone(world, parameters)
        self.is_refreshed, self.num_steps = world.partitions, 0
        self._held: list[Lease] = []  # of all units
        self.for_graphs = ForGraphs()
        self._parameters = parameters
        self.edited: dict[ZeroParameter, int] = {}
        self._stepping: object = None  # the optimizer whose step is under way, and its thread
        self._stepping_on = 0
        self._stepped: set[ZeroParameter] = set()  # what the step under way is done with, and has told
        self._has_read = False  # since ranks last met before a change of parameters

    # --- gathers and releases -----------------------------------------------------------------------------------

    def acquire(self, call: Call) -> None:
        """Make the units of a call whole, and start to gather those that will be needed next."""
        self.begin_read()
        if not self.is_refreshed and not torch_compat.in_backward():
            for unit in call.units:
                unit.refresh()
        if any(unit.is_to_come for unit in call.units):
            self.tell_of_wait()
        for unit in call.units:
            if unit.residency is Residency.RELEASED:
                unit.start_gather()
        for unit in call.units:
            if not unit.keeps_whole:
                self._prefetch(self.schedule.use(unit.index))
        call.hold()

    def begins_alone(self, records: bool) -> bool:
        """Whether the outermost forward is this rank's alone: see [Note: a forward alone]; not one that `records` gradients."""
        if records or self.alone.is_under_way or not self._world.serving.can_be_alone:
            return False  # the usual answers, inside a forward too, come first
        self._world.serving.apart.join()
        units = [unit for unit in self.units if not unit.is_whole_elsewhere]
        needs_others = any(unit.comes_and_goes or unit.residency is Residency.RELEASED for unit in units)
        is_old = bool(units and (self.edited or self._world.serving.apart.tick))
        return (needs_others or is_old) and self.alone.begins()

    def tell_of_wait(self) -> None:
        """All ranks are about to wait for each other, for a gather: what they reduce before that is begun first."""
        if self.before_wait is not None:
            self.before_wait()

    def refresh(self) -> None:
        """A forward of the model begins: cast plain parameters again, since nobody tells when users edit those."""
        if not self._world.partitions:
            for unit in self.units:
                unit.refresh()
            self.is_refreshed = True

    def end_forward(self) -> None:
        """The forward is over: parts that are called directly see to themselves."""
        self.is_refreshed = self._world.partitions

    def begin_read(self) -> None:
        """Somebody is about to read whole tensors: what was edited by hand is gathered again first.

        Raises:
            UsageError: it is a function under `torch.func`, where every tensor made belongs to the transform, for good.
        """
        if torch_compat.in_function_transform():
            raise UsageError(
                "a function under torch.func.grad, vmap, jvp, ... calls a module whose parameters have to be gathered first, "
                "and what is gathered inside a transform is lost with it: use torch.autograd.grad; in stages 1 and 2 the "
                "transform may also be used inside the forward of that module (a block of the model)"
            )
        self._world.serving.apart.check("a forward")
        self.keep_written_reads()
        self.flush_edits()
        self._has_read = True

    def _prefetch(self, coming: Iterable[int]) -> None:
        budget = self._world.config.prefetch_bytes
        waiting = self._waiting_for_backward()
        ahead = sum([self.units[index].buffer_nbytes for index in waiting])
        has_one = False  # one unit at least, whatever its size: else nothing would arrive while others compute
        for index in itertools.islice(coming, _MOST_AHEAD):
            unit = self.units[index]
            if unit.keeps_whole or unit.stays or unit.num_leases:
                continue
            ahead += 0 if unit.is_shared or index in waiting else unit.buffer_nbytes
            if ahead > budget and (has_one or not budget):
                return
            has_one = True
            if unit.residency is Residency.RELEASED and not unit.is_whole_elsewhere:
                unit.start_gather()

    def _waiting_for_backward(self) -> set[int]:
        """The units that are gathered and stay so until their backward, where that counts as gathered ahead."""
        is_forward = not torch_compat.in_backward()
        kept = {index: self.units[index] for index in self.kept.ahead}
        gathered = {index: unit for index, unit in kept.items() if unit.residency is not Residency.RELEASED}
        return {index for index, unit in gathered.items() if is_forward or not unit.num_leases}

    def drop(self, but_kept: bool = False) -> None:
        """Release what nobody reads, but for what stays: at events that all ranks share, so that they will gather alike again.

        Args:
            but_kept: leave those that wait for their backward, too.
        """
        for unit in self.units:
            if not but_kept and not unit.stays:
                unit.stop_keeping()
            unit.release_if_unused()

    def may_stay(self, unit: Unit, is_last: bool) -> bool:
        """Whether a unit may stay whole beyond its backward, of a last micro-batch or another: see [Note: until it changes]."""
        if unit.index not in self.kept.by_budget:
            return False
        return not is_last or is_mostly_frozen(unit.nbytes, [p.param.requires_grad for p in unit.parameters])

    def staying(self, is_last: bool) -> list[int]:
        """The units that may stay whole beyond the backward that ends, as this rank sees it."""
        return [u.index for u in self.units if u.residency is Residency.KEPT and self.may_stay(u, is_last)]

    def settle(self) -> None:
        """Wait for the gathers that are under way: nobody else will, and peers would miss this rank's rows."""
        for unit in self.units:
            unit.settle()

    def expect_units(self) -> None:
        """Take the order in which a backward comes to the units, as long as nobody has seen one."""
        turns = [Turn(unit.index, None if unit.is_releasable else 0) for unit in reversed(self.units)]
        self.reductions = ReductionOrder(turns)
        self._choose_kept()

    def choose_kept_again(self, has_other_budget: bool) -> None:
        """There is a new order of reductions, or a new budget: other units may stay whole from a forward to its backward."""
        before = self.kept
        self._choose_kept()
        for unit in self.units:
            unit.stays = unit.stays and unit.index in self.kept.by_budget
        if has_other_budget and self.kept != before:
            self.budget.tell(len(self.kept.by_budget), len(self.units))
        if self.kept.all != before.all:
            self.reductions.forget_places()

    def _choose_kept(self) -> None:
        order, accumulates = map(self.units.__getitem__, dict.fromkeys(self.reductions.units)), self.budget.accumulates
        candidates = [Candidate.of(u.index, u.buffer_nbytes, u.entries, accumulates) for u in order if u.comes_and_goes]
        self.kept = choose(candidates, self.budget.num_bytes, self._world.config.prefetch_bytes)
        self.budget.kept_bytes = sum(self.units[index].buffer_nbytes for index in self.kept.by_budget)

    def kept_after(self, entry: Entry, has_backward: bool) -> Container[int]:
        """The units that stay whole when a call of a module has returned, which may have a backward."""
        if not has_backward:
            return [unit.index for unit in entry.units if self.may_stay(unit, True)]
        return self.kept.all if entry.reads_in_backward else self.kept.by_budget

    def offer(self) -> int:
        """See `Budget.offer`."""
        is_idle = not any(unit.comes_and_goes for unit in self.units)
        return UNLIMITED if is_idle else self.budget.offer(self.num_steps)

    def take_offers(self, lowest: int, stays_alike: bool, is_last: bool) -> bool:
        """Units stay if all ranks would let the same ones stay. For the rest see `Budget.take`."""
        staying = self.staying(is_last) if stays_alike else ()
        for unit in self.units:
            unit.stays = unit.index in staying
        return self.budget.take(lowest, self.num_steps)

    @contextlib.contextmanager
    def holding_all(self) -> Iterator[None]:
        """Within: modules see whole parameters, so that forwards without gradients gather nothing, on any number of ranks.

        Until a parameter is edited, or a forward needs a graph: from then on all forwards gather as ever.
        """
        self.begin_read()
        try:
            units = [unit for unit in self.units if not unit.is_whole_elsewhere]
            with self.home:
                for unit, coming in zip(units, [*units[1:], None], strict=True):
                    for each in (unit, coming):  # one ahead
                        if each is not None and each.residency is Residency.RELEASED:
                            each.start_gather()
                    self._held.append(unit.acquire())
                    shown = as_shown([p.param for p in unit.parameters], unit.whole_tensors())
                    push(self._held, unit.parameters, as_seen(unit.parameters, shown))
            yield
        finally:
            self.let_go()

    def let_go(self) -> None:
        """End `holding_all`."""
        if self._held:
            written = [Written(unit, *each) for unit in self.units for each in pop(self._held, unit.parameters)]
            leases, self._held = self._held, []
            with self.home:
                try:
                    self.keep_written(written)
                finally:
                    for lease in leases:
                        lease.give_back()

    @property
    def holds_all(self) -> bool:
        """Whether modules see whole parameters outside their calls, see `holding_all`."""
        return bool(self._held)

    def has_nothing_to_do(self) -> bool:
        """Whether a forward that begins finds all that it needs in the modules."""
        if self._held and torch.is_grad_enabled():
            self.let_go()
        return bool(self._held)

    # --- changes of parameters ----------------------------------------------------------------------------------

    def before_step(self, optimizer: object) -> None:
        """An optimizer that holds parameters of this model is about to step, on every rank."""
        self._before_write("the optimizer's step", self._world.serving.is_asked)
        progress.note_step(optimizer, self)
        self.changes.begun += 1
        self._stepped.clear()  # of a step that has raised
        self._stepping, self._stepping_on = optimizer, threading.get_ident()

    def whole_at_hand(self, unit: Unit, p: ZeroParameter) -> Tensor | None:
        """The whole tensor of a parameter, where it stays whole between uses and is as new as its rows."""
        is_new = self._stepping is None and p not in self.edited and self._world.serving.apart.before(p.param) is None
        with self.home:
            return unit.whole_at_hand(p) if is_new else None

    def before_edit(self, p: ZeroParameter, mark: int) -> None:
        """A parameter is about to be changed by hand, on every rank: see [Note: an edit is seen]."""
        if p.is_whole_elsewhere:
            return  # inside `GatheredParameters`
        serving = self._world.serving
        if self._stepping is None and serving.edits_alone():
            self.let_go()
            serving.apart.take(p.param, p.name)
            return
        if self._stepping is None or self._has_read:  # a step has met already, unless it has run the model since
            self._before_write(f"an edit of {p.name!r}")
            serving.note_edit()
        self.changes.begun += self._stepping is None
        self.edited[p] = 0 if self._stepping is not None else zlib.crc32(b"%d" % mark, self.edited.get(p, 0))
        self.let_go()

    def _before_write(self, what: str, is_read_alone: bool = False) -> None:
        """Wait for all ranks, if they compute with what is shared, or if one may still read what was before."""
        self._has_read = False
        self._world.serving.apart.check(what)
        if any(unit.is_shared for unit in self.units):
            self._world.shards.before_write(what)
        elif is_read_alone:
            self._world.meet(what)

    def by_first_use(self) -> list[list[ZeroParameter]]:
        """The parameters by unit, in the order in which a forward first needs them, the same on every rank."""
        return [self.units[index].parameters for index in first_uses(self.reductions.units)]

    def during_step(self, done: list[ZeroParameter]) -> None:
        """An optimizer's step, which goes on, is done with these parameters, on every rank."""
        self.on_rows_changed(done)
        self._stepped.update(done)

    def after_step(self, held: list[ZeroParameter]) -> None:
        """An optimizer that holds these parameters has stepped, on every rank."""
        self.num_steps += bool(held)
        stepped = self._stepped.difference(self.edited)
        self._stepped.clear()
        held_now = [p for p in held if p not in stepped]
        self.on_rows_changed(p for p in held_now if p.param.requires_grad or p.param.grad is not None)
        self._stepping = None
        if held:
            with self.home:
                self.home.hand_out(grad for p in held if (grad := p.param.grad) is not None)
                self.drop()  # also units without anything that has changed

    def keep_written(self, written: Sequence[Written], has_failed: bool = False) -> None:
        """Keep what modules have written into whole tensors, on every rank: see [Note: writes in a forward].

        Args:
            written: what.
            has_failed: the pass has broken off, perhaps on this rank alone: nobody is asked, and what is shared is left.
        """
        if not written:
            return
        if not has_failed:
            check_written(written)
            check_same_on_all_ranks(written, self._world)
            if any(each.unit.is_shared for each in written):
                self._before_write("what a forward wrote into its parameters")
        self.changes.begun += 1  # only now: a rank that the others wait for may still read alone what was before
        for unit, p, whole in written:
            self.reads.forget(p, but=whole)
            if not (has_failed and unit.is_shared):
                unit.keep_written(p, whole)
        self.home.note_that_rows_settle()

    def keep_written_reads(self) -> None:
        """Keep what was written into what was read outside of calls."""
        self.keep_written(list(self.reads.take_written()))

    def end_reads(self, has_failed: bool = False) -> None:
        """The pass is over: keep what was written into what was read outside of calls, and forget that."""
        written = list(self.reads.take_written())
        self.reads.clear()
        self.keep_written(written, has_failed)

    def on_rows_changed(self, changed: Iterable[ZeroParameter]) -> None:
        """These parameters have new rows, on every rank: whole tensors are gathered again, if not now then at the next use."""
        told = dict.fromkeys(changed, 0)
        if told:
            self.let_go()
            self.for_graphs.let_go()
            self.home.note_that_rows_settle()
        self.edited.update(told)
        units = {
            unit: members
            for unit in map(self.units.__getitem__, first_uses(self.reductions.units))
            if (members := [p for p in unit.parameters if p in told])
        }
        for unit in units:
            unit.epoch += 1  # of all, before anything that can fail
        with self.home:
            for unit, members in units.items():
                unit.changed(members)
        self.edited = {p: mark for p, mark in self.edited.items() if p not in told}

    def flush_edits(self) -> None:
        """Let what was edited by hand be gathered again."""
        # Torch calls no post-hook of a step that raised, which may have changed any parameter: see [Note: under way].
        if self._stepping is not None and not is_method_running(self._stepping, self._stepping_on):
            self.edited.update(dict.fromkeys(self._parameters, 0))
            self._stepping = None
        if self.edited:
            self.on_rows_changed(list(self.edited))

    def mark_dirty(self) -> None:
        """All ranks have changed the rows of parameters behind torch's back: whole tensors are gathered again."""
        self._before_write("mark_dirty")
        self.changes.begun += 1
        self.on_rows_changed(self._parameters)
