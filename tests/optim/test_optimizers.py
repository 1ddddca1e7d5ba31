"""An optimizer that was built, and has stepped, before its model was partitioned."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.optim.optimizers import rebind_optimizer
from tests.models import CASES, make_model
from tests.ranks import run_ranks

CASE = CASES["gpt2"]  # tied weights: one parameter in two places

_COUNT = """
import torch
from torch.optim import optimizer
import hf_zero as zero
count = lambda: (len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks))
from hf_zero.optim import optimizers
from hf_zero.sharding import shard_model
found = [count()]
for _ in range(2):
    zero.shard_model(torch.nn.Linear(2, 2), {"stage": 1})
    found.append(count())
print(found)
"""

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


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, ranks: list[int]) -> None:
    for rank in ranks:
        (CASE.loss(model, CASE.batch(number, rank)) / len(ranks)).backward()
    optimizer.step()
    optimizer.zero_grad()


def step_before_and_after(stage: int, kind: str) -> dict[str, Any]:
    rank, other = dist.get_rank(), nn.Parameter(torch.ones(3))
    models, optimizers = [], []
    for _ in range(2):
        model = make_model(CASE)
        optimizer = OPTIMIZERS[kind]([*groups(model), {"params": [other]}])
        step(model, optimizer, 0, [0, 1])
        models.append(model)
        optimizers.append(optimizer)
    oracle, model = models
    group_objects = [id(group) for group in optimizers[1].param_groups]
    before = {id(param) for param in model.parameters()}
    engine = zero.shard_model(model, {"stage": stage, "collectives": "pairwise"})
    rebind_optimizer(optimizers[1], engine)
    rebind_optimizer(optimizers[1], engine)  # changes nothing
    for number in (1, 2):
        step(oracle, optimizers[0], number, [0, 1])
        step(model, optimizers[1], number, [rank])
    held = [param for group in optimizers[1].param_groups for param in group["params"]]
    state_shapes = {
        tuple(value.to_local().shape) == tuple(param.to_local().shape)
        for param, state in optimizers[1].state.items()
        for value in state.values()
        if isinstance(value, DTensor)
    }
    weights, wanted = whole_state_dict(model), oracle.state_dict()
    return {
        "holds_ours": {id(param) for param in held} == {id(param) for param in model.parameters()} | {id(other)},
        "same_groups": [id(group) for group in optimizers[1].param_groups] == group_objects,
        "order": [tuple(param.shape) for param in held]
        == [tuple(param.shape) for group in optimizers[0].param_groups for param in group["params"]],
        "states": len(optimizers[1].state) == len(optimizers[0].state),
        "state_shapes": state_shapes,
        "forgets": all(id(param) not in before for param in held) == (stage > 0),
        "furthest": max(((weights[name] - value).abs().max().item()) for name, value in wanted.items()),
    }


@pytest.mark.parametrize(
    ("stage", "kind"), [(0, "adamw"), (1, "amsgrad"), (2, "momentum"), (3, "adamw"), (3, "amsgrad")]
)
def test_states_follow_the_parameters(stage: int, kind: str) -> None:
    for found in run_ranks(step_before_and_after, 2, stage, kind):
        assert found.pop("furthest") < 1e-5
        assert found.pop("state_shapes") == ({True} if stage else set())
        assert all(found.values()), found


def step_without_rebinding(stage: int) -> None:
    model = make_model(CASE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard_model(model, {"stage": stage, "collectives": "pairwise"})
    step(model, optimizer, 0, [dist.get_rank()])


def test_a_step_of_an_optimizer_left_behind_is_an_error() -> None:
    for failure in run_ranks(step_without_rebinding, 2, 3, expect_failure=True):
        assert failure.type_name == "PartitionError"
        assert "ZeroAccelerator.prepare" in failure.message


def test_optimizers_are_heard_from_the_first_engine_on_once_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "[(0, 0), (1, 0), (1, 0)]"
