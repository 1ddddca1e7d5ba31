"""What one rank can be asked for by another: parameters at rest, and what is offered under keys of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_zero.engine.ranks.leaving import Lasting
from hf_zero.errors import CollectiveError
from hf_zero.layout import RowLayout

_PARAMETERS = "parameters"

GONE = (
    "the model does not exist there any more: keep it until rank 0 has saved (`dist.barrier()`), or let all ranks save"
)


@dataclass
class ChangeCount:
    """How many steps and edits of an engine have begun; the same on every rank at the same place of the program."""

    begun: int = 0


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
