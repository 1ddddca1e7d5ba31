"""A second copy of a unit's rows among the ranks of a host, so that what has not changed is gathered without crossing hosts.

[Note: second copy] A unit that was gathered over all ranks leaves, on each rank of a host, the part of it that the host's
ranks then cut among themselves. Until the unit's rows change on some rank (`Unit.epoch`, which all ranks count alike), every
gather of it stays within the host: that of the backward, and those of evaluation and of further micro-batches. The bits are
those that the first gather brought.

Source: ZeRO++ (arXiv:2306.10209), hpZ, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_zero.comm.collectives import Collectives, Rows
from hf_zero.comm.exchange import Exchange
from hf_zero.layout import RowLayout


class SecondCopy:
    """The second copy of one unit.

    Args:
        items: the unit's memory, parameter by parameter.
        nearby: exchanges among the ranks of this host, whose number divides that of all ranks.
        unit: for the ledger and for errors.

    Attributes:
        epoch: the unit's, when it was last copied; -1: never.
    """

    def __init__(self, items: Sequence[Rows], nearby: Collectives, unit: str) -> None:
        self.epoch = -1
        self._nearby, self._unit = nearby, f"{unit} (second copy)"
        ranks = nearby.num_ranks
        self._items = [Rows(item.flat, RowLayout((item.layout.padded_numel,), ranks)) for item in items]
        self._parts: list[Tensor] = []

    def keep(self, epoch: int) -> None:
        """Copy this rank's part of the unit, which is whole."""
        self.epoch = -1
        parts = [item.layout.elements_of(item.flat, self._nearby.rank) for item in self._items]
        if not self._parts:
            with torch.inference_mode(False):
                self._parts = [torch.empty_like(part) for part in parts]
        for kept, part in zip(self._parts, parts, strict=True):
            kept.copy_(part)
        self.epoch = epoch

    def gather(self) -> Exchange:
        """Begin to make the unit whole again from the copies of this host."""
        for kept, item in zip(self._parts, self._items, strict=True):
            item.layout.elements_of(item.flat, self._nearby.rank).copy_(kept)
        return self._nearby.gather(self._items, self._unit)
