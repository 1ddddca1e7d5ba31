"""What exchanges among the ranks of one axis are made of: messages between two of them, and what all of them agree upon."""

from __future__ import annotations

import datetime
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.beside.progress import counts_of
from hf_zero.comm.beside.roll_call import ended, missing
from hf_zero.comm.beside.waits import ORDERED_KINDS, Description
from hf_zero.comm.beside.watch import Watch
from hf_zero.comm.exchange import Exchange, InFlight, Work, is_late, named
from hf_zero.comm.groups import torch_groups
from hf_zero.comm.groups.process_groups import Axis
from hf_zero.comm.ledger import LedgerLine
from hf_zero.errors import CollectiveError

_AT_ONCE = datetime.timedelta(milliseconds=1)
_LABEL_BYTES = 96
_BITS = 62  # of a bitmap that are sent in one int64
_WITH_LABEL = 30  # values that an agreement sends along with its label
# Up to so many ranks send an agreement to each other: it takes the time of one message, and each one sees who is missing.
FEW_RANKS = 8
_TAG_KINDS = ("gather", "reduce_scatter", "agreement", "all_to_all", "mail")


@dataclass(frozen=True)
class Combined:
    """What several ranks say, number by number.

    Attributes:
        lowest: of each number.
        highest: of each number.
        any_bits: of each number, the bits that any rank has set.
    """

    lowest: list[int]
    highest: list[int]
    any_bits: list[int]


def messages_of(num_ranks: int, num_values: int) -> int:
    """How many messages a rank sends for an agreement on so many values."""
    each = num_ranks - 1 if num_ranks <= FEW_RANKS else (num_ranks - 1).bit_length()
    return each * (1 if num_values <= _WITH_LABEL else 2)


def words(bitmap: int, count: int) -> list[int]:
    """A bitmap of `count` bits as int64 values."""
    return [bitmap >> start & (1 << _BITS) - 1 for start in range(0, count, _BITS)]


def bits(of_words: Iterable[int]) -> int:
    """The bitmap that `words` has made of it."""
    return sum(word << place * _BITS for place, word in enumerate(of_words))


