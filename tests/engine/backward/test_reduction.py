"""Reductions among gathers: whatever the ranks do differently, none waits for what another begins only later."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from hf_zero.engine.backward.reduction import Reducer
from tests.engine.twins import Twins
from tests.ranks import on_ranks

_GATHERED_AGAIN = {"reshard_after_forward": True}  # for each backward


@on_ranks(2, stage=[2, 3], collectives=["pairwise", "native"], hooked=[0, 1])
def test_hooks_on_one_rank_are_waited_for_by_the_others(stage: int, collectives: str, hooked: int) -> None:
    """What watches gradients on the main process, while each reduction and each gather is waited for at once."""
    seen = []
    twins = Twins(stage, collectives=collectives, timeout_s=5, bucket_bytes=1, prefetch_bytes=0, **_GATHERED_AGAIN)
    if dist.get_rank() == hooked:
        for p in twins.model.parameters():
            p.register_hook(lambda grad: seen.append(grad.shape) and None)
    twins.step(3)
    assert len(seen) == (3 * len(list(twins.model.parameters())) if dist.get_rank() == hooked else 0)
    if stage == 3:  # learned in the first step: all come at the end of the backward, where nobody waits for a gather
        assert {after for _, after in twins.engine.gathering.reductions.turns} == {len(twins.engine.units)}


@on_ranks(2)
def test_an_order_that_was_too_late_gets_earlier_again() -> None:
    twins = Twins(3, collectives="pairwise", timeout_s=5, prefetch_bytes=0, **_GATHERED_AGAIN)
    handles = [p.register_hook(lambda grad: None) for p in twins.model.parameters()]
    twins.step(2)
    late = [after for _, after in twins.engine.gathering.reductions.turns]
    for handle in handles:
        handle.remove()
    twins.step(3)
    turns = twins.engine.gathering.reductions.turns
    assert len(set(late)) == 1 and [after for _, after in turns] == sorted({after for _, after in turns})


@on_ranks(2, bucket_bytes=[1, 2**25])
def test_gradients_are_under_way_as_far_as_the_bucket_goes(bucket_bytes: int) -> None:
    twins, counts, start = Twins(2, collectives="pairwise", bucket_bytes=bucket_bytes), [], Reducer._start

    def counting(reducer: Reducer, index: int) -> None:
        start(reducer, index)
        counts.append(len(reducer._in_flight))

    with mock.patch.object(Reducer, "_start", counting):
        twins.step(1)
    assert max(counts) == (1 if bucket_bytes == 1 else len(twins.engine.units))


class Offsets(nn.Module):
    """Autograd gives the same tensor to two scalars that are added, and a layer gets gradients of two calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        offset = self.scale + self.shift
        return self.layer(self.layer(x).tanh()).sum() * offset + offset


@on_ranks(2, stage=[1, 2, 3], collectives=["host", "pairwise", "native"])
def test_a_tensor_of_autograd_in_two_places_is_summed_once_in_each(stage: int, collectives: str) -> None:
    plain, model, rank = Offsets(), Offsets(), dist.get_rank()
    zero.shard_model(model, {"stage": stage, "collectives": collectives})
    # What is no sum of what it gets shows that it gets the sum of both calls, and once.
    for each in (plain, model):
        each.layer.weight.register_hook(lambda grad: 2 * grad + 1)
    inputs = [torch.linspace(-1, 1, 8).view(2, 4) * (1 + number) for number in range(2)]
    (sum(plain(x) for x in inputs) / 2).backward()
    model(inputs[rank]).backward()
    for name, param in model.named_parameters():
        grad: Any = param.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        assert torch.allclose(whole, plain.get_parameter(name).grad, atol=1e-6), name
