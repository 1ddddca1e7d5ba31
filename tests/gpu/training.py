"""Training on an accelerator, beside one process that sees the batches of all ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import CASES, Case, make_model

LLAMA = CASES["llama"]
STAGES = (0, 1, 2, 3)
STEPS = 6
BLOCKS: dict[str, Any] = {"units": ["LlamaDecoderLayer"], "timeout_s": 60}


def batch_of(step: int, rank: int, device: torch.device, case: Case = LLAMA) -> dict[str, Tensor]:
    """Of one rank, in one step."""
    return {name: tensor.to(device) for name, tensor in case.batch(step, rank).items()}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Fused, as on GPUs."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(
    model: nn.Module,
    device: torch.device,
    steps: range = range(STEPS),
    optimizer: Any = None,
    cell: int | None = None,
    case: Case = LLAMA,
) -> Tensor:
    """The losses of the batches of this rank, or of its cell of the tensor axis: [steps], fetched at the end only."""
    optimizer = optimizer or adamw(model)
    losses = []
    for step in steps:
        loss = model(**batch_of(step, dist.get_rank() if cell is None else cell, device, case)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@functools.cache
def expected(device: torch.device, num_batches: int, own: int, case: Case = LLAMA) -> Tensor:
    """What one process gets for the batches of one rank when it trains on those of all: [steps]."""
    model = make_model(case).to(device)
    optimizer, found = adamw(model), []
    for step in range(STEPS):
        losses = [model(**batch_of(step, rank, device, case)).loss for rank in range(num_batches)]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses[own].detach())
    return torch.stack(found)


def furthest(
    losses: Tensor, device: torch.device, own: int | None = None, num_batches: int = 0, case: Case = LLAMA
) -> float:
    """How far losses are from those of one process; by default, of a batch on each rank."""
    plain = expected(device, num_batches or dist.get_world_size(), dist.get_rank() if own is None else own, case)
    return float((losses - plain).abs().max())


def alike(found: Tensor, expected: Tensor, device: torch.device) -> bool:
    """Whether values have the same bits; on CUDA nearly, as its fused AdamW rounds otherwise than the CPU's.

    There, a gradient near zero may change its sign from one run to the next, and Adam's first steps are of one length
    whatever the gradient: one weight in a thousand may be as far off as a few steps go.
    """
    if device.type != "cuda":
        return torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    is_far = ~torch.isclose(found, expected, rtol=0.02, atol=2e-3, equal_nan=True)
    return (
        torch.allclose(found, expected, rtol=0.02, atol=0.05, equal_nan=True)
        and int(is_far.sum()) <= len(found) // 1000
    )
