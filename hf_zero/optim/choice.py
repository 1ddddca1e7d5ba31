"""Which way of stepping an optimizer takes, chosen once; those that have none are refused on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_zero.engine.engine import live_engines
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError
from hf_zero.optim.by_owners import OwnerStepping
from hf_zero.optim.kinds import is_elementwise, is_known, kept_models, wrapped_optimizers
from hf_zero.optim.offloaded.from_disk import DiskStepping
from hf_zero.optim.offloaded.to_host import HostStepping
from hf_zero.optim.on_every_rank import EveryRankStepping
from hf_zero.optim.on_rows import RowStepping
from hf_zero.optim.served import serve_states
from hf_zero.optim.stand_in import STEPPING
from hf_zero.optim.stepping import Stepping, all_of
from hf_zero.optim.trial import depends_on_others, exchanges, why_not_tried

logger = logging.getLogger(__name__)

# Optimizers that cannot be run on a part of the parameters, and what they do.
_LOOKS_ACROSS = {
    "LBFGS": "builds one search direction from all parameters",
    "LoraFAOptimizer": "computes the step of one matrix of an adapter from the other",
}


def worlds_of(optimizer: torch.optim.Optimizer) -> dict[int, World]:
    """The ranks over which each partitioned parameter of an optimizer is cut, by the parameter's id."""
    engines = [engine for engine in live_engines() if engine.world.partitions or _minds(optimizer, engine.world)]
    # A process alone has plain parameters, whose states may be elsewhere all the same.
    is_elsewhere = any(_minds(optimizer, engine.world) for engine in engines)
    params = [p for p in all_of(optimizer) if isinstance(p, DTensor) or is_elsewhere]
    return {id(param): engine.world for engine in engines for param in params if engine.find(param) is not None}


def stepping_of(optimizer: torch.optim.Optimizer, worlds: Mapping[int, World]) -> Stepping | None:
    """How an optimizer steps; None: it holds nothing partitioned.

    Args:
        optimizer: of any class.
        worlds: the ranks over which each of its partitioned parameters is cut, see `worlds_of`.

    Raises:
        UsageError: it can step in no way; on all ranks.
    """
    if not worlds:
        return None
    offload = _agreed(optimizer, worlds, "offload")
    stepping = vars(optimizer).get(STEPPING)
    if isinstance(stepping, Stepping):  # a copy has None
        stepping.abandon()
    steps_on_host = any(world.steps_on_host for world in worlds.values())
    if not isinstance(stepping, Stepping) or not stepping.fits(offload, steps_on_host):
        vars(optimizer)[STEPPING] = stepping = _choose(optimizer, worlds)
    stepping.hear_of(optimizer, worlds)
    serve_states(optimizer, stepping, dict.fromkeys(worlds.values()))
    return stepping


def _choose(optimizer: torch.optim.Optimizer, worlds: Mapping[int, World]) -> Stepping:
    wanted, offload = _agreed(optimizer, worlds, "optimizer_on"), _agreed(optimizer, worlds, "offload")
    is_everywhere = wanted == "every_rank"
    if not is_everywhere:
        _refuse_exchanges(optimizer)
        _refuse_across_parameters(optimizer)
    if wanted == "auto":
        _refuse_models(optimizer)
        _refuse_unknown(optimizer)
    on_rows = _goes_by_rows(optimizer, wanted)
    if offload.optimizer == "disk":
        _refuse_streaming(optimizer, on_rows)
        return DiskStepping(offload)
    steps_on_host = any(world.steps_on_host for world in worlds.values())
    if on_rows:
        return HostStepping() if steps_on_host else RowStepping()
    if steps_on_host:
        raise UsageError(
            f"offload.optimizer is host, but {type(optimizer).__module__}.{type(optimizer).__qualname__} steps on whole "
            "parameters, each on one rank (optimizer_on), which do not travel from host memory: use an elementwise optimizer "
            "(AdamW, Lion, ...), mark_elementwise if it is one, or offload.optimizer: none"
        )
    if is_everywhere:
        logger.info("%s steps on all parameters, whole, on every rank (optimizer_on)", type(optimizer).__name__)
        return EveryRankStepping(optimizer)
    if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        raise UsageError(
            f"{type(optimizer).__name__}.eval() and .train() change parameters by their states, and of parameters that are "
            "stepped on whole, each on one rank (optimizer_on), the other ranks have none: set optimizer_on: rows if it is "
            "elementwise, as AdamW is, or optimizer_on: every_rank"
        )
    logger.info("%s steps on whole parameters, each on one rank (optimizer_on)", type(optimizer).__name__)
    return OwnerStepping(optimizer)


