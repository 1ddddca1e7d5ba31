"""Which modules become units, as a configuration says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_zero.config import values


@dataclass(frozen=True)
class UnitGrouping:
    """Which modules become units, the sets of parameters that are gathered together.

    Attributes:
        class_names: every module of one of these classes is a unit, for example ("LlamaDecoderLayer",).
        min_numel: modules become units, bottom-up, once they hold at least this many elements.

    With neither, units are found automatically ("auto": repeated blocks, embeddings, the head).
    """

    class_names: tuple[str, ...] = ()
    min_numel: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.class_names, str) or not isinstance(self.class_names, (list, tuple)):
            values.fail(
                "units", self.class_names, "is not a list of class names; write for example [LlamaDecoderLayer]"
            )
        for name in self.class_names:
            if not isinstance(name, str) or not name.isidentifier():
                values.fail("units", name, "is not the name of a class; write for example [LlamaDecoderLayer]")
        object.__setattr__(self, "class_names", tuple(self.class_names))
        if self.min_numel is not None:
            object.__setattr__(self, "min_numel", values.count("units.min_numel", self.min_numel, minimum=1))
        if self.class_names and self.min_numel is not None:
            values.fail("units", self.to_value(), "has both class names and min_numel; keep one")

    @classmethod
    def from_value(cls, value: object) -> UnitGrouping:
        """The grouping that a YAML form describes: `auto`, `[LlamaDecoderLayer]` or `{min_numel: 1000000}`.

        Raises:
            ConfigError: the value is none of these.
        """
        forms = "use auto, a list of class names such as [LlamaDecoderLayer], or {min_numel: 1000000}"
        if isinstance(value, UnitGrouping):
            return value
        if isinstance(value, str) and value == "auto":
            return cls()
        if isinstance(value, (list, tuple)) and value:
            return cls(class_names=tuple(value))
        if isinstance(value, Mapping) and list(value) == ["min_numel"] and value["min_numel"] is not None:
            return cls(min_numel=value["min_numel"])
        values.fail("units", value, f"is not understood; {forms}")

    def to_value(self) -> object:
        """The YAML form that `from_value` reads back."""
        if self.class_names and self.min_numel is not None:
            return {"class_names": list(self.class_names), "min_numel": self.min_numel}
        if self.min_numel is not None:
            return {"min_numel": self.min_numel}
        return list(self.class_names) or "auto"
