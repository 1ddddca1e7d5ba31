"""Optimizers beside the engine: they are rebound to partitioned parameters, step on plain tensors, and engines hear of it."""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_zero.engine.engine import ZeroEngine, live_engines
from hf_zero.engine.parameters.at_rest.given import have_been_given, refuse_unlike
from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.engine.parameters.left_behind import successor
from hf_zero.engine.parameters.records import gatherers_of
from hf_zero.engine.parameters.replaced import current, is_replaced
from hf_zero.engine.ranks.hyperparameters import note_step
from hf_zero.errors import PartitionError
from hf_zero.host import cores as host_cores
from hf_zero.host.scratch import Place
from hf_zero.optim.choice import stepping_of, worlds_of
from hf_zero.optim.offloaded.room_on_host import check_room
from hf_zero.optim.on_rows import choose_fused
from hf_zero.optim.owners import Owners
from hf_zero.optim.stand_in import NOT_SWAPPED, STEPPING
from hf_zero.optim.stepping import StepCall, Stepping, params_of


def _before_hooks(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put our hooks next to the step: users' see the optimizer itself, before it is replaced and when it has all changes."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    at_begin, at_end = _outside_compiled_graphs()
    before.pop(STEPPING, None)
    before[STEPPING] = at_begin
    if next(iter(after), None) != STEPPING:  # wrappers make plain dicts, which know no `move_to_end`
        others = {number: hook for number, hook in after.items() if number != STEPPING}
        after.clear()
        after.update({STEPPING: at_end, **others})


@functools.cache
def _outside_compiled_graphs() -> tuple[Any, Any]:
    """Our hooks, where a compiled step does not look into them; made late: it imports a compiler."""
    return torch.compiler.disable(_before_step), torch.compiler.disable(_after_step)  # type: ignore[no-untyped-call]


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _rebind_late(optimizer)
    params = params_of(optimizer)
    held = [engine for engine in live_engines() if any(map(engine.find, params))]
    for engine in held:
        note_step(optimizer, _names_by_group(optimizer, engine), engine.world)
        if have_been_given(_gradients(params, engine)):
            refuse_unlike(list(_gradients(params, engine)), f"{type(optimizer).__name__}.step", engine.world)

    _refuse_left_behind(params)
    _keep_gathered(held)

    def before_change() -> None:
        for engine in held:
            engine.before_step(optimizer)

    def after_change() -> None:
        for engine in held:
            engine.on_rows_changed(p for p in map(engine.find, params) if p is not None)
        _show_gathered(held)

    worlds = worlds_of(optimizer)
    stepping = stepping_of(optimizer, worlds)
    _check_room_on_host(optimizer)
    if any(engine.world.steps_on_host for engine in held):
        host_cores.begin(id(optimizer))
        _wait_for_scale(optimizer)
    if stepping is None:
        if held:
            choose_fused(optimizer)
        before_change()
        return None
    stepping.cut_loaded_states(optimizer, worlds)
    return stepping.begin(StepCall(optimizer, worlds, args[1:], kwargs, before_change, after_change))


def _gradients(params: list[Tensor], engine: ZeroEngine) -> Iterator[Root]:
    """Those of an engine's parameters, at rest."""
    for param in params:
        grad: Any = param.grad
        if isinstance(grad, Root) and engine.find(param) is not None:
            yield grad


def _names_by_group(optimizer: torch.optim.Optimizer, engine: ZeroEngine) -> list[list[str]]:
    found = ([engine.find(param) for param in group["params"]] for group in optimizer.param_groups)
    return [[p.name for p in group if p is not None] for group in found]


def _check_room_on_host(
    optimizer: torch.optim.Optimizer, known: Mapping[int, Mapping[str, torch.dtype]] | None = None
) -> None:
    """See `check_room`: of what rests in host memory beside a device, for all models that an optimizer trains."""
    for engine in live_engines():
        if engine.world.steps_on_host and any(map(engine.find, params_of(optimizer))):
            check_room(optimizer, engine, known)


def _wait_for_scale(optimizer: torch.optim.Optimizer) -> None:
    """What a `GradScaler` gives to a fused step, which would send it to host memory without waiting."""
    for name in ("grad_scale", "found_inf"):
        value = vars(optimizer).get(name)
        if isinstance(value, Tensor):
            vars(optimizer)[name] = value.cpu()


def _refuse_left_behind(params: list[Tensor]) -> None:
    """Raise where a model's new parameter has a gradient and no optimizer, see [Note: what optimizers hold]."""
    held: set[int] = set()
    for now, name in filter(None, map(successor, params)):
        if not now.requires_grad or now.grad is None:
            continue
        held = held or {id(each) for one in _all_optimizers() for each in params_of(one)}
        if id(now) not in held:
            raise PartitionError(
                f"the optimizer holds a {name!r} that its model no longer has, and none holds the {name!r} of shape "
                f"{tuple(now.shape)} that has taken its place and gets gradients: make the optimizer anew, call "
                "`optimizer.add_param_group`, or freeze the new one"
            )


def _all_optimizers() -> list[torch.optim.Optimizer]:
    return [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    stepping = vars(optimizer).get(STEPPING)
    if isinstance(stepping, Stepping):
        stepping.finish()
    params = params_of(optimizer)
    torch.autograd.graph.increment_version(  # as a step on plain ones does
        [
            param
            for param in params
            if isinstance(param, DTensor) and param.grad is not None and not param.is_inference()
        ]
    )
    for engine in live_engines():
        engine.on_step(params)
    _show_gathered([engine for engine in live_engines() if any(map(engine.find, params))])
    host_cores.end(id(optimizer))


def _keep_gathered(engines: list[ZeroEngine]) -> None:
    """A step inside `GatheredParameters` goes on from what was changed there."""
    for engine in engines:
        for gatherer in gatherers_of(engine.parameters):
            gatherer.keep()


def _show_gathered(engines: list[ZeroEngine]) -> None:
    """What a step has changed is seen inside `GatheredParameters`."""
    for engine in engines:
        for gatherer in gatherers_of(engine.parameters):
            gatherer.show()


def owned_by(optimizer: torch.optim.Optimizer) -> dict[int, Owners]:
    """Who sees to the owners of an optimizer's parameters, by their ids; empty where every rank steps on its rows.

    States are made to lie so, if they were loaded otherwise; called by all ranks together.
    """
    _rebind_late(optimizer)
    worlds = worlds_of(optimizer)
    stepping = stepping_of(optimizer, worlds)
    if stepping is None:
        return {}
    owned = stepping.owned([param for param in params_of(optimizer) if id(param) in worlds], worlds)
    if owned:
        stepping.cut_loaded_states(optimizer, worlds)
    return owned


def rooms_on_disk(
    optimizer: torch.optim.Optimizer, states: Mapping[int, Mapping[str, torch.dtype]]
) -> Mapping[int, Mapping[str, Place]]:
    """Room for states that are about to be read from a checkpoint, where they are offloaded to a disk; checked in host memory.

    Called by all ranks together.

    Args:
        optimizer: whose states they are.
        states: their names and dtypes by id(parameter), of those that have their parameter's shape.

    Returns:
        Their places by id(parameter) and name; of those that stay in memory there is none.
    """
    _check_room_on_host(optimizer, states)
    worlds = worlds_of(optimizer)
    stepping = stepping_of(optimizer, worlds)
    return {} if stepping is None else stepping.rooms_on_disk(optimizer, worlds, states)


def rebind_optimizer(optimizer: torch.optim.Optimizer, engine: ZeroEngine) -> None:
    """Let an optimizer hold an engine's parameters in place of those they were cut from, states included.

    Args:
        optimizer: built on the model before it was partitioned; parameters of other models in it stay.
        engine: the model's engine.
    """
    _hold_current(optimizer, engine)
    worlds = worlds_of(optimizer)
    stepping = stepping_of(optimizer, worlds)
    if stepping is not None:  # where nothing is partitioned, states stay as they are
        stepping.cut_loaded_states(optimizer, worlds)
    _check_room_on_host(optimizer)


def hold_current(engine: ZeroEngine) -> None:
    """Let every optimizer of this process hold an engine's parameters in place of those they were cut from.

    States stay whole until the optimizer's next step, which all ranks take together: which optimizers live still, as garbage,
    may differ between ranks.
    """
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer) and "param_groups" in vars(each):
            _hold_current(each, engine)


def _hold_current(optimizer: torch.optim.Optimizer, engine: ZeroEngine) -> None:
    for group in optimizer.param_groups:
        if any(map(is_replaced, group["params"])):
            group["params"] = [_current(param, engine) for param in group["params"]]
    states = vars(optimizer).get("state", {})
    for old in [param for param in states if is_replaced(param) and _current(param, engine) is not param]:
        states[_current(old, engine)] = states.pop(old)
        vars(optimizer).pop("_zero_checked_state", None)
    for name, value in [each for each in vars(optimizer).items() if each[0] not in NOT_SWAPPED]:
        now = _renewed(value, engine, set())
        if now is not value:
            vars(optimizer)[name] = now


def _renewed(value: Any, engine: ZeroEngine, seen: set[int]) -> Any:
    """What an attribute holds, with parameters that an engine has now; lists, dicts and sets stay the same ones."""
    if is_replaced(value):
        return _current(value, engine)
    if isinstance(value, list | tuple | set | deque):
        entries: list[Any] = list(value)
    elif isinstance(value, dict):
        entries = [*value, *value.values()]
    else:
        return value
    if id(value) in seen:
        return value
    seen.add(id(value))
    now = [_renewed(entry, engine, seen) for entry in entries]
    if all(new is old for new, old in zip(now, entries, strict=True)):
        return value
    if isinstance(value, tuple):
        return type(value)(now) if type(value) is tuple else type(value)(*now)
    if isinstance(value, dict):
        now = list(zip(now[: len(value)], now[len(value) :], strict=True))
    value.clear()
    (value.extend if isinstance(value, list | deque) else value.update)(now)
    return value


def _rebind_late(optimizer: torch.optim.Optimizer) -> None:
    """Rebind an optimizer that is still about parameters of before, or has states of them; called by all ranks together."""
    states = vars(optimizer).get("state", {})
    old = [current(param) for param in (*params_of(optimizer), *states) if is_replaced(param)]
    for engine in live_engines() if old else ():
        if any(map(engine.find, old)):
            rebind_optimizer(optimizer, engine)


def _current(param: Tensor, engine: ZeroEngine) -> Any:
    now = current(param)
    return param if engine.find(now) is None else now


@functools.cache
def hear_of_steps() -> None:
    """Let every engine hear of the steps of optimizers that hold its parameters, from the first call in a process on.

    Fused and foreach steps leave no trace on the parameters, so the step itself has to tell.
    """
    register_optimizer_step_pre_hook(_before_hooks)
