"""Attention over slices of sequences: all tokens of some heads, or some queries of all, by the function of the model.

transformers asks `AttentionInterface.get_interface` for the function of every call: eager, SDPA, flash and flex alike.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero import torch_compat
from hf_zero.changes import Changes
from hf_zero.engine.modules.sequence import Swap
from hf_zero.errors import UsageError
from hf_zero.sharding.sequence import masks, passes
from hf_zero.sharding.sequence.context import groups_of_heads, output_of, over_all_keys
from hf_zero.sharding.sequence.ring import over_a_ring

_changes = Changes()
_swaps: weakref.WeakKeyDictionary[nn.Module, Swap] = weakref.WeakKeyDictionary()


def install(model: nn.Module, swap: Swap) -> None:
    """Let attention in a model swap slices."""
    for module in model.modules():
        _swaps[module] = swap
    if _changes:
        return
    from transformers import AttentionInterface

    _changes.keep()
    _changes.wrap(AttentionInterface, "get_interface", _get_interface)
    masks.change(_changes)


def _get_interface(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    function = original(*args, **kwargs)
    name = str(kwargs.get("attn_implementation", args[1] if len(args) > 1 else ""))

    @functools.wraps(function)
    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        swap = _swaps.get(module)
        if swap is None or not _is_sliced(module, swap.key):
            return function(module, *args, **kwargs)
        return _attend(swap, function, name, module, *args, **kwargs)

    return attend


def _is_sliced(module: nn.Module, key: str) -> bool:
    if passes.are_any():
        one = passes.sliced()
        if one is not None:
            one.num_calls += 1
        return one is not None
    if torch_compat.in_backward():
        return True  # a forward in the graph is over slices, and here it is computed again
    if torch.is_grad_enabled():
        raise UsageError(
            f"{key}: {type(module).__name__} is called outside a call of the whole model, which slices sequences: call the "
            "model itself"
        )
    return False


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    swap: Swap,
    function: Callable[..., Any],
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of all heads over a slice."""
    _check(module, query, key, kwargs, swap)
    unit = f"attention {getattr(module, 'layer_idx', '')}".strip()
    if swap.context.num_ranks > 1:
        over = over_a_ring if swap.world.config.cp_comm_strategy == "alltoall" else over_all_keys
        function = over(swap, function, name, unit)
    if swap.heads.num_ranks > 1:
        function = functools.partial(_by_heads, swap, function, unit)
    found = function(module, query, key, value, attention_mask, *args, **kwargs)
    return output_of(found, module, query, swap.key), None


def _by_heads(
    swap: Swap,
    function: Callable[..., Any],
    unit: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of all heads over a slice, by attention of some heads over the slices of the ranks that divide heads."""
    ranks, heads = swap.heads.num_ranks, query.shape[1]
    shared = math.lcm(key.shape[1], ranks)  # fewer heads than ranks are repeated
    if shared > key.shape[1]:
        key, value = (each.repeat_interleave(shared // each.shape[1], 1) for each in (key, value))
    query, key, value = swap.to_heads([query, key, value], unit)
    if swap.context.num_ranks == 1:
        _check_mask(module, query, attention_mask, swap.key)
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4 and attention_mask.shape[1] == heads > 1:
        attention_mask = attention_mask.chunk(ranks, 1)[swap.heads.rank]
    if torch.is_tensor(kwargs.get("position_ids")):
        kwargs["position_ids"] = _all_positions(swap, kwargs["position_ids"], unit)
    with groups_of_heads(module, heads // shared):
        found = function(module, query, key, value, attention_mask, *args, **kwargs)
    return swap.to_tokens(output_of(found, module, query, swap.key), unit), None


def _check(module: nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any], swap: Swap) -> None:
    name, ranks = type(module).__name__, swap.heads.num_ranks
    heads, shared = query.shape[1], math.lcm(key.shape[1], ranks)
    if heads % shared:
        raise UsageError(
            f"sp_size is {ranks}, but {name} has {heads} heads of queries and {key.shape[1]} of keys: their numbers have to "
            "divide by it, or the second one into it"
        )
    if key.shape[2] != query.shape[2]:
        raise UsageError(f"{swap.key}: {name} attends to {key.shape[2]} tokens from {query.shape[2]} (cross-attention)")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UsageError(f"{swap.key}: {name} is not causal: leave {swap.key} out")
    for key_word in ("position_bias", "s_aux", "cache"):
        if kwargs.get(key_word) is not None:
            raise UsageError(f"{swap.key}: {name} has {key_word}, which cannot be sliced: leave {swap.key} out")


def _check_mask(module: nn.Module, query: Tensor, mask: Any, key: str) -> None:
    length = query.shape[2]
    if isinstance(mask, Tensor) and mask.ndim == 4 and tuple(mask.shape[-2:]) != (length, length):
        raise UsageError(
            f"{key}: {type(module).__name__} has a mask of shape {tuple(mask.shape)}, but sequences of {length} tokens: the "
            f"model makes masks of its own, from its slice of them: leave {key} out"
        )


def _all_positions(swap: Swap, own: Tensor, unit: str) -> Tensor:
    """The places of all tokens, for functions that find packed documents by them."""
    one = passes.sliced()
    return swap.gather(own, unit, own.ndim - 1) if one is None else one.positions
