"""torch.distributed's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.collectives import Collectives, Rows, divide
from hf_zero.comm.copies import padded_copies_of
from hf_zero.comm.exchange import Exchange
from hf_zero.comm.groups import torch_groups


class NativeCollectives(Collectives):
    """torch.distributed's own collectives, in place: one call per parameter, which NCCL runs as one launch per unit.

    NCCL runs on its own stream, which waits for what was queued before the call. The compute stream waits for NCCL where the
    result is used. Gathers and reductions therefore overlap with the computation in between, without synchronising the host.
    """

    name = "native"

    def gather(self, items: Sequence[Rows], unit: str) -> Exchange:
        """See `Collectives.gather`."""
        if self.device.type != "cpu" and any(item.flat.device.type == "cpu" for item in items):
            return self._gather_by_way_of_device(items, unit)
        calls: list[Callable[[], dist.Work | None]] = []
        received = 0
        description = self._describe("gather", unit)
        for item in items:
            chunk = item.layout.chunk_numel
            if not chunk:
                continue
            own = item.flat[self.rank * chunk : (self.rank + 1) * chunk]
            calls.append(partial(self._gather_around, item.flat, own))
            received += item.flat.nbytes - own.nbytes
        parts = self._start_all(description, calls, self.gather_group)
        return self._exchange(description, parts, self.ledger.add("gather", unit, received), keep=items)

    def _gather_by_way_of_device(self, items: Sequence[Rows], unit: str) -> Exchange:
        """Gather what rests in host memory, over the device's transport, and wait for it."""
        flats = [item.flat.to(self.device) for item in items]
        self.gather([replace(item, flat=flat) for item, flat in zip(items, flats, strict=True)], unit).wait()
        for item, flat in zip(items, flats, strict=True):
            item.flat.copy_(flat)
        return Exchange(self._describe("gather", unit), self.timeout_s)

    def _gather_around(self, flat: Tensor, own: Tensor) -> dist.Work | None:
        if self.backend != "gloo":
            work: dist.Work | None = torch_groups.all_gather_single(flat, own, self.gather_group, async_op=True)
            return work
        # gloo writes `own` back at the end, which must not overwrite rows that have changed meanwhile.
        chunks = list(flat.chunk(self.num_ranks))
        chunks[self.rank] = torch.empty_like(own)
        work = dist.all_gather(chunks, own, self.gather_group, async_op=True)
        return work

    def reduce_scatter(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str, divisor: int = 1) -> Exchange:
        """See `Collectives.reduce_scatter`."""
        calls: list[Callable[[], dist.Work | None]] = []
        short: list[tuple[Tensor, Tensor]] = []
        chunks, received = [], 0
        description = self._describe("reduce_scatter", unit)
        operation, rest = self._operation(divisor)
        reduce = partial(torch_groups.reduce_scatter_single, op=operation, group=self.group, async_op=True)
        chosen = [(item, output) for item, output in zip(items, outputs, strict=True) if item.layout.chunk_numel]
        sent = _as_sent(chosen)
        for (item, output), flat in zip(chosen, sent, strict=True):
            chunk, numel = output, item.layout.chunk_numel
            if output.numel() != numel:
                chunk = output.new_empty(numel)
                short.append((output, chunk[: output.numel()]))
            calls.append(partial(reduce, chunk, flat))
            chunks.append(chunk)
            received += flat.nbytes - chunk.nbytes

        def finish() -> None:
            if short:
                torch._foreach_copy_([output for output, _ in short], [values for _, values in short])
            divide(outputs, rest)

        parts = self._start_all(description, calls, self.group)
        entry = self.ledger.add("reduce_scatter", unit, received)
        return self._exchange(description, parts, entry, finish, keep=(sent, chunks))


def _as_sent(chosen: Sequence[tuple[Rows, Tensor]]) -> list[Tensor]:
    """What each rank gives to a sum: in the sum's dtype, and as long as all ranks' rows together, copied where it is not so."""
    sent = [item.flat for item, _ in chosen]
    moved = [
        i
        for i, (item, output) in enumerate(chosen)
        if item.flat.dtype != output.dtype or item.layout.padded_numel != item.layout.numel
    ]
    dtypes, numels = [chosen[i][1].dtype for i in moved], [chosen[i][0].layout.padded_numel for i in moved]
    for i, copy in zip(moved, padded_copies_of([sent[i] for i in moved], dtypes, numels), strict=True):
        sent[i] = copy
    return sent
