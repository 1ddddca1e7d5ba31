"""Ranks that step with other optimizers: told on all of them, before another step mixes more."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero as zero
from tests.engine.twins import Net, batch, square_loss
from tests.ranks import on_ranks

Make = Callable[[nn.Module, int], torch.optim.Optimizer]


def _rate(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + rank))


def _rate_as_tensor(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1 * (1 + rank)), foreach=False)


def _decay(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=rank)


def _one_of_betas(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), betas=(0.9, 0.999 - 0.1 * rank))


def _class(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return (torch.optim.AdamW, torch.optim.RMSprop)[rank](model.parameters(), lr=0.1)


def _groups(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    params = list(model.parameters())
    first, second = params[: 2 + rank], params[2 + rank :]
    return torch.optim.SGD([{"params": first}, {"params": second, "lr": 0.2}], lr=0.1)


def _order(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    """As of `list(set(params))`."""
    return torch.optim.SGD(list(model.parameters())[:: 1 - 2 * rank], lr=0.1)


@on_ranks(
    2,
    stage=[1, 2, 3],
    make=[
        (_rate, "lr of group 0: 0.1 on rank 0, 0.2 on rank 1"),
        (_rate_as_tensor, "lr of group 0: 0.1"),
        (_decay, "weight_decay of group 0: 0.0 on rank 0, 1.0 on rank 1"),
        (_one_of_betas, "betas of group 0, value 1: 0.999 on rank 0"),
        (_class, "class: AdamW on rank 0, RMSprop on rank 1"),
        (_groups, "parameters of group 0: 2 "),
        (_order, r"parameters of group 0: 22 \(.* list them in one order"),
    ],
)
def test_ranks_that_have_stepped_with_other_optimizers_are_told(stage: int, make: tuple[Make, str]) -> None:
    for is_alike in (True, False):
        torch.manual_seed(0)
        model = Net()
        zero.shard_model(model, {"stage": stage, "timeout_s": 20})
        optimizer = make[0](model, 0 if is_alike else dist.get_rank())
        square_loss(model, batch(0, 0)).backward()
        optimizer.step()
        if is_alike:
            square_loss(model, batch(0, 0)).backward()
            continue
        with pytest.raises(zero.UsageError, match=rf"other optimizers on one model \({make[1]}"):
            square_loss(model, batch(0, 0)).backward()


@on_ranks(2, stage=[1, 3])
def test_what_differs_by_rounding_only_goes_on(stage: int) -> None:
    model = Net()
    zero.shard_model(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + 1e-9 * dist.get_rank())
    for _ in range(2):
        square_loss(model, batch(0, 0)).backward()
        optimizer.step()
