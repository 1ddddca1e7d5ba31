"""What one rank can be asked for by another: parameters at rest, and what is offered under keys of its own."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_zero.engine.ranks.leaving import Lasting
from hf_zero.errors import CollectiveError
from hf_zero.layout import RowLayout

_PARAMETERS = "parameters"

GONE = (
    "the model does not exist there any more: keep it until rank 0 has saved (`dist.barrier()`), or let all ranks save"
)


# What a backward has left as a gradient: its rows, the number of its parameter, and the version of the rows.
_Left = tuple[weakref.ref[Tensor], int, int]


class _Written(NamedTuple):
    """How often something was written to, and on a device what passes when the last of it was there."""

    num_writes: int
    ready: torch.Event | None


@dataclass
class ChangeCount:
    """What of an engine has changed; the same on every rank at the same place of the program.

    Attributes:
        begun: how many steps and edits have begun.
        num_backwards: that have left gradients.
        gradients: that the last one has left, by the ids of their rows, until a step or an edit of parameters begins.
        written: by operators into these gradients since, which torch does not count on rows; by the ids of the rows.
        num_writes: of them all.
    """

    begun: int = 0
    num_backwards: int = 0
    gradients: dict[int, _Left] = field(default_factory=dict)
    written: dict[int, _Written] = field(default_factory=dict)
    num_writes: int = 0
    _begun_before: int = -1
    _ready: torch.Event | None = None

    def note_gradients(self, numbers: Sequence[int], rows: Sequence[Tensor], device: torch.device) -> None:
        """A backward of all ranks has ended.

        Args:
            numbers: of the parameters that have gradients.
            rows: this rank's of each gradient.
            device: on whose current stream they are there.
        """
        version_of = _version_of if any(map(Tensor.is_inference, rows)) else operator.attrgetter("_version")
        left = zip(map(weakref.ref, rows), numbers, map(version_of, rows), strict=True)  # no Python a parameter
        self.gradients = dict(zip(map(id, rows), left, strict=True))
        self.written, self._ready, self._begun_before = {}, _event(device), self.begun
        self.num_backwards += 1

    def left(self, rows: Tensor) -> _Left | None:
        """What these rows are of what the last backward has left."""
        found = self.gradients.get(id(rows)) if self._begun_before == self.begun else None
        return found if found is not None and found[0]() is rows else None

    def written_to(self, rows: Tensor) -> _Written:
        """How a gradient was written to since the backward."""
        return self.written.get(id(rows), _Written(0, self._ready))


def _version_of(rows: Tensor) -> int:
    return 0 if rows.is_inference() else rows._version


def _event(device: torch.device) -> torch.Event | None:
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event


class NameOfGradient(NamedTuple):
    """Which gradient something is, and how it came to be; the same on every rank that has it.

    Attributes:
        engine: the number of the engine.
        number: of the parameter.
        num_backwards: that the engine has had.
        num_writes: into it, since the last of them.
    """

    engine: int
    number: int
    num_backwards: int
    num_writes: int


class Gradient(NamedTuple):
    """This rank's rows of a gradient, and on a device what passes when they are there."""

    rows: Tensor
    layout: RowLayout
    ready: torch.Event | None


class Served(Protocol):
    """What has parameters at rest: an engine."""

    @property
    def is_at_rest(self) -> bool:
        """Whether no forward and no backward is under way."""

    @property
    def changes(self) -> ChangeCount:
        """Counts its steps and edits; kept by those who serve it, since it may end earlier on one rank than on another."""

    def number_of(self, param: Tensor) -> int | None:
        """Which of its parameters this is, if it is one."""

    @property
    def settled(self) -> torch.Event | None:
        """On a device, passes when the last step or edit has been done, or the model is sharded; None on the CPU."""

    @property
    def num_parameters(self) -> int:
        """How many they are."""

    def rows_of(self, number: int) -> tuple[Tensor, RowLayout]:
        """This rank's rows of a parameter, and how they are cut."""

    def gradient_of(self, number: int) -> tuple[Tensor, RowLayout] | None:
        """This rank's rows of a parameter's gradient, at rest, and how they are cut."""


@functools.cache
def stream_aside(device: torch.device) -> torch.Stream:
    """Where a rank answers others: always the same. Of many, one would be an exchange's own, which may wait for the asker."""
    return torch.Stream(device)


