"""Values that come from outside the engine: state dicts, edits in place, optimizers made too early."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from tests.engine.twins import STAGES, Net, Twins, assert_same, whole
from tests.ranks import on_ranks


@on_ranks(2, stage=STAGES)
def test_state_dict_holds_rows_without_communication(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    calls = twins.engine.world.ledger.total().calls
    state = twins.model.state_dict()
    assert twins.engine.world.ledger.total().calls == calls
    assert list(state) == list(twins.reference.state_dict())
    for name, expected in twins.reference.state_dict().items():
        assert isinstance(state[name], DTensor) == (stage > 0)
        torch.testing.assert_close(whole(state[name]), expected)


@on_ranks(2, stage=STAGES)
def test_load_state_dict_takes_whole_and_sharded_values(stage: int) -> None:
    torch.manual_seed(1)
    other = Net()
    twins = Twins(stage)
    twins.step()
    sharded = copy.deepcopy(other)
    zero.shard_model(sharded, zero.ZeroConfig(stage=stage))
    for state in (other.state_dict(), sharded.state_dict()):
        twins.model.load_state_dict(state)
        twins.reference.load_state_dict(other.state_dict())
        assert_same(twins.model, twins.reference)
        twins.assert_same_output()
        twins.step()


@on_ranks(2, stage=STAGES)
def test_parts_load_whole_values(stage: int) -> None:
    other, twins = Net(), Twins(stage)
    twins.step()
    for model in (twins.model, twins.reference):
        model.blocks[1].load_state_dict(other.blocks[1].state_dict())
        with torch.no_grad():
            model.enter.weight.copy_(torch.tensor(0.25))
            model.enter.bias.copy_(0.5)  # a number, which torch takes, too
            model.head.weight.data.copy_(other.head.weight)
    assert_same(twins.model, twins.reference)
    twins.assert_same_output()
    twins.step(2)


@on_ranks(2, stage=[1, 3])
def test_an_engine_that_ends_at_once_leaves_no_peer_waiting(stage: int) -> None:
    twins = Twins(stage)
    for _ in range(3):
        twins.model.blocks.append(nn.Identity())  # of no use, but the model is another one
        twins.engine.close()
        twins.engine = zero.shard_model(twins.model)
    twins.step(2)


@on_ranks(2, stage=[0, 2, 3])
def test_load_state_dict_with_mistakes_raises_alike_on_all_ranks(stage: int) -> None:
    twins = Twins(stage)
    for key, value in (("blocks.0.up.weight", torch.zeros(12, 5)), ("no.such", torch.zeros(1)), ("head.bias", None)):
        state = twins.reference.state_dict()
        state.pop(key, None)
        if value is not None:
            state[key] = value
        with pytest.raises(RuntimeError, match=re.escape(key)) as caught:
            twins.model.load_state_dict(state)
        messages = [""] * 2
        dist.all_gather_object(messages, str(caught.value))
        assert messages[0] == messages[1]
    twins.step()


@on_ranks(2, stage=STAGES)
def test_edit_of_the_rows_behind_torchs_back_is_right_after_mark_dirty(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    for model in (twins.model, twins.reference):
        for param in (model.blocks[1].up.weight, model.head.bias):
            rows = param.to_local() if isinstance(param, DTensor) else param
            rows.detach().numpy()[:] *= 0.5
    zero.mark_dirty(twins.model)
    twins.assert_same_output()
    twins.step(2)


def test_mark_dirty_of_a_plain_model_raises() -> None:
    with pytest.raises(zero.PartitionError, match="shard_model"):
        zero.mark_dirty(Net())
