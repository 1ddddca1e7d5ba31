"""The backward of plain parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_zero.engine.backward.backward import Backward
from hf_zero.engine.backward.buckets import WholeReducer
from hf_zero.engine.backward.passes import refuse_create_graph
from hf_zero.engine.backward.session import Session
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.gathering import Gathering


class PlainBackward(Backward):
    """Where nothing is partitioned (stage 0 in one dtype): autograd adds the gradients up, and they are averaged in buckets."""

    def __init__(self, model: nn.Module, world: World, parameters: list[ZeroParameter], gathering: Gathering) -> None:
        super().__init__(model, world, parameters, gathering)
        self._reducer = WholeReducer(parameters, world)

    def _is_to_be_watched(self, p: ZeroParameter) -> bool:
        return self._world.data.num_ranks > 1

    def _watch(self, p: ZeroParameter) -> Any:
        """Hear whenever autograd has added to the gradient of a plain parameter."""
        owner, of_parameter = weakref.ref(self), weakref.ref(p)

        def hook(_: Tensor) -> None:  # a tensor's hooks are invisible to the garbage collector: no cycle through them
            backward, known = owner(), of_parameter()
            if backward is not None and known is not None:
                backward._on_sum(known)

        return p.param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _on_sum(self, p: ZeroParameter) -> None:
        refuse_create_graph()
        self.begin().has_gradients = True
        self._reducer.arrived(p, self._is_syncing)

    def _make_reducer(self, takes_part: Callable[[ZeroParameter], bool]) -> None:
        return None

    def _finish(self, session: Session) -> None:
        if session.has_gradients and self._is_syncing:
            self._reducer.finish(self.gathering.num_steps, self._who_takes_part())
            self._forget_no_sync()

    def recover(self) -> None:
        """Put everything at rest after a pass that broke off."""
        has_broken_off = self.session is not None
        super().recover()
        if has_broken_off:
            self._reducer.abandon()
