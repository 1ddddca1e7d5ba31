"""What the ranks of a host show each other in shared memory: how far they are, and where their data lies.

[Note: lanes] Every rank has a board that only it writes and all ranks read. A *lane* is the part for one kind of exchange;
within a lane, all ranks keep the same order. To post an exchange, a rank writes a label and some numbers (or the address of
a long message) into the lane's next slot, then raises the lane's count. To wait for a peer is to wait for that count. A
second count tells how many exchanges of its peers a rank has finished reading: once all peers have read, what the numbers
point at may be overwritten or freed. A board outlives the process that writes it, as long as a peer has it mapped.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hf_zero.comm.beside.waits import ADVICE
from hf_zero.comm.exchange import named
from hf_zero.comm.host import memory as host_memory
from hf_zero.errors import CollectiveError

LANES = ("gather", "reduce_scatter", "agreement", "write")
_SLOTS = 256
_POSTED, _READ, _RING = 0, 8, 16  # word offsets in a lane; each count has its own cache line
_LABEL_WORDS = 12
_SLOT_WORDS = 64  # the length of the message, then the message, or its address
_LANE_WORDS = _RING + _SLOT_WORDS * _SLOTS
_TOKEN_WORDS = 8  # the first word of a board tells that it is the right one
BOARD_BYTES = 8 * (_TOKEN_WORDS + len(LANES) * _LANE_WORDS)
_YIELDS = 50
_LONGEST_SLEEP_S = 1e-3


@dataclass(frozen=True)
class Peer:
    """Another rank of the host.

    Attributes:
        rank: its place among the ranks.
        number: its rank in the program, for errors.
        pid: its process.
        words: its board, as int64.
        handle: a file descriptor that is readable once the process has ended.
    """

    rank: int
    number: int
    pid: int
    words: memoryview
    handle: int

    def is_alive(self) -> bool:
        """Whether its process is running; a zombie is not."""
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return not poll.poll(0)


@dataclass(eq=False)
class Posted:
    """An exchange that this rank has posted and that not all peers have read.

    Attributes:
        number: in its lane, from 1.
        message: the label and the numbers, which peers read.
        description: for errors.
        finish: called with the peers' numbers, by peer, once all have posted; reads what the numbers point at.
        keep: kept alive because the peers may read it.
    """

    number: int
    message: array[int]
    description: str
    finish: Callable[[dict[int, array[int]]], None]
    keep: object


class Lane:
    """Exchanges of one kind, posted by every rank in the same order. See [Note: lanes].

    Args:
        name: one of `LANES`.
        rank: this rank.
        own: this rank's board, as int64.
        peers: the others.
        broken_off: lets all waits fail, once it is set.
    """

    def __init__(
        self, name: str, rank: int, own: memoryview, peers: Sequence[Peer], broken_off: threading.Event
    ) -> None:
        start = _TOKEN_WORDS + LANES.index(name) * _LANE_WORDS
        self._rank = rank
        self._own = own[start : start + _LANE_WORDS]
        self._peers = [(peer, peer.words[start : start + _LANE_WORDS]) for peer in peers]
        self._broken_off = broken_off
        self._count = 0
        self._pending: deque[Posted] = deque()
        self._unread: deque[Posted] = deque()  # finished here, but not yet read by all peers
        self._completed = 0  # the last that was waited for: who has posted later ones waits for them later, too

    def post(
        self,
        label: str,
        numbers: Sequence[int],
        description: str,
        timeout_s: float,
        finish: Callable[[dict[int, array[int]]], None],
        keep: object = None,
    ) -> Posted:
        """Show the peers `numbers`, and remember what to do once they have shown theirs."""
        self.advance()
        # The slot is about to be reused. Advance while waiting for its readers: they may be waiting for this rank here too.
        if self._count >= _SLOTS:
            self._wait(_READ, self._count + 1 - _SLOTS, description, timeout_s, self.advance)
        num_bytes = 8 * _LABEL_WORDS
        name = label.encode()[:num_bytes].ljust(num_bytes, b"\0")
        message = array("q", name)
        message.extend(numbers)
        self._count += 1
        slot = _slot(self._count)
        self._own[slot] = len(message)
        shown = message if is_short(len(numbers)) else array("q", message.buffer_info()[:1])
        self._own[slot + 1 : slot + 1 + len(shown)] = memoryview(shown)
        self._own[_POSTED] = self._count  # last: from here on the peers may read the slot
        posted = Posted(self._count, message, description, finish, keep)
        self._pending.append(posted)
        return posted

    def advance(self) -> None:
        """Finish what all peers have posted by now, and drop what they have read."""
        while self._pending and all(words[_POSTED] >= self._pending[0].number for _, words in self._peers):
            self._finish()
        while self._unread and all(words[_READ] >= self._unread[0].number for _, words in self._peers):
            self._unread.popleft()

    def complete(self, posted: Posted, timeout_s: float) -> None:
        """Wait for the peers' part of an exchange and of all earlier ones, and finish them.

        Raises:
            CollectiveError: a peer is gone, late, or at another exchange.
        """
        self._completed = max(self._completed, posted.number)
        while self._pending and self._pending[0].number <= posted.number:
            self._wait(_POSTED, self._pending[0].number, self._pending[0].description, timeout_s)
            self._finish()

    def settle(self, description: str, timeout_s: float) -> None:
        """Wait until the peers have read everything that this rank has waited for.

        Of what it has finished by the way, they may still wait for something that needs this rank first.
        """
        if self._unread and self._unread[0].number <= self._completed:
            self._wait(_READ, self._completed, description, timeout_s)
            while self._unread and self._unread[0].number <= self._completed:
                self._unread.popleft()

    def _finish(self) -> None:
        posted = self._pending.popleft()
        numbers = {}
        try:
            for peer, words in self._peers:
                message = _message(peer, words, _slot(posted.number))
                self._check(peer, message, posted)
                numbers[peer.rank] = message[_LABEL_WORDS:]
            posted.finish(numbers)
        except host_memory.PeerMemoryError as error:
            raise named(error, posted.description, self._lost(), 0.0) from error
        self._own[_READ] = posted.number
        posted.finish = _nothing  # frees what it refers to; only `keep` has to stay until the peers have read
        self._unread.append(posted)

    def _check(self, peer: Peer, message: array[int], posted: Posted) -> None:
        theirs, ours = _label(message), _label(posted.message)
        if theirs != ours or len(message) != len(posted.message):
            raise CollectiveError(
                f"rank {self._rank} is at {ours} ({len(posted.message) - _LABEL_WORDS} numbers), but rank {peer.number} is at "
                f"{theirs} ({len(message) - _LABEL_WORDS} numbers): {ADVICE}"
            )

    def _lost(self) -> int | None:
        return next((peer.number for peer, _ in self._peers if not peer.is_alive()), None)

    def _wait(
        self, word: int, count: int, description: str, timeout_s: float, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Wait until `word` of every peer's lane has reached `count`."""
        deadline = time.monotonic() + timeout_s
        for peer, words in self._peers:
            pause = _Pause()
            while words[word] < count:
                if meanwhile is not None:
                    meanwhile()
                if pause.is_long:
                    if self._broken_off.is_set():
                        raise named(RuntimeError("it was broken off"), description, peer.number, timeout_s)
                    if not peer.is_alive() and words[word] < count:
                        gone = RuntimeError(f"its process ({peer.pid}) has ended")
                        raise named(gone, description, peer.number, timeout_s)
                    if time.monotonic() > deadline:
                        raise named(RuntimeError("timed out"), description, peer.number, timeout_s)
                pause()


