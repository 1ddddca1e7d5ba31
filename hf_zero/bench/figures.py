"""Medians, ratios taken round by round, and their intervals. Pure arithmetic."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_RESAMPLES = 10_000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """The median of some values, with the least and the greatest."""

    median: float
    least: float
    greatest: float

    def show(self, places: int = 0) -> str:
        """All three, with `places` digits after the point."""
        return f"{self.median:.{places}f} ({self.least:.{places}f}-{self.greatest:.{places}f})"

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Ratio:
    """The median of ratios, one per round, with its 95% bootstrap interval.

    Source: Efron, "Bootstrap methods: another look at the jackknife" (1979); the percentile interval.
    """

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """ "ahead" or "behind" if the interval excludes 1, and empty otherwise."""
        return "ahead" if self.high < 1 else "behind" if self.low > 1 else ""

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}] {self.verdict}".rstrip()


def ratio(values: Sequence[float], others: Sequence[float]) -> Ratio:
    """How `values` compare with `others`, round by round.

    Args:
        values: one per round.
        others: of the same rounds, in the same order.
    """
    return ratio_of([value / other for value, other in zip(values, others, strict=True)])


def ratio_of(ratios: Sequence[float]) -> Ratio:
    """The median of at least one ratio, and its interval."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    tail = (1 - _CONFIDENCE) / 2
    low, high = medians[int(tail * _RESAMPLES)], medians[int((1 - tail) * _RESAMPLES) - 1]
    return Ratio(statistics.median(ratios), low, high)
