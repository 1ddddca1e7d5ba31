"""One step of an optimizer on plain tensors: on this rank's rows, or on the whole parameters that this rank owns.

[Note: stand-in] An optimizer holds partitioned parameters, but its step runs on a stand-in: a shallow copy, whose groups hold
plain tensors and whose state belongs to them. Any optimizer's unmodified code then computes as in an unsharded run, without
a `DTensor` in sight, and the optimizer itself never holds anything but its partitioned parameters: an exception in the middle
leaves nothing to undo. Torch lets a step's pre-hook replace the arguments, of which the optimizer is the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.engine.optimizer_kinds import wrapped_optimizers
from hf_zero.engine.owners import Owners
from hf_zero.engine.world import World

StateOf = Callable[[DTensor, dict[Any, Any], Mapping[Any, Any]], dict[Any, Any] | None]

_MISSING = object()


class Stepping:
    """How one optimizer steps. An attribute of it, which neither copies nor pickles take along.

    Args:
        owners: of the parameters, by the ranks they are cut over; None: the optimizer steps on rows.
    """

    def __init__(self, owners: dict[World, Owners] | None) -> None:
        self.owners = owners
        self.under_way: Step | None = None
        self._plain: dict[
            int, tuple[Tensor, nn.Parameter]
        ] = {}  # id(parameter) -> this rank's rows, a parameter of them

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copied optimizer finds out anew."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def rows_of(self, param: DTensor) -> nn.Parameter:
        """This rank's rows as a plain parameter, the same one in every step."""
        rows = torch_compat.local_of(param)
        known = self._plain.get(id(param))
        if known is None or known[0] is not rows:
            known = self._plain[id(param)] = (rows, nn.Parameter(rows, requires_grad=param.requires_grad))
        return known[1]


