"""What users' optimizers do within a step, and around it, means what it means in one process."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.errors import CheckpointError
from tests.optim.test_stepping import STEPS, Classifier, backward, furthest, make, train
from tests.ranks import on_ranks, run_ranks

Case = Callable[[Classifier], None]


class Own(torch.optim.Optimizer):
    """Not elementwise: it looks at norms."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.one(param, group)

    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * param.grad / (param.grad.norm() + 1e-3))


@zero.mark_elementwise
class Rows(torch.optim.Optimizer):
    """Elementwise, and said to be."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.one(param)

    def one(self, param: Tensor) -> None:
        param.sub_(0.1 * param.grad)


# ---- steps within steps ----------------------------------------------------------------------------------------------


class ClampAfter(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            param.mul_(0.9 + 0.05 * torch.tanh(param.norm()))


def more_after_the_inherited_step(model: Classifier) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)  # from now on, torch hooks SGD's step
    train(model, ClampAfter(model.parameters(), lr=0.1))


class Both(torch.optim.Optimizer):
    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__([p for each in optimizers for group in each.param_groups for p in group["params"]], {})
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self, closure: Any = None) -> None:
        for each in self.optimizers:
            each.step()


def optimizers_in_a_list(model: Classifier) -> None:
    params = list(model.parameters())
    train(model, Both(torch.optim.SGD(params[:3], lr=0.1, momentum=0.9), Own(params[3:])))


class Average(torch.optim.Optimizer):
    """Lookahead of one step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [param.clone() for param in params]
        self.inner.step()
        for param, old in zip(params, before, strict=True):
            param.lerp_(old, 0.5)


