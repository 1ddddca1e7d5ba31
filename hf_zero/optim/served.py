"""States of optimizers, for a rank that reads them alone (`torch.save`): see [Note: alone] in `engine/ranks/serving`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_zero.engine.parameters.rule import Root
from hf_zero.engine.ranks.serving import Serving
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CollectiveError
from hf_zero.layout import RowLayout
from hf_zero.optim.stepping import params_of

_STATES = "states of optimizers that have made a step"

_Item = tuple[int, int, Any]  # numbers of the optimizer and of its parameter, and the state's name


class _ServedStates:
    """Of the optimizers that have made a step, in the order of their first, which is the same on every rank."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._items: dict[int, _Item] = {}  # by id(rows), as seen last

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(each() is optimizer for each in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def search(self, tensor: Tensor) -> _Item | None:
        """Which state a tensor at rest is, or shows."""
        if not isinstance(tensor, Root):
            return None
        for is_known in (True, False):
            if not is_known:
                self._look_anew()
            item = self._items.get(id(tensor.rows))
            found = None if item is None else self._state(*item)
            if found is not None and found.rows is tensor.rows:
                return item
        return None

    def _look_anew(self) -> None:
        self._items = {
            id(value.rows): (number, index, name)
            for number, reference in enumerate(self._optimizers)
            if (optimizer := reference()) is not None
            for index, param in enumerate(params_of(optimizer))
            for name, value in optimizer.state.get(param, {}).items()
            if isinstance(value, Root)
        }

    def _state(self, number: int, index: int, name: Any) -> Root | None:
        optimizer = self._optimizers[number]() if number < len(self._optimizers) else None
        params = [] if optimizer is None else params_of(optimizer)
        value = (
            optimizer.state.get(params[index], {}).get(name) if optimizer is not None and index < len(params) else None
        )
        return value if isinstance(value, Root) else None

    def give(self, item: _Item) -> tuple[Tensor, RowLayout]:
        """This rank's rows of a state."""
        state = self._state(*item)
        if state is None:
            raise CollectiveError(f"the optimizer's state {item[2]!r} does not exist there any more")
        return state.rows, state.held[1].rows


_served: weakref.WeakKeyDictionary[Serving, _ServedStates] = weakref.WeakKeyDictionary()


def serve_states(optimizer: torch.optim.Optimizer, worlds: Iterable[World]) -> None:
    """Let a rank of these worlds read the states of an optimizer alone; called at each of its steps."""
    for world in worlds:
        known = _served.get(world.serving)
        if known is None:
            known = _served[world.serving] = _ServedStates()
            world.serving.offer(_STATES, known.give, known.search)
        known.add(optimizer)
