"""A shallow copy of an optimizer that holds plain parameters, and takes what a step has changed back to the optimizer.

[Note: what a step may touch] An optimizer's code reads and writes its groups and states, and attributes of its own: lists,
dicts and sets that hold parameters or their ids, or have them as keys; methods; optimizers that it wraps. All of these are
copied with plain parameters in place of partitioned ones; what has been changed, added or dropped in them goes back with the
places exchanged again. Functions that keep the optimizer in a closure are beyond this.
"""

from __future__ import annotations

import copy
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.errors import UsageError
from hf_zero.optim.kinds import in_slots, is_beside, wrapped_optimizers
from hf_zero.optim.overrides import is_manager, overrides_of

StateOf = Callable[[DTensor, dict[Any, Any], Mapping[Any, Any]], dict[Any, Any] | None]

STEPPING = "_zero_stepping"
_MISSING = object()
# Of an optimizer, seen to one by one, and its stepping, which is the real one's.
NOT_SWAPPED = ("param_groups", "state", STEPPING)


class StandIn:
    """A shallow copy of an optimizer that holds plain parameters; see [Note: what a step may touch].

    Args:
        optimizer: to copy.
        plain: the plain parameters, by the id of those they stand for.
        params: those they stand for, by their ids.
        absent: ids of those that this rank does not step on: they are in no group.
        known: optimizers, groups and states that several optimizers share, copied already, by id; written.
        is_on_rows: the plain parameters are this rank's rows.

    Attributes:
        stand_in: the copy.
        has_own: it has states of its own, and not a property that shows those of an inner optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plain: Mapping[int, nn.Parameter],
        params: Mapping[int, Any],
        absent: set[int],
        known: dict[int, Any],
        is_on_rows: bool,
    ) -> None:
        self.optimizer, self._plain, self._is_on_rows = optimizer, plain, is_on_rows
        self._absent = absent
        self._stood_for: dict[int, Any] = {id(each): params[key] for key, each in plain.items() if key in params}
        self.stand_in: Any = object.__new__(type(optimizer))
        self._filtered: set[tuple[int, str]] = set()  # (number of a group, key) of lists beside the parameters
        known[id(optimizer)] = self.stand_in
        self.has_own = "state" in vars(optimizer)
        self._has_groups = "param_groups" in vars(optimizer)  # and not those of an inner optimizer
        if self._has_groups:
            for number, group in enumerate(optimizer.param_groups):
                if id(group) not in known:
                    known[id(group)] = self._present(number, group, absent)
            if id(optimizer.param_groups) not in known:
                known[id(optimizer.param_groups)] = [known[id(group)] for group in optimizer.param_groups]
            self.stand_in.param_groups = known[id(optimizer.param_groups)]
        if self.has_own:
            self.stand_in.state = known.setdefault(id(optimizer.state), defaultdict(dict))
        self._given: dict[str, Any] = {}
        self._containers: list[tuple[Any, Any]] = []  # of the optimizer, and what stands for each
        self._tuples: list[tuple[Any, Any]] = []  # likewise; nothing in them changes
        self._inner: dict[int, Any] = {}  # id(what stands for an inner optimizer or a group) -> the real one

    def _present(self, number: int, group: dict[str, Any], absent: set[int]) -> dict[str, Any]:
        """A group without absent parameters, also in the lists that go along with them, such as their names."""
        is_here = [id(param) not in absent for param in group["params"]]
        kept = {**group, "params": [self._plain.get(id(p), p) for p in group["params"] if id(p) not in absent]}
        for key, value in group.items() if not all(is_here) else ():
            if key != "params" and is_beside(key, value, len(is_here)):
                kept[key] = [entry for entry, here in zip(value, is_here, strict=True) if here]
                self._filtered.add((number, key))
        return kept

    # --- attributes ---------------------------------------------------------------------------------------------

    def swap_attributes(self, known: Mapping[int, Any]) -> None:
        """Let attributes that hold parameters, groups or inner optimizers hold what stands for them."""
        own = vars(self.stand_in)
        for name, value in self._attributes():
            own_value = self._swapped(name, value, known)
            self._given[name] = own_value
            if name in vars(self.optimizer):
                own[name] = own_value
            else:
                setattr(self.stand_in, name, own_value)  # a slot
        inner = wrapped_optimizers(self.optimizer)
        self._inner = {id(known[id(each)]): each for each in inner if id(each) in known}
        groups = zip(self.optimizer.param_groups, self.stand_in.param_groups, strict=True)
        self._inner.update({id(new): old for old, new in groups})

    def swap_in_states(self, known: Mapping[int, Any]) -> None:
        """Let states that hold a group or a parameter (optimi's `gradient_release`) hold what stands for it."""
        stands = {**self._plain, **known}
        for param, state in self.stand_in.state.items():
            self.stand_in.state[param] = _exchanged(state, stands)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """What the optimizer has, but for its groups and states, and for a scheduler's `step`, which is of the real one."""
        for name, value in vars(self.optimizer).items():
            if name not in NOT_SWAPPED and not getattr(value, "_wrapped_by_lr_sched", False):
                yield name, value
        yield from in_slots(self.optimizer)

    def _swapped(self, name: str, value: Any, known: Mapping[int, Any]) -> Any:
        if id(value) in known:
            return known[id(value)]
        if id(value) in self._plain:
            return self._plain[id(value)]
        if type(value) is int and value in self._plain:
            return id(self._plain[value])
        if isinstance(value, DTensor):
            return self._plain_of(name, value)
        if isinstance(value, types.MethodType) and id(value.__self__) in known:
            return types.MethodType(value.__func__, known[id(value.__self__)])
        if type(value) in (list, tuple, set, deque):
            entries = [self._swapped(name, entry, known) for entry in value]
            is_same = all(new is old for new, old in zip(entries, value, strict=True))
            return value if is_same else self._remembered(value, type(value)(entries))
        if isinstance(value, dict):
            pairs = [(self._swapped(name, k, known), self._swapped(name, v, known)) for k, v in value.items()]
            if all(n is k and m is v for (n, m), (k, v) in zip(pairs, value.items(), strict=True)):
                return value
            new = copy.copy(value)  # also of a defaultdict
            new.clear()
            new.update(pairs)
            return self._remembered(value, new)
        if is_manager(value):
            return overrides_of(value, self.optimizer, self.stand_in.param_groups, self._plain)
        return value

    def _plain_of(self, name: str, value: DTensor) -> Tensor:
        """A tensor that was made like a partitioned parameter: this rank's rows of it, or the whole of a number."""
        if not value.ndim:
            return value.full_tensor()  # what a `GradScaler` found
        if self._is_on_rows:
            return torch_compat.local_of(value)
        raise UsageError(
            f"{type(self.optimizer).__name__}.{name} holds a tensor that was made like a partitioned parameter, but the step "
            "is on whole parameters (optimizer_on): make it in the step, in self.state[param]"
        )

    def _remembered(self, old: Any, new: Any) -> Any:
        (self._tuples if isinstance(old, tuple) else self._containers).append((old, new))
        return new

    # --- what has changed ---------------------------------------------------------------------------------------

    def take_over(self, state_of: StateOf | None) -> None:
        """Give the optimizer what a step has changed in its stand-in.

        Args:
            state_of: the form in which the optimizer keeps a parameter's state; None: states are seen to elsewhere.
        """
        self._take_containers()
        there = vars(self.stand_in)
        for name in [*there, *(name for name in self._given if name not in there)]:
            value = getattr(self.stand_in, name, _MISSING)
            if name not in NOT_SWAPPED and value is not _MISSING and self._given.get(name, _MISSING) is not value:
                setattr(self.optimizer, name, value)
        if self._has_groups and state_of is not None:
            self._take_held()
        groups = zip(self.optimizer.param_groups, self.stand_in.param_groups, strict=True)
        for number, (group, changed) in enumerate(groups) if self._has_groups else ():
            for key, value in changed.items():
                is_ours = key == "params" or (number, key) in self._filtered
                if not is_ours and group.get(key, _MISSING) is not value:
                    group[key] = value
        if state_of is None or not self.has_own:
            return
        state, real = self.optimizer.state, self._real
        for key, value in self.stand_in.state.items():
            param = self._stood_for.get(id(key))
            kept = value if param is None else state_of(param, value, state.get(param, {}))
            if kept is not None:
                kept = _exchanged(kept, real)
                state[key if param is None else param] = kept
        kept_keys = {id(self._stood_for.get(id(key), key)) for key in self.stand_in.state}
        for key in [key for key in state if id(key) not in kept_keys]:
            del state[key]  # the step has dropped it

    def _take_held(self) -> None:
        """Let groups hold the parameters that the step has put there."""
        before = [[id(self._plain.get(id(p), p)) for p in group["params"]] for group in self.optimizer.param_groups]
        absent = {id(self._plain[key]) for key in self._absent}
        present = [[key for key in keys if key not in absent] for keys in before]
        groups = self.stand_in.param_groups
        if [[id(p) for p in group["params"]] for group in groups] == present:
            return
        if absent or len(groups) != len(before):
            raise UsageError(
                f"the step of {type(self.optimizer).__name__} changes which parameters it holds, and one rank steps on each "
                "(optimizer_on): set optimizer_on: every_rank, or change its groups between steps, one by one"
            )
        for group, changed in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [self._stood_for.get(id(p), p) for p in changed["params"]]

    @property
    def _real(self) -> dict[int, Any]:
        """Id of what stands for a parameter, a group or an inner optimizer -> the real one."""
        return {**self._stood_for, **self._inner}

    def _take_containers(self) -> None:
        real = {**self._real, **{id(new): old for old, new in (*self._containers, *self._tuples)}}
        ids = {key: id(param) for key, param in self._stood_for.items()}

        def back(value: Any) -> Any:
            return ids.get(value, value) if type(value) is int else real.get(id(value), value)

        for old, new in self._containers:
            entries = [(back(k), back(v)) for k, v in new.items()] if isinstance(new, dict) else list(map(back, new))
            old.clear()
            (old.extend if isinstance(old, (list, deque)) else old.update)(entries)


def _exchanged(state: Any, others: Mapping[int, Any]) -> Any:
    """A parameter's state with other groups and parameters in it, by their ids; itself if it has none."""
    if not isinstance(state, dict):
        return state
    found = {name: others[id(value)] for name, value in state.items() if id(value) in others}
    if not found:
        return state
    new = copy.copy(state)
    new.update(found)
    return new
