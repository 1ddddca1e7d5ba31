"""Slices of sequences: each rank of a group computes one, and attention swaps them for whole sequences of some heads.

[Note: sequence axis] The ranks of a group see the same batch. A sequence is padded at its end until they divide it, and each
rank computes a slice, all of them equally long. Around attention they exchange: from (slice, all heads) to (all tokens, some
heads), and back. The tokens that were added at the end are seen by no others, since attention is causal.

Gradients are averaged over all ranks, those of a group too. So the backward of what a group adds up (its loss, values by token)
multiplies by its number of ranks; of a sum over ranks (`gradient_reduction`), by one.

Source: DeepSpeed Ulysses (arXiv:2309.14509), ALST (arXiv:2506.13996).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.comm.collectives import Rows
from hf_zero.engine.ranks.world import World
from hf_zero.layout import RowLayout


@dataclass(frozen=True)
class Slice:
    """This rank's slice of a sequence.

    Attributes:
        length: tokens of the sequence as it was given.
        rank: this rank's place in the group.
        num_ranks: of the group.
    """

    length: int
    rank: int
    num_ranks: int

    @property
    def size(self) -> int:
        """Tokens of a slice, the same on all ranks of the group."""
        return math.ceil(self.length / self.num_ranks)

    @property
    def padded(self) -> int:
        """Tokens of all slices together."""
        return self.size * self.num_ranks

    def pad(self, whole: Tensor, value: float, dim: int = -1) -> Tensor:
        """`whole` with `value` at its end until the ranks divide it."""
        missing = self.padded - self.length
        if not missing:
            return whole
        shape = list(whole.shape)
        shape[dim] = missing
        return torch.cat([whole, whole.new_full(shape, value)], dim)

    def own(self, padded: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of what has all tokens."""
        return padded.narrow(dim, self.rank * self.size, self.size)


class Swap:
    """Swaps slices for whole sequences among the ranks of a group.

    Args:
        world: the ranks.
        before_wait: called when all of them are about to wait for each other, see [Note: one order of waits].
    """

    def __init__(self, world: World, before_wait: Callable[[], None]) -> None:
        self.world, self.over, self._before_wait = world, world.sequence, before_wait

    def to_heads(self, tensors: Sequence[Tensor], unit: str) -> list[Tensor]:
        """All tokens of some heads.

        Args:
            tensors: [batch, heads, tokens of the slice, ...], whose heads the ranks divide.
            unit: for the ledger and for errors.

        Returns:
            [batch, heads / ranks, all tokens, ...].
        """
        return list(_Move.apply(self, unit, 1, 2, *tensors))  # type: ignore[no-untyped-call]

    def to_tokens(self, tensor: Tensor, unit: str) -> Tensor:
        """All heads of this rank's slice.

        Args:
            tensor: [batch, all tokens, heads of this rank, ...].
            unit: for the ledger and for errors.

        Returns:
            [batch, tokens of the slice, all heads, ...].
        """
        (found,) = _Move.apply(self, unit, 1, 2, tensor)  # type: ignore[no-untyped-call]
        assert isinstance(found, Tensor)
        return found

    def move(self, tensors: Sequence[Tensor], unit: str, split: int, join: int) -> list[Tensor]:
        """Give each rank its part of dim `split`, and join what comes from them along dim `join`."""
        ranks, own = self.over.num_ranks, self.over.rank
        sent = [[each.contiguous() for each in tensor.chunk(ranks, split)] for tensor in tensors]
        came = [[torch.empty_like(part) for part in parts] for parts in sent]
        for parts, places in zip(sent, came, strict=True):
            places[own] = parts[own]
        exchange = self.over.all_to_all(
            [[parts[rank].view(-1) for parts in sent] for rank in range(ranks)],
            [[parts[rank].view(-1) for parts in came] for rank in range(ranks)],
            "all_to_all",
            unit,
        )
        self._before_wait()
        exchange.wait()
        return [torch.cat(parts, join) for parts in came]

    @property
    def factor(self) -> int:
        """Of the gradient of what the group adds up: see [Note: sequence axis]."""
        return self.over.num_ranks if self.world.config.gradient_reduction == "mean" else 1

    def add_up(self, part: Tensor, unit: str) -> Tensor:
        """The sum over the group of a single number, the same bits on all of its ranks."""
        total = _AddUp.apply(part, self, unit)  # type: ignore[no-untyped-call]
        assert isinstance(total, Tensor)
        return total

    def join(self, part: Tensor, unit: str, dim: int = 1) -> Tensor:
        """All tokens of values by token, `dim` of which is that of tokens."""
        whole = _Join.apply(part, self, unit, dim)  # type: ignore[no-untyped-call]
        assert isinstance(whole, Tensor)
        return whole

    def gather(self, part: Tensor, unit: str, dim: int) -> Tensor:
        """See `join`; not in the graph."""
        first = (part.byte() if part.dtype == torch.bool else part).movedim(dim, 0).contiguous()
        layout = RowLayout((self.over.num_ranks * len(first), *first.shape[1:]), self.over.num_ranks)
        flat = first.new_empty(layout.padded_numel)
        layout.elements_of(flat, self.over.rank).copy_(first.view(-1))
        self.over.gather([Rows(flat, layout)], unit).wait()
        whole = flat.view(layout.shape).movedim(0, dim)
        return torch.empty(whole.shape, dtype=part.dtype, device=part.device).copy_(whole)


class _Move(torch.autograd.Function):
    """See `Swap.move`; its backward moves gradients back."""

    @staticmethod
    def forward(ctx: Any, swap: Swap, unit: str, split: int, join: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.swap, ctx.unit, ctx.split, ctx.join = swap, unit, split, join
        return tuple(swap.move(tensors, unit, split, join))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[4:]
        chosen = [grad for grad, is_needed in zip(gradients, needed, strict=True) if is_needed]
        found = iter(ctx.swap.move(chosen, ctx.unit, ctx.join, ctx.split))
        return (None, None, None, None, *(next(found) if is_needed else None for is_needed in needed))


class _AddUp(torch.autograd.Function):
    """See `Swap.add_up`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, swap: Swap, unit: str) -> Tensor:
        ctx.factor = swap.factor
        total = part.detach().clone()  # no view: users scale losses in place
        swap.over.all_reduce([total.view(-1)], unit).wait()
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] * ctx.factor, None, None


class _Join(torch.autograd.Function):
    """See `Swap.join`: each rank's gradient of the whole is the same, and of it each takes the part of its slice."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, swap: Swap, unit: str, dim: int) -> Tensor:
        ctx.swap, ctx.dim, ctx.size = swap, dim, part.shape[dim]
        return swap.gather(part.detach(), unit, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        own = gradients[0].narrow(ctx.dim, ctx.swap.over.rank * ctx.size, ctx.size)
        return own * ctx.swap.factor, None, None, None
