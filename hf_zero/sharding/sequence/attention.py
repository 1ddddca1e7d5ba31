"""Attention over slices of sequences: all tokens of some heads, by whatever function the model is set to.

transformers asks `AttentionInterface.get_interface` for the function of every call: eager, SDPA, flash and flex alike. Its
`masking_utils` make masks of whole attention masks and of the places of a slice, which are made whole here.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero import torch_compat
from hf_zero.changes import Changes
from hf_zero.engine.modules.sequence import Slice, Swap
from hf_zero.errors import UsageError

_changes = Changes()
_under_way: list[_UnderWay] = []  # the innermost last
_joins: list[bool] = []
_swaps: weakref.WeakKeyDictionary[nn.Module, Swap] = weakref.WeakKeyDictionary()


class Pass:
    """One forward of a model over slices.

    Args:
        swap: among the ranks of the group.
        tokens: this rank's slice.
        positions: of all tokens, padded; [1 or batch, tokens].

    Attributes:
        num_calls: of attention.
    """

    def __init__(self, swap: Swap, tokens: Slice, positions: Tensor) -> None:
        self.swap, self.tokens, self.positions = swap, tokens, positions
        self.num_calls = 0


@dataclass(frozen=True)
class _UnderWay:
    """A forward.

    Attributes:
        owner: who has begun it.
        over_slices: None where sequences are whole.
    """

    owner: object
    over_slices: Pass | None


@contextmanager
def whole_sequences() -> Iterator[None]:
    """Within: models compute whole sequences on every rank."""
    owner = object()
    begin(owner, None)
    try:
        yield
    finally:
        end(owner)


def are_whole() -> bool:
    """Whether models compute whole sequences just now, within `whole_sequences`."""
    return bool(_under_way) and _under_way[-1].over_slices is None


@contextmanager
def joined_outputs() -> Iterator[None]:
    """Within: models that compute slices hand out logits and hidden states of whole sequences, which take their memory."""
    _joins.append(True)
    try:
        yield
    finally:
        _joins.pop()


def are_joined() -> bool:
    """Whether outputs are joined, within `joined_outputs`."""
    return bool(_joins)


def begin(owner: object, one: Pass | None) -> None:
    """A forward begins; one of the same owner that is still under way was interrupted, and never came to its end."""
    end(owner)
    _under_way.append(_UnderWay(owner, one))


def end(owner: object) -> Pass | None:
    """The forward of an owner is over, if it has begun."""
    places = [place for place, each in enumerate(_under_way) if each.owner is owner]
    if not places:
        return None
    one = _under_way[places[0]].over_slices
    del _under_way[places[0] :]
    return one


def install(model: nn.Module, swap: Swap) -> None:
    """Let attention in a model swap slices."""
    for module in model.modules():
        _swaps[module] = swap
    if _changes:
        return
    from transformers import AttentionInterface, masking_utils

    _changes.keep()
    _changes.wrap(AttentionInterface, "get_interface", _get_interface)
    _changes.wrap(masking_utils, "_preprocess_mask_arguments", _of_all_tokens)
    _changes.wrap(masking_utils, "packed_sequence_compatibility_function", _of_all_positions)
    _changes.wrap(masking_utils, "maybe_pad_block_sequence_ids", _refuse_blocks)


def _sliced() -> Pass | None:
    return _under_way[-1].over_slices if _under_way else None


# --- masks ------------------------------------------------------------------------------------------------------------


def _of_all_tokens(original: Callable[..., Any], config: Any, inputs_embeds: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What masks are made from, with the lengths and places of whole sequences."""
    one = _sliced()
    if one is None:
        return original(config, inputs_embeds, *args, **kwargs)
    names = ("attention_mask", "past_key_values", "position_ids", "layer_idx", "encoder_hidden_states")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("encoder_hidden_states") is not None:
        raise UsageError("sp_size: cross-attention cannot be sliced: leave sp_size out")
    if given.get("position_ids") is not None:
        given["position_ids"] = one.positions
    shape = (inputs_embeds.shape[0], one.tokens.padded, 1)
    return original(config, inputs_embeds.new_empty(1).expand(shape), **given)


