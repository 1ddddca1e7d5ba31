"""Optimizers beside the engine: they are rebound to partitioned parameters, step on plain tensors, and engines hear of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_zero import torch_compat
from hf_zero.config.offload import Offload
from hf_zero.engine.engine import ZeroEngine, live_engines
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.ranks.world import World
from hf_zero.errors import OffloadError, PartitionError, UsageError
from hf_zero.optim.kinds import is_elementwise, refuse_across_parameters, wrapped_optimizers
from hf_zero.optim.offloaded.pieces import Evaluated, refuse_in_pieces
from hf_zero.optim.offloaded.states import OffloadedStates
from hf_zero.optim.offloaded.streaming import StreamedStep, Streamer
from hf_zero.optim.owners import Owners
from hf_zero.optim.stand_in import STEPPING
from hf_zero.optim.stepping import Step, Stepping
from hf_zero.scratch import Place

logger = logging.getLogger(__name__)

_STEPPING = STEPPING
_ADAM = (torch.optim.Adam, torch.optim.AdamW)  # not what is derived from them, whose steps may do anything


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


def _cut_loaded_states(optimizer: torch.optim.Optimizer, stepping: Stepping) -> None:
    """Let states that were loaded whole, as a plain run saves them, be this rank's; checked once for every load."""
    if vars(optimizer).get("_zero_checked_state") is optimizer.state:
        return
    for index, param in enumerate(_params_of(optimizer)):
        owner = next((engine for engine in live_engines() if engine.find(param) is not None), None)
        known = None if owner is None else owner.find(param)
        if known is None or owner is None or not isinstance(param, DTensor) or param not in optimizer.state:
            continue
        owners = None if stepping.owners is None or not known.is_sharded else stepping.owners[owner.world]
        state = optimizer.state[param]
        for key, value in state.items():
            if isinstance(value, Tensor):
                if owners is None:
                    _check_state(value, known, f"state {key!r} of {known.name!r} (its parameter {index})")
                state[key] = _cut_state(value, param, known) if owners is None else _whole(value)
        if owners is not None and not owners.owns(param):
            del optimizer.state[param]
    vars(optimizer)["_zero_checked_state"] = optimizer.state


