"""Copies between a device and the host's memory in a stream of their own, beside what is computed.

[Note: copies beside the computation] The stream waits for what is queued on the compute stream when a copy begins, which has
computed what is copied, or may still use the memory that is copied to. All copies are in one order, down and up: so a room in
the host's memory is read before it is written again, whoever has let go of it. The device's side of a copy is kept until
the next one begins: then the compute stream waits for it, and has the memory back. So one is on its way while a layer computes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_zero.comm.exchange import Exchange
from hf_zero.engine.units.storage.from_host import Upload
from hf_zero.errors import UsageError


class CopyStream:
    """The copies of one model's activations.

    Args:
        device: theirs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._under_way: tuple[torch.Event, Tensor, torch.Stream] | None = None
        self._version: int | None = None  # of what goes down

    def down(self, source: Tensor, room: Tensor) -> None:
        """Copy a tensor of the device into a room, which is read by `up` alone."""
        with self._copying(source):
            room.copy_(source, non_blocking=True)
        self._version = source._version

    @contextlib.contextmanager
    def up(self, room: Tensor, target: Tensor) -> Iterator[Upload]:
        """Copy a room into memory of the device; what is begun within comes behind the copy. Gives what is to be waited for."""
        with self._copying(target) as event:
            target.copy_(room, non_blocking=True)
            yield Upload(event)

    @contextlib.contextmanager
    def _copying(self, kept: Tensor) -> Iterator[torch.Event]:
        self.settle()
        event, stream = torch.Event(self._device), _stream(self._device)
        compute = torch.accelerator.current_stream(self._device)
        stream.wait_stream(compute)
        with stream, torch.no_grad():
            yield event
            event.record(stream)
        self._under_way = event, kept, compute

    def settle(self) -> None:
        """Let the compute stream wait for what is under way.

        Raises:
            UsageError: what went down was written to meanwhile. Torch's own checkpoints raise there, too.
        """
        if self._under_way is None:
            return
        (event, kept, compute), self._under_way = self._under_way, None
        compute.wait_event(event)  # which has its memory back then
        torch.accelerator.current_stream(self._device).wait_event(event)
        version, self._version = self._version, None
        if version not in (None, kept._version):
            raise UsageError(
                "activations.offload: an input of a checkpointed layer was changed in place after the layer, while it was "
                "copied to the host: change a copy of it, or leave activations.offload out"
            )


class Arrival:
    """An input on its way back: a copy, and the exchange behind it, if there is one."""

    def __init__(self, upload: Upload, exchange: Exchange | None) -> None:
        self._upload, self._exchange = upload, exchange

    def wait(self) -> None:
        """Let the current stream wait."""
        self._upload.wait()
        if self._exchange is not None:
            self._exchange.wait()


@functools.cache
def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
