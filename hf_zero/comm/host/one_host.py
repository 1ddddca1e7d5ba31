"""Exchanges through the memory of a host: shards and gradients are read where they are."""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
import weakref
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_zero.comm.beside import waits
from hf_zero.comm.collectives import Collectives, Rows, add, divide
from hf_zero.comm.exchange import Exchange, InFlight
from hf_zero.comm.groups.process_groups import Axis
from hf_zero.comm.host import memory as host_memory
from hf_zero.comm.host.board import BOARD_BYTES, Board, Lane, Posted, is_short
from hf_zero.comm.ledger import LedgerLine
from hf_zero.errors import CollectiveError

_PIECE_BYTES = 512 * 2**10  # summed at a time: small enough to be still in the cache when it is added
_ALIGNMENT = 64
_Piece = tuple[
    int, int, int, Tensor, Tensor
]  # item, bytes from its start, bytes from the scratch's, own rows, their total
_REASONS = (
    "",
    "it needs Linux on x86-64",
    "the parameters are not in the host's memory",
    "a rank cannot open the others' shared memory (they are isolated from each other)",
    "a rank may not read the others' memory (the system call process_vm_readv is forbidden)",
    "a rank cannot see whether the others live (the system call pidfd_open is missing or forbidden)",
    "the ranks are on several hosts",
)


