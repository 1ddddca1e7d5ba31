"""What lives elsewhere than on the device: optimizer states and parameters, in host memory or on a disk."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Literal

from hf_zero.config import values

_PLACES = ("none", "host", "disk")
_OTHER_WORDS = {"cpu": "host"}  # as DeepSpeed and FSDP2 call the host's memory
_LEAST_SLOT_BYTES = 2**18


@dataclass(frozen=True)
class Offload:
    """Where a rank's rows live between their uses.

    Attributes:
        optimizer: states of elementwise optimizers, and masters of another dtype than modules compute in (stages 1, 2).
        parameters: rows of parameters at rest (stage 3). Where those are in host memory, the optimizer steps there, too.
        ratio: the part of the optimizer's states that is offloaded, in whole parameters; the rest stays on the device. For
            "host" they are counted from the model's end, whose gradients come first.
        path: folder on a disk, for "disk"; made if missing. Only space in it is used: no file ever shows there.
        slot_bytes: bytes of the states that are read, stepped on and written back at a time.
        slots: so many of them are held in memory.
        pin: host memory that a device copies to and from is locked, without which copies wait for each other.

    Source: ZeRO-Offload (arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857).
    """

    optimizer: Literal["none", "host", "disk"] = "none"
    parameters: Literal["none", "host", "disk"] = "none"
    ratio: float = 1.0
    path: str | None = None
    slot_bytes: int = 32 * 2**20
    slots: int = 3
    pin: bool = True

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "optimizer", _place("offload.optimizer", self.optimizer))
        set_(self, "parameters", _place("offload.parameters", self.parameters))
        set_(self, "ratio", values.positive("offload.ratio", self.ratio, or_zero=True))
        set_(self, "slot_bytes", values.num_bytes("offload.slot_bytes", self.slot_bytes, minimum=_LEAST_SLOT_BYTES))
        set_(self, "slots", values.count("offload.slots", self.slots, minimum=3, unit="slots"))
        set_(self, "pin", values.boolean("offload.pin", self.pin))
        if self.ratio > 1:
            values.fail("offload.ratio", self.ratio, "is above 1, which is all")
        if isinstance(self.path, os.PathLike):
            set_(self, "path", os.fspath(self.path))
        if self.path is not None and (not isinstance(self.path, str) or not self.path.strip() or "\0" in self.path):
            values.fail("offload.path", self.path, "is not a folder; name one on a disk")
        is_default = all(getattr(self, field.name) == field.default for field in dataclasses.fields(self))
        if not self.is_anything and not is_default:
            values.fail("offload.optimizer", "none", "offloads nothing, though other keys say how; use host or disk")
        if not self.pin and self.is_anything and not self.goes_to_host:
            values.fail("offload.pin", self.pin, "is about host memory, to which nothing is offloaded; leave it out")
        if "disk" in (self.optimizer, self.parameters) and self.path is None:
            values.fail(
                "offload.path", self.path, "is missing; name a folder on a fast disk for what is offloaded to it"
            )

    @property
    def is_anything(self) -> bool:
        """Whether anything is offloaded."""
        return (self.optimizer, self.parameters) != ("none", "none")

    @property
    def goes_to_host(self) -> bool:
        """Whether anything is offloaded to host memory."""
        return "host" in (self.optimizer, self.parameters)

    @classmethod
    def from_value(cls, value: object) -> Offload:
        """What a YAML form describes: `none`, or {optimizer: disk, path: /scratch, ...}.

        Raises:
            ConfigError: the value is neither.
        """
        return values.form(cls, "offload", value, "none", "{optimizer: disk, path: /scratch}")

    def to_value(self) -> Any:
        """The YAML form that `from_value` reads back."""
        return dataclasses.asdict(self) if self.is_anything else "none"


def _place(key: str, value: object) -> str:
    known = _OTHER_WORDS.get(value, value) if isinstance(value, str) else value
    return values.word(key, known, words=_PLACES)
