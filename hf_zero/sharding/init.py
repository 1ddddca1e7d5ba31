"""`Init` partitions models while they are loaded or constructed; `activate` does the same for a whole program."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_zero.comm.groups import default_device, default_group
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.engine import engine_of
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError
from hf_zero.sharding import model_methods
from hf_zero.sharding.construct import Cutter
from hf_zero.sharding.loading import LoadSeam
from hf_zero.sharding.shard_model import attach_late, partition_whole, raise_to_master
from hf_zero.sharding.tensor_parallel import TensorParallelSeam


class Init:
    """While active, every model that is loaded or constructed is partitioned as it is made.

    `from_pretrained` reads only this rank's rows of each file. Constructors, `from_config` included, run unchanged on
    whole tensors, drawn in the unsharded order from rank 0's random state. Freshly initialised weights are therefore those
    of the unsharded model. At most about 16 MiB of parameters, or a single parameter, are whole at a time. The model gets
    its engine at its first forward, or from `shard_model(model)`. All ranks must enter and leave together.

    Args:
        config: a `ZeroConfig`, a mapping, a path, or None for the file that HF_ZERO_CONFIG names.
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
        config: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
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
        world = self._world = World.create(self._config, default_device(), self._mesh)
        with ExitStack() as stack:
            stack.enter_context(_paused(None))
            self._cutter = Cutter(world)
            is_cutting = self._cutter.cuts_as_made
            stack.enter_context(self._cutter.constructing() if is_cutting else self._cutter.watching())
            seam = LoadSeam(world, functools.partial(_adopt, world=world), self._cutter)
            stack.callback(seam.close)
            if world.tensor.num_ranks > 1:
                stack.callback(TensorParallelSeam(world, seam).close)
            stack.enter_context(_pausable(seam, self._cutter))
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

_pausable_now: list[tuple[LoadSeam, Cutter | None]] = []
_left_whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_active: list[_Activation] = []


class _Activation:
    """What `activate` has changed, and how to change it back."""

    def __init__(self, config: ZeroConfig, device: torch.device) -> None:
        from transformers import PreTrainedModel

        self.config = config
        self.world = World.create(config, device)
        self._seam = LoadSeam(self.world, functools.partial(_adopt, world=self.world))
        self._tensor_seam = TensorParallelSeam(self.world, self._seam) if self.world.tensor.num_ranks > 1 else None
        self._entry = (self._seam, None)
        self._owner = PreTrainedModel
        self._original = vars(PreTrainedModel)["_from_config"]
        _pausable_now.append(self._entry)
        original = self._original.__func__

        @functools.wraps(original)
        def from_config(cls: type, *args: Any, **kwargs: Any) -> Any:
            if self._seam.is_paused:
                return original(cls, *args, **kwargs)
            cutter = Cutter(self.world)
            with cutter.constructing() if cutter.cuts_as_made else nullcontext():
                model = original(cls, *args, **kwargs)
            if model not in self.world.models:
                _adopt(model, self.world)
            return model

        self._owner._from_config = classmethod(from_config)

    def undo(self) -> None:
        """Put the originals back; models that are partitioned stay so."""
        self._owner._from_config = self._original
        if self._tensor_seam is not None:
            self._tensor_seam.close()
        self._seam.close()
        _pausable_now.remove(self._entry)


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
    _active.append(_Activation(config, device))


def _undo_activation() -> None:
    while _active:
        _active.pop().undo()


def undo() -> None:
    """Put back everything that hf_zero has changed in transformers; models that are partitioned stay partitioned."""
    import sys

    _undo_activation()
    for name, how in (("trainer.patch", "remove"), ("everywhere", "undo"), ("peft", "undo")):
        module = sys.modules.get(f"hf_zero.integrations.{name}")
        if module is not None:
            getattr(module, how)()


def is_constructing() -> bool:
    """Whether an `Init` is active, so that parameters are cut as they are made, and whole to whoever touches them."""
    return any(cutter is not None and not seam.is_paused for seam, cutter in _pausable_now)


@contextmanager
def disabled() -> Iterator[None]:
    """While active, models are loaded and constructed whole, as without hf_zero, and stay whole."""
    with _paused(_left_whole):
        yield


@contextmanager
def _paused(left_whole: weakref.WeakSet[nn.Module] | None) -> Iterator[None]:
    entries = list(_pausable_now)
    before = [(seam.is_paused, seam.left_whole) for seam, _ in entries]
    with ExitStack() as stack:
        for seam, cutter in entries:
            seam.is_paused, seam.left_whole = True, left_whole
            if cutter is not None:
                stack.enter_context(cutter.paused())
        try:
            yield
        finally:
            for (seam, _), state in zip(entries, before, strict=True):
                seam.is_paused, seam.left_whole = state


@contextmanager
def _pausable(seam: LoadSeam, cutter: Cutter | None) -> Iterator[None]:
    entry = (seam, cutter)
    _pausable_now.append(entry)
    try:
        yield
    finally:
        _pausable_now.remove(entry)


def leave_whole(model: nn.Module) -> nn.Module:
    """Mark a model to stay whole, even if it is given to a Trainer with `ZeroTrainingArguments`; returns the model.

    Raises:
        UsageError: it is partitioned already.
    """
    if is_partitioned(model):
        raise UsageError(f"{type(model).__name__} is partitioned already; load it `with hf_zero.disabled():`")
    _left_whole.add(model)
    return model


def is_left_whole(model: nn.Module) -> bool:
    """Whether the model is to stay whole: marked by `leave_whole`, or loaded `with disabled()`."""
    return model in _left_whole


def is_partitioned(model: nn.Module) -> bool:
    """Whether the model, or a part of it, is run by hf_zero, or was partitioned while it was made."""
    return any(engine_of(module) is not None for module in model.modules()) or any(
        isinstance(param, DTensor) for param in model.parameters()
    )
