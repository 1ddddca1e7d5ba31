"""One call of a module that needs units, the graph it leaves, and what it holds until its backward has ended."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container

from torch import Tensor, nn

from hf_zero import torch_compat
from hf_zero.engine.parameters.quantised import as_shown
from hf_zero.engine.parameters.records import ZeroParameter, pop, push, shown_by
from hf_zero.engine.units.calls.forward_alone import CallAlone
from hf_zero.engine.units.calls.saved import SavedWeights
from hf_zero.engine.units.calls.writes import Written
from hf_zero.engine.units.grouping import reads_in_backward
from hf_zero.engine.units.storage.residency import Lease
from hf_zero.engine.units.unit import Unit
from hf_zero.errors import UsageError
from hf_zero.under_way import calls_of

_events = itertools.count()


def next_event() -> int:
    """Tells in which order forwards of calls begin and end, and backwards begin."""
    return next(_events)


class Entry:
    """A module whose calls need units, and its calls under way. It does not keep the module, which may keep a graph of it.

    Attributes:
        units: the units.
        reads_in_backward: whether the backward of a call reads the module's parameters.
        backward_call: the call whose tensors are in the modules during its backward.
        stack: the calls whose forward is under way, with their whole tensors; None for one that found them in place.
        is_closed: its engine has ended.
        others: modules whose calls stand for those of the module.
    """

    def __init__(self, module: nn.Module, units: list[Unit]) -> None:
        self.units = units
        self.reads_in_backward = reads_in_backward(module)
        self.backward_call: Call | None = None
        self.stack: list[tuple[Call | CallAlone, list[Tensor]] | None] = []
        self.is_closed = False
        self.others: list[weakref.ref[nn.Module]] = []

    def num_calls(self, module: nn.Module) -> int:
        """How many calls are under way on this thread, of `module` (its own or another) and of all others."""
        others = (other for reference in self.others if (other := reference()) is not None)
        return sum(map(calls_of, {module, *others}))

    def reset(self) -> None:
        """Forget calls that never came to their end."""
        for top in self.stack:
            if top is not None:
                top[0].end() if isinstance(top[0], CallAlone) else top[0].end_forward()
        self.stack.clear()
        self.backward_call = None


class Call:
    """One call of a module that needs units, and the graph it leaves.

    It must not refer to the whole tensors: they refer to it, through the graph, and a cycle through C++ is never freed.
    Nor to modules, for the same reason.

    Attributes:
        entry: whose call.
        parameters: of its units, in order.
        leases: on its units, in order.
        session: the backward in which its gradients came last.
        is_done: its gradients have come, at least once.
        saved_weights: while its forward runs.
        num_holders: of the memory of its releasable units, as its forward began.
        gradients: what has come of the parameters' whole gradients.
        graph_task: the backward, or the one nested in it, in which the first gradient of an output came.
        node: gives the node of the graph whose backward gets the parameters' gradients, as long as it lives; weak: it refers to
            the call.
        began, ended: its forward.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.units = entry.units
        self.parameters: list[ZeroParameter] = [p for unit in entry.units for p in unit.parameters]
        self.leases: list[Lease] = []
        self.session: object | None = None
        self.is_done = False
        self.saved_weights: SavedWeights | None = None
        self.num_holders: list[int] = []
        self.gradients: dict[ZeroParameter, Tensor] = {}
        self.graph_task = -1
        self.node: Callable[[], object | None] = lambda: None
        self.began = next_event()
        self.ended: int | None = None
        self._epochs = [unit.epoch for unit in entry.units]

    def hold(self) -> None:
        """Take a lease on every unit, when its gather is complete.

        Raises:
            CollectiveError: a peer did not take part.
        """
        for unit in self.units:
            self.leases.append(unit.acquire())

    def install(self, tensors: list[Tensor], make_whole: Callable[[Unit, int], None]) -> None:
        """Let the modules see the whole tensors.

        Args:
            tensors: of the parameters, in order.
            make_whole: makes a unit whole until the backward ends.
        """
        place = 0
        for unit in self.units:
            own = tensors[place : place + len(unit.parameters)]
            memory = unit if unit.is_releasable else None
            push(self, unit.parameters, as_shown([p.param for p in unit.parameters], own, memory, make_whole))
            place += len(own)

    def uninstall(self) -> list[Written]:
        """Let the modules see what they saw before the call; what they have written to meanwhile."""
        return [Written(unit, p, whole) for unit in self.units for p, whole in pop(self, unit.parameters)]

    def whole_tensors(self) -> list[Tensor]:
        """The whole tensors of its parameters, in order; needs the leases."""
        return [tensor for unit in self.units for tensor in unit.whole_tensors()]

    def shown(self) -> list[Tensor]:
        """The whole tensors that it has put into modules, in order."""
        return shown_by(self, self.parameters)

    def pin_what_is_kept(self, tensors: list[Tensor], num_own: int, but: Container[int] = ()) -> None:
        """Keep the memory of a unit for good if somebody has kept one of its whole tensors, as no memory's count tells.

        Args:
            tensors: of the parameters, in order; modules hold them no longer.
            num_own: references to each of them, beside those of somebody else.
            but: ids of tensors that are the module's output, of which copies are handed out.
        """
        counts = torch_compat.nums_of_references(tensors)
        if max(counts, default=0) <= num_own:
            return
        owners = [unit for unit in self.units for _ in unit.parameters]
        for unit, tensor, count in zip(owners, tensors, counts, strict=True):
            if count > num_own and id(tensor) not in but:
                unit.pin()

    def end_forward(self) -> list[Written]:
        """Its module has returned, or never will; what it has written to."""
        self.ended = next_event()
        if self.saved_weights is not None:
            self.saved_weights.end()
        return self.uninstall()

    def release(self, kept: Container[int] = ()) -> None:
        """Give back all leases; units whose numbers are in `kept` stay whole, see `Lease.give_back`."""
        leases, self.leases = self.leases, []
        for unit, lease in zip(self.units, leases, strict=False):  # fewer, if acquiring one has failed
            lease.give_back(unit.index in kept)

    def check_not_outdated(self) -> None:
        """Raise if a unit's parameters have changed since this call's forward."""
        for unit, epoch in zip(self.units, self._epochs, strict=True):
            check_not_outdated(unit, epoch)


def check_not_outdated(unit: Unit, epoch: int) -> None:
    """Raise if a unit's parameters have changed since `epoch`, which the forward of a backward saw."""
    if unit.epoch != epoch:
        raise UsageError(
            f"the parameters of {unit.name!r} were changed (an optimizer step, or an edit by hand) after the forward that "
            "this backward belongs to: its saved values are gone; run the forward again"
        )
