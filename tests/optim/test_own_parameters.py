"""Optimizers that keep parameters in attributes of their own, or are wrapped by others, beside one process."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero as zero
from hf_zero.checkpoint.optimizer_state import capture
from tests.optim.test_stepping import Classifier, furthest, make, train
from tests.ranks import on_ranks


class Kept(torch.optim.Optimizer):
    """Steps on what it has put aside, in one of several ways, and looks at norms."""

    def __init__(self, params: Any, way: str) -> None:
        mine = list(params)
        super().__init__(mine, {"lr": 0.05})
        self.way, self.num_seen = way, 0
        if way in ("list", "tuple"):
            self.mine: Any = mine if way == "list" else tuple(mine)
        elif way == "names":
            self.mine = {"all": {f"p{number}": param for number, param in enumerate(mine)}}
        elif way == "pairs":
            self.mine = [(param, f"p{number}") for number, param in enumerate(mine)]
        elif way == "keys":
            self.mine = collections.OrderedDict((param, number) for number, param in enumerate(mine))
        else:
            self.mine = (mine[:2], collections.deque(mine[2:]))

    def _params(self) -> list[Any]:
        if self.way == "names":
            return list(self.mine["all"].values())
        if self.way == "pairs":
            return [param for param, _ in self.mine]
        if self.way == "parts":
            return [*self.mine[0], *self.mine[1]]
        return list(self.mine)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self._params():
            if param.grad is not None:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.mul_(0.9).add_(param.grad / (param.grad.norm() + 1e-3))
                param.sub_(0.05 * mean)
                self.num_seen += 1


@on_ranks(2, stage=[1, 3], way=["list", "tuple", "names", "pairs", "keys", "parts"], is_late=[False, True])
def test_parameters_in_attributes_are_the_models(stage: int, way: str, is_late: bool) -> None:
    oracle = make()
    theirs = Kept(oracle.parameters(), way)
    train(oracle, theirs)
    if is_late:
        model = make(stage)
        ours = Kept(model.parameters(), way)
    else:
        torch.manual_seed(0)
        model = Classifier()
        ours = Kept(model.parameters(), way)
        zero.shard_model(
            model, {"stage": stage, "collectives": "pairwise", "gradient_reduction": "sum", "timeout_s": 20}
        )
    train(model, ours)
    assert furthest(model, oracle) == 0.0
    assert 0 < ours.num_seen <= theirs.num_seen
    assert [id(param) for param in ours._params()] == [id(param) for param in model.parameters()]


@on_ranks(2)
def test_a_trial_moves_nothing_that_attributes_hold() -> None:
    model = make(3)
    optimizer = Kept(model.parameters(), "pairs")
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    model.train()
    (model(torch.ones(2, 5, dtype=torch.long)).sum() * 0).backward()  # so that the step itself moves nothing
    optimizer.step()
    after = {name: value.full_tensor() for name, value in model.state_dict().items()}
    torch.testing.assert_close(after, before, rtol=0, atol=0)


class _Counted:
    """A callable object that is called once a step."""

    num_calls = 0

    def __call__(self) -> float:
        self.num_calls += 1
        return 1.0 / self.num_calls


class _Model(nn.Linear):
    num_copies = 0

    def __deepcopy__(self, memo: Any) -> Any:
        type(self).num_copies += 1
        return self


class Bound(torch.optim.Optimizer):
    """Steps by a method that it keeps, which writes states and counts, and by an object that counts, too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.rule, self.factor, self.num_seen = self._one, [_Counted()], 0
        self.models = [_Model(2, 2)]

    def _one(self, param: Any, factor: float) -> None:
        self.num_seen += 1
        self.state[param]["seen"] = self.state[param].get("seen", 0) + 1
        param.sub_(factor * 0.05 * param.grad / (param.grad.norm() + 1e-3))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        factor = self.factor[0]()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.rule(param, factor)


@on_ranks(2, stage=[1, 3])
def test_methods_and_objects_of_an_optimizer_are_its_own(stage: int) -> None:
    oracle, model = make(), make(stage)
    theirs, ours = Bound(oracle.parameters()), Bound(model.parameters())
    train(oracle, theirs)
    train(model, ours)
    assert furthest(model, oracle) == 0.0
    assert ours.factor[0].num_calls == theirs.factor[0].num_calls
    assert 0 < ours.num_seen < theirs.num_seen  # of those that this rank owns
    assert not _Model.num_copies
    assert ours.state_dict()["state"] == theirs.state_dict()["state"]


