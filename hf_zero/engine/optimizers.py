"""Optimizers beside the engine: they are rebound to partitioned parameters, Adam computes on rows, engines hear of steps."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_zero import torch_compat
from hf_zero.engine.engine import ZeroEngine, live_engines
from hf_zero.engine.parameter import ZeroParameter
from hf_zero.errors import PartitionError, UsageError

_ADAM = (torch.optim.Adam, torch.optim.AdamW)  # not what is derived from them, whose steps may do anything


# Their steps need more than each element for itself, or operations that torch has not for `DTensor`s.
_NOT_ELEMENTWISE = ("Adafactor", "Muon", "LBFGS", "SparseAdam", "Rprop")


def _refuse_whole_matrix_optimizers(optimizer: torch.optim.Optimizer) -> None:
    name = next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in _NOT_ELEMENTWISE), None)
    if name is not None:
        raise UsageError(
            f"{name} cannot step on partitioned parameters: use an elementwise optimizer (AdamW, Adam, SGD, Adagrad, RMSprop, "
            "Lion, ...), or stage 0"
        )


def _step_on_rows(optimizer: torch.optim.Optimizer) -> None:
    """Let Adam and AdamW compute on rows, as they are elementwise: on `DTensor`s they take several times longer."""
    if type(optimizer) in _ADAM:
        torch_compat.let_adam_compute_on_rows(optimizer)


def _choose_fused(optimizer: torch.optim.Optimizer) -> None:
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
    return isinstance(param, DTensor) and param.is_floating_point() and param.device.type in ("cpu", "cuda")


def _cut_loaded_states(optimizer: torch.optim.Optimizer) -> None:
    """Let states that were loaded whole, as a plain run saves them, be this rank's rows; checked once for every load."""
    if vars(optimizer).get("_zero_checked_state") is optimizer.state:
        return
    for index, param in enumerate(_params_of(optimizer)):
        owner = next((engine for engine in live_engines() if engine.find(param) is not None), None)
        known = None if owner is None else owner.find(param)
        if known is None or not isinstance(param, DTensor) or param not in optimizer.state:
            continue
        for key, value in optimizer.state[param].items():
            if not isinstance(value, Tensor):
                continue
            if isinstance(value, DTensor):
                if value.shape == param.shape and value.placements != param.placements:
                    optimizer.state[param][key] = value.redistribute(param.device_mesh, param.placements)
            elif value.shape == param.shape:
                optimizer.state[param][key] = _cut_state(value, param, known)
            elif value.ndim == param.ndim and value.shape[1:] == param.shape[1:] and value.ndim:
                raise PartitionError(
                    f"the optimizer's state {key!r} of {known.name!r} (its parameter {index}) has the shape "
                    f"{tuple(value.shape)}, but the parameter is {tuple(param.shape)}: load a whole state of this "
                    "model, as a plain run saves it"
                )
    vars(optimizer)["_zero_checked_state"] = optimizer.state


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    params = _params_of(optimizer)
    for engine in live_engines():
        name = next(filter(None, map(engine.replaced_name, params)), None)
        if name is not None:
            raise PartitionError(
                f"the optimizer holds {name!r} as it was before the model was partitioned, so it would train nothing: "
                "make the optimizer after `shard_model`, or pass both to `ZeroAccelerator.prepare`"
            )
        if any(map(engine.find, params)):
            if engine.world.partitions:
                _refuse_whole_matrix_optimizers(optimizer)
                _cut_loaded_states(optimizer)
                _choose_fused(optimizer)
                _step_on_rows(optimizer)
            engine.before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for engine in live_engines():
        engine.on_step(_params_of(optimizer))


def _params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for param_group in optimizer.param_groups for param in param_group["params"]]


def rebind_optimizer(optimizer: torch.optim.Optimizer, engine: ZeroEngine) -> None:
    """Let an optimizer hold an engine's parameters in place of those they were cut from, states included.

    Args:
        optimizer: built on the model before it was partitioned; parameters of other models in it stay.
        engine: the model's engine.
    """
    for group in optimizer.param_groups:
        group["params"] = [_current(param, engine) for param in group["params"]]
    for old in [param for param in optimizer.state if _current(param, engine) is not param]:
        new = _current(old, engine)
        known = engine.find(new)
        assert known is not None
        state = optimizer.state.pop(old)
        optimizer.state[new] = {key: _cut_state(value, old, known) for key, value in state.items()}


def _current(param: Tensor, engine: ZeroEngine) -> Any:
    name = engine.replaced_name(param)
    if name is None:
        return param
    return next(p.param for p in engine.parameters if p.name == name or name in p.aliases)


def _cut_state(value: Any, old: Tensor, known: ZeroParameter) -> Any:
    """This rank's rows of a state that has its parameter's shape; everything else as it is."""
    if not isinstance(value, Tensor) or value.shape != old.shape or not isinstance(known.param, DTensor):
        return value
    rows = known.layout.rows_of(value, known.rank).clone()
    return torch_compat.wrap_like(rows, known.param)


@functools.cache
def hear_of_steps() -> None:
    """Let every engine hear of the steps of optimizers that hold its parameters, from the first call in a process on.

    Fused and foreach steps leave no trace on the parameters, so the step itself has to tell.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
