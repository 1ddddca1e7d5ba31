"""Whole weights of a partitioned model: as a state dict, and as the folder that `save_pretrained` writes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.checkpoint.model_state import write_model
from hf_zero.checkpoint.ranks.background import WRITING_S
from hf_zero.checkpoint.ranks.one_place import one_place
from hf_zero.checkpoint.ranks.one_writer import save_on_first, saving_alone, world_of_whole
from hf_zero.engine.engine import engine_of
from hf_zero.engine.gathered_parameters import GatheredAlone, GatheredParameters, gather_whole
from hf_zero.engine.parameters.at_rest.known.lineage import key_of
from hf_zero.engine.parameters.at_rest.root import AtRest
from hf_zero.engine.ranks.world import World, world_of
from hf_zero.errors import CheckpointError, UsageError
from hf_zero.parameters import parameters_of

_SAVING = "save_pretrained (all ranks must call it)"
_CONVERSION = "path_initial_model_for_weight_conversion"  # an option of PEFT


def world_of_model(model: nn.Module) -> World | None:
    """The ranks that `model` is partitioned over; None if none of its parameters is."""
    for param in parameters_of(model):
        if isinstance(param, DTensor):
            return world_of(param)
    return None


def whole_state_dict(model: nn.Module, keep: bool = True, names: Collection[str] | None = None) -> dict[str, Any]:
    """The state dict of a model with whole tensors on the CPU, gathered one parameter at a time.

    Called by all ranks together, or by one alone (see [Note: alone]). Tied parameters are gathered once and share memory,
    as they do unsharded. Besides the tensors that it keeps, a rank holds one whole tensor at a time.

    Args:
        model: any module; what is not partitioned is taken as it is.
        keep: whether this rank wants the result; the others take part in the gathers and get an empty dict.
        names: only these entries, the same on every rank.

    Returns:
        Entry name -> tensor of the parameter's shape, in the dtype at rest.

    Raises:
        CollectiveError: a rank did not take part.
    """
    world = world_of_model(model)
    if world is None or world.all_come("the whole weights of a model", _partitioned(model)):
        return _whole_state(model.state_dict(), keep, names, lambda value: gather_whole(value, world))
    return _whole_state(model.state_dict(), keep, names, _alone) if keep else {}


def _partitioned(model: nn.Module) -> list[Tensor]:
    return [param for param in parameters_of(model) if isinstance(param, DTensor)]


def _alone(value: Tensor) -> Tensor:
    """The whole of a tensor at rest, for a rank whose peers do not take part: see [Note: alone]."""
    with torch.no_grad():
        return cast(DTensor, value).full_tensor()


def _whole_state(
    entries: Mapping[str, Any], keep: bool, names: Collection[str] | None, gather: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    gathered: dict[tuple[object, ...], Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in entries.items():
        if names is not None and name not in names:
            continue
        if not isinstance(value, Tensor):
            if keep:
                state[name] = value
            continue
        key = _identity(value)
        if key not in gathered:
            whole = gather(value) if _is_at_rest(value) else value.detach()
            gathered[key] = whole.cpu() if keep else torch.empty(0, device="cpu")
        if keep:
            state[name] = gathered[key]
    return state


def _what(value: AtRest) -> object:
    """Which value it is, and which part of it; the same on all ranks that have computed it alike."""
    return key_of(value.root), tuple(cast(Tensor, value).shape)


def _is_at_rest(value: object) -> bool:
    return isinstance(value, DTensor | AtRest)


def _identity(value: Tensor) -> tuple[object, ...]:
    """The same for two entries of a tied parameter, even on a rank without rows."""
    if isinstance(value, AtRest) and not isinstance(value, DTensor):
        return (id(value),)  # a view
    local = torch_compat.local_of(value)
    return local.untyped_storage()._cdata, int(local.storage_offset()), tuple(value.shape), value.stride()


def save_whole(
    model: nn.Module,
    original: Callable[..., Any],
    save_directory: Any,
    is_main_process: bool,
    state_dict: dict[str, Any] | None,
    **kwargs: Any,
) -> None:
    """`save_pretrained` of a partitioned model: every rank writes its rows.

    Whole weights are gathered on rank 0 only for adapters, for a given `state_dict`, for the hub, and if saving computes a
    weight rather than only moving elements.

    Args:
        model: the model.
        original: its own `save_pretrained`.
        save_directory: as for `save_pretrained`; rank 0's counts.
        is_main_process: whether this rank writes; only rank 0 does by default.
        state_dict: whole or sharded values to write; the model's own by default.
        **kwargs: passed on.

    Raises:
        CollectiveError: a rank did not call it.
    """
    world = world_of_model(model)
    if world is None:
        save = partial(original, save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs)
        _save_plain(model, os.fspath(save_directory), save)
        return
    if not world.all_come(_SAVING, _partitioned(model)):
        if is_main_process:
            _save_alone(model, partial(original, save_directory), state_dict, kwargs)
        return
    save_directory = one_place(save_directory, world)
    writes = is_main_process and world.rank == 0
    is_given, is_written = world.share((state_dict is not None, writes), "what is written")
    is_alone = not is_given and not hasattr(model, "peft_config") and not kwargs.get("push_to_hub")
    if is_alone and is_written and write_model(model, Path(save_directory), world, **kwargs):
        return
    if kwargs.get(_CONVERSION) is not None:
        _save_converted(model, world, original, Path(save_directory), writes, kwargs)
        return
    with GatheredParameters(_computed_with(model)):
        if is_given:
            state_dict = _whole_given(state_dict or {}, world, keep=writes)
        else:
            state_dict = whole_state_dict(model, keep=writes, names=_names_to_save(model, kwargs))
        with world.together(f"saving {save_directory}", CheckpointError, max(WRITING_S, world.limit_s)):
            if writes:
                with saving_alone():
                    original(save_directory, is_main_process=True, state_dict=state_dict, **kwargs)


def _whole_given(given: Mapping[str, Any], world: World, keep: bool) -> dict[str, Any]:
    """What a rank gives to be written, with whole tensors on the CPU; the others may have been given something else."""
    at_rest = [(name, _what(value)) for name, value in given.items() if _is_at_rest(value)]
    wanted = world.share(at_rest, "the weights that are given")
    is_like_others = not any(world.everyone.combine([at_rest != wanted], "the weights that are given").highest)
    if is_like_others:

        def gather(value: Tensor) -> Tensor:
            return gather_whole(value, world) if isinstance(value, DTensor) else _alone(value)  # a view asks by itself

        return _whole_state(given, keep, None, gather)
    return _whole_state(given, keep, None, _alone) if keep else {}


def _save_alone(
    model: nn.Module, save: Callable[..., Any], state_dict: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    """Save on this rank, whose peers do not take part, as under DDP: with the whole weights in its memory."""
    if options.get(_CONVERSION) is not None or _computed_with(model):
        raise UsageError(
            f"save_pretrained of a {type(model).__name__} computes with its weights when it saves adapters of this kind, which "
            "needs all ranks: call it on every rank, and not behind `if is_main_process`"
        )
    if state_dict is None:
        state_dict = whole_state_dict(model, names=_names_to_save(model, options))
    save(is_main_process=True, state_dict=_whole_state(state_dict, True, None, _alone), **options)


def _save_converted(
    model: nn.Module,
    world: World,
    original: Callable[..., Any],
    folder: Path,
    writes: bool,
    options: dict[str, Any],
) -> None:
    """Save PiSSA and its like as a LoRA of the model as it was, which PEFT computes with a further adapter.

    That adapter is made, loaded and removed, which all ranks do together: those that write nothing do it elsewhere.
    """
    initial, what = Path(options.pop(_CONVERSION)), f"saving {folder}"
    names = _names_to_save(model, options)
    params = [param for name, param in model.named_parameters() if names is None or name in names]
    with GatheredParameters(params), tempfile.TemporaryDirectory() as scratch:
        with world.together(f"reading {initial}", CheckpointError):
            if not writes:
                folder = Path(scratch, "adapter")
                initial = Path(shutil.copytree(initial, Path(scratch, initial.name)))  # PEFT writes to it
        with world.together(what, CheckpointError, max(WRITING_S, world.limit_s)):
            original(folder, is_main_process=True, **options, **{_CONVERSION: str(initial)})


def _computed_with(model: nn.Module) -> list[nn.Parameter]:
    """What PEFT runs a forward of when it saves, on rank 0 alone: the encoders of prompts."""
    encoder = getattr(model, "prompt_encoder", None) if hasattr(model, "peft_config") else None
    return list(parameters_of(encoder)) if isinstance(encoder, nn.Module) else []


def _save_plain(model: nn.Module, place: str, save: Callable[[], Any]) -> None:
    """Let a library save a model that is not partitioned: once, if several ranks have it."""
    world = world_of_whole(model)
    if world is None:
        save()
    else:
        save_on_first(world, place, save, max(WRITING_S, world.limit_s))


def save_by_library(model: nn.Module, save: Callable[[], Any], place: str) -> None:
    """Let a library save a model in its own way, on rank 0, while every rank holds the whole model.

    For a `save_pretrained` that reads the model itself, see `saves_given_state`.

    Args:
        model: partitioned or not.
        save: writes the model.
        place: where to.

    Raises:
        CollectiveError: a rank did not call it.
        CheckpointError: on all ranks, if `save` failed.
    """
    engine = engine_of(model)
    world = world_of_model(model) if engine is None else engine.world
    if world is None or not world.partitions:
        _save_plain(model, place, save)
        return
    if not world.all_come(_SAVING, _partitioned(model)):
        with GatheredAlone(model):
            save()
        return
    limit_s = max(WRITING_S, world.limit_s)
    with GatheredParameters(model), world.together("saving a model", CheckpointError, limit_s):
        if world.rank == 0:
            with saving_alone():
                save()


def _names_to_save(model: nn.Module, options: dict[str, Any]) -> set[str] | None:
    """What PEFT would write of a model with adapters, found by letting it choose among the rows; everything otherwise."""
    adapters: Any = getattr(model, "peft_config", None)
    if not adapters:
        return None
    from peft import get_peft_model_state_dict

    state = model.state_dict()
    name_of = {id(value): name for name, value in state.items()}
    layers = options.get("save_embedding_layers", "auto")
    chosen: set[str] = set()
    for adapter in adapters:
        found = get_peft_model_state_dict(model, dict(state), adapter, save_embedding_layers=layers)
        if adapters[adapter].is_prompt_learning:
            found.pop("prompt_embeddings", None)  # not of the state dict
        if any(id(value) not in name_of for value in found.values()):
            return None  # computed for saving
        chosen |= {name_of[id(value)] for value in found.values()}
    return chosen