def _of_all_positions(original: Callable[..., Any], mask_function: Any, position_ids: Tensor, packed: Tensor) -> Any:
    one = _sliced()
    if one is not None:
        position_ids = one.positions.expand(len(packed), -1)
    return original(mask_function, position_ids, packed)


def _refuse_blocks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _sliced() is not None:
        raise UsageError("sp_size: a mask by blocks of tokens (of images) cannot be sliced: leave sp_size out")
    return original(*args, **kwargs)


# --- attention --------------------------------------------------------------------------------------------------------


def _get_interface(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    function = original(*args, **kwargs)

    @functools.wraps(function)
    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        swap = _swaps.get(module)
        if swap is None or not _is_sliced(module):
            return function(module, *args, **kwargs)
        return _attend(swap, function, module, *args, **kwargs)

    return attend


def _is_sliced(module: nn.Module) -> bool:
    if _under_way:
        one = _sliced()
        if one is not None:
            one.num_calls += 1
        return one is not None
    if torch_compat.in_backward():
        return True  # a forward in the graph is over slices, and here it is computed again
    if torch.is_grad_enabled():
        raise UsageError(
            f"sp_size: {type(module).__name__} is called outside a call of the whole model, which slices sequences: call the "
            "model itself"
        )
    return False


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    swap: Swap,
    function: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of all heads over a slice, by attention of some heads over all tokens."""
    ranks, heads = swap.over.num_ranks, query.shape[1]
    _check(module, query, key, attention_mask, kwargs, ranks)
    unit = f"attention {getattr(module, 'layer_idx', '')}".strip()
    shared = math.lcm(key.shape[1], ranks)  # fewer heads than ranks are repeated
    if shared > key.shape[1]:
        key, value = (each.repeat_interleave(shared // each.shape[1], 1) for each in (key, value))
    query, key, value = swap.to_heads([query, key, value], unit)
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4 and attention_mask.shape[1] == heads > 1:
        attention_mask = attention_mask.chunk(ranks, 1)[swap.over.rank]
    if torch.is_tensor(kwargs.get("position_ids")):
        kwargs["position_ids"] = _all_positions(swap, kwargs["position_ids"], unit)
    with _groups_of_heads(module, heads // shared):
        found = function(module, query, key, value, attention_mask, *args, **kwargs)
    output = found[0] if isinstance(found, tuple) else found
    if output.shape[:3] != (query.shape[0], query.shape[2], query.shape[1]):
        raise UsageError(
            f"sp_size: {type(module).__name__} has an attention function of its own, whose output of shape "
            f"{tuple(output.shape)} is not [batch, tokens, heads, ...]: use another attn_implementation"
        )
    return swap.to_tokens(output, unit), None


def _check(module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any], ranks: int) -> None:
    name = type(module).__name__
    heads, shared = query.shape[1], math.lcm(key.shape[1], ranks)
    if heads % shared:
        raise UsageError(
            f"sp_size is {ranks}, but {name} has {heads} heads of queries and {key.shape[1]} of keys: their numbers have to "
            "divide by it, or the second one into it"
        )
    if key.shape[2] != query.shape[2]:
        raise UsageError(f"sp_size: {name} attends to {key.shape[2]} tokens from {query.shape[2]} (cross-attention)")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UsageError(f"sp_size: {name} is not causal: leave sp_size out")
    for key_word in ("position_bias", "s_aux", "cache"):
        if kwargs.get(key_word) is not None:
            raise UsageError(f"sp_size: {name} has {key_word}, which cannot be sliced: leave sp_size out")
    length = query.shape[2] * ranks
    if isinstance(mask, Tensor) and mask.ndim == 4 and tuple(mask.shape[-2:]) != (length, length):
        raise UsageError(
            f"sp_size: {name} has a mask of shape {tuple(mask.shape)}, but sequences of {length} tokens: the model makes masks "
            "of its own, from its slice of them: leave sp_size out"
        )


def _all_positions(swap: Swap, own: Tensor, unit: str) -> Tensor:
    """The places of all tokens, for functions that find packed documents by them."""
    one = _sliced()
    return swap.gather(own, unit, own.ndim - 1) if one is None else one.positions


@contextmanager
def _groups_of_heads(module: nn.Module, size: int) -> Iterator[None]:
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
