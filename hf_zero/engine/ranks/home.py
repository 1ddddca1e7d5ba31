"""The stream of a device on which an engine queues its own work, whichever streams the program uses.

[Note: one home] An engine has one stream, its *home*: there it gathers and releases, reduces, and adds to `.grad`. So the rest
of the engine may think that there is one stream. A call that comes on another stream is a *visit*. Home waits for the visitor
when the call begins, since the engine may read what the visitor has made, or release what it has read. The visitor waits for
home when the call ends, since it may read what has been gathered. Between two calls a program joins its streams itself, as
under DDP. A visit runs on home, so all memory that the engine takes is home's, and is given back behind all who have read it.
Memory that changes hands is recorded: on home a gradient that comes; a tensor that the program gets, on all streams that it has
come on, since it may let go of it on any of them.
Home is where the last forward of the model began. It moves between passes: a program that trains on a stream of its own has
no visits. A forward in which blocks run on side streams has one for each such block, and those streams run one after another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from hf_zero import torch_compat

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Home:
    """The stream of one engine; as a context, a visit: see [Note: one home]. It does nothing on the CPU.

    Args:
        device: the engine's.

    Attributes:
        settled: passes when the last step or edit has been done, or the model is sharded; None on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self._known = [] if self._stream is None else [self._stream]  # streams that calls have come on
        self._visitors: list[torch.Stream | None] = []  # of the calls under way; None: at home
        self.settled: torch.Event | None = None
        self.note_that_rows_settle()

    def is_here(self) -> bool:
        """Whether the current stream is home."""
        if self._stream is None or torch.accelerator.current_stream(self._stream.device_index) == self._stream:
            return True
        # A graph under capture may wait for nothing outside of it. Its program has joined all before.
        return self._stream.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def __enter__(self) -> Home:
        visitor = None
        if self._stream is not None and not self.is_here():
            visitor = self._come()
            self._stream.wait_stream(visitor)
            torch.accelerator.set_stream(self._stream)
        self._visitors.append(visitor)
        return self

    def __exit__(self, *_: object) -> None:
        visitor = self._visitors.pop()
        if visitor is not None and self._stream is not None:
            visitor.wait_stream(self._stream)
            torch.accelerator.set_stream(visitor)

    def _come(self) -> torch.Stream:
        here = torch.accelerator.current_stream(self._device)
        if here not in self._known:
            self._known.append(here)
        return here

    def visited(self, call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """The call itself, on home."""
        if self._stream is None:
            return call

        @functools.wraps(call)
        def visit(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if self.is_here():
                return call(*args, **kwargs)
            with self:
                return call(*args, **kwargs)

        return visit

    def take(self, tensors: Iterable[Tensor | None]) -> None:
        """Within a visit: home uses these tensors of the visitor's, for as long as the engine keeps them."""
        if self._visitors and self._visitors[-1] is not None and self._stream is not None:
            _record([each for each in tensors if each is not None], self._stream)

    def hand_out(self, tensors: Iterable[Tensor]) -> None:
        """The program gets these tensors, and may let go of them where any stream that it has come on still uses them."""
        if len(self._known) > 1:
            kept = list(tensors)
            for stream in self._known:
                _record(kept, stream)

    def move_here(self, settle: Callable[[], None], held: Callable[[], Iterable[torch.UntypedStorage]]) -> None:
        """The current stream becomes home. No pass is under way.

        Args:
            settle: waits for the exchanges that are under way, and would use home's memory still.
            held: gives the memory that the engine goes on using.
        """
        if self._stream is None or self.is_here():
            return
        with self:
            settle()
        here = self._come()
        _record([torch.empty(0, dtype=torch.uint8, device=self._device).set_(each) for each in held()], here)
        self._stream = here

    def note_that_rows_settle(self) -> None:
        """Other ranks read rows behind what is queued by now, on home and on the current stream."""
        if self._stream is not None:
            with self:
                self.settled = self._stream.record_event()


def _record(tensors: Iterable[Tensor], stream: torch.Stream) -> None:
    for tensor in map(torch_compat.local_of, tensors):
        if tensor.layout is torch.strided and tensor.device.type == stream.device.type:
            tensor.record_stream(stream)