def scheduler_of_the_inner_optimizer(model: Classifier) -> None:
    inner = Own(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    outer = Average(inner)
    for number in range(4):
        train(model, outer, [number])
        scheduler.step()


class LocalSAM(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [param.clone() for param in params]
        for param in params:
            param.add_(0.1 * param.grad / param.grad.norm())
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for param, old in zip(params, before, strict=True):
            param.copy_(old).sub_(0.1 * param.grad)


def gradients_anew_within_a_step(model: Classifier) -> None:
    optimizer = LocalSAM(model.parameters())
    for number in range(4):
        backward(model, number)
        optimizer.step(lambda number=number: backward(model, number))
        optimizer.zero_grad()


class OtherName(Own):
    def step(self, loss_closure: Any = None) -> None:  # type: ignore[override]
        super().step(loss_closure)


def closure_of_another_name(model: Classifier) -> None:
    optimizer = OtherName(model.parameters())
    for number in range(4):
        optimizer.zero_grad()
        optimizer.step(loss_closure=lambda number=number: backward(model, number))


# ---- hooks -----------------------------------------------------------------------------------------------------------


def hooks_before_and_after_a_step(model: Classifier) -> None:
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.param_groups[0]["params"][0].grad = None
        with torch.no_grad():
            for param in optimizer.param_groups[0]["params"][1:]:
                param.grad.clamp_(-0.01, 0.01)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for param in optimizer.param_groups[0]["params"]:
                param.clamp_(-0.1, 0.1)

    for kind in (Own, Rows):
        optimizer = kind(model.parameters())
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        train(model, optimizer, range(2))


def hook_that_reads_the_state(model: Classifier) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            optimizer.state[param]["momentum_buffer"].mul_(0.5)

    optimizer.register_step_post_hook(after)
    train(model, optimizer)


# ---- attributes ------------------------------------------------------------------------------------------------------


class Bound(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.update = self.with_momentum

    def with_momentum(self, param: Tensor, group: dict[str, Any]) -> None:
        moment = self.state[param].setdefault("m", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
        param.sub_(group["lr"] * moment / (moment.norm() + 1e-3))

    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        self.update(param, group)


class Buffers(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.buffers: dict[Tensor, Tensor] = collections.defaultdict(lambda: torch.zeros(()))

    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        self.buffers[param] = 0.9 * self.buffers[param] + param.grad
        param.sub_(group["lr"] * self.buffers[param] / (param.grad.norm() + 1e-3))


class Counts(Own):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.counts = dict.fromkeys(params, 0)
        self.special = set(params[:2])

    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        self.counts[param] += 1 if param in self.special else 2
        param.sub_(group["lr"] * self.counts[param] * param.grad / (param.grad.norm() + 1e-3))


@zero.mark_elementwise
class CountsOnRows(Rows):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.counts = collections.OrderedDict((param, 0) for param in params)
        self.special = set(params[:2])

    def one(self, param: Tensor) -> None:
        self.counts[param] += 1 if param in self.special else 2
        param.sub_(0.02 * self.counts[param] * param.grad)


@zero.mark_elementwise
class MomentsOnRows(Rows):
    """Buffers made beside the parameters."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.moments = [torch.zeros_like(param, requires_grad=False) for param in params]

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for moment, param in zip(self.moments, self.param_groups[0]["params"], strict=True):
                param.sub_(0.1 * moment.mul_(0.9).add_(param.grad))


class Slots(Own):
    __slots__ = ("factor",)

    def __init__(self, params: Any) -> None:
        self.factor = 0.5
        super().__init__(params)

    def step(self, closure: Any = None) -> None:
        self.factor *= 0.9
        super().step(closure)

    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        param.sub_(self.factor * group["lr"] * param.grad / (param.grad.norm() + 1e-3))


class Names(Own):
    """Walks along a list beside the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for name, factor, param in zip(group["param_names"], group["factors"], group["params"], strict=True):
                param.sub_(group["lr"] * factor * param.grad / (param.grad.norm() + 1e-3) * (1 + len(name)))


def names_beside_parameters(model: Classifier) -> None:
    named = list(model.named_parameters())
    optimizer = Names(named)
    optimizer.param_groups[0]["factors"] = [0.1 * number for number in range(len(named))]
    train(model, optimizer)


# ---- parameters, gradients and states --------------------------------------------------------------------------------


@zero.mark_elementwise
class AssignsData(Rows):
    def one(self, param: Tensor) -> None:
        param.data = param.data - 0.1 * param.grad


class DropsState(Own):
    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["n"] = state.get("n", 0) + 1
        param.sub_(group["lr"] * state["n"] * param.grad / (param.grad.norm() + 1e-3))
        if state["n"] == 2:
            del self.state[param]


def gradients_changed_by_a_step(model: Classifier) -> None:
    class Keeps(Own):
        def one(self, param: Tensor, group: dict[str, Any]) -> None:
            super().one(param, group)
            param.grad = None if param.ndim == 1 else param.grad * 0.5

    @zero.mark_elementwise
    class KeepsOnRows(Rows):
        def one(self, param: Tensor) -> None:
            super().one(param)
            param.grad = param.grad * 0.5

    for optimizer in (Keeps(model.parameters()), KeepsOnRows(model.parameters())):
        for number in range(3):  # gradients are never cleared
            backward(model, number)
            optimizer.step()


class Anchored(Own):
    """Keeps a state of every parameter, and decays those without a gradient, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            anchor = self.state[param].setdefault("anchor", param.clone())
            param.mul_(0.99)
            if param.grad is not None:
                param.sub_(0.05 * param.grad / (param.grad.norm() + 1e-3)).lerp_(anchor, 0.5)


def parameters_without_a_gradient(model: Classifier) -> None:
    model.body.requires_grad_(False)
    optimizer = Anchored(model.parameters())
    train(model, optimizer, range(2))
    model.body.requires_grad_(True)
    train(model, optimizer, range(2, 4))


def whole_state_of_adafactor(model: Classifier) -> None:
    plain = make()
    before = torch.optim.Adafactor(plain.parameters())
    train(plain, before, range(2))
    optimizer = torch.optim.Adafactor(model.parameters())
    optimizer.load_state_dict(before.state_dict())
    train(model, optimizer, range(2, 4))


def new_head(model: Classifier) -> None:
    torch.manual_seed(1)
    model.head = nn.Linear(24, 7)
    model(torch.ones(2, 3, dtype=torch.long))
    train(model, Own(model.parameters()))


def simply(kind: Callable[[Any], Any]) -> Case:
    return lambda model: train(model, kind(model.parameters()))


CASES: dict[str, Case] = {
    **{
        case.__name__: case
        for case in (
            more_after_the_inherited_step,
            optimizers_in_a_list,
            scheduler_of_the_inner_optimizer,
            gradients_anew_within_a_step,
            closure_of_another_name,
            hooks_before_and_after_a_step,
            hook_that_reads_the_state,
            names_beside_parameters,
            gradients_changed_by_a_step,
            parameters_without_a_gradient,
            whole_state_of_adafactor,
            new_head,
        )
    },
    **{
        kind.__name__: simply(kind)
        for kind in (Bound, Buffers, Counts, CountsOnRows, MomentsOnRows, Slots, AssignsData, DropsState)
    },
}


def assert_all_like_one_process(stage: int) -> None:
    for name, case in CASES.items():
        oracle, model = make(), make(stage)
        case(oracle)
        case(model)
        assert furthest(model, oracle) == 0.0, name


@on_ranks(2)
def test_training_is_that_of_one_process_bit_for_bit() -> None:
    assert_all_like_one_process(3)


@pytest.mark.slow
@on_ranks(2, stage=[1, 2])
def test_training_is_that_of_one_process_bit_for_bit_in_stages_1_and_2(stage: int) -> None:
    assert_all_like_one_process(stage)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Clips(Average):
    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
        self.inner.step()


class SAM(Own):
    """Moves along the gradient of all parameters, and back."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        away = [0.05 * param.grad / norm for param in params]
        for param, by in zip(params, away, strict=True):
            param.add_(by)
        with torch.enable_grad():
            closure()
        for param, by in zip(params, away, strict=True):
            param.sub_(by).sub_(0.1 * param.grad)


class Lists(Own):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.moments = [torch.zeros_like(param, requires_grad=False) for param in params]


class CountsInAnObject(Own):
    """Accepted: a trial must not change the object itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counter = collections.Counter()

    def step(self, closure: Any = None) -> None:
        self.counter["steps"] += 1
        super().step(closure)

    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        param.sub_(group["lr"] / self.counter["steps"] * param.grad)


@on_ranks(
    2,
    case=[
        (lambda params: Clips(Own(params)), "another gradient"),
        (SAM, "another gradient"),
        (Lists, "made like a partitioned"),
    ],
)
def test_what_cannot_be_right_is_an_error_on_all_ranks(case: tuple[Callable[[Any], Any], str]) -> None:
    make_optimizer, words = case
    model = make(3)
    optimizer = make_optimizer(model.parameters())
    backward(model, 0)
    with pytest.raises(zero.UsageError, match=words):
        optimizer.step(lambda: backward(model, 0))


@on_ranks(2)
def test_a_trial_leaves_the_optimizer_as_it_is() -> None:
    model = make(3)
    optimizer = CountsInAnObject(model.parameters())
    backward(model, 0)
    optimizer.step(lambda: backward(model, 0))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class OwnKey(Own):
    def step(self, closure: Any = None) -> None:
        self.state["n"] = self.state.get("n", 0) + 1  # type: ignore[index, call-overload]
        super().step(closure)


class NumberedKeys(Own):
    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        self.state[param][0] = 1


class OwnStateDict(Own):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "n": 1}


class DottedKeys(Own):
    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        moment = self.state[param].setdefault("exp.avg", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
        param.sub_(group["lr"] * moment / (moment.norm() + 1e-3))


def _accelerated(make_optimizer: Callable[[Any], Any], stage: int) -> tuple[Any, Classifier, Any]:
    plugin = zero.ZeroPlugin(stage=stage, collectives="pairwise", gradient_reduction="sum")
    accelerator = zero.ZeroAccelerator(zero_plugin=plugin)
    torch.manual_seed(0)
    model = Classifier()
    return accelerator, *accelerator.prepare(model, make_optimizer(model.parameters()))


@on_ranks(
    2,
    case=[
        (OwnKey, "under 'n', which is no parameter"),
        (NumberedKeys, "names a state of a parameter 0"),
        (OwnStateDict, "has 'n' beside its states"),
        (lambda params: Average(Bound(params)), "state of the Bound inside Average"),
    ],
)
def test_what_a_checkpoint_would_lack_is_an_error(case: tuple[Callable[[Any], Any], str], tmp_path: Path) -> None:
    make_optimizer, words = case
    accelerator, model, optimizer = _accelerated(make_optimizer, 3)
    train(model, optimizer, range(2))
    with pytest.raises(CheckpointError, match=words):
        accelerator.save_state(str(tmp_path))


def _save(folder: str) -> None:
    accelerator, model, optimizer = _accelerated(DottedKeys, 3)
    train(model, optimizer, range(2))
    accelerator.save_state(folder)


def _resume(folder: str) -> None:
    accelerator, model, optimizer = _accelerated(DottedKeys, 1)
    accelerator.load_state(folder)
    train(model, optimizer, range(2, STEPS))
    oracle = make()
    train(oracle, DottedKeys(oracle.parameters()))
    assert furthest(model, oracle) == 0.0


def test_names_of_states_may_have_dots(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path))
    run_ranks(_resume, 3, str(tmp_path))


class _Averaging(Own):
    """As optimizers that are meant for several processes without DDP: it averages gradients itself."""

    def one(self, param: Tensor, group: dict[str, Any]) -> None:
        dist.all_reduce(param.grad)
        super().one(param, group)


class _WithModes(torch.optim.SGD):
    """As schedule-free optimizers: its modes change parameters by states."""

    @torch.no_grad()
    def eval(self) -> None:
        for param, state in self.state.items():
            param.lerp_(state["momentum_buffer"], 0.5)

    def train(self) -> None: ...


@on_ranks(2)
def test_an_optimizer_with_modes_does_not_step_on_whole_parameters() -> None:
    model = nn.Linear(4, 4)
    zero.shard_model(model, {"stage": 1, "optimizer_on": "whole"})
    optimizer = _WithModes(model.parameters(), momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(zero.UsageError, match=r"_WithModes.eval\(\) .* set optimizer_on: rows"):
        optimizer.step()


@on_ranks(2, stage=[1, 3])
def test_one_rank_may_read_sharded_states_beside_those_of_owners(stage: int) -> None:
    model = nn.Linear(4, 4)
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for param in model.parameters():  # as a wrapper keeps them
        optimizer.state[param]["z"] = param.detach().clone()

    def check() -> None:
        state = optimizer.state_dict()["state"]
        assert [sorted(state[i]) for i in range(2)] == [
            ["col_var", "row_var", "step", "z"],
            ["step", "variance", "z"],
        ]
        for i, param in enumerate(model.parameters()):
            assert torch.equal(state[i]["z"].clone().cpu() + 0, param.detach() + 0)

    if dist.get_rank() == 0:
        check()
    dist.barrier()
    check()


@on_ranks(2, stage=[1, 3])
def test_an_optimizer_that_exchanges_in_its_step_is_refused(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zero.shard_model(model, {"stage": stage})
    optimizer = _Averaging(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    before = [p.full_tensor().clone() for p in model.parameters()]
    with pytest.raises(
        zero.UsageError, match=r"the step of _Averaging calls torch.distributed, .* for a single process"
    ):
        optimizer.step()
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
