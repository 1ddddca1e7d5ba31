"""`save_state` and `load_state` of `ZeroAccelerator`: accelerate's names and files, committed at once, for any world size.

Schedulers, stateful loaders, scaler, random states and registered objects are in accelerate's own files. Weights and
optimizer states are safetensors that all ranks write and read together, each its rows; a manifest describes everything.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.utils import SCALER_NAME, load, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hf_zero.checkpoint.commit import StagedCheckpoint, newest, recover_one, tidying, verify
from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import Manifest
from hf_zero.checkpoint.files.model_plan import FilePlan, model_sources
from hf_zero.checkpoint.files.stored import is_stored
from hf_zero.checkpoint.files.tensor_file import Source
from hf_zero.checkpoint.model_state import weight_files
from hf_zero.checkpoint.optimizer_state import LoadedState, capture, read_state, state_files
from hf_zero.checkpoint.ranks.cooperative import match, read_plan
from hf_zero.checkpoint.ranks.one_place import one_place
from hf_zero.engine.engine import engine_of
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError
from hf_zero.host import progress
from hf_zero.integrations.accelerate.alone import offer_states, whole_states, whole_weights
from hf_zero.integrations.accelerate.data_order import order_of, restore_order
from hf_zero.integrations.accelerate.hooks import after_load_hooks, after_save_hooks, models_of
from hf_zero.integrations.accelerate.places import check_objects, check_place, naming_folder, number_of, remove_old
from hf_zero.integrations.accelerate.plain_states import is_plain, load_plain, newest_plain
from hf_zero.integrations.accelerate.weight_files import numbered, plan_weights, weights_name
from hf_zero.integrations.random_state import share_random_state
from hf_zero.parameters import parameters_of

logger = logging.getLogger(__name__)

_OPTIMIZER, _SCHEDULER, _RANDOM, _CUSTOM = "optimizer", "scheduler", "random_states", "custom_checkpoint"
_ORDER = "data_order.json"


def world_of_accelerator(accelerator: Any) -> World | None:
    """The ranks of the prepared models; None if none of them is partitioned."""
    engines = (engine_of(model) for model in models_of(accelerator))
    return next((engine.world for engine in engines if engine is not None), None)


# ---- saving ---------------------------------------------------------------------------------------------------------


def save_state(accelerator: Any, output_dir: str | os.PathLike[str] | None, max_shard_size: int | str | None) -> Path:
    """Save what `Accelerator.save_state` saves, staged and committed; called by all ranks together, or by one alone.

    Args:
        accelerator: has at least one partitioned model.
        output_dir: the folder; an older checkpoint in it is replaced. Unused with automatic naming, as in accelerate.
        max_shard_size: of the first model's weight files, as for `save_pretrained`.

    Returns:
        The folder.

    Raises:
        CheckpointError: on all ranks, if any of them failed; an older checkpoint is left as it was.
        UsageError: no folder is given, and none can be made up.
    """
    ranks = world_of_accelerator(accelerator)
    assert ranks is not None
    params = [param for model in models_of(accelerator) for param in parameters_of(model) if isinstance(param, DTensor)]
    is_alone = not ranks.all_come("save_state (all ranks must call it)", params)
    world = World.alone(ranks.config, ranks.device) if is_alone else ranks
    project = accelerator.project_configuration
    is_named_here = bool(project.automatic_checkpoint_naming)
    if is_named_here or output_dir is None:
        final = naming_folder(accelerator, "save_state") / f"checkpoint_{accelerator.save_iteration}"
    else:
        final = Path(output_dir).expanduser()
    final = one_place(final.absolute(), world)
    world.from_first(lambda: check_place(final, is_named_here), f"saving {final}", CheckpointError)
    if world.rank == 0 and not accelerator.sync_gradients:
        logger.warning("save_state between optimizer steps: gradients accumulated since the last one are not saved")
    staged = StagedCheckpoint(final, world)
    step = 0
    with staged.filling():
        models = after_save_hooks(accelerator, staged.folder, world)
        _write_small_files(accelerator, staged.folder, world)
        options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        for index, model in enumerate(models):
            work = functools.partial(plan_weights, model, index, staged.folder, options)
            sources = whole_weights(model) if is_alone else model_sources(model)
            staged.write(world.from_first(work, "saving weights", CheckpointError), sources)
        step = _write_optimizers(accelerator, staged, world, ranks)
    config = json.loads(json.dumps(world.config.to_dict(), default=str))
    staged.commit(Manifest(step=step, world_size=world.num_ranks, stage=world.config.stage, config=config))
    project.iteration += 1
    if is_named_here and project.total_limit is not None and world.rank == 0:
        with tidying(f"old checkpoints in {final.parent}"):
            remove_old(final, project.total_limit)
    return final


def _write_small_files(accelerator: Any, folder: Path, world: World) -> None:
    """Rank 0 writes; the others send their random states, since they may not see the folder."""
    is_first = world.rank == 0
    with world.together("saving registered objects", CheckpointError):
        given = [obj.state_dict() for obj in accelerator._custom_objects]
    states = [_whole(state, is_first) for state in given]

    def write_own() -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as scratch:
            place = folder if is_first else Path(scratch)
            schedulers, loaders = (accelerator._schedulers, accelerator._dataloaders) if is_first else ([], [])
            scaler = accelerator.scaler if is_first else None
            save_accelerator_state(str(place), [], [], schedulers, loaders, world.rank, accelerator.step, scaler)
            if not is_first:
                return {path.name: path.read_bytes() for path in place.iterdir()}
        for index, state in enumerate(states):
            save(state, folder / f"{_CUSTOM}_{index}.pkl")
        order = [order_of(loader) for loader in accelerator._dataloaders]
        disk.write_file(folder / _ORDER, json.dumps(order).encode())
        return {}

    with world.together("saving small states", CheckpointError):
        sent = write_own()
    received: list[dict[str, bytes]] = world.collect(sent, "random states")
    with world.together("saving random states", CheckpointError):
        for files in received:
            for name, data in files.items():
                disk.write_file(folder / name, data)


def _whole(state: Any, keeps: bool) -> Any:
    """A registered object's state (an EMA's, say), with whole tensors in host memory on the rank that keeps them."""

    def of(tensor: DTensor) -> Tensor | None:
        whole = tensor.full_tensor()
        return whole.detach().cpu() if keeps else None

    with torch.no_grad():
        return pytree.tree_map_only(DTensor, of, state)


def _capture(
    accelerator: Any, index: int, is_alone: bool = False
) -> tuple[FilePlan, dict[str, Source], dict[str, Any]]:
    optimizer = accelerator._optimizers[index]
    return capture(optimizer, _names_for(optimizer, accelerator), numbered(_OPTIMIZER, index), is_alone)


def offer_optimizers(accelerator: Any) -> None:
    """Let another rank save the state of all alone, as far as it does not need this one's program."""
    world = world_of_accelerator(accelerator)
    if world is not None:
        offer_states(accelerator, world, lambda found, index: _capture(found, index)[1])


