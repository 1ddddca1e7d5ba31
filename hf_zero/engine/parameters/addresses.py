"""Addresses of tensors at rest: code that looks for tied weights compares `p.data_ptr()`, or that of the storage.

A rank holds rows only, and of some parameters none, whose memory is at address 0. So each whole has an address of its own, that
of no memory: no two of them overlap, and a view is where it would be. Nobody can read there.
"""

from __future__ import annotations

import threading

import torch

_FIRST, _ALIGNED = 1 << 60, 64  # no process has memory there
_lock = threading.Lock()
_end = _FIRST


class StorageAtRest(torch.UntypedStorage):
    """What tells where a whole would be, and how large; its values are nowhere."""

    _address: int

    @classmethod
    def of(cls, num_bytes: int) -> StorageAtRest:
        """The storage of a new whole of `num_bytes`."""
        global _end
        new: StorageAtRest = cls(num_bytes, device="meta")
        with _lock:
            new._address = _end
            _end += -(-max(num_bytes, 1) // _ALIGNED) * _ALIGNED
        return new

    def data_ptr(self) -> int:
        """The address."""
        return self._address
