"""Which parameters have the values that they had when they were handed over last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.engine.ranks.world import World

_BLOCK = 1 << 20  # numbers at a time
_WORD = 62  # bits of a number that ranks agree on


def fingerprints(tensors: Sequence[Tensor]) -> list[int | None]:
    """A number for what this rank holds of each tensor; None for one that is trained, which changes anyhow.

    Another value of a single element gives another number for certain, of several ones but for one case in 2^64.
    """
    frozen = [tensor for tensor in tensors if not tensor.requires_grad]
    sums = [_sum_of(torch_compat.local_of(tensor)) for tensor in frozen]
    values = iter(torch.stack(sums).tolist() if sums else [])  # one wait for a device
    return [None if tensor.requires_grad else next(values) for tensor in tensors]


def _sum_of(rows: Tensor) -> Tensor:
    data = rows.data.contiguous().view(-1).view(torch.uint8)
    odd = data[data.numel() // 4 * 4 :].to(torch.int64)
    words = data[: data.numel() // 4 * 4].view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    factors = torch.arange(min(_BLOCK, max(words.numel(), 4)), dtype=torch.int64, device=data.device)
    factors = (
        factors * 0x1E3779B97F4A7C15 + 0x2545F4914F6CDD1D
    ) | 1  # odd: a product with another number is another one
    for block in torch.split(words, _BLOCK):
        total = total * 0x5851F42D4C957F2D + (block.to(torch.int64) * factors[: block.numel()]).sum()
    return total * 0x5851F42D4C957F2D + (odd * factors[: odd.numel()]).sum() + data.numel()


def on_any_rank(flags: Sequence[bool], world: World | None, label: str) -> list[bool]:
    """Each flag, where it is set on any of the ranks; called by all of them together."""
    if world is None:
        return list(flags)
    words = [
        sum(flag << bit for bit, flag in enumerate(flags[first : first + _WORD]))
        for first in range(0, len(flags), _WORD)
    ]
    found = [0] * len(words)
    for row in world.everyone.agree(words, label):
        found = [left | right for left, right in zip(found, row, strict=True)]
    return [bool(found[index // _WORD] >> index % _WORD & 1) for index in range(len(flags))]