class Agreements:
    """Messages and agreements among the ranks of one axis, which are counted from 0 within it.

    Args:
        axis: the ranks.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.mesh = axis.mesh
        self.group = axis.group
        self.gather_group = axis.gather_group
        self.device = axis.device
        self.timeout_s = axis.timeout_s
        self.ledger = axis.ledger
        self.ranks = axis.ranks
        self.rank = axis.rank
        self.num_ranks = len(axis.ranks)
        self.backend = torch_groups.backend_on(axis.group, axis.device)
        self.coalesces = torch_groups.coalesces_on(axis.group, axis.device)
        self._watch = Watch(str(axis.group.group_name), axis.ranks, axis.ranks[axis.rank], axis.device)
        self._sequence = 0
        self.counts = counts_of(str(axis.group.group_name))
        self.reason = ""
        self.sequence_hash = 0  # a checksum of all gathers and reductions so far, in order within each kind
        self._tags_used = dict.fromkeys(_TAG_KINDS, 0)
        self._steps: dict[str, int] = {}
        self.in_flight = InFlight(axis.ranks, weakref.WeakMethod(self.break_off_all))

    def agree(self, values: Sequence[int], label: str, timeout_s: float | None = None) -> list[list[int]]:
        """Show every rank's `values` to every rank; all ranks must call this with the same `label`.

        Args:
            values: int64 values, the same number on every rank.
            label: what the ranks agree on.
            timeout_s: how long to wait for the others; the usual time by default.

        Returns:
            The values by rank.

        Raises:
            CollectiveError: a rank did not arrive in time, or arrived with another label or number of values.
        """
        return self._with_label(values, label, timeout_s, self._swap)

    def combine(self, values: Sequence[int], label: str, timeout_s: float | None = None) -> Combined:
        """As `agree`, where it does not matter which rank says what: among many ranks, no rank hears of each of them."""
        return Combined(*self._with_label(values, label, timeout_s, self._swap_combined))

    def _with_label(
        self, values: Sequence[int], label: str, timeout_s: float | None, swap: Callable[[Tensor, str, float], Tensor]
    ) -> list[list[int]]:
        """Rows of values, which `swap` makes of a message; the first has the label beside them, so that it can be checked."""
        limit = timeout_s or self.timeout_s
        own = _numbers([zlib.crc32(label.encode()), len(values), *values[:_WITH_LABEL]])
        head = torch.cat([own, own.new_zeros(2 + _WITH_LABEL - len(own))])
        heads = swap(head, label, limit)
        if not torch.equal(heads[:, :2], own[:2].expand(len(heads), 2)):
            self._refuse_another(label, len(values), limit)
        rows: list[list[int]] = heads[:, 2 : 2 + len(values)].tolist()
        if len(values) > _WITH_LABEL:
            rest = swap(_numbers(list(values[_WITH_LABEL:])), label, self.timeout_s)
            rows = [first + more for first, more in zip(rows, rest.tolist(), strict=True)]
        return rows

    def _refuse_another(self, label: str, count: int, timeout_s: float) -> NoReturn:
        """Raise on every rank, naming what another rank is at; called by all, since all have seen that something differs."""
        name = label.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES, b"\0")
        own = _numbers([count, zlib.crc32(label.encode()), *name])
        names = self._swap(own, label, timeout_s)
        peer = next(rank for rank, other in enumerate(names) if not torch.equal(other, own))
        theirs = bytes(names[peer, 2:].to(torch.uint8).tolist()).rstrip(b"\0").decode(errors="replace")
        raise CollectiveError(
            f"rank {self.ranks[self.rank]} is at {label!r} ({count} values), but rank {self.ranks[peer]} is at "
            f"{theirs!r} ({int(names[peer, 0])} values): all ranks must make the same calls in the same order."
        )

    def agree_on_floats(self, values: Sequence[float], label: str) -> list[list[float]]:
        """As `agree`, of float64 values, bit for bit."""
        rows = self.agree(struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values)), label)
        return [list(struct.unpack(f"{len(row)}d", struct.pack(f"{len(row)}q", *row))) for row in rows]

    def meet(self, label: str, timeout_s: float | None = None) -> None:
        """Wait until every rank has made the same call; the error names a rank that did not."""
        self.combine((), label, timeout_s)

    def mail(self, kind: str, unit: str, timeout_s: float | None = None) -> Mail:
        """Messages of bytes in the host's memory, at most one from each rank to each other; called by all ranks together.

        Args:
            kind: what they are, for the ledger and for errors.
            unit: what travels, for the ledger and for errors; the same on every rank.
            timeout_s: how long one may take; the usual time by default.
        """
        entry, (tag,) = self.ledger.add(kind, unit, 0), self._tags("mail", unit, 1)
        return Mail(self, self._describe(kind, unit), tag, timeout_s or self.timeout_s, entry)

    def _swap(self, message: Tensor, label: str, timeout_s: float) -> Tensor:
        """Every rank's `message` ([n] int64, CPU): [ranks, n]. Point to point, so that an error can name a missing rank.

        Few ranks send theirs to all others at once. Many pass on what they have heard, twice as much each time, so that
        each one sends ceil(log2(ranks)) messages (dissemination, as in Bruck et al., doi:10.1109/71.642949).
        """
        rows = message.repeat(self.num_ranks, 1)  # of this rank and those to its right
        if self.num_ranks > FEW_RANKS:

            def rest(known: int) -> Tensor:
                return rows[known : min(2 * known, self.num_ranks)]

            self._disseminate(lambda known: rows[: len(rest(known))], rest, lambda known: None, label, timeout_s)
            return rows.roll(self.rank, 0)
        self.ledger.add("agree", label, message.nbytes * (self.num_ranks - 1))
        description = self._describe("agreement", label)
        (tag,) = self._tags("agreement", "", 1)
        group = self.axis.control_group
        parts = [self._receive(description, rows[peer], peer, tag, group) for peer in self._peers()]
        parts += [self._send(description, message, peer, tag, group) for peer in self._peers()]
        self._exchange(description, parts, timeout_s=timeout_s).wait()
        return rows

    def _swap_combined(self, message: Tensor, label: str, timeout_s: float) -> Tensor:
        """The lowest and the highest of all ranks' numbers, and their bits together: [3, n].

        None of the three minds what it is told twice, so many ranks pass on three numbers for each, however many they are.
        """
        if self.num_ranks <= FEW_RANKS:
            return _combined(self._swap(message, label, timeout_s))
        known, arriving = message.repeat(3, 1), message.repeat(3, 1)

        def add(_: int) -> None:
            torch.minimum(known[0], arriving[0], out=known[0])
            torch.maximum(known[1], arriving[1], out=known[1])
            torch.bitwise_or(known[2], arriving[2], out=known[2])

        self._disseminate(lambda _: known, lambda _: arriving, add, label, timeout_s)
        return known

    def _disseminate(
        self,
        given: Callable[[int], Tensor],
        room: Callable[[int], Tensor],
        add: Callable[[int], None],
        label: str,
        timeout_s: float,
    ) -> None:
        """Pass on what is known of so many ranks, this one and those to its right, and hear of as many more, until of all."""
        entry = self.ledger.add("agree", label, 0)
        description = self._describe("agreement", label)
        (tag,) = self._tags("agreement", "", 1)
        group, known, peer = self.axis.control_group, 1, self.rank
        deadline = time.monotonic() + timeout_s
        try:
            while known < self.num_ranks:
                peer = (self.rank + known) % self.num_ranks
                arriving = room(known)
                parts = [
                    self._receive(description, arriving, peer, tag, group),
                    self._send(description, given(known), (self.rank - known) % self.num_ranks, tag, group),
                ]
                remaining_s = max(deadline - time.monotonic(), 1e-3)
                self._exchange(description, parts, timeout_s=remaining_s).wait()
                entry.bytes += arriving.nbytes
                add(known)
                known *= 2
        except CollectiveError as error:
            cause, number = error.__cause__, self._tags_used["agreement"]
            assert isinstance(cause, RuntimeError)
            if not is_late(cause):
                self.break_off()
            absent = missing(str(group.group_name), number, self.ranks, self.ranks[self.rank], self.ranks[peer])
            raise named(cause, description, absent, timeout_s) from cause

    def break_off(self) -> None:
        """Let what the ranks are waiting for fail now: gloo closes a group's connections when a wait in it takes too long."""
        self._break_off(self.axis.control_group)

    def _break_off(self, group: dist.ProcessGroup) -> None:
        for peer in self._peers():
            try:
                never_sent = torch.empty(1, dtype=torch.int64, device="cpu")
                group.recv([never_sent], peer, 2**31 - 1).wait(_AT_ONCE)
            except RuntimeError as error:
                if is_late(error):
                    return  # not so where the peer was gone before

    def break_off_all(self) -> None:
        """Let all waits of these ranks fail now, on whichever thread they are."""
        self.break_off()
        for group in (self.group, self.gather_group) if self.backend == "gloo" else ():
            if group is not self.axis.control_group:
                self._break_off(group)

    def _peers(self) -> list[int]:
        """The other ranks, starting at the right neighbour, so that the ranks do not all talk to the same one at once."""
        return [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]

    def _describe(self, kind: str, unit: str) -> str:
        self._sequence += 1
        if kind in ORDERED_KINDS:
            # Per kind: each rank may interleave gathers and reductions differently.
            self._steps[kind] = zlib.crc32(f"{kind} {unit}".encode(), self._steps.get(kind, 0))
            self.sequence_hash = sum(self._steps.values())
        return self._count(kind, unit, f"{kind} of {unit!r} (exchange {self._sequence})")

    def _count(self, kind: str, unit: str, text: str) -> str:
        """Begin an exchange of a kind, of which errors speak by `text`."""
        counts, description = self.counts, Description(text)
        counts.by_kind[kind] += 1
        counts.units[kind].append(unit)
        description.parts = (counts.group, kind, counts.by_kind[kind], unit)
        return description

    def _tags(self, kind: str, unit: str, count: int) -> list[int]:
        """Tags of one exchange, made from its kind, its number within that kind, and its unit.

        Ranks that are off by one exchange therefore time out instead of swapping the data of equal-shaped units.
        Two units whose tags happen to be equal do no harm while the ranks agree: equal tags are served in order.
        """
        self._tags_used[kind] += 1
        slots = len(_TAG_KINDS)
        first = zlib.crc32(f"{self._tags_used[kind]} {unit}".encode())
        return [(first + step) % (2**31 // slots) * slots + _TAG_KINDS.index(kind) for step in range(count)]

    def _part(self, work: dist.Work) -> Work:
        return Work(work, None, self._watch.follow if self.device.type != "cpu" else None)

    def _start(self, description: str, call: Callable[[], dist.Work | None]) -> dist.Work:
        try:
            work = call()
        except RuntimeError as error:
            raise self._failed_to_start(error, description) from error
        assert work is not None, "this rank is not in the group"
        return work

    def _failed_to_start(self, error: RuntimeError, description: str) -> CollectiveError:
        """What to raise where an exchange cannot begin, which names the ranks whose loss may be why: torch does not tell."""
        return named(error, description, ended(self.axis.processes) or None, self.timeout_s)

    def _exchange(
        self,
        description: str,
        parts: Sequence[Work],
        entry: LedgerLine | None = None,
        finish: Callable[[], None] | None = None,
        keep: object = None,
        timeout_s: float | None = None,
    ) -> Exchange:
        return Exchange(description, timeout_s or self.timeout_s, parts, entry, finish, keep, self.in_flight)

    def _send(
        self, description: str, tensor: Tensor, peer: int, tag: int, group: dist.ProcessGroup | None = None
    ) -> Work:
        try:
            return Work((group or self.group).send([tensor], peer, tag), self.ranks[peer])
        except RuntimeError as error:
            raise named(error, description, self.ranks[peer], self.timeout_s) from error

    def _receive(
        self, description: str, tensor: Tensor, peer: int, tag: int, group: dist.ProcessGroup | None = None
    ) -> Work:
        try:
            return Work((group or self.group).recv([tensor], peer, tag), self.ranks[peer])
        except RuntimeError as error:
            raise named(error, description, self.ranks[peer], self.timeout_s) from error


def _combined(rows: Tensor) -> Tensor:
    any_bits = rows[0].clone()
    for row in rows[1:]:
        any_bits |= row
    return torch.stack([rows.amin(0), rows.amax(0), any_bits])


def _numbers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class Mail:
    """See `Agreements.mail`.

    Attributes:
        among: the ranks.
        description: for errors.
        tag: of its messages.
        timeout_s: that one may take.
        entry: in the ledger.
    """

    among: Agreements
    description: str
    tag: int
    timeout_s: float
    entry: LedgerLine

    def send(self, data: Tensor, peer: int) -> Exchange:
        """Start to send bytes, flat and contiguous, which stay as they are until the exchange has been waited for."""
        part = self.among._send(self.description, data, peer, self.tag, self.among.axis.control_group)
        return self.among._exchange(self.description, [part], self.entry, keep=data, timeout_s=self.timeout_s)

    def receive(self, room: Tensor, peer: int) -> Exchange:
        """Start to receive as many bytes as there is room for, flat and contiguous."""
        self.entry.bytes += room.nbytes
        part = self.among._receive(self.description, room, peer, self.tag, self.among.axis.control_group)
        return self.among._exchange(self.description, [part], self.entry, keep=room, timeout_s=self.timeout_s)
