"""Attention of a slice's queries to the keys of all slices, which travel around a ring: a rank has two slices of them at once.

What a query has seen so far is its output and the logarithm of its sum of exponentials, to which each slice of keys adds. In
the backward, keys and values travel once more, and with them their gradients, until these are back where they came from.

Source: Ring Attention (arXiv:2310.01889), whose blocks are those of FlashAttention-2 (arXiv:2307.08691); zig-zag as in
[Note: context].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm.exchange import Exchange
from hf_zero.engine.modules.sequence import Swap
from hf_zero.errors import UsageError
from hf_zero.sharding.sequence.context import Queries

_TILE_NUMEL = 2**24  # scores at a time, 64 MiB in float32


def over_a_ring(swap: Swap, function: Callable[..., Any], name: str, unit: str) -> Callable[..., Any]:
    """What `function`, which is transformers' "sdpa", would give over keys and values of all slices; see `over_all_keys`."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        queries = Queries(swap, module, name, query.shape[2], mask)
        _check(queries, function, name, args, kwargs)
        scale = kwargs.get("scaling")
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
        device = query.device.type
        if torch.is_autocast_enabled(device):
            query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
        output: Tensor = _OverARing.apply(queries, unit, scale, query, key, value)  # type: ignore[no-untyped-call]
        return output.transpose(1, 2).contiguous(), None

    return attend


