"""States of an optimizer that steps in host memory, beside a device: there has to be room for them before they are made."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parameters.on_host import check_memory
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.errors import UsageError
from hf_zero.optim.trial import states_of_step

logger = logging.getLogger(__name__)

_COUNTED = "_zero_counted"  # attribute of an optimizer: its parameters whose states have been counted, by id
States = Mapping[str, torch.dtype]


def check_room(optimizer: torch.optim.Optimizer, engine: ZeroEngine, known: Mapping[int, States] | None = None) -> None:
    """Raise if a host has too little memory for the states that an optimizer has not made yet; called by all ranks together.

    Args:
        optimizer: whose states they are.
        engine: of its parameters.
        known: names and dtypes of states by id(parameter), about to be read; by default those that a first step makes.

    Raises:
        OffloadError: on all ranks, before anything has changed.
    """
    counted: dict[int, Tensor] = vars(optimizer).setdefault(_COUNTED, {})
    new = [(group, p) for group, p in _resting(optimizer, engine) if known is not None or id(p.param) not in counted]
    if not new:
        return
    if known is None:
        needed = _to_be_made(optimizer, new)
    else:
        needed = sum(_num_bytes(p, known.get(id(p.param), {})) for _, p in new)
    check_memory(engine.world, needed, f"states of {type(optimizer).__name__}")
    counted.update({id(p.param): p.param for _, p in new})


def _resting(optimizer: torch.optim.Optimizer, engine: ZeroEngine) -> Iterable[tuple[dict[str, Any], ZeroParameter]]:
    """What an optimizer trains in host memory, with its groups."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            p = engine.find(param)
            if p is not None and p.host is not None and param.requires_grad:
                yield group, p


def _to_be_made(optimizer: torch.optim.Optimizer, params: list[tuple[dict[str, Any], ZeroParameter]]) -> int:
    states: dict[
        tuple[int, torch.dtype, int], States
    ] = {}  # alike for parameters of a group, a dtype and so many dimensions
    total = 0
    for group, p in params:
        if optimizer.state.get(p.param):
            continue  # it has them
        key = (id(group), p.param.dtype, p.param.ndim)
        if key not in states:
            states[key] = _states_of(optimizer, group, p.param)
        total += _num_bytes(p, states[key])
    return total


def _states_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> States:
    try:
        return states_of_step(optimizer, group, param)
    except UsageError as error:
        logger.warning(
            "%s cannot be tried on a tiny parameter (%s), so its states are not counted in host memory before they are made",
            type(optimizer).__name__,
            error.__cause__,
        )
        return {}


def _num_bytes(p: ZeroParameter, states: States) -> int:
    return p.local_numel * sum(dtype.itemsize for dtype in states.values())
