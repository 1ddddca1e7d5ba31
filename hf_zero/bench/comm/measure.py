"""How fast an implementation of `Collectives` is on these ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hf_zero.comm.collectives import Collectives, Rows
from hf_zero.layout import RowLayout

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


def measure(collectives: Collectives, num_bytes: int, repeats: int) -> Timing:
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
