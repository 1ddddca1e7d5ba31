"""Attention of a slice's queries to the keys of all slices: by whatever function the model is set to, eager or SDPA.

Keys and values are gathered for the forward of each layer and again for its backward, which computes attention anew: between
the two, a rank keeps those of its slice alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import get_device_states, set_device_states

from hf_zero.engine.modules.sequence import Swap, places_of
from hf_zero.errors import UsageError

TAKEN = ("sdpa", "eager")
IS_CAUSAL = "_zero_is_causal"  # attribute of a mask that is known to let no token see those after it


def over_all_keys(swap: Swap, function: Callable[..., Any], name: str, unit: str) -> Callable[..., Any]:
    """`function`, as if keys and values of all slices were given.

    Args:
        swap: among the ranks of the group.
        function: of attention.
        name: of the function, as transformers calls it.
        unit: for the ledger and for errors.
    """

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        queries = Queries(swap, module, name, query.shape[2], mask)
        call = Call(function, queries, args, {k: v for k, v in kwargs.items() if k != "position_ids"})
        output: Tensor = _OverAllKeys.apply(call, unit, query, key, value)  # type: ignore[no-untyped-call]
        return output, None

    return attend


def check_name(name: str, key: str) -> None:
    """Raise a `UsageError` for a function of attention that cannot be given queries of slices."""
    if name not in TAKEN:
        raise UsageError(f"{key}: queries of slices cannot be given to {name!r}: set attn_implementation to 'sdpa'")


def output_of(found: Any, module: nn.Module, query: Tensor, key: str) -> Tensor:
    """What a function of attention gives: [batch, tokens, heads, ...].

    Raises:
        UsageError: it is another form.
    """
    output: Tensor = found[0] if isinstance(found, tuple) else found
    if output.shape[:3] != (query.shape[0], query.shape[2], query.shape[1]):
        raise UsageError(
            f"{key}: {type(module).__name__} has an attention function of its own, whose output of shape "
            f"{tuple(output.shape)} is not [batch, tokens, heads, ...]: use another attn_implementation"
        )
    return output


@contextmanager
def groups_of_heads(module: nn.Module, size: int) -> Iterator[None]:
    """Within: a module believes that so many heads of queries share one of keys."""
    before = vars(module).get("num_key_value_groups")
    if before is None:
        yield
        return
    vars(module)["num_key_value_groups"] = size
    try:
        yield
    finally:
        vars(module)["num_key_value_groups"] = before


@dataclass(frozen=True)
class Chunk:
    """Tokens next to each other of a slice.

    Attributes:
        rows: of the slice.
        end: tokens of the sequence up to the last of them.
    """

    rows: slice
    end: int


class Queries:
    """The queries of a slice, and what they see of all tokens.

    Args:
        swap: among the ranks of the group.
        module: of attention.
        name: of its function.
        size: queries of the slice.
        mask: by row of the slice, or of the whole sequence; None: each token sees those before it.

    Attributes:
        is_causal: whether no query sees keys after it, nor would if it saw none. Rows of eager masks that see nothing see all
            tokens alike.

    Raises:
        UsageError: the function, or the mask, is none that can be cut into rows.
    """

    def __init__(self, swap: Swap, module: nn.Module, name: str, size: int, mask: Any) -> None:
        self.swap, self.module, self.size = swap, module, size
        self.name = type(module).__name__
        ranks, rank = swap.context.num_ranks, swap.context.rank
        self.num_tokens, half = size * ranks, size // 2
        self.is_causal = name != "eager" and (mask is None or getattr(mask, IS_CAUSAL, False))
        self.chunks = [
            Chunk(slice(number * half, (number + 1) * half), (chunk + 1) * half)
            for number, chunk in enumerate((rank, 2 * ranks - 1 - rank))
        ]
        if not self.is_causal:
            self.chunks = [Chunk(slice(0, size), self.num_tokens)]
        check_name(name, swap.key)
        if mask is None and name == "eager":
            raise UsageError(f"{swap.key}: {self.name} is given no mask, without which eager attention sees all tokens")
        self.mask = self._own(mask)

    def _own(self, mask: Any) -> Tensor | None:
        if mask is None:
            return None
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else None
        if shape is not None and len(shape) == 4 and shape[2:] == (self.num_tokens, self.num_tokens):
            context = self.swap.context
            places = places_of(self.num_tokens, context.num_ranks, mask.device).chunk(context.num_ranks)
            mask = mask.index_select(2, places[context.rank])
        elif shape is None or len(shape) != 4 or shape[2:] != (self.size, self.num_tokens):
            raise UsageError(
                f"{self.swap.key}: {self.name} has a mask of shape {shape}, but slices of {self.size} of "
                f"{self.num_tokens} tokens: the model makes masks of its own, from its slice of them: leave {self.swap.key} out"
            )
        assert isinstance(mask, Tensor)
        if mask.requires_grad:
            raise UsageError(f"{self.swap.key}: {self.name} learns its mask, whose rows cannot be given to a slice")
        return mask

    def mask_of(self, chunk: Chunk) -> Any:
        """Of the chunk's queries over all tokens up to its last; None where their number alone says it."""
        if self.mask is not None:
            return self.mask[:, :, chunk.rows, : chunk.end]
        num_queries = chunk.rows.stop - chunk.rows.start
        return None if num_queries in (1, chunk.end) else causal_lower_right(num_queries, chunk.end)


