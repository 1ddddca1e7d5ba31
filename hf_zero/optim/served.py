"""States of optimizers, for a rank that reads them alone (`torch.save`): see [Note: alone] in `engine/ranks/serving`."""

from __future__ import annotations

import io
import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from hf_zero.engine.parameters.at_rest import Root
from hf_zero.engine.parameters.on_host import lack_of_memory
from hf_zero.engine.ranks.serving import Serving
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CollectiveError, PartitionError, UsageError
from hf_zero.layout import RowLayout
from hf_zero.optim.owners import Owners
from hf_zero.optim.stepping import params_of

_STATES, _OF_OWNERS = "states of optimizers that have made a step", "states of parameters that a rank owns"

_Item = tuple[int, int, Any]  # numbers of the optimizer and of its parameter, and the state's name


class _ServedStates:
    """Of the optimizers that ranks have come to a step of, or loaded, in an order which is the same on every rank."""

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

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Of one that has made a step."""
        return next(number for number, each in enumerate(self._optimizers) if each() is optimizer)

    def give_owned(self, item: tuple[int, int]) -> tuple[Tensor, RowLayout]:
        """The state of a parameter that this rank owns, as bytes; by the numbers of the optimizer and the parameter."""
        number, index = item
        optimizer = self._optimizers[number]()
        if optimizer is None:
            raise CollectiveError("the optimizer does not exist there any more")
        data = _written(optimizer, params_of(optimizer)[index])
        return torch.frombuffer(bytearray(data), dtype=torch.uint8), RowLayout((len(data),), 1)


def _written(optimizer: torch.optim.Optimizer, param: Tensor) -> bytes:
    file, world = io.BytesIO(), param.held[0] if isinstance(param, Root) else None
    with nullcontext() if world is None else world.serving.beside(param.device):
        torch.save(optimizer.state.get(param, {}), file)
    return file.getvalue()


def _read(data: bytes) -> dict[Any, Any]:
    return cast(dict[Any, Any], torch.load(io.BytesIO(data), map_location="cpu", weights_only=False))


_served: weakref.WeakKeyDictionary[Serving, _ServedStates] = weakref.WeakKeyDictionary()


def serve_states(optimizer: torch.optim.Optimizer, worlds: Iterable[World]) -> None:
    """Let a rank of these worlds read the states of an optimizer alone; called by all ranks, in the same order."""
    for world in worlds:
        known = _served.get(world.serving)
        if known is None:
            known = _served[world.serving] = _ServedStates()
            world.serving.offer(_STATES, known.give, known.search)
            world.serving.offer(_OF_OWNERS, known.give_owned)
        known.add(optimizer)


def states_of_owners(optimizer: torch.optim.Optimizer, owned: Mapping[int, Owners]) -> dict[int, dict[Any, Any]]:
    """Whole states of the parameters that other ranks step on, in host memory; called by all ranks, or by one alone.

    Args:
        optimizer: has made a step.
        owned: who sees to the owners of its parameters, by their ids.

    Returns:
        States by the number of the parameter.
    """
    found: dict[int, dict[Any, Any]] = {}
    params = params_of(optimizer)
    for owners in dict.fromkeys(owned.values()):
        world = owners.world
        numbers = [number for number, param in enumerate(params) if owned.get(id(param)) is owners]
        own = [number for number in numbers if owners.owns(params[number])]
        label = f"{type(optimizer).__name__}.state_dict() (all ranks must call it)"
        if world.all_come(label, [params[number] for number in numbers]):
            mine = {number: _written(optimizer, params[number]) for number in own}
            _check_memory(optimizer, world, sum(map(len, mine.values())))
            sent = world.collect(mine, "states of an optimizer")
            for states in world.from_first(lambda sent=sent: sent, "states of an optimizer", PartitionError):  # type: ignore[misc]
                found |= {number: _read(data) for number, data in states.items() if number not in own}
            continue
        item = _served[world.serving].number_of(optimizer)
        for number in set(numbers) - set(own):
            found[number] = _read(world.serving.bytes_of(_OF_OWNERS, (item, number), owners.owner_of(params[number])))
    return {number: state for number, state in found.items() if state}


def _check_memory(optimizer: torch.optim.Optimizer, world: World, own: int) -> None:
    total = sum(size for (size,) in world.everyone.agree([own], "states of an optimizer"))
    lack = lack_of_memory(world, 2 * (total - own), "all states")  # as they come, and as they are kept
    if lack is not None:
        raise UsageError(
            f"{type(optimizer).__name__}.state_dict() gives every rank the states of all parameters, which {lack}: call it "
            "on the main process alone, or use accelerator.save_state"
        )


def all_states(optimizer: torch.optim.Optimizer, owned: Mapping[int, Owners]) -> dict[Tensor, dict[Any, Any]]:
    """The states of all parameters, those of `states_of_owners` too."""
    params = params_of(optimizer)
    others = {params[number]: state for number, state in states_of_owners(optimizer, owned).items()}
    return others | dict(optimizer.state)
