"""Buffers that stay the same on every rank, such as the statistics of a batch norm.

[Note: buffers] Each rank's forwards change its own buffers. DDP gives all ranks those of rank 0 at the forward that follows a
backward with an exchange; here they go at the end of that backward, where all ranks are anyway, so that a forward on one rank
alone waits for nobody. What the next forward finds is the same. Left out is what does not change in practice: buffers that are
not saved with the model (tables of positions), and large ones of integers (packed weights).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero.engine.ranks.world import World

_LARGE_BYTES = 2**20  # of integers


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

    def even_out(self) -> None:
        """Give every rank the first one's values: see [Note: buffers]. Called by all ranks together."""
        if not self._is_on or not (chosen := dict.fromkeys(self._chosen())):
            return
        found = sorted(chosen, key=lambda buffer: -buffer.itemsize)  # so that all are aligned when packed
        # Aliases: autograd takes no offence, and what it has saved of them changes only where a forward has changed it.
        flat = [buffer.data.reshape(-1).view(torch.uint8) for buffer in found]
        packed = torch.cat(flat)
        self._ranks.broadcast(packed, 0, "buffers")
        if self._ranks.rank:
            for buffer, values in zip(found, torch.split(packed, [len(each) for each in flat]), strict=True):
                buffer.data.copy_(values.view(buffer.dtype).view(buffer.shape))

    def _chosen(self) -> Iterator[Tensor]:
        for reference in self._modules:
            module = reference()
            if module is None or not module._buffers:
                continue
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set or isinstance(buffer, DTensor):
                    continue
                if buffer.numel() and (buffer.is_floating_point() or buffer.nbytes <= _LARGE_BYTES):
                    yield buffer
