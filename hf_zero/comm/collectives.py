"""The one seam through which bytes pass between ranks: gather, reduce_scatter, all_reduce, reduce, broadcast, agree.

Gathers and reductions return a handle to wait on later. An exchange that fails names the peer, the operation and the unit.
`alone`, `native`, `pairwise` and `host` implement it, `select` chooses between them, and `wire` wraps one of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.agreements import Agreements
from hf_zero.comm.copies import copies_of
from hf_zero.comm.exchange import Exchange, Work
from hf_zero.comm.groups import torch_groups
from hf_zero.layout import RowLayout

_PACKED_BYTES = 64 * 2**10  # a message costs more than copying this, and being copied from it

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A flat tensor that holds a whole parameter, and how it is cut.

    Attributes:
        flat: [layout.padded_numel] for a gather, [layout.numel] for a reduction; contiguous.
        layout: which rank owns which elements.
        is_numbers: False for bytes of a quantised parameter, whatever their dtype: no wire format may round them.
    """

    flat: Tensor
    layout: RowLayout
    is_numbers: bool = True


class RowCollectives(ABC):
    """The two exchanges that partitioning is made of."""

    @abstractmethod
    def gather(self, items: Sequence[Rows], unit: str) -> Exchange:
        """Complete padded flat tensors in which every rank has filled its own chunk.

        Args:
            items: each with a flat of `layout.padded_numel` elements; written outside this rank's chunk.
            unit: the unit's name, for the ledger and for errors.

        Source: ZeRO (arXiv:1910.02054), section 5.3.
        """

    @abstractmethod
    def reduce_scatter(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str, divisor: int = 1) -> Exchange:
        """Sum flat tensors over the ranks, in rank order and in the outputs' dtype, and keep this rank's rows.

        Args:
            items: each with a flat of `layout.numel` elements; may be read until `settle()`, never written.
            outputs: per item [layout.local_numel(rank)], same dtype or a wider one; may be read after `wait()`.
            unit: the unit's name, for the ledger and for errors.
            divisor: of the sums; the number of ranks for an average.

        Source: ZeRO (arXiv:1910.02054), section 5.2.
        """


