"""ZeRO for custom loops on accelerate: `ZeroPlugin`, `ZeroAccelerator`. All that knows accelerate."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.config import ZeroConfig
from hf_zero.engine.engine import engine_of, live_engines
from hf_zero.engine.grouping import find_parameters
from hf_zero.errors import ConfigError, PartitionError, UsageError
from hf_zero.rebind import rebind_optimizer
from hf_zero.shard import shard_model

_UNSUPPORTED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class ZeroPlugin:
    """What `ZeroAccelerator` partitions with.

    Args:
        config: a `ZeroConfig`, a mapping, a path; None for keywords alone, or the file that HF_ZERO_CONFIG names.
        **overrides: fields of `ZeroConfig`, such as `stage=2`.

    Raises:
        ConfigError: the configuration has a mistake.
    """

    def __init__(
        self, config: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None, **overrides: Any
    ) -> None:
        self.config = ZeroConfig.load({} if config is None and overrides else config, **overrides)

    def __repr__(self) -> str:
        return f"ZeroPlugin({self.config})"


class ZeroAccelerator(Accelerator):  # type: ignore[misc]
    """An `Accelerator` whose `prepare` partitions models and rebinds their optimizers, in any order.

    `prepare`, `accumulate`, `backward`, `clip_grad_norm_`, `no_sync`, `unwrap_model`, `get_state_dict` and `save_model`
    work as under DDP; the last two are called by all ranks, and give whole weights. A model without trainable
    parameters is left alone. On a machine without an accelerator it runs on the CPU.

    Args:
        *args: as for `Accelerator`.
        zero_plugin: what to partition with; by default the file that HF_ZERO_CONFIG names.
        **kwargs: as for `Accelerator`. With `mixed_precision="bf16"`, a `compute_dtype` of "auto" becomes bfloat16.

    Raises:
        ConfigError: the configuration has a mistake, or is combined with FSDP, DeepSpeed, Megatron-LM or fp16.
    """

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | None = None, **kwargs: Any) -> None:
        use_cpu_without_accelerator()
        if not torch.accelerator.is_available():
            kwargs["cpu"] = True
        super().__init__(*args, **kwargs)
        if self.distributed_type in _UNSUPPORTED:
            raise ConfigError(
                f"ZeroAccelerator cannot be combined with {self.distributed_type.value}: remove its plugin"
            )
        if self.mixed_precision == "fp16":
            raise ConfigError("mixed_precision='fp16' is not supported yet (it needs loss scaling); use 'bf16'")
        self.zero_plugin = zero_plugin or ZeroPlugin()
        config = self.zero_plugin.config
        if self.mixed_precision == "bf16" and config.compute_dtype == "auto":
            config = config.replace(compute_dtype="bfloat16")
        self._zero_config = config

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Partition the models among `args`, let their optimizers hold the partitioned parameters, prepare the rest.

        Raises:
            PartitionError: an optimizer holds parameters of no model that was prepared.
        """
        for item in args:
            if isinstance(item, nn.Module):
                self._partition(item)
        prepared = super().prepare(*args, **kwargs)
        for optimizer in (item for item in args if isinstance(item, torch.optim.Optimizer)):
            self._check(optimizer)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Partition a model, and give it accelerate's autocast and compilation."""
        self._partition(model)
        for optimizer in self._optimizers:
            self._rebind(optimizer)
        # `evaluation_mode` is accelerate's way not to wrap a model in DDP, which refuses frozen ones on the CPU.
        if engine_of(model) is not None:
            device_placement, evaluation_mode = False, True
        elif not any(param.requires_grad for param in model.parameters()):
            evaluation_mode = True
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Let the optimizer hold the partitioned parameters of the models prepared so far."""
        self._rebind(optimizer)
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def _partition(self, model: nn.Module) -> None:
        if engine_of(model) is None and any(param.requires_grad for param in model.parameters()):
            model.to(self.device)
            shard_model(model, self._zero_config)

    def _rebind(self, optimizer: Any) -> None:
        for engine in live_engines():
            rebind_optimizer(getattr(optimizer, "optimizer", optimizer), engine)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of a forgotten or foreign model would train nothing, without a word."""
        known = {id(param) for engine in live_engines() for param in _params_held_by(engine.model)}
        known |= {id(param) for model in self._models for param in model.parameters()}
        inner = getattr(optimizer, "optimizer", optimizer)
        strange = [param for group in inner.param_groups for param in group["params"] if id(param) not in known]
        if strange and self._models:
            raise PartitionError(
                f"prepare: the optimizer holds a parameter of shape {tuple(strange[0].shape)} that belongs to no prepared "
                "model: build it on the model's parameters, and prepare both"
            )

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients by their norm over all ranks; returns it as a plain tensor.

        Raises:
            UsageError: `norm_type` is infinite, which torch computes wrongly on partitioned gradients.
        """
        if math.isinf(norm_type):
            raise UsageError("clip_grad_norm_ with norm_type=inf is not supported on partitioned gradients; use 2")
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole weights on the CPU of every rank; called by all ranks together."""
        inner = self.unwrap_model(model) if unwrap else model
        if engine_of(inner) is None:
            state: dict[str, Tensor] = super().get_state_dict(model, unwrap)
            return state
        return whole_state_dict(inner)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Not there yet: saving optimizer state."""
        raise UsageError("ZeroAccelerator cannot save or load optimizer state yet; save_model() writes the weights")

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Not there yet: loading optimizer state."""
        self.save_state()


def use_cpu_without_accelerator() -> None:
    """Tell accelerate to use the CPU where there is nothing else: else every process is, silently, a world of its own."""
    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def _params_held_by(model: nn.Module | None) -> list[nn.Parameter]:
    return [] if model is None else [found.param for found in find_parameters(model)]
