"""States that accelerate itself has saved, under DDP or in one process: whole tensors, of which each rank keeps its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.checkpointing import load_accelerator_state
from accelerate.utils import MODEL_NAME, OPTIMIZER_NAME, SAFE_MODEL_NAME, SCALER_NAME, SCHEDULER_NAME
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_zero.checkpoint.files.manifest import MANIFEST
from hf_zero.checkpoint.optimizer_state import state_files
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError
from hf_zero.integrations.accelerate.places import check_objects
from hf_zero.integrations.accelerate.weight_files import numbered
from hf_zero.integrations.random_state import share_random_state

_DDP = "module."  # before every name, where a state was saved of a wrapped model


def is_plain(folder: Path) -> bool:
    """Whether accelerate itself has saved this state; what is left of one of ours is none."""
    ours = (MANIFEST, state_files(OPTIMIZER_NAME)[0])
    if not folder.is_dir() or any((folder / name).exists() for name in ours):
        return False
    return any(path.is_file() for path in _weights(folder, 0))


def load_plain(
    accelerator: Any,
    folder: Path,
    world: World,
    models: Sequence[nn.Module],
    read: Callable[[Path, Mapping[str, Any]], Any],
    kwargs: Mapping[str, Any],
) -> int:
    """Load all that `Accelerator.load_state` loads; called by all ranks together, each of which reads whole tensors.

    Args:
        accelerator: has at least one partitioned model.
        folder: the state.
        world: the ranks.
        models: those to load, in order.
        read: reads a pickle.
        kwargs: of `torch.load`, for schedulers.

    Returns:
        The steps that an optimizer has counted; 0 if none does.

    Raises:
        CheckpointError: on all ranks, before anything is changed, if a file is missing, cannot be read, or is of another model.
    """
    what = f"loading {folder}"
    objects = accelerator._custom_objects
    with world.together(what, CheckpointError):
        _refuse_missing(accelerator, folder, len(models))
        states = [_state_of(model, folder, index) for index, model in enumerate(models)]
        names = [f"{numbered(OPTIMIZER_NAME, index)}.bin" for index in range(len(accelerator._optimizers))]
        optimizers = [read(folder / name, {"map_location": "cpu", **kwargs}) for name in names]
        _refuse_other_groups(accelerator._optimizers, optimizers, folder)
        for index in range(len(accelerator._schedulers)):
            read(folder / f"{numbered(SCHEDULER_NAME, index)}.bin", kwargs)
        if accelerator.scaler is not None:
            read(folder / SCALER_NAME, kwargs)
        registered = [read(folder / f"custom_checkpoint_{index}.pkl", kwargs) for index in range(len(objects))]
    with world.together(what, CheckpointError):
        for model, state in zip(models, states, strict=True):
            model.load_state_dict(state)
        for optimizer, state in zip(accelerator._optimizers, optimizers, strict=True):
            optimizer.load_state_dict(state)
        found = load_accelerator_state(
            str(folder),
            [],
            [],
            accelerator._schedulers,
            accelerator._dataloaders,
            accelerator.process_index,
            accelerator.scaler,
            load_kwargs=dict(kwargs),
        )
        for each, state in zip(objects, registered, strict=True):
            each.load_state_dict(state)
    accelerator.step = world.share(found.get("step", accelerator.step), what)  # ranks may be more than those that saved
    share_random_state(world)
    states_of_all = [
        state for optimizer in optimizers for state in optimizer["state"].values() if isinstance(state, dict)
    ]
    return int(max((state.get("step", 0) for state in states_of_all), default=0))


def newest_plain(run: Path, number_of: Callable[[Path], int | None]) -> Path | None:
    """The state with the highest number in a folder; None where it is ours."""
    found = (
        [(number, path) for path in run.iterdir() if (number := number_of(path)) is not None] if run.is_dir() else []
    )
    for _, path in sorted(found, reverse=True):
        if (path / MANIFEST).exists():
            return None
        if is_plain(path):
            return path
    return None


def _weights(folder: Path, index: int) -> tuple[Path, Path]:
    return folder / f"{numbered(SAFE_MODEL_NAME, index)}.safetensors", folder / f"{numbered(MODEL_NAME, index)}.bin"


def _refuse_missing(accelerator: Any, folder: Path, num_models: int) -> None:
    wanted = [list(_weights(folder, index)) for index in range(num_models)]
    wanted += [[folder / f"{numbered(OPTIMIZER_NAME, i)}.bin"] for i in range(len(accelerator._optimizers))]
    wanted += [[folder / f"{numbered(SCHEDULER_NAME, i)}.bin"] for i in range(len(accelerator._schedulers))]
    wanted += [[folder / SCALER_NAME]] if accelerator.scaler is not None else []
    for paths in wanted:
        if not any(path.is_file() for path in paths):
            raise CheckpointError(
                f"{paths[0]} is missing: fewer objects were prepared when accelerate saved this state; prepare the same ones, "
                "in the same order"
            )
    check_objects(accelerator, folder, len([*folder.glob("custom_checkpoint_*.pkl")]))


def _refuse_other_groups(optimizers: Sequence[Any], states: Sequence[Mapping[str, Any]], folder: Path) -> None:
    for optimizer, state in zip(optimizers, states, strict=True):
        sizes = [
            [len(group["params"]) for group in groups] for groups in (optimizer.param_groups, state["param_groups"])
        ]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"the optimizer in {folder} has groups of {sizes[1]} parameters, but this one of {sizes[0]}: make the one "
                "that was saved"
            )


def _state_of(model: nn.Module, folder: Path, index: int) -> dict[str, Any]:
    """A model's state dict, with names of the model, checked."""
    safe, pickled = _weights(folder, index)
    state: dict[str, Any] = (
        load_file(safe) if safe.is_file() else torch.load(pickled, map_location="cpu", weights_only=True)
    )
    wanted = model.state_dict()
    if all(name.startswith(_DDP) for name in state) and not all(name.startswith(_DDP) for name in wanted):
        state = {name.removeprefix(_DDP): value for name, value in state.items()}
    ties: dict[object, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        ties.setdefault(id(param), []).append(name)
    for name, value in wanted.items():
        if type(value) is Tensor and value.numel():  # a buffer
            ties.setdefault((value.untyped_storage()._cdata, value.storage_offset(), value.shape), []).append(name)
    for names in ties.values():  # of tied weights, safetensors has one
        known = next((name for name in names if name in state), None)
        if known is not None:
            state |= {name: state[known] for name in names if name in wanted}
    unknown = sorted({*state} ^ {*wanted})
    unlike = [name for name in state if name in wanted and state[name].shape != wanted[name].shape]
    if unknown or unlike:
        raise CheckpointError(
            f"{safe if safe.is_file() else pickled} is of another model: {', '.join([*unknown, *unlike][:3])}. Prepare the "
            "model that was saved"
        )
    return state