class HostCollectives(Collectives):
    """Ranks of one host that share its memory.

    Whole parameters exist once, and each rank's rows are its part of them. So a gather of shared memory moves nothing; it only
    waits until every owner has posted it. A reduce-scatter reads the peers' gradients where autograd wrote them, a piece at a
    time, and adds them in rank order. See [Note: lanes] for how the ranks follow each other's progress.

    Args:
        board: of the ranks.
        axis: the ranks.
    """

    name = "host"
    shares_memory = True
    sends_rows_as_given = True

    def __init__(self, board: Board, axis: Axis) -> None:
        super().__init__(axis)
        self._board = board
        self._shared = dict[int, weakref.ref[mmap.mmap]]()  # by the address of its storage
        self._scratch: list[Tensor] = []

    def allocate(self, num_bytes: int, label: str) -> torch.UntypedStorage:
        """See `Collectives.allocate`."""
        problem, memory, handle = "", None, (0, 0)
        if self.rank == 0:
            try:
                descriptor, memory = host_memory.create(num_bytes)
                handle = (os.getpid(), descriptor)
            except host_memory.PeerMemoryError as error:
                problem = str(error)
        pid, descriptor = self.agree(handle, f"shared memory of {label}")[0]
        if self.rank and pid:
            try:
                memory = host_memory.attach(pid, descriptor, num_bytes, writes=True)
            except host_memory.PeerMemoryError as error:
                problem = str(error)
        failed = [rank for rank, (flag,) in enumerate(self.agree([int(memory is None)], label)) if flag]
        if self.rank == 0 and pid:
            os.close(descriptor)
        if memory is None or failed:
            raise CollectiveError(
                f"rank {self.ranks[failed[0]]} has no shared memory for {label} ({num_bytes} bytes). {problem} "
                "Free memory, or set `collectives: pairwise`"
            )
        storage = host_memory.as_storage(memory)
        self._shared = {start: each for start, each in self._shared.items() if each() is not None}
        self._shared[storage.data_ptr()] = weakref.ref(memory)
        return storage

    def before_write(self, label: str) -> None:
        """See `Collectives.before_write`."""
        lane = self._board.lanes["write"]
        description = self._count("write", label, label)
        posted = lane.post(label, (), description, self.timeout_s, lambda numbers: None)
        HostExchange(lane, posted, description, self.timeout_s, None, False, self.in_flight).wait()

    def break_off_all(self) -> None:
        """See `Agreements.break_off_all`."""
        self._board.broken_off.set()
        super().break_off_all()

    def settle(self) -> None:
        """See `Collectives.settle`."""
        self._board.lanes["reduce_scatter"].settle("the end of reduce_scatter", self.timeout_s)

    def _private(self, items: Sequence[Rows]) -> list[Rows]:
        """Those in memory that the ranks do not share."""
        found = []
        for item in items:
            memory = self._shared.get(item.flat.untyped_storage().data_ptr())
            if memory is None or memory() is None:
                found.append(item)
        return found

    def _sum_rows(
        self, items: Sequence[Rows], owner: int, outputs: Sequence[Tensor], divisor: int, numbers: dict[int, array[int]]
    ) -> None:
        """Add up the rows of rank `owner` over all ranks; `numbers` has the addresses of the peers' items."""
        pieces: list[_Piece] = []
        num_bytes = 0
        for index, (item, output) in enumerate(zip(items, outputs, strict=True)):
            start, stop = item.layout.span(owner)
            size = item.flat.itemsize
            step = _PIECE_BYTES // size
            for first in range(start, stop, step):
                last = min(first + step, stop)
                if num_bytes + (last - first) * size > _PIECE_BYTES:
                    self._sum_pieces(pieces, divisor, numbers)
                    pieces, num_bytes = [], 0
                own, total = item.flat[first:last], output[first - start : last - start]
                pieces.append((index, first * size, num_bytes, own, total))
                num_bytes += -(-(last - first) * size // _ALIGNMENT) * _ALIGNMENT
        self._sum_pieces(pieces, divisor, numbers)

    def _sum_pieces(self, pieces: Sequence[_Piece], divisor: int, numbers: dict[int, array[int]]) -> None:
        """total = (((t0 + t1) + t2) + ...) / divisor, over the ranks, of each piece."""
        if not self._scratch:  # two buffers, because the first two terms may both be peers'
            self._scratch = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2)]
        totals = [piece[4] for piece in pieces]
        sums: Sequence[Tensor] = ()
        for rank in range(self.num_ranks):
            if rank == self.rank:
                terms = [piece[3] for piece in pieces]
            else:
                terms = self._read_pieces(rank, pieces, numbers[rank])
            if sums:
                add(sums, terms, totals)
            sums = totals if sums else terms
        divide(totals, divisor)

    def _read_pieces(self, peer: int, pieces: Sequence[_Piece], addresses: array[int]) -> list[Tensor]:
        """The pieces of a peer."""
        memory = self._scratch[peer % 2]
        address = memory.data_ptr()
        terms, moves = [], []
        for index, offset, place, own, _ in pieces:
            num_bytes = own.nbytes
            terms.append(memory[place : place + num_bytes].view(own.dtype))
            moves.append((addresses[index] + offset, address + place, num_bytes))
        host_memory.read(self._board.pid_of[peer], moves)
        return terms

    def gather(self, items: Sequence[Rows], unit: str) -> Exchange:
        """See `Collectives.gather`."""
        private = self._private(items)
        numbers = [item.layout.elements_of(item.flat, self.rank).data_ptr() for item in private]
        received = sum(
            (item.layout.numel - item.layout.local_numel(self.rank)) * item.flat.itemsize for item in private
        )
        return self._post("gather", unit, numbers, received, partial(self._read_rows, private), items, bool(private))

    def _read_rows(self, items: Sequence[Rows], numbers: dict[int, array[int]]) -> None:
        for peer, addresses in numbers.items():
            moves = []
            for item, address in zip(items, addresses, strict=True):
                start, stop = item.layout.span(peer)
                size = item.flat.itemsize
                moves.append((address, item.flat.data_ptr() + start * size, (stop - start) * size))
            host_memory.read(self._board.pid_of[peer], moves)

    def reduce_scatter(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str, divisor: int = 1) -> Exchange:
        """See `Collectives.reduce_scatter`."""
        numbers = [item.flat.data_ptr() for item in items]
        sizes = [output.numel() * item.flat.itemsize for item, output in zip(items, outputs, strict=True)]
        received = sum(sizes) * (self.num_ranks - 1)
        finish = partial(self._sum_rows, items, self.rank, outputs, divisor)
        return self._post("reduce_scatter", unit, numbers, received, finish, items, False)

    def _swap(self, message: Tensor, label: str, timeout_s: float) -> Tensor:
        self.ledger.add("agree", label, message.nbytes * (self.num_ranks - 1))
        rows = message.repeat(self.num_ranks, 1)

        def finish(numbers: dict[int, array[int]]) -> None:
            for peer, values in numbers.items():
                rows[peer] = torch.tensor(values, device="cpu")

        lane = self._board.lanes["agreement"]
        description = self._describe("agreement", label)
        posted = lane.post("agreement", message.tolist(), description, timeout_s, finish)
        has_readers = not is_short(len(message))
        HostExchange(lane, posted, description, timeout_s, None, has_readers, self.in_flight).wait()
        return rows

    def _post(
        self,
        kind: str,
        unit: str,
        numbers: list[int],
        received: int,
        finish: Any,
        keep: Sequence[Rows],
        waits_for_readers: bool,
    ) -> Exchange:
        assert all(map(Tensor.is_contiguous, [item.flat for item in keep])), "peers would read past it"
        lane, description = self._board.lanes[kind], self._describe(kind, unit)
        posted = lane.post(f"{kind} of {unit!r}", numbers, description, self.timeout_s, finish, keep)
        entry = self.ledger.add(kind, unit, received)
        return HostExchange(lane, posted, description, self.timeout_s, entry, waits_for_readers, self.in_flight)


