"""`optimizer_on: every_rank`: optimizers that look across parameters step as in one process, and resume elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.optim.optimizers import owned_by
from tests.optim.test_foreign_optimizers import _Averaging, _WithModes
from tests.optim.test_stepping import (
    STEPS,
    ByPlace,
    Classifier,
    GlobalNorm,
    Make,
    accelerated,
    backward,
    furthest,
    make,
    train,
)
from tests.ranks import next_turn, on_ranks, run_alone, run_ranks

_ON: dict[str, Any] = {"optimizer_on": "every_rank"}
MAKES: dict[str, Make] = {
    "norm": lambda model: GlobalNorm(model.parameters()),
    "place": lambda model: ByPlace(model.parameters()),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "modes": lambda model: _WithModes(model.parameters(), lr=0.1, momentum=0.9),
}


def _train_by_closure(model: Classifier) -> None:
    """With all ranks' loss, by which it searches."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=2, line_search_fn="strong_wolfe")
    for number in range(3):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = backward(model, number).detach()
            if not model.__dict__.get("is_oracle"):
                dist.all_reduce(loss)
            return loss

        optimizer.step(closure)


@on_ranks(2, 3, stage=[1, 2, 3], name=["lbfgs", *MAKES])
def test_what_looks_across_parameters_is_that_of_one_process(stage: int, name: str) -> None:
    oracle, model = make(), make(stage, **_ON)
    if name == "lbfgs":
        _train_by_closure(oracle)
        _train_by_closure(model)
        assert furthest(model, oracle) < 1e-6
        return
    theirs, ours = MAKES[name](oracle), MAKES[name](model)
    train(oracle, theirs, range(2))
    train(model, ours, range(2))
    state = ours.state_dict()
    torch.testing.assert_close(state["state"], theirs.state_dict()["state"], rtol=0, atol=0)
    ours = MAKES[name](model)
    ours.load_state_dict(copy.deepcopy(state))
    train(oracle, theirs, range(2, STEPS))
    train(model, ours, range(2, STEPS))
    if name == "modes":
        theirs.eval()  # type: ignore[attr-defined]
        ours.eval()  # type: ignore[attr-defined]
    assert furthest(model, oracle) == 0.0


@on_ranks(2)
def test_what_exchanges_in_its_step_may(stage: int = 1) -> None:
    """Gradients are averaged already, and are the same on every rank: summed again they are twice as large."""
    model = make(stage, **_ON)
    train(model, _Averaging(model.parameters()), range(1))
    oracle = make()
    backward(oracle, 0)
    for param in oracle.parameters():
        assert param.grad is not None
        param.grad *= 2
    _Averaging.__bases__[0](oracle.parameters()).step()  # type: ignore[call-arg]
    assert furthest(model, oracle) == 0.0


def _save(folder: Path, stage: int) -> None:
    for name in ("norm", "adamw"):
        next_turn()
        accelerator, model, optimizer = accelerated(MAKES[name], stage, **_ON)
        train(model, optimizer, range(2))
        accelerator.save_state(str(folder / name))
        if dist.is_initialized() and dist.get_rank() == 0:
            accelerator.save_state(str(folder / f"{name} alone"))
        if dist.is_initialized():
            dist.barrier()


def _go_on(folder: Path, stage: int) -> None:
    for kind in ("", " alone"):
        for name in ("norm", "adamw"):
            if not (folder / f"{name}{kind}").exists():
                continue
            next_turn()
            oracle = make()
            train(oracle, MAKES[name](oracle))
            accelerator, model, optimizer = accelerated(MAKES[name], stage, **_ON)
            accelerator.load_state(str(folder / f"{name}{kind}"))
            train(model, optimizer, range(2, STEPS))
            assert furthest(model, oracle) == 0.0, name


def test_states_of_every_rank_are_saved_and_resume_on_other_ranks_and_stages(tmp_path: Path) -> None:
    run_ranks(_save, 2, tmp_path / "two", 3)
    run_ranks(_go_on, 2, tmp_path / "two", 2)
    run_ranks(_go_on, 3, tmp_path / "two", 1)
    run_alone(_go_on, tmp_path / "two", 3)


@on_ranks(2)
def test_states_that_owners_have_read_come_to_all(stage: int = 1) -> None:
    """Each rank is the owner of as many as the other."""
    results = []
    for drops in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        zero.shard_model(model, {"stage": stage, "collectives": "pairwise", "timeout_s": 20, **_ON})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).pow(2).sum().backward()
            optimizer.step()
        owners = owned_by(optimizer)
        others = [param for param in optimizer.state if not owners[id(param)].owns(param)]
        assert len(others) == 2
        for param in others if drops else ():  # as after `load_state`
            del optimizer.state[param]
        model(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()
        results.append(whole_state_dict(model))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@on_ranks(2)
def test_what_every_rank_steps_on_is_in_no_host_memory_and_on_no_disk(tmp_path: Path) -> None:
    model = make(2, **_ON, offload={"optimizer": "disk", "path": str(tmp_path)})
    with pytest.raises(zero.UsageError, match="steps on whole parameters"):
        train(model, torch.optim.AdamW(model.parameters()), range(1))
