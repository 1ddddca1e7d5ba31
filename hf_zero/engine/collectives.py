"""The one seam through which bytes pass between ranks: gather, reduce_scatter, all_reduce, broadcast, agree.

Every exchange returns a handle that is waited for later, with a timeout that names the peer, the operation and the unit.
Two implementations: `native` (torch.distributed as it is) and `pairwise` (each pair of ranks swaps exactly the rows that
the other one needs, point to point), which on gloo is several times faster.
"""

from __future__ import annotations

import datetime
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hf_zero.engine.layout import RowLayout
from hf_zero.errors import CollectiveError
from hf_zero.ledger import Entry, Ledger

_LABEL_BYTES = 96
_CONNECT_S = 60.0
_TAG_KINDS = ("gather", "reduce_scatter", "agreement")


@dataclass(frozen=True)
class Rows:
    """A flat tensor that holds a parameter whole, and how it is cut.

    Attributes:
        flat: [layout.padded_numel] for a gather, [layout.numel] for a reduction; contiguous.
        layout: which rank owns which elements.
    """

    flat: Tensor
    layout: RowLayout


@dataclass(frozen=True)
class _Part:
    """One point of an exchange that has to be waited for: torch's handle, and the peer it depends on (None: all)."""

    work: dist.Work
    peer: int | None


class Exchange:
    """An exchange under way. Its tensors may be read, written or freed only after `wait()`."""

    def __init__(
        self,
        description: str,
        timeout_s: float,
        parts: Sequence[_Part] = (),
        entry: Entry | None = None,
        finish: Callable[[], None] | None = None,
        keep: object = None,
    ) -> None:
        self._description = description
        self._timeout_s = timeout_s
        self._parts = list(parts)
        self._entry = entry
        self._finish = finish
        self._keep = keep  # tensors that the transport still reads
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether `wait()` has returned."""
        return self._is_done

    def wait(self) -> None:
        """Block until the exchange is complete on this rank.

        Raises:
            CollectiveError: a peer is gone, is late by more than the timeout, or never took part.
        """
        if self._is_done:
            return
        started = time.perf_counter()
        timeout = datetime.timedelta(seconds=self._timeout_s)
        for part in self._parts:
            try:
                part.work.wait(timeout)
            except RuntimeError as error:
                raise _named(error, self._description, part.peer, self._timeout_s) from error
        if self._finish is not None:
            self._finish()
        if self._entry is not None:
            self._entry.seconds += time.perf_counter() - started
        self._is_done = True
        self._parts, self._keep, self._finish = [], None, None


def _named(error: RuntimeError, description: str, peer: int | None, timeout_s: float) -> CollectiveError:
    """The error of one exchange with the peer and the operation in it."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    is_late = "imed out" in reason or "imeout" in reason
    whom = "its peers" if peer is None else f"rank {peer}"
    what = f"waited {timeout_s:g} s for {whom}" if is_late else f"lost {whom}"
    return CollectiveError(
        f"rank {dist.get_rank()} {what} in {description}. Every rank must run the same units in the same order: look for "
        f"an error on {whom}, a unit that only some ranks call, or a call made on one rank only "
        f"(timeout_s raises the limit). Cause: {reason}"
    )


