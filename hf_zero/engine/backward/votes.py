"""What the ranks tell each other at the end of a backward, as numbers: records with a bitmap of the parameters used."""

from __future__ import annotations

import zlib
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields
from typing import Generic, Self, TypeVar

from hf_zero.comm.agreements import bits, words
from hf_zero.comm.collectives import Collectives
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.errors import CollectiveError, PartitionError


@dataclass(frozen=True)
class Report:
    """What one rank says at the end of a backward. Both ways of reducing add fields of their own, numbers with a default.

    Attributes:
        used: a bitmap: bit i stands for the i-th trainable parameter.
        num_steps: that its optimizer has taken.
        trained: fingerprint of what it trains.
        stepped: fingerprint of what its optimizers have stepped with, see [Note: hyperparameters].
    """

    used: int = 0
    num_steps: int = 0
    trained: int = 0
    stepped: int = 0

    def pack(self, num_parameters: int) -> list[int]:
        """The numbers that are sent: all fields, and at the end the bitmap.

        Args:
            num_parameters: of the model, trainable or not: what is frozen on some ranks only may not change the length.
        """
        return [*(int(getattr(self, field.name)) for field in fields(self)[1:]), *words(self.used, num_parameters)]

    @classmethod
    def unpack(cls, row: Sequence[int]) -> Self:
        """The record of which `pack` has made `row`."""
        _, *others = fields(cls)
        numbers = {
            field.name: type(getattr(cls, field.name))(number) for field, number in zip(others, row, strict=False)
        }
        return cls(used=bits(row[len(others) :]), **numbers)

    def agree(self, ranks: Collectives, num_parameters: int) -> Reports[Self]:
        """What all ranks say.

        Raises:
            CollectiveError: they are in different steps.
            PartitionError: they train other parameters.
        """
        found = ranks.combine(self.pack(num_parameters), "the end of backward")
        start = len(fields(self)) - 1
        reports = Reports(*(self.unpack(row[:start] + found.any_bits[start:]) for row in (found.lowest, found.highest)))
        if not reports.are_alike("num_steps"):
            counts = [count for (count,) in ranks.agree([self.num_steps], "the number of steps")]
            raise CollectiveError(
                f"the ranks have taken different numbers of optimizer steps ({counts}, by rank), so the gradients of different "
                "steps have met: on some rank a backward reached no trainable parameter, or did not run. Run one "
                "on all ranks before each step"
            )
        if not reports.are_alike("trained"):
            raise PartitionError(
                "the ranks do not train the same parameters: requires_grad must be set alike on all of them"
            )
        return reports


R = TypeVar("R", bound=Report)


@dataclass(frozen=True)
class Reports(Generic[R]):
    """What all ranks say together: its cost grows with the doublings of their number.

    Attributes:
        lowest: of each number the lowest, so that a word is true that is true on all ranks; `used` by any.
        highest: of each number the highest, so that a word is true that is true on any rank; `used` by any.
    """

    lowest: R
    highest: R

    def are_alike(self, name: str) -> bool:
        """Whether all ranks say the same of one field."""
        return bool(getattr(self.lowest, name) == getattr(self.highest, name))


def fingerprint(trainable: Sequence[ZeroParameter]) -> int:
    """A number that tells apart which parameters are trainable."""
    return zlib.crc32("\n".join([p.name for p in trainable]).encode())


def bitmap(parameters: Sequence[ZeroParameter], chosen: Container[ZeroParameter]) -> int:
    """Those of `parameters` that are chosen."""
    return sum([1 << position for position, p in enumerate(parameters) if p in chosen])


def named_by(bitmap: int, parameters: Sequence[ZeroParameter]) -> list[ZeroParameter]:
    """Those of `parameters` whose bit is set."""
    return [p for position, p in enumerate(parameters) if bitmap >> position & 1]