@dataclass
class _Pause:
    """Yields to other processes, then sleeps longer and longer, so that a peer on the same core can catch up."""

    count: int = 0
    sleep_s: float = field(default=20e-6)

    @property
    def is_long(self) -> bool:
        return self.count > _YIELDS

    def __call__(self) -> None:
        self.count += 1
        if not self.is_long:
            os.sched_yield()
            return
        time.sleep(self.sleep_s)
        self.sleep_s = min(self.sleep_s * 1.5, _LONGEST_SLEEP_S)


def is_short(count: int) -> bool:
    """Whether a message of `count` numbers fits into the board, so that peers can read it even after this process is gone."""
    return _LABEL_WORDS + count < _SLOT_WORDS


def _slot(number: int) -> int:
    """The first word of the slot of an exchange."""
    return _RING + _SLOT_WORDS * (number % _SLOTS)


def _message(peer: Peer, words: memoryview, slot: int) -> array[int]:
    """What a peer has posted in a slot of its lane."""
    length = words[slot]
    if length < _SLOT_WORDS:
        return array("q", words[slot + 1 : slot + 1 + length])
    message = array("q", bytes(8 * length))
    host_memory.read(peer.pid, [(words[slot + 1], message.buffer_info()[0], 8 * length)])
    return message


def _label(message: array[int]) -> str:
    return message[:_LABEL_WORDS].tobytes().rstrip(b"\0").decode(errors="replace")


def _nothing(numbers: dict[int, array[int]]) -> None:
    """What is left to do for an exchange that is finished."""


class Board:
    """The boards of all ranks of a host, and their lanes.

    Args:
        rank: this rank.
        own: memory of `BOARD_BYTES` that the peers have mapped.
        peers: pid and mapped board of every other rank.
        ranks: the numbers of all of them in the program, for errors.

    Attributes:
        broken_off: set to let all waits fail.

    Raises:
        OSError: this kernel cannot tell whether a process is alive.
    """

    def __init__(
        self, rank: int, own: mmap.mmap, peers: dict[int, tuple[int, mmap.mmap]], ranks: Sequence[int]
    ) -> None:
        self.pid_of = {peer: pid for peer, (pid, _) in peers.items()} | {rank: os.getpid()}
        self._peers: list[Peer] = []  # filled one by one: `__del__` closes what is open, should the next not be had
        for peer, (pid, memory) in peers.items():
            self._peers.append(Peer(peer, ranks[peer], pid, memoryview(memory).cast("q"), os.pidfd_open(pid)))
        words = memoryview(own).cast("q")
        self.broken_off = threading.Event()
        self.lanes = {name: Lane(name, ranks[rank], words, self._peers, self.broken_off) for name in LANES}

    def __del__(self) -> None:
        for peer in self._peers:
            os.close(peer.handle)
