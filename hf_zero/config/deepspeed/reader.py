"""One pass over a DeepSpeed file: what its keys became, row by row, and the errors that name them."""

from __future__ import annotations

import difflib
import reprlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_zero.config.deepspeed.rules import (
    Rule,
    Status,
)
from hf_zero.errors import ConfigError

ABSENT = "(absent)"
"""The value in a row about a key that is not in the file, if DeepSpeed's default for it differs from ours."""


FROM_TRAINER = "taken from the Trainer's arguments"

SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 80


@dataclass(frozen=True)
class ImportRow:
    """What became of one DeepSpeed key.

    Attributes:
        key: dotted path, such as "zero_optimization.stage".
        value: as the file has it, or "(absent)".
        status: "kept", "differs" or "unsupported": see [Note: three fates of a key].
        note: what happens here, in one line.
    """

    key: str
    value: Any
    status: Status
    note: str


@dataclass
class Reader:
    """One pass over a DeepSpeed config: collects what its keys mean here, and raises for a key that cannot be honoured."""

    source: str
    zero: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    rows: list[ImportRow] = field(default_factory=list)

    def row(self, key: str, value: object, note: str, status: Status = "kept") -> None:
        """Record what became of a key."""
        self.rows.append(ImportRow(key, value, status, note))

    def error(self, key: str, value: object, problem: str) -> ConfigError:
        """The error about a key's value."""
        return ConfigError(f"{self.source}: key '{key}': {SHORT.repr(value)}: {problem}")

    def refuse_unknown(self, prefix: str, block: Mapping[Any, Any], known: Iterable[str]) -> None:
        """Raise for a key that DeepSpeed does not have."""
        names = sorted(known)
        for key in block:
            if key in names:
                continue
            near = difflib.get_close_matches(str(key), names, n=1)
            advice = f"did you mean '{prefix}{near[0]}'?" if near else "hf_zero knows no such DeepSpeed key; remove it"
            raise ConfigError(f"{self.source}: unknown key {SHORT.repr(f'{prefix}{key}')}; {advice}")

    def block(self, key: str, value: object) -> Mapping[Any, Any]:
        """A block of keys."""
        if not isinstance(value, Mapping):
            raise self.error(key, value, "is not a block of keys; write {...}")
        return value

    def flag(self, key: str, value: object) -> bool:
        """True or false."""
        if not isinstance(value, bool):
            raise self.error(key, value, "is not a boolean; use true or false")
        return value

    def number(self, key: str, value: object, *, minimum: float = 0.0) -> int | float:
        """A number."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= sys.maxsize:  # type: ignore[operator]
            raise self.error(key, value, f"is not a number of at least {minimum:g}")
        return value  # type: ignore[return-value]

    def count(self, key: str, value: object, *, minimum: int = 0) -> int:
        """A whole number."""
        number = self.number(key, value, minimum=minimum)
        if number != int(number):
            raise self.error(key, value, "is not a whole number")
        return int(number)

    def argument(self, key: str, value: object, argument: str, parsed: Any) -> None:
        """Record a value that the Trainer takes under another argument name."""
        self.training[argument] = parsed
        self.row(key, value, f"{argument}={parsed}")

    def judge(self, prefix: str, block: Mapping[Any, Any], rules: Mapping[str, Rule]) -> None:
        """Add rows, or raise an error, for the keys that need no translation."""
        for name, value in block.items():
            rule = rules.get(name)
            if rule is None:
                continue
            key, asked = f"{prefix}{name}", value
            if rule.switch and value is not None:
                asked = self.block(key, value).get(rule.switch)
                key = f"{key}.{rule.switch}"
            if asked is None:  # DeepSpeed's default, which is harmless for every key
                self.row(key, asked, "")
                continue
            if rule.type == "flag":
                self.flag(key, asked)
            elif rule.type == "number" and asked != "auto" and asked not in rule.harmless:
                self.number(key, asked)
            is_harmless = asked in rule.harmless
            if rule.fate == "refused" and not is_harmless:
                raise self.error(key, asked, rule.note)
            if rule.fate == "refused":
                self.row(key, asked, "")
            elif is_harmless:
                self.row(key, asked, rule.note if asked is True else "")
            else:
                self.row(key, asked, rule.note, rule.fate)
