"""Plain tensors that are not kept alive."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class WeakTensor:
    """A plain tensor that is not kept alive.

    Args:
        tensor: whole.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._taken = tensor.dtype, tensor.device, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor | None:
        """It, if its memory is still there."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        dtype, device, *place = self._taken
        return torch.empty(0, dtype=dtype, device=device).set_(storage, *place)
