"""Cutting the parameters of a model that is whole: one at a time, in all their places, with rank 0's values.

[Note: never whole on a device] A model that was made in the host's memory may be larger than a device. So of what is cut, one
parameter at a time is copied to the device, gets rank 0's values there, and leaves its rows; the model stays where it is.

[Note: mapped files] What transformers loads on a CPU stays in the file, mapped: the ranks of a host share its pages, and a
whole model costs none of them memory of its own. A write would copy a page, which stays as long as any parameter of the file.
So what comes from rank 0 is received elsewhere, and loading a model whole and cutting it takes the rows and one parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.engine.parameters.quantised import remember_class
from hf_zero.engine.parameters.records import cut, put, wrap
from hf_zero.engine.parameters.replaced import replace
from hf_zero.engine.parameters.tensor_axis import is_over_tensor_axis
from hf_zero.engine.ranks.world import STAYS_ON_DEVICE, World
from hf_zero.engine.units.grouping import FoundParameter, find_parameters, find_quantised
from hf_zero.sharding.axes.experts import share_experts
from hf_zero.sharding.axes.tensor_parallel import distribute, remember_tensor_axis, share_resized
from hf_zero.sharding.whole_window import is_mapped

KnownBuffers = Mapping[int, weakref.ref[Tensor]]  # by id


def partition_whole(model: nn.Module, world: World) -> None:
    """Share a model's layers over the tensor axis, if there is one, and cut what is not cut yet: see `partition_parameters`."""
    distribute(model, world)
    share_experts(model, world)
    share_resized(model, world)
    remember_tensor_axis(model, world)
    partition_parameters(model, world)


def partition_parameters(model: nn.Module, world: World) -> None:
    """Give every plain parameter rank 0's values, and cut it; partitioned ones stay as they are."""
    if world.partitions and world.config.policy.shards_parameters:
        for found in find_quantised(model):
            _partition_quantised(found, world)
    for found in find_parameters(model):
        param = found.param
        if not isinstance(param, DTensor):
            _partition_plain(found, world)
        elif is_over_tensor_axis(param, world):
            world.data.broadcast(torch_compat.local_of(param), 0, found.names[0])
            partition_one(found, world)


def _partition_plain(found: FoundParameter, world: World) -> None:
    """See [Note: never whole on a device]."""
    if not world.partitions:
        put_on(found.param, world.home_of(found.param))
    data = found.param.data
    if world.partitions and world.everyone.rank and is_mapped(data):
        whole = torch.empty_like(data, device=world.device)  # see [Note: mapped files]
    else:
        whole = data.to(world.device) if world.partitions else data
    world.broadcast(whole, found.names[0])
    partition_one(found, world, whole)


def _partition_quantised(found: FoundParameter, world: World) -> None:
    """Cut packed bytes to this rank's rows, see [Note: quantised weights]; the ranks have agreed that theirs are equal."""
    old = found.param
    plain = nn.Parameter(old.detach().as_subclass(torch.Tensor), requires_grad=False)
    vars(plain).update(vars(old))
    found.param = plain
    partition_one(found, world)
    remember_class(found.param, old, found.locations)


def partition_one(found: FoundParameter, world: World, values: Tensor | None = None) -> None:
    """Cut one whole parameter to this rank's rows, in all its places, in the dtype at rest.

    The whole one is the model's no longer, see [Note: what the model no longer uses].

    Args:
        found: the parameter.
        world: the ranks.
        values: of all of it, where they are not its own.
    """
    param = found.param
    dtype = world.precision.master_for(param.dtype, param.requires_grad)
    if not world.partitions:
        if param.dtype != dtype:
            param._zero_made_in = param.dtype  # type: ignore[attr-defined]
            param.data = param.data.to(dtype)
        return
    new = cut(param, world, dtype, values)
    new._zero_made_in = param.dtype  # type: ignore[attr-defined]
    put(found.locations, new)
    found.param = new
    replace(param, new)


def raise_to_master(model: nn.Module, world: World) -> None:
    """Cast trainable parameters that are already partitioned to the dtype that the optimizer updates, one at a time."""
    for found in find_parameters(model):
        param = found.param
        dtype = world.precision.master_for(param.dtype, param.requires_grad)
        if not isinstance(param, DTensor) or param.dtype == dtype or not world.partitions:
            continue
        new = wrap(torch_compat.local_of(param).to(dtype), world, param)
        new._zero_made_in = param.dtype  # type: ignore[attr-defined]
        put(found.locations, new)
        replace(param, new)


def take_home(model: nn.Module, world: World) -> None:
    """Let the rows of every parameter lie where they are to rest, and buffers on the device."""
    _choose_what_stays(model, world)
    for found in find_parameters(model):
        param = found.param
        if not isinstance(param, DTensor):
            if not param.is_meta:
                put_on(param, world.home_of(param))
        elif param.device != world.home_of(param) and world.partitions:
            new = wrap(torch_compat.local_of(param), world, param)
            put(found.locations, new)
            replace(param, new)
    for buffer in model.buffers():
        if not buffer.is_meta and not isinstance(buffer, DTensor):
            put_on(buffer, world.device)


def _choose_what_stays(model: nn.Module, world: World) -> None:
    """What `offload.ratio` leaves on the device: the first parameters, whose gradients come last, and whose way down shows."""
    offload = world.config.offload
    trained = [found.param for found in find_parameters(model) if found.param.requires_grad]
    left = offload.ratio * sum(param.numel() for param in trained)
    for param in reversed(trained):
        stays = offload.optimizer == "host" != offload.parameters and left <= 0
        left -= param.numel()
        if stays != bool(vars(param).get(STAYS_ON_DEVICE)):
            vars(param)[STAYS_ON_DEVICE] = stays


def broadcast_buffers(model: nn.Module, world: World, known: KnownBuffers) -> None:
    """Give every rank the buffers of rank 0, but for `known` ones; `engine.buffers` does it for what changes in training."""
    for name, buffer in model.named_buffers():
        reference = known.get(id(buffer))  # perhaps to one that is gone, whose number this one has on some ranks
        if reference is None or reference() is not buffer:
            world.broadcast(buffer, name)


def put_on(tensor: Tensor, device: torch.device) -> None:
    """Let a parameter or buffer live on a device."""
    if tensor.device != device:
        tensor.data = tensor.data.to(device)
