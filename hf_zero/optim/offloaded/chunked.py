"""A step of an elementwise optimizer, chunk by chunk: what of it every chunk is given, and what is taken back.

[Note: chunks] The parameters are cut into pieces, and the pieces put into chunks. The optimizer's own `step` runs on one chunk
after the other, on a stand-in that holds its pieces only. Since each element is computed for itself, the pieces have the values
of a step on the whole; what else it counts and keeps is told in [Note: a step in pieces].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero import torch_compat
from hf_zero.host.scratch import Place, aligned
from hf_zero.optim.kinds import minds_all, step_of
from hf_zero.optim.offloaded.pieces import Evaluated, is_plain_data, own_copy, written_back
from hf_zero.optim.offloaded.states import shown_as
from hf_zero.optim.on_rows import gradient_of, keep_old_values
from hf_zero.optim.stand_in import NOT_SWAPPED, StandIn
from hf_zero.optim.stepping import params_of


@dataclass(eq=False)
class Piece:
    """Some elements of this rank's rows of a parameter.

    Attributes:
        param: as the optimizer holds it.
        start, stop: the elements.
        shape: in which the optimizer sees them, with as many dimensions as the parameter.
        is_all: they are all of them.
        places: of what is on a disk.
        offsets: of the same in the slot, in bytes.
        plain: what stands for the parameter in the step.
        inputs: the tensors that the step was given as states.
    """

    param: Tensor
    start: int
    stop: int
    shape: tuple[int, ...]
    is_all: bool
    places: Mapping[str, Place]
    offsets: dict[str, int] = field(default_factory=dict)
    plain: nn.Parameter | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, param: Tensor, start: int = 0, stop: int | None = None, places: Mapping[str, Place] | None = None
    ) -> Piece:
        """From one element of a parameter's rows to another; by default all of them."""
        rows = torch_compat.local_of(param)
        stop = rows.numel() if stop is None else stop
        is_all = stop - start == rows.numel()
        shape = tuple(rows.shape) if is_all else (stop - start, *[1] * (rows.ndim - 1))
        return cls(param, start, stop, shape, is_all, places or {})

    def bytes_of(self, name: str) -> int:
        """Bytes of this piece of a state, in whole blocks."""
        return aligned((self.stop - self.start) * self.places[name].tensor.dtype.itemsize)

    def part_of(self, rows: Tensor) -> Tensor:
        """These elements of a tensor of this rank's rows."""
        return rows if self.is_all else rows.view(-1)[self.start : self.stop].view(self.shape)


