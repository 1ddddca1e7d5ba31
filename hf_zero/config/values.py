"""Reads one value of a configuration: returns it as `ZeroConfig` keeps it, or raises a ConfigError that names its key."""

from __future__ import annotations

import inspect
import math
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from hf_zero.errors import ConfigError

Form = TypeVar("Form")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80

_NUMBER = r"\d{1,30}(?:\.\d{0,30})?(?:e[+-]?\d{1,3})?"
_BYTE_SIZE = re.compile(rf"({_NUMBER})\s*((?:[kmgt]i?)?b)?", re.ASCII | re.IGNORECASE)
_BYTE_UNITS = {"b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_LARGEST = 2**63 - 1

_DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
_FUTURE_COLLECTIVES = ("quantised", "quantized")


def shown(value: object) -> str:
    """A value as errors show it, shortened if it is long."""
    return _SHORT.repr(value)


def fail(key: str, value: object, problem: str) -> NoReturn:
    """Raise the ConfigError of one key."""
    raise ConfigError(f"key '{key}': {shown(value)} {problem}")


def _as_number(value: object) -> int | float | None:
    """A finite number, or None. Strings are accepted, since YAML 1.1 reads 1e5 as a string. A bool is not a number."""
    if isinstance(value, str) and re.fullmatch(_NUMBER, value.strip(), re.ASCII | re.IGNORECASE):
        value = int(value) if value.strip().isdigit() else float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def integer(key: str, value: object, *, minimum: int, maximum: int, advice: str) -> int:
    """A whole number from `minimum` to `maximum`."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        fail(key, value, advice)
    return int(value)


def count(key: str, value: object, *, minimum: int, unit: str = "elements") -> int:
    """A number of elements, or of what `unit` says; 1e5 is accepted too."""
    number = _as_number(value)
    if number is None or number != int(number) or not minimum <= number <= _LARGEST:
        fail(key, value, f"is not a number of {unit}; use a whole number of at least {minimum}")
    return int(number)


def positive(key: str, value: object, *, or_zero: bool = False) -> float:
    """A number above 0, or not below it."""
    number = _as_number(value)
    if number is None or number < 0 or (number == 0 and not or_zero):
        fail(key, value, f"is not a number; use one {'of at least 0' if or_zero else 'above 0'}")
    return float(number)


def num_bytes(key: str, value: object, *, minimum: int, words: str = "") -> int:
    """A number of bytes, or a string with a unit; `words` may stand there, too."""
    match = _BYTE_SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = (match[2] or "").lower() if match else ""
    number = _as_number(match[1] if match else value)
    if number is not None and unit:
        number = number * _BYTE_UNITS[unit]  # "1.5GiB" is whole enough: the rest of a byte is dropped below
    elif number is not None and number != int(number):
        number = None
    if number is None or not minimum <= number <= _LARGEST:
        fail(
            key,
            value,
            f'is not a number of bytes; use {words}a number of at least {minimum}, "64MiB", "1GiB" or "500MB"',
        )
    return int(number)


def seconds(key: str, value: object) -> float:
    """A time above 0."""
    number = _as_number(value)
    if number is None or not 0 < number <= _LARGEST:
        fail(key, value, "is not a time in seconds; use a number above 0")
    return float(number)


def seconds_or_auto(key: str, value: object) -> float | str:
    """A time above 0, or "auto"."""
    return "auto" if value == "auto" else seconds(key, value)


def boolean(key: str, value: object) -> bool:
    """True or False, and nothing that is merely truthy or falsy."""
    if not isinstance(value, bool):
        fail(key, value, "is not a boolean; use true or false")
    return value


def boolean_or_bytes(key: str, value: object) -> bool | int | str:
    """True, False, "auto", or a number of bytes above 0."""
    if isinstance(value, bool) or value == "auto":
        return value
    return num_bytes(key, value, minimum=1, words="true, false, auto, ")


def block(key: str, value: Mapping[Any, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """A block of keys that are all among `names`."""
    known = list(names)
    for name in value:
        if name not in known:
            fail(key, name, f"is not one of its keys; they are {', '.join(known)}")
    return value


def form(kind: type[Form], key: str, value: object, nothing: str, example: str) -> Form:
    """The block of keys that a YAML form describes: the block itself, the word `nothing` for its defaults, or a mapping."""
    if isinstance(value, kind):
        return value
    if value is None or value == nothing:
        return kind()
    if not isinstance(value, Mapping):
        fail(key, value, f"is not understood; use {nothing}, or {example}")
    return kind(**block(key, value, inspect.signature(kind).parameters))


def word(key: str, value: object, *, words: tuple[str, ...]) -> str:
    """One of `words`."""
    if not isinstance(value, str) or value not in words:
        fail(key, value, f"is not one of the choices; use {', '.join(words)}")
    return value


def dtype(key: str, value: object, *, words: tuple[str, ...]) -> str:
    """One of `words`, which may be given as a torch dtype, or by a short name."""
    # A torch dtype is recognised without importing torch: its str() is "torch.bfloat16".
    is_torch_dtype = (type(value).__module__, type(value).__name__) == ("torch", "dtype")
    name = str(value).removeprefix("torch.") if isinstance(value, str) or is_torch_dtype else None
    name = _DTYPE_ALIASES.get(name, name) if name is not None else None
    if name not in words:
        fail(key, value, f"is not one of the choices; use {', '.join(words)}")
    return name


def names(key: str, value: object) -> tuple[str, ...]:
    """A list of names."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name for name in value):
        fail(key, value, "is not a list of names; write for example [LlamaRMSNorm]")
    return tuple(value)


def collectives(key: str, value: object) -> str:
    """The name of an implementation of the exchanges."""
    words = ("auto", "native", "pairwise", "host")
    if isinstance(value, str) and value in _FUTURE_COLLECTIVES:
        fail(key, value, f"does not exist yet; use one of {', '.join(words)}")
    return word(key, value, words=words)


def reduce_scatter(key: str, value: object) -> bool | str:
    """See `ZeroConfig.reduce_scatter`."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value != "to_owner":
        fail(key, value, "is not one of the choices; use true, false or to_owner")
    return value


def file(key: str, value: object) -> str | None:
    """The path of a file, or None."""
    if value is None:
        return None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value.strip() or "\0" in value or value.endswith("/"):
        fail(key, value, "is not a file; name one, such as trace.json, or null")
    return value


def world_size(key: str, value: object) -> int | None:
    """A number of ranks, or None."""
    if value is None:
        return None
    return integer(key, value, minimum=1, maximum=_LARGEST, advice="is not a number of ranks; use 1 or more, or null")
