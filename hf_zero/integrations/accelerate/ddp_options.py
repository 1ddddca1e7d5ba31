"""What accelerate's options of DistributedDataParallel mean for a partitioned model, which is never wrapped in it."""

from __future__ import annotations

from accelerate import DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType

from hf_zero.config.zero_config import ZeroConfig
from hf_zero.errors import ConfigError


def with_ddp_options(config: ZeroConfig, options: DistributedDataParallelKwargs | None) -> ZeroConfig:
    """The configuration with `broadcast_buffers` as the options say; the others change no result.

    Raises:
        ConfigError: there is a communication hook, which would never be called.
    """
    if options is None:
        return config
    if options.comm_hook is not DDPCommunicationHookType.NO:
        raise ConfigError(
            f"comm_hook={options.comm_hook.value!r} of DistributedDataParallelKwargs belongs to DDP, and gradients are not "
            "reduced by it here: leave it out, and for smaller messages set `wire: {reduce: bfloat16}`"
        )
    return config if options.broadcast_buffers else config.replace(broadcast_buffers=False)
