"""States of optimizers, for a rank that reads them alone (`torch.save`): see [Note: alone] in `engine/ranks/serving`."""

from __future__ import annotations

import io
import sys
import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.engine.parameters.on_host import lack_of_memory
from hf_zero.engine.ranks.leaving import Lasting
from hf_zero.engine.ranks.serving import Serving
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CollectiveError, PartitionError, UsageError
from hf_zero.layout import RowLayout
from hf_zero.optim.kinds import wrapped_optimizers
from hf_zero.optim.owners import Owners
from hf_zero.optim.stepping import Stepping, params_of

_STATES, _OF_OWNERS = "states of optimizers that have made a step", "states of parameters that a rank owns"

_KEEP = "let all ranks call `state_dict()`, or keep the optimizer until rank 0 has saved (`dist.barrier()`)"

_Item = tuple[int, int, Any]  # numbers of the optimizer and of its parameter, and the state's name


class _States:
    """What an optimizer holds. Its stepping has it, so that both die together; or this lives on, see [Note: leaving]."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.is_of = weakref.ref(optimizer)
        self.served: list[tuple[weakref.ref[Serving], Lasting[_States]]] = []
        self.follow(optimizer)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Have what it holds now: a load replaces both."""
        self._state, self.param_groups = optimizer.state, optimizer.param_groups

    def of(self, param: Tensor) -> dict[Any, Any]:
        """The states of a parameter; empty if there are none."""
        optimizer = self.is_of()
        state: Mapping[Any, dict[Any, Any]] = self._state if optimizer is None else optimizer.state
        return state.get(param, {})

    @property
    def params(self) -> list[Tensor]:
        """The optimizer's parameters, in order."""
        optimizer = self.is_of()
        groups = self.param_groups if optimizer is None else optimizer.param_groups
        return [param for group in groups for param in group["params"]]

    _is_exiting: ClassVar = staticmethod(sys.is_finalizing)  # by then the module has no names any more

    def __del__(self) -> None:
        if not self._is_exiting():
            for of_world, reference in self.served:
                if (serving := of_world()) is not None:
                    serving.keep(reference, self)


class _ServedStates:
    """Of the optimizers that ranks have come to a step of, or loaded, in an order which is the same on every rank.

    Args:
        serving: that offers them.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = weakref.ref(serving)
        self._optimizers: list[Lasting[_States]] = []
        self._items: dict[int, _Item] = {}  # by id(rows), as seen last

    def add(self, states: _States) -> None:
        if not any(each() is states for each in self._optimizers):
            self._optimizers.append(Lasting(states))
            states.served.append((self._serving, self._optimizers[-1]))

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
            if (states := reference()) is not None
            for index, param in enumerate(states.params)
            for name, value in states.of(param).items()
            if isinstance(value, Root)
        }

    def _state(self, number: int, index: int, name: Any) -> Root | None:
        states = self._optimizers[number]() if number < len(self._optimizers) else None
        params = [] if states is None else states.params
        value = states.of(params[index]).get(name) if states is not None and index < len(params) else None
        return value if isinstance(value, Root) else None

    def give(self, item: _Item) -> tuple[Tensor, RowLayout]:
        """This rank's rows of a state."""
        state = self._state(*item)
        if state is None:
            raise CollectiveError(f"the optimizer's state {item[2]!r} does not exist there any more: {_KEEP}")
        return state.rows, state.held[1].rows

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Of one that has made a step."""
        found = (
            number for number, each in enumerate(self._optimizers) if (states := each()) and states.is_of() is optimizer
        )
        return next(found)

    def give_owned(self, item: tuple[int, int]) -> tuple[Tensor, RowLayout]:
        """The state of a parameter that this rank owns, as bytes; by the numbers of the optimizer and the parameter."""
        number, index = item
        states = self._optimizers[number]()
        if states is None:
            raise CollectiveError(f"the optimizer does not exist there any more: {_KEEP}")
        param = states.params[index]
        data = _written(states.of(param), param, states.params)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8), RowLayout((len(data),), 1)


class _Numbered(NamedTuple):
    """A parameter that a state holds, as optimi's `gradient_release` keeps the group: its number among the optimizer's."""

    number: int


def _written(state: dict[Any, Any], param: Tensor, params: list[Tensor]) -> bytes:
    """The states that the owner alone has; a wrapper's may be sharded, which every rank has, as it has the parameters."""
    state = {name: value for name, value in state.items() if not isinstance(value, Root)}
    numbers = {id(each): number for number, each in enumerate(params)}
    state = pytree.tree_map_only(
        Root, lambda held: _Numbered(numbers[id(held)]) if id(held) in numbers else held, state
    )
    file, world = io.BytesIO(), param.held[0] if isinstance(param, Root) else None
    with nullcontext() if world is None else world.serving.beside(param.device):
        torch.save(state, file)
    return file.getvalue()


