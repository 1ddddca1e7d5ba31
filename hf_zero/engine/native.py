"""torch.distributed's own collectives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.engine.collectives import Collectives, Rows, divide
from hf_zero.engine.exchange import Exchange


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
            parts.append(self._part(work))
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

    def reduce_scatter(self, items: Sequence[Rows], outputs: Sequence[Tensor], unit: str, divisor: int = 1) -> Exchange:
        """See `Collectives.reduce_scatter`."""
        parts, keep, copies, received = [], [], [], 0
        description = self._describe("reduce_scatter", unit)
        for item, output in zip(items, outputs, strict=True):
            layout = item.layout
            if not layout.chunk_numel:
                continue
            padded = item.flat.to(output.dtype)
            if layout.padded_numel != layout.numel:
                padded = torch.nn.functional.pad(padded, (0, layout.padded_numel - layout.numel))
            chunk = output
            if output.numel() != layout.chunk_numel:
                chunk = output.new_empty(layout.chunk_numel)
                copies.append((output, chunk[: output.numel()]))
            call = partial(dist.reduce_scatter_tensor, chunk, padded, group=self.group, async_op=True)
            work = self._start(description, call)
            parts.append(self._part(work))
            keep.append((padded, chunk))
            received += padded.nbytes - chunk.nbytes

        def finish() -> None:
            for output, chunk in copies:
                output.copy_(chunk)
            for output in outputs:
                divide(output, divisor)

        entry = self.ledger.add("reduce_scatter", unit, received)
        return Exchange(description, self.timeout_s, parts, entry, finish, keep)
