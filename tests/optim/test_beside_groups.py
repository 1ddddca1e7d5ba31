"""What optimizers know of parameters beside their groups: ids, options kept elsewhere, models, states of those they wrap."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.optim.trial import depends_on_others
from tests.optim.test_foreign_optimizers import Own
from tests.optim.test_own_parameters import ShowsInner
from tests.optim.test_stepping import STEPS, Classifier, backward, furthest, make, train
from tests.ranks import alone, on_ranks

STAGES = [1, 3]


class KnowsIds(Own):
    """Excludes parameters, and counts its steps on the others, by their ids."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        every = [p for group in self.param_groups for p in group["params"]]
        self.excluded = {id(param) for param in every[::2]}
        self.counts = {id(param): 0 for param in every}

    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        if id(param) not in self.excluded:
            self.counts[id(param)] += 1
            super().one(param, group)


@on_ranks(2, stage=STAGES, where=["whole", "every_rank"])
def test_ids_of_parameters_are_those_of_what_is_stepped_on(stage: int, where: str) -> None:
    oracle, model = make(), make(stage, optimizer_on=where)
    ours, theirs = KnowsIds(model.parameters()), KnowsIds(oracle.parameters())
    train(oracle, theirs)
    train(model, ours)
    assert furthest(model, oracle) == 0.0
    params = list(model.parameters())
    assert set(ours.counts) == set(map(id, params)) and ours.excluded == set(map(id, params[::2]))
    if where == "every_rank":
        assert list(ours.counts.values()) == list(theirs.counts.values())


# ---- bitsandbytes ----------------------------------------------------------------------------------------------------


def _in_eight_bits(model: Classifier, where: str, cut: Callable[[], object]) -> torch.optim.Optimizer:
    """All states in 8 bits but those of two parameters, which are registered as the Trainer and as its users do it."""
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    manager.register_module_override(model.embed, "weight", {"optim_bits": 32})
    if where != "after":
        manager.override_config(model.head.weight, "optim_bits", 32)
    cut()
    if where == "after":
        manager.override_config(model.head.weight, "optim_bits", 32)
    return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=0.01, min_8bit_size=1)


def _dtypes(model: Classifier, optimizer: torch.optim.Optimizer) -> dict[str, torch.dtype]:
    states = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    return {name: state["state1"].dtype for name, state in states.items() if "state1" in state}


@on_ranks(2, stage=STAGES, where=["before", "after"])
def test_options_of_single_parameters_are_heard(stage: int, where: str) -> None:
    oracle = make()
    theirs = _in_eight_bits(oracle, where, lambda: None)
    train(oracle, theirs)
    torch.manual_seed(0)
    model = Classifier()
    config = {"stage": stage, "collectives": "pairwise", "gradient_reduction": "sum"}
    ours = _in_eight_bits(model, where, lambda: zero.shard_model(model, config))
    train(model, ours)
    assert furthest(model, oracle) == 0.0
    wanted, found = _dtypes(oracle, theirs), _dtypes(model, ours)
    assert wanted["embed.weight"] == wanted["head.weight"] == torch.float32 and wanted["body.0.weight"] == torch.uint8
    assert found and found.items() <= wanted.items()


# ---- wrappers --------------------------------------------------------------------------------------------------------


class Momentum(Own):
    """Not elementwise, with a state."""

    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        moment = self.state[param].setdefault("moment", torch.zeros_like(param))
        group = self.state[param].setdefault("group", group)  # as optimi's `gradient_release`
        group["num_steps"] = self.state[param]["step"] = self.state[param].get("step", 0) + 1
        moment.mul_(0.9).add_(param.grad / (param.grad.norm() + 1e-3))
        param.sub_(group["lr"] * moment)


