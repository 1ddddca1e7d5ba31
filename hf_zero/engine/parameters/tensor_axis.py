"""Tensor parallelism beside ZeRO: how modules see what is gathered, where transformers shares a layer among ranks.

[Note: tensor axis] transformers cuts weights of a layer over the tensor axis, whose ranks see the same batch, and computes with
`DTensor`s over that axis. What a rank holds of a weight is cut by rows once more, over the other ranks. So a gather makes this
rank's part of the weight, and modules see it as the `DTensor` that transformers made. That tensor is made once a call, with the
gather: a recomputation in backward must meet the same one, or autograd would save other tensors than in forward.

Some weights are whole on every rank of the tensor axis, but compute with a part of the activations (the norms of single heads):
their gradients are added up over the axis. transformers does so in a hook on the parameter, which a gathered one cannot have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from hf_zero.comm.collectives import Collectives
from hf_zero.engine.ranks.world import World
from hf_zero.layout import row_major

_PLACEMENTS, _SUMS = "_zero_tensor_placements", "_zero_sums_over_tensor_axis"


def remember_placement(holder: nn.Module, name: str, param: DTensor) -> None:
    """Let the parameter `name` of `holder`, which is a `DTensor` over the tensor axis, be seen as one when it is gathered."""
    vars(holder).setdefault(_PLACEMENTS, {})[name] = param.placements[-1]


def sum_gradients_over_tensor_axis(module: nn.Module) -> None:
    """Let the gradients of a module's own parameters, each of a part of the activations, be added up over the tensor axis."""
    vars(module)[_SUMS] = True


@dataclass(frozen=True)
class Seen:
    """How modules see one parameter.

    Attributes:
        placement: over the tensor axis; None for a plain tensor.
        mesh: the tensor axis.
        shape: of the whole.
        is_part: what is gathered is of some experts of this place of the axis alone.
        sums_over: add gradients up over these ranks; None: they are whole as they come.
    """

    placement: Placement | None
    mesh: DeviceMesh | None
    shape: tuple[int, ...]
    is_part: bool
    sums_over: Collectives | None

    @classmethod
    def by(cls, holders: Sequence[tuple[nn.Module, str]], param: Tensor, is_part: bool, world: World) -> Seen | None:
        """How these modules see `param`; None: as it is gathered."""
        if world.tensor.num_ranks == 1:
            return None
        placements = [vars(module).get(_PLACEMENTS, {}).get(name) for module, name in holders]
        placement = next((each for each in placements if each is not None), None)
        sums = any(vars(module).get(_SUMS) for module, _ in holders)
        if placement is None and not sums:
            return None
        return cls(placement, world.tensor_mesh, tuple(param.shape), is_part, world.tensor if sums else None)

    def of(self, part: Tensor) -> Tensor:
        """What modules see of the gathered `part` of this rank, in the graph."""
        if self.sums_over is not None:
            part = _SumGradient.apply(part, self.sums_over)  # type: ignore[no-untyped-call, unused-ignore]
        return part if self.placement is None else self._distributed(part, self.placement)

    def whole_of(self, part: Tensor) -> Tensor:
        """The whole over the tensor axis, for a computation that all its ranks do alike."""
        return part if self.placement is None else self._distributed(part, self.placement).full_tensor()

    def _distributed(self, part: Tensor, placement: Placement) -> DTensor:
        assert self.mesh is not None
        shape = (part.shape[0] * self.mesh.size(), *self.shape[1:]) if self.is_part else self.shape
        shape, stride = torch.Size(shape), row_major(shape)
        return DTensor.from_local(part, self.mesh, [placement], run_check=False, shape=shape, stride=stride)


class _SumGradient(torch.autograd.Function):
    """The same tensor; its gradient is the sum of those of the ranks of an axis."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, over: Collectives) -> Tensor:
        ctx.over = over
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.over.all_reduce([total.view(-1)], "gradients of parts of activations").wait()
        return total, None


def is_over_tensor_axis(param: Tensor, world: World) -> bool:
    """Whether this is a `DTensor` as transformers' tensor parallelism makes it: over the tensor axis, and not cut further."""
    return isinstance(param, DTensor) and param.device_mesh == world.tensor_mesh
