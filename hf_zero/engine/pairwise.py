"""Point-to-point exchanges, on gloo several times faster than its collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_zero.engine.collectives import Collectives, Rows
from hf_zero.engine.exchange import Exchange, Part

_ALONE_BYTES = 8 * 2**10


class PairwiseCollectives(Collectives):
    """Each pair of ranks swaps exactly the rows that the other one needs.

    Large parameters travel straight from and into their place, a message each; small ones are packed into one message,
    since a message costs more than copying them.
    """

    name = "pairwise"
    sends_rows_as_given = True

    def gather(self, items: Sequence[Rows], unit: str) -> Exchange:
        """See `Collectives.gather`."""
        parcels = _parcels(items)
        description, tags = self._describe("gather", unit), self._tags("gather", unit, len(parcels))
        parts, received = [], 0
        arrivals: list[tuple[list[Tensor], Tensor]] = []
        for peer in self._peers():
            for parcel, tag in zip(parcels, tags, strict=True):
                targets = [item.flat[slice(*item.layout.local_span_in_chunk(peer))] for item in parcel]
                message = targets[0] if len(targets) == 1 else targets[0].new_empty(sum(map(len, targets)))
                if message.numel():
                    parts.append(Part(self._receive(description, message, peer, tag), peer))
                    arrivals.append((targets, message))
                    received += message.nbytes
        own = [[item.flat[slice(*item.layout.local_span_in_chunk(self.rank))] for item in parcel] for parcel in parcels]
        parts += self._send_to_all(description, [own] * self.num_ranks, tags)

        def finish() -> None:
            for targets, message in arrivals:
                if len(targets) > 1:
                    for target, values in zip(targets, torch.split(message, [len(t) for t in targets]), strict=True):
                        target.copy_(values)

        return Exchange(description, self.timeout_s, parts, self.ledger.add("gather", unit, received), finish, items)

    def reduce_scatter(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str) -> Exchange:
        """See `Collectives.reduce_scatter`."""
        parcels = _parcels(items)
        description, tags = self._describe("reduce_scatter", unit), self._tags("reduce_scatter", unit, len(parcels))
        output_of = {id(item): output for item, output in zip(items, outputs, strict=True)}
        by_rank: dict[int, dict[int, Tensor]] = {id(item): {} for item in items}
        parts, received = [], 0
        for parcel, tag in zip(parcels, tags, strict=True):
            lengths = [output_of[id(item)].numel() for item in parcel]
            for place, peer in enumerate(sorted(self._peers())):
                flat, first = parcel[0].flat, output_of[id(parcel[0])]
                # A large parameter's rows from one peer land in the output itself, the others' beside it.
                lands = len(parcel) == 1 and place == 0 and flat.dtype == first.dtype
                message = first if lands else flat.new_empty(sum(lengths))
                if message.numel():
                    parts.append(Part(self._receive(description, message, peer, tag), peer))
                    received += message.nbytes
                for item, values in zip(parcel, torch.split(message, lengths), strict=True):
                    by_rank[id(item)][peer] = values
        rows = [
            [[item.flat[slice(*item.layout.span(peer))] for item in parcel] for parcel in parcels]
            for peer in range(self.num_ranks)
        ]
        parts += self._send_to_all(description, rows, tags)

        def finish() -> None:
            for item, output in zip(items, outputs, strict=True):
                if output.numel():
                    by_rank[id(item)][self.rank] = item.flat[slice(*item.layout.span(self.rank))]
                    _sum_in_rank_order(output, by_rank[id(item)])

        entry = self.ledger.add("reduce_scatter", unit, received)
        return Exchange(description, self.timeout_s, parts, entry, finish, keep=items)

    def _send_to_all(self, description: str, rows: Sequence[list[list[Tensor]]], tags: Sequence[int]) -> list[Part]:
        """Send `rows[peer]`, a list of tensors for each parcel, to every peer."""
        parts = []
        packed: dict[int, Tensor] = {}
        for peer in self._peers():
            for tensors, tag in zip(rows[peer], tags, strict=True):
                if id(tensors) not in packed:  # a gather sends the same to all
                    packed[id(tensors)] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
                message = packed[id(tensors)]
                if message.numel():
                    parts.append(Part(self._send(description, message, peer, tag), peer))
        return parts


def _parcels(items: Sequence[Rows]) -> list[list[Rows]]:
    """What travels in one message: a large parameter, or all small ones of a dtype; the same on every rank."""
    alone, packed = [], dict[torch.dtype, list[Rows]]()
    for item in items:
        if item.layout.chunk_numel * item.flat.itemsize > _ALONE_BYTES:
            alone.append([item])
        else:
            packed.setdefault(item.flat.dtype, []).append(item)
    return [*alone, *packed.values()]


def _sum_in_rank_order(output: Tensor, by_rank: dict[int, Tensor]) -> None:
    """output = ((t0 + t1) + t2) + ..., where `output` itself may be one of the first two terms, or be wider than all."""
    first, second, *rest = [by_rank[rank] for rank in sorted(by_rank)]
    if first.dtype == output.dtype:
        torch.add(first, second, out=output)
    else:
        output.copy_(first).add_(second)  # `out=` would add in the terms' dtype
    for term in rest:
        output.add_(term)