class Collectives(Agreements, RowCollectives):
    """Exchanges over the ranks of one axis, counted in a ledger. Ranks are counted from 0 within it.

    Gathers and reductions each have their own group (pairwise: their own tags), because all ranks keep the same order only
    within a kind. A rank that has no gradient for a unit reduces that unit later than the others do, after other gathers.

    Args:
        axis: the ranks.

    Attributes:
        name: its name in `ZeroConfig.collectives`.
        reason: why `auto` takes it, in words; otherwise empty.
        shares_memory: the ranks share the memory from `allocate`, and see each other's rows change.
        sends_rows_as_given: `reduce_scatter` sends its items in their own dtype; if False, in the dtype of its outputs.
        staging_bytes: limit on the peers' rows that a reduce-scatter holds before it adds them up, if it holds any.
    """

    name: str
    shares_memory = False
    sends_rows_as_given = False
    staging_bytes = 64 * 2**20

    def allocate(self, num_bytes: int, label: str) -> torch.UntypedStorage:
        """Allocate memory for whole parameters, shared by all ranks where `shares_memory`.

        Args:
            num_bytes: the same on every rank.
            label: what the memory is for; errors name it.

        Raises:
            CollectiveError: a rank could not get the memory; raised on all ranks.
        """
        return torch.UntypedStorage(num_bytes, device=self.device)  # type: ignore[no-untyped-call]

    def before_write(self, label: str) -> None:
        """Wait until every rank is about to change parameters, if ranks could otherwise see them change while computing.

        Args:
            label: what changes them.

        Raises:
            CollectiveError: a rank did not arrive.
        """

    def settle(self) -> None:
        """Wait until the peers no longer need the tensors of reductions that this rank has waited for."""

    def reduce_whole(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str, divisor: int = 1) -> Exchange:
        """Like `reduce_scatter`, by an all-reduce of whole tensors; the transport decides the order of additions."""
        # Copies, because the transport reduces in place and autograd may still own the gradients.
        sums = copies_of([item.flat for item in items], [output.dtype for output in outputs])
        operation, rest = self._operation(divisor)

        def keep_own_rows() -> None:
            own = [item.layout.elements_of(total, self.rank) for item, total in zip(items, sums, strict=True)]
            torch._foreach_copy_(list(outputs), own)
            divide(outputs, rest)

        return self._all_reduce(sums, unit, operation, keep_own_rows)

    def reduce_to_owners(
        self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str, divisor: int = 1
    ) -> Exchange:
        """Like `reduce_scatter`, by one reduce for each rank; the transport decides the order of additions."""
        description = self._describe("reduce", unit)
        parts: list[Work] = []
        buffers: list[Tensor] = []
        arrivals: list[tuple[list[Tensor], Tensor]] = []
        for dtype in dict.fromkeys(output.dtype for output in outputs):
            chosen = [(item, output) for item, output in zip(items, outputs, strict=True) if output.dtype == dtype]
            for owner in range(self.num_ranks):
                # A separate copy: the transport writes to it even on ranks that are not the owner.
                buffer = torch.cat([item.layout.elements_of(item.flat, owner) for item, _ in chosen]).to(dtype)
                if not buffer.numel():
                    continue
                call = partial(dist.reduce, buffer, group=self.group, group_dst=owner, async_op=True)
                parts.append(self._part(self._start(description, call)))
                buffers.append(buffer)
                if owner == self.rank:
                    arrivals.append(([output for _, output in chosen], buffer))

        def finish() -> None:
            for targets, buffer in arrivals:
                for target, total in zip(
                    targets, torch.split(buffer, [len(target) for target in targets]), strict=True
                ):
                    torch.div(total, divisor, out=target)

        received = sum(buffer.nbytes for _, buffer in arrivals) * (self.num_ranks - 1)
        entry = self.ledger.add("reduce", unit, received)
        return self._exchange(description, parts, entry, finish, keep=buffers)

    def all_reduce(self, tensors: Sequence[Tensor], unit: str, divisor: int = 1) -> Exchange:
        """Sum flat tensors over the ranks, in place; the result has the same bits on every rank.

        Args:
            tensors: contiguous; written.
            unit: the unit's name, for the ledger and for errors.
            divisor: of the sums; the number of ranks for an average.
        """
        operation, rest = self._operation(divisor)
        return self._all_reduce(tensors, unit, operation, partial(divide, tensors, rest))

    def _operation(self, divisor: int) -> tuple[Any, int]:
        """How the transport adds up, and what is left to divide by: NCCL divides each term, as DDP does, on its way."""
        if divisor == self.num_ranks and self.averages:
            return dist.ReduceOp.AVG, 1
        return dist.ReduceOp.SUM, divisor

    @cached_property
    def averages(self) -> bool:
        """Whether the transport can divide. Torch does not tell, and names say little: it is tried once, by all ranks."""
        if self.backend == "gloo":
            return False
        try:
            dist.all_reduce(torch.zeros(1, device=self.device), dist.ReduceOp.AVG, group=self.group)
        except (RuntimeError, ValueError, NotImplementedError):
            return False
        return True

    def _all_reduce(self, tensors: Sequence[Tensor], unit: str, operation: Any, finish: Callable[[], None]) -> Exchange:
        tensors = [tensor for tensor in tensors if tensor.numel()]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        entry = self.ledger.add("all_reduce", unit, 2 * num_bytes * (self.num_ranks - 1) // self.num_ranks)
        description = self._describe("all_reduce", unit)
        messages = [[each] for each in tensors]  # those of a dtype are one launch, see `_start_all`
        if not self.coalesces:
            messages = in_messages(tensors, lambda t: (t.dtype, t.nbytes), self.staging_bytes)
        buffers = [message[0] if len(message) == 1 else torch.cat(message) for message in messages]
        reduce = partial(dist.all_reduce, op=operation, group=self.group, async_op=True)
        parts: list[Work] = []
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):  # all of one launch are of one dtype
            calls = [partial(reduce, buffer) for buffer in buffers if buffer.dtype == dtype]
            parts += self._start_all(description, calls, self.group)

        def unpack() -> None:
            for message, buffer in zip(messages, buffers, strict=True):
                if len(message) > 1:
                    torch._foreach_copy_(message, torch.split(buffer, [len(each) for each in message]))
            finish()

        return self._exchange(description, parts, entry, unpack, keep=buffers)

    def _start_all(
        self, description: str, calls: Sequence[Callable[[], dist.Work | None]], group: dist.ProcessGroup
    ) -> list[Work]:
        """Start collectives of one kind: as one launch where the backend can, as NCCL."""
        if not self.coalesces or not calls:
            return [self._part(self._start(description, call)) for call in calls]
        try:
            with torch_groups.coalesced(group, self.device) as works:
                for call in calls:
                    call()
        except RuntimeError as error:
            raise self._failed_to_start(error, description) from error
        return [self._part(work) for work in works]

    def all_to_all(
        self, sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], kind: str, unit: str
    ) -> Exchange:
        """Send tensors to each peer, and receive others from it.

        Args:
            sent: by peer, flat and contiguous; this rank's own entry is not looked at.
            received: by peer, flat and contiguous, of the sizes and dtypes that the peer sends; may be read after `wait()`.
            kind: of exchange, for the ledger and for errors.
            unit: what travels, for the ledger and for errors.
        """
        description = self._describe(kind, unit)
        outgoing = [self._packed(tensors, peer) for peer, tensors in enumerate(sent)]
        incoming = [self._room_for(tensors, peer) for peer, tensors in enumerate(received)]
        entry = self.ledger.add(kind, unit, sum(map(len, incoming)))
        parts: list[Work] = []
        if self.device.type != "cpu":
            call = partial(dist.all_to_all, incoming, outgoing, group=self.group, async_op=True)
            parts.append(self._part(self._start(description, call)))
        else:  # gloo has not this collective for every type of tensor, and messages name the peer that is missing
            (tag,) = self._tags("all_to_all", unit, 1)
            peers = self._peers()
            parts += [self._receive(description, incoming[p], p, tag) for p in peers if len(incoming[p])]
            parts += [self._send(description, outgoing[p], p, tag) for p in peers if len(outgoing[p])]

        def finish() -> None:
            for peer, (tensors, buffer) in enumerate(zip(received, incoming, strict=True)):
                if len(tensors) > 1 and peer != self.rank:
                    parts_of = torch.split(buffer, [tensor.nbytes for tensor in tensors])
                    for tensor, values in zip(tensors, parts_of, strict=True):
                        tensor.view(torch.uint8).copy_(values)

        return self._exchange(description, parts, entry, finish, keep=(outgoing, incoming))

    def _packed(self, tensors: Sequence[Tensor], peer: int) -> Tensor:
        """The bytes of tensors in one; of a single one without a copy."""
        if peer == self.rank or not tensors:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        flat = [tensor.view(torch.uint8) for tensor in tensors]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def _room_for(self, tensors: Sequence[Tensor], peer: int) -> Tensor:
        """Room for what a peer has `_packed`: the memory of a single tensor itself."""
        if peer == self.rank or not tensors:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        if len(tensors) == 1:
            return tensors[0].view(torch.uint8)
        return torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device=self.device)

    def broadcast(self, tensor: Tensor, source: int, unit: str) -> None:
        """Copy `tensor` from rank `source` to all others, and wait for it.

        What lives in the host's memory goes over the control group, where it neither waits for a device nor makes it wait.
        """
        if not tensor.numel():
            return
        received = 0 if self.rank == source else tensor.nbytes
        entry = self.ledger.add("broadcast", unit, received)
        description = self._describe(f"broadcast from rank {source}", unit)
        values = tensor.contiguous()
        flat = values.view(-1).view(torch.uint8)  # transports know few dtypes
        is_on_host = tensor.device.type == "cpu"
        group = self.axis.control_group if is_on_host else self.group
        work = self._start(description, lambda: dist.broadcast(flat, group=group, group_src=source, async_op=True))
        part = Work(work, None) if is_on_host else self._part(work)
        self._exchange(description, [part], entry).wait()
        if values is not tensor:
            tensor.copy_(values)