class Files(ShowsInner):
    """Its files, too, are those of another."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.defaults: dict[str, Any] = {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Slow(Files):
    """With states of its own: Lookahead."""

    state = None  # type: ignore[assignment]

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.state = {}  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        for param in params:
            self.state.setdefault(param, {"slow": param.clone()})
        self.inner.step()
        for param in params:
            param.copy_(self.state[param]["slow"].lerp_(param, 0.5))


@on_ranks(2, stage=STAGES, rank_alone=[False, True])
def test_files_of_a_wrapper_have_the_states_of_all_ranks(stage: int, rank_alone: bool) -> None:
    oracle, model = make(), make(stage)
    theirs, ours = Files(Momentum(oracle.parameters())), Files(Momentum(model.parameters()))
    for each, optimizer in ((oracle, theirs), (model, ours)):
        train(each, optimizer)
        optimizer.param_groups[0]["lr"] *= 0.5
        train(each, optimizer)
        assert optimizer.param_groups[0]["num_steps"] == 2 * STEPS
    assert furthest(model, oracle) == 0.0
    if dist.get_rank() == 0 or not rank_alone:
        states, wanted = ours.state_dict()["state"], theirs.state_dict()["state"]
        assert list(states) == list(wanted)
        assert all(torch.equal(states[key]["moment"], wanted[key]["moment"]) for key in wanted)
        held = [*map(id, model.parameters())]
        assert all([*map(id, states[key]["group"]["params"])] == held for key in wanted)
    dist.barrier()
    saved = ours.state_dict()
    ours = Files(Momentum(model.parameters()))
    ours.load_state_dict(saved)
    for each, optimizer in ((oracle, theirs), (model, ours)):
        train(each, optimizer, range(STEPS, STEPS + 2))
    assert furthest(model, oracle) == 0.0


@on_ranks(2, stage=STAGES, where=["whole", "every_rank", "rows"])
def test_a_wrapper_may_have_states_of_its_own_and_the_groups_of_another(stage: int, where: str) -> None:
    oracle, model = make(), make(stage, optimizer_on=where)
    inner = torch.optim.AdamW if where == "rows" else Momentum
    train(oracle, Slow(inner(oracle.parameters())))
    train(model, Slow(inner(model.parameters())))
    assert furthest(model, oracle) == 0.0


class KeepsANumber(Momentum):
    """As MADGRAD: a tensor in its states that is no parameter's."""

    def step(self, closure: Any = None) -> None:
        self.state["k"] = self.state.get("k", torch.zeros(1)) + 1  # type: ignore[index, call-overload, assignment]
        super().step(closure)


@on_ranks(2, stage=STAGES)
def test_states_of_no_parameter_are_in_the_files(stage: int) -> None:
    model = make(stage)
    optimizer = KeepsANumber(model.parameters())
    train(model, optimizer)
    states = optimizer.state_dict()["state"]
    assert states["k"].item() == STEPS and len(states) == 1 + len(list(model.parameters()))


# ---- models ----------------------------------------------------------------------------------------------------------


class Clips(torch.optim.SGD):
    """Keeps the model, and clips all of its gradients in its step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        if closure is not None:
            closure()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.02)
        return super().step()


def _train_with(model: Classifier, has_closure: bool) -> torch.optim.Optimizer:
    optimizer = Clips(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step(*([lambda number=number: backward(model, number)] if has_closure else []))
    return optimizer


@on_ranks(2, stage=STAGES, has_closure=[False, True])
def test_a_step_may_look_at_the_model_on_every_rank_only(stage: int, has_closure: bool) -> None:
    model = make(stage)
    backward(model, 0)
    with pytest.raises(zero.UsageError, match=r"Clips keeps Classifier, a model that it trains.*every_rank"):
        Clips(model).step()
    oracle, model = make(), make(stage, optimizer_on="every_rank")
    held = list(map(weakref.ref, model.parameters()))
    _train_with(oracle, has_closure)
    _train_with(model, has_closure)
    assert furthest(model, oracle) == 0.0
    assert all(known() is param for known, param in zip(held, model.parameters(), strict=True))


class ClipsLater(Clips):
    """Its first step fails in the middle."""

    num_calls = 0

    def step(self, closure: Any = None) -> Any:
        self.num_calls += 1
        if self.num_calls == 1:
            raise ValueError("once")
        return super().step(closure)


@on_ranks(2, stage=STAGES)
def test_a_step_that_fails_leaves_the_model_as_it_was(stage: int) -> None:
    oracle, model = make(), make(stage, optimizer_on="every_rank")
    param = model.head.weight
    for each in (oracle, model):
        optimizer = ClipsLater(each)
        backward(each, 0)
        with pytest.raises(ValueError, match="once"):
            optimizer.step()
        optimizer.num_calls = 1
        optimizer.zero_grad()
        train(each, optimizer)
    assert furthest(model, oracle) == 0.0 and model.head.weight is param


# ---- what a trial finds ----------------------------------------------------------------------------------------------


class SeedsByPlace(Own):
    """Draws numbers that depend on a parameter's place, as if at random."""

    def step(self, closure: Any = None) -> None:
        self.place = 0
        for group in self.param_groups:
            for param in group["params"]:
                self.place += 1
                if param.grad is not None:
                    torch.manual_seed(self.place)
                    with torch.no_grad():
                        param.sub_(group["lr"] * torch.rand_like(param))


class Draws(Own):
    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * torch.rand_like(param))


class CountsOthers(Own):
    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad / sum(p.numel() for p in group["params"] if p.grad is not None))


@alone()
def test_a_step_that_minds_place_or_number_of_others_is_found_by_its_trial() -> None:
    model = make()
    found = {kind: depends_on_others(kind(model.parameters())) for kind in (SeedsByPlace, CountsOthers, Draws, Own)}
    assert found == {SeedsByPlace: True, CountsOthers: True, Draws: False, Own: False}
