"""Layers that ranks share (`tp_size`), of a model without values: one rank's part, and what it receives of the others.

The other ranks are not there: torch's "fake" process group stands for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.comm.groups import TENSOR_AXIS
from hf_zero.errors import UsageError
from hf_zero.sharding.tensor_parallel import share_layers

_OF_WHOLE = {"all_reduce": 2, "all_reduce_": 2, "reduce_scatter_tensor": 1, "all_to_all_single": 1}  # by what is given


@dataclass(frozen=True)
class _OneAxis:
    """What transformers asks for its meshes."""

    mesh: DeviceMesh

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        """The tensor axis, whichever is asked for."""
        return self.mesh


@contextmanager
def shared_among(size: int, model: nn.Module) -> Iterator[None]:
    """Within: `size` ranks share the layers of a model on the meta device, by transformers' plan; this is the first of them.

    Raises:
        UsageError: it is no model of transformers, or torch's process group is in use.
        PartitionError: transformers has no plan for it.
        ConfigError: its heads cannot be divided.
    """
    from transformers import PreTrainedModel
    from transformers.distributed import DistributedConfig

    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"{type(model).__name__} is not a model of transformers, whose tensor parallelism is used")
    if dist.is_initialized():
        raise UsageError("--tp plans in a process of its own: leave the launcher out")
    dist.init_process_group("fake", rank=0, world_size=size)
    try:
        meshes = _OneAxis(init_device_mesh("cpu", (size,), mesh_dim_names=(TENSOR_AXIS,)))
        share_layers(model, DistributedConfig(tp_size=size), meshes, size)
        yield
    finally:
        dist.destroy_process_group()


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
