"""Steps on this rank's rows, as plain tensors.

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
from hf_zero.engine.parameters.host_rows import HostParameter
from hf_zero.engine.parameters.partitioned_tensor import rows_like
from hf_zero.optim.kinds import minds_all, wrapped_optimizers
from hf_zero.optim.stand_in import StandIn
from hf_zero.optim.stepping import Arguments, StepCall, Stepping, all_of

_ADAM = (torch.optim.Adam, torch.optim.AdamW)  # not what is derived from them, whose steps may do anything


class RowStepping(Stepping):
    """Steps on this rank's rows: any optimizer that computes each element for itself."""

    def __init__(self) -> None:
        super().__init__()
        # id(parameter) -> what a plain parameter was made for, and the plain one
        self._plain: dict[int, tuple[Tensor, nn.Parameter]] = {}

    def begin(self, call: StepCall) -> Arguments | None:
        """See `Stepping.begin`."""
        choose_fused(call.optimizer)
        return self._begin(call, RowStep)

    def _begin(self, call: StepCall, kind: Callable[[StepCall, Any], RowStep]) -> Arguments:
        call.before_change()
        step = self._under_way = kind(call, self)
        args, kwargs = call.with_closures(step.closure)
        return (step.stand_in, *args), kwargs

    def rows_of(self, param: DTensor) -> nn.Parameter:
        """This rank's rows as a plain parameter, the same one in every step: attributes of the optimizer may hold it."""
        rows = torch_compat.local_of(param)
        known = self._plain.get(id(param))
        if known is None or known[0] is not rows:
            known = self._plain[id(param)] = (rows, nn.Parameter(rows, requires_grad=param.requires_grad))
        known[1].requires_grad_(param.requires_grad)
        return known[1]


class RowStep:
    """One step under way.

    Args:
        call: the step.
        stepping: how the optimizer steps.

    Attributes:
        stand_in: what torch runs the step on.
    """

    def __init__(self, call: StepCall, stepping: RowStepping) -> None:
        self._call = call
        self._minds_all = minds_all(call.optimizer)
        each = (call.optimizer, *wrapped_optimizers(call.optimizer))
        params: dict[int, Any] = {id(p): p for one in each for p in all_of(one) if id(p) in call.worlds}
        self._params: dict[int, DTensor] = params
        self._on_rows = dict(params)
        self._plain: dict[int, nn.Parameter] = {}
        self._given_grad: dict[int, Tensor | None] = {}
        self._copies: list[StandIn] = []
        self._prepare(stepping)
        self._take()
        self.stand_in = self._copy(call.optimizer, {}, self._absent()).stand_in

    def _prepare(self, stepping: Any) -> None:
        """Find the plain parameters."""
        self._plain.update({key: stepping.rows_of(param) for key, param in self._on_rows.items()})

    def _absent(self) -> set[int] | None:
        """Ids of parameters that other ranks step on; None: every rank steps on its rows."""
        return None

    # --- parameters and gradients -------------------------------------------------------------------------------

    def _take(self) -> None:
        """Give the plain parameters their values and gradients."""
        for key, param in self._on_rows.items():
            grad = grad_of(param)
            self._given_grad[key] = self._plain[key].grad = None if grad is None else torch_compat.local_of(grad)

    def _give(self) -> None:
        """Give what the step has done to parameters and gradients back; only what it has assigned is not in place yet."""
        for key, param in self._on_rows.items():
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
                param.grad = rows_like(plain.grad.detach(), param)
            self._given_grad[key] = plain.grad

    def closure(self, evaluate: Callable[[], Any]) -> Callable[[], Any]:
        """The closure for the stand-in's step: the model computes with the present parameters, and gradients arrive."""

        def wrapped() -> Any:
            self._give()
            self._call.after_change()
            result = evaluate()
            self._call.before_change()
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
            if plain.requires_grad != self._params[key].requires_grad:
                self._params[key].requires_grad_(plain.requires_grad)
        if self._minds_all:
            self._call.after_change()  # also of parameters that are not trained

    # --- the stand-in -------------------------------------------------------------------------------------------

    def _copy(self, optimizer: torch.optim.Optimizer, known: dict[int, Any], absent: set[int] | None) -> StandIn:
        copy = StandIn(optimizer, self._plain, self._params, absent or set(), known, is_on_rows=absent is None)
        self._copies.append(copy)
        for param, state in optimizer.state.items() if copy.has_own else ():
            plain = self._plain.get(id(param), param)  # a state may lie under another key than a parameter
            copy.stand_in.state[plain] = torch_compat.locals_of(state) if id(param) in self._on_rows else state
        for inner in wrapped_optimizers(optimizer):
            if id(inner) not in known:
                known[id(inner)] = self._copy(inner, known, absent).stand_in
        copy.swap_attributes(known)
        if copy.has_own:
            copy.swap_in_states(known)
        return copy

    def _state_of(self, param: DTensor, state: dict[Any, Any], before: Mapping[Any, Any]) -> dict[Any, Any] | None:
        """What a stand-in has as the state of a parameter, in the form that the optimizer keeps; None: as it is."""
        if torch_compat.are_locals_of(state, before):
            return None  # changed in place, if at all
        shape = torch_compat.local_of(param).shape
        kept = {}
        for key, value in state.items():
            old = before.get(key)
            if isinstance(value, Tensor) and value.ndim and value.shape == shape and not isinstance(value, DTensor):
                is_same = isinstance(old, DTensor) and torch_compat.local_of(old) is value
                kept[key] = old if is_same else rows_like(value, param)
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


def gradient_of(param: Tensor) -> Tensor:
    """The gradient of this rank's rows, contiguous; the parameter has one."""
    grad = grad_of(param) if isinstance(param, DTensor) else param.grad
    assert grad is not None
    return torch_compat.local_of(grad).contiguous()


def grad_of(param: DTensor) -> DTensor | None:
    """The gradient, cut as the parameter is; one that no backward has reduced yet (stage 1, `no_sync`) is reduced."""
    grad: Any = param.grad
    if grad is None or grad._spec is param._spec or grad.placements == param.placements:
        return grad  # type: ignore[no-any-return]
    return grad.redistribute(param.device_mesh, param.placements)  # type: ignore[no-any-return]


def choose_fused(optimizer: torch.optim.Optimizer) -> None:
    """Let Adam and AdamW run fused where the user has not said how: several times faster on a CPU, and in place."""
    if type(optimizer) not in _ADAM or optimizer.state:
        return
    for param_group in optimizer.param_groups:
        is_open = param_group.get("fused") is None and param_group.get("foreach") is None
        is_plain = not param_group.get("capturable") and not param_group.get("differentiable")
        if is_open and is_plain and all(map(_can_be_fused, param_group["params"])):
            param_group["fused"] = True


def _can_be_fused(param: Tensor) -> bool:
    # Parameters of other models are plain tensors, which no fused step takes together with partitioned ones.
    is_ours = isinstance(param, DTensor | HostParameter)
    return is_ours and param.is_floating_point() and torch_compat.can_be_fused_on(param.device)
