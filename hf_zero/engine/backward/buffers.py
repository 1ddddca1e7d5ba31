"""Buffers that stay the same on every rank, such as the statistics of a batch norm.

[Note: buffers] Each rank's forwards change its own buffers. DDP gives all ranks those of rank 0 at the forward that follows a
backward with an exchange, as they are then: scripts may have moved them on since. So does a forward that records gradients. One
that records none may be of one rank alone, and waits for nobody: what rank 0 had travels at the end of the backward already,
where all ranks are anyway, and is put in when that forward begins, but for what somebody has written into since (averages over
the ranks). Until then each rank has its own. Left out is what does not change in practice: buffers that are not saved with the
model (tables of positions), and large ones of integers (packed weights).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero.engine.ranks.world import World

_LARGE_BYTES = 2**20  # of integers


@dataclass(frozen=True)
class _Place:
    """Where a buffer is held.

    Attributes:
        module: that holds it.
        name: of the attribute.
        nbytes: of the buffer.
    """

    module: weakref.ref[nn.Module]
    name: str
    nbytes: int

    def buffer(self) -> Tensor | None:
        """What is there now, if it is as large."""
        module = self.module()
        found = None if module is None else module._buffers.get(self.name)
        return None if found is None or found.nbytes != self.nbytes else found


@dataclass(frozen=True)
class _Came:
    """Values that have come, and are to be put in: bytes of all buffers, one after the other.

    Attributes:
        places: of the buffers.
        own: what this rank had there.
        firsts: what the first rank had.
    """

    places: list[_Place]
    own: Tensor
    firsts: Tensor

    def put_in(self) -> None:
        """See `Buffers.put_in`."""
        sizes = [place.nbytes for place in self.places]
        parts = zip(self.places, torch.split(self.own, sizes), torch.split(self.firsts, sizes), strict=True)
        for place, own, first in parts:
            buffer = place.buffer()
            if buffer is not None and buffer.device == own.device:  # it may have been moved
                # Compared on the device, for which this process does not wait; an alias: autograd takes no offence.
                found = _bytes_of(buffer)
                wanted = torch.where((found == own).all(), first, found)
                buffer.data.copy_(wanted.view(buffer.dtype).view(buffer.shape))


def _bytes_of(buffer: Tensor) -> Tensor:
    return buffer.data.reshape(-1).view(torch.uint8)


class Buffers:
    """The buffers of one model.

    Args:
        model: whose modules stay the same.
        world: the ranks.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._ranks = world.data
        self._is_on = world.config.broadcast_buffers and world.data.num_ranks > 1
        self._came: _Came | None = None
        self._is_due = False

    def exchange(self) -> None:
        """Get the first rank's values: see [Note: buffers]. Called by all ranks together."""
        if self._is_on:
            self._came = self._get()
            self._is_due = True

    def _get(self) -> _Came | None:
        if not (chosen := {id(buffer): (buffer, place) for buffer, place in self._chosen()}):
            return None
        found = sorted(chosen.values(), key=lambda pair: -pair[0].itemsize)  # so that all are aligned when packed
        own = torch.cat([_bytes_of(buffer) for buffer, _ in found])
        firsts = own.clone()
        self._ranks.broadcast(firsts, 0, "buffers")
        return _Came([place for _, place in found], own, firsts) if self._ranks.rank else None

    def begin_forward(self, records_gradients: bool) -> None:
        """Let buffers be rank 0's in a forward that follows a backward; all ranks call together one that records gradients."""
        if records_gradients and self._is_due:
            self._is_due, self._came = False, self._get()
        self.put_in()

    def put_in(self) -> None:
        """Let buffers have what has come, but for those that have been written into since."""
        came, self._came = self._came, None
        if came is not None:
            came.put_in()

    def _chosen(self) -> Iterator[tuple[Tensor, _Place]]:
        for reference in self._modules:
            module = reference()
            if module is None or not module._buffers:
                continue
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set or isinstance(buffer, DTensor):
                    continue
                if buffer.numel() and (buffer.is_floating_point() or buffer.nbytes <= _LARGE_BYTES):
                    yield buffer, _Place(reference, name, buffer.nbytes)
