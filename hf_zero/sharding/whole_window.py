"""Parameters that are whole for a moment while a model is constructed, a few at a time."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.comm.groups.process_groups import TENSOR_AXIS
from hf_zero.engine.gathered_parameters import gather_whole
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor
from hf_zero.engine.parameters.records import cut, wrap
from hf_zero.engine.ranks.world import World

WINDOW_BYTES = 16 * 2**20
"""Bytes of parameters that may be whole at a time while a model is constructed, besides the one in use."""


def to_shard(whole: nn.Parameter, world: World) -> DTensor:
    """A parameter of the shape of `whole` that holds a copy of this rank's rows; on meta it holds nothing."""
    return cast(DTensor, cut(whole, world, whole.dtype))


def is_shard(value: object) -> TypeGuard[DTensor]:
    """Whether this is a parameter that has been cut by rows."""
    is_distributed = isinstance(value, DTensor) and isinstance(value, nn.Parameter)
    return is_distributed and not is_on_tensor_axis(value)


def is_on_tensor_axis(value: object) -> bool:
    """Whether this is a parameter that transformers' tensor parallelism has made, and nobody has cut by rows."""
    return isinstance(value, DTensor) and value.device_mesh.mesh_dim_names == (TENSOR_AXIS,)


def is_plain(value: object) -> TypeGuard[nn.Parameter]:
    """Whether this is a parameter that can be cut: not lazy, not cut yet, not a (quantised) tensor subclass."""
    return type(value) is nn.Parameter or (is_on_tensor_axis(value) and isinstance(value, nn.Parameter))


def is_mapped(local: Tensor) -> bool:
    """Whether the storage is not the tensor's own: the tensor is a slice of a mapped file or of a larger tensor."""
    storage = local.untyped_storage()
    return not storage.resizable() or storage.nbytes() != local.nbytes


def own(param: DTensor, world: World) -> DTensor | None:
    """`param` as a parameter of hf_zero, with its rows in memory of their own; None if it is that."""
    local = torch_compat.local_of(param)
    if is_mapped(local):
        local = local.clone()
    elif isinstance(param, PartitionedTensor) and local.is_contiguous():
        return None
    return cast(DTensor, wrap(local, world, cast(nn.Parameter, param)))


@dataclasses.dataclass
class _Whole:
    """A shard with its whole tensor."""

    param: DTensor
    data: Tensor
    world: World

    def write_back(self) -> None:
        """Bring the shard up to date with the whole tensor."""
        with torch.no_grad():
            local = torch_compat.local_of(self.param)
            local.copy_(self.world.cut_of(self.param).of(self.data))

    def is_held_elsewhere(self) -> bool:
        """Whether a view of the whole tensor is still alive, so that there may still be writes through it."""
        storage = self.data.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) > 2  # ours, and `storage` here


class WholeWindow:
    """The few parameters that are whole at the moment. The least recently touched leaves first; its rows are written back.

    What is in the window depends only on the sequence of touches, so ranks that run the same code gather together. If a
    view of a tensor is still alive when the tensor leaves, its memory is kept (`_lapsed`) until the view is gone. That
    changes memory on one rank, never the collectives.
    """

    def __init__(self, world: World, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._world = world
        self.home = torch.device("cpu")  # where unsharded code would hold, and draw, what we did not see being made
        self._homes: dict[int, torch.device] = {}
        self.num_gathers = 0
        self.peak_bytes = 0
        self._bytes = 0
        self._open: OrderedDict[int, _Whole] = OrderedDict()
        self._lapsed: dict[int, _Whole] = {}

    def admit(self, param: DTensor, whole: Tensor) -> None:
        """Keep `whole`, from which `param` has just been cut, for the code that goes on to initialise it."""
        self._homes[id(param)] = whole.device
        self._insert(_Whole(param, whole, self._world))

    def open(self, param: DTensor, overwrites: bool) -> Tensor:
        """`param`, whole. Its values are gathered unless the caller overwrites all of them."""
        if (entry := self._open.get(id(param))) is not None:
            self._open.move_to_end(id(param))
            return entry.data
        lapsed = self._lapsed.pop(id(param), None)
        if lapsed is not None:
            lapsed.write_back()
        home = self._homes.get(id(param), self.home)
        with torch.no_grad():
            if overwrites:
                data = torch.empty(param.shape, dtype=param.dtype, device=home)
            else:
                self.num_gathers += 1
                data = gather_whole(param, self._world).to(home)
            if lapsed is not None:
                data = lapsed.data.copy_(data) if not overwrites else lapsed.data  # live views must see the changes
        self._insert(_Whole(param, data, self._world))
        return data

    def settle(self, param: DTensor, forget: bool = False) -> None:
        """Bring the shard up to date before it is read directly, or before what it holds is replaced (`forget`)."""
        for entries in (self._open, self._lapsed):
            if (entry := entries.get(id(param))) is not None:
                entry.write_back()
        if forget:
            self._lapsed.pop(id(param), None)
            if (entry := self._open.pop(id(param), None)) is not None:
                self._bytes -= entry.data.nbytes

    def wholes(self) -> dict[int, Tensor]:
        """What is whole, or somebody still holds the memory of, by the shard's id."""
        return {id(entry.param): entry.data for entry in (*self._lapsed.values(), *self._open.values())}

    def close(self) -> None:
        """Bring all shards up to date, and release everything that is whole."""
        for entry in (*self._lapsed.values(), *self._open.values()):
            entry.write_back()
        self._open.clear()
        self._lapsed.clear()
        self._homes.clear()
        self._bytes = 0

    def _insert(self, entry: _Whole) -> None:
        self._open[id(entry.param)] = entry
        self._bytes += entry.data.nbytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        while self._bytes > self.budget_bytes and len(self._open) > 1:
            self._evict()

    def _evict(self) -> None:
        key, entry = self._open.popitem(last=False)
        self._bytes -= entry.data.nbytes
        entry.write_back()
        self._lapsed[key] = entry
        for key in [k for k, e in self._lapsed.items() if not e.is_held_elsewhere()]:
            self._lapsed.pop(key).write_back()
