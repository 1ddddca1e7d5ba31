"""Masks of what slices see: made from whole attention masks and the places of all tokens, by transformers' own functions.

Where attention divides heads, masks are of all tokens. Where queries stay slices, they have the rows of these alone; None, as
everywhere, means that each token sees those before it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_zero.changes import Changes
from hf_zero.engine.modules.sequence import places_of
from hf_zero.errors import UsageError
from hf_zero.sharding.sequence import passes
from hf_zero.sharding.sequence.context import IS_CAUSAL, check_name

# Of packed documents: transformers before 5.23 looks at documents alone, not at places.
_OF_PACKED = "remap_positions_for_packed_sequence"

_signature_of = functools.cache(inspect.signature)


def change(changes: Changes) -> None:
    """Let transformers make such masks."""
    from transformers import masking_utils

    changes.wrap(masking_utils, "_preprocess_mask_arguments", _of_all_tokens)
    if hasattr(masking_utils, _OF_PACKED):
        changes.wrap(masking_utils, _OF_PACKED, _of_all_positions)
    changes.wrap(masking_utils, "maybe_pad_block_sequence_ids", _refuse_blocks)
    kind = masking_utils.AttentionMaskInterface
    original = kind.__getitem__
    changes.replace(kind, "__getitem__", lambda self, name: _of_rows(original(self, name), name))


def _of_all_tokens(original: Callable[..., Any], config: Any, inputs_embeds: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What masks are made from, with the lengths and places of whole sequences."""
    one = passes.sliced()
    if one is None:
        return original(config, inputs_embeds, *args, **kwargs)
    given = _signature_of(original).bind(config, inputs_embeds, *args, **kwargs).arguments
    if given.get("encoder_hidden_states") is not None:
        raise UsageError(f"{one.swap.key}: cross-attention cannot be sliced: leave {one.swap.key} out")
    if given.get("position_ids") is not None:
        given["position_ids"] = one.positions
    given["inputs_embeds"] = inputs_embeds.new_empty(1).expand(inputs_embeds.shape[0], one.tokens.padded, 1)
    return original(**given)


def _of_all_positions(original: Callable[..., Any], mask_function: Any, position_ids: Tensor) -> Any:
    one = passes.sliced()
    if one is not None:
        position_ids = one.positions.expand(len(position_ids), -1)
    return original(mask_function, position_ids)


def _refuse_blocks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    one = passes.sliced()
    if one is not None:
        key = one.swap.key
        raise UsageError(f"{key}: a mask by blocks of tokens (of images) cannot be sliced: leave {key} out")
    return original(*args, **kwargs)


def _of_rows(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that makes masks, which makes the rows of this rank's queries alone."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        one = passes.sliced()
        if one is None:
            return original(*args, **kwargs)
        assert not args, "transformers names all of them"
        if one.swap.context.num_ranks > 1:
            check_name(name, one.swap.key)
            if name == "sdpa" and _is_causal_alone(kwargs):
                return None
            kwargs = _with_rows(one, kwargs)
        mask = original(**kwargs)
        if isinstance(mask, Tensor) and not kwargs.get(
            "use_vmap"
        ):  # which says that the model adds a function of its own
            setattr(mask, IS_CAUSAL, True)
        if name == "eager":  # rows that see nothing see all tokens alike, without those that were added at the end
            mask[..., one.tokens.length :] = -math.inf
        return mask

    return make


def _with_rows(one: passes.Pass, given: dict[str, Any]) -> dict[str, Any]:
    """What a mask is made from, of this rank's queries alone."""
    ranks, whole = one.swap.context.num_ranks, given["mask_function"]
    places = places_of(given["q_length"], ranks, given["device"]).chunk(ranks)[one.swap.context.rank]

    def of_rows(row: Any, head: Any, query: Any, key: Any) -> Any:
        return whole(row, head, places[query], key)

    return {**given, "mask_function": of_rows, "q_length": len(places), "allow_is_causal_skip": False}


def _is_causal_alone(given: dict[str, Any]) -> bool:
    """Whether each token sees all of those before it."""
    window, mask = given.get("local_size"), given.get("attention_mask")
    is_windowed = window is not None and given["kv_length"] >= window
    return given.get("allow_is_causal_skip", True) and not is_windowed and (mask is None or bool(mask.all()))
