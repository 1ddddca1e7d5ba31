"""The longest sequence with which a step fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.plan.activations import Kept
from hf_zero.plan.memory import Holding, Setting, predict
from hf_zero.plan.shapes import ModelShape

_MOST_TOKENS, _STEP = 2**27, 64
_ROUNDS = 6


def longest(
    shape: ModelShape,
    setting: Setting,
    kept_of: Callable[[int], Kept],
    fits: Callable[[Holding], bool],
    num_tokens: int,
) -> int:
    """The most tokens of a sequence, in steps of 64, with which a step fits; 0 if none does.

    Counting takes a second, so few lengths are counted: between and beyond them, activations are taken to grow evenly, and
    the length that this gives is counted next.

    Args:
        shape: of the model.
        setting: how it is trained.
        kept_of: activations of a sequence of so many tokens.
        fits: whether memory is enough.
        num_tokens: a length to begin with.
    """
    known = {length: kept_of(length) for length in (num_tokens, 2 * num_tokens)}
    best = num_tokens
    for _ in range(_ROUNDS):
        near = sorted(known, key=lambda length: abs(length - best))[:2]

        def fits_at(length: int, near: list[int] = near) -> bool:
            return fits(predict(shape, setting, known.get(length) or _between(known, near, length)))

        best = _bisect(fits_at)
        if best in known or not best:
            break
        known[best] = kept_of(best)
    while best and not fits(predict(shape, setting, known.get(best) or kept_of(best))):
        best -= _STEP
    return best


def keys_nbytes(config: Any, num_tokens: int, itemsize: int) -> int:
    """Bytes of what a layer gathers with `cp_size`: keys and values, and their gradients; repeated, where heads share them.

    Args:
        config: of the model.
        num_tokens: of all sequences of a batch, not of slices.
        itemsize: bytes of an element.
    """
    config = config.get_text_config()
    heads = int(config.num_attention_heads)
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    of_each = 2 * num_tokens * width * itemsize  # a key and a value
    return 2 * of_each * (shared + (heads if heads > shared else 0))


def _bisect(fits_at: Callable[[int], bool]) -> int:
    low, high = 0, _MOST_TOKENS // _STEP
    while low < high:
        middle = (low + high + 1) // 2
        if fits_at(middle * _STEP):
            low = middle
        else:
            high = middle - 1
    return low * _STEP


def _between(known: dict[int, Kept], near: list[int], length: int) -> Kept:
    first, second = near
    part = (length - first) / (second - first)

    def mixed(start: int, end: int) -> int:
        return max(round(start + part * (end - start)), 0)

    return Kept(
        mixed(known[first].total, known[second].total),
        mixed(known[first].largest, known[second].largest),
    )
