"""Gradients of parameters that rest in host memory come down from the device: see [Note: rows on the host].

[Note: on the way down] A unit's reduced rows are copied in a stream of their own, which waits for what has computed them. The
device keeps them until they are down: when the next unit's rows come, the compute stream waits for those of the unit before, so
that one unit's are on their way beside the computation of the next. What comes first of a parameter comes down where it stays;
what is added to a gradient that is there comes into a few rooms, side by side, from which it is added: at the end, or once the
rooms are full, so that the host does not wait for each of them. Nobody sees a gradient before
the backward's end, which waits for all of them, once.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.engine.parameters.host_rows import wait_for_computation
from hf_zero.engine.parameters.partitioned_tensor import set_grads
from hf_zero.engine.parameters.records import ZeroParameter, gradient_rows, rows_at_rest
from hf_zero.engine.ranks.world import World
from hf_zero.host.cores import on_all_cores
from hf_zero.host.memory import rooms

_ROOM_BYTES = 64 * 2**20
_ALIGNMENT = 64
_NUM_ROOMS = 4


@functools.cache
def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device, priority=-1)


@dataclass(eq=False)
class _Descent:
    """Rows of one unit on their way, which the device keeps until `event`."""

    event: torch.Event
    rows: list[Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.rows)


@dataclass(eq=False)
class _Room:
    """Memory that parts of gradients come into, side by side.

    Attributes:
        memory: bytes.
        used: so many from the start are taken.
        num_parts: that are still to be added.
    """

    memory: Tensor
    used: int = 0
    num_parts: int = 0

    def has_space(self, num_bytes: int) -> bool:
        """Whether a part of so many bytes fits."""
        return self.used + num_bytes <= self.memory.nbytes

    def place(self, values: Tensor) -> Tensor:
        """Where values are to come."""
        landed = self.memory[self.used : self.used + values.nbytes].view(values.dtype)
        self.used += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.num_parts += 1
        return landed

    def leave(self) -> None:
        """A part has been added; who is the last leaves it empty."""
        self.num_parts -= 1
        self.used = self.used if self.num_parts else 0


@dataclass(eq=False)
class _Part:
    """What has come, or comes, into a room, and is to be added to a part of a gradient; it is there when `event` has passed."""

    room: _Room
    values: Tensor
    target: Tensor
    event: torch.Event | None = None


class Landing:
    """The gradients of one model that come down.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._descents: deque[_Descent] = deque()
        self._parts: deque[_Part] = deque()
        self._first: dict[ZeroParameter, Tensor] = {}  # what becomes a gradient at the end
        self._unmarked: list[_Part] = []  # the last of them, behind which no event is yet
        self._rooms: list[_Room] = []
        self._last: torch.Event | None = None

    def take(self, results: Sequence[tuple[ZeroParameter, Tensor]]) -> None:
        """Let reduced rows of one unit come down.

        Args:
            results: flat, on the device; kept until they are down.
        """
        compute, down = torch.accelerator.current_stream(self._world.device), _stream(self._world.device)
        parts = gradient_rows(results)
        found = [(p, rows) for (p, _), rows in zip(parts, rows_at_rest(parts), strict=True)]
        wait_for_computation(down, self._world.device)
        with down, torch.no_grad():
            for p, rows in found:
                self._start(p, rows)
        event = self._mark()
        self._descents.append(_Descent(event, [rows for _, rows in found]))
        self._last = event
        limit = self._world.config.bucket_bytes
        while len(self._descents) > 1 and sum(each.num_bytes for each in self._descents) > limit:
            compute.wait_event(self._descents[0].event)
            self._descents.popleft()  # only now is its memory the compute stream's again

    def wait(self) -> None:
        """Wait until all are down, and let parameters have them."""
        if self._last is not None and not self._last.query():
            self._last.synchronize()
        while self._parts:
            self._add_part()
        self._descents.clear()
        self._last = None
        first, self._first = self._first, {}
        set_grads([p.param for p in first], [rows.detach() for rows in first.values()])

    def abandon(self) -> None:
        """The backward broke off: drop what is under way, once nothing writes to its rooms."""
        self._mark().synchronize()
        for part in self._parts:
            part.room.leave()
        self._parts.clear()
        self._descents.clear()
        self._first.clear()
        self._last = None

    def _start(self, p: ZeroParameter, rows: Tensor) -> None:
        known = self._first.get(p)
        if known is None and p.param.grad is None:
            self._first[p] = room = self._room_for(p)
            room.copy_(rows, non_blocking=True)
            return
        target = (self._there(p) if known is None else known).view(-1)
        flat, most = rows.view(-1), _ROOM_BYTES // rows.itemsize
        for start in range(0, len(flat), most):
            self._start_part(flat[start : start + most], target[start : start + most])

    @staticmethod
    def _there(p: ZeroParameter) -> Tensor:
        """The rows of a gradient that is there already, to which is added."""
        assert p.param.grad is not None
        rows = torch_compat.local_of(p.param.grad)
        if not rows.is_contiguous():  # a user's own
            rows = rows.contiguous()
            set_grads([p.param], [rows])
        return rows

    def _room_for(self, p: ZeroParameter) -> Tensor:
        assert p.host is not None
        room = p.host.room_for_gradient()
        if room is None:  # it was frozen, or somebody has kept an earlier gradient: that one is theirs
            (room,) = rooms([(p.local_shape, p.param.dtype)], self._world.config.offload.pin)
            p.host.gradient = room
        return room

    def _start_part(self, values: Tensor, target: Tensor) -> None:
        room = self._room_with_space(values.nbytes)
        part = _Part(room, room.place(values), target)
        part.values.copy_(values, non_blocking=True)
        self._parts.append(part)
        self._unmarked.append(part)

    def _mark(self) -> torch.Event:
        """An event behind all that has been queued."""
        event = torch.Event(self._world.device)
        event.record(_stream(self._world.device))
        for part in self._unmarked:
            part.event = event
        self._unmarked.clear()
        return event

    def _room_with_space(self, num_bytes: int) -> _Room:
        while (room := next((each for each in self._rooms if each.has_space(num_bytes)), None)) is None:
            if len(self._rooms) < _NUM_ROOMS:
                (memory,) = rooms([((_ROOM_BYTES,), torch.uint8)], self._world.config.offload.pin)
                self._rooms.append(_Room(memory))
            else:
                self._add_part()
        return room

    def _add_part(self) -> None:
        part = self._parts.popleft()
        if part.event is None:
            self._mark()
        assert part.event is not None
        if not part.event.query():
            part.event.synchronize()
        with torch.no_grad(), on_all_cores():
            part.target.add_(part.values)
        part.room.leave()


def landing_of(world: World) -> Landing | None:
    """What lets gradients come down, if any may rest in host memory."""
    return Landing(world) if world.steps_on_host else None
