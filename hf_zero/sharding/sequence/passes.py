"""Forwards that are under way: over slices of sequences, or over whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from hf_zero.engine.modules.sequence import Slice, Swap

_under_way: list[_UnderWay] = []  # the innermost last
_joins: list[bool] = []


class Pass:
    """One forward of a model over slices.

    Args:
        swap: among the ranks of the group.
        tokens: this rank's slice.
        positions: of all tokens, padded; [1 or batch, tokens].

    Attributes:
        num_calls: of attention.
    """

    def __init__(self, swap: Swap, tokens: Slice, positions: Tensor) -> None:
        self.swap, self.tokens, self.positions = swap, tokens, positions
        self.num_calls = 0


@dataclass(frozen=True)
class _UnderWay:
    """A forward.

    Attributes:
        owner: who has begun it.
        over_slices: None where sequences are whole.
    """

    owner: object
    over_slices: Pass | None


@contextmanager
def whole_sequences() -> Iterator[None]:
    """Within: models compute whole sequences on every rank."""
    owner = object()
    begin(owner, None)
    try:
        yield
    finally:
        end(owner)


def are_whole() -> bool:
    """Whether models compute whole sequences just now, within `whole_sequences`."""
    return bool(_under_way) and _under_way[-1].over_slices is None


@contextmanager
def joined_outputs() -> Iterator[None]:
    """Within: models that compute slices hand out logits and hidden states of whole sequences, which take their memory."""
    _joins.append(True)
    try:
        yield
    finally:
        _joins.pop()


def are_joined() -> bool:
    """Whether outputs are joined, within `joined_outputs`."""
    return bool(_joins)


def begin(owner: object, one: Pass | None) -> None:
    """A forward begins; one of the same owner that is still under way was interrupted, and never came to its end."""
    end(owner)
    _under_way.append(_UnderWay(owner, one))


def end(owner: object) -> Pass | None:
    """The forward of an owner is over, if it has begun."""
    places = [place for place, each in enumerate(_under_way) if each.owner is owner]
    if not places:
        return None
    one = _under_way[places[0]].over_slices
    del _under_way[places[0] :]
    return one


def are_any() -> bool:
    """Whether a forward of a model that can be sliced is under way."""
    return bool(_under_way)


def sliced() -> Pass | None:
    """The innermost forward, if it is over slices."""
    return _under_way[-1].over_slices if _under_way else None
