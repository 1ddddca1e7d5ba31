"""Which modules become units, as a configuration says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_zero.config import values

_KEYS = ("class_names", "min_numel", "whole")


@dataclass(frozen=True)
class UnitGrouping:
    """Which modules become units, the sets of parameters that are gathered together.

    Attributes:
        class_names: every module of one of these classes is a unit, for example ("LlamaDecoderLayer",).
        min_numel: modules become units, bottom-up, once they hold at least this many elements.
        whole: classes of modules, or their names with wildcards ("*.vision_tower"), that stay whole between uses in stage 3,
            with all that is in them, as in stage 2: some ranks may skip those.

    With neither of the first two, units are found automatically ("auto": repeated blocks, embeddings, the head).
    """

    class_names: tuple[str, ...] = ()
    min_numel: int | None = None
    whole: tuple[str, ...] = ()

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
        object.__setattr__(self, "whole", values.names("units.whole", self.whole))

    def check(self, stage: int, shards_parameters: bool, offloads_parameters: bool) -> None:
        """Refuse what the rest of a configuration contradicts.

        Raises:
            ConfigError: all modules are whole anyway, or none can be.
        """
        if not self.whole:
            return
        if not shards_parameters:
            advice = f"has no effect in stage {stage}, where all modules are whole; remove it, or use stage 3"
            values.fail("units.whole", list(self.whole), advice)
        if offloads_parameters:
            advice = "cannot be had with offload.parameters, which takes all parameters away; remove one of them"
            values.fail("units.whole", list(self.whole), advice)

    @classmethod
    def from_value(cls, value: object) -> UnitGrouping:
        """The grouping that a YAML form describes: `auto`, `[LlamaDecoderLayer]`, `{min_numel: 1000000}`, `{whole: [...]}`.

        Raises:
            ConfigError: the value is none of these.
        """
        forms = "use auto, a list of class names such as [LlamaDecoderLayer], {min_numel: 1000000} or {whole: [vision_tower]}"
        if isinstance(value, UnitGrouping):
            return value
        if isinstance(value, str) and value == "auto":
            return cls()
        if isinstance(value, (list, tuple)) and value:
            return cls(class_names=tuple(value))
        if isinstance(value, Mapping) and value and None not in value.values() and set(value) <= set(_KEYS):
            return cls(**value)
        values.fail("units", value, f"is not understood; {forms}")

    def to_value(self) -> object:
        """The YAML form that `from_value` reads back."""
        given = {
            "class_names": list(self.class_names),
            "min_numel": self.min_numel,
            "whole": list(self.whole),
        }
        if self.min_numel is None and not self.whole:
            return given["class_names"] or "auto"
        return {key: value for key, value in given.items() if value}
