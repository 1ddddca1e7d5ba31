"""In which format rows and gradients travel between ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from hf_zero.config import values


@dataclass(frozen=True)
class Wire:
    """Messages that are smaller than what is computed with (training is then not the same bit for bit), or fewer.

    Attributes:
        gather: of rows of parameters: "float32" (as they are), "bfloat16" or "int8".
        reduce: of gradients: "float32" (as they are), "bfloat16" or "int4".
        secondary: ranks of a host, next to each other, that keep a second copy of all rows among them (stage 3): what has not
            changed since it was gathered is gathered within the host. 1: none do.

    Source: ZeRO++ (arXiv:2306.10209).
    """

    gather: Literal["float32", "bfloat16", "int8"] = "float32"
    reduce: Literal["float32", "bfloat16", "int4"] = "float32"
    secondary: int = 1

    def __post_init__(self) -> None:
        gather = values.dtype("wire.gather", self.gather, words=("float32", "bfloat16", "int8"))
        reduce = values.dtype("wire.reduce", self.reduce, words=("float32", "bfloat16", "int4"))
        object.__setattr__(self, "gather", gather)
        object.__setattr__(self, "reduce", reduce)
        values.count("wire.secondary", self.secondary, minimum=1)

    @property
    def is_exact(self) -> bool:
        """Whether everything travels as it is."""
        return (self.gather, self.reduce) == ("float32", "float32")

    @property
    def is_default(self) -> bool:
        """Whether nothing is asked for."""
        return self == Wire()

    @classmethod
    def from_value(cls, value: object) -> Wire:
        """What a YAML form describes: `exact`, or {gather: int8, reduce: bfloat16}.

        Raises:
            ConfigError: the value is neither.
        """
        return values.form(cls, "wire", value, "exact", "{gather: bfloat16, reduce: bfloat16}")

    def to_value(self) -> Any:
        """The YAML form that `from_value` reads back."""
        return "exact" if self.is_default else dataclasses.asdict(self)
