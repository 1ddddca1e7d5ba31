"""Point-to-point exchanges; on gloo they are several times faster than its collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm.collectives import Collectives, Rows, add, divide, in_messages
from hf_zero.comm.exchange import Exchange, Work

_SMALLEST_STAGING = 64 * 2**10  # bytes; a smaller limit would cost more in messages than it saves
_PART_NUMEL = 2**16  # elements added up at a time


class PairwiseCollectives(Collectives):
    """Each pair of ranks swaps exactly the rows that the other one needs.

    Large parameters are sent from and received into their place, one message each. Small ones are packed into one message,
    since a message costs more than copying them.
    """

    name = "pairwise"
    sends_rows_as_given = True

    def gather(self, items: Sequence[Rows], unit: str) -> Exchange:
        """See `Collectives.gather`."""
        messages = self._messages(items)
        description, tags = self._describe("gather", unit), self._tags("gather", unit, len(messages))
        parts, received = [], 0
        arrivals: list[tuple[list[Tensor], Tensor, list[int]]] = []
        for peer in self._peers():
            for message, tag in zip(messages, tags, strict=True):
                targets = [item.layout.elements_of(item.flat, peer) for item in message]
                lengths = [target.numel() for target in targets]
                buffer = targets[0] if len(targets) == 1 else targets[0].new_empty(sum(lengths))
                if buffer.numel():
                    parts.append(self._receive(description, buffer, peer, tag))
                    arrivals.append((targets, buffer, lengths))
                    received += buffer.nbytes
        own = [[item.layout.elements_of(item.flat, self.rank) for item in message] for message in messages]
        parts += self._send_to_all(description, dict.fromkeys(self._peers(), own), tags)

        def finish() -> None:
            for targets, buffer, lengths in arrivals:
                if len(targets) > 1:
                    torch._foreach_copy_(targets, list(buffer.split_with_sizes(lengths)))

        return self._exchange(description, parts, self.ledger.add("gather", unit, received), finish, items)

    def reduce_scatter(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str, divisor: int = 1) -> Exchange:
        """See `Collectives.reduce_scatter`.

        [Note: rounds] Rows are sent from the gradients themselves. Received rows take memory until they are added up, so if
        they would take more than `staging_bytes`, they are received in rounds. This call waits for all rounds but the last,
        so that peers depend only on this call being made, as with any exchange, and not on when its result is waited for.
        """
        output_of = {id(item): output for item, output in zip(items, outputs, strict=True)}
        messages = [cut for message in self._messages(items) for cut in self._cut(message, output_of)]
        description, tags = self._describe("reduce_scatter", unit), self._tags("reduce_scatter", unit, len(messages))
        peers_rows = sum(output.numel() * item.flat.itemsize for item, output in zip(items, outputs, strict=True))
        entry = self.ledger.add("reduce_scatter", unit, peers_rows * (self.num_ranks - 1))
        rows = {rank: [[piece.of(rank) for piece in message] for message in messages] for rank in self._peers()}
        first, *later = self._rounds(messages, tags)
        parts, add_up = self._receive_round(description, first, divisor)
        sends = self._send_to_all(description, rows, tags)  # after the receives: gloo may else send and receive in turn
        for each in later:
            self._exchange(description, parts, entry, add_up).wait()
            del parts, add_up  # frees this round's rows before those of the next round arrive
            parts, add_up = self._receive_round(description, each, divisor)
        return self._exchange(description, parts + sends, entry, add_up, keep=items)

    def _messages(self, items: Sequence[Rows]) -> list[list[Rows]]:
        most_bytes = self._staging_limit // self.num_ranks  # every peer's part of a message arrives at once
        return in_messages(items, lambda i: (i.flat.dtype, i.layout.chunk_numel * i.flat.itemsize), most_bytes)

    def _cut(self, message: list[Rows], output_of: dict[int, Tensor]) -> list[list[_Range]]:
        """Cut a message into pieces that each fit into `staging_bytes`, alike on every rank; small parameters stay whole."""
        pieces = [_Range(item, output_of[id(item)], 0, item.layout.chunk_numel) for item in message]
        staged = self._staged_nbytes(pieces)
        if len(message) > 1 or staged <= self._staging_limit:
            return [pieces]
        (piece,) = pieces
        step = max(1, self._staging_limit * piece.stop // staged)
        return [
            [_Range(piece.item, piece.output[start : start + step], start, min(start + step, piece.stop))]
            for start in range(0, piece.stop, step)
        ]

    @property
    def _staging_limit(self) -> int:
        return max(self.staging_bytes, _SMALLEST_STAGING)

    def _staged_nbytes(self, message: list[_Range]) -> int:
        """Bytes of peers' rows that are held besides the outputs."""
        num_staged = self.num_ranks - 1 - int(_lands_in_output(message))
        return num_staged * sum([(piece.stop - piece.start) * piece.item.flat.itemsize for piece in message])

    def _rounds(self, messages: list[list[_Range]], tags: list[int]) -> list[list[tuple[list[_Range], int]]]:
        """Messages and their tags, grouped into rounds that fit into `staging_bytes`."""
        rounds: list[list[tuple[list[_Range], int]]] = [[]]
        staged = 0
        for message, tag in zip(messages, tags, strict=True):
            num_bytes = self._staged_nbytes(message)
            if rounds[-1] and staged + num_bytes > self._staging_limit:
                rounds.append([])
                staged = 0
            rounds[-1].append((message, tag))
            staged += num_bytes
        return rounds

    def _receive_round(
        self, description: str, messages: list[tuple[list[_Range], int]], divisor: int
    ) -> tuple[list[Work], Callable[[], None]]:
        """Start receiving the peers' rows; the returned function adds them up once they have arrived."""
        parts: list[Work] = []
        sums: list[tuple[list[Tensor], dict[int, Sequence[Tensor]]]] = []  # what is added up, by rank
        for message, tag in messages:
            outputs = [piece.output for piece in message]
            lengths = [output.numel() for output in outputs]
            terms: dict[int, Sequence[Tensor]] = {self.rank: [piece.of(self.rank) for piece in message]}
            for place, peer in enumerate(sorted(self._peers())):
                lands = place == 0 and _lands_in_output(message)
                buffer = outputs[0] if lands else message[0].item.flat.new_empty(sum(lengths))
                if buffer.numel():
                    parts.append(self._receive(description, buffer, peer, tag))
                terms[peer] = buffer.split_with_sizes(lengths)
            sums.append((outputs, terms))

        def add_up() -> None:
            for outputs, terms in sums:
                sum_in_order(outputs, [terms[rank] for rank in sorted(terms)], divisor)

        return parts, add_up

    def _send_to_all(self, description: str, rows: Mapping[int, list[list[Tensor]]], tags: Sequence[int]) -> list[Work]:
        """Send `rows[peer]`, a list of tensors for each message, to every peer."""
        parts = []
        packed: dict[int, Tensor] = {}
        for peer in self._peers():
            for tensors, tag in zip(rows[peer], tags, strict=True):
                if id(tensors) not in packed:  # a gather sends the same to all
                    packed[id(tensors)] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
                buffer = packed[id(tensors)]
                if buffer.numel():
                    parts.append(self._send(description, buffer, peer, tag))
        return parts