def _write_optimizers(accelerator: Any, staged: StagedCheckpoint, world: World, ranks: World) -> int:
    """Write the optimizers' states, on all ranks or on one alone; returns the number of steps that they have done."""
    what = "saving optimizers"
    with world.together(what, CheckpointError):
        captured = [_capture(accelerator, index, world is not ranks) for index in range(len(accelerator._optimizers))]
    for index, (plan, sources, content) in enumerate(captured):
        staged.write(plan, sources if world is ranks else whole_states(sources, index, ranks))
        path = staged.folder / state_files(numbered(_OPTIMIZER, index))[1]
        world.from_first(functools.partial(disk.write_file, path, json.dumps(content).encode()), what, CheckpointError)
    return max(progress.steps_of(_optimizers(accelerator)), *(_steps_in(content) for _, _, content in captured), 0)


def _optimizers(accelerator: Any) -> list[torch.optim.Optimizer]:
    """Those of torch, without accelerate's wrapper."""
    return [optimizer.optimizer for optimizer in accelerator._optimizers]


def _steps_in(content: Mapping[str, Any]) -> int:
    """The steps that an optimizer has counted, in earlier trainings too; 0 if it does not count them."""
    steps = (numbers.get("step", 0) for numbers in content["numbers"].values())
    return max((int(step["scalar"] if isinstance(step, dict) else step) for step in steps), default=0)