class Step:
    """One step under way.

    Args:
        optimizer: whose step it is.
        stepping: how it steps.
        world_of: the ranks over which each of its partitioned parameters is cut, by the parameter's id; others are plain.
        before_change: to be called before parameters change, and after anything else has used them.
        after_change: to be called when they have changed, though the step goes on.
        has_closure: the step runs the model itself.

    Attributes:
        stand_in: what torch runs the step on.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stepping: Stepping,
        world_of: Mapping[int, World],
        before_change: Callable[[], None],
        after_change: Callable[[], None],
        has_closure: bool,
    ) -> None:
        self._stepping = stepping
        self._before_change, self._after_change = before_change, after_change
        self._has_closure = has_closure
        self._params: dict[int, DTensor] = {}
        for each in (optimizer, *wrapped_optimizers(optimizer)):
            for group in each.param_groups:
                self._params.update({id(p): p for p in group["params"] if id(p) in world_of})
        # Who sees to the owner of a parameter; no entry for one that is stepped on by rows, or is whole on every rank.
        self._owners: dict[int, Owners] = {}
        for world, owners in (stepping.owners or {}).items():
            cut = [k for k, p in self._params.items() if world_of[k] is world and world.layout_of(p).num_ranks > 1]
            self._owners.update(dict.fromkeys(cut, owners))
        self._plain = {key: self._plain_of(key, param) for key, param in self._params.items()}
        self._has_grad: set[int] = set()
        self._copies: list[_Copy] = []
        self._take()
        self.stand_in = self._copy(optimizer, {}).stand_in

    # --- parameters and gradients -------------------------------------------------------------------------------

    def _plain_of(self, key: int, param: DTensor) -> nn.Parameter:
        owners = self._owners.get(key)
        if owners is None:
            return self._stepping.rows_of(param)
        if not owners.owns(param):
            return nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad)
        # One element in memory, until it is known to have a gradient.
        no_values = torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape)
        return nn.Parameter(no_values, param.requires_grad)

    def _take(self) -> None:
        """Give the plain parameters their values and gradients."""
        values: dict[Owners, list[tuple[DTensor, DTensor]]] = {}
        gradients: dict[Owners, list[tuple[DTensor, DTensor]]] = {}
        for key, param in self._params.items():
            plain, owners, grad = self._plain[key], self._owners.get(key), _grad_of(param)
            if grad is not None:
                self._has_grad.add(key)
            if owners is None:
                plain.grad = None if grad is None else torch_compat.local_of(grad)
                continue
            plain.grad = None
            if self._moves(param):
                values.setdefault(owners, []).append((param, param))
            if grad is not None:
                gradients.setdefault(owners, []).append((param, grad))
        for owners, pairs in values.items():
            for (param, _), whole in zip(pairs, owners.collect(pairs, "parameters"), strict=True):
                if whole is not None:
                    self._plain[id(param)].data = whole
        for owners, pairs in gradients.items():
            for (param, _), whole in zip(pairs, owners.collect(pairs, "gradients"), strict=True):
                if whole is not None:
                    self._plain[id(param)].grad = whole

    def _moves(self, param: DTensor) -> bool:
        """Whether a parameter with an owner has its values there; one without a gradient changes at most around a closure."""
        return id(param) in self._has_grad or (self._has_closure and param.requires_grad)

    def _give(self) -> None:
        """Give the rows back to all ranks; for what is stepped on by rows, nothing is to be done."""
        values: dict[Owners, list[tuple[DTensor, Tensor | None]]] = {}
        for key, owners in self._owners.items():
            param = self._params[key]
            if self._moves(param):
                whole = self._plain[id(param)] if owners.owns(param) else None
                values.setdefault(owners, []).append((param, whole))
        for owners, pairs in values.items():
            owners.distribute(pairs, "parameters")

    def closure(self, evaluate: Callable[[], Any]) -> Callable[[], Any]:
        """The closure for the stand-in's step: the model computes with the present parameters, and gradients arrive."""

        def wrapped() -> Any:
            self._give()
            self._after_change()
            result = evaluate()
            self._before_change()
            self._take()
            return result

        return wrapped

    def finish(self) -> None:
        """The step is done: take over what it has changed in its groups, states and attributes."""
        self._give()
        for copy in self._copies:
            copy.take_over(self._state_of)
        for key, plain in self._plain.items():
            if plain.grad is None and key in self._has_grad and key not in self._owners:
                self._params[key].grad = None  # the step has dropped it
            plain.grad = None

    # --- the stand-in -------------------------------------------------------------------------------------------

    def _copy(self, optimizer: torch.optim.Optimizer, known: dict[int, Any]) -> _Copy:
        absent = {key for key in self._owners if self._plain[key].is_meta}
        copy = _Copy(optimizer, self._plain, absent, known)
        self._copies.append(copy)
        for param, state in optimizer.state.items() if copy.has_own else ():
            plain = self._plain.get(id(param))
            if plain is None:
                copy.stand_in.state[param] = state
            elif id(param) in self._owners:
                copy.stand_in.state[plain] = state  # there is one on the owner only
            else:
                copy.stand_in.state[plain] = torch_compat.locals_of(state)
        for inner in wrapped_optimizers(optimizer):
            if id(inner) not in known:
                known[id(inner)] = self._copy(inner, known).stand_in
        copy.swap_attributes(known)
        return copy

    def _state_of(self, param: DTensor, state: dict[Any, Any], before: Mapping[Any, Any]) -> dict[Any, Any] | None:
        """What a stand-in has as the state of a parameter, in the form that the optimizer keeps; None: as it is."""
        owners = self._owners.get(id(param))
        if owners is not None:
            return state if owners.owns(param) else None
        if torch_compat.are_locals_of(state, before):
            return None  # changed in place, if at all
        shape = torch_compat.local_of(param).shape
        kept = {}
        for key, value in state.items():
            old = before.get(key)
            if isinstance(value, Tensor) and value.ndim and value.shape == shape and not isinstance(value, DTensor):
                is_same = isinstance(old, DTensor) and torch_compat.local_of(old) is value
                kept[key] = old if is_same else torch_compat.wrap_like(value, param)
            else:
                kept[key] = value
        return kept


