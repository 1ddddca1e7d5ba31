"""`torch.testing.assert_close` of what is at rest."""

import copy

import pytest
import torch

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, Net
from tests.ranks import on_ranks


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES)
def test_parameters_are_compared_as_the_whole(stage: int, collectives: str) -> None:
    model = Net()
    reference = copy.deepcopy(model)
    zero.shard_model(model, {"stage": stage, "collectives": collectives, "timeout_s": 20})
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, expected)
        torch.testing.assert_close(expected.detach(), param.data)
        torch.testing.assert_close([param, {"p": param}], [param.data, {"p": expected}])
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))


@on_ranks(2, stage=SHARDED)
def test_what_differs_in_another_ranks_rows_differs_on_every_rank(stage: int) -> None:
    model = Net()
    reference = copy.deepcopy(model)
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    for row in (0, -1):
        other = reference.head.weight.detach().clone()
        other[row] += 1
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(model.head.weight, other)
    before = model.head.weight.detach().clone()
    with torch.no_grad():
        model.head.weight[-1] += 1
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(model.head.weight, before)
