"""Cuts the parameters of a model that is whole on every rank, and starts its engine."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.comm.groups import default_device, default_group
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.engine import ZeroEngine, engine_of, live_engines
from hf_zero.engine.modules.float32 import find_modules
from hf_zero.engine.modules.hooks import Hook
from hf_zero.engine.modules.state_dict import CutStateDict
from hf_zero.engine.parameters.computed import read_numbers_whole
from hf_zero.engine.parameters.on_disk import check_offload
from hf_zero.engine.parameters.quantised import remember_class
from hf_zero.engine.parameters.records import cut, put, wrap
from hf_zero.engine.parameters.tensor_axis import is_over_tensor_axis
from hf_zero.engine.ranks.world import World, world_of
from hf_zero.engine.units.grouping import FoundParameter, find_parameters, find_quantised, named_blocks
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.optim.optimizers import hear_of_steps
from hf_zero.sharding import model_methods
from hf_zero.sharding.checks import (
    agree_on_model,
    check_model,
    check_quantised,
    refuse_other_ranks,
    refuse_parameters_in_lists,
    refuse_sparse_gradients,
)
from hf_zero.sharding.tensor_parallel import distribute, remember_tensor_axis, share_resized


def shard_model(
    model: nn.Module,
    config: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh: DeviceMesh | None = None,
) -> ZeroEngine:
    """Partition a model over the data-parallel ranks, in place, and run it under ZeRO from now on.

    All ranks call this together, before the optimizer is made. Parameters become `DTensor`s of their own shape, and each
    rank holds its own rows (`Shard(0)`, or another dim where that divides better). Values are those of rank 0, as under DDP.
    In stage 0 and at world size 1, the parameters stay plain tensors, in the master dtype. A model made under `Init` is
    already partitioned; whatever has been added to it since (adapters, a new head) is partitioned now. The model gets
    `no_sync` and, if it has such methods, a `save_pretrained` that writes whole weights and a `generate` that keeps the
    ranks in step.

    Args:
        model: any module, on one device, not wrapped. A model on the CPU is moved to this process's accelerator, if there is
            one and the process group is not gloo's alone.
        config: a `ZeroConfig`, a mapping, a path, or None for the file that HF_ZERO_CONFIG names (a model made under
            `Init` needs none).
        mesh: the ranks: one axis, over which parameters are cut, or two, of which the first is for replicas (as
            `torch.distributed.fsdp.fully_shard` takes them). None: all ranks, in `config.replicate` replicas.

    Returns:
        The engine; `engine_of(model)` finds it again.

    Raises:
        ConfigError: the configuration has a mistake, or does not fit the model or the number of ranks.
        PartitionError: the model cannot be partitioned.

    Source: ZeRO (arXiv:1910.02054).
    """
    engine = engine_of(model)
    if engine is not None and all(engine.find(found.param) is not None for found in find_parameters(model)):
        if config is not None and ZeroConfig.load(config) != engine.world.config:
            raise ConfigError(
                f"{type(model).__name__} runs under another configuration already: call shard_model with that one, or with "
                "none; or `engine_of(model).close()` and partition a new model"
            )
        model_methods.attach(model, engine.world)
        return engine
    check_model(model)
    old_engines = engines_inside(model)
    world = old_engines[0].world if old_engines else _world_at_rest(model)
    if world is None or (config is not None and not old_engines and world.config != ZeroConfig.load(config)):
        world = World.create(ZeroConfig.load(config), _device_of(model), mesh)
    refuse_other_ranks(model, world)
    for inner in old_engines:
        inner.close()
    engine = start_engine(model, world)
    model_methods.attach(model, engine.world)
    return engine


@torch.inference_mode(False)
@torch.no_grad()
def start_engine(model: nn.Module, world: World, known_buffers: Collection[int] = ()) -> ZeroEngine:
    """Partition what is not partitioned yet, and make the engine; called by all ranks together.

    Inference mode is off here: a first forward may run in it, and parameters made in it could never be trained.
    """
    named_blocks(model, world.config.units)  # these two raise before anything is changed
    find_modules(model, world.config)
    check_offload(world)
    hear_of_steps()
    torch_compat.agree_on_every_overflow()
    read_numbers_whole()
    if world.num_ranks > 1:
        refuse_sparse_gradients(model)
        refuse_parameters_in_lists(model)
    move_to(model, world.device)
    agree_on_model(model, world)
    check_quantised(model, world)
    replaced = partition_whole(model, world) + raise_to_master(model, world)
    broadcast_buffers(model, world, known_buffers)
    made_in = {name: getattr(param, "_zero_made_in", param.dtype) for name, param in model.named_parameters()}
    engine = ZeroEngine(model, world, copied_as=LateEngine(world, made_in))
    for old, name in replaced:
        engine.remember_replaced(old, name)
    return engine


class LateEngine:
    """Forward pre-hook of a partitioned model without an engine; makes one at the first forward.

    Until then, adapters, a resized embedding or a new head can still be added to a loaded model.
    """

    def __init__(self, world: World, made_in: Mapping[str, torch.dtype] | None = None, load_handle: Any = None) -> None:
        self.world = world
        self._load_handle = load_handle
        self._made_in = made_in or {}  # a deep copy of a plain parameter forgets its attributes
        self._is_done = False
        self.known_buffers: Collection[int] = ()  # that the ranks have had from rank 0 before, by id
        self.inside: list[Any] = []  # handles of the hooks of the model's parts

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Make the engine, and let it see this call, since its own hooks come too late for it."""
        engine = self.start(module)
        return None if engine is None else engine.enter_root_late(module, args, kwargs)

    def start(self, module: nn.Module) -> ZeroEngine | None:
        """Make the engine of a model, if none of its parameters has one."""
        if self._is_done or engine_of(module) is not None:
            return None
        if self.world.partitions and not any(isinstance(param, DTensor) for param in module.parameters()):
            return None  # inside `GatheredParameters`: the next forward outside makes the engine
        self._is_done = True
        for handle in self.inside:
            handle.remove()
        params = [found.param for found in find_parameters(module)]
        if not params or any(all(engine.find(p) is not None for p in params) for engine in live_engines()):
            return None  # a part of a model that has an engine
        for inner in engines_inside(module):
            inner.close()
        if self._load_handle is not None:
            self._load_handle.remove()  # the engine has its own
        for name, param in module.named_parameters():
            if name in self._made_in:
                param._zero_made_in = self._made_in[name]  # type: ignore[attr-defined]
        return start_engine(module, self.world, self.known_buffers)

    def __deepcopy__(self, memo: dict[int, Any]) -> LateEngine:
        return LateEngine(self.world, self._made_in)


