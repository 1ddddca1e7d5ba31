"""What accelerate needs for ranks that see the same batch, since they share its layers or its sequences.

It deals out batches by its `ParallelismConfig`, which it refuses on CPUs; here it may be used there too. Its
`gather_for_metrics` takes every rank's results for those of another batch; here it takes one rank's of each batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch.utils import _pytree as pytree

from hf_zero.changes import Changes
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.errors import ConfigError

_SEE_ONE_BATCH = ("tp_size", "sp_size", "cp_size")


def asked_for(given: ParallelismConfig | None) -> ParallelismConfig | None:
    """The axes that a script asks for, or `accelerate launch` did."""
    is_launched = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    return given or (ParallelismConfig() if is_launched else None)


def with_axes(config: ZeroConfig, given: ParallelismConfig | None) -> ZeroConfig:
    """The configuration with the tensor axis and the axes of sequences of accelerate's, if that has them.

    A `cp_comm_strategy` of "allgather" is accelerate's default, and leaves what the configuration says.

    Raises:
        ConfigError: the two differ.
    """
    if given is None:
        return config
    if ranks_of_a_batch(given) == 1:
        return config
    for name in _SEE_ONE_BATCH:
        wanted, found = getattr(given, name), getattr(config, name)
        if wanted > 1 and found not in (1, wanted):
            raise ConfigError(
                f"{name} is {found} in zero, but {wanted} in the ParallelismConfig: leave one of them out"
            )
    if config.replicate not in (1, given.dp_replicate_size):
        raise ConfigError(
            f"replicate is {config.replicate} in zero, but dp_replicate_size is {given.dp_replicate_size} in the "
            "ParallelismConfig: leave one of them out"
        )
    sizes = {name: max(getattr(config, name), getattr(given, name)) for name in _SEE_ONE_BATCH}
    if given.cp_size > 1 and given.cp_handler.cp_comm_strategy == "alltoall":
        config = config.replace(cp_comm_strategy="alltoall")
    return config.replace(**sizes, replicate=given.dp_replicate_size)


def ranks_of_a_batch(given: ZeroConfig | ParallelismConfig) -> int:
    """How many ranks see the same batch."""
    return math.prod(getattr(given, name) for name in _SEE_ONE_BATCH)


def parallelism_of(config: ZeroConfig, num_ranks: int) -> ParallelismConfig:
    """accelerate's form of the axes of a configuration, for dealing out batches: ranks that see one batch are its "tp" axis.

    Its own axes of sequences are DeepSpeed's, and torch's.

    Raises:
        ConfigError: an axis does not fit the ranks.
    """
    size = ranks_of_a_batch(config)
    if num_ranks % size:
        runs = "process runs" if num_ranks == 1 else "processes run"
        names = [name for name in _SEE_ONE_BATCH if getattr(config, name) > 1]
        raise ConfigError(f"{' x '.join(names)} is {size}, but {num_ranks} {runs}: it must divide their number")
    # Every size is said: what is not, a launcher's environment says.
    return ParallelismConfig(tp_size=size, dp_shard_size=num_ranks // size, dp_replicate_size=1, cp_size=1, sp_size=1)


def num_processes() -> int:
    """How many processes were started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def sharding_batches(given: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    """Settings of loaders with which every rank reads its own batches.

    Raises:
        ConfigError: one rank is to read all of them, for which accelerate cannot deal out batches to several axes.
    """
    found = given or DataLoaderConfiguration()
    if found.dispatch_batches:
        raise ConfigError(
            "dispatch_batches=True would give all ranks the same batch with tp_size, sp_size or cp_size: leave it out"
        )
    return dataclasses.replace(found, dispatch_batches=False)


@contextmanager
def also_on_cpus() -> Iterator[None]:
    """Within: accelerate takes a `ParallelismConfig` on CPUs."""
    original = ParallelismConfig._validate_accelerator

    @functools.wraps(original)
    def validate(self: ParallelismConfig, accelerator: Accelerator) -> None:
        if accelerator.distributed_type is not DistributedType.MULTI_CPU:
            original(self, accelerator)
        elif self.total_size != accelerator.num_processes:
            raise ConfigError(
                f"the axes of the ParallelismConfig have {self.total_size} ranks, but {accelerator.num_processes} processes "
                "run: start as many, or change its sizes"
            )

    with Changes() as changes:
        changes.replace(ParallelismConfig, "_validate_accelerator", validate)
        yield


def gather_each_batch_once(accelerator: Accelerator, size: int) -> None:
    """Let `gather_for_metrics` give the results of each batch once, from the first of the `size` ranks that see it."""
    original: Callable[..., Any] = accelerator.gather_for_metrics

    def first_of_each(gathered: torch.Tensor) -> torch.Tensor:
        by_rank = gathered.view(accelerator.num_processes // size, size, -1, *gathered.shape[1:])
        return by_rank[:, 0].reshape(-1, *gathered.shape[1:])

    def gather(data: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, first_of_each, type(accelerator).gather(accelerator, data))

    @functools.wraps(original)
    def gather_for_metrics(*args: Any, **kwargs: Any) -> Any:
        accelerator.gather = gather
        try:
            return original(*args, **kwargs)
        finally:
            del accelerator.gather

    accelerator.gather_for_metrics = gather_for_metrics
