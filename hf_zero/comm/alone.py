"""One rank: what all exchanges come to where there is nobody to exchange with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from hf_zero.comm.agreements import Combined, Mail
from hf_zero.comm.collectives import Collectives, Rows, divide
from hf_zero.comm.exchange import Exchange, InFlight
from hf_zero.comm.ledger import Ledger, LedgerLine


class AloneCollectives(Collectives):
    """Exchanges of a single rank: they move nothing, and the ledger stays empty.

    Args:
        number: its number in the program.
        device: where its tensors live.
        ledger: of the model.
    """

    name = "alone"

    def __init__(self, number: int, device: torch.device, ledger: Ledger) -> None:
        self.device, self.ledger = device, ledger
        self.ranks, self.rank, self.num_ranks = (number,), 0, 1
        self.in_flight = InFlight()
        self.backend, self.coalesces, self.reason, self.sequence_hash = "one process", False, "", 0

    @property
    def mesh(self) -> NoReturn:  # type: ignore[override]
        """There is none: one rank holds plain tensors."""
        raise AssertionError("one rank has no mesh")

    def gather(self, items: Sequence[Rows], unit: str) -> Exchange:
        """See `Collectives.gather`."""
        return _nothing_to_wait_for(f"gather of {unit!r}")

    def reduce_scatter(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str, divisor: int = 1) -> Exchange:
        """See `Collectives.reduce_scatter`."""
        for item, output in zip(items, outputs, strict=True):
            output.copy_(item.flat)
        divide(outputs, divisor)
        return _nothing_to_wait_for(f"reduce_scatter of {unit!r}")

    def all_reduce(self, tensors: Sequence[Tensor], unit: str, divisor: int = 1) -> Exchange:
        """See `Collectives.all_reduce`."""
        divide(tensors, divisor)
        return _nothing_to_wait_for(f"all_reduce of {unit!r}")

    def broadcast(self, tensor: Tensor, source: int, unit: str) -> None:
        """See `Collectives.broadcast`."""

    def agree(self, values: Sequence[int], label: str, timeout_s: float | None = None) -> list[list[int]]:
        """See `Collectives.agree`."""
        return [list(values)]

    def combine(self, values: Sequence[int], label: str, timeout_s: float | None = None) -> Combined:
        """See `Collectives.combine`."""
        return Combined(list(values), list(values), list(values))

    def mail(self, kind: str, unit: str, timeout_s: float | None = None) -> Mail:
        """See `Collectives.mail`."""
        return Mail(self, f"{kind} of {unit!r}", 0, 0.0, LedgerLine())

    def break_off(self) -> None:
        """See `Collectives.break_off`."""


def _nothing_to_wait_for(description: str) -> Exchange:
    return Exchange(description, 0.0)