class _LateInside:
    """Forward pre-hook of a part of such a model, which some code calls by itself, or calls the model's `forward`."""

    def __init__(self, model: nn.Module, late: LateEngine) -> None:
        self._model = weakref.ref(model)
        self._late = late

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Make the engine, and let its hooks of this part see this call."""
        model, known = self._model(), set(module._forward_pre_hooks)
        if model is None or self._late.start(model) is None:
            return None
        for key, hook in list(module._forward_pre_hooks.items()):
            if key not in known:
                args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        return args, kwargs


def _is_late(model: nn.Module) -> bool:
    hooks = model._forward_pre_hooks.values()
    return any(
        isinstance(hook, LateEngine) or isinstance(getattr(hook, "copied_as", None), LateEngine) for hook in hooks
    )


def attach_late(model: nn.Module, world: World) -> None:
    """Make a model that was partitioned while it was made get its engine at its first forward."""
    world.models.add(model)
    for param in model.parameters():
        param._zero_world = world  # type: ignore[attr-defined]
    handle = model.register_load_state_dict_pre_hook(CutStateDict(world))  # type: ignore[no-untyped-call]
    late = LateEngine(world, load_handle=handle)
    hook = Hook(late, copied_as=LateEngine(world))
    model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    parts = [part for part in model.modules() if part is not model and next(part.parameters(), None) is not None]
    if world.partitions:
        inside = Hook(_LateInside(model, late))
        late.inside += [part.register_forward_pre_hook(inside, with_kwargs=True, prepend=True) for part in parts]


def engines_inside(model: nn.Module) -> list[ZeroEngine]:
    """The engines of a model and of its parts."""
    return [engine for engine in map(engine_of, model.modules()) if engine is not None]


def run_instead(model: nn.Module) -> None:
    """Let `model` be what has an engine, from its next forward on, instead of a model inside it or around it.

    Otherwise what it adds (the encoder of a prompt) would be in no engine, and nobody would reduce its gradients; and what is
    left of a model would lack the methods of a partitioned one. A model without a partitioned part stays as it is.
    """
    params = list(model.parameters())
    engines = [engine for engine in live_engines() if any(engine.find(p) is not None for p in params)]
    world = engines[0].world if engines else _world_at_rest(model)
    if world is None:
        return
    for engine in engines:
        engine.close()
    attach_late(model, world)
    model_methods.attach(model, world)


def mark_dirty(model: nn.Module) -> None:
    """Declare that all ranks have changed parameters by hand, with the same result: whole copies are gathered again.

    Needed in stages 1 and 2 after edits between steps, outside `GatheredParameters` and `load_state_dict`.

    Raises:
        PartitionError: the model has no engine.
    """
    engine = engine_of(model)
    if engine is not None:
        engine.mark_dirty()
    elif not _is_late(model):  # with an engine to come, nothing has been gathered yet
        raise PartitionError(f"mark_dirty: {type(model).__name__} is not partitioned; call shard_model on it first")


def partition_parameters(model: nn.Module, world: World) -> list[tuple[nn.Parameter, str]]:
    """Give every plain parameter rank 0's values, and cut it; partitioned ones stay as they are.

    Returns:
        The parameters that were replaced, with their names.
    """
    replaced = []
    if world.partitions and world.config.policy.shards_parameters:
        for found in find_quantised(model):
            _partition_quantised(found, world)
    for found in find_parameters(model):
        if isinstance(found.param, DTensor):
            if not is_over_tensor_axis(found.param, world):
                continue
            world.data.broadcast(torch_compat.local_of(found.param), 0, found.names[0])
        else:
            world.broadcast(found.param.data, found.names[0])
        old = found.param
        partition_one(found, world)
        if found.param is not old:
            replaced.append((old, found.names[0]))
    return replaced


def partition_whole(model: nn.Module, world: World) -> list[tuple[nn.Parameter, str]]:
    """Share a model's layers over the tensor axis, if there is one, and cut what is not cut yet: see `partition_parameters`."""
    replaced = distribute(model, world)
    share_resized(model, world)
    remember_tensor_axis(model, world)
    return replaced + partition_parameters(model, world)


