"""How what activation checkpointing keeps of a layer is stored."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hf_zero.config import values


@dataclass(frozen=True)
class Activations:
    """What each rank keeps of the input of a checkpointed layer, from its forward to its recomputation.

    Attributes:
        partition: a part only: the ranks of the tensor axis, which all have the same input, keep one each (P_a).
        offload: in host memory.

    Source: ZeRO (arXiv:1910.02054), section 6.1.
    """

    partition: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        values.boolean("activations.partition", self.partition)
        values.boolean("activations.offload", self.offload)

    @property
    def is_default(self) -> bool:
        """Whether nothing is asked for."""
        return self == Activations()

    @classmethod
    def from_value(cls, value: object) -> Activations:
        """What a YAML form describes: `whole`, or {partition: true}.

        Raises:
            ConfigError: the value is neither.
        """
        return values.form(cls, "activations", value, "whole", "{partition: true}")

    def to_value(self) -> Any:
        """The YAML form that `from_value` reads back."""
        return "whole" if self.is_default else dataclasses.asdict(self)
