"""Models that are cast, or given other memory, after they were partitioned."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, SHORT_S, STAGES, Net, Twins, assert_same, batch, sgd, square_loss
from tests.ranks import on_ranks


def double_batch(step: int, rank: int) -> Tensor:
    return batch(step, rank).double()


def _plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@on_ranks(2, stage=STAGES, collectives=EXCHANGES)
def test_a_model_cast_to_float64_trains_in_it(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives, optimizer=_plain_sgd)
    twins.step()
    held = [id(param) for param in twins.model.parameters()]
    for model in (twins.model, twins.reference):
        model.to(torch.float64)
    twins.draw = double_batch
    twins.step(2)
    assert held == [id(param) for param in twins.model.parameters()]
    assert {param.dtype for param in twins.model.parameters()} == {torch.float64}
    assert twins.model(double_batch(0, 0)).dtype == torch.float64


@on_ranks(2, stage=SHARDED, cast=["half", "bfloat16"])
def test_a_model_cast_to_half_precision_is_one_made_in_it(stage: int, cast: str) -> None:
    """Over float32 masters, as any such model."""
    torch.manual_seed(0)
    made = getattr(Net(), cast)()
    later = copy.deepcopy(made).float()
    models = [made, later]
    optimizers = []
    for model in models:
        zero.shard_model(model, zero.ZeroConfig(stage=stage))
        optimizers.append(sgd(model))
    getattr(later, cast)()
    for step in range(2):
        x = batch(step, 0).to(getattr(torch, cast if cast != "half" else "float16"))
        losses = [square_loss(model, x) for model in models]
        assert torch.equal(losses[0], losses[1]) and losses[0].dtype == x.dtype
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(later.parameters(), made.parameters(), strict=True):
            assert ours.dtype == theirs.dtype == torch.float32 and torch.equal(ours.full_tensor(), theirs.full_tensor())


@on_ranks(2, stage=SHARDED)
def test_a_part_of_a_model_that_was_cast_computes_in_the_new_dtype(stage: int) -> None:
    twins = Twins(stage, units={"min_numel": 1})
    twins.model.double()
    twins.reference.double()
    ours, theirs = (model.blocks[0](torch.ones(1, 5, dtype=torch.float64)) for model in (twins.model, twins.reference))
    twins.near(ours, theirs, "a part alone")
    twins.draw = double_batch
    twins.step()
    assert_same(twins.model, twins.reference)


def _emptied(model: nn.Module) -> None:
    """As a model on the meta device gets its memory."""
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()


def _scaled(model: nn.Module) -> None:
    model._apply(lambda tensor: tensor.clone() * 1.1)


def _to_what_it_is(model: nn.Module) -> None:
    views = [param.view(-1) for param in model.parameters()]
    total = sum(param.square().sum() for param in model.parameters())  # alive, with its graph
    model.to(torch.float32).cpu().float()
    assert total.requires_grad and len(views)


def _there_and_back(model: nn.Module) -> None:
    model.double().float()


@on_ranks(2, stage=STAGES, collectives=EXCHANGES, change=[_emptied, _scaled, _to_what_it_is, _there_and_back])
def test_memory_that_torch_exchanges_is_an_edit(
    stage: int, collectives: str, change: Callable[[nn.Module], None]
) -> None:
    twins = Twins(stage, collectives=collectives, units={"min_numel": 1})
    twins.step()
    for model in (twins.model, twins.reference):
        change(model)
    twins.step(2)


@on_ranks(2, stage=SHARDED)
def test_a_cast_while_a_view_is_alive_is_refused(stage: int) -> None:
    model = Net()
    zero.shard_model(model, {"stage": stage, "units": {"min_numel": 1}})
    view = model.head.weight.view(-1)
    with pytest.raises(RuntimeError) as error:
        model.bfloat16()
    assert "while something that was computed of it is alive" in str(error.value.__cause__)
    del view, error
    model.bfloat16()


def _with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    return square_loss(model, x) + 0.1 * torch.stack([param.square().sum() for param in model.parameters()]).sum()


@on_ranks(2, stage=SHARDED, is_alone=[False, True])
def test_a_model_may_be_moved_to_where_it_is_alone_or_by_all(stage: int, is_alone: bool) -> None:
    twins = Twins(stage, loss=_with_penalty, timeout_s=SHORT_S)
    for _ in range(2):
        if twins.rank == 0 or not is_alone:
            twins.model.to("cpu")  # torch puts other tensors in the places of the parameters
        twins.step()


@on_ranks(2, stage=SHARDED)
def test_a_model_without_values_says_what_to_do_and_is_partitioned_when_it_has_some(stage: int) -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(zero.PartitionError, match=r"meta device.*to_empty"):
        zero.shard_model(model, zero.ZeroConfig(stage=stage))
    _emptied(model)
    whole = copy.deepcopy(model)
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    torch.testing.assert_close(model(batch(0, 0)), whole(batch(0, 0)))


@on_ranks(2, stage=SHARDED, with_buffers=[True, False], is_cast_twice=[True, False])
def test_a_model_cast_back_to_float32_computes_in_it(stage: int, with_buffers: bool, is_cast_twice: bool) -> None:
    """Though its rows have been in float32 all along."""
    torch.manual_seed(0)
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        if with_buffers:  # which a cast replaces; ranks must not take new ones for those that they have had
            for index in range(8):
                model.register_buffer(f"buffer{index}", torch.ones(3))
        if not is_cast_twice:
            model.bfloat16()
    zero.shard_model(models[0], zero.ZeroConfig(stage=stage))
    for model in models:
        if is_cast_twice:
            model.bfloat16()
        assert square_loss(model, batch(0, 0).bfloat16()).dtype == torch.bfloat16
        model.float()
    losses = [square_loss(model, batch(0, 0)) for model in models]
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-2, atol=0)  # which has lost the masters' last bits
    losses[0].backward()
    assert {p.grad.dtype for p in models[0].parameters()} == {torch.float32}
