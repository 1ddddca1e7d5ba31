"""The memory of gathered units: where each parameter lies in it, how many bytes it holds, what becomes of it when released."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.comm.collectives import Rows
from hf_zero.engine.parameters.records import ZeroParameter


@dataclass
class GatheredMemory:
    """Counts the bytes of gathered units, and poisons what is released where a test asks for it.

    Attributes:
        bytes: bytes held now.
        peak_bytes: the most bytes held at once since the last `reset_peak`.
        poison: fill released memory with NaN and keep it, so that a stale read shows in the numbers.
    """

    bytes: int = 0
    peak_bytes: int = 0
    poison: bool = False
    _held: dict[torch.UntypedStorage, int] = field(default_factory=dict)

    def take(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give `storage` memory for `num_bytes`; what it holds is undefined."""
        if storage.nbytes() != num_bytes:
            storage.resize_(num_bytes)
        if storage not in self._held:
            self._held[storage] = num_bytes
            self.bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.bytes)

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of `storage` away again."""
        self.bytes -= self._held.pop(storage, 0)
        if self.poison:
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(0xFF)  # NaN in any float dtype
        else:
            storage.resize_(0)

    def held(self) -> list[torch.UntypedStorage]:
        """What has memory that comes and goes."""
        return list(self._held)

    def reset_peak(self) -> None:
        """Start a new `peak_bytes` at what is held now."""
        self.peak_bytes = self.bytes


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its unit's memory.

    Attributes:
        parameter: whose.
        rows: the padded whole, flat, as the transport sees it.
        own: this rank's rows of it.
        whole: the whole, in its shape.
    """

    parameter: ZeroParameter
    rows: Rows
    own: Tensor
    whole: Tensor


def fill_own_rows(slots: Sequence[Slot]) -> None:
    """Copy this rank's rows at rest into their place, in the compute dtype, unless they live there already."""
    local = torch_compat.locals_in([slot.parameter.param for slot in slots])
    moved = [(slot.own, rows) for slot, rows in zip(slots, local, strict=True)]
    moved = [(own, rows) for own, rows in moved if own.data_ptr() != rows.data_ptr()]
    if moved:
        with torch.no_grad():
            torch._foreach_copy_([own for own, _ in moved], [local for _, local in moved])


def release_rows(slots: Iterable[Slot]) -> None:
    """Let go of rows that were read from a disk."""
    for slot in slots:
        if (on_disk := slot.parameter.on_disk) is not None:
            on_disk.release()
