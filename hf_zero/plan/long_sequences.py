"""The longest sequence with which a step fits, and what ranks exchange that share sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_zero.plan.activations import Kept
from hf_zero.plan.memory import Holding, Setting, predictor
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
    holding = predictor(shape, setting)
    best = num_tokens
    for _ in range(_ROUNDS):
        near = sorted(known, key=lambda length: abs(length - best))[:2]

        def fits_at(length: int, near: list[int] = near) -> bool:
            return fits(holding(known.get(length) or _between(known, near, length)))

        best = _bisect(fits_at)
        if best in known or not best:
            break
        known[best] = kept_of(best)
    while best and not fits(holding(known.get(best) or kept_of(best))):
        best -= _STEP
    return best


@dataclass(frozen=True)
class Exchanged:
    """Bytes of what ranks that share sequences exchange in one layer.

    With `sp_size`, queries, keys, values and outputs are sent and received, and fewer heads of keys than ranks are repeated,
    which is kept. With `cp_size`, keys and values are gathered, and have gradients; repeated, where heads share them.

    Attributes:
        at_once: there while attention runs, beside what is kept.
        kept: for the backward, beside what a slice keeps.
        forward, backward: received.
    """

    at_once: int
    kept: int
    forward: int
    backward: int

    @classmethod
    def of(cls, config: Any, num_tokens: int, itemsize: int, sp_size: int, cp_size: int) -> Exchanged:
        """Of a model.

        Args:
            config: its own.
            num_tokens: of all sequences of a batch, not of slices.
            itemsize: bytes of an element.
            sp_size, cp_size: as in the configuration.
        """
        config = config.get_text_config()
        heads = int(config.num_attention_heads)
        shared = int(getattr(config, "num_key_value_heads", None) or heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        own = num_tokens * width * itemsize // (sp_size * cp_size)  # of one head of a slice
        spread = math.lcm(shared, sp_size)
        by_heads = 2 * own * (heads + spread) * (sp_size - 1) // sp_size
        keys = 2 * num_tokens * width * (spread // sp_size)  # elements, of keys and values of all tokens
        repeated = 2 * num_tokens * width * (heads // sp_size) if heads > spread else 0
        return cls(
            (2 * own * (heads + 2 * spread) if sp_size > 1 else 0)
            + (2 * (keys + repeated) * itemsize if cp_size > 1 else 0),
            2 * own * (spread - shared),
            by_heads + keys * itemsize * (cp_size - 1) // cp_size,
            by_heads + keys * (itemsize + 4) * (cp_size - 1) // cp_size,  # sums of gradients are in float32
        )


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
        mixed(known[first].routed, known[second].routed),
        mixed(known[first].received, known[second].received),
    )
