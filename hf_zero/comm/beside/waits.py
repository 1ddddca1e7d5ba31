"""What this process waits for: read by a thread that finds ranks which wait for each other for good, see `crossed`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

ADVICE = (
    "all ranks must run the same units in the same order, with the same parameters trainable (requires_grad). Where some ranks "
    "have nothing for a part of a model (a batch without an image), let that part stay whole (units: {whole: [its name]}), or "
    "use stage 2"
)
FEWER = (
    "every rank must make the same calls in the same order: look for a rank that has fewer batches, or a call that only some "
    "ranks make"
)
ORDERED_KINDS = ("gather", "reduce_scatter", "all_reduce", "reduce")  # each begun in the same order on all ranks


@dataclass(frozen=True)
class Place:
    """One exchange among all of its ranks: they number those of a kind alike.

    Attributes:
        group: the name of the ranks' group.
        kind: of exchange.
        number: of those of this kind that a rank has begun in the group, with this one.
        unit: what travels; "" of one that the program makes by torch.
    """

    group: str
    kind: str
    number: int
    unit: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.unit!r}" if self.unit else self.kind


class Description(str):
    """What errors call an exchange, and what its place is made of: there are many, and hardly one is ever asked for."""

    parts: tuple[str, str, int, str]


class Waiting(Protocol):
    """An exchange that is waited for."""

    @property
    def place(self) -> Place | None:
        """Which it is."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Among which ranks of the program."""

    @property
    def break_off(self) -> Callable[[], None] | None:
        """Lets the wait fail; None if it cannot."""


by_thread: dict[int, Waiting] = {}
"""What each thread waits for now: set by the exchange itself, which costs no call."""

_verdicts: dict[str, str] = {}  # by group


def of_program() -> Waiting | None:
    """What the program's own thread waits for."""
    ident = threading.main_thread().ident
    return None if ident is None else by_thread.get(ident)


def tell(group: str, verdict: str) -> None:
    """Let waits of a group, which are about to be broken off, say this."""
    _verdicts[group] = verdict


def forget(group: str) -> None:
    """A new group has this name, which one of an earlier program may have had."""
    _verdicts.pop(group, None)


def verdict_on(place: Place | None) -> str | None:
    """What has been told of the ranks of an exchange."""
    return None if place is None else _verdicts.get(place.group)