def _partition_quantised(found: FoundParameter, world: World) -> None:
    """Cut packed bytes to this rank's rows, see [Note: quantised weights]; the ranks have agreed that theirs are equal."""
    old = found.param
    plain = nn.Parameter(old.detach().as_subclass(torch.Tensor), requires_grad=False)
    vars(plain).update(vars(old))
    found.param = plain
    partition_one(found, world)
    remember_class(found.param, old, found.locations)


def partition_one(found: FoundParameter, world: World) -> None:
    """Cut one whole parameter to this rank's rows, in all its places, in the dtype at rest."""
    param = found.param
    dtype = world.precision.master_for(param.dtype, param.requires_grad)
    if not world.partitions:
        if param.dtype != dtype:
            param._zero_made_in = param.dtype  # type: ignore[attr-defined]
            param.data = param.data.to(dtype)
        return
    new = cut(param, world, dtype)
    new._zero_world = world  # type: ignore[attr-defined]
    new._zero_made_in = param.dtype  # type: ignore[attr-defined]
    put(found.locations, new)
    found.param = new


def raise_to_master(model: nn.Module, world: World) -> list[tuple[nn.Parameter, str]]:
    """Cast trainable parameters that are already partitioned to the dtype that the optimizer updates, one at a time.

    Returns:
        The parameters that were replaced, with their names.
    """
    replaced: list[tuple[nn.Parameter, str]] = []
    for found in find_parameters(model):
        param = found.param
        dtype = world.precision.master_for(param.dtype, param.requires_grad)
        if not isinstance(param, DTensor) or param.dtype == dtype or not world.partitions:
            continue
        new = wrap(torch_compat.local_of(param).to(dtype), world, param)
        new._zero_world = world  # type: ignore[attr-defined]
        new._zero_made_in = param.dtype  # type: ignore[attr-defined]
        put(found.locations, new)
        replaced.append((param, found.names[0]))
    return replaced


def broadcast_buffers(model: nn.Module, world: World, known: Collection[int]) -> None:
    """Give every rank the buffers of rank 0; `engine.buffers` does it for what changes in training."""
    for name, buffer in model.named_buffers():
        if id(buffer) not in known:
            world.broadcast(buffer, name)


def _world_at_rest(model: nn.Module) -> World | None:
    """The ranks over which a model without an engine was partitioned when it was made."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            for late in (hook, getattr(hook, "copied_as", None)):
                if isinstance(late, LateEngine):
                    return late.world
    for param in model.parameters():
        if isinstance(param, DTensor):
            return world_of(param)
    return None


def move_to(model: nn.Module, device: torch.device) -> None:
    """Put the parameters and buffers that are not partitioned yet on a device, in their places; those that are tied stay so."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device != device and not tensor.is_meta and not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)


def _device_of(model: nn.Module) -> torch.device:
    """Where the ranks will have a model: a CPU's on their accelerators, unless the group is for CPUs; others where they are."""
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    group = default_group()
    if group is None or (device.type != "cpu" and torch_compat.exchanges_on(group, device)):
        return device
    return default_device()
