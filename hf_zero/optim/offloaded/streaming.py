"""A step of an elementwise optimizer whose states are on a disk: streamed through a few slots of memory.

[Note: streaming] The parameters are cut into pieces, and the pieces put into chunks that fit a slot. A chunk's states are read
into a slot, the optimizer's own `step` runs on it (on a stand-in that holds these pieces only), and what it has written goes
back, while the chunk behind is read and the one before is written. Since each element is computed for itself, the pieces have
the values of a step on the whole; what else it counts and keeps is told in [Note: a step in pieces].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero import torch_compat
from hf_zero.errors import OffloadError
from hf_zero.host.scratch import ALIGNMENT, Place, StepMemory, Transfers, aligned
from hf_zero.optim.kinds import minds_all, step_of
from hf_zero.optim.offloaded.pieces import Evaluated, is_plain_data, own_copy, written_back
from hf_zero.optim.offloaded.states import OffloadedStates, shown_as
from hf_zero.optim.on_rows import gradient_of, keep_old_values
from hf_zero.optim.stand_in import NOT_SWAPPED, StandIn

_GRAIN = ALIGNMENT  # elements: pieces of any dtype then begin and end with a block


@dataclass(eq=False)
class _Chunk:
    """Some elements of this rank's rows of a parameter.

    Attributes:
        param: as the optimizer holds it.
        start, stop: the elements.
        shape: in which the optimizer sees them, with as many dimensions as the parameter.
        places: of what is on a disk.
        offsets: of the same in the slot, in bytes.
        plain: what stands for the parameter in the step.
        inputs: the tensors that the step was given as states.
    """

    param: Tensor
    start: int
    stop: int
    shape: tuple[int, ...]
    places: Mapping[str, Place]
    offsets: dict[str, int] = field(default_factory=dict)
    plain: nn.Parameter | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def bytes_of(self, name: str) -> int:
        """Bytes of this piece of a state, in whole blocks."""
        return aligned((self.stop - self.start) * self.places[name].tensor.dtype.itemsize)

    def part_of(self, rows: Tensor) -> Tensor:
        """These elements of a tensor of this rank's rows."""
        return rows.view(-1)[self.start : self.stop].view(self.shape)


