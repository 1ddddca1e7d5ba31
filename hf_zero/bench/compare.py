"""Figures of several engines side by side, and their ratios round by round."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hf_zero.bench.figures import Spread, ratio_of
from hf_zero.tables import aligned

# Engine -> rounds -> figure -> value; None if it could not be measured.
Round = Mapping[str, float | None]
Measured = Mapping[str, Sequence[Round]]


@dataclass(frozen=True)
class Figure:
    """A column of a table; less is better.

    Attributes:
        key: in a round.
        heading: with the unit.
        divisor: of the value, for this unit.
        places: after the point.
    """

    key: str
    heading: str
    divisor: float = 1.0
    places: int = 3


def worst(ranks: Sequence[Round], keys: Collection[str]) -> dict[str, float | None]:
    """For each key, the greatest value of any rank in one round."""
    values = {key: [value for rank in ranks if (value := rank[key]) is not None] for key in keys}
    return {key: max(of_ranks, default=None) for key, of_ranks in values.items()}


def ratios(found: Measured, engine: str, key: str, others: Collection[str]) -> list[float]:
    """A figure of `engine` over the least of `others` in the same round; rounds that lack either are left out."""
    result = []
    for number, mine in enumerate(found[engine]):
        theirs = [value for other in others if (value := found[other][number][key]) is not None]
        own = mine[key]
        if own is not None and theirs and min(theirs) > 0:
            result.append(own / min(theirs))
    return result


def others_than(found: Measured, engine: str) -> list[str]:
    """All engines but this one."""
    return [other for other in found if other != engine]


def table(found: Measured, figures: Sequence[Figure], invalid: Collection[str] = ()) -> str:
    """Medians over the rounds, with the least and the greatest; then the ratios to `plain` and to the best other engine.

    Ratios have 95% bootstrap intervals, and "ahead" or "behind" if these exclude 1.

    Args:
        invalid: engines whose results were wrong, which are marked.
    """
    names = {engine: f"{engine} INVALID" if engine in invalid else engine for engine in found}
    rows = [["", *(figure.heading for figure in figures)]]
    for engine, rounds in found.items():
        values = [[value / f.divisor for each in rounds if (value := each[f.key]) is not None] for f in figures]
        rows.append([names[engine], *(_cell(of_f, f.places) for of_f, f in zip(values, figures, strict=True))])
    if "plain" in found:
        rows.append(["ratio to plain"])
        for engine in others_than(found, "plain"):
            rows.append([names[engine], *(_ratio(ratios(found, engine, f.key, ["plain"])) for f in figures)])
    if len(found) > 2:
        rows.append(["ratio to the best other engine of the round"])
        for engine in found:
            others = others_than(found, engine)
            rows.append([names[engine], *(_ratio(ratios(found, engine, f.key, others)) for f in figures)])
    return aligned(rows, "<>")


def _cell(values: Sequence[float], places: int) -> str:
    return Spread.of(values).show(places) if values else "-"


def _ratio(ratios: Sequence[float]) -> str:
    return str(ratio_of(ratios)) if ratios else "-"
