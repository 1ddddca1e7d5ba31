"""Adapters of PEFT in a custom loop on accelerate, against one process."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.integrations.accelerate.accelerator import ZeroAccelerator, ZeroPlugin
from tests.integrations.adapters import METHODS, adapted, plain
from tests.integrations.test_peft_methods import logits, values
from tests.models import make_model
from tests.ranks import run_alone, run_ranks

Outcome = tuple[list[float], dict[str, Tensor]]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)


def reference(name: str, folder: str) -> Outcome:
    model, case = plain(name), METHODS[name].model
    optimizer, losses = optimizer_of(model), []
    for step in range(4):
        optimizer.zero_grad()
        found = [case.loss(model, case.batch(step, rank)) for rank in (0, 1)]
        (torch.stack(found).sum() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(found[0].item())
    model.save_pretrained(f"{folder}/plain")
    return losses, values(model)


def loop(name: str, way: str, stage: int, folder: str, first: int) -> Outcome:
    """Steps from `first` to 3; the state is saved after step 1, or loaded."""
    accelerator = ZeroAccelerator(zero_plugin=ZeroPlugin(stage=stage, collectives="pairwise"))
    case = METHODS[name].model
    if way == "before":
        model: nn.Module = plain(name)
    else:
        with zero.Init({"stage": stage, "collectives": "pairwise"}):
            base = make_model(case)
        model = adapted(name, base)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    if first:
        accelerator.load_state(f"{folder}/state")
    losses, rank, num_ranks = [], dist.get_rank(), dist.get_world_size()
    for step in range(first, 4):
        optimizer.zero_grad()
        mine = [case.loss(model, case.batch(step, each)) for each in range(rank, 2, num_ranks)]
        accelerator.backward(torch.stack(mine).sum() / len(mine))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(mine[0].item())
        if step == 1 and not first:
            accelerator.save_state(f"{folder}/state")
    found = losses, values(model)
    model.save_pretrained(f"{folder}/ours", state_dict=accelerator.get_state_dict(model))
    return found


def load(name: str, folder: str) -> Tensor:
    model = METHODS[name].model
    return logits(peft.PeftModel.from_pretrained(make_model(model), folder), model)


def same(ours: Outcome, expected: Outcome) -> None:
    """Norms add up squares in another order than one process does, and clipping carries that into the weights."""
    tolerance = 2e-6
    assert ours[0] == pytest.approx(expected[0], rel=tolerance)
    for weight, value in expected[1].items():
        torch.testing.assert_close(ours[1][weight], value, rtol=0, atol=tolerance, msg=lambda m, n=weight: f"{n}: {m}")


@pytest.mark.parametrize(
    ("name", "way", "stage"),
    [("dora", "made", 3), ("p_tuning", "before", 3)]
    + [
        pytest.param(name, way, stage, marks=pytest.mark.slow)
        for name in METHODS
        for way, stage in [("before", 1), ("before", 3), ("made", 2), ("made", 3)]
    ],
)
def test_custom_loop_equals_one_process(name: str, way: str, stage: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected = run_alone(reference, name, folder)
    for found in run_ranks(loop, 2, name, way, stage, folder, 0)[:1]:
        same(found, expected)
    if name != "pissa_niter":
        torch.testing.assert_close(
            run_alone(load, name, f"{folder}/ours"), run_alone(load, name, f"{folder}/plain"), rtol=0, atol=1e-5
        )
    for num_ranks in (2, 1):
        found = run_ranks(loop, num_ranks, name, way, stage, folder, 2)[0]
        same(found, (expected[0][2:], expected[1]))
