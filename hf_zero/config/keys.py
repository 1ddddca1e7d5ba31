"""What is said about a key that a configuration does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hf_zero.config import values
from hf_zero.config.deepspeed import rules as deepspeed_rules


def unknown(key: object, known: Iterable[str]) -> str:
    """What is wrong with a key, and which one may be meant.

    Args:
        key: as it was written.
        known: the keys that there are.
    """
    keys = list(known)
    if not isinstance(key, str):
        return f"key {values.shown(key)} is not a word; the keys are {', '.join(keys)}"
    if key in deepspeed_rules.OUR_NAMES:
        return f"unknown key '{key}': that is DeepSpeed's name; here it is {deepspeed_rules.OUR_NAMES[key]}"
    if key in deepspeed_rules.TOP_KEYS:
        return f"unknown key '{key}': it belongs to the DeepSpeed format; use either that format or ours, not both"
    near = difflib.get_close_matches(key, keys, n=1)
    near = near or difflib.get_close_matches(key, deepspeed_rules.TOP_KEYS, n=1, cutoff=0.8)
    advice = f"did you mean '{near[0]}'?" if near else f"the keys are {', '.join(keys)}"
    return f"unknown key {values.shown(key)}; {advice}"
