"""The weights of a checkpoint of `ZeroAccelerator`: which files they are in, and under which names."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.model_plan import WEIGHTS, FilePlan, NotMovedError, plan_model, plan_state_dict, uncovered

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
    return plan_state_dict(model, weights_name(index))


def weights_name(index: int) -> str:
    """The name of the file with a model's weights, by the model's number."""
    return numbered(WEIGHTS.removesuffix(".safetensors"), index) + ".safetensors"
