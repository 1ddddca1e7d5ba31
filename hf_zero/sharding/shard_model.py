"""`shard_model`: partitions a model that is whole on every rank, and starts its engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_zero.comm.groups import torch_groups
from hf_zero.comm.groups.process_groups import default_device, default_group
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.engine.parameters.records import at_rest
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.grouping import find_parameters, ignore
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.parameters import parameters_of
from hf_zero.sharding import model_methods
from hf_zero.sharding.checks import (
    check_model,
    refuse_other_ranks,
)
from hf_zero.sharding.late import engines_inside, is_late, start_engine, world_at_rest
from hf_zero.sharding.other_libraries.install import install


def shard_model(
    model: nn.Module,
    config: ZeroConfig | Mapping[str, Any] | str | int | os.PathLike[str] | None = None,
    mesh: DeviceMesh | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
) -> ZeroEngine:
    """Partition a model over the data-parallel ranks, in place, and run it under ZeRO from now on.

    All ranks call this together. Optimizers that have been made already hold the partitioned parameters afterwards.
    Parameters become `DTensor`s of their own shape, and each rank holds its own rows (`Shard(0)`, or another dim where that
    divides better). Values are those of rank 0, as under DDP. In stage 0 and at world size 1, the parameters stay plain
    tensors, in the master dtype. A model made under `Init` is already partitioned; whatever has been added to it since
    (adapters, a new head) is partitioned now. The model gets `no_sync` and, if it has such methods, a `save_pretrained` that
    writes whole weights and a `generate` that keeps the ranks in step.

    Args:
        model: any module, on one device, not wrapped. A model on the CPU is moved to this process's accelerator, if there is
            one and the process group is not gloo's alone.
        config: a `ZeroConfig`, a stage, a mapping, a path, or None for what HF_ZERO_CONFIG says (a model made under
            `Init` needs none).
        mesh: the ranks: one axis, over which parameters are cut, or two, of which the first is for replicas (as
            `torch.distributed.fsdp.fully_shard` takes them). None: all ranks, in `config.replicate` replicas.
        ignored_params: left as they are, whole on every rank, where they are, as `fully_shard` leaves them: their values are
            not made alike, and their gradients are this rank's own. So are those that the model tells `DistributedDataParallel`
            to ignore.

    Returns:
        The engine; `engine_of(model)` finds it again.

    Raises:
        ConfigError: the configuration has a mistake, or does not fit the model or the number of ranks.
        PartitionError: the model cannot be partitioned, or an ignored parameter is partitioned already.

    Source: ZeRO (arXiv:1910.02054).
    """
    if not isinstance(model, nn.Module):
        raise PartitionError(f"shard_model takes a model, a torch.nn.Module, and not {type(model).__name__}")
    install()
    ignore(model, _to_be_ignored(model, ignored_params))
    engine = engine_of(model)
    if engine is not None and all(engine.find(at_rest(found.param)) is not None for found in find_parameters(model)):
        if config is not None and ZeroConfig.load(config) != engine.world.config:
            raise ConfigError(
                f"{type(model).__name__} runs under another configuration already: call shard_model with that one, or with "
                "none; or `engine_of(model).close()` and partition a new model"
            )
        model_methods.attach(model, engine.world)
        return engine
    check_model(model)
    old_engines = engines_inside(model)
    world = old_engines[0].world if old_engines else world_at_rest(model)
    if world is None or (config is not None and not old_engines and world.config != ZeroConfig.load(config)):
        world = World.create(ZeroConfig.load(config), _device_of(model), mesh)
    refuse_other_ranks(model, world)
    for inner in old_engines:
        inner.close()
    engine = start_engine(model, world)
    model_methods.attach(model, engine.world)
    return engine


def mark_dirty(model: nn.Module) -> None:
    """Declare that all ranks have changed parameters by hand, with the same result: whole copies are gathered again.

    Needed in stages 1 and 2 after edits between steps, outside `GatheredParameters` and `load_state_dict`.

    Raises:
        PartitionError: the model has no engine.
    """
    engine = engine_of(model)
    if engine is not None:
        engine.mark_dirty()
    elif not is_late(model):  # with an engine to come, nothing has been gathered yet
        raise PartitionError(f"mark_dirty: {type(model).__name__} is not partitioned; call shard_model on it first")


def _to_be_ignored(model: nn.Module, given: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    names = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    told = [param for name, param in model.named_parameters(remove_duplicate=False) if name in names] if names else []
    params = [*given, *told]
    if not all(isinstance(param, nn.Parameter) for param in params):
        raise ConfigError("ignored_params takes parameters of the model themselves, not their names or modules")
    if any(isinstance(param, DTensor) for param in params):
        raise PartitionError(
            "ignored_params names a parameter that is partitioned already (the model was made under `Init`, or shard_model was "
            "called before): it cannot be left whole any more; make the model outside, and then call shard_model"
        )
    return params


def _device_of(model: nn.Module) -> torch.device:
    """Where the ranks will have a model: a CPU's on their accelerators, unless the group is for CPUs; others where they are."""
    device = next((param.device for param in parameters_of(model)), torch.device("cpu"))
    group = default_group()
    if group is None or (device.type != "cpu" and torch_groups.exchanges_on(group, device)):
        return device
    return default_device()
