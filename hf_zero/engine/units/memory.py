"""The memory of gathered units: how many bytes they hold, and what becomes of those that are released."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


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

    def reset_peak(self) -> None:
        """Start a new `peak_bytes` at what is held now."""
        self.peak_bytes = self.bytes
