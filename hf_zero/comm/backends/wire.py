"""Wire formats: rows and gradients that travel in fewer bits than they are computed in.

[Note: blocks] int8 and int4 take blocks of 256 values and one float32 scale each: a value is off by at most 1/254 (int8) or
1/14 (int4) of its block's greatest. What is not finite makes its whole block so. Integers, bytes of quantised parameters, and
tensors of which no rank has a whole block, travel as they are. What is gathered is the same on all ranks, the owner's own rows
included, so masters stay apart from it. Gradients are packed once, for the rank that adds them up, never on the way; the sum is
in the outputs' dtype.

Source: ZeRO++ (arXiv:2306.10209), qwZ and qgZ; blocks as in section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm.backends.pairwise import sum_in_order
from hf_zero.comm.collectives import Collectives, RowCollectives, Rows, divide
from hf_zero.comm.exchange import Exchange
from hf_zero.layout import RowLayout

BLOCK = 256
_GREATEST = {"int8": 127, "int4": 7}
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_CACHED_BLOCKS = 1024  # a MiB of float32


def num_bytes(wire: str, numel: int) -> int:
    """Bytes of `numel` packed values."""
    if wire == "bfloat16":
        return 2 * numel
    blocks = -(-numel // BLOCK)
    return blocks * (BLOCK // (1 if wire == "int8" else 2) + 4)


def pack(wire: str, values: Tensor, packed: Tensor | None = None) -> Tensor:
    """Flat values as [num_bytes] uint8: numbers first, then the scales of their blocks.

    Args:
        wire: the format.
        values: [numel].
        packed: where to write; [num_bytes] of as many values or more, whose rest are zeros.
    """
    if packed is None:
        packed = torch.empty(num_bytes(wire, values.numel()), dtype=torch.uint8, device=values.device)
    if wire == "bfloat16":
        numbers = packed.view(torch.bfloat16)
        numbers[: values.numel()].copy_(values)
        numbers[values.numel() :].zero_()
        return packed
    numbers, scales = _parts(wire, packed)
    full = values.numel() // BLOCK
    table = values[: full * BLOCK].view(-1, BLOCK)
    for rows in _pieces(full, values.device):
        _pack(wire, table[rows], numbers[rows], scales[rows])
    if full < len(scales):
        rest = values.new_zeros(len(scales) - full, BLOCK)
        rest.view(-1)[: values.numel() - full * BLOCK].copy_(values[full * BLOCK :])
        _pack(wire, rest, numbers[full:], scales[full:])
    return packed


def _parts(wire: str, packed: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, BLOCK or half of it] int8 and [blocks, 1] float32: the numbers and the scales of packed values."""
    width = BLOCK if wire == "int8" else BLOCK // 2
    count = packed.numel() // (width + 4)
    split = count * width
    return packed[:split].view(torch.int8).view(count, width), packed[split:].view(torch.float32).view(count, 1)