def _names_for(optimizer: Any, accelerator: Any) -> nn.Module:
    """The module under whose names an optimizer's states are kept: its model, or all of them together."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    models = models_of(accelerator)
    for model in models:
        if held <= {id(param) for param in parameters_of(model)}:
            return model
    return nn.ModuleList(models)


# ---- loading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Checked:
    """What has been found to be whole and to fit, before anything is changed."""

    custom: list[tuple[Any, Any]]
    order: list[dict[str, Any]]
    step: int


def load_state(
    accelerator: Any, input_dir: str | os.PathLike[str] | None, allow_pickle: bool, load_kwargs: Mapping[str, Any]
) -> None:
    """Load what `save_state` saved on any number of ranks, under any stage, or accelerate's own; called by all ranks together.

    Args:
        accelerator: has at least one partitioned model.
        input_dir: the folder; None for the newest whole one, with automatic naming.
        allow_pickle: whether files that hold more than numbers and tensors may run code.
        load_kwargs: of `torch.load`, for schedulers.

    Raises:
        CheckpointError: on all ranks, before anything is changed, if a file is missing, damaged, or of another model.
        UsageError: no folder is given, and none can be made up.
    """
    world = world_of_accelerator(accelerator)
    assert world is not None
    folder, manifest = _find(accelerator, input_dir, world)
    kwargs = {**load_kwargs, **({"weights_only": False} if allow_pickle else {})}
    what = f"loading {folder}"
    if manifest is None:
        step = load_plain(accelerator, folder, world, after_load_hooks(accelerator, folder, world), _read_small, kwargs)
        progress.note_begin(step, _optimizers(accelerator))
        return
    prefixes = [numbered(_OPTIMIZER, index) for index in range(len(accelerator._optimizers))]
    saved = world.from_first(lambda: [read_state(folder, prefix) for prefix in prefixes], what, CheckpointError)
    with world.together(what, CheckpointError):
        pairs = zip(saved, accelerator._optimizers, strict=True)
        optimizers = [LoadedState(each, optimizer, _names_for(optimizer, accelerator)) for each, optimizer in pairs]
        is_imported = "imported_from" in manifest.config  # of another library: weights, optimizer, and nothing else
        checked = None if is_imported else _check_files(accelerator, folder, manifest, kwargs, allow_pickle)
    models = after_load_hooks(accelerator, folder, world)
    plans = world.from_first(
        lambda: [_plan_reading(model, i, folder) for i, model in enumerate(models)], what, CheckpointError
    )

    # State changes from here on. Parameters come last, except for the user's objects, which may need them.
    if checked is not None:
        with world.together(what, CheckpointError):
            _load_small_files(accelerator, folder, checked, kwargs)
        share_random_state(world)
    elif world.rank == 0:
        logger.warning(
            "%s was imported: its weights and optimizer states are loaded; %s", folder, _begins_anew(accelerator)
        )
    if checked is not None and world.rank == 0 and manifest.world_size != world.num_ranks:
        logger.info(
            "%s was saved by %d ranks, and %d load it: random states of others are skipped, ranks without any keep theirs",
            folder,
            manifest.world_size,
            world.num_ranks,
        )
    with world.together(what, CheckpointError), torch.no_grad():
        for model, (plan, names) in zip(models, plans, strict=True):
            read_plan(names, plan.pieces, model_sources(model), folder, world)
    with world.together(what, CheckpointError):
        installed = [loaded.install() for loaded in optimizers]
    with world.together(what, CheckpointError):
        for plan, sources in installed:
            read_plan([file.name for file in plan.files], plan.pieces, sources, folder, world)
    for engine in (engine_of(model) for model in models):
        if engine is not None:
            engine.mark_dirty()
    with world.together(what, CheckpointError):
        for obj, state in checked.custom if checked is not None else []:
            obj.load_state_dict(state)
    progress.note_begin(manifest.step, _optimizers(accelerator))


def _find(accelerator: Any, input_dir: str | os.PathLike[str] | None, world: World) -> tuple[Path, Manifest | None]:
    """The folder to load, verified; without a manifest it is accelerate's own."""
    what = "finding a checkpoint"
    if input_dir is None:
        run = naming_folder(accelerator, "load_state")
        plain = world.from_first(lambda: newest_plain(run, number_of), what, CheckpointError)
        return newest(run, number_of, world) if plain is None else (plain, None)
    folder = Path(input_dir).expanduser().absolute()
    world.from_first(lambda: recover_one(folder), what, CheckpointError)
    folder = one_place(folder, world, "load from")
    return folder, None if world.from_first(lambda: is_plain(folder), what, CheckpointError) else verify(folder, world)


