"""Operations that need every rank's rows, and that one rank may run alone: `if rank == 0: model.save_pretrained(...)`.

[Note: alone] People save, read and log on the main process alone, as DDP lets them; the others' rows are needed all the same.
So an operation that only reads begins with `all_come`. Every rank that comes there says so in torch's store. If all come, they
do it together, by exchanges. If one does not, the ranks that wait ask its service how far it is (see [Note: progress]): as soon
as it has passed the place, or is about to exit, it will not come, and the operation is done alone: the others' rows are asked
for, one tensor after another, and given by their services, whatever their programs wait for.

What is read then is one state of the model. A rank gives rows only once it has passed the place, so that all that comes
before it in the program has been done. It counts steps and edits *before* they begin, and gives nothing if there was one
since, or during the copy; then the asker raises. It raises, too, where it has changed the model itself and the others have
not. Ranks come to a step together, so that what comes before it can be read, gradients too: as the backward has left them, or
after as many edits since. A rank that ends its program stays for those that may still ask: see [Note: leaving].

A rank that is merely late does not look like one that has passed, so that all ranks that run the same lines meet as ever. One
that waits at another operation, of another model too, has not passed either: the fewer go on alone, and come there later.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.comm.beside.progress import (
    counts_of,
    is_ahead,
    is_receiving_from,
    numbers_in_groups,
    progress,
)
from hf_zero.comm.beside.service import Answer, Peers, answer
from hf_zero.comm.beside.store import Notes
from hf_zero.comm.exchange import named
from hf_zero.comm.groups.process_groups import default_group
from hf_zero.comm.groups.select import when_met
from hf_zero.engine.ranks.apart import Apart, line_of_program
from hf_zero.engine.ranks.leaving import Lasting, Leaves, Target, before_leaving, only_returns
from hf_zero.engine.ranks.offers import GONE, Offers
from hf_zero.engine.ranks.place import ProgramPlace
from hf_zero.errors import CollectiveError
from hf_zero.layout import RowLayout

_PLACE, _ROWS, _LEAVING = "how far it is", "its rows", "whether it leaves"
_SHORTEST_S, _LONGEST_S = 1e-4, 0.02  # between two looks at who has come
_ASKS_AFTER_S = 0.05  # that the others have to come before they are asked, and between two times
FEW_RANKS = 8  # up to so many, each stays for all others; beyond, for the first one only
_STAYS_S = 0.1  # between two looks at who has left


class ChangedAloneError(CollectiveError):
    """This rank has changed what it reads, and the others have not."""


class _Seen(Enum):
    """Another rank, seen from a place of the program."""

    BEHIND = auto()
    THERE = auto()
    CROSSED = auto()  # it waits elsewhere, with all done that comes before
    PAST = auto()
    ELSEWHERE = auto()  # past it, without the asker's steps and edits: those were the asker's alone


class Serving(Offers):
    """What the ranks of one world may do alone; see [Note: alone].

    Args:
        name: under which their meetings are counted, the same on all of them.
        peers: their services; None: nothing can be done alone.
        shards: the ranks over which parameters are cut, in order.
        timeout_s: that ranks wait for each other.
        device: where rows live.

    Attributes:
        name: as given.
        device: as given.
        apart: parameters that this rank has changed alone.
    """

    def __init__(
        self, name: str, peers: Peers | None, shards: Sequence[int], timeout_s: float, device: torch.device
    ) -> None:
        super().__init__()
        self.name, self._peers, self._shards = name, peers, tuple(shards)
        self._timeout_s, self.device = timeout_s, device
        self.apart = Apart()
        self._edits_at: ProgramPlace | None = None  # and on which line
        self._edits_alone = False
        self._left = Leaves.NOTHING
        if peers is not None:
            self._met = counts_of(name)
            _program.alone_at = None  # all make this one
            _by_name[name] = self
            answer(_PLACE, _answer_place)
            answer(_ROWS, _answer_rows)
            answer(_LEAVING, _answer_leaving)
            itself = weakref.ref(self)
            before_leaving(lambda leaves: None if (serving := itself()) is None else serving.leave(leaves))

    def keep(self, reference: Lasting[Target], target: Target) -> None:
        """An engine, or an optimizer, is about to be gone: keep it if it may still be asked for. See [Note: leaving]."""
        if self._peers is not None and self._left < Leaves.PROGRAM and only_returns():
            reference.keep(target)
            _kept.append((self, reference))

    def is_among(self, ranks: Iterable[int]) -> bool:
        """Whether all who may ask are among these."""
        return self._peers is None or {self._peers.own, *self._peers.others}.issubset(ranks)

    @property
    def is_asked(self) -> bool:
        """Whether other ranks may ask this one."""
        return self._peers is not None

    @property
    def can_be_alone(self) -> bool:
        """Whether an operation that begins now may be done alone: no forward and no backward is under way."""
        is_outside = self._peers is not None and not torch_compat.in_backward()
        return is_outside and self.are_at_rest

    @property
    def place(self) -> object:
        """Where this rank is in the program: the same as before, as long as it has begun nothing together with others."""
        return self._here(), self.apart.tick

    def _here(self, what: str = "", on: str = "", is_apart: bool = False) -> ProgramPlace:
        rank = -1 if self._peers is None else self._peers.own
        return ProgramPlace(self.name, progress(), self.version, is_apart, what, on, numbers_in_groups(), rank)

    # --- does everyone come? ------------------------------------------------------------------------------------

    def all_come(self, what: str, on: str) -> bool:
        """Whether every rank comes to the same operation, which only reads; called only where it `can_be_alone`.

        Args:
            what: for errors.
            on: tells apart what the operation may read.

        Raises:
            CollectiveError: a rank has neither come nor passed in time, or is gone.
        """
        self.apart.join()
        here = self._here(what, on)
        if default_group() is None or self._is_alone_at(here):
            return False
        _program.waits_at = here
        try:
            has_all = self._meet(Notes(self.name), here)
        finally:
            _program.waits_at = None
        if has_all:
            self._met.by_kind["meetings"] += 1
            self.apart.check(what)
        return has_all

    def edits_alone(self) -> bool:
        """Whether this rank alone makes the edit of a parameter that is about to begin; asked once for edits in a row."""
        known, here = self._edits_at, self._here("an edit of parameters", line_of_program())
        if known is None or known.on != here.on or not known.is_same(here):
            self._edits_alone = self.can_be_alone and not self.all_come(here.what, here.on)
            self.note_edit(here.on)
        return self._edits_alone

    def note_edit(self, line: str = "") -> None:
        """Ranks have met for an edit: others may follow, on the same line."""
        on = line or ("" if self._edits_at is None else self._edits_at.on)
        self._edits_at = self._here(on=on)

    def _is_alone_at(self, here: ProgramPlace) -> bool:
        """Whether this rank was seen to be alone at this place, for all that it does there or for this operation."""
        known = _program.alone_at
        return known is not None and known.is_same(here) and _program.alone_for in ("", here.key)

    def _meet(self, notes: Notes, here: ProgramPlace) -> bool:
        assert self._peers is not None
        others = self._peers.others
        began = time.monotonic()
        many = max(1.0, len(others) / FEW_RANKS)  # one store answers all of them, and each all others
        pause_s, asks_after_s = _SHORTEST_S * many, _ASKS_AFTER_S * many
        has_crossed = _program.alone_at is not None and _program.alone_at.is_same(here)
        asked = began - asks_after_s if has_crossed else began
        count = notes.count(here.key, 1)
        while count <= len(others):
            now = time.monotonic()
            if now > asked + asks_after_s:
                asked = now
                seen = {rank: self._see(rank, here) for rank in others}
                has_passed = _Seen.PAST in seen.values()
                if has_passed or self._yields(seen):
                    if notes.count(here.key, -1) == len(others):
                        notes.count(here.key, 1)
                        return True  # all had come, and one was quick
                    _program.alone_at, _program.alone_for = here, "" if has_passed else here.key
                    return False
                if now > began + self._timeout_s:
                    absent = [rank for rank, how in seen.items() if how is _Seen.BEHIND]
                    raise named(RuntimeError("timed out"), here.what, absent or None, self._timeout_s)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, max(pause_s, _LONGEST_S))
            count = notes.count(here.key, 0)
        return True

    def _yields(self, seen: dict[int, _Seen]) -> bool:
        """Whether more ranks wait elsewhere than here, or as many with higher numbers: what few do alone is the first's."""
        assert self._peers is not None
        elsewhere = [rank for rank, how in seen.items() if how is _Seen.CROSSED]
        here = [self._peers.own, *(rank for rank, how in seen.items() if how is _Seen.THERE)]
        if not elsewhere or _Seen.BEHIND in seen.values():
            return False
        return (len(here), min(here)) < (len(elsewhere), min(elsewhere))

    def _see(self, rank: int, here: ProgramPlace) -> _Seen:
        assert self._peers is not None
        try:
            seen, _ = self._peers.ask(rank, _PLACE, here)
        except CollectiveError as error:
            raise named(RuntimeError("its process has ended"), here.what, rank, self._timeout_s) from error
        assert isinstance(seen, _Seen)
        return seen

    def seen_from(self, place: ProgramPlace) -> _Seen:
        """This rank, as seen by one that is at a place; called by the service."""
        waits_at = _program.waits_at
        if self._has_left(place) or self._is_alone_beside(place):
            return _Seen.PAST
        if waits_at is None or is_ahead(place.reached, waits_at.reached):
            return _Seen.BEHIND
        return _Seen.THERE if waits_at.key == place.key else _Seen.CROSSED

    def _is_alone_beside(self, place: ProgramPlace) -> bool:
        """Whether this rank, too, does alone what begins at a place, since a third one has passed it, or waits elsewhere."""
        own = _program.alone_at
        return (
            own is not None
            and own.is_same(place)
            and own.is_same(self._here())
            and _program.alone_for in ("", place.key)
        )

    def _has_left(self, place: ProgramPlace) -> bool:
        """Whether this rank has done all that comes before a place, and begun what comes after it."""
        return bool(self._left) or place.is_passed()

    # --- the others' rows ---------------------------------------------------------------------------------------

    def whole(self, tensor: Tensor, local: Tensor, layout: RowLayout, is_apart: bool = False) -> Tensor:
        """The whole of a tensor that this can `find`; as `whole_of`."""
        found = self.find(tensor)
        assert found is not None
        return self.whole_of(*found, local, layout, is_apart)

    def whole_of(self, key: str, item: object, local: Tensor, layout: RowLayout, is_apart: bool = False) -> Tensor:
        """The whole of a tensor, of which the others' rows are asked for, in memory of its own.

        Args:
            key: under which it is offered.
            item: which it is there.
            local: this rank's rows.
            layout: which rows are whose.
            is_apart: this rank has changed it alone.

        Raises:
            CollectiveError: a rank has changed the tensor since, or this one alone, or one is gone, or does not come so far
                in time.
        """
        assert self._peers is not None
        with torch.inference_mode(False):
            flat = torch.empty(layout.padded_numel, dtype=local.dtype, device="cpu")
            for shard, rank in enumerate(self._shards):
                elements = layout.elements_of(flat, shard)
                if rank == self._peers.own:
                    elements.copy_(layout.flat(local))
                elif elements.numel():
                    elements.copy_(self._rows(rank, key, item, is_apart).view(local.dtype))
            return layout.in_shape(flat[: layout.numel], layout.shape).contiguous().to(local.device, copy=True)

    def bytes_of(self, key: str, item: object, shard: int) -> bytes:
        """What one of the ranks over which parameters are cut has whole, as bytes; errors as those of `whole_of`.

        Args:
            key: under which it is offered.
            item: which it is there.
            shard: whose it is.
        """
        return self._rows(self._shards[shard], key, item).numpy().tobytes()

    def _rows(self, rank: int, key: str, item: object, is_apart: bool = False) -> Tensor:
        assert self._peers is not None
        began, question = time.monotonic(), (self._here(is_apart=is_apart), key, self.question(key, item))
        while True:
            seen, rows = self._peers.ask(rank, _ROWS, question)
            if seen is _Seen.THERE:
                return rows
            if seen is _Seen.PAST:
                raise CollectiveError(
                    f"rank {self._peers.own} reads a model alone, but rank {rank} has changed it since (an optimizer's "
                    "step, or an edit by hand): let all ranks run the line that reads, or put it before what changes"
                )
            if seen is _Seen.ELSEWHERE:
                raise ChangedAloneError(
                    f"rank {self._peers.own} has changed a model alone (an edit by hand, as of an EMA's `copy_to`) and reads "
                    f"it, but rank {rank} has the other rows without that change: let all ranks run the line that changes it"
                )
            if time.monotonic() > began + self._timeout_s:
                raise named(RuntimeError("timed out"), "what one rank reads alone", rank, self._timeout_s)
            time.sleep(_LONGEST_S)

    def give_rows(self, asked_from: ProgramPlace, key: str, item: object) -> Answer:
        """This rank's rows, if they are those of the asker's place; called by the service."""
        seen = self.seen_from(asked_from)  # before the version: what it has begun counts all that came before
        version = self.version
        if seen is _Seen.BEHIND and not is_receiving_from(asked_from.rank):
            return seen, None
        if (version < asked_from.version or asked_from.is_apart) and not self.outlives_edits(key):
            return _Seen.ELSEWHERE, None
        rows, layout = self.given(key, item)
        with self.beside(rows.device):
            copied = layout.flat(rows.cpu()).clone().view(-1).view(torch.uint8)
        return (_Seen.THERE, copied) if self.version == version <= asked_from.version else (_Seen.PAST, None)

    # --- the end of the program ---------------------------------------------------------------------------------

    def leave(self, leaves: Leaves) -> Callable[[], None]:
        """Be about to leave; returns what stays until no rank may ask any more, see [Note: leaving]."""
        self._left = leaves
        return partial(self._stay, self._here())

    def _stay(self, here: ProgramPlace) -> None:
        assert self._peers is not None
        others = self._peers.others
        remaining = others if len(others) < FEW_RANKS else others[:1]
        while remaining := [rank for rank in remaining if self._may_ask(rank, here)]:
            time.sleep(_STAYS_S)

    def _may_ask(self, rank: int, here: ProgramPlace) -> bool:
        assert self._peers is not None
        try:
            return bool(self._peers.ask(rank, _LEAVING, (here, self._left))[0])
        except CollectiveError:
            return False  # it is gone

    def may_ask(self, place: ProgramPlace, leaves: Leaves) -> bool:
        """Whether this rank may still ask one that leaves from a place, and does not wait for it in an exchange."""
        return self._left < leaves and not is_ahead(progress(), place.reached)


