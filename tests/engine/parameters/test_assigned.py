"""`p.data = t`: in torch the parameter is `t` from then on; at rest it is a copy, which must not go unnoticed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import SHARDED, Twins, assert_same
from tests.ranks import on_ranks


def _assign(model: nn.Module, values: list[Tensor]) -> None:
    for param, value in zip(model.parameters(), values, strict=True):
        param.data = value


@on_ranks(2, stage=SHARDED)
def test_an_alias_that_is_assigned_again_is_the_parameter(stage: int) -> None:
    twins = Twins(stage)
    models = (twins.model, twins.reference)
    originals = [[param.data for param in model.parameters()] for model in models]
    for _ in range(3):
        for model, original in zip(models, originals, strict=True):
            _assign(model, [param.data + 0.1 for param in model.parameters()])
        twins.assert_same_output()
        for model, original in zip(models, originals, strict=True):
            _assign(model, original)
        twins.step()
    for ours, theirs in zip(*originals, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)  # has gone along


def _clones(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def _plain(model: nn.Module) -> list[Tensor]:
    return [torch.full(param.shape, 0.1) for param in model.parameters()]


@on_ranks(2, stage=SHARDED, made=[_clones, _plain])
def test_masters_that_a_step_has_not_moved_are_not_assigned_again(
    stage: int, made: Callable[[nn.Module], list[Tensor]]
) -> None:
    twins = Twins(stage)
    models = (twins.model, twins.reference)
    masters = [made(model) for model in models]
    for model, own in zip(models, masters, strict=True):
        _assign(model, own)
    twins.step()
    steps: list[Tensor]
    for model, own in zip(models, masters, strict=True):
        for master, param in zip(own, model.parameters(), strict=True):
            master.copy_(param.data)  # as torch does of itself
        steps = [param.data + 0.5 for param in model.parameters()]
        _assign(model, steps)
        _assign(model, own)
    assert_same(twins.model, twins.reference)
    twins.step()
    with pytest.raises(zero.UsageError, match=r"copies the tensor, so steps and edits since it was assigned"):
        _assign(twins.model, masters[0])
    _assign(twins.model, steps := _clones(twins.model))
    with pytest.raises(zero.UsageError, match=r"write them into it"):
        _assign(twins.model, masters[0])
    _assign(twins.model, _clones(twins.model))
    _assign(twins.model, steps)  # nothing has changed while they were the parameters


@on_ranks(2, stage=SHARDED)
def test_averages_may_be_assigned_as_often_as_they_are_looked_at(stage: int) -> None:
    twins = Twins(stage)
    models = (twins.model, twins.reference)
    averages = [_clones(model) for model in models]
    for _ in range(3):
        twins.step()
        for _ in range(2):
            kept = [[param.data for param in model.parameters()] for model in models]
            for model, average in zip(models, averages, strict=True):
                _assign(model, average)
            twins.assert_same_output()
            for model, own in zip(models, kept, strict=True):
                _assign(model, own)
    assert_same(twins.model, twins.reference)
