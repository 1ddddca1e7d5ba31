"""Forwards without gradients of some ranks only, the others having gone on: as under DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, Net, Twins, batch
from tests.ranks import by_hand, on_ranks


class Tied(nn.Module):
    """The head reads the weight of another module, outside of that one's call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.enter = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.net(self.enter(x)), self.enter.weight.t(), self.net.head.bias)


class Writing(nn.Module):
    """A forward writes into its weight, without gradients only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 300)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.layer.weight.mul_(2)
        return self.layer(x)


def _same(twins: Twins, model: nn.Module, reference: nn.Module, count: int = 1) -> None:
    with torch.no_grad():
        for place in range(count):
            x = batch(9, place)
            torch.testing.assert_close(model(x), reference(x))


@on_ranks(2, *by_hand(3), stage=SHARDED, collectives=EXCHANGES, keeps=[True, *by_hand(False)])
def test_a_forward_of_rank_0_alone_between_steps(stage: int, collectives: str, keeps: bool) -> None:
    twins = Twins(stage, Tied, collectives=collectives, gather_for_generation=keeps)
    rank = dist.get_rank()
    for step in range(3):
        twins.step()
        if step == 1:
            twins.model.eval()
            dist.barrier()
        if rank == 0:  # the others are in a barrier, or in the next forward
            _same(twins, twins.model, twins.reference, 2)
            _same(twins, twins.model.net.blocks[1].up, twins.reference.net.blocks[1].up, 0)
            x = torch.randn(2, 5)
            with torch.inference_mode():
                torch.testing.assert_close(twins.model.net.blocks[1](x), twins.reference.net.blocks[1](x))
        if step == 1:
            twins.model.train()
    _same(twins, twins.model, twins.reference, 1 + 2 * rank)  # as where a last rank has more batches
    twins.step()
    _same(twins, twins.model, twins.reference)
    dist.barrier()


@on_ranks(2, dtype=["bfloat16"], collectives=EXCHANGES)
def test_it_computes_as_all_together(dtype: str, collectives: str) -> None:
    twins = Twins(3, dtype=dtype, collectives=collectives, timeout_s=20)
    twins.model(twins.own().to(torch.bfloat16)).sum().backward()
    twins.optimizers[0].step()
    x = batch(9, 9)
    with torch.no_grad():
        together = twins.model(x)
        if dist.get_rank() == 0:
            assert torch.equal(twins.model(x), together)
    dist.barrier()


@on_ranks(2)
def test_memory_stays_where_there_is_room_and_is_given_back() -> None:
    twins = Twins(3, collectives="pairwise", gather_for_generation="auto")
    twins.step()
    alone = twins.engine.gathering.alone
    if dist.get_rank() == 0:
        _same(twins, twins.model, twins.reference)
        kept = dict(alone._wholes)
        assert len(kept) == len(twins.engine.parameters)
        _same(twins, twins.model, twins.reference)
        assert all(alone._wholes[p] is whole for p, whole in kept.items())
        assert not any(unit.is_whole for unit in twins.engine.units)
    twins.step()
    assert not alone._wholes


@on_ranks(2, stage=[3], collectives=EXCHANGES)
def test_what_it_cannot_do_is_an_error_at_once(stage: int, collectives: str) -> None:
    model = Writing()
    zero.shard_model(model, {"stage": stage, "collectives": collectives})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        with torch.no_grad(), pytest.raises(zero.UsageError, match=r"alone has written to parameter 'layer\.weight'"):
            model(torch.ones(1, 3))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    dist.barrier()
    model.half()
    if dist.get_rank() == 0:
        with torch.no_grad(), pytest.raises(zero.UsageError, match="let all ranks run it once"):
            model(torch.ones(1, 3).half())
    dist.barrier()


@on_ranks(2)
def test_another_model_runs_inside() -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module, kept: list[Any]) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.inner = kept  # no part of this model
            self.inner.append(inner)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                found: Tensor = self.inner[0](x)
            return self.layer(found)

    twins = Twins(3)
    model = Around(twins.model, [])
    plain = Around(twins.reference, [])
    plain.layer.load_state_dict(model.layer.state_dict())
    model.layer.load_state_dict(plain.layer.state_dict())
    zero.shard_model(model, {"stage": 3})
    plain.layer.load_state_dict(model.layer.state_dict())
    twins.step()
    if dist.get_rank() == 0:
        _same(twins, model, plain, 2)
    dist.barrier()


@on_ranks(2, stage=SHARDED, is_warm=[True, False])
def test_rank_0_alone_may_call_a_frozen_average_outside_of_no_grad(stage: int, is_warm: bool) -> None:
    """As it draws samples between steps."""
    twins = Twins(stage)
    torch.manual_seed(1)
    average = Net().requires_grad_(False)
    expected = copy.deepcopy(average)
    zero.shard_model(average, stage)
    x = batch(9, 0)
    if is_warm:
        average(x)
    for _ in range(2):
        if dist.get_rank() == 0:
            torch.testing.assert_close(average(x), expected(x))
        twins.step()
        with torch.no_grad():
            for one, of in ((average, twins.model), (expected, twins.reference)):
                for mean, weight in zip(one.parameters(), of.parameters(), strict=True):
                    mean.copy_(weight.lerp(mean, 0.5))
    x.requires_grad_()
    average(x).sum().backward()  # all together
    expected(leaf := x.detach().requires_grad_()).sum().backward()
    torch.testing.assert_close(x.grad, leaf.grad)
