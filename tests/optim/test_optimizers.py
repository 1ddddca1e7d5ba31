"""An optimizer that was built, and has stepped, before its model was partitioned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as hooks

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.optim.optimizers import rebind_optimizer
from tests.engine.twins import SHARDED, Twins, sgd
from tests.models import CASES, make_model, train
from tests.ranks import by_hand, on_ranks, run_fresh

CASE = CASES["gpt2"]  # tied weights: one parameter in two places

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.named_parameters())
    return [
        {"params": [param for name, param in params if param.ndim == 1], "weight_decay": 0.0},
        {"params": [param for name, param in params if param.ndim > 1], "weight_decay": 0.1},
    ]


@on_ranks(
    2,
    case=[(0, "adamw"), (1, "amsgrad"), *by_hand((2, "momentum"), (3, "adamw")), (3, "amsgrad")],
    is_rebound=[True, False],
)
def test_states_follow_the_parameters(case: tuple[int, str], is_rebound: bool) -> None:
    """Nobody has to rebind an optimizer: from its next step on, its states are those of the partitioned parameters."""
    stage, kind = case
    other = nn.Parameter(torch.ones(3))
    models, optimizers = [], []
    for _ in range(2):
        model = make_model(CASE)
        optimizer = OPTIMIZERS[kind]([*groups(model), {"params": [other]}])
        train(model, optimizer, CASE.loss, CASE.batch, range(1), range(2))
        models.append(model)
        optimizers.append(optimizer)
    oracle, model = models
    group_objects = [id(group) for group in optimizers[1].param_groups]
    before = {id(param) for param in model.parameters()}
    engine = zero.shard_model(model, {"stage": stage, "collectives": "pairwise"})
    for _ in range(2) if is_rebound else ():  # the second time changes nothing
        rebind_optimizer(optimizers[1], engine)
    optimizers[1].zero_grad()
    train(oracle, optimizers[0], CASE.loss, CASE.batch, range(1, 3), range(2))
    train(model, optimizers[1], CASE.loss, CASE.batch, range(1, 3))
    held = [param for group in optimizers[1].param_groups for param in group["params"]]
    theirs = [param for group in optimizers[0].param_groups for param in group["params"]]
    assert {id(param) for param in held} == {id(param) for param in model.parameters()} | {id(other)}
    assert [id(group) for group in optimizers[1].param_groups] == group_objects
    assert [tuple(param.shape) for param in held] == [tuple(param.shape) for param in theirs]
    assert len(optimizers[1].state) == len(optimizers[0].state)
    cut = [(p, v) for p, state in optimizers[1].state.items() for v in state.values() if isinstance(v, DTensor)]
    assert bool(cut) == (stage > 0)
    assert all(value.to_local().shape == param.to_local().shape for param, value in cut)
    assert all(id(param) not in before for param in held) == (stage > 0)
    weights = whole_state_dict(model)
    assert max((weights[name] - value).abs().max().item() for name, value in oracle.state_dict().items()) < 1e-5


def _new_head(model: nn.Module) -> list[nn.Parameter]:
    model.head = nn.Linear(5, 3)
    return list(model.head.parameters())


def _weight_norm(model: nn.Module) -> list[nn.Parameter]:
    nn.utils.parametrizations.weight_norm(model.enter)
    return list(model.enter.parametrizations.parameters())


@on_ranks(2, stage=SHARDED, add=[_new_head, _weight_norm], is_added=[False, True])
def test_an_optimizer_made_before_new_parameters_are_partitioned_trains_them(
    stage: int, add: Callable[[nn.Module], list[nn.Parameter]], is_added: bool
) -> None:
    twins = Twins(stage, units={"min_numel": 1})
    twins.step()
    for place, model in enumerate((twins.model, twins.reference)):
        torch.manual_seed(3)
        new = add(model)
        if is_added:
            twins.optimizers[place].add_param_group({"params": new})
        else:
            twins.optimizers[place] = sgd(model)
    for _ in range(2):
        loss = twins.loss(twins.model, twins.own())
        twins.optimizers[0].zero_grad()  # the forward has partitioned them
        loss.backward()
        twins.near(loss.detach(), twins.backward_reference()[twins.rank], "loss")
        twins.update()


def _count_hooks() -> list[tuple[int, int]]:
    def count() -> tuple[int, int]:
        return len(hooks._global_optimizer_pre_hooks), len(hooks._global_optimizer_post_hooks)

    found = [count()]
    for _ in range(2):
        zero.shard_model(torch.nn.Linear(2, 2), {"stage": 1})
        found.append(count())
    return found


def test_optimizers_are_heard_from_the_first_engine_on_once_a_process() -> None:
    assert run_fresh(_count_hooks) == [(0, 0), (1, 0), (1, 0)]
