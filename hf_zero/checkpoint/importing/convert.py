"""Checkpoints of DeepSpeed's ZeRO and of torch.distributed.checkpoint, turned into ours: weights, Adam states, small files."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint.commit import StagedCheckpoint
from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import MANIFEST, Manifest
from hf_zero.checkpoint.files.model_plan import WEIGHTS, FilePlan, plan_model, plan_one_file
from hf_zero.checkpoint.files.tensor_file import Source, TensorInfo
from hf_zero.checkpoint.importing.dcp import read_dcp
from hf_zero.checkpoint.importing.deepspeed import read_deepspeed
from hf_zero.checkpoint.importing.state import ForeignState, LazyTensor
from hf_zero.checkpoint.optimizer_state import state_files
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError
from hf_zero.layout import RowLayout

logger = logging.getLogger(__name__)

_OPTIMIZER, _SCHEDULER = "optimizer", "scheduler.pt"
_SMALL_FILES = (  # of the Trainer, of configurations, tokenizers and processors
    *("*config.json", "trainer_state.json", _SCHEDULER, "scaler.pt", "rng_state*.pth"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "*.jinja", "chat_template.json"),
)


def import_deepspeed(folder: Path, out: Path, allow_pickle: bool) -> Path:
    """Turn a checkpoint of DeepSpeed's ZeRO, stage 1, 2 or 3, into one of ours.

    Weights are the fp32 masters; what was not trained is widened to fp32. DeepSpeed need not be installed.

    Args:
        folder: `global_stepN`, its parent with `latest`, or a Trainer's `checkpoint-N`.
        out: the new checkpoint; must not be there yet.
        allow_pickle: run code from the files, if they hold objects of classes other than torch's and DeepSpeed's.

    Returns:
        `out`.

    Raises:
        CheckpointError: nothing has been written; see `ForeignState.check` and `read_deepspeed`.
    """
    _refuse(out)
    return _write(read_deepspeed(folder, allow_pickle), out)


def import_dcp(folder: Path, out: Path, allow_pickle: bool) -> Path:
    """Turn a folder of torch.distributed.checkpoint, with a model and its optimizer, into one of our checkpoints.

    Weights keep the dtype that they have there. If it has no optimizer, only weights are imported, and a warning says so.

    Args:
        folder: with `.metadata`, or with `pytorch_model_fsdp_0` and `optimizer_0`.
        out: the new checkpoint; must not be there yet.
        allow_pickle: run code from the files, if they hold objects of classes other than torch's.

    Returns:
        `out`.

    Raises:
        CheckpointError: nothing has been written.
    """
    _refuse(out)
    return _write(read_dcp(folder, allow_pickle), out)


def _refuse(out: Path) -> None:
    if out.exists():
        raise CheckpointError(f"{out} is there already: remove it, or give another folder")


class _OneByOne(Mapping[str, Source]):
    """Sources that are read on request; the last one is kept, since a parameter may have several pieces."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        self._tensors = tensors
        self._last: tuple[str, Source] | None = None

    def __getitem__(self, name: str) -> Source:
        if self._last is None or self._last[0] != name:
            self._last = None  # frees its memory before the next one is read
            lazy = self._tensors[name]
            self._last = name, Source(lazy.read(), RowLayout(lazy.shape, 1))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _write(state: ForeignState, out: Path) -> Path:
    content = None
    if state.groups is not None:
        groups = [{"params": group.params, "options": group.options} for group in state.groups]
        content = {"optimizer": state.optimizer(), "groups": groups, "numbers": state.numbers}
    else:
        logger.warning("%s has no optimizer: weights alone are imported", state.folders[0])
    world = World.alone(ZeroConfig(stage=0), torch.device("cpu"))
    staged = StagedCheckpoint(out, world)
    with staged.filling():
        staged.write(_weights_plan(state, staged.folder), _OneByOne(state.weights))
        if content is not None:
            states = {f"{name}.{key}": lazy for name, found in state.states.items() for key, lazy in found.items()}
            tensors, numbers = state_files(_OPTIMIZER)
            staged.write(_plain_plan(tensors, states), _OneByOne(states))
            disk.write_file(staged.folder / numbers, json.dumps(content).encode())
        _copy_small_files(state, staged.folder)
    config = {"imported_from": state.origin}
    staged.commit(Manifest(state.step, state.world_size, state.stage, config=config))
    return out


def _plain_plan(name: str, tensors: Mapping[str, LazyTensor]) -> FilePlan:
    return plan_one_file(name, [TensorInfo(key, lazy.dtype, lazy.shape) for key, lazy in tensors.items()])


def _weights_plan(state: ForeignState, folder: Path) -> FilePlan:
    """The files that `save_pretrained` would write, if the folder names the model; else one file with the names as they are."""
    for source in state.folders:
        if (source / "config.json").is_file():
            try:
                model = _model_of(source)
                dtypes = {lazy.dtype for lazy in state.weights.values() if lazy.dtype.is_floating_point}
                plan = plan_model(model, folder, dtypes.pop() if len(dtypes) == 1 else None)
                _check_fits(plan, model, state)
                return plan
            except Exception as error:  # transformers raises all kinds of errors for an unknown configuration
                logger.info("weights keep the names that they have in %s: %s", source, error)
                index = folder / f"{WEIGHTS}.index.json"
                disk.remove_file(index)
    return _plain_plan(WEIGHTS, state.weights)


def _model_of(folder: Path) -> nn.Module:
    """The model that a configuration describes, without values."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    name = (config.architectures or ["?"])[0]
    kind: Any = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CheckpointError(f"{name} is not a model of transformers")
    make: Any = kind
    with torch.device("meta"):
        model: nn.Module = make._from_config(config, dtype=torch.float32)
    return model


def _check_fits(plan: FilePlan, model: nn.Module, state: ForeignState) -> None:
    """Raise unless every weight is in the plan, or is another name of one that is."""
    used = {piece.source for pieces in plan.pieces.values() for piece in pieces}
    shapes: dict[str, Any] = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    by_tensor: dict[int, set[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(value), set()).add(name)
    tied = {name for names in by_tensor.values() if names & used for name in names}
    for name in used - state.weights.keys():
        raise CheckpointError(f"{name} is not among them")
    for name, lazy in state.weights.items():
        if name not in tied or shapes[name] != lazy.shape:
            raise CheckpointError(f"{name} of shape {lazy.shape} is not the model's")


def _copy_small_files(state: ForeignState, folder: Path) -> None:
    kept = {WEIGHTS, f"{WEIGHTS}.index.json", MANIFEST, *state_files(_OPTIMIZER)}
    for source in reversed(state.folders):
        for pattern in _SMALL_FILES:
            for path in sorted(source.glob(pattern)):
                if path.is_file() and path.name not in kept:
                    shutil.copyfile(path, folder / path.name)
    if state.scheduler is not None and "last_epoch" in state.scheduler and not (folder / _SCHEDULER).exists():
        torch.save(state.scheduler, folder / _SCHEDULER)
