"""Parameters that `shard_model` is told to ignore, by its own argument or as DDP is told."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor
from tests.engine.twins import STAGES, Net, batch, square_loss, whole
from tests.ranks import on_ranks

_NAMES = ("blocks.1.up.weight", "blocks.2.up.bias", "head.bias")  # of units with others, and alone


def _average(param: Tensor) -> None:
    assert param.grad is not None
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()


@on_ranks(2, 3, stage=STAGES, by=["argument", "ddp"])
def test_ignored_parameters_stay_plain_and_the_others_train_as_ever(stage: int, by: str) -> None:
    torch.manual_seed(0)
    model = Net()
    model.head.weight.requires_grad_(False)
    reference = copy.deepcopy(model)
    ignored = [model.get_parameter(name) for name in _NAMES]
    if by == "ddp":
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, _NAMES)
    zero.shard_model(model, {"stage": stage, "timeout_s": 20}, ignored_params=ignored if by == "argument" else ())
    assert all(model.get_parameter(name) is param for name, param in zip(_NAMES, ignored, strict=True))
    for param in ignored:
        param.register_post_accumulate_grad_hook(_average)  # their gradients are this rank's own
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (model, reference)]
    optimizers = [torch.optim.AdamW(params, lr=0.01) for params in trained]
    ranks = range(dist.get_world_size())
    for step in range(3):
        square_loss(model, batch(step, dist.get_rank())).backward()
        torch.stack([square_loss(reference, batch(step, rank)) for rank in ranks]).mean().backward()
        norms = [nn.utils.clip_grad_norm_(params, 0.1) for params in trained]
        torch.testing.assert_close(whole(norms[0]), norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    averaged = copy.deepcopy(model)
    averaged.load_state_dict(model.state_dict())
    for each in (model, averaged):
        torch.testing.assert_close(each(batch(9, 0)), reference(batch(9, 0)))
        for name, param in reference.named_parameters():
            found = each.get_parameter(name)
            assert isinstance(found, PartitionedTensor) == (stage > 0 and name not in _NAMES)
            torch.testing.assert_close(whole(found), param.detach())


@on_ranks(2, stage=[1, 3])
def test_what_cannot_be_ignored_is_an_error(stage: int) -> None:
    model = Net()
    with pytest.raises(zero.ConfigError, match="not their names"):
        zero.shard_model(model, {"stage": stage}, ignored_params=["head.bias"])  # type: ignore[list-item]
    zero.shard_model(model, {"stage": stage})
    with pytest.raises(zero.PartitionError, match="partitioned already"):
        zero.shard_model(model, ignored_params=[model.head.bias])
