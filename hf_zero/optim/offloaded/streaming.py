"""A step of an elementwise optimizer whose states are on a disk: streamed through a few slots of memory.

[Note: streaming] A chunk's states are read into a slot, the optimizer's own `step` runs on it, see [Note: chunks], and what it
has written goes back, while the chunk behind is read and the one before is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.errors import OffloadError
from hf_zero.host.scratch import ALIGNMENT, Place, StepMemory, Transfers, aligned
from hf_zero.optim.offloaded.chunked import ChunkedStep, Piece
from hf_zero.optim.offloaded.states import OffloadedStates

_GRAIN = ALIGNMENT  # elements: pieces of any dtype then begin and end with a block


class StreamedStep(ChunkedStep):
    """One step under way.

    Args:
        optimizer: whose step it is.
        states: those that are on the disk.
        slots: memory for one chunk each.
        transfers: the threads that read and write.
        params: its partitioned parameters.
        args: of `step`, without the optimizer.
        kwargs: of `step`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        states: OffloadedStates,
        slots: list[StepMemory],
        transfers: Transfers,
        params: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__(optimizer, params, args, kwargs)
        self._states, self._slots, self._transfers = states, slots, transfers
        self._reads: dict[int, list[Future[None]]] = {}
        self._writes: dict[int, list[Future[None]]] = {}

    # --- chunks -------------------------------------------------------------------------------------------------

    def _cut(self) -> Iterator[list[Piece]]:
        """Chunks: first what is in memory anyway, while the disk begins to read."""
        places = {id(param): self._states.of(id(param)) for param in self.trained}
        here = [param for param in self.trained if not self._is_on_disk(param, places[id(param)])]
        if here or self.others:
            yield list(map(Piece.of, here))
        chunk: list[Piece] = []
        used = 0
        for param in self.trained:
            if not self._is_on_disk(param, places[id(param)]):
                continue
            start, numel = 0, torch_compat.local_of(param).numel()
            while start < numel:
                stop = self._fitting(start, numel, places[id(param)], self._slots[0].num_bytes - used)
                if stop == start:
                    if not chunk:
                        raise OffloadError(
                            f"offload.slot_bytes is {self._slots[0].num_bytes:,}, which holds no {_GRAIN:,} elements of the "
                            f"{len(places[id(param)])} states of a parameter: make it larger"
                        )
                    yield chunk
                    chunk, used = [], 0
                    continue
                piece = Piece.of(param, start, stop, places[id(param)])
                for name in piece.places:
                    piece.offsets[name] = used
                    used += piece.bytes_of(name)
                chunk.append(piece)
                start = stop
        if chunk:
            yield chunk

    @staticmethod
    def _is_on_disk(param: Tensor, places: Mapping[str, Place]) -> bool:
        return bool(places) and torch_compat.local_of(param).numel() > 0

    @staticmethod
    def _fitting(start: int, numel: int, places: Mapping[str, Place], room: int) -> int:
        """Where a piece that begins at `start` and fits into `room` bytes ends."""
        rest = numel - start
        if sum(aligned(rest * place.tensor.dtype.itemsize) for place in places.values()) <= room:
            return numel
        per_grain = sum(_GRAIN * place.tensor.dtype.itemsize for place in places.values())
        return start + room // per_grain * _GRAIN

    # --- one chunk ----------------------------------------------------------------------------------------------

    def _bring(self, index: int) -> None:
        """See `ChunkedStep`: into its slot, and those behind into theirs."""
        for ahead in range(index, min(index + len(self._slots) - 1, len(self.chunks))):
            if ahead not in self._reads:
                _wait(self._writes.pop(ahead - len(self._slots), []))
                self._reads[ahead] = self._transfers.start("read", self._parts(ahead, self._has))
        _wait(self._reads[index])

    def _homes(self, index: int, piece: Piece) -> dict[str, Tensor]:
        slot = self._slots[index % len(self._slots)]
        return {
            name: slot.tensor(piece.offsets[name], piece.shape, place.tensor.dtype)
            for name, place in piece.places.items()
        }

    def _has(self, piece: Piece, name: str) -> bool:
        return isinstance(self.optimizer.state.get(piece.param, {}).get(name), Tensor)

    def _parts(self, index: int, is_moved: Callable[[Piece, str], bool]) -> list[tuple[Any, int, memoryview]]:
        """What of a chunk is to be read or written; neighbours in the file and in the slot are one part."""
        slot = self._slots[index % len(self._slots)]
        runs: list[list[Any]] = []  # [file, offset in it, offset in the slot, bytes]
        for piece in self.chunks[index]:
            for name, place in piece.places.items():
                if not is_moved(piece, name):
                    continue
                at, num_bytes = place.offset + piece.start * place.tensor.dtype.itemsize, piece.bytes_of(name)
                last = runs[-1] if runs else None
                if (
                    last
                    and last[0] is place.file
                    and last[1] + last[3] == at
                    and last[2] + last[3] == piece.offsets[name]
                ):
                    last[3] += num_bytes
                else:
                    runs.append([place.file, at, piece.offsets[name], num_bytes])
        return [(file, at, slot.memory(start, num_bytes)) for file, at, start, num_bytes in runs]

    def _done(self, index: int) -> None:
        """See `ChunkedStep`: what the step has written goes back."""
        written = self._parts(index, lambda piece, name: name in piece.inputs)
        self._writes[index] = self._transfers.start("write", written)
        for piece in self.chunks[index]:
            self._states.release(piece.param, piece.start, piece.stop)

    def _kept_states(self, index: int, piece: Piece, made: Mapping[Any, Any]) -> dict[Any, Any]:
        """See `ChunkedStep`: those that are on the disk, in the slot."""
        kept: dict[Any, Any] = {}
        homes = self._homes(index, piece)
        for name, value in made.items():
            is_rows = isinstance(value, Tensor) and value.numel() > 1 and tuple(value.shape) == piece.shape
            if name in piece.places and isinstance(value, Tensor):
                home = homes[name]
                if value.dtype != home.dtype or value.shape != home.shape:
                    raise OffloadError(
                        f"{type(self.optimizer).__name__} has made the state {name!r} {value.dtype} of shape "
                        f"{tuple(value.shape)}, where it was {home.dtype} of shape {tuple(home.shape)} when room on the disk "
                        "was made: such an optimizer cannot be streamed; use offload.optimizer: none"
                    )
                if value.data_ptr() != home.data_ptr():
                    home.copy_(value)
                piece.inputs[name] = home  # is to be written
                kept[name] = piece.places[name].tensor
            elif is_rows and piece.places:
                raise OffloadError(
                    f"{type(self.optimizer).__name__} has made the state {name!r} in a later step than its first, when room "
                    "on the disk was made: such an optimizer cannot be streamed; use offload.optimizer: none"
                )
            else:
                kept[name] = value
        return kept

    def _places_of(self, param: Tensor) -> Mapping[str, Place]:
        return self._states.of(id(param))

    def abandon(self) -> None:
        """Wait for what is read and written: also for a step that has raised, before its slots are used again."""
        for under_way in (*self._reads.values(), *self._writes.values()):
            _wait(under_way)
        self._writes.clear()


def _wait(under_way: list[Future[None]]) -> None:
    for each in under_way:
        each.result()
