"""Mixed precision of accelerate: which compute dtype it means, and its `GradScaler`."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from hf_zero.config.loss_scale import LossScale
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.optim.loss_scaling import LossScaler

_COMPUTE = {"bf16": "bfloat16", "fp16": "float16"}


def with_mixed_precision(config: ZeroConfig, mixed_precision: str) -> ZeroConfig:
    """The configuration under accelerate's `mixed_precision`, which says what a `compute_dtype` of "auto" means.

    From stage 1 on, all modules compute in that dtype, so that no more than its bytes are gathered and kept. Stage 0 is plain
    data parallelism: float32 parameters under autocast, which accelerate switches on.

    Raises:
        ConfigError: they contradict each other in whether the loss is scaled.
    """
    if config.compute_dtype != "auto" and (config.compute_dtype == "float16") != (mixed_precision == "fp16"):
        raise ConfigError(
            f"compute_dtype is {config.compute_dtype}, but mixed precision is {mixed_precision!r}: keep one of them"
        )
    if config.compute_dtype == "auto" and mixed_precision in _COMPUTE and config.policy.shards_optimizer:
        return config.replace(compute_dtype=_COMPUTE[mixed_precision])
    return config


def scale_loss(accelerator: Accelerator, config: ZeroConfig) -> None:
    """Let an accelerator in fp16 scale the loss as the configuration says, before it prepares an optimizer.

    accelerate 1.15 makes its scaler on GPUs only, and would train in float32 on CPUs.

    Raises:
        ConfigError: both the configuration and `GradScalerKwargs` say how.
    """
    if accelerator.mixed_precision != "fp16":
        return
    device, given = accelerator.device.type, accelerator.scaler_handler
    if given is not None and config.loss_scale != LossScale():
        raise ConfigError("loss_scale is in the configuration, and GradScalerKwargs are given: keep one of them")
    accelerator.native_amp = True
    if given is None:
        accelerator.scaler = LossScaler(config.loss_scale, device)
    else:
        accelerator.scaler = torch.amp.GradScaler(device, **given.to_kwargs())
