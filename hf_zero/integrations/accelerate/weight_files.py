"""The weights of a checkpoint of `ZeroAccelerator`: which files they are in, and under which names."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.model_plan import WEIGHTS, FilePlan, NotMovedError, plan_model, uncovered
from hf_zero.checkpoint.files.pieces import identity
from hf_zero.checkpoint.files.tensor_file import TensorInfo, layout_file
from hf_zero.errors import CheckpointError

_INDEX = f"{WEIGHTS}.index.json"


def numbered(name: str, index: int) -> str:
    """As accelerate numbers its files."""
    return f"{name}_{index}" if index else name


def plan_weights(model: nn.Module, index: int, folder: Path, options: Mapping[str, Any]) -> FilePlan:
    """What is written of a model: for the first one, what `save_pretrained` writes, if that leaves nothing out.

    Other models, and one with adapters, become one file with their state dict. `folder` gets the small files.
    """
    if index == 0 and not hasattr(model, "peft_config"):
        with contextlib.suppress(NotMovedError):
            plan = plan_model(model, folder, **options)
            if not uncovered(model, plan):
                return plan
        disk.remove_file(folder / _INDEX)
    return _plan_state_dict(model, index)


def _plan_state_dict(model: nn.Module, index: int) -> FilePlan:
    """One file with a state dict under its own names; a tied tensor is stored under its first name."""
    seen: dict[int, TensorInfo] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name!r} of {type(model).__name__} is a {type(value).__name__}, not a tensor")
        seen.setdefault(id(value), TensorInfo(name, value.dtype, tuple(value.shape)))
    infos = list(seen.values())
    file = layout_file(weights_name(index), infos, {"format": "pt"})
    return FilePlan((file,), {info.name: (identity(info.name, info.shape),) for info in infos})


def weights_name(index: int) -> str:
    """The name of the file with a model's weights, by the model's number."""
    return numbered(WEIGHTS.removesuffix(".safetensors"), index) + ".safetensors"
