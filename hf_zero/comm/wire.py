"""Wire formats: rows and gradients that travel in fewer bits than they are computed in.

[Note: blocks] int8 and int4 take blocks of 256 values and one float32 scale each: a value is off by at most 1/254 (int8) or
1/14 (int4) of its block's greatest. What is not finite makes its whole block so. Integers, bytes of quantised parameters, and
tensors of which no rank has a whole block, travel as they are. What is gathered is the same on all ranks, the owner's own rows
included, so masters stay apart from it. Gradients are packed once, for the rank that adds them up, never on the way; the sum is
in the outputs' dtype.

Source: ZeRO++ (arXiv:2306.10209), qwZ and qgZ; blocks as in section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm.collectives import Collectives, Rows, divide
from hf_zero.comm.exchange import Exchange
from hf_zero.comm.pairwise import sum_in_order
from hf_zero.layout import RowLayout

BLOCK = 256
_GREATEST = {"int8": 127, "int4": 7}
_MOST = torch.finfo(torch.float32).max


def num_bytes(wire: str, numel: int) -> int:
    """Bytes of `numel` packed values."""
    if wire == "bfloat16":
        return 2 * numel
    blocks = -(-numel // BLOCK)
    return blocks * (BLOCK // (1 if wire == "int8" else 2) + 4)


def pack(wire: str, values: Tensor) -> Tensor:
    """Flat values as [num_bytes] uint8: numbers first, then the scales of their blocks."""
    if wire == "bfloat16":
        return values.to(torch.bfloat16).view(torch.uint8)
    numel = values.numel()
    if not numel:
        return values.new_empty(0, dtype=torch.uint8)
    blocks = values.new_zeros(-(-numel // BLOCK) * BLOCK, dtype=torch.float32)
    blocks[:numel].copy_(values)
    table = blocks.view(-1, BLOCK)
    greatest = _GREATEST[wire]
    peaks = table.abs().amax(1, keepdim=True)
    # Rounded down, so that the greatest of all floats is not unpacked as an infinity; infinities stay what they are.
    scales = torch.where(peaks.isinf(), peaks, (peaks / greatest).clamp_(max=_MOST / greatest * (1 - 2**-23)))
    numbers = table.div_(torch.where(scales == 0, 1.0, scales)).round_().nan_to_num_(0.0)
    numbers = numbers.clamp_(-greatest, greatest).to(torch.int8)  # scales as small as floats get have few bits
    if wire == "int4":
        low, high = numbers.view(torch.uint8).view(-1, BLOCK // 2, 2).unbind(-1)
        numbers = (low & 15) | (high << 4)
    return torch.cat([numbers.reshape(-1).view(torch.uint8), scales.view(-1).view(torch.uint8)])


def unpack(wire: str, packed: Tensor, output: Tensor) -> None:
    """Write what `pack` has packed into `output`, flat."""
    if wire == "bfloat16":
        output.copy_(packed.view(torch.bfloat16)[: output.numel()])
        return
    count = -(-output.numel() // BLOCK)
    if not count:
        return
    split = len(packed) - 4 * count
    scales = packed[split:].view(torch.float32).view(-1, 1)
    numbers = packed[:split].view(torch.int8).view(count, split // count)
    if wire == "int4":
        numbers = torch.stack([(numbers << 4) >> 4, numbers >> 4], -1).view(count, BLOCK)
    output.copy_((numbers.to(torch.float32) * scales).view(-1)[: output.numel()])


class _Then(Exchange):
    """An exchange with something to do once it is complete."""

    def __init__(self, before: Exchange, finish: Callable[[], None]) -> None:
        self._before, self._then = before, finish
        self._is_over = False

    def wait(self) -> None:
        """See `Exchange.wait`."""
        self._before.wait()
        if not self._is_over:
            self._then()  # may be interrupted, and is then done again
            self._is_over = True


def bytes_of(wire: str, dtype: torch.dtype, layout: RowLayout, numel: int) -> int:
    """Bytes in which `numel` of one rank's elements travel."""
    return num_bytes(wire, numel) if is_packed(wire, dtype, layout) else numel * dtype.itemsize


def _is_packed(item: Rows, wire: str) -> bool:
    return item.is_numbers and is_packed(wire, item.flat.dtype, item.layout)