class ChunkedStep:
    """One step under way.

    Args:
        optimizer: whose step it is.
        params: those of its parameters that are cut into pieces.
        args: of `step`, without the optimizer.
        kwargs: of `step`.

    Attributes:
        stand_in: what torch runs the last chunk's step on, once the others are done.
    """

    stand_in: Any

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.optimizer, self.params = optimizer, params
        self._args, self._kwargs = args, kwargs
        self._closures = [each for each in (*args, *kwargs.values()) if isinstance(each, Evaluated)]
        cut = {id(p) for p in params}
        self.others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in cut]
        self._rows = {id(p): nn.Parameter(torch_compat.local_of(p), requires_grad=p.requires_grad) for p in params}
        minds = minds_all(optimizer)
        self._gradients = {id(p): gradient_of(p) for p in params if p.grad is not None}
        self._by_id = {id(p): p for p in params}
        self.trained = [p for p in params if minds or id(p) in self._gradients]
        self._made: dict[int, dict[Any, Any]] = {}  # by id(parameter): states that are not on the disk
        self._dropped: dict[int, Tensor] = {}  # parameters whose gradient the step has dropped
        self._groups: dict[int, dict[str, Any]] = {}  # by number: its options after the last chunk that had some of it
        self._last: StandIn | None = None
        self.chunks: list[list[Piece]] = []

    def run(self) -> Any:
        """Step on all chunks but the last; gives the stand-in on which the last one's step is to run."""
        self.chunks = list(self._cut()) or [list(map(Piece.of, self.params))]
        try:
            for index in range(len(self.chunks) - 1):
                stand_in = self._begin(index)
                step_of(self.optimizer)(stand_in, *self._args, **self._kwargs)
                self._end(index)
            self.stand_in = self._begin(len(self.chunks) - 1)
        except BaseException:
            self.abandon()
            raise
        return self.stand_in

    # --- what kinds of steps differ in --------------------------------------------------------------------------

    def _cut(self) -> Iterator[list[Piece]]:
        """The chunks; what is cut into no pieces steps with the first."""
        raise NotImplementedError

    def _bring(self, index: int) -> None:
        """See to it that a chunk's states are in memory."""

    def _homes(self, index: int, piece: Piece) -> dict[str, Tensor]:
        """The states of a piece that are in memory for this step only."""
        return {}

    def _done(self, index: int) -> None:
        """A chunk's step has run, and what it has changed is in place."""

    def abandon(self) -> None:
        """Let go of what a step that has raised still uses."""

    # --- one chunk ----------------------------------------------------------------------------------------------

    def _begin(self, index: int) -> Any:
        """The stand-in for a chunk."""
        self._bring(index)
        for closure in self._closures:
            closure.begin_chunk()
        chunk = self.chunks[index]
        for piece in chunk:
            self._fill(piece, self._homes(index, piece))
        present = {id(piece.param): piece.plain for piece in chunk if piece.plain is not None}
        absent = {id(param) for param in self.params if id(param) not in present}
        absent |= {id(param) for param in self.others} if index else set()  # they step with the first chunk
        plain = {**self._rows, **present}
        known: dict[int, Any] = {}
        params = {id(param): param for param in params_of(self.optimizer)}
        made = StandIn(self.optimizer, plain, params, absent, known, is_on_rows=True)
        for piece in chunk:
            if piece.inputs:
                made.stand_in.state[piece.plain] = dict(piece.inputs)
        for param in self.others if not index else ():
            if param in self.optimizer.state:
                made.stand_in.state[param] = self.optimizer.state[param]
        made.swap_attributes(known)
        self._give_copies(made)
        self._last = made
        return made.stand_in

    def _give_copies(self, made: StandIn) -> None:
        """Let a chunk have its own copies of what every chunk may write, and no group that it has nothing of."""
        stand_in, own = made.stand_in, vars(self.optimizer)
        for name, value in vars(stand_in).items():
            if name not in NOT_SWAPPED and own.get(name) is value:
                vars(stand_in)[name] = own_copy(value)
        for number, group in enumerate(stand_in.param_groups):
            for key in group if group["params"] else ():
                group[key] = group[key] if key == "params" else own_copy(group[key])
            if group["params"] or number not in self._groups:
                self._groups[number] = group
        stand_in.param_groups = [group for group in stand_in.param_groups if group["params"]] or stand_in.param_groups

    def _fill(self, piece: Piece, homes: Mapping[str, Tensor]) -> None:
        """The plain parameter of a piece, its gradient and its states."""
        param, state = piece.param, self.optimizer.state.get(piece.param, {})
        piece.plain = nn.Parameter(piece.part_of(torch_compat.local_of(param)), requires_grad=param.requires_grad)
        grad = self._gradients.get(id(param))
        piece.plain.grad = None if grad is None else piece.part_of(grad)
        for name, value in state.items():
            if not isinstance(value, Tensor):
                piece.inputs[name] = own_copy(value)
            elif name in homes:
                piece.inputs[name] = homes[name]
            elif piece.places:
                piece.inputs[name] = torch_compat.local_of(value).clone()  # a number, which every piece counts on
            else:
                piece.inputs[name] = torch_compat.local_of(value)

    def _end(self, index: int) -> None:
        """A chunk's step has run: take what it has changed."""
        assert self._last is not None
        state = self._last.stand_in.state
        for piece in self.chunks[index]:
            assert piece.plain is not None
            made = state.get(piece.plain, {}) if piece.plain in state else {}
            piece.inputs = {}
            if not piece.places:
                keep_old_values(state, piece.plain, torch_compat.local_of(piece.param))
            # Before the rows and gradients, which a state may have taken over.
            self._made[id(piece.param)] = self._kept_states(index, piece, made)
            self._take_rows(piece)
        for param in self.others if not index else ():
            if param in state:
                self.optimizer.state[param] = state[param]
        self._done(index)
        for piece in self.chunks[index]:
            _let_go(piece.plain)
            piece.plain, piece.inputs = None, {}

    def _kept_states(self, index: int, piece: Piece, made: Mapping[Any, Any]) -> dict[Any, Any]:
        """The states that a step has made of a piece, as they are to be kept."""
        return dict(made)

    def _take_rows(self, piece: Piece) -> None:
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

    # --- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The last chunk's step has run: take over what all of them have changed."""
        try:
            self._end(len(self.chunks) - 1)
        finally:
            self.abandon()
        assert self._last is not None
        self._last.stand_in.param_groups = [self._groups[number] for number in range(len(self._groups))]
        self._write_back(self._last.stand_in)
        self._last.take_over(None)
        for key, taken in self._gradients.items():
            grad = None if (param := self._by_id[key]).grad is None else torch_compat.local_of(param.grad)
            if grad is not None and grad.data_ptr() != taken.data_ptr() and grad.shape == taken.shape:
                grad.copy_(taken)  # it was not contiguous
        for param in self.params:
            kept = self._made.get(id(param))
            if kept is not None:
                self._keep_states(param, kept)
        for param in self._dropped.values():
            param.grad = None
        for plain in self._rows.values():
            _let_go(plain)

    def _keep_states(self, param: Tensor, kept: Mapping[Any, Any]) -> None:
        state, places = self.optimizer.state[param], self._places_of(param)
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

    def _places_of(self, param: Tensor) -> Mapping[str, Place]:
        """Of a parameter's states that are on a disk."""
        return {}

    def _write_back(self, stand_in: Any) -> None:
        """Let objects that others may refer to have what the last chunk has made of its copies."""
        own = vars(self.optimizer)
        for name, value in vars(stand_in).items():
            if name not in NOT_SWAPPED and name in own and is_plain_data(value) and is_plain_data(own[name]):
                vars(stand_in)[name] = written_back(own[name], value)
        for group, changed in zip(self.optimizer.param_groups, stand_in.param_groups, strict=True):
            for key, value in changed.items():
                if key != "params" and key in group and is_plain_data(value) and is_plain_data(group[key]):
                    changed[key] = written_back(group[key], value)


def _let_go(plain: nn.Parameter | None) -> None:
    """Let a stand-in, which circles of references may keep, no longer hold the memory of rows: who else does is counted."""
    if plain is not None:
        plain.grad = None
        plain.data = plain.data.new_empty(0)
