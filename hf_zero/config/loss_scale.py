"""How the loss is scaled while a model computes in float16."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config import values


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss, and when it changes; the defaults are those of `torch.amp.GradScaler`.

    Attributes:
        initial: the factor at the start.
        window: it doubles after so many steps without an overflow; None: it never changes.
        hysteresis: so many overflows halve it; the steps of the others are skipped too. Counted anew when it doubles.
        consecutive_hysteresis: also counted anew after every step without an overflow.
        minimum: an overflow at this factor is an error. 0: halve as often as float32 can.

    Source: DeepSpeed 0.19, `runtime/fp16/loss_scaler.py`.
    """

    initial: float = 2.0**16
    window: int | None = 2000
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    minimum: float = 0.0

    def __post_init__(self) -> None:
        checked = {
            "initial": values.positive("loss_scale.initial", self.initial),
            "window": None
            if self.window is None
            else values.count("loss_scale.window", self.window, minimum=1, unit="steps"),
            "hysteresis": values.count("loss_scale.hysteresis", self.hysteresis, minimum=1, unit="overflows"),
            "consecutive_hysteresis": values.boolean("loss_scale.consecutive_hysteresis", self.consecutive_hysteresis),
            "minimum": values.positive("loss_scale.minimum", self.minimum, or_zero=True),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.minimum > self.initial:
            values.fail("loss_scale.minimum", self.minimum, f"is above loss_scale.initial, {self.initial:g}")

    @property
    def is_dynamic(self) -> bool:
        """Whether the factor changes."""
        return self.window is not None

    @classmethod
    def from_value(cls, value: object) -> LossScale:
        """What a YAML form describes: `dynamic`, a number that stays, or {initial: 65536, window: 1000, ...}.

        Raises:
            ConfigError: the value is none of these.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if isinstance(value, LossScale):
            return value
        if isinstance(value, Mapping):
            return cls(**values.block("loss_scale", value, names))
        if value == "dynamic":
            return cls()
        if isinstance(value, (int, float, str)) and not isinstance(value, bool) and value not in names:
            return cls(initial=value, window=None)  # type: ignore[arg-type]
        values.fail("loss_scale", value, "is not understood; use dynamic, a number, or {initial: 65536, window: 1000}")

    def to_value(self) -> Any:
        """The YAML form that `from_value` reads back."""
        if self == LossScale():
            return "dynamic"
        if self == LossScale(initial=self.initial, window=None):
            return self.initial
        return dataclasses.asdict(self)
