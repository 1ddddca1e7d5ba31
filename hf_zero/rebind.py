"""An optimizer that was built on a plain model follows the model when it is partitioned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_zero.engine import torch_compat
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parameter import ZeroParameter


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
    start, stop = known.layout.span(known.rank)
    rows = value.reshape(-1)[start:stop].view(known.local_shape).clone()
    return torch_compat.wrap_like(rows, known.param)