def _read(data: bytes, params: list[Tensor]) -> dict[Any, Any]:
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    of_this_rank = pytree.tree_map(
        lambda leaf: params[leaf.number] if isinstance(leaf, _Numbered) else leaf,
        state,
        is_leaf=lambda node: isinstance(node, _Numbered),
    )
    return cast(dict[Any, Any], of_this_rank)


_served: weakref.WeakKeyDictionary[Serving, _ServedStates] = weakref.WeakKeyDictionary()


def serve_states(optimizer: torch.optim.Optimizer, stepping: Stepping, worlds: Iterable[World]) -> None:
    """Let a rank of these worlds read the states of an optimizer alone, and of those it wraps.

    Called by all ranks, in the same order.

    Args:
        optimizer: about to step, or loaded.
        stepping: its own.
        worlds: over which its parameters are cut.
    """
    each = (optimizer, *(inner for inner in wrapped_optimizers(optimizer) if "state" in vars(inner)))
    served = stepping.served
    if served is None or [states.is_of() for states in served] != list(each):
        served = stepping.served = [_States(one) for one in each]
    for states, one in zip(served, each, strict=True):
        states.follow(one)
    for world in worlds:
        known = _served.get(world.serving)
        if known is None:
            known = _served[world.serving] = _ServedStates(world.serving)
            world.serving.offer(_STATES, known.give, known.search)
            world.serving.offer(_OF_OWNERS, known.give_owned)
        for states in served:
            known.add(states)


def states_of_owners(optimizer: torch.optim.Optimizer, owned: Mapping[int, Owners]) -> dict[int, dict[Any, Any]]:
    """Whole states of the parameters that other ranks step on, in host memory; called by all ranks, or by one alone.

    Sharded ones, as a wrapper may keep, are not among them: this rank has those.

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
            mine = {number: _written(optimizer.state.get(params[number], {}), params[number], params) for number in own}
            _check_memory(optimizer, world, sum(map(len, mine.values())))
            sent = world.collect(mine, "states of an optimizer")
            for states in world.from_first(lambda sent=sent: sent, "states of an optimizer", PartitionError):  # type: ignore[misc]
                found |= {number: _read(data, params) for number, data in states.items() if number not in own}
            continue
        item = _served[world.serving].number_of(optimizer)
        for number in set(numbers) - set(own):
            data = world.serving.bytes_of(_OF_OWNERS, (item, number), owners.owner_of(params[number]))
            found[number] = _read(data, params)
    return {number: state for number, state in found.items() if state}


def _check_memory(optimizer: torch.optim.Optimizer, world: World, own: int) -> None:
    total = sum(size for (size,) in world.everyone.agree([own], "states of an optimizer"))
    lack = lack_of_memory(world, 2 * (total - own), "all states")  # as they come, and as they are kept
    if lack is not None:
        raise UsageError(
            f"{type(optimizer).__name__}.state_dict() gives every rank the states of all parameters, which {lack}: call it "
            "on the main process alone, or use accelerator.save_state"
        )


def with_states_of_others(own: Mapping[Any, Any], others: Mapping[Any, dict[Any, Any]]) -> dict[Any, Any]:
    """This rank's states and those of `states_of_owners`, by what both are known by; what is no parameter's is each rank's."""
    return {**others, **{key: {**others[key], **state} if key in others else state for key, state in own.items()}}


def all_states(optimizer: torch.optim.Optimizer, owned: Mapping[int, Owners]) -> dict[Tensor, dict[Any, Any]]:
    """The states of all parameters, those of `states_of_owners` too."""
    params = params_of(optimizer)
    others = {params[number]: state for number, state in states_of_owners(optimizer, owned).items()}
    return with_states_of_others(optimizer.state, others)