class ShowsInner(torch.optim.Optimizer):
    """A wrapper whose groups and states are those of another, and that torch's own constructor has not seen."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state


class Around(ShowsInner):
    """As `schedulefree.ScheduleFreeWrapper`: it keeps a state at rest beside the inner optimizer's, in the same dict."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        for param in params:
            fast = self.state[param].setdefault("fast", param.clone())
            param.lerp_(fast, 0.5)
        self.inner.step()
        for param in params:
            self.state[param]["fast"].lerp_(param, 0.3)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@on_ranks(2, stage=[1, 3], is_late=[False, True])
def test_an_optimizer_around_one_that_steps_on_whole_parameters(stage: int, is_late: bool) -> None:
    oracle = make()
    train(oracle, Around(Kept(oracle.parameters(), "list")))
    model = make(stage) if is_late else make()
    ours = Around(Kept(model.parameters(), "list"))
    if not is_late:
        vars(model).pop("is_oracle")
        zero.shard_model(
            model, {"stage": stage, "collectives": "pairwise", "gradient_reduction": "sum", "timeout_s": 20}
        )
    train(model, ours)
    assert furthest(model, oracle) < 1e-6
    with pytest.raises(zero.CheckpointError, match=r"fast' is of an optimizer around .* optimizer_on: every_rank"):
        capture(ours.inner, model, "optimizer")


class Masters(torch.optim.Optimizer):
    """Keeps copies in another dtype, and lets another optimizer step on them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.low = [param for group in self.param_groups for param in group["params"]]
        self.high = [param.detach().clone().double().requires_grad_() for param in self.low]
        self.inner = torch.optim.SGD(self.high, lr=0.05)

    def step(self, closure: Any = None) -> None:
        for low, high in zip(self.low, self.high, strict=True):
            assert low.grad is not None, "no gradient"
            high.grad = low.grad.double()
        self.inner.step()
        for low, high in zip(self.low, self.high, strict=True):
            low.data.copy_(high.data)


@on_ranks(2, stage=[1, 3], is_late=[False, True])
def test_copies_of_an_optimizers_own_are_refused_or_stepped_on_by_every_rank(stage: int, is_late: bool) -> None:
    oracle = make()
    train(oracle, Masters(oracle.parameters()))
    for options in ({}, {"optimizer_on": "every_rank"}):
        model: nn.Module = make(stage, **options) if is_late else make()
        ours = Masters(model.parameters())
        if not is_late:
            vars(model).pop("is_oracle")
            config = {"stage": stage, "collectives": "pairwise", "gradient_reduction": "sum", "timeout_s": 20}
            zero.shard_model(model, {**config, **options})
        if options and is_late:  # the copies were made of what is partitioned
            with pytest.raises(zero.UsageError, match=r"Masters.high holds a tensor .* make it in the step"):
                train(model, ours)
        elif options:
            train(model, ours)
            assert furthest(model, oracle) == 0.0
        else:
            with pytest.raises(
                zero.UsageError, match=r"cannot be tried on two tiny parameters .* optimizer_on: every_rank"
            ):
                train(model, ours)


class Blocks(torch.optim.Optimizer):
    """As BAdam: it trains some parameters at a time, which it chooses, and freezes the others, within its step."""

    def __init__(self, params: Any) -> None:
        self.everything = list(params)
        super().__init__(self.everything, {"lr": 0.05})
        self.turn = 0
        self._choose()

    def _choose(self) -> None:
        chosen = self.everything[self.turn % 2 :: 2]
        for param in self.everything:
            param.requires_grad_(any(param is each for each in chosen))
        self.param_groups[0]["params"] = chosen

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.05)
        self.turn += 1
        self._choose()


@on_ranks(2, stage=[1, 3], where=["rows", "every_rank", "whole"])
def test_a_step_may_freeze_parameters_and_hold_others(stage: int, where: str) -> None:
    oracle, model = make(), make(stage, optimizer_on=where)
    theirs, ours = Blocks(oracle.parameters()), Blocks(model.parameters())
    train(oracle, theirs)
    if where == "whole":
        with pytest.raises(zero.UsageError, match="changes which parameters it holds"):
            train(model, ours)
        return
    train(model, ours)
    assert furthest(model, oracle) == 0.0
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in oracle.parameters()]
