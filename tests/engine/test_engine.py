"""A partitioned model behaves as the plain one does: passes in any order, copies, and the engine's end."""

import copy
import gc
import itertools
import sys
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, SHORT_S, STAGES, Net, Twins, assert_same, batch, square_loss
from tests.ranks import on_ranks

# ---- passes ----------------------------------------------------------------------------------------------------------


@on_ranks(2, stage=STAGES)
def test_two_models_train_apart_and_through_each_other(stage: int) -> None:
    first, second = Twins(stage), Twins(stage)
    first.step()
    second.step(2)
    for left, right in ((first.model, second.model), (first.reference, second.reference)):
        ranks = range(2) if left is first.reference else [first.rank]
        for rank in ranks:
            (right(left(batch(7, rank))).pow(2).mean() / len(ranks)).backward()
    first.update()
    second.update()


class _Encoder(nn.Module):
    """Has parameters of its own beside those of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.net = nn.Parameter(torch.ones(3)), Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.scale)


class _Headed(nn.Module):
    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, x: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x) if hidden is None else hidden)


def _losses_of_both(models: list[Any], way: str, x: Tensor) -> Tensor:
    """A loss that two models have together; the second one's is of its own encoding, or of the first one's."""
    student, teacher = models
    if way == "encoded apart":
        return square_loss(student, x) + square_loss(teacher, x)
    with torch.set_grad_enabled(way == "encoded once"):
        hidden = student.encoder(x)
    return square_loss(student, x) + teacher(hidden=hidden).pow(2).mean()


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES, is_frozen=[False, True])
@pytest.mark.parametrize("way", ["encoded apart", "encoded once", "encoded without gradients"])
def test_models_that_share_a_part_train_together(stage: int, collectives: str, is_frozen: bool, way: str) -> None:
    torch.manual_seed(0)
    encoder = _Encoder().requires_grad_(not is_frozen)
    models = [_Headed(encoder, 5), _Headed(encoder, 4)]
    references = copy.deepcopy(models)
    for model in models:
        zero.shard_model(model, zero.ZeroConfig(stage=stage, collectives=collectives, timeout_s=10))
    optimizers = [torch.optim.AdamW(nn.ModuleList(each).parameters(), lr=0.01) for each in (models, references)]
    for step in range(3):
        _losses_of_both(models, way, batch(step, dist.get_rank())).backward()
        for rank in range(2):
            (_losses_of_both(references, way, batch(step, rank)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for model, reference in zip(models, references, strict=True):
                for part, expected in ((model, reference), (model.encoder, reference.encoder)):
                    torch.testing.assert_close(part(batch(9, 9)), expected(batch(9, 9)))
        for model, reference in zip(models, references, strict=True):
            assert_same(model, reference)


@on_ranks(2, stage=STAGES)
def test_a_part_that_one_rank_takes_away_and_puts_back_is_no_change(stage: int) -> None:
    """As models do that save themselves without a part, on the main process alone."""
    twins = Twins(stage, timeout_s=10)
    twins.step()
    if twins.rank == 0:
        entered = twins.model.enter
        del twins.model.enter
        assert "enter.weight" not in twins.model.state_dict()
        twins.model.enter = entered
    for _ in range(2):
        loss = twins.backward()
        torch.testing.assert_close(loss, twins.backward_reference()[twins.rank])
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (twins.model, twins.reference)]
        torch.testing.assert_close(*norms)
        for optimizer in twins.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twins.steps_done += 1
    twins.assert_same_output()


@on_ranks(2, stage=STAGES)
def test_evaluation_before_and_between_steps(stage: int) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        twins, x = Twins(stage), batch(99, 0)
        for _ in range(2):
            with mode():
                torch.testing.assert_close(twins.model(x), twins.reference(x))
            twins.step()
    twins.model.eval()
    with torch.no_grad():
        pending = twins.model(x)
    assert not pending.requires_grad


@on_ranks(2, stage=STAGES)
def test_several_forwards_before_one_backward(stage: int) -> None:
    twins = Twins(stage)
    for _ in range(2):
        losses = [square_loss(twins.model, batch(50 + i, twins.rank)) for i in range(3)]
        with torch.no_grad():
            twins.model(batch(1, 0))
        sum(losses).backward()
        for rank in range(2):
            (sum(square_loss(twins.reference, batch(50 + i, rank)) for i in range(3)) / 2).backward()
        twins.update()


@on_ranks(2, stage=STAGES)
def test_retain_graph_adds_both_backwards(stage: int) -> None:
    twins = Twins(stage)
    for _ in range(2):
        for model in (twins.model, twins.reference):
            ranks = range(2) if model is twins.reference else [twins.rank]
            for rank in ranks:
                loss = square_loss(model, batch(3, rank)) / len(ranks)
                loss.backward(retain_graph=True)
                loss.backward()
        twins.update()


@on_ranks(2, stage=STAGES)
def test_create_graph_is_refused_on_all_ranks(stage: int) -> None:
    twins = Twins(stage)
    for _ in range(2):
        with pytest.raises(zero.UsageError, match="create_graph"):
            square_loss(twins.model, twins.own()).backward(create_graph=True)
        twins.optimizers[0].zero_grad()
        twins.step()


@on_ranks(2, stage=STAGES)
def test_gradient_of_inputs_alone_leaves_fresh_weights_to_the_next_step(stage: int) -> None:
    twins = Twins(stage)
    for _ in range(2):
        x = twins.own().requires_grad_()
        (found,) = torch.autograd.grad(square_loss(twins.model, x), x)
        (expected,) = torch.autograd.grad(square_loss(twins.reference, x), x)
        torch.testing.assert_close(found, expected)
        assert all(p.grad is None for p in twins.model.parameters())
        twins.step()
        twins.assert_same_output()


@on_ranks(2, stage=SHARDED)
def test_backward_after_a_step_since_its_forward_raises(stage: int) -> None:
    twins = Twins(stage)
    late = square_loss(twins.model, batch(77, 0))
    twins.step()
    with pytest.raises(zero.UsageError, match="run the forward again"):
        late.backward()
    twins.optimizers[0].zero_grad()
    twins.step(2)


@on_ranks(2, stage=STAGES)
def test_deep_copy_runs_and_trains_by_itself(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    average = copy.deepcopy(twins.model)
    expected = copy.deepcopy(twins.reference)
    assert_same(average, expected)
    x = batch(5, 0)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(average(x), expected(x))
        twins.step()
    assert_same(average, expected)
    optimizer = torch.optim.SGD(average.parameters(), lr=0.5)
    square_loss(average, batch(6, twins.rank)).backward()
    optimizer.step()
    for rank in range(2):
        (square_loss(expected, batch(6, rank)) / 2).backward()
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    assert_same(average, expected)
    twins.step()


@on_ranks(2, stage=STAGES)
def test_deep_copy_keeps_compute_dtype_and_has_its_own_no_sync(stage: int) -> None:
    model = Net().bfloat16()
    engine = zero.shard_model(model, zero.ZeroConfig(stage=stage))
    average = copy.deepcopy(model)
    x = batch(0, 0).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(average(x), model(x), rtol=0, atol=0)
    with average.no_sync():
        pass
    assert average.no_sync.__self__ is not engine


@on_ranks(2, stage=[0, 1, 3])
def test_deep_copy_loads_a_state_dict_before_its_first_forward(stage: int) -> None:
    twins = Twins(stage)
    average, expected = copy.deepcopy(twins.model), Net()
    average.load_state_dict(expected.state_dict())
    assert_same(average, expected)
    with torch.no_grad():
        torch.testing.assert_close(average(batch(0, 0)), expected(batch(0, 0)))
    twins.step()


@on_ranks(2, stage=STAGES)
def test_deep_copy_as_a_moving_average_has_the_right_values(stage: int) -> None:
    twins = Twins(stage)
    average, expected = copy.deepcopy(twins.model), copy.deepcopy(twins.reference)
    for _ in range(2):
        twins.step()
        for mean, model in ((average, twins.model), (expected, twins.reference)):
            with torch.no_grad():
                for left, right in zip(mean.parameters(), model.parameters(), strict=True):
                    left.lerp_(right, 0.5)
        zero.mark_dirty(average)
        with torch.no_grad():
            torch.testing.assert_close(average(batch(1, 0)), expected(batch(1, 0)))


@on_ranks(2, stage=[0, 1, 2])
def test_forward_on_one_rank_only_works_where_parameters_stay_whole(stage: int) -> None:
    twins = Twins(stage, timeout_s=SHORT_S)
    for _ in range(2):
        if twins.rank == 0:
            twins.assert_same_output()
        twins.step()
    if twins.rank == 1:
        twins.assert_same_output()
    twins.step()


@on_ranks(2, stage=STAGES)
def test_parameters_are_frozen_and_thawed_between_steps(stage: int) -> None:
    twins = Twins(stage)
    for blocks, trains in (((0,), False), ((0, 1), False), ((0,), True), ((1,), True)):
        for model, index in itertools.product((twins.model, twins.reference), blocks):
            model.blocks[index].requires_grad_(trains)
        twins.step(2)


def _partly_frozen() -> nn.Module:
    net = Net()
    for module in (net.enter, net.blocks[1], net.blocks[2].up):
        module.requires_grad_(False)
    return net


@on_ranks(2, stage=STAGES)
def test_parameters_frozen_from_the_start_are_thawed_later(stage: int) -> None:
    twins = Twins(stage, _partly_frozen)
    twins.step(2)
    assert all(p.grad is None for p in twins.model.blocks[1].parameters())
    for model, optimizer in zip((twins.model, twins.reference), twins.optimizers, strict=True):
        model.blocks[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.blocks[1].parameters())})
    twins.step(2)


# ---- the end ---------------------------------------------------------------------------------------------------------


@on_ranks(2, stage=STAGES)
def test_close_removes_every_hook_and_the_model_can_be_run_again(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    twins.engine.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twins.model.modules())
    assert_same(twins.model, twins.reference)
    assert zero.engine_of(twins.model) is None
    twins.engine = zero.shard_model(twins.model, zero.ZeroConfig(stage=stage))
    twins.step()


@on_ranks(2, stage=STAGES)
def test_model_that_is_dropped_is_freed(stage: int) -> None:
    twins = Twins(stage)
    twins.step(2)
    watched = [weakref.ref(each) for each in (twins.engine, twins.model, twins.engine.world)]
    watched += [weakref.ref(p) for p in twins.model.parameters()]
    del twins
    gc.collect()
    assert not any(each() for each in watched)


@on_ranks(2, stage=STAGES)
def test_second_shard_model_gives_the_same_engine_or_refuses_another_config(stage: int) -> None:
    twins = Twins(stage)
    assert zero.shard_model(twins.model, zero.ZeroConfig(stage=stage)) is twins.engine
    assert zero.shard_model(twins.model) is twins.engine
    with pytest.raises(zero.ZeroError):
        zero.shard_model(twins.model, zero.ZeroConfig(stage=3 - stage))


# ---- Adam --------------------------------------------------------------------------------------------------------------


@on_ranks(
    2, case=[({}, 3, True), ({}, 1, True), ({}, 0, None), ({"foreach": False}, 3, None), ({"fused": False}, 3, False)]
)
def test_adam_is_fused_where_parameters_are_partitioned_and_the_user_has_not_said_how(case: Any) -> None:
    options, stage, fused = case
    twins = Twins(stage)
    optimizer = torch.optim.AdamW(twins.model.parameters(), **options)
    twins.backward()
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is fused


@on_ranks(2)
def test_adam_is_left_alone_where_it_also_holds_plain_parameters() -> None:
    twins, other = Twins(3), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW([*twins.model.parameters(), *other.parameters()])
    (square_loss(twins.model, twins.own()) + other.weight.square().sum()).backward()
    before = other.weight.detach().clone()
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is None
    assert not torch.equal(before, other.weight)


class _SubclassedAdam(torch.optim.Adam):
    pass


@on_ranks(
    2,
    case=[
        (torch.optim.AdamW, {}, False),
        (torch.optim.Adam, {"foreach": False}, False),
        (torch.optim.AdamW, {"foreach": False}, True),
        (_SubclassedAdam, {}, False),
    ],
)
def test_adam_computes_on_plain_rows_is_copied_and_freed(case: Any) -> None:
    make, options, has_replicated_gradients = case
    twins = Twins(3)
    optimizer = make(twins.model.parameters(), **options)
    twins.backward()
    if has_replicated_gradients:
        for p in twins.model.parameters():
            assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
            p.grad = p.grad.redistribute(placements=[Replicate()])
    types: set[str] = set()
    functions = sys.modules[torch.optim.Adam.__module__]
    compute = functions.adam

    def spy(*lists: list[Tensor], **arguments: Any) -> None:
        types.update(type(tensor).__name__ for tensors in lists[:4] for tensor in tensors)
        compute(*lists, **arguments)

    with mock.patch.object(functions, "adam", spy):
        optimizer.step()
    assert types == {"Parameter", "Tensor"}
    assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
    assert copy.deepcopy(optimizer).state_dict().keys() == optimizer.state_dict().keys()
    gone = weakref.ref(optimizer)
    gc.disable()  # a cycle would keep its states until some later collection
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