def _minds(optimizer: torch.optim.Optimizer, world: World) -> bool:
    """Whether a process alone sees to a step, too: streams it from a disk, or sends it up to a device in parts."""
    is_on_host = world.steps_on_host and _goes_by_rows(optimizer, world.config.optimizer_on)
    return world.config.offload.optimizer == "disk" or is_on_host


def _goes_by_rows(optimizer: torch.optim.Optimizer, wanted: str) -> bool:
    return wanted == "rows" or (wanted == "auto" and is_elementwise(optimizer))


def _agreed(optimizer: torch.optim.Optimizer, worlds: Mapping[int, World], key: str) -> Any:
    """The value of a key of the configuration, which must be one for all parameters of an optimizer."""
    values = {str(getattr(world.config, key)): getattr(world.config, key) for world in worlds.values()}
    if len(values) > 1:
        raise UsageError(
            f"{type(optimizer).__name__} holds parameters of models that were partitioned with different {key}: "
            f"{sorted(values)}; use one of them, or an optimizer for each model"
        )
    return next(iter(values.values()))


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


def _refuse_exchanges(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a step exchanges something by itself: ranks step on other rows or parameters, in other numbers.

    Raises:
        UsageError: on all ranks, before anything has changed.
    """
    if is_known(optimizer) or type(optimizer).__module__.startswith("torch.optim") or not exchanges(optimizer):
        return
    raise UsageError(
        f"the step of {type(optimizer).__name__} calls torch.distributed, but hf_zero has averaged the gradients already, and "
        "each rank steps on its part of the parameters only: use the optimizer's class for a single process (of Muon's, "
        "SingleDeviceMuon; or torch.optim.Muon), or optimizer_on: every_rank"
    )


def _refuse_models(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer keeps the model: what its step does there, to all gradients say, is not done to a stand-in's."""
    params = {id(param) for param in all_of(optimizer)}
    for one in () if is_elementwise(optimizer) else (optimizer, *wrapped_optimizers(optimizer)):
        for model in kept_models(one):
            if any(id(param) in params for part in model.modules() for param in part._parameters.values()):
                raise UsageError(
                    f"{type(one).__name__} keeps {type(model).__name__}, a model that it trains, and its step may look at all "
                    "of its parameters there, but a rank steps on its part of them only: set optimizer_on: every_rank, or "
                    "whole if it sees to each parameter by itself"
                )


def _refuse_unknown(optimizer: torch.optim.Optimizer) -> None:
    """Raise if nothing says whether an optimizer minds several parameters at once."""
    error = None if is_elementwise(optimizer) else why_not_tried(optimizer)
    if error is not None:
        raise UsageError(
            f"the step of {type(optimizer).__name__} cannot be tried on two tiny parameters ({type(error).__name__}: {error}), "
            "so hf_zero cannot tell whether a rank may step on some of them only: set optimizer_on: every_rank, or whole if it "
            "sees to each parameter by itself"
        )


def _refuse_across_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise if what an optimizer does to one parameter depends on the others, which other ranks hold.

    Raises:
        UsageError: on all ranks, before anything has changed.
    """
    name = next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in _LOOKS_ACROSS), None)
    why = _LOOKS_ACROSS[name] if name is not None else None
    if why is None and not is_elementwise(optimizer) and depends_on_others(optimizer):
        why = (
            "steps on one parameter differently when another has another gradient (a norm or step size over all of them), or "
            "by its place in the list"
        )
    if why is not None:
        raise UsageError(
            f"{type(optimizer).__name__} {why}, but a rank steps on its part of the parameters only: use an optimizer that "
            "sees to each parameter by itself (AdamW, Muon, Adafactor, ...), or optimizer_on: every_rank (whole states on each)"
        )
