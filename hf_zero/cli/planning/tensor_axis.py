"""Layers that ranks share (`hf-zero plan --tp`), of a model without values: what one rank has of them.

The other ranks are not there: torch's "fake" process group stands for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_zero.comm.groups.process_groups import TENSOR_AXIS
from hf_zero.errors import UsageError
from hf_zero.sharding.axes.tensor_parallel import share_layers


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
