"""Values computed from partitioned parameters, taken whole while gradients are recorded.

[Note: gradient of a computed value] A regulariser (`loss + 0.1 * p.pow(2).sum()`) computes on rows, and all ranks get the same
value. What each rank does with it may differ: its own batch's loss times that value gives each rank another gradient. Training
averages over the ranks, so the gradient of the value is the average of theirs, which all ranks then take to their rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.engine.ranks.world import World, world_of
from hf_zero.errors import UsageError

_LARGEST_NUMEL = 4096  # their gradients are swapped between all pairs of ranks


def read_numbers_whole() -> None:
    """Let `p.grad.norm().item()` be the norm of the whole gradient from now on; all ranks ask for it."""
    torch_compat.read_numbers_whole(_meet)


def _meet(value: DTensor) -> bool:
    world = world_of(value)
    if world is not None and world.num_ranks > 1:
        world.meet("a number computed from partitioned tensors (all ranks must ask for it)")
    return world is not None


def with_mean_gradient(value: DTensor, whole: Tensor) -> Tensor:
    """`whole`, the whole of `value`; its gradient is the average of all ranks' gradients.

    Raises:
        UsageError: the value is large.
    """
    world = world_of(value)
    if world is None or world.num_ranks == 1:
        return whole
    if value.numel() > _LARGEST_NUMEL:
        raise UsageError(
            f"full_tensor() of a value of shape {tuple(value.shape)} that was computed from a parameter, with gradients: take "
            "`param.full_tensor()`, whose gradient is reduced as that of any use, and compute the value from that"
        )
    return _MeanGradient.apply(whole, world)  # type: ignore[no-any-return, no-untyped-call]


class _MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, world: World) -> Tensor:
        ctx.world = world
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (own,) = gradients
        values = own.detach().reshape(-1).double().tolist()
        # As messages of an agreement, which stand beside the reductions in any order, and name a rank that has none.
        by_rank = ctx.world.everyone.agree_on_floats(values, "the gradient of a value computed from parameters")
        mean = torch.tensor(by_rank, dtype=torch.float64, device="cpu").sum(0).div_(len(by_rank))
        return mean.to(own.device, own.dtype).view(own.shape), None
