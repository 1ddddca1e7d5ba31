"""How fast each implementation of `Collectives` is on the ranks that will use it, and which one `auto` takes."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_zero.comm.collectives import Collectives, Rows
from hf_zero.comm.groups import default_group
from hf_zero.layout import RowLayout

UNIT_BYTES = (2**20, 8 * 2**20)  # a small and a large unit
_REPEATS = 3
_FAR_BEHIND = 2.0  # a candidate that takes more than this times the least time is not measured at the next size
# Training has several units on their way while all cores compute, which costs these more than one exchange at a time shows.
_HANDICAPS = {"native": 1.25}
_UNIT = "a measurement"


@dataclass(frozen=True)
class Timing:
    """Seconds of one exchange: the least of several on each rank, and of these the slowest rank's.

    Attributes:
        num_bytes: size of the whole tensor, fp32.
        gather: every rank gets the others' rows.
        reduce_scatter: every rank gets the sum of its own rows.
    """

    num_bytes: int
    gather: float
    reduce_scatter: float


def measure(collectives: Collectives, num_bytes: int, repeats: int = _REPEATS) -> Timing:
    """Time the two exchanges of training. All ranks call it together and get the same figures.

    Args:
        collectives: what to time; its ledger counts the exchanges.
        num_bytes: size of the whole tensor.
        repeats: timed runs, after one to warm up.
    """
    numel = num_bytes // 4 // collectives.num_ranks * collectives.num_ranks
    layout = RowLayout((numel,), collectives.num_ranks)
    memory = collectives.allocate(4 * numel, _UNIT)
    whole = torch.empty(0, device=collectives.device).set_(memory)
    gradient, rows = torch.ones_like(whole), whole.new_empty(layout.local_numel(collectives.rank))
    best = [float("inf"), float("inf")]
    for _ in range(1 + repeats):
        collectives.meet(_UNIT)
        start = time.perf_counter()
        collectives.gather([Rows(whole, layout)], _UNIT).wait()
        middle = time.perf_counter()
        collectives.reduce_scatter([Rows(gradient, layout)], [rows], _UNIT).wait()
        collectives.settle()
        best = [min(best[0], middle - start), min(best[1], time.perf_counter() - middle)]
    nanoseconds = collectives.agree([round(1e9 * seconds) for seconds in best], _UNIT)
    gather, reduce_scatter = (max(column) / 1e9 for column in zip(*nanoseconds, strict=True))
    return Timing(4 * numel, gather, reduce_scatter)


@dataclass(frozen=True)
class _Choice:
    group: weakref.ref[object]
    chosen: str
    reason: str


_choices: dict[tuple[tuple[int, ...], tuple[str, ...]], _Choice] = {}  # by ranks and names of candidates


def fastest(candidates: Sequence[Collectives]) -> Collectives:
    """The candidate that exchanges units in the least time, the same on every rank; `native` only if it is clearly ahead.

    Only candidates that are not far behind on small units are measured on large ones. This happens once for the same ranks
    and candidates; their ledgers are empty again afterwards.
    """
    if len(candidates) == 1:
        return candidates[0]
    key = (candidates[0].ranks, tuple(each.name for each in candidates))
    choice = _choices.get(key)
    if choice is None or choice.group() is not default_group():
        choice = _choices[key] = _Choice(weakref.ref(default_group()), *_compare(candidates))
    chosen = next(each for each in candidates if each.name == choice.chosen)
    chosen.reason = choice.reason
    return chosen


def _compare(candidates: Sequence[Collectives]) -> tuple[str, str]:
    """The name of the fastest, and the times that show it."""
    remaining, reason = list(candidates), "auto"
    for num_bytes in UNIT_BYTES:
        seconds = {each.name: _seconds(each, num_bytes) for each in remaining}
        remaining.sort(key=lambda each: seconds[each.name] * _HANDICAPS.get(each.name, 1.0))
        times = ", ".join(f"{each.name} {seconds[each.name] * 1e3:.1f}" for each in remaining)
        reason += f"; ms for {num_bytes / 2**20:.0f} MiB: {times}"
        least = min(seconds.values())
        remaining = [each for each in remaining if seconds[each.name] <= _FAR_BEHIND * least]
        if len(remaining) == 1:
            break
    return remaining[0].name, reason


def _seconds(candidate: Collectives, num_bytes: int) -> float:
    timing = measure(candidate, num_bytes)
    candidate.ledger.reset()
    return timing.gather + timing.reduce_scatter
