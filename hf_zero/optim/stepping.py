"""One step of an optimizer on plain tensors: on this rank's rows, or on the whole parameters that this rank owns.

[Note: stand-in] An optimizer holds partitioned parameters, but its step runs on a stand-in: a shallow copy, whose groups hold
plain tensors and whose state belongs to them. Any optimizer's unmodified code then computes as in an unsharded run, without
a `DTensor` in sight, and the optimizer itself never holds anything but its partitioned parameters: an exception in the middle
leaves nothing to undo. Torch lets a step's pre-hook replace the arguments, of which the optimizer is the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.engine.ranks.world import World
from hf_zero.optim.kinds import wrapped_optimizers
from hf_zero.optim.owners import Owners
from hf_zero.optim.stand_in import StandIn

# Packages whose optimizers leave a parameter without a gradient alone, so that its values need not travel.
_LEAVES_ALONE = ("torch.optim.", "transformers.", "bitsandbytes.", "pytorch_optimizer.")
_KEPT, _CHANGED, _DROPPED = 0, 1, 2  # what became of a gradient in a step


class Stepping:
    """How one optimizer steps. An attribute of it, which neither copies nor pickles take along.

    Args:
        owners: of the parameters, by the ranks they are cut over; None: the optimizer steps on rows.
        streamer: the memory for steps whose states are on a disk, see `streaming`; None: they are in memory.

    Attributes:
        under_way: the step that runs now, which has a `finish`.
    """

    def __init__(self, owners: dict[World, Owners] | None, streamer: Any = None) -> None:
        self.owners = owners
        self.streamer = streamer
        self.under_way: Any = None
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
        known[1].requires_grad_(param.requires_grad)
        return known[1]

    def whole_of(self, param: DTensor) -> nn.Parameter:
        """A plain parameter for the whole, the same one in every step; without values."""
        known = self._plain.get(id(param))
        if known is None or known[0] is not param:
            no_values = nn.Parameter(torch.empty(0, dtype=param.dtype, device=param.device), param.requires_grad)
            known = self._plain[id(param)] = (param, no_values)
        known[1].data = _without_values(param)
        known[1].requires_grad_(param.requires_grad)
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
        self._minds_all = minds_all(optimizer)
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
        self._given_grad: dict[int, Tensor | None] = {}
        self._versions: dict[int, int] = {}
        self._copies: list[StandIn] = []
        self._take()
        self.stand_in = self._copy(optimizer, {}).stand_in

    # --- parameters and gradients -------------------------------------------------------------------------------

    def _plain_of(self, key: int, param: DTensor) -> nn.Parameter:
        owners = self._owners.get(key)
        if owners is None:
            return self._stepping.rows_of(param)
        return self._stepping.whole_of(param)

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
                self._given_grad[key] = plain.grad
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
                    self._given_grad[id(param)] = whole
                    self._versions[id(param)] = whole._version

    def _moves(self, param: DTensor) -> bool:
        """Whether a parameter with an owner has its values there; without a gradient, where a step may change it anyway."""
        return id(param) in self._has_grad or self._minds_all or (self._has_closure and param.requires_grad)

    def _give(self) -> None:
        """Give rows, and what the step has done to gradients, back to all ranks."""
        values: dict[Owners, list[tuple[DTensor, Tensor | None]]] = {}
        for key, param in self._params.items():
            if key not in self._owners:
                self._give_rows(key, param)
        for key, owners in self._owners.items():
            param = self._params[key]
            if self._moves(param):
                whole = self._plain[id(param)] if owners.owns(param) else None
                values.setdefault(owners, []).append((param, whole))
        for owners, pairs in values.items():
            owners.distribute(pairs, "parameters")
            self._give_gradients(owners)

    def _give_rows(self, key: int, param: DTensor) -> None:
        """Where the step was on rows, only what it has assigned is to be taken over."""
        plain, rows = self._plain[key], torch_compat.local_of(param)
        if plain.data_ptr() != rows.data_ptr():  # to `.data`
            for copy in self._copies:
                keep_old_values(copy.stand_in.state, plain, rows)
            rows.copy_(plain.detach())
            plain.data = rows
        grad = self._given_grad.get(key)
        if plain.grad is None and grad is not None:
            param.grad = None
        elif plain.grad is not None and plain.grad is not grad:
            param.grad = torch_compat.wrap_like(plain.grad.detach(), param)
        self._given_grad[key] = plain.grad

    def _give_gradients(self, owners: Owners) -> None:
        """What a step has done to gradients: dropped, replaced or written into them."""
        keys = [key for key in self._owners if self._owners[key] is owners and key in self._has_grad]
        kinds = [self._grad_change(key) if owners.owns(self._params[key]) else _KEPT for key in keys]
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
            plain.grad = None
            if key in self._owners:
                plain.data = _without_values(plain)
        if self._minds_all:
            self._after_change()  # also of parameters that are not trained

    # --- the stand-in -------------------------------------------------------------------------------------------

    def _copy(self, optimizer: torch.optim.Optimizer, known: dict[int, Any]) -> StandIn:
        absent = {key for key, owners in self._owners.items() if not owners.owns(self._params[key])}
        copy = StandIn(optimizer, self._plain, absent, known, is_on_rows=self._stepping.owners is None)
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


def keep_old_values(states: Mapping[Any, Any], plain: Tensor, rows: Tensor) -> None:
    """Let states that hold a parameter's old memory, in place of which the step has assigned new one, keep its values."""
    if plain in states:
        memory, state = rows.untyped_storage().data_ptr(), states[plain]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.numel() and value.untyped_storage().data_ptr() == memory:
                state[name] = value.clone()


def minds_all(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer, or one that it wraps, may change parameters that have no gradient."""
    kinds = {type(each).__module__ for each in (optimizer, *wrapped_optimizers(optimizer))}
    return not all(kind.startswith(_LEAVES_ALONE) for kind in kinds)


def gradient_of(param: Tensor) -> Tensor:
    """The gradient of this rank's rows, contiguous; the parameter has one."""
    grad = _grad_of(param) if isinstance(param, DTensor) else param.grad
    assert grad is not None
    return torch_compat.local_of(grad).contiguous()


def _without_values(param: Tensor) -> Tensor:
    """A tensor of the shape of a parameter, of which one element is in memory: not a number, to whoever reads it."""
    filler = torch.nan if param.is_floating_point() or param.is_complex() else 0
    return torch.full((), filler, dtype=param.dtype, device=param.device).expand(param.shape)


def _grad_of(param: DTensor) -> DTensor | None:
    """The gradient, cut as the parameter is; one that no backward has reduced yet (stage 1, `no_sync`) is reduced."""
    grad: Any = param.grad
    if grad is None or grad._spec is param._spec or grad.placements == param.placements:
        return grad  # type: ignore[no-any-return]
    return grad.redistribute(param.device_mesh, param.placements)  # type: ignore[no-any-return]
