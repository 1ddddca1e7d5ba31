"""Optimizers beside the engine: they are rebound to partitioned parameters, Adam computes on rows, engines hear of steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_zero import torch_compat
from hf_zero.engine.engine import ZeroEngine, live_engines
from hf_zero.engine.parameter import ZeroParameter
from hf_zero.errors import PartitionError

_ADAM = (torch.optim.Adam, torch.optim.AdamW)  # not what is derived from them, whose steps may do anything


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
                _choose_fused(optimizer)
                _step_on_rows(optimizer)
            engine.before_step()


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


# Fused and foreach steps leave no trace on the parameters, so the step itself has to tell. These hooks act only on
# optimizers that hold parameters of a live engine.
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
