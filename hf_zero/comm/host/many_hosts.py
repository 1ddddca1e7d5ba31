"""Exchanges across several hosts: through memory inside each host, over the network between hosts.

[Note: several hosts] Every host has the same number of ranks. The k-th ranks of all hosts form a *column*, within which bytes
cross the network. Each rank fetches its column's rows into the memory of its host, so that each row reaches a host once.
Gradients are first added up inside each host, so that the network carries sums. A host keeps whole parameters in every stage,
as the secondary partition of ZeRO++ (arXiv:2306.10209) does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from hf_zero.comm.collectives import Rows
from hf_zero.comm.exchange import Exchange, Work
from hf_zero.comm.groups import Axis
from hf_zero.comm.host.board import Board
from hf_zero.comm.host.one_host import HostMemory
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.pairwise import PairwiseCollectives, sum_in_order
from hf_zero.errors import CollectiveError


class _Column(PairwiseCollectives):
    """Exchanges with some of the ranks only."""

    def __init__(self, peers: Sequence[int], axis: Axis) -> None:
        super().__init__(axis)
        self._others = list(peers)

    def _peers(self) -> list[int]:
        return self._others

    def _tags(self, kind: str, unit: str, count: int) -> list[int]:
        return super()._tags(kind, f"{unit} of a column", count)  # never those of exchanges over all ranks


class SeveralHostsCollectives(HostMemory):
    """Ranks of several hosts, see [Note: several hosts].

    [Note: couriers] An exchange has two parts, one over the network and one within the host; the second waits for other ranks.
    If `wait()` ran them, a rank would depend on when the others call theirs, which may be never. So each rank has two threads,
    one for gathers and one for reductions, that work through the exchanges in order as soon as they are made.

    Args:
        board: of the ranks of this host.
        hosts: the ranks of each host, the same number on each.
        axis: the ranks of all hosts.
    """

    def __init__(self, board: Board, hosts: Sequence[Sequence[int]], axis: Axis) -> None:
        super().__init__(board, axis)
        place = self._mates.index(self.rank)
        self._column = [ranks[place] for ranks in hosts]
        self._others = [rank for rank in self._column if rank != self.rank]
        self._to_column = _Column(self._others, replace(axis, ledger=Ledger()))  # this class counts in its own ledger
        self._to_all = PairwiseCollectives(replace(axis, ledger=Ledger()))
        self._gathers, self._reductions = _Courier(), _Courier()

    def gather(self, items: Sequence[Rows], unit: str) -> Exchange:
        """See `Collectives.gather`."""
        shared = [item for item in items if self._is_shared(item.flat)]
        private = [item for item in items if not self._is_shared(item.flat)]
        description = self._describe("gather", unit)
        self._to_column.timeout_s = self._to_all.timeout_s = self.timeout_s
        fetched = self._to_column.gather(shared, unit)
        rest = self._to_all.gather(private, unit)
        sources = [(shared, self._others), (private, self._peers())]
        received = sum(
            item.layout.local_numel(peer) * item.flat.itemsize
            for chosen, peers in sources
            for item in chosen
            for peer in peers
        )

        def complete() -> None:
            fetched.wait()
            lane = self._board.lanes["gather"]
            posted = lane.post(f"gather of {unit!r}", (), description, self.timeout_s, _nothing)
            lane.complete(posted, self.timeout_s)
            rest.wait()

        job = self._gathers.submit(complete)
        return Exchange(description, self.timeout_s, (), self.ledger.add("gather", unit, received), job.result, items)

    def reduce_scatter(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str, divisor: int = 1) -> Exchange:
        """See `Collectives.reduce_scatter`.

        A host's sums for a column take the memory of the gradients in the outputs' dtype, divided by the ranks per host. What
        the other hosts send takes as much again, less this rank's own rows.
        """
        description, tags = self._describe("reduce_scatter", unit), self._tags("reduce_scatter", unit, len(items))
        addresses = [item.flat.data_ptr() for item in items]
        sums = {owner: _Messages(items, outputs, owner) for owner in self._column}
        arrivals = {peer: _Messages(items, outputs, self.rank) for peer in self._others}

        def add_up_host(numbers: dict[int, array[int]]) -> None:
            for owner, messages in sums.items():
                self._sum_rows(items, owner, messages.rows, 1, numbers)

        def complete() -> None:
            lane = self._board.lanes["reduce_scatter"]
            label = f"reduce_scatter of {unit!r}"
            lane.complete(lane.post(label, addresses, description, self.timeout_s, add_up_host, items), self.timeout_s)
            parts: list[Work] = []
            for peer, arrival in arrivals.items():  # a message per dtype, a tag per item: some tags stay unused
                for buffer, to_peer, tag in zip(arrival.buffers, sums[peer].buffers, tags, strict=False):
                    if buffer.numel():
                        parts.append(self._receive(description, buffer, peer, tag))
                    if to_peer.numel():
                        parts.append(self._send(description, to_peer, peer, tag))
            Exchange(description, self.timeout_s, parts, keep=sums).wait()
            by_host = [arrivals.get(rank, sums[self.rank]).rows for rank in self._column]
            for output, *terms in zip(outputs, *by_host, strict=True):
                sum_in_order(output, terms, divisor)

        from_mates = (self.num_sharing - 1) * sum(
            item.layout.local_numel(owner) * item.flat.itemsize for item in items for owner in self._column
        )
        from_hosts = len(self._others) * sum(output.nbytes for output in outputs)
        entry = self.ledger.add("reduce_scatter", unit, from_mates + from_hosts)
        job = self._reductions.submit(complete)
        return Exchange(description, self.timeout_s, (), entry, job.result, items)


class _Courier:
    """A thread that does one job after another; once one has failed, all later ones fail too."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf_zero courier")
        self._failure = ""

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Do `job` after all earlier ones; the result is None, or the error."""
        return self._thread.submit(self._do, job)

    def _do(self, job: Callable[[], None]) -> None:
        if self._failure:
            raise CollectiveError(self._failure)  # at once: each of them would wait in vain
        try:
            job()
        except Exception as error:
            self._failure = str(error)
            raise


class _Messages:
    """Room for the rows of one rank, in the dtypes of the outputs, one message per dtype.

    Attributes:
        messages: flat.
        rows: of each item, as views of the messages.
    """

    def __init__(self, items: Sequence[Rows], outputs: Sequence[Tensor], owner: int) -> None:
        lengths = [item.layout.local_numel(owner) for item in items]
        self.buffers: list[Tensor] = []
        rows: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(output.dtype for output in outputs):
            chosen = [index for index, output in enumerate(outputs) if output.dtype == dtype]
            self.buffers.append(torch.empty(sum(lengths[index] for index in chosen), dtype=dtype, device="cpu"))
            parts = torch.split(self.buffers[-1], [lengths[index] for index in chosen])
            rows.update(zip(chosen, parts, strict=True))
        self.rows = [rows[index] for index in range(len(items))]


def _nothing(numbers: dict[int, array[int]]) -> None:
    """Nothing is read from the host's other ranks: their rows are in place."""