def _check_state(value: Tensor, known: ZeroParameter, what: str) -> None:
    shape = known.param.shape
    if value.shape != shape and value.ndim == len(shape) and value.shape[1:] == shape[1:] and value.ndim:
        raise PartitionError(
            f"the optimizer's {what} has the shape {tuple(value.shape)}, but the parameter is {tuple(shape)}: load a whole "
            "state of this model, as a plain run saves it"
        )


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _before_hooks(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put our hooks next to the step: users' see the optimizer itself, before it is replaced and when it has all changes."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    before[_STEPPING] = _before_step
    before.move_to_end(_STEPPING)
    after[_STEPPING] = _after_step
    after.move_to_end(_STEPPING, last=False)


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    params = _params_of(optimizer)
    held = []
    for engine in live_engines():
        name = next(filter(None, map(engine.replaced_name, params)), None)
        if name is not None:
            raise PartitionError(
                f"the optimizer holds {name!r} as it was before the model was partitioned, so it would train nothing: "
                "make the optimizer after `shard_model`, or pass both to `ZeroAccelerator.prepare`"
            )
        if any(map(engine.find, params)):
            held.append(engine)

    def before_change() -> None:
        for engine in held:
            engine.before_step(optimizer)

    def after_change() -> None:
        for engine in held:
            engine.on_rows_changed(p for p in map(engine.find, params) if p is not None)

    worlds = _worlds_of(optimizer)
    stepping = _stepping_over(optimizer, worlds)
    if stepping is not None:
        _cut_loaded_states(optimizer, stepping)
        if stepping.owners is None:
            _choose_fused(optimizer)
    has_closure = any(map(callable, (*args[1:], *kwargs.values())))
    if stepping is not None and stepping.streamer is not None:
        return _before_streamed_step(optimizer, stepping, stepping.streamer, worlds, args[1:], kwargs, before_change)
    before_change()
    if stepping is None:
        return None
    step = Step(optimizer, stepping, worlds, before_change, after_change, has_closure)
    stepping.under_way = step
    given = [step.closure(arg) if callable(arg) else arg for arg in args[1:]]
    named = {key: step.closure(value) if callable(value) else value for key, value in kwargs.items()}
    return (step.stand_in, *given), named


def _before_streamed_step(
    optimizer: torch.optim.Optimizer,
    stepping: Stepping,
    streamer: Streamer,
    worlds: dict[int, World],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    before_change: Callable[[], None],
) -> Any:
    """Run a step's chunks but the last: closures first, since every chunk is a part of one step with one loss."""
    world = next(iter(worlds.values()))
    closures = [each for each in (*args, *kwargs.values()) if callable(each)]
    if not streamer.is_tried:
        refuse_in_pieces(optimizer, bool(closures))
        streamer.is_tried = True
    streamer.states.make_room(optimizer, world)
    streamer.states.adopt(optimizer)
    given = [Evaluated(arg) if callable(arg) else arg for arg in args]
    named = {key: Evaluated(value) if callable(value) else value for key, value in kwargs.items()}
    before_change()
    params = [param for param in _params_of(optimizer) if id(param) in worlds]
    with world.together("a step from the disk", OffloadError):
        step = StreamedStep(optimizer, streamer, params, tuple(given), named)
    stepping.under_way = step
    return (step.stand_in, *given), named


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    stepping = vars(optimizer).get(_STEPPING)
    if isinstance(stepping, Stepping) and stepping.under_way is not None:
        step, stepping.under_way = stepping.under_way, None
        step.finish()
    for engine in live_engines():
        engine.on_step(_params_of(optimizer))


def _worlds_of(optimizer: torch.optim.Optimizer) -> dict[int, World]:
    """The ranks over which each partitioned parameter of an optimizer is cut, by the parameter's id."""
    engines = [engine for engine in live_engines() if engine.world.partitions or _is_streamed(engine.world)]
    # A process alone has plain parameters, whose states may be on a disk all the same.
    params = [p for p in _params_of(optimizer) if isinstance(p, DTensor) or any(map(_is_streamed, _all(engines)))]
    return {id(param): engine.world for engine in engines for param in params if engine.find(param) is not None}


def stepping_of(optimizer: torch.optim.Optimizer) -> Stepping | None:
    """How an optimizer steps: on rows, or on whole parameters by their owners; None: it holds nothing partitioned.

    Raises:
        UsageError: it can do neither; on all ranks.
    """
    return _stepping_over(optimizer, _worlds_of(optimizer))


def _stepping_over(optimizer: torch.optim.Optimizer, worlds: dict[int, World]) -> Stepping | None:
    """See `stepping_of`.

    Args:
        worlds: the ranks over which each of its partitioned parameters is cut.
    """
    if not worlds:
        return None
    stepping = vars(optimizer).get(_STEPPING)
    offload: Offload = _agreed(optimizer, worlds, "offload")
    if isinstance(stepping, Stepping):
        streamer = stepping.streamer
        if isinstance(stepping.under_way, StreamedStep):
            stepping.under_way.wait_for_all()  # it has raised
            stepping.under_way = None
        if (offload.optimizer == "disk") != (streamer is not None) or (streamer and streamer.states.offload != offload):
            stepping = None  # the model has been partitioned anew
    if not isinstance(stepping, Stepping):
        refuse_across_parameters(optimizer)
        wanted = _agreed(optimizer, worlds, "optimizer_on")
        on_rows = wanted == "rows" or (wanted != "whole" and is_elementwise(optimizer))
        streamer = None
        if offload.optimizer == "disk":
            _refuse_streaming(optimizer, on_rows)
            streamer = Streamer(OffloadedStates(offload, _known))
        vars(optimizer)[_STEPPING] = stepping = Stepping(None if on_rows else {}, streamer)
        if not on_rows:
            if hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):  # a wrapper may not have called torch's __init__
                optimizer.register_state_dict_pre_hook(_refuse_part_of_state)
            logger.info("%s steps on whole parameters, each on one rank (optimizer_on)", type(optimizer).__name__)
    if stepping.owners is not None:
        _refuse_owners_of_parts(optimizer, worlds.values())
        for world in dict.fromkeys(worlds.values()):
            cut = [p for p in _params_of(optimizer) if worlds.get(id(p)) is world and world.layout_of(p).num_ranks > 1]
            stepping.owners.setdefault(world, Owners(world)).spread(cut)
    return stepping


def _all(engines: Iterable[ZeroEngine]) -> Iterator[World]:
    return (engine.world for engine in engines)


def _is_streamed(world: World) -> bool:
    return world.config.offload.optimizer == "disk"


def _known(param: Tensor) -> ZeroParameter | None:
    return next(filter(None, (engine.find(param) for engine in live_engines())), None)


def _agreed(optimizer: torch.optim.Optimizer, worlds: Mapping[int, World], key: str) -> Any:
    """The value of a key of the configuration, which must be one for all parameters of an optimizer."""
    values = {str(getattr(world.config, key)): getattr(world.config, key) for world in worlds.values()}
    if len(values) > 1:
        raise UsageError(
            f"{type(optimizer).__name__} holds parameters of models that were partitioned with different {key}: "
            f"{sorted(values)}; use one of them, or an optimizer for each model"
        )
    return next(iter(values.values()))


