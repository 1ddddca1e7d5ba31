"""Forwards without gradients that one rank computes alone, as of a validation behind `if is_main_process`.

[Note: a forward alone] In stage 3 a forward needs rows of every rank. Before one without gradients ranks meet, as before what
reads parameters at rest (see [Note: alone]). Where some have gone on, those that come compute it alone: each parameter is asked
for as its module is called, and put there beside the units, which stay as the other ranks have theirs: they gather alike
again, once all come. Whole tensors stay for the next such forward while nothing has been begun together, as far as
`gather_for_generation` has room for them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_zero.engine.parameters.at_rest.gathers import ask_alone
from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.engine.parameters.quantised import as_shown
from hf_zero.engine.parameters.records import ZeroParameter, as_dtype, as_seen, pop, push
from hf_zero.engine.parameters.whole import num_writes
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError
from hf_zero.host.room import free_bytes
from hf_zero.parameters import parameters_of

_keeping: weakref.WeakSet[ForwardsAlone] = weakref.WeakSet()  # whole tensors, for the next forward


class ForwardsAlone:
    """Those of one model.

    Args:
        world: the ranks.
        parameters: all of the model.
    """

    def __init__(self, world: World, parameters: Sequence[ZeroParameter]) -> None:
        self._runs: Callable[[], bool] | None = None  # whether the one under way still does
        self._world, self._parameters = world, parameters
        self._wholes: dict[ZeroParameter, Tensor] = {}
        self._are_of: object = None  # the place in the program
        self._keeps = False
        self._read: dict[ZeroParameter, tuple[Tensor, int]] = {}  # outside of calls, with the writes before
        self._are_together = 0

    # --- whether it is one --------------------------------------------------------------------------------------

    def records(self, module: nn.Module, *given: object) -> bool:
        """Whether a forward may record gradients: not of a frozen model (an average of weights), on inputs that need none.

        Args:
            module: is called.
            given: what with.
        """
        if not torch.is_grad_enabled():
            return False
        if any(p.param.requires_grad for p in self._parameters):
            return True
        inputs = (each for each in pytree.tree_leaves(given) if isinstance(each, Tensor))
        return any(each.requires_grad for each in (*inputs, *parameters_of(module)))

    def begins(self, what: str = "a forward without gradients") -> bool:
        """Whether what is about to begin is this rank's alone: others have gone on. Those that come are asked to say so.

        Raises:
            CollectiveError: a rank has neither come nor gone on in time, or is gone.
        """
        world = self._world
        is_possible = world.tensor.num_ranks == world.sequence.num_ranks == world.experts.num_ranks == 1
        if not is_possible or self._are_together or not world.serving.can_be_alone:
            return False
        return not world.serving.all_come(what, str(world.serving.number_of(self._parameters[0].param)))

    @contextlib.contextmanager
    def all_together(self) -> Iterator[None]:
        """Within: all ranks have met, and run the same forwards."""
        self._are_together += 1
        try:
            yield
        finally:
            self._are_together -= 1

    # --- from its beginning to its end --------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        """Whether one is; not any more after one that Ctrl-C has ended: torch does not run its hooks then."""
        if self._runs is not None and not self._runs():
            self.end(has_failed=True)
        return self._runs is not None

    def begin(self, runs: Callable[[], bool]) -> None:
        """One begins.

        Args:
            runs: whether it still does.
        """
        place = self._world.serving.place
        if place != self._are_of:
            self._wholes.clear()
            self._are_of, self._keeps = place, self._has_room()
        self._runs = runs

    def _has_room(self) -> bool:
        wanted = self._world.config.gather_for_generation
        if isinstance(wanted, bool):
            return wanted
        budget = free_bytes(self._world.device, self._world.num_sharing_memory) // 2 if wanted == "auto" else wanted
        return sum(p.whole_nbytes for p in self._parameters) <= budget

    def end(self, has_failed: bool = False) -> None:
        """It has ended."""
        self._runs = None
        read, self._read = self._read, {}
        self.refuse_written([p for p, (seen, before) in read.items() if num_writes(seen) != before], has_failed)

    def refuse_written(self, written: Sequence[ZeroParameter], has_failed: bool) -> None:
        """A call has ended, which has written to these.

        Raises:
            UsageError: there are some, and it has not failed anyway.
        """
        for p in written:
            self._wholes.pop(p, None)
        if written and not has_failed:
            raise UsageError(
                f"a forward that one rank computes alone has written to parameter {written[0].name!r}, which the other ranks "
                "would not have: let all ranks run it"
            )

    def forget(self) -> None:
        """All ranks go on together: memory that was kept is free, of other models too."""
        for each in list(_keeping):
            each._wholes.clear()
            each._are_of = None
        _keeping.clear()

    # --- whole tensors ------------------------------------------------------------------------------------------

    def read(self, p: ZeroParameter) -> Tensor:
        """What modules see of a parameter that is read outside of its module's call."""
        if p not in self._read:
            seen = self.seen(p)
            self._read[p] = seen, num_writes(seen)
        return self._read[p][0]

    @torch.no_grad()
    @torch.inference_mode(False)
    def seen(self, p: ZeroParameter) -> Tensor:
        """What modules see of a whole parameter, in memory that is not the engine's."""
        found = self._wholes.get(p)
        if found is None:
            whole = ask_alone(p.param) if isinstance(p.param, Root) else p.local.clone()
            found = as_dtype(whole.to(self._world.device), p.compute_dtype)
            if self._keeps:
                self._wholes[p] = found
                _keeping.add(self)
        return as_seen([p], as_shown([p.param], [found.detach()]))[0]


class CallAlone:
    """One call of a module that one rank computes alone: modules see whole parameters until its end.

    Args:
        forwards: of its model.
        parameters: that it needs.
        is_outermost: the forward ends with it.

    Raises:
        CollectiveError: a rank does not give its rows.
    """

    def __init__(
        self, forwards: ForwardsAlone, parameters: Sequence[ZeroParameter], is_outermost: bool = False
    ) -> None:
        self._parameters = parameters
        self._forwards, self._is_outermost = forwards, is_outermost
        try:
            for p in parameters:
                push(self, [p], [forwards.seen(p)])
        except BaseException:
            self.end(has_failed=True)
            raise

    def end(self, has_failed: bool = False) -> None:
        """Let modules see what they saw before.

        Raises:
            UsageError: it has written to a parameter.
        """
        written = pop(self, self._parameters)
        try:
            self._forwards.refuse_written([p for p, _ in written], has_failed)
        finally:
            if self._is_outermost:
                self._forwards.end(has_failed)
