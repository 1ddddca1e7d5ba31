"""One exchange that makes several parameters whole, in memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.comm.collectives import Rows
from hf_zero.comm.exchange import Exchange
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor
from hf_zero.engine.parameters.quantised import is_quantised
from hf_zero.engine.parameters.records import as_dtype
from hf_zero.engine.ranks.world import World

LABEL = "weights that are handed over"


class Bucket:
    """Parameters on their way; made by all ranks together.

    Args:
        tensors: parameters and buffers, partitioned or not, each with the dtype that it is wanted in; None: its own.
        world: the ranks; None where nothing is partitioned.
    """

    @torch.no_grad()
    def __init__(self, tensors: Sequence[tuple[Tensor, torch.dtype | None]], world: World | None) -> None:
        self._items: list[Rows] = []
        self._wholes = [self._start(tensor, dtype or tensor.dtype, world) for tensor, dtype in tensors]
        self._exchange: Exchange | None = None
        if self._items:
            assert world is not None
            self._exchange = world.shards.gather(self._items, LABEL)

    def _start(self, tensor: Tensor, dtype: torch.dtype, world: World | None) -> Callable[[], Tensor]:
        at_hand = _at_hand(tensor)
        if at_hand is not None or world is None:
            values = tensor.data if at_hand is None else at_hand
            return lambda: values.to(dtype, copy=True, memory_format=torch.contiguous_format)
        assert isinstance(tensor, DTensor)
        local, cut = torch_compat.local_of(tensor), world.cut_of(tensor)
        # Numbers travel in the dtype that they are wanted in, if it is the smaller one.
        sent = dtype if dtype.itemsize < local.dtype.itemsize and local.is_floating_point() else local.dtype
        rows = as_dtype(local, sent)
        if cut.tensor is not None or cut.rows.num_ranks == 1:
            whole = world.gather_parameter(rows, cut, LABEL)
            return lambda: whole.to(dtype)
        with torch.inference_mode(False):
            flat = torch.empty(cut.rows.padded_numel, dtype=sent, device=local.device)
        cut.rows.elements_of(flat, world.shard_rank).copy_(cut.rows.flat(rows))
        self._items.append(Rows(flat, cut.rows, not is_quantised(tensor)))
        return lambda: cut.rows.in_shape(flat[: cut.rows.numel], cut.rows.shape).to(dtype).contiguous()

    @torch.no_grad()
    def wait(self) -> list[Callable[[], Tensor]]:
        """For each tensor, a function that gives it whole and contiguous, in memory that changes no more."""
        if self._exchange is not None:
            self._exchange.wait()
        wholes, self._wholes, self._items, self._exchange = self._wholes, [], [], None
        return wholes


def _at_hand(tensor: Tensor) -> Tensor | None:
    """The whole of a tensor, where this rank has it with its bits at rest."""
    if not isinstance(tensor, DTensor):
        return tensor.data  # not `detach`, which quantised weights have their own way with
    if isinstance(tensor, PartitionedTensor):
        shown = tensor.shown
        return tensor.whole_at_hand() if shown is None else shown
    return None
