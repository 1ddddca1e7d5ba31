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
from tests.engine.twins import ALL_STAGES, SHORT_S, Net, Twins, assert_same, batch, square_loss
from tests.ranks import on_ranks, run_ranks

# ---- passes ----------------------------------------------------------------------------------------------------------


@ALL_STAGES
@on_ranks(2)
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


@ALL_STAGES
@on_ranks(2)
def test_evaluation_before_and_between_steps(stage: int) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        twins, x = Twins(stage), batch(99, 0)
        for _ in range(2):
            with mode():
                torch.testing.assert_close(twins.model(x), twins.reference(x))
            twins.step(2)
    twins.model.eval()
    with torch.no_grad():
        pending = twins.model(x)
    assert not pending.requires_grad


@ALL_STAGES
@on_ranks(2)
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


@ALL_STAGES
@on_ranks(2)
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


@ALL_STAGES
@on_ranks(2)
def test_create_graph_is_refused_on_all_ranks(stage: int) -> None:
    twins = Twins(stage)
    for _ in range(2):
        with pytest.raises(zero.UsageError, match="create_graph"):
            square_loss(twins.model, twins.own()).backward(create_graph=True)
        twins.optimizers[0].zero_grad()
        twins.step()


@ALL_STAGES
@on_ranks(2)
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


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_backward_after_a_step_since_its_forward_raises(stage: int) -> None:
    twins = Twins(stage)
    late = square_loss(twins.model, batch(77, 0))
    twins.step()
    with pytest.raises(zero.UsageError, match="run the forward again"):
        late.backward()
    twins.optimizers[0].zero_grad()
    twins.step(2)


@ALL_STAGES
@on_ranks(2)
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


@ALL_STAGES
@on_ranks(2)
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


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_deep_copy_loads_a_state_dict_before_its_first_forward(stage: int) -> None:
    twins = Twins(stage)
    average, expected = copy.deepcopy(twins.model), Net()
    average.load_state_dict(expected.state_dict())
    assert_same(average, expected)
    with torch.no_grad():
        torch.testing.assert_close(average(batch(0, 0)), expected(batch(0, 0)))
    twins.step()


@ALL_STAGES
@on_ranks(2)
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


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_forward_on_one_rank_only_works_where_parameters_stay_whole(stage: int) -> None:
    twins = Twins(stage, timeout_s=SHORT_S)
    for _ in range(2):
        if twins.rank == 0:
            twins.assert_same_output()
        twins.step()
    if twins.rank == 1:
        twins.assert_same_output()
    twins.step()


@ALL_STAGES
@on_ranks(2)
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


@ALL_STAGES
@on_ranks(2)
def test_parameters_frozen_from_the_start_are_thawed_later(stage: int) -> None:
    twins = Twins(stage, _partly_frozen)
    twins.step(3)
    assert all(p.grad is None for p in twins.model.blocks[1].parameters())
    for model, optimizer in zip((twins.model, twins.reference), twins.optimizers, strict=True):
        model.blocks[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.blocks[1].parameters())})
    twins.step(2)


# ---- the end ---------------------------------------------------------------------------------------------------------


@ALL_STAGES
@on_ranks(2)
def test_close_removes_every_hook_and_the_model_can_be_run_again(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    twins.engine.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twins.model.modules())
    assert_same(twins.model, twins.reference)
    assert zero.engine_of(twins.model) is None
    twins.engine = zero.shard_model(twins.model, zero.ZeroConfig(stage=stage))
    twins.step()


def _dropped(stage: int) -> list[bool]:
    twins = Twins(stage)
    twins.step(2)
    watched = [weakref.ref(each) for each in (twins.engine, twins.model, twins.engine.world)]
    watched += [weakref.ref(p) for p in twins.model.parameters()]
    del twins
    gc.collect()
    return [each() is None for each in watched]


@ALL_STAGES
def test_model_that_is_dropped_is_freed(stage: int) -> None:
    assert all(all(freed) for freed in run_ranks(_dropped, 2, stage))


@ALL_STAGES
@on_ranks(2)
def test_second_shard_model_gives_the_same_engine_or_refuses_another_config(stage: int) -> None:
    twins = Twins(stage)
    assert zero.shard_model(twins.model, zero.ZeroConfig(stage=stage)) is twins.engine
    assert zero.shard_model(twins.model) is twins.engine
    with pytest.raises(zero.ZeroError):
        zero.shard_model(twins.model, zero.ZeroConfig(stage=3 - stage))


def _chosen(options: dict[str, Any], stage: int) -> Any:
    model = Net()
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    square_loss(model, batch(dist.get_rank(), 0)).backward()
    optimizer.step()
    return optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("options", "stage", "fused"),
    [({}, 3, True), ({}, 1, True), ({}, 0, None), ({"foreach": False}, 3, None), ({"fused": False}, 3, False)],
)
def test_adam_is_fused_where_parameters_are_partitioned_and_the_user_has_not_said_how(
    options: dict[str, Any], stage: int, fused: bool | None
) -> None:
    assert run_ranks(_chosen, 2, options, stage) == [fused, fused]


def _step_with_a_plain_model() -> Any:
    model, other = Net(), torch.nn.Linear(3, 3)
    zero.shard_model(model, zero.ZeroConfig(stage=3))
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    (square_loss(model, batch(dist.get_rank(), 0)) + other.weight.square().sum()).backward()
    before = other.weight.detach().clone()
    optimizer.step()
    return optimizer.param_groups[0]["fused"], torch.equal(before, other.weight)


def test_adam_is_left_alone_where_it_also_holds_plain_parameters() -> None:
    assert run_ranks(_step_with_a_plain_model, 2) == [(None, False)] * 2


class _SubclassedAdam(torch.optim.Adam):
    pass


def _stepped_on(kind: str, options: dict[str, Any], edit: str = "") -> tuple[set[str], set[str], bool, bool]:
    """Types of the tensors with which Adam computes, and of its states; whether it can be copied, and is freed."""
    model = Net()
    zero.shard_model(model, zero.ZeroConfig(stage=3))
    make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "subclass": _SubclassedAdam}[kind]
    optimizer = make(model.parameters(), **options)
    square_loss(model, batch(dist.get_rank(), 0)).backward()
    if edit == "replicated":
        for p in model.parameters():
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
    states = {type(state["exp_avg"]).__name__ for state in optimizer.state.values()}
    copied = copy.deepcopy(optimizer)
    is_copied = copied.state_dict().keys() == optimizer.state_dict().keys()
    gone = weakref.ref(optimizer)
    gc.disable()  # a cycle would keep its states until some later collection
    try:
        del optimizer
        return types, states, is_copied, gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "options", "edit"),
    [
        ("adamw", {}, ""),
        ("adam", {"foreach": False}, ""),
        ("adamw", {"foreach": False}, "replicated"),
        ("subclass", {}, ""),
    ],
)
def test_adam_computes_on_plain_rows(kind: str, options: dict[str, Any], edit: str) -> None:
    types = {"Parameter", "Tensor"}
    assert run_ranks(_stepped_on, 2, kind, options, edit) == [(types, {"DTensor"}, True, True)] * 2