def is_packed(wire: str, dtype: torch.dtype, layout: RowLayout) -> bool:
    """Whether rows of numbers travel in a wire format, and not as they are."""
    if wire == "float32" or not dtype.is_floating_point or (wire == "bfloat16" and dtype.itemsize <= 2):
        return False
    return layout.chunk_numel >= BLOCK


def gather(collectives: Collectives, items: Sequence[Rows], unit: str, wire: str) -> Exchange:
    """`Collectives.gather`, in a wire format; also this rank's own rows get the values that the others receive.

    Args:
        collectives: do the exchange.
        items: as there.
        unit: as there.
        wire: "float32" (as they are), "bfloat16" or "int8".
    """
    packed = [item for item in items if _is_packed(item, wire)]
    if not packed:
        return collectives.gather(items, unit)
    rank, ranks = collectives.rank, collectives.num_ranks
    sent = []
    for item in packed:
        size = num_bytes(wire, item.layout.chunk_numel)
        room = torch.empty(ranks * size, dtype=torch.uint8, device=item.flat.device)
        own = item.flat.new_zeros(item.layout.chunk_numel)  # the last ranks may have fewer rows
        own[: item.layout.local_numel(rank)] = item.layout.elements_of(item.flat, rank)
        room[rank * size : (rank + 1) * size] = pack(wire, own)
        sent.append(Rows(room, RowLayout((ranks * size,), ranks)))
    ids = {id(item) for item in packed}
    exchange = collectives.gather([*(item for item in items if id(item) not in ids), *sent], unit)

    def finish() -> None:
        for item, rows in zip(packed, sent, strict=True):
            chunk = item.layout.chunk_numel
            for number, values in enumerate(rows.flat.view(ranks, -1)):
                unpack(wire, values, item.flat[number * chunk : (number + 1) * chunk])

    return _Then(exchange, finish)


@dataclass(frozen=True)
class _Sum:
    """Rows of one gradient that this rank adds up.

    Attributes:
        item: the whole gradient.
        output: where they are added up.
        terms: what each rank sends of them, packed; this rank's own is missing.
    """

    item: Rows
    output: Tensor
    terms: dict[int, Tensor]


def reduce_scatter(
    collectives: Collectives, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str, divisor: int, wire: str
) -> Exchange:
    """`Collectives.reduce_scatter`, in a wire format: each rank sends every other its rows, packed once.

    Args:
        collectives: do the exchange.
        items: as there.
        outputs: as there.
        unit: as there.
        divisor: as there.
        wire: "float32" (as they are), "bfloat16" or "int4".
    """
    if wire == "float32":
        return collectives.reduce_scatter(items, outputs, unit, divisor)
    rank, ranks = collectives.rank, collectives.num_ranks
    sent: list[list[Tensor]] = [[] for _ in range(ranks)]
    received: list[list[Tensor]] = [[] for _ in range(ranks)]
    sums = []
    for item, output in zip(items, outputs, strict=True):
        terms: dict[int, Tensor] = {}
        for peer in range(ranks):
            rows = item.layout.elements_of(item.flat, peer)
            if peer == rank:
                continue
            if _is_packed(item, wire):
                size = num_bytes(wire, output.numel())
                terms[peer] = torch.empty(size, dtype=torch.uint8, device=output.device)
                rows = pack(wire, rows)
            else:
                terms[peer] = torch.empty_like(output, dtype=rows.dtype)
            sent[peer].append(rows)
            received[peer].append(terms[peer])
        sums.append(_Sum(item, output, terms))
    exchange = collectives.all_to_all(sent, received, "reduce_scatter", unit)

    def finish() -> None:
        for each in sums:
            if not _is_packed(each.item, wire):
                own = {rank: each.item.layout.elements_of(each.item.flat, rank)}
                terms = own | each.terms
                sum_in_order(each.output, [terms[number] for number in sorted(terms)], divisor)
                continue
            each.output.copy_(each.item.layout.elements_of(each.item.flat, rank))
            room = torch.empty_like(each.output)  # for one peer after the other
            for values in each.terms.values():
                unpack(wire, values, room)
                each.output.add_(room)
            divide([each.output], divisor)

    return _Then(exchange, finish)