def _pieces(count: int, device: torch.device) -> Iterator[slice]:
    """Blocks to work on at once: on a CPU as many as its caches hold, since one pass over memory costs more than all work."""
    step = _CACHED_BLOCKS if device.type == "cpu" else max(count, 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _pack(wire: str, table: Tensor, numbers: Tensor, scales: Tensor) -> None:
    """Write the numbers and scales of [blocks, BLOCK] values."""
    greatest = _GREATEST[wire]
    room = table.to(torch.float32).abs()
    peaks = room.amax(1, keepdim=True)
    # Rounded down, so that the greatest of all floats is not unpacked as an infinity; infinities stay what they are. A scale
    # has all bits of a float, so that no number is too great.
    peaks = torch.where(peaks.isinf(), peaks, (peaks / greatest).clamp_(_LEAST, _MOST / greatest * (1 - 2**-23)))
    scales.copy_(peaks)
    torch.div(table, peaks, out=room).round_().nan_to_num_(0.0)
    if wire == "int8":
        numbers.copy_(room)
        return
    small, out = room.to(torch.int8).view(torch.uint8), numbers.view(torch.uint8)
    torch.bitwise_left_shift(small[:, BLOCK // 2 :], 4, out=out)
    out |= small[:, : BLOCK // 2] & 15


def unpack(wire: str, packed: Tensor, output: Tensor) -> None:
    """Write what `pack` has packed into `output`, flat."""
    if wire == "bfloat16":
        output.copy_(packed.view(torch.bfloat16)[: output.numel()])
        return
    numbers, scales = _parts(wire, packed)
    full = output.numel() // BLOCK
    table = output[: full * BLOCK].view(-1, BLOCK)
    for rows in _pieces(full, output.device):
        _unpack(wire, numbers[rows], scales[rows], table[rows])
    if left := output.numel() - full * BLOCK:
        rest = output.new_empty(1, BLOCK)
        _unpack(wire, numbers[full : full + 1], scales[full : full + 1], rest)
        output[full * BLOCK :].copy_(rest[0, :left])


def _unpack(wire: str, numbers: Tensor, scales: Tensor, output: Tensor) -> None:
    if wire == "int8":
        output.copy_(numbers * scales)
        return
    output[:, : BLOCK // 2].copy_(((numbers << 4) >> 4) * scales)
    output[:, BLOCK // 2 :].copy_((numbers >> 4) * scales)


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
    """Whether rows of numbers travel in a wire format, and not as they are; a fact that all ranks share.

    Rows that fill no block travel as they are: packed they are padded to a block, so that in int8 a bias of 64 values takes
    260 bytes instead of 256. It is the length of a rank's chunk that decides, since the last ranks may have fewer rows.
    """
    if wire == "float32" or not dtype.is_floating_point or (wire == "bfloat16" and dtype.itemsize <= 2):
        return False
    return layout.chunk_numel >= BLOCK


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


class WireCollectives(RowCollectives):
    """Rows and gradients in wire formats, by exchanges that know nothing of formats.

    Args:
        exact: the exchanges. What must arrive as it is (masters, checkpoints, integers) is given to them.
        gathered: the format of rows: "float32" (as they are), "bfloat16" or "int8".
        reduced: the format of gradients: "float32" (as they are), "bfloat16" or "int4".
    """

    def __init__(self, exact: Collectives, gathered: str, reduced: str) -> None:
        self._exact, self._gathered, self._reduced = exact, gathered, reduced

    def gather(self, items: Sequence[Rows], unit: str) -> Exchange:
        """See `RowCollectives.gather`; also this rank's own rows get the values that the others receive."""
        wire = self._gathered
        packed = [item for item in items if _is_packed(item, wire)]
        if not packed:
            return self._exact.gather(items, unit)
        rank, ranks = self._exact.rank, self._exact.num_ranks
        sent = []
        for item in packed:
            size = num_bytes(wire, item.layout.chunk_numel)
            room = torch.empty(ranks * size, dtype=torch.uint8, device=item.flat.device)
            pack(wire, item.layout.elements_of(item.flat, rank), room[rank * size : (rank + 1) * size])
            sent.append(Rows(room, RowLayout((ranks * size,), ranks)))
        ids = {id(item) for item in packed}
        exchange = self._exact.gather([*(item for item in items if id(item) not in ids), *sent], unit)

        def finish() -> None:
            # This rank's rows too: with its exact ones it would compute with other weights than its peers do.
            for item, rows in zip(packed, sent, strict=True):
                chunk = item.layout.chunk_numel
                if rows.flat.device.type != "cpu":  # made where the gather began: perhaps on another stream
                    rows.flat.record_stream(torch.accelerator.current_stream(rows.flat.device))
                for number, values in enumerate(rows.flat.view(ranks, -1)):
                    unpack(wire, values, item.flat[number * chunk : (number + 1) * chunk])

        return _Then(exchange, finish)

    def reduce_scatter(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str, divisor: int = 1) -> Exchange:
        """See `RowCollectives.reduce_scatter`; each rank sends every other its rows, packed once."""
        wire = self._reduced
        if wire == "float32":
            return self._exact.reduce_scatter(items, outputs, unit, divisor)
        rank, ranks = self._exact.rank, self._exact.num_ranks
        sent: list[list[Tensor]] = [[] for _ in range(ranks)]
        received: list[list[Tensor]] = [[] for _ in range(ranks)]
        sums = []
        for item, output in zip(items, outputs, strict=True):
            terms: dict[int, Tensor] = {}
            for peer in range(ranks):
                if peer == rank:
                    continue
                rows = item.layout.elements_of(item.flat, peer)
                if _is_packed(item, wire):
                    size = num_bytes(wire, output.numel())
                    terms[peer] = torch.empty(size, dtype=torch.uint8, device=output.device)
                    rows = pack(wire, rows)
                else:
                    terms[peer] = torch.empty_like(output, dtype=rows.dtype)
                sent[peer].append(rows)
                received[peer].append(terms[peer])
            sums.append(_Sum(item, output, terms))
        exchange = self._exact.all_to_all(sent, received, "reduce_scatter", unit)

        def finish() -> None:
            for each in sums:
                self._add_up(each, divisor)

        return _Then(exchange, finish)

    def _add_up(self, each: _Sum, divisor: int) -> None:
        """Write the sum of all ranks' terms, divided.

        The sum is divided, and not its terms: those would be rounded once more, before they are packed. This rank's own term
        never travels, and stays exact: unlike what is gathered, these rows are added up on this rank only.
        """
        own = each.item.layout.elements_of(each.item.flat, self._exact.rank)
        if not _is_packed(each.item, self._reduced):
            terms = {self._exact.rank: own} | each.terms
            sum_in_order([each.output], [[terms[number]] for number in sorted(terms)], divisor)
            return
        each.output.copy_(own)  # not added: an interrupted sum is made again from the start
        room = torch.empty_like(each.output)  # for one peer after the other
        for values in each.terms.values():
            unpack(self._reduced, values, room)
            each.output.add_(room)
        divide([each.output], divisor)
