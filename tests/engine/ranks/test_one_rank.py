"""One process: nothing to partition, and no hooks where nothing has to be cast."""

import torch
import torch.distributed as dist
from torch import nn

import hf_zero as zero
from tests.engine.twins import Net, Twins, batch
from tests.ranks import alone


@alone(stage=[0, 3])
def test_one_rank_needs_no_group_and_no_units(stage: int) -> None:
    assert not dist.is_initialized()
    twins = Twins(stage)
    assert twins.engine.units == []
    assert all(type(p) is nn.Parameter for p in twins.model.parameters())
    assert not any(module._forward_pre_hooks for module in twins.model.modules() if module is not twins.model)
    twins.step(3)
    assert twins.engine.world.ledger.total().calls == 0


@alone(stage=[0, 1, 3])
def test_one_rank_computes_in_bfloat16_over_float32_masters(stage: int) -> None:
    model = Net()
    engine = zero.shard_model(model, zero.ZeroConfig(stage=stage, compute_dtype="bfloat16"))
    assert engine.units
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for _ in range(20):
        output = model(batch(0, 0).bfloat16())
        assert output.dtype == torch.bfloat16
        loss = output.float().pow(2).mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