def _check(
    queries: Queries, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    reason = ""
    if function is not sdpa_attention_forward or args:
        reason = f"computes attention by {name!r}, and a ring only what transformers' 'sdpa' does"
    elif kwargs.get("dropout"):
        reason = "drops out weights of attention, which no rank has together (attention_dropout)"
    elif kwargs.get("softcap") is not None:
        reason = "caps scores of attention (softcap)"
    elif queries.mask is not None and queries.mask.dtype != torch.bool:
        reason = f"has a mask of {queries.mask.dtype}, not of booleans"
    if reason:
        raise UsageError(f"cp_comm_strategy is alltoall, but {queries.name} {reason}: use allgather")


# --- the ring ---------------------------------------------------------------------------------------------------------


def _pass_on(queries: Queries, tensors: list[Tensor], unit: str) -> tuple[list[Tensor], Exchange]:
    """Give tensors to the next rank; those of the rank before it come, and may be read after the exchange's `wait()`."""
    context = queries.swap.context
    sent: list[list[Tensor]] = [[] for _ in range(context.num_ranks)]
    received: list[list[Tensor]] = [[] for _ in range(context.num_ranks)]
    came = [torch.empty_like(each) for each in tensors]
    sent[(context.rank + 1) % context.num_ranks] = [each.view(-1) for each in tensors]
    received[(context.rank - 1) % context.num_ranks] = [each.view(-1) for each in came]
    return came, context.all_to_all(sent, received, "all_to_all", unit)


def _around(queries: Queries, tensors: list[Tensor], unit: str) -> Iterator[tuple[int, list[Tensor]]]:
    """The slices of all ranks, this one's first: whose they are, and the tensors; the next ones come while these are used."""
    context = queries.swap.context
    for step in range(context.num_ranks):
        is_last = step == context.num_ranks - 1
        came, exchange = ([], None) if is_last else _pass_on(queries, tensors, unit)
        yield (context.rank - step) % context.num_ranks, tensors
        if exchange is not None:
            queries.swap.wait(exchange)
            tensors = came


@dataclass(frozen=True)
class _Block:
    """Some queries of this rank beside a chunk of keys, that they see some or all of.

    Attributes:
        queries: of the slice.
        keys: of the slice that they belong to.
        mask: [batch or 1, heads or 1, queries, keys]; None: all are seen.
    """

    queries: slice
    keys: slice
    mask: Tensor | None


def _blocks(queries: Queries, owner: int, num_rows: int, device: torch.device) -> Iterator[_Block]:
    """All blocks of this rank's queries, at most `num_rows` at a time, and one rank's keys; without those that see nothing."""
    half = queries.size // 2
    ranks, rank = queries.swap.context.num_ranks, queries.swap.context.rank
    for row, own in enumerate((rank, 2 * ranks - 1 - rank)):
        for column, other in enumerate((owner, 2 * ranks - 1 - owner)):
            if queries.is_causal and other > own:
                continue
            keys = slice(column * half, (column + 1) * half)
            for start in range(0, half, num_rows):
                end = min(start + num_rows, half)
                rows, mask = slice(row * half + start, row * half + end), None
                if queries.mask is not None:
                    mask = queries.mask[:, :, rows, other * half : (other + 1) * half]
                elif own == other:
                    places = torch.arange(half, device=device)
                    mask = (places[start:end, None] >= places)[None, None]
                yield _Block(rows, keys, mask)


class _Scores:
    """Scores of blocks, where heads of queries share heads of keys.

    Args:
        query: [batch, heads, tokens, width].
        key: [batch, shared heads, tokens, width].
        scale: of the scores.
    """

    def __init__(self, query: Tensor, key: Tensor, scale: float) -> None:
        self.shared, self.scale = key.shape[1], scale
        self.query = self.grouped(query.contiguous())

    def grouped(self, tensor: Tensor) -> Tensor:
        """Heads of queries by the head of keys that they share: [batch, shared, heads of each, ...]."""
        return tensor.view(len(tensor), self.shared, -1, *tensor.shape[2:])

    def of(self, block: _Block, key: Tensor) -> Tensor:
        """[batch, shared, heads of each, queries, keys], float32; -inf where nothing is seen."""
        keys = key[:, :, None, block.keys].transpose(-1, -2)
        found = (self.query[..., block.queries, :] @ keys).float() * self.scale
        if block.mask is not None:
            by_head = block.mask.shape[1] > 1
            mask = self.grouped(block.mask.contiguous()) if by_head else block.mask.unsqueeze(1)
            found = found.masked_fill(~mask, -math.inf)
        return found


def _rows_at_a_time(query: Tensor, num_keys: int) -> int:
    return max(1, _TILE_NUMEL // (query.shape[0] * query.shape[1] * num_keys))


def _finite(logarithms: Tensor) -> Tensor:
    """Of queries that see nothing 0, so that their weights are exp(-inf) = 0."""
    return logarithms.masked_fill(logarithms == -math.inf, 0.0)


class _OverARing(torch.autograd.Function):
    """See `over_a_ring`: [batch, heads, tokens, width of values]."""

    @staticmethod
    def forward(
        ctx: Any, queries: Queries, unit: str, scale: float, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        scores = _Scores(query, key, scale)
        shape = (*scores.query.shape[:-1], value.shape[-1])
        output = torch.zeros(shape, dtype=torch.float32, device=query.device)
        logarithms = output.new_full(shape[:-1], -math.inf)
        num_rows = _rows_at_a_time(query, queries.size // 2)
        for owner, (keys, values) in _around(queries, [key.contiguous(), value.contiguous()], unit):
            for block in _blocks(queries, owner, num_rows, query.device):
                found, before = scores.of(block, keys), logarithms[..., block.queries]
                after = torch.logaddexp(before, found.logsumexp(-1))
                weights = (found - _finite(after)[..., None]).exp().to(values.dtype)
                rows = output[..., block.queries, :]
                rows *= (before - _finite(after)).exp()[..., None]
                rows += weights @ values[:, :, None, block.keys]
                logarithms[..., block.queries] = after
        whole = output.to(value.dtype).flatten(1, 2)
        ctx.queries, ctx.unit, ctx.scale = queries, unit, scale
        ctx.save_for_backward(query, key, value, whole, logarithms)
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        queries, unit = ctx.queries, ctx.unit
        query, key, value, output, logarithms = ctx.saved_tensors
        scores = _Scores(query, key, ctx.scale)
        gradient = scores.grouped(gradients[0].contiguous())
        inner = (gradient.float() * scores.grouped(output).float()).sum(-1)
        of_query = torch.zeros_like(scores.query, dtype=torch.float32)
        sums = [torch.zeros(each.shape, dtype=torch.float32, device=each.device) for each in (key, value)]
        num_rows = _rows_at_a_time(query, queries.size // 2)
        for owner, (keys, values) in _around(queries, [key.contiguous(), value.contiguous()], unit):
            for block in _blocks(queries, owner, num_rows, query.device):
                rows = gradient[..., block.queries, :]
                weights = (scores.of(block, keys) - _finite(logarithms[..., block.queries])[..., None]).exp()
                of_weights = (rows @ values[:, :, None, block.keys].transpose(-1, -2)).float()
                of_scores = weights * (of_weights - inner[..., block.queries][..., None]) * ctx.scale
                of_scores = of_scores.to(query.dtype)
                of_query[..., block.queries, :] += of_scores @ keys[:, :, None, block.keys]
                own = scores.query[..., block.queries, :]
                sums[0][:, :, block.keys] += (of_scores.transpose(-1, -2) @ own).sum(2)
                sums[1][:, :, block.keys] += (weights.to(rows.dtype).transpose(-1, -2) @ rows).sum(2)
            sums, exchange = _pass_on(queries, sums, unit)
            queries.swap.wait(exchange)
        found = (of_query.flatten(1, 2), *sums)
        return (None, None, None, *(each.to(like.dtype) for each, like in zip(found, (query, key, value), strict=True)))