class HostExchange(Exchange):
    """An exchange that is done once this rank has read what it needs and, if requested, its peers have too."""

    def __init__(
        self,
        lane: Lane,
        posted: Posted,
        description: str,
        timeout_s: float,
        entry: LedgerLine | None,
        waits_for_readers: bool,
        in_flight: InFlight,
    ) -> None:
        super().__init__(description, timeout_s, entry=entry, in_flight=in_flight)
        self._lane, self._posted, self._waits_for_readers = lane, posted, waits_for_readers

    def wait(self) -> None:
        """See `Exchange.wait`."""
        if self._is_done:
            return
        started = time.perf_counter()
        assert self._in_flight is not None
        thread = threading.get_ident()
        waits.by_thread[thread] = self
        try:
            self._lane.complete(self._posted, self._timeout_s)
            if self._waits_for_readers:
                self._lane.settle(self._description, self._timeout_s)
        except CollectiveError as error:
            self._in_flight.is_broken = True  # nobody waits as long again for each exchange that is dropped
            if (verdict := waits.verdict_on(self.place)) is not None:
                raise CollectiveError(verdict) from error
            raise
        finally:
            waits.by_thread.pop(thread, None)
        if self._entry is not None:
            self._entry.seconds += time.perf_counter() - started
        self._is_done = True


def connect(meeting: Collectives) -> Board | str:
    """Map the boards of all ranks, or say why that is impossible; the result is the same on every rank.

    Args:
        meeting: the same ranks, over the network.

    Returns:
        The board, or the reason.
    """
    code = 0 if host_memory.is_supported() else 1
    if meeting.device.type != "cpu":
        code = 2
    token, probe = secrets.randbits(62), array("q", [secrets.randbits(62)])
    descriptor, own = -1, None
    if not code:
        try:
            descriptor, own = host_memory.create(BOARD_BYTES)
            memoryview(own).cast("q")[0] = token
        except host_memory.PeerMemoryError:
            code = 3
    facts = [host_memory.host_number(), code, os.getpid(), descriptor, token, probe.buffer_info()[0], probe[0]]
    rows = meeting.agree([*facts, os.getppid()], "the memory of the host")
    # Pids and addresses mean something on one host only, so nothing is opened before this is known.
    code = max(row[1] for row in rows) or (6 if len({row[0] for row in rows}) > 1 else 0)
    board = None
    if not code and own is not None:
        reader = host_memory.reader_of(os.getpid(), {row[2]: row[7] for row in rows})
        if reader is not None:
            host_memory.let_read(reader)
        meeting.agree([0], "leave to read memory")
        board = _board_of(meeting, own, rows)
        code = max(
            code
            for (code,) in meeting.agree([board if isinstance(board, int) else 0], "reading the memory of the host")
        )
    if descriptor >= 0:
        os.close(descriptor)
    if not isinstance(board, Board) or code:
        return _REASONS[code]
    _count_readers(1)
    weakref.finalize(board, _count_readers, -1)
    return board


def _board_of(meeting: Collectives, own: mmap.mmap, rows: Sequence[Sequence[int]]) -> Board | int:
    """The board, with every peer's one mapped and its memory read once; or why not, as an index into `_REASONS`."""
    peers = {}
    for rank, (_, _, pid, descriptor, token, address, value, _) in enumerate(rows):
        if rank == meeting.rank:
            continue
        try:
            memory = host_memory.attach(pid, descriptor, BOARD_BYTES, writes=False)
        except host_memory.PeerMemoryError:
            return 3
        if memoryview(memory).cast("q")[0] != token:
            return 3
        if code := _probe(pid, address, value):
            return code
        peers[rank] = (pid, memory)
    try:
        return Board(meeting.rank, own, peers, meeting.ranks)
    except OSError:
        return 5


_readers = 0


def _count_readers(change: int) -> None:
    """Take the leave to read this process's memory back when nobody needs it any more."""
    global _readers
    _readers += change
    if _readers == 0:
        host_memory.let_read(0)


def _probe(pid: int, address: int, expected: int) -> int:
    """0 if a number at `address` of process `pid` can be read; otherwise why not, as an index into `_REASONS`."""
    seen = array("q", [0])
    try:
        host_memory.read(pid, [(address, seen.buffer_info()[0], 8)])
    except host_memory.PeerMemoryError:
        return 4
    return 0 if seen[0] == expected else 3