@dataclass(frozen=True)
class _Range:
    """A range of elements of every rank's rows of one gradient.

    Attributes:
        item: the whole gradient.
        output: where this rank's elements of the range are added up.
        start, stop: the range, counted from the start of a rank's rows; shorter on a rank that owns fewer rows.
    """

    item: Rows
    output: Tensor
    start: int
    stop: int

    def of(self, rank: int) -> Tensor:
        """The elements whose sum `rank` keeps."""
        first, last = self.item.layout.span(rank)
        return self.item.flat[min(first + self.start, last) : min(first + self.stop, last)]


def _lands_in_output(message: list[_Range]) -> bool:
    """Whether one peer's rows can be received in the output itself: a large parameter's can, if the dtypes are equal."""
    return len(message) == 1 and message[0].item.flat.dtype == message[0].output.dtype


def sum_in_order(outputs: Sequence[Tensor], terms: Sequence[Sequence[Tensor]], divisor: int) -> None:
    """output = (((t0 + t1) + t2) + ...) / divisor, of each.

    Args:
        outputs: may be wider than the terms; a single one may be one of its first two terms.
        terms: in their order, of each output.
        divisor: of the sums.
    """
    if len(outputs) > 1:
        targets = list(outputs)
        torch._foreach_copy_(targets, list(terms[0]))
        for term in terms[1:]:
            torch._foreach_add_(targets, list(term))
        divide(targets, divisor)
        return
    # One part at a time, so that it stays in the cache until it is divided.
    for part, first, *others in zip(*(torch.split(each, _PART_NUMEL) for (each,) in (outputs, *terms)), strict=True):
        total = first
        for other in others:
            add([total], [other], [part])
            total = part
        divide([part], divisor)
