"""Parameters that rank 0 changes alone and puts back, as with an EMA that is validated and saved on the main process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, SHORT_S, Net, Twins, assert_same, batch
from tests.ranks import by_hand, on_ranks


class Average:
    """As the EMA classes of libraries: the average is swapped in, and out."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [param.detach().clone() for param in model.parameters()]
        self.kept: list[Tensor] = []

    def update(self, model: nn.Module) -> None:
        for value, param in zip(self.values, model.parameters(), strict=True):
            value.mul_(0.5).add_(param.detach(), alpha=0.5)

    def swap_in(self, model: nn.Module) -> None:
        self.kept = [param.detach().clone() for param in model.parameters()]
        for value, param in zip(self.values, model.parameters(), strict=True):
            param.data.copy_(value.data)

    def swap_out(self, model: nn.Module) -> None:
        for value, param in zip(self.kept, model.parameters(), strict=True):
            param.data.copy_(value.data)
        self.kept = []


class Scaled(Net):
    """A parameter without dims, as CLIP's `logit_scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def _look(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        output = model(batch(9, 9))
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}  # as it is saved elsewhere
    seen = [model.head.weight.detach().norm(), model.blocks[1].up.weight.detach()[2], model.head.bias.sum()]
    return [output, *seen, state["head.weight"].sum(), state["enter.weight"].double()[1]]


@on_ranks(2, *by_hand(3), stage=SHARDED, collectives=EXCHANGES, keeps=[True, *by_hand(False)])
def test_an_average_swapped_in_and_out_by_rank_0_alone(stage: int, collectives: str, keeps: bool) -> None:
    twins = Twins(stage, Scaled, collectives=collectives, gather_for_generation=keeps)
    pairs = [(model, Average(model)) for model in (twins.model, twins.reference)]
    for step in range(3):
        twins.step()
        for model, average in pairs:
            average.update(model)
        if step == 1:
            dist.barrier()  # else the others are in the next forward meanwhile
        if dist.get_rank() == 0:
            for _ in range(2):
                seen = []
                for model, average in pairs:
                    average.swap_in(model)
                    model.to("cpu:0")  # as pipelines do; torch copies there
                    seen.append(_look(model))
                    average.swap_out(model)
                for found, expected in zip(*seen, strict=True):
                    torch.testing.assert_close(found, expected)
                for found, expected in zip(_look(twins.model), _look(twins.reference), strict=True):
                    torch.testing.assert_close(found, expected)  # though nobody holds what was put back
    dist.barrier()
    assert not twins.engine.world.serving.apart.tick
    twins.step()
    assert_same(twins.model, twins.reference)


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_others_do_not_see_what_one_has_changed(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives)
    twins.step()
    weight = twins.model.blocks[0].up.weight
    dist.barrier()
    if dist.get_rank() == 0:
        before = weight.full_tensor()
        with torch.no_grad():
            weight[1:3] = 7  # by a view
            weight.data.mul_(2)
    dist.barrier()
    if dist.get_rank() == 1:
        _check(_look(twins.model), _look(twins.reference))
    dist.barrier()
    if dist.get_rank() == 0:
        with torch.no_grad():
            weight.copy_(before)
    dist.barrier()
    twins.step()


def _check(found: list[Tensor], expected: list[Tensor]) -> None:
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)


@on_ranks(2, stage=[1, 3])
def test_an_average_may_be_the_parameters_of_a_model_that_nobody_runs(stage: int) -> None:
    with zero.Init({"stage": stage, "collectives": "pairwise"}):
        model, averaged = Net(), Net()
    torch.manual_seed(3)
    plain = Net()
    with torch.no_grad():
        for param, value in zip(averaged.parameters(), plain.parameters(), strict=True):
            param.mul_(0).add_(2 * model.head.bias.sum() * 0 + value.mean().item())
            value.fill_(value.mean().item())
    model(batch(0, 0)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 0:
        with torch.no_grad():
            for param, value in zip(model.parameters(), averaged.parameters(), strict=True):
                param.copy_(value)
            torch.testing.assert_close(model(batch(9, 9)), plain(batch(9, 9)))
    dist.barrier()


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES)
def test_edits_of_rank_0_alone_beside_those_of_all(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives)
    pairs = [(model, Average(model)) for model in (twins.model, twins.reference)]
    for _ in range(2):
        twins.step()
        seen = []
        for model, average in pairs:
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-0.3, 0.3)
            if dist.get_rank() == 0:  # nothing has been begun together since, and the others go on to the next edits
                average.swap_in(model)
                seen.append(_look(model))
                average.swap_out(model)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9)
        if dist.get_rank() == 0:
            _check(*seen)
        assert not twins.engine.world.serving.apart.tick
        twins.assert_same_output()
    twins.step()


@on_ranks(2)
def test_rows_of_others_that_one_rank_changes_alone_are_an_error() -> None:
    twins = Twins(3)
    dist.barrier()
    if dist.get_rank() == 0:
        weight = twins.model.head.weight
        with torch.no_grad(), pytest.raises(zero.UsageError, match=r"writes to rows of .*'head\.weight' that other"):
            weight[-1] = 0
        with torch.no_grad():
            weight[0] = weight[0].clone()
            _check(_look(twins.model), _look(twins.reference))
    dist.barrier()
    twins.step()


def _forward(twins: Twins) -> None:
    twins.model(twins.own())


def _evaluate(twins: Twins) -> None:
    with torch.no_grad():
        twins.model(twins.own())


def _open(twins: Twins) -> None:
    with zero.GatheredParameters(twins.model):
        pass


TOGETHER = {each.__name__: each for each in (_forward, _evaluate, _open)}


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES, name=["_open", *by_hand("_evaluate"), "_forward"])
def test_what_is_not_put_back_is_an_error(stage: int, collectives: str, name: str) -> None:
    together: Callable[[Twins], None] = TOGETHER[name]
    twins = Twins(stage, collectives=collectives, timeout_s=SHORT_S)
    twins.step()
    dist.barrier()
    if dist.get_rank() == 0:
        with torch.no_grad():
            twins.model.head.weight.add_(1)
        with pytest.raises(zero.ZeroError, match=r"has changed (parameter 'head\.weight'|a model) alone"):
            together(twins)
    else:
        with contextlib.suppress(zero.CollectiveError):  # stages 1 and 2 need nobody for a forward
            together(twins)


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES)
def test_edits_of_all_ranks_are_seen_by_all(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives)
    for step in range(3):
        twins.step()
        for model in (twins.model, twins.reference):
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-0.1 * (step + 1), 0.3)
            model.head.bias.data += 0.01
        assert not twins.engine.world.serving.apart.tick
        twins.assert_same_output()