def _refuse_owners_of_parts(optimizer: torch.optim.Optimizer, worlds: Iterable[World]) -> None:
    if any(world.tensor.num_ranks > 1 for world in worlds):
        raise UsageError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} steps on whole parameters, each on one rank "
            "(optimizer_on), which no rank has with tp_size: use an elementwise optimizer (torch.optim.AdamW, ...), "
            "mark_elementwise if it is one, or leave tp_size out"
        )


def _refuse_streaming(optimizer: torch.optim.Optimizer, on_rows: bool) -> None:
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if not on_rows:
        raise UsageError(
            f"offload.optimizer is disk, but {name} steps on whole parameters, each on one rank (optimizer_on), which cannot "
            "be streamed in pieces: use an elementwise optimizer (AdamW, Lion, ...), mark_elementwise if it is one, or "
            "offload.optimizer: none"
        )
    if wrapped_optimizers(optimizer):
        raise UsageError(
            f"offload.optimizer is disk, but {name} wraps another optimizer, whose states cannot be streamed: use that one "
            "itself, or offload.optimizer: none"
        )


def owned_by(optimizer: torch.optim.Optimizer) -> dict[int, Owners]:
    """Who sees to the owners of an optimizer's parameters, by their ids; empty where every rank steps on its rows.

    States are made to lie so, if they were loaded otherwise; called by all ranks together.
    """
    stepping = stepping_of(optimizer)
    if stepping is None or stepping.owners is None:
        return {}
    _cut_loaded_states(optimizer, stepping)
    worlds = _worlds_of(optimizer)
    params = [param for param in _params_of(optimizer) if id(param) in worlds]
    return {id(p): stepping.owners[worlds[id(p)]] for p in params if worlds[id(p)].layout_of(p).num_ranks > 1}


def rooms_on_disk(
    optimizer: torch.optim.Optimizer, states: Mapping[int, Mapping[str, torch.dtype]]
) -> Mapping[int, Mapping[str, Place]]:
    """Room for states that are about to be read from a checkpoint, where they are offloaded to a disk.

    Called by all ranks together.

    Args:
        optimizer: whose states they are.
        states: their names and dtypes by id(parameter), of those that have their parameter's shape.

    Returns:
        Their places by id(parameter) and name; of those that stay in memory there is none.
    """
    stepping = stepping_of(optimizer)
    if stepping is None or stepping.streamer is None:
        return {}
    offloaded = stepping.streamer.states
    offloaded.make_room(optimizer, next(iter(_worlds_of(optimizer).values())), states)
    return {key: offloaded.of(key) for key in states}


def _refuse_part_of_state(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        raise UsageError(
            f"the state of {type(optimizer).__name__} lies with the owners of its parameters, so state_dict() would be this "
            "rank's part only: save it with the Trainer's checkpoints or accelerator.save_state"
        )


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
    stepping = stepping_of(optimizer)
    on_rows = stepping is None or stepping.owners is None
    for old in [param for param in optimizer.state if _current(param, engine) is not param]:
        new = _current(old, engine)
        known = engine.find(new)
        assert known is not None
        state = optimizer.state.pop(old)
        # Owners keep whole states; the others drop theirs at the first step.
        optimizer.state[new] = {k: _cut_state(value, old, known) for k, value in state.items()} if on_rows else state
    vars(optimizer).pop("_zero_checked_state", None)


def _current(param: Tensor, engine: ZeroEngine) -> Any:
    name = engine.replaced_name(param)
    if name is None:
        return param
    return next(p.param for p in engine.parameters if p.name == name or name in p.aliases)


def _cut_state(value: Any, old: Tensor, known: ZeroParameter) -> Any:
    """This rank's rows of a state that has its parameter's shape; everything else as it is."""
    if not isinstance(value, Tensor) or value.shape != old.shape or not isinstance(known.param, DTensor):
        return value
    if isinstance(value, DTensor):
        value = torch_compat.local_of(value.redistribute(known.param.device_mesh, known.param.placements))
        rows = value.contiguous()
    else:
        rows = known.layout.rows_of(value, known.rank).clone(memory_format=torch.contiguous_format)
    return torch_compat.wrap_like(rows, known.param)


@functools.cache
def hear_of_steps() -> None:
    """Let every engine hear of the steps of optimizers that hold its parameters, from the first call in a process on.

    Fused and foreach steps leave no trace on the parameters, so the step itself has to tell.
    """
    register_optimizer_step_pre_hook(_before_hooks)