def in_messages(
    items: Sequence[Item], sizes: Callable[[Item], tuple[torch.dtype, int]], most_bytes: int
) -> list[list[Item]]:
    """What travels in one message: a large item, or several small ones of a dtype; the same on every rank.

    Args:
        items: to be sent.
        sizes: dtype and number of bytes of an item.
        most_bytes: of several items in one message.
    """
    alone: list[list[Item]] = []
    packed: list[list[Item]] = []
    open_ones: dict[torch.dtype, tuple[list[Item], int]] = {}
    for item in items:
        dtype, num_bytes = sizes(item)
        if num_bytes > _PACKED_BYTES:
            alone.append([item])
            continue
        message, packed_bytes = open_ones.get(dtype, ([], most_bytes))
        if packed_bytes + num_bytes > most_bytes:
            message, packed_bytes = [], 0
            packed.append(message)
        message.append(item)
        open_ones[dtype] = message, packed_bytes + num_bytes
    return alone + packed


def add(lefts: Sequence[Tensor], rights: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """output = left + right, of each, in the dtype of `output`: which may be `left`, or `right` if both have one dtype."""
    for left, right, output in zip(lefts, rights, outputs, strict=True):
        if output.dtype == left.dtype:
            torch.add(left, right, out=output)
        else:
            output.copy_(left)
            output.add_(right)


def divide(sums: Sequence[Tensor], divisor: int) -> None:
    """Each of the sums / divisor, in place."""
    if divisor != 1 and sums:
        torch._foreach_div_(list(sums), divisor)
