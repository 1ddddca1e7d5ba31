"""Steps from the disk: what an optimizer keeps between its streamed steps, and how one begins."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_zero.config.offload import Offload
from hf_zero.engine.ranks.world import World
from hf_zero.errors import OffloadError
from hf_zero.host.scratch import Place, StepMemory, Transfers
from hf_zero.optim.offloaded.pieces import Evaluated, refuse_in_pieces
from hf_zero.optim.offloaded.states import OffloadedStates
from hf_zero.optim.offloaded.streaming import StreamedStep
from hf_zero.optim.on_rows import choose_fused
from hf_zero.optim.stepping import Arguments, StepCall, Stepping, params_of


class DiskStepping(Stepping):
    """Steps on this rank's rows, whose states are streamed from a disk.

    Args:
        offload: what is to be there.

    Attributes:
        states: what is on the disk.
    """

    _under_way: StreamedStep | None

    def __init__(self, offload: Offload) -> None:
        super().__init__()
        self.states = OffloadedStates(offload)
        self._is_tried = False  # the optimizer is known to step in pieces
        self._slots: list[StepMemory] = []  # made at the first step, as the threads are
        self._transfers: Transfers | None = None

    def begin(self, call: StepCall) -> Arguments:
        """Run a step's chunks but the last: closures first, since every chunk is a part of one step with one loss."""
        choose_fused(call.optimizer)
        world = next(iter(call.worlds.values()))
        if not self._is_tried:
            refuse_in_pieces(call.optimizer, call.has_closure)
            self._is_tried = True
        self.states.make_room(call.optimizer, world)
        self.states.adopt(call.optimizer)
        args, kwargs = call.with_closures(Evaluated)
        call.before_change()
        params = [param for param in params_of(call.optimizer) if id(param) in call.worlds]
        with world.together("a step from the disk", OffloadError):
            offload = self.states.offload
            self._slots = self._slots or [StepMemory(offload.slot_bytes) for _ in range(offload.slots)]
            self._transfers = self._transfers or Transfers()
            step = StreamedStep(call.optimizer, self.states, self._slots, self._transfers, params, args, kwargs)
            stand_in = step.run()
        self._under_way = step
        return (stand_in, *args), kwargs

    def abandon(self) -> None:
        """Wait for what a step that has raised still reads and writes, since the next one uses its slots."""
        if self._under_way is not None:
            self._under_way.abandon()
            self._under_way = None

    def fits(self, offload: Offload, steps_on_host: bool) -> bool:
        """See `Stepping.fits`."""
        return self.states.offload == offload

    def rooms_on_disk(
        self,
        optimizer: torch.optim.Optimizer,
        worlds: Mapping[int, World],
        states: Mapping[int, Mapping[str, torch.dtype]],
    ) -> Mapping[int, Mapping[str, Place]]:
        """See `Stepping.rooms_on_disk`."""
        self.states.make_room(optimizer, next(iter(worlds.values())), states)
        return {key: self.states.of(key) for key in states}
