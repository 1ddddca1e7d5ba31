"""What ranks that share layers (`tp_size`) receive of each other, of a model without values."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_OF_WHOLE = {"all_reduce": 2, "all_reduce_": 2, "reduce_scatter_tensor": 1, "all_to_all_single": 1}  # by what is given


class Receiving(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """While active, adds up the bytes that this rank would receive of those that share its layers, as rings exchange them.

    Attributes:
        num_bytes: so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            name, others = func.name().partition("::")[2].partition(".")[0], dist.get_world_size() - 1
            if name == "all_gather_into_tensor":
                self.num_bytes += args[0].nbytes * others
            elif name in _OF_WHOLE:
                self.num_bytes += _OF_WHOLE[name] * args[0].nbytes * others // (others + 1)
        return out