class _Copy:
    """A shallow copy of an optimizer that holds plain parameters.

    Args:
        optimizer: to copy.
        plain: the plain parameters, by the id of those they stand for.
        absent: ids of those that this rank does not step on: they are in no group.
        known: lists and groups that several optimizers share, copied already, by id; written.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plain: Mapping[int, nn.Parameter],
        absent: set[int],
        known: dict[int, Any],
    ) -> None:
        self.optimizer, self._plain = optimizer, plain
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._stood_for: dict[int, Any] = {id(plain[id(p)]): p for p in params if id(p) in plain}
        self.stand_in: Any = object.__new__(type(optimizer))
        vars(self.stand_in).update(vars(optimizer))
        self.has_own = "state" in vars(optimizer)  # else they are properties, which show what an inner optimizer has
        if self.has_own:
            for group in optimizer.param_groups:
                if id(group) not in known:
                    present = [plain.get(id(p), p) for p in group["params"] if id(p) not in absent]
                    known[id(group)] = {**group, "params": present}
            if id(optimizer.param_groups) not in known:
                known[id(optimizer.param_groups)] = [known[id(group)] for group in optimizer.param_groups]
            self.stand_in.param_groups = known[id(optimizer.param_groups)]
            self.stand_in.state = known.setdefault(id(optimizer.state), defaultdict(dict))
        self._given: dict[str, Any] = {}

    def swap_attributes(self, known: Mapping[int, Any]) -> None:
        """Let attributes that hold parameters, groups or inner optimizers hold what stands for them."""
        own = vars(self.stand_in)
        for name, value in vars(self.optimizer).items():
            if name not in ("param_groups", "state"):
                own[name] = self._swapped(value, known)
        self._given = dict(own)

    def _swapped(self, value: Any, known: Mapping[int, Any]) -> Any:
        if id(value) in known:
            return known[id(value)]
        if id(value) in self._plain:
            return self._plain[id(value)]
        if isinstance(value, DTensor) and not value.ndim:
            return value.full_tensor()  # what a `GradScaler` found
        if type(value) in (list, tuple):
            entries = [self._swapped(entry, known) for entry in value]
            is_same = all(new is old for new, old in zip(entries, value, strict=True))
            return value if is_same else type(value)(entries)
        if type(value) is dict:
            pairs = [(self._swapped(k, known), self._swapped(v, known)) for k, v in value.items()]
            is_same = all(n is k and m is v for (n, m), (k, v) in zip(pairs, value.items(), strict=True))
            return value if is_same else dict(pairs)
        return value

    def take_over(self, state_of: StateOf) -> None:
        """Give the optimizer what a step has changed in its stand-in."""
        for name, value in vars(self.stand_in).items():
            if name not in ("param_groups", "state") and self._given.get(name, _MISSING) is not value:
                setattr(self.optimizer, name, value)
        if not self.has_own:
            return
        for group, changed in zip(self.optimizer.param_groups, self.stand_in.param_groups, strict=True):
            for key, value in changed.items():
                if key != "params" and group.get(key, _MISSING) is not value:
                    group[key] = value
        state = self.optimizer.state
        for key, value in self.stand_in.state.items():
            param = self._stood_for.get(id(key))
            kept = value if param is None else state_of(param, value, state.get(param, {}))
            if kept is not None:
                state[key if param is None else param] = kept


def _grad_of(param: DTensor) -> DTensor | None:
    """The gradient, cut as the parameter is; one that no backward has reduced yet (stage 1, `no_sync`) is reduced."""
    grad: Any = param.grad
    if grad is None or grad._spec is param._spec or grad.placements == param.placements:
        return grad  # type: ignore[no-any-return]
    return grad.redistribute(param.device_mesh, param.placements)  # type: ignore[no-any-return]
