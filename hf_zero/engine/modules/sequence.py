"""Slices of sequences: each rank of a group computes one, and attention swaps them for whole sequences of some heads.

[Note: sequence axis] The ranks of a group see the same batch. A sequence is padded at its end until they divide it, and each
rank computes a slice, all of them equally long. Around attention they exchange: from (slice, all heads) to (all tokens, some
heads), and back. The tokens that were added at the end are seen by no others, since attention is causal.

[Note: context] Or queries stay slices, of all heads, and the keys of the others come to them (`context`). The last tokens see
all keys, the first ones few: so a sequence is cut into twice as many chunks as there are ranks, and a rank has one of each
half, numbers r and 2 N - 1 - r of N ranks. With both, each group that divides heads has two chunks, and cuts them further.

Gradients are averaged over all ranks, those of a group too. So the backward of what a group adds up (its loss, values by token)
multiplies by its number of ranks; of a sum over ranks (`gradient_reduction`), by one.

Source: DeepSpeed Ulysses (arXiv:2309.14509), ALST (arXiv:2506.13996); context parallelism of Llama 3 (arXiv:2407.21783).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.comm.collectives import Collectives, Rows
from hf_zero.comm.exchange import Exchange
from hf_zero.config.axes import sharing_sequences
from hf_zero.engine.ranks.world import World
from hf_zero.layout import RowLayout


@dataclass(frozen=True)
class Slice:
    """This rank's slice of a sequence.

    Attributes:
        length: tokens of the sequence as it was given.
        rank: this rank's place in the group.
        num_ranks: of the group.
        num_contexts: parts of the group that have other queries in attention; see [Note: context].
    """

    length: int
    rank: int
    num_ranks: int
    num_contexts: int = 1

    @property
    def size(self) -> int:
        """Tokens of a slice, the same on all ranks of the group."""
        even = 1 if self.num_contexts == 1 else 2
        return even * math.ceil(self.length / (even * self.num_ranks))

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

    def places(self, device: torch.device) -> Tensor:
        """Of the tokens of all slices, one slice after the other, in the sequence: [tokens]."""
        return places_of(self.padded, self.num_contexts, device)

    def own(self, padded: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of what has all tokens."""
        start = self.rank * self.size
        if self.num_contexts == 1:
            return padded.narrow(dim, start, self.size)
        return padded.index_select(dim, self.places(padded.device)[start : start + self.size])

    def in_order(self, slices: Tensor, dim: int) -> Tensor:
        """What has all tokens, one slice after the other, in the order of the sequence."""
        if self.num_contexts == 1:
            return slices
        return slices.index_select(dim, self.places(slices.device).argsort())


def places_of(num_tokens: int, num_contexts: int, device: torch.device) -> Tensor:
    """The tokens of a sequence by context, one context after the other: [tokens], see [Note: context]."""
    tokens = torch.arange(num_tokens, device=device)
    if num_contexts == 1:
        return tokens
    chunks = tokens.view(2 * num_contexts, -1)
    return torch.stack([chunks[:num_contexts], chunks[num_contexts:].flip(0)], 1).view(-1)


class Swap:
    """Swaps slices for whole sequences among the ranks of a group.

    Args:
        world: the ranks.
        before_wait: called when all of them are about to wait for each other, see [Note: one order of waits].
    """

    def __init__(self, world: World, before_wait: Callable[[], None]) -> None:
        self.world, self.over, self._before_wait = world, world.sequence, before_wait
        self.heads, self.context = world.heads, world.context
        self.key = sharing_sequences(world.config.sp_size, world.config.cp_size)

    def slice_of(self, length: int) -> Slice:
        """This rank's slice of a sequence of so many tokens."""
        return Slice(length, self.over.rank, self.over.num_ranks, self.context.num_ranks)

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
        ranks, own = self.heads.num_ranks, self.heads.rank
        sent = [[each.contiguous() for each in tensor.chunk(ranks, split)] for tensor in tensors]
        came = [[torch.empty_like(part) for part in parts] for parts in sent]
        for parts, places in zip(sent, came, strict=True):
            places[own] = parts[own]
        exchange = self.heads.all_to_all(
            [[parts[rank].view(-1) for parts in sent] for rank in range(ranks)],
            [[parts[rank].view(-1) for parts in came] for rank in range(ranks)],
            "all_to_all",
            unit,
        )
        self.wait(exchange)
        return [torch.cat(parts, join) for parts in came]

    def wait(self, exchange: Exchange) -> None:
        """Wait for an exchange that all ranks of the group wait for; see [Note: one order of waits]."""
        self._before_wait()
        exchange.wait()

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
        (whole,) = self._gathered(self.over, [part.byte() if part.dtype == torch.bool else part], unit, dim)
        whole = self.slice_of(whole.shape[dim]).in_order(whole, dim)
        return torch.empty(whole.shape, dtype=part.dtype, device=part.device).copy_(whole)

    def _gathered(self, over: Collectives, parts: Sequence[Tensor], unit: str, dim: int) -> list[Tensor]:
        """What the ranks have, one after the other along `dim`."""
        rows = []
        for part in parts:
            first = part.movedim(dim, 0).contiguous()
            layout = RowLayout((over.num_ranks * len(first), *first.shape[1:]), over.num_ranks)
            flat = first.new_empty(layout.padded_numel)
            layout.elements_of(flat, over.rank).copy_(first.view(-1))
            rows.append(Rows(flat, layout))
        exchange = over.gather(rows, unit)
        self.wait(exchange)
        return [each.flat.view(each.layout.shape).movedim(0, dim) for each in rows]

    # --- keys of all slices -----------------------------------------------------------------------------------------

    def gather_context(self, parts: Sequence[Tensor], unit: str) -> list[Tensor]:
        """Keys and values of all tokens; not in the graph.

        Args:
            parts: [batch, heads, tokens of the slice, ...].
            unit: for the ledger and for errors.

        Returns:
            [batch, heads, all tokens, ...], in the order of the sequence.
        """
        whole = self._gathered(self.context, parts, unit, 2)
        order = places_of(whole[0].shape[2], self.context.num_ranks, whole[0].device).argsort()
        return [each.index_select(2, order) for each in whole]

    def reduce_context(self, wholes: Sequence[Tensor], unit: str) -> list[Tensor]:
        """The gradients of a slice's keys and values: sums over ranks, added up in float32, in the dtype that they come in.

        Args:
            wholes: [batch, heads, all tokens, ...], of this rank's queries.
            unit: for the ledger and for errors.
        """
        order = places_of(wholes[0].shape[2], self.context.num_ranks, wholes[0].device)
        rows, sums = [], []
        for each in wholes:
            first = each.movedim(2, 0).index_select(0, order).contiguous()
            layout = RowLayout(tuple(first.shape), self.context.num_ranks)
            rows.append(Rows(first.view(-1), layout))
            wider = torch.promote_types(first.dtype, torch.float32)
            sums.append(first.new_empty(layout.local_numel(self.context.rank), dtype=wider))
        exchange = self.context.reduce_scatter(rows, sums, unit)
        self.wait(exchange)
        self.context.settle()
        shapes = [(-1, *each.movedim(2, 0).shape[1:]) for each in wholes]
        found = zip(wholes, sums, shapes, strict=True)
        return [own.view(shape).movedim(0, 2).to(each.dtype) for each, own, shape in found]


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
        ctx.swap, ctx.dim = swap, dim
        return swap.gather(part.detach(), unit, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        own = ctx.swap.slice_of(gradients[0].shape[ctx.dim]).own(gradients[0], ctx.dim)
        return own * ctx.swap.factor, None, None, None
