"""hf_zero: ZeRO stages 0 to 3 for the Hugging Face stack, on plain PyTorch."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_zero.config.files import CONFIG_VARIABLE

if TYPE_CHECKING:
    from hf_zero.checkpoint.handover.stream import WholeParameters as WholeParameters
    from hf_zero.checkpoint.handover.stream import whole_parameters as whole_parameters
    from hf_zero.config.loss_scale import LossScale as LossScale
    from hf_zero.config.zero_config import ZeroConfig as ZeroConfig
    from hf_zero.engine.engine import ZeroEngine as ZeroEngine
    from hf_zero.engine.engine import engine_of as engine_of
    from hf_zero.engine.gathered_parameters import GatheredParameters as GatheredParameters
    from hf_zero.engine.modules.forward_method import register_forward_method as register_forward_method
    from hf_zero.errors import CheckpointError as CheckpointError
    from hf_zero.errors import CollectiveError as CollectiveError
    from hf_zero.errors import ConfigError as ConfigError
    from hf_zero.errors import OffloadError as OffloadError
    from hf_zero.errors import PartitionError as PartitionError
    from hf_zero.errors import UsageError as UsageError
    from hf_zero.errors import ZeroError as ZeroError
    from hf_zero.integrations.accelerate.accelerator import ZeroAccelerator as ZeroAccelerator
    from hf_zero.integrations.accelerate.accelerator import ZeroPlugin as ZeroPlugin
    from hf_zero.integrations.accelerate.resuming import resume_or_start as resume_or_start
    from hf_zero.integrations.trainer.arguments import ZeroCallback as ZeroCallback
    from hf_zero.integrations.trainer.arguments import ZeroTrainingArguments as ZeroTrainingArguments
    from hf_zero.integrations.trainer.arguments import with_zero as with_zero
    from hf_zero.optim.kinds import mark_elementwise as mark_elementwise
    from hf_zero.optim.loss_scaling import LossScaler as LossScaler
    from hf_zero.sharding.active import disabled as disabled
    from hf_zero.sharding.active import leave_whole as leave_whole
    from hf_zero.sharding.init import Init as Init
    from hf_zero.sharding.init import undo as undo
    from hf_zero.sharding.shard_model import mark_dirty as mark_dirty
    from hf_zero.sharding.shard_model import shard_model as shard_model

__version__ = "0.2.0"

# Imported at first use, so that importing hf_zero does not import torch (PEP 562).
_HOME = {
    "CheckpointError": "hf_zero.errors",
    "CollectiveError": "hf_zero.errors",
    "ConfigError": "hf_zero.errors",
    "GatheredParameters": "hf_zero.engine.gathered_parameters",
    "mark_elementwise": "hf_zero.optim.kinds",
    "Init": "hf_zero.sharding.init",
    "LossScale": "hf_zero.config.loss_scale",
    "LossScaler": "hf_zero.optim.loss_scaling",
    "OffloadError": "hf_zero.errors",
    "PartitionError": "hf_zero.errors",
    "UsageError": "hf_zero.errors",
    "WholeParameters": "hf_zero.checkpoint.handover.stream",
    "ZeroAccelerator": "hf_zero.integrations.accelerate.accelerator",
    "ZeroCallback": "hf_zero.integrations.trainer.arguments",
    "ZeroConfig": "hf_zero.config.zero_config",
    "ZeroEngine": "hf_zero.engine.engine",
    "ZeroError": "hf_zero.errors",
    "ZeroPlugin": "hf_zero.integrations.accelerate.accelerator",
    "ZeroTrainingArguments": "hf_zero.integrations.trainer.arguments",
    "disabled": "hf_zero.sharding.active",
    "engine_of": "hf_zero.engine.engine",
    "leave_whole": "hf_zero.sharding.active",
    "mark_dirty": "hf_zero.sharding.shard_model",
    "register_forward_method": "hf_zero.engine.modules.forward_method",
    "resume_or_start": "hf_zero.integrations.accelerate.resuming",
    "shard_model": "hf_zero.sharding.shard_model",
    "undo": "hf_zero.sharding.init",
    "whole_parameters": "hf_zero.checkpoint.handover.stream",
    "with_zero": "hf_zero.integrations.trainer.arguments",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hf_zero' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


# Then plain TrainingArguments and Accelerators, too, train under ZeRO or not at all.
if os.environ.get(CONFIG_VARIABLE):
    import_module("hf_zero.integrations.everywhere").switch_on()
