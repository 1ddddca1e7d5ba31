"""What the ranks tell each other at the end of a backward, as numbers: records with a bitmap of the parameters used."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Self

from hf_zero.comm.collectives import Collectives
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.errors import CollectiveError, PartitionError

_BITS = 62  # of a bitmap that are sent in one int64


@dataclass(frozen=True)
class Report:
    """What one rank says at the end of a backward. Both ways of reducing add fields of their own, numbers with a default.

    Attributes:
        used: a bitmap: bit i stands for the i-th trainable parameter.
        num_steps: that its optimizer has taken.
        trained: fingerprint of what it trains.
    """

    used: int = 0
    num_steps: int = 0
    trained: int = 0

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

    def agree(self, ranks: Collectives, num_parameters: int) -> list[Self]:
        """What all ranks say, in their order.

        Raises:
            CollectiveError: they are in different steps.
            PartitionError: they train other parameters.
        """
        reports = [self.unpack(row) for row in ranks.agree(self.pack(num_parameters), "the end of backward")]
        counts = [report.num_steps for report in reports]
        if len(set(counts)) > 1:
            raise CollectiveError(
                f"the ranks have taken different numbers of optimizer steps ({counts}, by rank), so the gradients of different "
                "steps have met: on some rank a backward reached no trainable parameter, or did not run"
            )
        if len({report.trained for report in reports}) > 1:
            raise PartitionError(
                "the ranks do not train the same parameters: requires_grad must be set alike on all of them"
            )
        return reports


def words(bitmap: int, count: int) -> list[int]:
    """A bitmap of `count` bits as int64 values."""
    return [bitmap >> start & (1 << _BITS) - 1 for start in range(0, count, _BITS)]


def bits(of_words: Iterable[int]) -> int:
    """The bitmap that `words` has made of it."""
    return sum(word << place * _BITS for place, word in enumerate(of_words))


def fingerprint(trainable: Sequence[ZeroParameter]) -> int:
    """A number that tells apart which parameters are trainable."""
    return zlib.crc32("\n".join(p.name for p in trainable).encode())


def bitmap(parameters: Sequence[ZeroParameter], chosen: Container[ZeroParameter]) -> int:
    """Those of `parameters` that are chosen."""
    return sum(1 << position for position, p in enumerate(parameters) if p in chosen)


def named_by_any(parameters: Sequence[ZeroParameter], bitmaps: Iterable[int]) -> list[ZeroParameter]:
    """Those of `parameters` whose bit any rank has set."""
    found = 0
    for each in bitmaps:
        found |= each
    return [p for position, p in enumerate(parameters) if found >> position & 1]
