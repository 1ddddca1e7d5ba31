"""`.data = ` of a plain tensor, given what is at rest."""

import copy

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, Net
from tests.ranks import on_ranks


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES)
def test_a_plain_parameter_takes_a_computed_value_as_the_whole(stage: int, collectives: str) -> None:
    model = Net()
    reference = copy.deepcopy(model)
    zero.shard_model(model, {"stage": stage, "collectives": collectives, "timeout_s": 20})
    plain, expected = nn.Linear(5, 3), nn.Linear(5, 3)
    for source, target in ((model, plain), (reference, expected)):
        target.weight.data = source.head.weight.data.clone()
        target.bias.data = source.head.bias.detach() * 2
    x = torch.randn(2, 5)
    torch.testing.assert_close(plain(x), expected(x), rtol=0, atol=0)
    plain(x).sum().backward()
    assert type(plain.weight.data) is torch.Tensor


@on_ranks(2, stage=SHARDED)
def test_a_plain_parameter_cannot_share_the_memory_of_a_partitioned_one(stage: int) -> None:
    model, plain = Net(), nn.Linear(5, 3)
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    before = plain.weight.detach().clone()
    for shares in (lambda w: w, lambda w: w.data, lambda w: w.detach().view(3, 5), lambda w: w.data.clone()[:]):
        with pytest.raises(zero.UsageError, match="assign a copy"):
            plain.weight.data = shares(model.head.weight)
    torch.testing.assert_close(plain.weight, before)


@on_ranks(2)
def test_undo_gives_torch_its_own_back() -> None:
    zero.shard_model(Net(), {"stage": 3, "timeout_s": 20})
    assert "data" in vars(torch.Tensor)
    zero.undo()
    assert "data" not in vars(torch.Tensor)
