"""Steps on whole parameters by their owners, and on rows for what is whole on every rank; see [Note: owners]."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError
from hf_zero.optim.kinds import wrapped_optimizers
from hf_zero.optim.on_rows import RowStep, RowStepping, grad_of
from hf_zero.optim.owners import Owners
from hf_zero.optim.served import states_of_owners, with_states_of_others
from hf_zero.optim.stepping import Arguments, StepCall, all_of, params_of
from hf_zero.optim.trial import states_of_step

_KEPT, _CHANGED, _DROPPED = 0, 1, 2  # what became of a gradient in a step; the greatest of all ranks counts


class OwnerStepping(RowStepping):
    """Steps on whole parameters, each on one rank: any optimizer that sees to each parameter by itself.

    Args:
        optimizer: its `state_dict()` has all states from now on, those of other ranks' parameters too.
    """

    owners_class: ClassVar[type[Owners]] = Owners
    step_class: ClassVar[type[RowStep]]

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._owners: dict[World, Owners] = {}
        self._optimizer = weakref.ref(optimizer)
        self._names: set[Any] | None = None  # of the states that its step makes
        itself = weakref.ref(self)
        for each in (optimizer, *wrapped_optimizers(optimizer)):  # whose files a wrapper's may be made of
            if hasattr(each, "_optimizer_state_dict_post_hooks"):  # it may not have called torch's __init__
                each.register_state_dict_post_hook(lambda *given: _add_states_of_others(itself(), *given))

    def begin(self, call: StepCall) -> Arguments:
        """See `Stepping.begin`."""
        return self._begin(call, self.step_class)

    def hear_of(self, optimizer: torch.optim.Optimizer, worlds: Mapping[int, World]) -> None:
        """Choose owners for parameters that have none."""
        if any(world.tensor.num_ranks > 1 for world in worlds.values()):
            raise UsageError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} steps on whole parameters, each on one rank "
                "(optimizer_on), which no rank has with tp_size: use an elementwise optimizer (torch.optim.AdamW, ...), "
                "mark_elementwise if it is one, or leave tp_size out"
            )
        for world in dict.fromkeys(worlds.values()):
            cut = [p for p in all_of(optimizer) if worlds.get(id(p)) is world and world.layout_of(p).num_ranks > 1]
            self._owners.setdefault(world, self.owners_class(world)).spread(cut)

    def owned(self, params: Iterable[Tensor], worlds: Mapping[int, World]) -> dict[int, Owners]:
        """See `Stepping.owned`; what is whole on every rank has no owner."""
        return {id(p): self._owners[worlds[id(p)]] for p in params if worlds[id(p)].layout_of(p).num_ranks > 1}

    def owned_now(self, optimizer: torch.optim.Optimizer) -> dict[int, Owners]:
        """As `owned`, of the parameters that have had a step."""
        return {id(p): owners for owners in self._owners.values() for p in params_of(optimizer) if owners.knows(p)}

    def kept(self, value: Any, known: ZeroParameter) -> Any:
        """A state as it is: owners keep whole states, the others drop theirs at the first step."""
        return value

    def _cut_loaded_state(
        self, states: dict[Any, Any], param: DTensor, known: ZeroParameter, world: World, place: str
    ) -> None:
        if not known.is_sharded:
            super()._cut_loaded_state(states, param, known, world, place)
            return
        # Every rank gathers, and then only the owner keeps what it has.
        kept = {key: value for key, value in states[param].items() if self._is_of_another(key, value)}
        for key, value in states[param].items():
            states[param][key] = value.full_tensor() if isinstance(value, DTensor) and key not in kept else value
        if not self._owners[world].steps_on(param):
            states[param] = kept
            if not kept:
                del states[param]

    def _is_of_another(self, key: Any, value: Any) -> bool:
        """Whether an optimizer around this one has made a state, at rest, for steps of its own."""
        if not isinstance(value, DTensor):
            return False
        if self._names is None:
            optimizer = self._optimizer()
            assert optimizer is not None
            group = next(group for group in optimizer.param_groups if group["params"])
            try:
                self._names = set(states_of_step(optimizer, group, group["params"][0]))
            except UsageError:
                return False
        return key not in self._names

    def whole_of(self, param: DTensor) -> nn.Parameter:
        """A plain parameter for the whole, the same one in every step; without values."""
        known = self._plain.get(id(param))
        if known is None or known[0] is not param:
            no_values = nn.Parameter(torch.empty(0, dtype=param.dtype, device=param.device), param.requires_grad)
            known = self._plain[id(param)] = (param, no_values)
        known[1].data = _without_values(param)
        known[1].requires_grad_(param.requires_grad)
        return known[1]


class OwnedStep(RowStep):
    """One step under way, of which the owners of parameters compute their parts."""

    def _prepare(self, stepping: OwnerStepping) -> None:
        self._owners = stepping.owned(self._params.values(), self._call.worlds)
        self._on_rows = {key: param for key, param in self._params.items() if key not in self._owners}
        super()._prepare(stepping)
        self._plain.update({key: stepping.whole_of(self._params[key]) for key in self._owners})
        self._has_grad: set[int] = set()
        self._versions: dict[int, int] = {}

    def _absent(self) -> set[int]:
        return {key for key, owners in self._owners.items() if not owners.steps_on(self._params[key])}

    def _take(self) -> None:
        """Give the plain parameters their values and gradients; whole ones travel to their owners."""
        super()._take()
        values: dict[Owners, list[tuple[DTensor, DTensor]]] = {}
        gradients: dict[Owners, list[tuple[DTensor, DTensor]]] = {}
        for key, owners in self._owners.items():
            param, grad = self._params[key], grad_of(self._params[key])
            self._plain[key].grad = None
            if grad is not None:
                self._has_grad.add(key)
                gradients.setdefault(owners, []).append((param, grad))
            if self._moves(param):
                values.setdefault(owners, []).append((param, param))
        for owners, pairs in values.items():
            for (param, _), whole in zip(pairs, owners.collect(pairs, "parameters"), strict=True):
                if whole is not None:
                    self._plain[id(param)].data = whole
        for owners, pairs in gradients.items():
            for (param, _), whole in zip(pairs, owners.collect(pairs, "gradients"), strict=True):
                if whole is not None:
                    self._given_grad[id(param)] = self._plain[id(param)].grad = whole
                    self._versions[id(param)] = whole._version

    def _moves(self, param: DTensor) -> bool:
        """Whether a parameter with an owner has its values there; without a gradient, where a step may change it anyway."""
        return id(param) in self._has_grad or self._minds_all or (self._call.has_closure and param.requires_grad)

    def _give(self) -> None:
        """Give rows, and what the step has done to gradients, back to all ranks."""
        super()._give()
        values: dict[Owners, list[tuple[DTensor, Tensor | None]]] = {}
        for key, owners in self._owners.items():
            param = self._params[key]
            if self._moves(param):
                whole = self._plain[key] if owners.steps_on(param) else None
                values.setdefault(owners, []).append((param, whole))
        for owners, pairs in values.items():
            owners.distribute(pairs, "parameters")
            self._give_gradients(owners)

    def _give_gradients(self, owners: Owners) -> None:
        """What a step has done to gradients: dropped, replaced or written into them."""
        keys = [key for key in self._owners if self._owners[key] is owners and key in self._has_grad]
        kinds = [self._grad_change(key) if owners.steps_on(self._params[key]) else _KEPT for key in keys]
        by_rank = owners.world.everyone.agree(kinds, "gradients that a step has changed")
        changed: list[tuple[DTensor, Tensor | None]] = []
        for key, kind in zip(keys, map(max, zip(*by_rank, strict=True)), strict=True):
            param = self._params[key]
            if kind == _DROPPED:
                param.grad = None
            elif kind == _CHANGED:
                changed.append((param, self._plain[key].grad))
        owners.distribute(changed, "gradients", of_gradients=True)

    def _grad_change(self, key: int) -> int:
        grad, given = self._plain[key].grad, self._given_grad[key]
        if grad is None:
            return _DROPPED
        return _KEPT if grad is given and grad._version == self._versions[key] else _CHANGED

    def finish(self) -> None:
        """See `RowStep.finish`; whole values are given back."""
        super().finish()
        for key in self._owners:
            self._plain[key].data = _without_values(self._plain[key])

    def _state_of(self, param: DTensor, state: dict[Any, Any], before: Mapping[Any, Any]) -> dict[Any, Any] | None:
        owners = self._owners.get(id(param))
        if owners is None:
            return super()._state_of(param, state, before)
        return state if owners.steps_on(param) else None  # what the others have beside it stays


OwnerStepping.step_class = OwnedStep


def _without_values(param: Tensor) -> Tensor:
    """A tensor of the shape of a parameter, of which one element is in memory: not a number, to whoever reads it."""
    filler = torch.nan if param.is_floating_point() or param.is_complex() else 0
    return torch.full((), filler, dtype=param.dtype, device=param.device).expand(param.shape)


def _add_states_of_others(
    stepping: OwnerStepping | None, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """Let a `state_dict()` have the states of all parameters, as in one process."""
    if stepping is not None and vars(optimizer).get("_zero_checked_state") is optimizer.state:
        missing = states_of_owners(optimizer, stepping.owned_now(optimizer))
        found = with_states_of_others(state_dict["state"], missing)
        state_dict["state"] = {
            key: found[key] for key in sorted(found, key=lambda key: (not isinstance(key, int), str(key).zfill(9)))
        }
