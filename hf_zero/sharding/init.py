"""`Init` partitions models while they are loaded or constructed; `activate` does the same for a whole program."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hf_zero.changes import Changes, undo_all
from hf_zero.comm.groups.process_groups import default_device, default_group
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.ranks.world import World
from hf_zero.sharding import model_methods
from hf_zero.sharding.active import pausable, paused
from hf_zero.sharding.axes.cutting import partition_whole, raise_to_master
from hf_zero.sharding.axes.tensor_parallel import TensorParallelSeam
from hf_zero.sharding.construct import Cutter
from hf_zero.sharding.late import attach_late
from hf_zero.sharding.loading import LoadSeam
from hf_zero.sharding.other_libraries.install import install


class Init:
    """While active, every model that is loaded or constructed is partitioned as it is made.

    `from_pretrained` reads only this rank's rows of each file. Constructors, `from_config` included, run unchanged on
    whole tensors, drawn in the unsharded order from rank 0's random state. Freshly initialised weights are therefore those
    of the unsharded model. At most about 16 MiB of parameters, or a single parameter, are whole at a time. The model gets
    its engine at its first forward, or from `shard_model(model)`. All ranks must enter and leave together.

    Args:
        config: a `ZeroConfig`, a stage, a mapping, a path, or None for what HF_ZERO_CONFIG says.
        enabled: False does nothing.
        mesh: the ranks; as for `shard_model`.

    Raises:
        ConfigError: the configuration has a mistake, or does not fit the number of ranks.
        UsageError: several processes were launched, but there is no process group.
        PartitionError: a model is quantised, or spread over devices.

    Source: deepspeed.zero.Init.
    """

    def __init__(
        self,
        config: ZeroConfig | Mapping[str, Any] | str | int | os.PathLike[str] | None = None,
        enabled: bool = True,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._config = ZeroConfig.load(config) if enabled else None
        self._mesh = mesh
        self._stack = ExitStack()
        self._cutter: Cutter | None = None
        self._world: World | None = None

    def __enter__(self) -> Init:
        if self._config is None:
            return self
        install()
        world = self._world = World.create(self._config, default_device(), self._mesh)
        with ExitStack() as stack:
            stack.enter_context(paused(None))
            self._cutter = Cutter(world)
            is_cutting = self._cutter.cuts_as_made
            stack.enter_context(self._cutter.constructing() if is_cutting else self._cutter.watching())
            seam = LoadSeam(world, functools.partial(_adopt, world=world), self._cutter)
            stack.callback(seam.close)
            if world.tensor.num_ranks > 1:
                stack.callback(TensorParallelSeam(world, seam).close)
            stack.enter_context(pausable(seam, self._cutter))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        cutter, self._cutter = self._cutter, None
        if cutter is not None and kind is None:
            for model in cutter.models():
                if model not in cutter.world.models:
                    _adopt(model, cutter.world)


def _adopt(model: nn.Module, world: World) -> None:
    """Give a newly made model the optimizer's dtype, its methods, and an engine at its first forward."""
    if world.tensor.num_ranks > 1:  # else its parameters have been cut as they were made
        partition_whole(model, world)
    raise_to_master(model, world)
    attach_late(model, world)
    model_methods.attach(model, world)


# --- switched on for a whole program --------------------------------------------------------------------------------

_active: list[_Activation] = []


class _Activation:
    """What `activate` has changed, and how to change it back."""

    def __init__(self, config: ZeroConfig, device: torch.device) -> None:
        from transformers import PreTrainedModel

        self.config = config
        self.world = World.create(config, device)
        self._stack = ExitStack()
        seam = LoadSeam(self.world, functools.partial(_adopt, world=self.world))
        self._stack.enter_context(pausable(seam, None))
        self._stack.callback(seam.close)
        if self.world.tensor.num_ranks > 1:
            self._stack.callback(TensorParallelSeam(self.world, seam).close)
        original = vars(PreTrainedModel)["_from_config"].__func__

        @functools.wraps(original)
        def from_config(cls: type, *args: Any, **kwargs: Any) -> Any:
            if seam.is_paused or not seam.comes_together(f"making a {cls.__name__}"):
                return original(cls, *args, **kwargs)
            cutter = Cutter(self.world)
            with cutter.constructing() if cutter.cuts_as_made else nullcontext():
                model = original(cls, *args, **kwargs)
            if model not in self.world.models:
                _adopt(model, self.world)
            return model

        self._stack.enter_context(Changes()).replace(PreTrainedModel, "_from_config", classmethod(from_config))

    def undo(self) -> None:
        """Put the originals back; models that are partitioned stay so."""
        self._stack.close()


def activate(config: ZeroConfig, device: torch.device) -> None:
    """From now until `undo()`, partition transformers' models when they are loaded or made from a config.

    `ZeroTrainingArguments` calls this. The same configuration as before changes nothing; another one replaces the
    earlier one.

    Args:
        config: how to partition.
        device: where parameters live.

    Raises:
        ConfigError: the configuration does not fit the number of ranks.
    """
    group = default_group()
    if _active and _active[-1].config == config and _active[-1].world.belongs_to(group):
        return
    _undo_activation()
    install()
    _active.append(_Activation(config, device))


def _undo_activation() -> None:
    while _active:
        _active.pop().undo()


def undo() -> None:
    """Put back everything that hf_zero has changed in transformers; models that are partitioned stay partitioned."""
    _undo_activation()
    undo_all()