class Collectives(ABC):
    """Exchanges over the ranks of one process group, counted in a ledger.

    Gathers and reductions have a group (pairwise: tags) each, since only within a kind do all ranks keep one order: a rank
    that has no gradient for a unit reduces it later than the others do, after other gathers.

    Args:
        group: for reductions; a group of its own, so that other exchanges of the program cannot get in between.
        gather_group: the same ranks, for gathers.
        control_group: the same ranks over gloo, for agreements: they then need no device, and can name who is missing.
        device: where the exchanged tensors live.
        timeout_s: seconds that a single exchange may take.
        ledger: what counts the exchanges.
    """

    name: str

    def __init__(
        self,
        group: dist.ProcessGroup,
        gather_group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
        device: torch.device,
        timeout_s: float,
        ledger: Ledger,
    ) -> None:
        self.group = group
        self.gather_group = gather_group
        self.control_group = control_group
        self.device = device
        self.timeout_s = timeout_s
        self.ledger = ledger
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.backend = str(dist.get_backend(group))
        # Unnamed: PEFT takes a named mesh, unless it is called "fsdp", for tensor parallelism, and uses local shapes.
        # Of the default group: torch's DTensor caches take equal meshes for one another, so one mesh must serve them all.
        self.mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)  # type: ignore[arg-type]
        self._sequence = 0
        self.trail = 0  # a number for all gathers and reductions so far, in order within each kind
        self._tags_used = dict.fromkeys(_TAG_KINDS, 0)
        self._steps: dict[str, int] = {}

    @abstractmethod
    def gather(self, items: Sequence[Rows], unit: str) -> Exchange:
        """Complete padded flat tensors of which every rank has filled its own chunk.

        Args:
            items: each with a flat of `layout.padded_numel` elements; written outside this rank's chunk.
            unit: the unit's name, for the ledger and for errors.

        Source: ZeRO (arXiv:1910.02054), section 5.3.
        """

    @abstractmethod
    def reduce_scatter(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str) -> Exchange:
        """Sum flat tensors over the ranks, in rank order, and keep this rank's rows.

        Args:
            items: each with a flat of `layout.numel` elements; may be overwritten.
            outputs: per item [layout.local_numel(rank)], same dtype; may be read after `wait()`.
            unit: the unit's name, for the ledger and for errors.

        Source: ZeRO (arXiv:1910.02054), section 5.2.
        """

    def all_reduce(self, tensors: Sequence[Tensor], unit: str) -> Exchange:
        """Sum flat tensors over the ranks, in place; the result has the same bits on every rank."""
        tensors = [tensor for tensor in tensors if tensor.numel()]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        entry = self.ledger.add("all_reduce", unit, 2 * num_bytes * (self.num_ranks - 1) // self.num_ranks)
        description = self._describe("all_reduce", unit)
        parts = []
        for tensor in tensors:
            work = self._start(description, partial(dist.all_reduce, tensor, group=self.group, async_op=True))
            parts.append(_Part(work, None))
        return Exchange(description, self.timeout_s, parts, entry, keep=tensors)

    def broadcast(self, tensor: Tensor, source: int, unit: str) -> None:
        """Copy `tensor` from rank `source` to all others, and wait for it."""
        if not tensor.numel():
            return
        received = 0 if self.rank == source else tensor.nbytes
        entry = self.ledger.add("broadcast", unit, received)
        description = self._describe(f"broadcast from rank {source}", unit)
        flat = tensor.contiguous()
        work = self._start(description, lambda: dist.broadcast(flat, group=self.group, group_src=source, async_op=True))
        Exchange(description, self.timeout_s, [_Part(work, None)], entry).wait()
        if flat is not tensor:
            tensor.copy_(flat)

    def agree(self, values: Sequence[int], label: str, timeout_s: float | None = None) -> list[list[int]]:
        """Show every rank's `values` to every rank: a small meeting in which all ranks must name the same `label`.

        Args:
            values: int64 values, as many on every rank.
            label: what the meeting is about.
            timeout_s: how long to wait for the others; the usual time by default.

        Returns:
            The values by rank.

        Raises:
            CollectiveError: a rank did not come in time, or came with another label or another number of values.
        """
        name = label.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES, b"\0")
        header = torch.frombuffer(bytearray(name), dtype=torch.uint8).to(torch.int64)
        head = torch.cat([torch.tensor([len(values)], dtype=torch.int64), header])
        heads = self._swap(head, label, timeout_s or self.timeout_s)
        for peer, other in enumerate(heads):
            if not torch.equal(other, head):
                raise CollectiveError(
                    f"rank {self.rank} is at {label!r} ({len(values)} values), but rank {peer} is at "
                    f"{_decode(other)!r} ({int(other[0])} values): all ranks must make the same calls in the same order."
                )
        if not values:
            return [[] for _ in heads]
        rows = self._swap(torch.tensor(list(values), dtype=torch.int64), label, self.timeout_s)
        return [row.tolist() for row in rows]

    def meet(self, label: str, timeout_s: float | None = None) -> None:
        """Wait until every rank has come to the same call, or say who did not."""
        self.agree((), label, timeout_s)

    def _swap(self, message: Tensor, label: str, timeout_s: float) -> list[Tensor]:
        """Every rank's `message` ([n] int64, CPU), by rank; point to point, so that a missing rank has a name."""
        self.ledger.add("agree", label, message.nbytes * (self.num_ranks - 1))
        description = self._describe("agreement", label)
        rows = message.repeat(self.num_ranks, 1)
        (tag,) = self._tags("agreement", "", 1)
        group = self.control_group
        parts = [_Part(self._receive(description, rows[peer], peer, tag, group), peer) for peer in self._peers()]
        parts += [_Part(self._send(description, message, peer, tag, group), peer) for peer in self._peers()]
        Exchange(description, timeout_s, parts).wait()
        return list(rows.unbind())

    def _peers(self) -> list[int]:
        """The other ranks, each rank starting at its right neighbour so that not all talk to one at a time."""
        return [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]

    def _describe(self, kind: str, unit: str) -> str:
        self._sequence += 1
        if kind in ("gather", "reduce_scatter"):
            # By kind: gathers may be interleaved with reductions in another way on every rank.
            self._steps[kind] = zlib.crc32(f"{kind} {unit}".encode(), self._steps.get(kind, 0))
            self.trail = sum(self._steps.values())
        return f"{kind} of {unit!r} (exchange {self._sequence})"

    def _tags(self, kind: str, unit: str, count: int) -> list[int]:
        """Tags of one exchange, made of its kind, its number among those, and its unit.

        So ranks that are off by one wait for each other in vain instead of swapping the data of equal-shaped units.
        Tags of two units that happen to be equal do no harm while the ranks agree: equal tags are served in order.
        """
        self._tags_used[kind] += 1
        slots = len(_TAG_KINDS)
        first = zlib.crc32(f"{self._tags_used[kind]} {unit}".encode())
        return [(first + step) % (2**31 // slots) * slots + _TAG_KINDS.index(kind) for step in range(count)]

    def _start(self, description: str, call: Callable[[], dist.Work | None]) -> dist.Work:
        try:
            work = call()
        except RuntimeError as error:
            raise _named(error, description, None, self.timeout_s) from error
        assert work is not None, "this rank is not in the group"
        return work

    def _send(
        self, description: str, tensor: Tensor, peer: int, tag: int, group: dist.ProcessGroup | None = None
    ) -> dist.Work:
        try:
            return (group or self.group).send([tensor], peer, tag)
        except RuntimeError as error:
            raise _named(error, description, peer, self.timeout_s) from error

    def _receive(
        self, description: str, tensor: Tensor, peer: int, tag: int, group: dist.ProcessGroup | None = None
    ) -> dist.Work:
        try:
            return (group or self.group).recv([tensor], peer, tag)
        except RuntimeError as error:
            raise _named(error, description, peer, self.timeout_s) from error


class NativeCollectives(Collectives):
    """torch.distributed's own collectives, one a parameter, in place."""

    name = "native"

    def gather(self, items: Sequence[Rows], unit: str) -> Exchange:
        """See `Collectives.gather`."""
        parts, received = [], 0
        description = self._describe("gather", unit)
        for item in items:
            chunk = item.layout.chunk_numel
            if not chunk:
                continue
            own = item.flat[self.rank * chunk : (self.rank + 1) * chunk]
            work = self._start(description, partial(self._gather_around, item.flat, own))
            parts.append(_Part(work, None))
            received += item.flat.nbytes - own.nbytes
        return Exchange(description, self.timeout_s, parts, self.ledger.add("gather", unit, received), keep=items)

    def _gather_around(self, flat: Tensor, own: Tensor) -> dist.Work | None:
        if self.backend != "gloo":
            work: dist.Work | None = dist.all_gather_into_tensor(flat, own, self.gather_group, async_op=True)
            return work
        # gloo writes `own` back at the end: it must not land on rows that have changed meanwhile.
        chunks = list(flat.chunk(self.num_ranks))
        chunks[self.rank] = torch.empty_like(own)
        work = dist.all_gather(chunks, own, self.gather_group, async_op=True)
        return work

    def reduce_scatter(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str) -> Exchange:
        """See `Collectives.reduce_scatter`."""
        parts, keep, copies, received = [], [], [], 0
        description = self._describe("reduce_scatter", unit)
        for item, output in zip(items, outputs, strict=True):
            layout = item.layout
            if not layout.chunk_numel:
                continue
            padded = item.flat
            if layout.padded_numel != layout.numel:
                padded = torch.nn.functional.pad(item.flat, (0, layout.padded_numel - layout.numel))
            chunk = output
            if output.numel() != layout.chunk_numel:
                chunk = output.new_empty(layout.chunk_numel)
                copies.append((output, chunk[: output.numel()]))
            call = partial(dist.reduce_scatter_tensor, chunk, padded, group=self.group, async_op=True)
            work = self._start(description, call)
            parts.append(_Part(work, None))
            keep.append((padded, chunk))
            received += padded.nbytes - chunk.nbytes

        def finish() -> None:
            for output, chunk in copies:
                output.copy_(chunk)

        entry = self.ledger.add("reduce_scatter", unit, received)
        return Exchange(description, self.timeout_s, parts, entry, finish, keep)


class PairwiseCollectives(Collectives):
    """Each pair of ranks swaps exactly the rows that the other one needs, straight from and into their place."""

    name = "pairwise"

    def gather(self, items: Sequence[Rows], unit: str) -> Exchange:
        """See `Collectives.gather`."""
        description, tags = self._describe("gather", unit), self._tags("gather", unit, len(items))
        parts, received = [], 0
        for peer in self._peers():
            for index, item in enumerate(items):
                start, stop = item.layout.local_span_in_chunk(peer)
                if start < stop:
                    target = item.flat[start:stop]
                    parts.append(_Part(self._receive(description, target, peer, tags[index]), peer))
                    received += target.nbytes
        for peer in self._peers():
            for index, item in enumerate(items):
                start, stop = item.layout.local_span_in_chunk(self.rank)
                if start < stop:
                    parts.append(_Part(self._send(description, item.flat[start:stop], peer, tags[index]), peer))
        return Exchange(description, self.timeout_s, parts, self.ledger.add("gather", unit, received), keep=items)

    def reduce_scatter(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str) -> Exchange:
        """See `Collectives.reduce_scatter`."""
        description = self._describe("reduce_scatter", unit)
        tags = self._tags("reduce_scatter", unit, len(items))
        parts, received = [], 0
        staging: list[dict[int, Tensor]] = []
        for index, output in enumerate(outputs):
            # One peer's rows land in the output itself, the others' beside it.
            peers = sorted(self._peers()) if output.numel() else []
            landing = {peer: output if place == 0 else torch.empty_like(output) for place, peer in enumerate(peers)}
            staging.append(landing)
            for peer, target in landing.items():
                parts.append(_Part(self._receive(description, target, peer, tags[index]), peer))
                received += target.nbytes
        for peer in self._peers():
            for index, item in enumerate(items):
                start, stop = item.layout.span(peer)
                if start < stop:
                    parts.append(_Part(self._send(description, item.flat[start:stop], peer, tags[index]), peer))

        def finish() -> None:
            for item, output, landing in zip(items, outputs, staging, strict=True):
                start, stop = item.layout.span(self.rank)
                if start < stop:
                    landing[self.rank] = item.flat[start:stop]
                    _sum_in_rank_order(output, landing)

        entry = self.ledger.add("reduce_scatter", unit, received)
        return Exchange(description, self.timeout_s, parts, entry, finish, keep=items)


def _sum_in_rank_order(output: Tensor, by_rank: dict[int, Tensor]) -> None:
    """output = ((t0 + t1) + t2) + ..., where `output` itself is one of the first two terms."""
    ordered = [by_rank[rank] for rank in sorted(by_rank)]
    first, second, *rest = ordered
    torch.add(first, second, out=output)
    for term in rest:
        output.add_(term)


def _decode(head: Tensor) -> str:
    return bytes(head[1:].to(torch.uint8).tolist()).rstrip(b"\0").decode(errors="replace")


IMPLEMENTATIONS: dict[str, type[Collectives]] = {"native": NativeCollectives, "pairwise": PairwiseCollectives}


def choose(choice: str, backend: str) -> type[Collectives]:
    """The implementation for `choice`; "auto" is `pairwise` on gloo, where it is the faster one, and `native` elsewhere."""
    if choice == "auto":
        choice = "pairwise" if backend == "gloo" else "native"
    return IMPLEMENTATIONS[choice]


def make_collectives(choice: str, device: torch.device, timeout_s: float, ledger: Ledger) -> Collectives | None:
    """Exchanges over all ranks of the default process group; None where there is one rank or no group.

    Must be called by all ranks together: it makes process groups.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # Each exchange is waited for with its own time; connecting the ranks may take longer than a short one.
    timeout = datetime.timedelta(seconds=max(timeout_s, _CONNECT_S))
    group, gather_group = dist.new_group(timeout=timeout), dist.new_group(timeout=timeout)
    backend = str(dist.get_backend(group))
    control_group = group if backend == "gloo" else dist.new_group(timeout=timeout, backend="gloo")
    return choose(choice, backend)(group, gather_group, control_group, device, timeout_s, ledger)
