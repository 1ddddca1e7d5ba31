"""Speeds as people write them."""

from __future__ import annotations

import re

_SPEED = re.compile(r"([\d.]+)\s*([kKmMgGtT]?)(bit|b|B)(?:/s|ps)?")
_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def speed(text: str) -> float:
    """Bytes a second, of words such as "400gbit", "400Gb/s" or "50GB/s": B for bytes, b for bits.

    Raises:
        ValueError: it is something else.
    """
    found = _SPEED.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is no speed: write for example 400gbit or 50GB/s")
    return float(found[1]) * _THOUSANDS[found[2].lower()] / (1 if found[3] == "B" else 8)