@dataclass
class Call:
    """A call of attention that can be made again, with the same random numbers, under the same autocast.

    Attributes:
        function: of attention.
        queries: that attend.
        args: of the function, after those of every function.
        kwargs: likewise.
    """

    function: Callable[..., Any]
    queries: Queries
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    _random: tuple[Tensor, Any] | None = field(default=None, init=False)
    _autocast: tuple[str, torch.dtype, bool] | None = field(default=None, init=False)

    def first(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute, and remember how."""
        device = query.device.type
        self._autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        if self.kwargs.get("dropout"):
            self._random = (torch.get_rng_state(), get_device_states(query))
        return self._compute(query, key, value)

    def again(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute as before."""
        assert self._autocast is not None
        device, dtype, is_enabled = self._autocast
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=is_enabled))
            if self._random is not None:
                state, (devices, states) = self._random
                stack.enter_context(torch.random.fork_rng(devices, device_type=device))
                torch.set_rng_state(state)
                set_device_states(devices, states, device_type=device)
            return self._compute(query, key, value)

    def _compute(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs, module = [], self.queries.module
        with groups_of_heads(module, query.shape[1] // key.shape[1]):
            for chunk in self.queries.chunks:
                own, mask = query[:, :, chunk.rows], self.queries.mask_of(chunk)
                seen = (key[:, :, : chunk.end], value[:, :, : chunk.end])
                found = self.function(module, own, *seen, mask, *self.args, **self.kwargs)
                outputs.append(output_of(found, module, own, self.queries.swap.key))
        return torch.cat(outputs, 1)


class _OverAllKeys(torch.autograd.Function):
    """See `over_all_keys`."""

    @staticmethod
    def forward(ctx: Any, call: Call, unit: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.call, ctx.unit = call, unit
        ctx.save_for_backward(query, key, value)
        return call.first(query, *call.queries.swap.gather_context([key, value], unit))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        swap, needed = ctx.call.queries.swap, ctx.needs_input_grad[2:]
        query, key, value = ctx.saved_tensors
        inputs = [query, *swap.gather_context([key, value], ctx.unit)]
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_(is_needed) for each, is_needed in zip(inputs, needed, strict=True)]
            output = ctx.call.again(*inputs)
        wanted = [each for each in inputs if each.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradients[0]))
        of_query = next(found) if needed[0] else None
        rest = iter(swap.reduce_context(list(found), ctx.unit))
        return (None, None, of_query, *(next(rest) if is_needed else None for is_needed in needed[1:]))
