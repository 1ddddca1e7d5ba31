"""Torch's wrappers for data parallelism around a partitioned model: refused by name, where they are made.

They would average rows of different ranks, or fail in torch's own words. These are wrapped:

- `DistributedDataParallel.__init__`.
- `FullyShardedDataParallel.__init__`, and `FSDPState.init`, which `fully_shard` and the newer `replicate` call first.
- `_localize_dtensor` of torch's tensor parallelism, with which the composable `replicate` begins: it would take a rank's rows
  for the whole parameter.

Nothing changes for a model without a partitioned part. `hf_zero.undo()` puts the originals back.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_zero.changes import Changes
from hf_zero.engine.backward.plain import PlainBackward
from hf_zero.engine.engine import engine_of
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor
from hf_zero.errors import PartitionError

_changes = Changes()


def install() -> None:
    """Wrap the functions; a second call changes nothing."""
    if not _changes:
        _changes.keep()
        _changes.wrap(DistributedDataParallel, "__init__", _wrap)
        _changes.once_imported("torch.distributed.fsdp", lambda _: _wrap_fsdp())
        composable = importlib.import_module("torch.distributed.tensor.parallel.ddp")
        _changes.wrap(composable, "_localize_dtensor", _replicate)


def _wrap_fsdp() -> None:
    fsdp, states = map(
        importlib.import_module, ("torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard._fsdp_state")
    )
    _changes.wrap(fsdp.FullyShardedDataParallel, "__init__", _wrap)
    _changes.wrap(states.FSDPState, "init", _shard_fully)


def _wrap(original: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    _refuse_partitioned(module, type(self).__name__)
    original(self, module, *args, **kwargs)


def _shard_fully(original: Any, self: Any, modules: Any, *args: Any, **kwargs: Any) -> None:
    for module in modules:
        _refuse_partitioned(module, "fully_shard" if type(self).__name__ == "FSDPState" else "replicate")
    original(self, modules, *args, **kwargs)


def _replicate(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    _refuse_partitioned(module, "replicate")
    original(module, *args, **kwargs)


def _refuse_partitioned(module: nn.Module, wrapper: str) -> None:
    """Raise if hf_zero runs a part of a model, or has partitioned one while it was made; other libraries' DTensors may stay."""
    for name, part in module.named_modules():
        engine, held = engine_of(part), part._parameters.values()
        # Alone, in the dtype of the parameters, gradients are autograd's, which the wrapper may have.
        is_run = engine is not None and (engine.world.num_ranks > 1 or not isinstance(engine.backward, PlainBackward))
        if is_run or any(isinstance(param, PartitionedTensor) for param in held):
            advice = (
                "leave the wrapper out" if part is module else "call `hf_zero.shard_model` on the whole model instead"
            )
            raise PartitionError(
                f"{wrapper} around {type(module).__name__}, of which {type(part).__name__} {name!r} is partitioned by hf_zero, "
                f"which reduces its gradients itself: {advice}"
            )