def _check_files(
    accelerator: Any, folder: Path, manifest: Manifest, kwargs: Mapping[str, Any], allow_pickle: bool
) -> _Checked:
    """Check everything but weights and optimizers: is it there, can it be read, does it fit?"""
    for index in range(len(accelerator._schedulers)):
        _read_small(folder / f"{numbered(_SCHEDULER, index)}.bin", kwargs)
    if accelerator.scaler is not None and SCALER_NAME not in manifest.files:
        raise CheckpointError(
            f"{folder / SCALER_NAME} is missing: the state was saved without loss scaling, so it cannot go on in float16; load "
            "it in the precision that it was saved in"
        )
    count = sum(re.fullmatch(rf"{_CUSTOM}_\d+\.pkl", name) is not None for name in manifest.files)
    check_objects(accelerator, folder, count)
    plain = {"map_location": "cpu", "weights_only": not allow_pickle}
    custom = [_read_small(folder / f"{_CUSTOM}_{index}.pkl", plain) for index in range(count)]
    own = f"{_RANDOM}_{accelerator.process_index}.pkl"
    if own in manifest.files:
        _read_small(folder / own, {})
    step = int(_read_small(folder / f"{_RANDOM}_0.pkl", {})["step"])
    pairs = list(zip(accelerator._custom_objects, custom, strict=True))
    return _Checked(pairs, json.loads((folder / _ORDER).read_text()), step)


def _begins_anew(accelerator: Any) -> str:
    """What an accelerator saves beside weights and optimizer states, in words."""
    parts = ["random states", "the order of data"]
    parts += ["schedulers"] if accelerator._schedulers else []
    parts += ["registered objects"] if accelerator._custom_objects else []
    parts += ["the loss scale"] if accelerator.scaler is not None else []
    return f"{', '.join(parts[:-1])} and {parts[-1]} begin anew"


def _read_small(path: Path, kwargs: Mapping[str, Any]) -> Any:
    """Read a pickle, without running code from it unless `kwargs` say so."""
    try:
        return load(path, **kwargs)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: fewer objects were prepared when the state was saved; prepare the same ones, in the same order"
        ) from None
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} holds more than numbers and tensors, and reading it may run code ({reason}): if you trust it, "
            "load_state(..., allow_pickle=True) reads it"
        ) from error


def _plan_reading(model: nn.Module, index: int, folder: Path) -> tuple[FilePlan, list[str]]:
    """What a save would write of a model, and the files that it can be read from."""
    with tempfile.TemporaryDirectory() as scratch:
        plan = plan_weights(model, index, Path(scratch), {})
    names = [weights_name(index)] if index else weight_files(folder)
    if index and not is_stored(folder / names[0]):
        raise CheckpointError(
            f"{folder / names[0]} is missing: fewer models were prepared when the state was saved; prepare the same ones"
        )
    problems = match(plan, folder, names)
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{', '.join(names)} of {folder}: of another model: {'; '.join(problems[:3])}{more}. Prepare "
            "the model that was saved"
        )
    return plan, names


def _load_small_files(accelerator: Any, folder: Path, checked: _Checked, kwargs: Mapping[str, Any]) -> None:
    load_accelerator_state(
        str(folder),
        [],
        [],
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        accelerator.scaler,
        load_kwargs=dict(kwargs),
    )
    accelerator.step = checked.step
    for loader, order in zip(accelerator._dataloaders, checked.order, strict=False):
        restore_order(loader, order)