@dataclass
class _Program:
    """Where this process waits for others, or has gone on without them, whatever its models: they are of one program."""

    waits_at: ProgramPlace | None = None
    alone_at: ProgramPlace | None = None
    alone_for: str = ""  # the one operation that it does alone there; "": all


_program = _Program()
_by_name: weakref.WeakValueDictionary[str, Serving] = weakref.WeakValueDictionary()
_kept: list[tuple[Serving, Lasting[Any]]] = []


@when_met
def _let_go(ranks: tuple[int, ...]) -> None:
    """These ranks have met to make another model: none of them can ask any more for what was dropped before."""
    done = [each for each in _kept if each[0].is_among(ranks)]
    _kept[:] = [each for each in _kept if each not in done]
    for _, reference in done:
        reference.let_go()


def _answer_place(place: ProgramPlace) -> Answer:
    serving = _by_name.get(place.world)
    return (_Seen.PAST if serving is None else serving.seen_from(place)), None


def _answer_rows(question: tuple[ProgramPlace, str, object]) -> Answer:
    asked_from, key, item = question
    serving = _by_name.get(asked_from.world)
    if serving is None:
        raise CollectiveError(GONE)
    with torch.no_grad():
        return serving.give_rows(asked_from, key, item)


def _answer_leaving(question: tuple[ProgramPlace, Leaves]) -> Answer:
    place, leaves = question
    serving = _by_name.get(place.world)
    return serving is not None and serving.may_ask(place, leaves), None
