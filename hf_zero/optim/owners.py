"""Whole parameters on one rank each, for optimizers that need whole matrices: rows -> owner, step, owner -> rows.

[Note: owners] An optimizer that looks at more than one element at a time (a norm, a factorisation, an index) is another
optimizer on rows. So each parameter has one owner, which computes its step on whole tensors, once; the others do not. The
rows of gradients and parameters travel to the owner, new values travel back, and the state lives with the owner alone.
Together the states take as much memory as they do on rows; at the step, a rank holds the whole parameters and gradients of
which it is the owner besides its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.engine.ranks.world import World
from hf_zero.layout import OwnerLayout, RowLayout

_MESSAGE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class _Item:
    """One parameter on its way: this rank's rows and, on its owner, the whole tensor; both flat, row after row."""

    layout: RowLayout
    owner: int
    rows: Tensor
    whole: Tensor | None

    def part_of(self, rank: int) -> Tensor:
        """The rows of a rank within the whole tensor, on the owner."""
        assert self.whole is not None
        return self.layout.elements_of(self.whole, rank)


class Owners:
    """Which rank steps on which parameters of one optimizer.

    Owners are chosen in the order of the optimizer's parameters, the same on every rank, and kept for good; parameters that
    come later (layers that are unfrozen) are spread beside them.

    Args:
        world: the ranks over which the parameters are cut.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._owner_of: dict[int, int] = {}
        self._loads = [0] * world.num_shards

    def __deepcopy__(self, memo: dict[int, object]) -> Owners:
        return type(self)(self.world)  # a copied optimizer has parameters of its own

    def spread(self, params: Sequence[Tensor]) -> None:
        """Choose owners for parameters that have none, so that none has much more than others."""
        new = [param for param in params if id(param) not in self._owner_of]
        for param, owner in zip(new, spread([tuple(param.shape) for param in new], self._loads), strict=True):
            self._owner_of[id(param)] = owner

    def knows(self, param: Tensor) -> bool:
        """Whether a parameter has an owner."""
        return id(param) in self._owner_of

    def owner_of(self, param: Tensor) -> int:
        """The owner's place among the ranks that the parameter is cut over."""
        return self._owner_of[id(param)]

    def owns(self, param: Tensor) -> bool:
        """Whether this rank is the owner."""
        return self.owner_of(param) == self.world.shard_rank

    def steps_on(self, param: Tensor) -> bool:
        """Whether this rank computes the parameter's step."""
        return self.owns(param)

    def layout_of(self, param: Tensor, shape: tuple[int, ...]) -> OwnerLayout:
        """How a state of this shape lies on the ranks: whole on the parameter's owner."""
        return OwnerLayout(shape, self.world.num_shards, self.owner_of(param))

    def collect(self, tensors: Sequence[tuple[DTensor, DTensor]], what: str) -> list[Tensor | None]:
        """The whole tensors of which every rank has rows, each on its owner; called by all ranks together.

        Args:
            tensors: pairs of a parameter and what is cut as it is: itself, or its gradient.
            what: they are, for the ledger and for errors.

        Returns:
            Whole tensors where this rank is the owner, None elsewhere.
        """
        items = []
        for param, tensor in tensors:
            rows = torch_compat.local_of(tensor)
            whole = rows.new_empty(param.numel()) if self.owns(param) else None
            items.append(self._item(param, rows, whole))
        for message in _messages(items):
            self._swap(message, "to_owners", what)
            for item in message:
                if item.whole is not None:
                    item.part_of(self.world.shard_rank).copy_(item.rows)
        return [
            None if item.whole is None else item.layout.in_shape(item.whole, item.layout.shape).contiguous()
            for item in items
        ]

    def distribute(
        self, tensors: Sequence[tuple[DTensor, Tensor | None]], what: str, of_gradients: bool = False
    ) -> None:
        """Give every rank its rows of the owners' whole values; called by all ranks together.

        Args:
            tensors: pairs of a parameter, whose rows are written, and its whole values on the owner.
            what: they are, for the ledger and for errors.
            of_gradients: write the rows of the parameters' gradients.
        """
        items = []
        for param, whole in tensors:
            written: Any = param.grad if of_gradients else param
            flat = None if whole is None else self.world.layout_of(param).flat(whole.detach())
            items.append(self._item(param, torch_compat.local_of(written), flat))
        for message in _messages(items):
            self._swap(message, "from_owners", what)
            for item in message:
                if item.whole is not None:
                    item.rows.copy_(item.part_of(self.world.shard_rank))
        for item, (param, _) in zip(items, tensors, strict=True):
            kept = torch_compat.local_of(param.grad if of_gradients else param)  # type: ignore[arg-type]
            if item.rows.data_ptr() != kept.data_ptr():  # what has arrived is a copy, in the order of messages
                kept.copy_(item.layout.in_shape(item.rows, tuple(kept.shape)))

    def _item(self, param: DTensor, rows: Tensor, whole: Tensor | None) -> _Item:
        layout = self.world.layout_of(param)
        return _Item(layout, self.owner_of(param), layout.flat(rows.detach()), whole)

    def _swap(self, message: list[_Item], kind: str, what: str) -> None:
        rank, num_ranks = self.world.shard_rank, self.world.num_shards
        at_home: list[list[Tensor]] = [[] for _ in range(num_ranks)]  # by peer: this rank's rows of what the peer owns
        abroad: list[list[Tensor]] = [[] for _ in range(num_ranks)]  # the peer's rows of what this rank owns
        for item in message:
            if item.owner != rank:
                at_home[item.owner].append(item.rows)
                continue
            for peer in range(num_ranks):
                if peer != rank:
                    abroad[peer].append(item.part_of(peer))
        sent, received = (at_home, abroad) if kind == "to_owners" else (abroad, at_home)
        self.world.shards.all_to_all(sent, received, kind, what).wait()


def _messages(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Parameters that travel together: as many as keep small what is packed for the way."""
    message: list[_Item] = []
    num_bytes = 0
    for item in items:
        size = item.layout.numel * item.rows.itemsize
        if message and num_bytes + size > _MESSAGE_BYTES:
            yield message
            message, num_bytes = [], 0
        message.append(item)
        num_bytes += size
    if message:
        yield message


def spread(shapes: Sequence[tuple[int, ...]], loads: list[int]) -> list[int]:
    """Owners for parameters of these shapes: the largest first, each to the rank that has the fewest elements so far.

    Args:
        shapes: of the parameters.
        loads: elements of each rank so far; written.

    Returns:
        The owners' ranks.
    """
    sizes = [math.prod(shape) for shape in shapes]
    owners = [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda i: -sizes[i]):
        owners[index] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[index]] += sizes[index]
    return owners