class Offers:
    """What this rank's peers may ask for, and under which names; all ranks offer the same."""

    def __init__(self) -> None:
        self._engines: list[Lasting[Served]] = []
        self._changes: list[ChangeCount] = []  # of all of them, those that are gone too
        self._offers: dict[str, Callable[[Any], tuple[Tensor, RowLayout]]] = {_PARAMETERS: self.parameter}
        self._searches: dict[str, Callable[[Tensor], object]] = {_PARAMETERS: self.number_of}
        self._questions: dict[str, Callable[[Any], object]] = {}
        self._outliving: set[str] = set()

    def add(self, engine: Served) -> Lasting[Served]:
        """Let the parameters of an engine be asked for; all ranks add engines in the same order. Returns what refers to it."""
        self._engines.append(Lasting(engine))
        self._changes.append(engine.changes)
        return self._engines[-1]

    def offer(
        self,
        key: str,
        give: Callable[[Any], tuple[Tensor, RowLayout]],
        search: Callable[[Tensor], object] | None = None,
        question: Callable[[Any], object] | None = None,
        outlives_edits: bool = False,
    ) -> None:
        """Let other tensors be asked for, which change by steps only.

        Args:
            key: of their kind.
            give: takes which of them it is, or the question; returns this rank's part.
            search: takes a tensor at rest; returns which of them it is, the same on every rank, or None. None: by whoever asks.
            question: takes which of them it is; returns what `give` gets instead. None: the same.
            outlives_edits: what is given is right whatever the asker has changed alone since.
        """
        self._offers[key] = give
        if outlives_edits:
            self._outliving.add(key)
        if search is not None:
            self._searches[key] = search
        if question is not None:
            self._questions[key] = question

    def find(self, tensor: Tensor) -> tuple[str, object] | None:
        """Under which key a tensor is offered, and which it is there; the same on every rank. None: it cannot be asked for."""
        for key in sorted(self._searches, key=self._outliving.__contains__):  # what is known by its place comes first
            item = self._searches[key](tensor)
            if item is not None:
                return key, item
        return None

    def number_of(self, param: Tensor) -> tuple[int, int] | None:
        """The number of a parameter's engine, and its own; the same on every rank. None: it is no engine's."""
        for place, reference in enumerate(self._engines):
            engine = reference()
            number = None if engine is None else engine.number_of(param)
            if number is not None:
                return place, number
        return None

    def numbers(self) -> Iterator[tuple[int, int]]:
        """As `number_of`, of all parameters that there are now."""
        for place, reference in enumerate(self._engines):
            engine = reference()
            if engine is not None:
                yield from ((place, number) for number in range(engine.num_parameters))

    def gradient_with(self, rows: Tensor) -> NameOfGradient | None:
        """Which gradient has these rows, as the last backward has left it; None: no such one."""
        for place, changes in enumerate(self._changes):
            left = changes.left(rows)
            engine = None if left is None else self._engines[place]()
            if left is None or engine is None:
                continue
            _, number, version = left
            found = engine.gradient_of(number)
            if found is not None and found[0] is rows:
                num_writes = changes.written_to(rows).num_writes + _version_of(rows) - version
                return NameOfGradient(place, number, changes.num_backwards, num_writes)
        return None

    def gradient(self, name: NameOfGradient) -> Gradient | None:
        """The gradient of this name, if there is one now."""
        engine = self._engines[name.engine]()
        found = None if engine is None else engine.gradient_of(name.number)
        if found is None or self.gradient_with(found[0]) != name:
            return None
        return Gradient(*found, self._changes[name.engine].written_to(found[0]).ready)

    def names_of_gradients(self) -> list[NameOfGradient]:
        """Of all that there are now."""
        rows = [reference() for changes in self._changes for reference, *_ in list(changes.gradients.values())]
        return [name for each in rows if each is not None and (name := self.gradient_with(each)) is not None]

    @property
    def writes(self) -> object:
        """Changes with every step, edit and backward, and when an operator writes into a gradient."""
        return [(each.begun, each.num_backwards, each.num_writes) for each in self._changes]

    def before_write(self, rows: Tensor) -> None:
        """These rows, perhaps of a gradient, are about to be written to."""
        for changes in self._changes:
            if changes.left(rows) is not None:
                num_writes, ready = changes.written_to(rows)
                changes.written[id(rows)] = _Written(num_writes + 1, ready)
                changes.num_writes += 1

    def after_write(self, rows: Tensor) -> None:
        """What writes to these rows has been begun, on the current stream of a device."""
        for changes in self._changes if rows.device.type != "cpu" else ():
            if changes.left(rows) is not None:
                changes.written[id(rows)] = _Written(changes.written_to(rows).num_writes, _event(rows.device))

    def given(self, key: str, item: object) -> tuple[Tensor, RowLayout]:
        """This rank's part of what is offered under a key.

        Raises:
            CollectiveError: it offers no such thing.
        """
        if key not in self._offers:
            raise CollectiveError("it has no such value: let all ranks compute it, and keep it")
        return self._offers[key](item)

    def question(self, key: str, item: object) -> object:
        """What is sent to ask for something."""
        return self._questions[key](item) if key in self._questions else item

    def outlives_edits(self, key: str) -> bool:
        """Whether what is given under a key is right whatever the asker has changed alone since."""
        return key in self._outliving

    def parameter(self, found: tuple[int, int]) -> tuple[Tensor, RowLayout]:
        """This rank's rows of a parameter, by its number."""
        place, number = found
        engine = self._engines[place]()
        if engine is None:
            raise CollectiveError(GONE)
        return engine.rows_of(number)

    @property
    def has_lost_models(self) -> bool:
        """Whether this rank has dropped a model that it had."""
        return len(self._live) < len(self._engines)

    @property
    def are_at_rest(self) -> bool:
        """Whether no engine has a forward or a backward under way."""
        return all(engine.is_at_rest for engine in self._live)

    @property
    def version(self) -> int:
        """How many steps and edits of all engines have begun."""
        return sum(each.begun for each in self._changes)

    @property
    def _live(self) -> list[Served]:
        return [engine for each in self._engines if (engine := each()) is not None]

    def beside(self, device: torch.device) -> AbstractContextManager[object]:
        """On a device, work that waits for other ranks may be queued behind the last step: that is passed by while active."""
        settled = [engine.settled for engine in self._live if engine.settled is not None]
        if device.type == "cpu" or not settled:
            return nullcontext()
        aside = stream_aside(device)
        for event in settled:
            aside.wait_event(event)
        return aside