class StreamedStep:
    """One step under way; all but its last chunk is done when it is made.

    Args:
        optimizer: whose step it is.
        states: those that are on the disk.
        slots: memory for one chunk each.
        transfers: the threads that read and write.
        params: its partitioned parameters.
        args: of `step`, without the optimizer.
        kwargs: of `step`.

    Attributes:
        stand_in: what torch runs the last chunk's step on.
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
        self._optimizer, self._states = optimizer, states
        self._closures = [each for each in (*args, *kwargs.values()) if isinstance(each, Evaluated)]
        self._slots, self._transfers = slots, transfers
        self._params = params
        cut = {id(p) for p in params}
        self._others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in cut]
        self._rows = {id(p): nn.Parameter(torch_compat.local_of(p), requires_grad=p.requires_grad) for p in params}
        minds = minds_all(optimizer)
        self._gradients = {id(p): gradient_of(p) for p in params if p.grad is not None}
        self._by_id = {id(p): p for p in params}
        self._trained = [p for p in params if minds or id(p) in self._gradients]
        self._made: dict[int, dict[Any, Any]] = {}  # by id(parameter): states that are not on the disk
        self._dropped: dict[int, Tensor] = {}  # parameters whose gradient the step has dropped
        self._chunks = list(self._cut()) or [[self._piece(param, 0, None, {}) for param in params]]
        self._groups: dict[int, dict[str, Any]] = {}  # by number: its options after the last chunk that had some of it
        self._reads: dict[int, list[Future[None]]] = {}
        self._writes: dict[int, list[Future[None]]] = {}
        self._last: StandIn | None = None
        try:
            for index in range(len(self._chunks) - 1):
                stand_in = self._begin(index)
                step_of(optimizer)(stand_in, *args, **kwargs)
                self._end(index)
            self.stand_in = self._begin(len(self._chunks) - 1)
        except BaseException:
            self.wait_for_all()
            raise

    # --- chunks -------------------------------------------------------------------------------------------------

    def _cut(self) -> Iterator[list[_Chunk]]:
        """Chunks: first what is in memory anyway, while the disk begins to read."""
        places = {id(param): self._states.of(id(param)) for param in self._trained}
        here = [param for param in self._trained if not self._is_on_disk(param, places[id(param)])]
        if here or self._others:
            yield [self._piece(param, 0, None, {}) for param in here]
        chunk: list[_Chunk] = []
        used = 0
        for param in self._trained:
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
                piece = self._piece(param, start, stop, places[id(param)])
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

    @staticmethod
    def _piece(param: Tensor, start: int, stop: int | None, places: Mapping[str, Place]) -> _Chunk:
        rows = torch_compat.local_of(param)
        stop = rows.numel() if stop is None else stop
        is_all = stop - start == rows.numel()
        shape = tuple(rows.shape) if is_all else (stop - start, *[1] * (rows.ndim - 1))
        return _Chunk(param, start, stop, shape, places)

    # --- one chunk ----------------------------------------------------------------------------------------------

    def _begin(self, index: int) -> Any:
        """The stand-in for a chunk, whose states are in its slot."""
        for ahead in range(index, min(index + len(self._slots) - 1, len(self._chunks))):
            if ahead not in self._reads:
                _wait(self._writes.pop(ahead - len(self._slots), []))
                self._reads[ahead] = self._transfers.start("read", self._parts(ahead, self._has))
        _wait(self._reads[index])
        for closure in self._closures:
            closure.begin_chunk()
        slot = self._slots[index % len(self._slots)]
        chunk = self._chunks[index]
        for piece in chunk:
            self._fill(piece, slot)
        present = {id(piece.param): piece.plain for piece in chunk if piece.plain is not None}
        absent = {id(param) for param in self._params if id(param) not in present}
        absent |= {id(param) for param in self._others} if index else set()  # they step with the first chunk
        plain = {**self._rows, **present}
        known: dict[int, Any] = {}
        made = StandIn(self._optimizer, plain, absent, known, is_on_rows=True)
        for piece in chunk:
            if piece.inputs:
                made.stand_in.state[piece.plain] = dict(piece.inputs)
        for param in self._others if not index else ():
            if param in self._optimizer.state:
                made.stand_in.state[param] = self._optimizer.state[param]
        made.swap_attributes(known)
        self._give_copies(made)
        self._last = made
        return made.stand_in

    def _give_copies(self, made: StandIn) -> None:
        """Let a chunk have its own copies of what every chunk may write, and no group that it has nothing of."""
        stand_in, own = made.stand_in, vars(self._optimizer)
        for name, value in vars(stand_in).items():
            if name not in NOT_SWAPPED and own.get(name) is value:
                vars(stand_in)[name] = own_copy(value)
        for number, group in enumerate(stand_in.param_groups):
            for key in group if group["params"] else ():
                group[key] = group[key] if key == "params" else own_copy(group[key])
            if group["params"] or number not in self._groups:
                self._groups[number] = group
        stand_in.param_groups = [group for group in stand_in.param_groups if group["params"]] or stand_in.param_groups

    def _fill(self, piece: _Chunk, slot: StepMemory) -> None:
        """The plain parameter of a piece, its gradient and its states."""
        param, state = piece.param, self._optimizer.state.get(piece.param, {})
        in_slot = {
            name: slot.tensor(piece.offsets[name], piece.shape, place.tensor.dtype)
            for name, place in piece.places.items()
        }
        piece.plain = nn.Parameter(piece.part_of(torch_compat.local_of(param)), requires_grad=param.requires_grad)
        grad = self._gradients.get(id(param))
        piece.plain.grad = None if grad is None else piece.part_of(grad)
        for name, value in state.items():
            if not isinstance(value, Tensor):
                piece.inputs[name] = own_copy(value)
            elif name in in_slot:
                piece.inputs[name] = in_slot[name]
            elif piece.places:
                piece.inputs[name] = torch_compat.local_of(value).clone()  # a number, which every piece counts on
            else:
                piece.inputs[name] = torch_compat.local_of(value)

    def _has(self, piece: _Chunk, name: str) -> bool:
        return isinstance(self._optimizer.state.get(piece.param, {}).get(name), Tensor)

    def _parts(self, index: int, is_moved: Callable[[_Chunk, str], bool]) -> list[tuple[Any, int, memoryview]]:
        """What of a chunk is to be read or written; neighbours in the file and in the slot are one part."""
        slot = self._slots[index % len(self._slots)]
        runs: list[list[Any]] = []  # [file, offset in it, offset in the slot, bytes]
        for piece in self._chunks[index]:
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

    def _end(self, index: int) -> None:
        """A chunk's step has run: what it has written goes back."""
        assert self._last is not None
        slot = self._slots[index % len(self._slots)]
        state = self._last.stand_in.state
        for piece in self._chunks[index]:
            assert piece.plain is not None
            made = state.get(piece.plain, {}) if piece.plain in state else {}
            piece.inputs = {}
            if not piece.places:
                keep_old_values(state, piece.plain, torch_compat.local_of(piece.param))
            self._take_states(piece, made, slot)  # before the rows and gradients, which a state may have taken over
            self._take_rows(piece)
        for param in self._others if not index else ():
            if param in state:
                self._optimizer.state[param] = state[param]
        written = self._parts(index, lambda piece, name: name in piece.inputs)
        self._writes[index] = self._transfers.start("write", written)
        for piece in self._chunks[index]:
            piece.plain, piece.inputs = None, {}
            self._states.release(piece.param, piece.start, piece.stop)

    def _take_rows(self, piece: _Chunk) -> None:
        plain, param = piece.plain, piece.param
        assert plain is not None
        home = piece.part_of(torch_compat.local_of(param))
        if plain.data_ptr() != home.data_ptr():  # the step has assigned to `.data`
            home.copy_(plain.detach())
        grad = self._gradients.get(id(param))
        if grad is None or plain.grad is None:
            self._dropped[id(param)] = param
        elif plain.grad.data_ptr() != piece.part_of(grad).data_ptr():
            piece.part_of(grad).copy_(plain.grad.detach())

    def _take_states(self, piece: _Chunk, made: Mapping[Any, Any], slot: StepMemory) -> None:
        kept: dict[Any, Any] = {}
        for name, value in made.items():
            is_rows = isinstance(value, Tensor) and value.numel() > 1 and tuple(value.shape) == piece.shape
            if name in piece.places and isinstance(value, Tensor):
                home = slot.tensor(piece.offsets[name], piece.shape, piece.places[name].tensor.dtype)
                if value.dtype != home.dtype or value.shape != home.shape:
                    raise OffloadError(
                        f"{type(self._optimizer).__name__} has made the state {name!r} {value.dtype} of shape "
                        f"{tuple(value.shape)}, where it was {home.dtype} of shape {tuple(home.shape)} when room on the disk "
                        "was made: such an optimizer cannot be streamed; use offload.optimizer: none"
                    )
                if value.data_ptr() != home.data_ptr():
                    home.copy_(value)
                piece.inputs[name] = home  # is to be written
                kept[name] = piece.places[name].tensor
            elif is_rows and piece.places:
                raise OffloadError(
                    f"{type(self._optimizer).__name__} has made the state {name!r} in a later step than its first, when room "
                    "on the disk was made: such an optimizer cannot be streamed; use offload.optimizer: none"
                )
            else:
                kept[name] = value
        self._made[id(piece.param)] = kept

    # --- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The last chunk's step has run: take over what all of them have changed."""
        try:
            self._end(len(self._chunks) - 1)
        finally:
            self.wait_for_all()
        assert self._last is not None
        self._last.stand_in.param_groups = [self._groups[number] for number in range(len(self._groups))]
        self._write_back(self._last.stand_in)
        self._last.take_over(None)
        for key, taken in self._gradients.items():
            grad = None if (param := self._by_id[key]).grad is None else torch_compat.local_of(param.grad)
            if grad is not None and grad.data_ptr() != taken.data_ptr() and grad.shape == taken.shape:
                grad.copy_(taken)  # it was not contiguous
        for param in self._params:
            kept = self._made.get(id(param))
            if kept is None:
                continue
            state = self._optimizer.state[param]
            places = self._states.of(id(param))
            rows = tuple(torch_compat.local_of(param).shape)
            for name, value in kept.items():
                before = state.get(name)
                is_rows = isinstance(value, Tensor) and value.ndim > 0 and tuple(value.shape) == rows
                if isinstance(before, Tensor) and isinstance(value, Tensor) and torch_compat.local_of(before) is value:
                    continue
                if name in places and isinstance(before, Tensor) and isinstance(value, Tensor):
                    continue  # where it was
                state[name] = shown_as(value, param) if is_rows else value
            for name in [name for name in state if name not in kept]:
                del state[name]
        for param in self._dropped.values():
            param.grad = None

    def _write_back(self, stand_in: Any) -> None:
        """Let objects that others may refer to have what the last chunk has made of its copies."""
        own = vars(self._optimizer)
        for name, value in vars(stand_in).items():
            if name not in NOT_SWAPPED and name in own and is_plain_data(value) and is_plain_data(own[name]):
                vars(stand_in)[name] = written_back(own[name], value)
        for group, changed in zip(self._optimizer.param_groups, stand_in.param_groups, strict=True):
            for key, value in changed.items():
                if key != "params" and key in group and is_plain_data(value) and is_plain_data(group[key]):
                    changed[key] = written_back(group[key], value)

    def wait_for_all(self) -> None:
        """Wait for what is read and written: also for a step that has raised, before its slots are used again."""
        for under_way in (*self._reads.values(), *self._writes.values()):
            _wait(under_way)
        self._writes.clear()


def _wait(under_way: list[Future[None]]) -> None:
    for each in under_way:
        each.result()
