"""Training in float16 with a `GradScaler`, against one process with float32 masters that adds up the ranks' gradients."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from tests.engine.twins import Block, batch, whole
from tests.ranks import on_ranks, run_alone, run_ranks

Scaler = torch.amp.GradScaler
NUM_STEPS = 50
# Step -> the ranks whose loss is infinite, None for all; beside what overflows by itself, as the scale grows.
INJECTED: dict[int, tuple[int, ...] | None] = {7: (1,), 8: (0,), 20: None, 30: (1,), 31: (1,), 44: (0,)}


@dataclass
class Trace:
    """What a run leaves: by step, its scale, and whether it was skipped; losses by rank; the weights at its end."""

    scales: list[float] = field(default_factory=list)
    losses: dict[int, list[float]] = field(default_factory=dict)
    skipped: list[bool] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def torch_scaler() -> Scaler:
    return Scaler("cpu", init_scale=2.0**15, growth_interval=4)


def patient_scaler() -> Scaler:
    return zero.LossScaler(zero.LossScale(initial=2.0**15, window=4, hysteresis=2, minimum=2.0**8), "cpu")


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), Block(5), nn.Linear(5, 3))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    loss = model(batch(step, rank).half()).float().pow(2).mean()
    ranks = INJECTED.get(step, ())
    return loss * float("inf") if ranks is None or rank in ranks else loss


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **(options or {"foreach": False}))


def rows(param: Tensor) -> Tensor:
    return param.detach().to_local() if isinstance(param, DTensor) else param.detach()


def finish_step(trace: Trace, scaler: Scaler, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    before = [rows(param).clone() for param in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    after = map(rows, model.parameters())
    trace.skipped.append(all(torch.equal(left, right) for left, right in zip(before, after, strict=True)))
    trace.scales.append(scaler.get_scale())


def train(stage: int, make_scaler: Callable[[], Scaler], options: dict[str, Any], config: dict[str, Any]) -> Trace:
    model, rank, trace = make_net(), dist.get_rank(), Trace()
    zero.shard_model(model, zero.ZeroConfig(stage=stage, compute_dtype="float16", **config))
    optimizer, scaler = adamw(model, **options), make_scaler()
    for step in range(NUM_STEPS):
        loss = loss_of(model, rank, step)
        scaler.scale(loss).backward()
        trace.losses.setdefault(rank, []).append(loss.item())
        finish_step(trace, scaler, model, optimizer)
    trace.weights = {name: whole(param) for name, param in model.named_parameters()}
    return trace


def oracle(num_ranks: int, make_scaler: Callable[[], Scaler], options: dict[str, Any]) -> Trace:
    model, trace = make_net(), Trace()
    worker = copy.deepcopy(model).half()
    optimizer, scaler = adamw(model, **options), make_scaler()
    for step in range(NUM_STEPS):
        for rank in range(num_ranks):
            worker.zero_grad()
            loss = loss_of(worker, rank, step)
            scaler.scale(loss).backward()
            trace.losses.setdefault(rank, []).append(loss.item())
            for master, param in zip(model.parameters(), worker.parameters(), strict=True):
                grad = param.grad.float()
                master.grad = grad if master.grad is None else master.grad + grad
        for master in model.parameters():
            master.grad /= num_ranks
        finish_step(trace, scaler, model, optimizer)
        for master, param in zip(model.parameters(), worker.parameters(), strict=True):
            param.data.copy_(master.data)
    trace.weights = {name: param.detach() for name, param in model.named_parameters()}
    return trace


@functools.cache
def wanted_of(num_ranks: int, make_scaler: Callable[[], Scaler], is_fused: bool = False) -> Trace:
    return run_alone(oracle, num_ranks, make_scaler, {"fused": True} if is_fused else {})


def check(found: Trace, wanted: Trace, tolerance: float) -> None:
    assert found.scales == wanted.scales
    assert found.skipped == wanted.skipped
    for rank, losses in found.losses.items():
        assert losses == pytest.approx(wanted.losses[rank], rel=tolerance, nan_ok=True)
    for name, value in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=tolerance, atol=tolerance, msg=name)


# On three ranks the sums are made in another order, and so is a mean over them: the last bits of float32, which a rounding
# to float16 can make a last bit of that.
@pytest.mark.parametrize(("num_ranks", "tolerance"), [(2, 0.0), (3, 2e-3)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_scale_losses_and_weights_are_those_of_one_process(stage: int, num_ranks: int, tolerance: float) -> None:
    for found in run_ranks(train, num_ranks, stage, torch_scaler, {}, {}):
        check(found, wanted_of(num_ranks, torch_scaler), tolerance)
        assert all(found.skipped[step] for step in INJECTED)
        assert not all(found.skipped) and max(found.scales) > 2.0**15 > min(found.scales)


@pytest.mark.parametrize(
    ("stage", "options", "config"),
    [
        (3, {"fused": True}, {}),  # unscales inside the step, and is called also where it is skipped
        (1, {"fused": True}, {}),
        (3, {}, {"keep_whole_numel": 5, "collectives": "native"}),
        (2, {}, {"collectives": "host"}),
    ],
)
def test_kinds_of_steps_and_exchanges_are_those_of_one_process(
    stage: int, options: dict[str, Any], config: dict[str, Any]
) -> None:
    for found in run_ranks(train, 2, stage, torch_scaler, options, config):
        # A fused step on rows differs from one on the whole in the last bit.
        check(found, wanted_of(2, torch_scaler, bool(options)), 1e-6 if options else 0.0)


@pytest.mark.parametrize("stage", [1, 3])
def test_patient_scaler_is_that_of_one_process(stage: int) -> None:
    for found in run_ranks(train, 2, stage, patient_scaler, {}, {}):
        check(found, wanted_of(2, patient_scaler), 0.0)
        assert found.scales[7] == found.scales[6] and found.scales[8] == found.scales[7] / 2


class _FirstIsSmall(nn.Module):
    """Its first parameter stays whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.weight.t())


@on_ranks(2)
def test_overflow_in_the_rows_of_one_rank_skips_all_where_the_first_gradient_is_whole() -> None:
    model = _FirstIsSmall()
    zero.shard_model(model, zero.ZeroConfig(stage=3))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), Scaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    if dist.get_rank() == 1:
        model.weight.grad.to_local().fill_(float("inf"))
    before = whole(model.weight).clone()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert torch.equal(whole(model.weight), before)


# ---- the scale, without ranks ------------------------------------------------------------------------------------------


class DeepSpeedScale:
    """The rules of DeepSpeed's `DynamicLossScaler`, written down again."""

    def __init__(self, config: zero.LossScale) -> None:
        self.config, self.scale, self.left, self.good = config, config.initial, config.hysteresis, 0

    def update(self, overflows: bool) -> None:
        config = self.config
        if overflows:
            self.good = 0
            if self.left > 1:
                self.left -= 1
            else:
                self.scale = max(self.scale / 2, config.minimum)
            return
        self.good += 1
        if config.consecutive_hysteresis:
            self.left = config.hysteresis
        if self.good == config.window:
            self.scale, self.good, self.left = self.scale * 2, 0, config.hysteresis


def feed(scaler: Scaler, weight: nn.Parameter, optimizer: torch.optim.Optimizer, overflows: bool) -> float:
    scaler.scale((weight * (float("inf") if overflows else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale()


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_scale_follows_deepspeeds_rules(hysteresis: int, consecutive: bool) -> None:
    config = zero.LossScale(64.0, 3, hysteresis, consecutive)
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    rule, scaler = DeepSpeedScale(config), zero.LossScaler(config, "cpu")
    pattern = itertools.chain.from_iterable(itertools.product([True, False, False], [False], [True, False], repeat=1))
    for number, overflows in enumerate([*pattern, *[False] * 7, *[True] * 5, *[False] * 4, True, False, True]):
        rule.update(overflows)
        assert feed(scaler, weight, optimizer, overflows) == rule.scale, number
        if number % 5 == 4:  # a checkpoint
            state, scaler = scaler.state_dict(), zero.LossScaler(config, "cpu")
            scaler.load_state_dict(state)


def test_defaults_are_those_of_torch() -> None:
    ours, theirs = zero.LossScaler(device="cpu").state_dict(), Scaler("cpu").state_dict()
    assert ours.pop("overflows_left") == 1
    assert ours == theirs


def test_state_of_a_plain_scaler_is_loaded() -> None:
    scaler = zero.LossScaler(zero.LossScale(hysteresis=2), "cpu")
    scaler.load_state_dict(Scaler("cpu", init_scale=8.0).state_dict())
    assert scaler.get_scale() == 8.0


def test_fixed_scale_stays_and_overflows_are_skipped() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), zero.LossScaler(zero.LossScale(128.0, None), "cpu")
    for overflows in (False, True, True, False):
        assert feed(scaler, weight, optimizer, overflows) == 128.0
    assert weight.tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("minimum", [4.0, 0.0])
def test_overflow_at_the_smallest_scale_is_an_error(minimum: float) -> None:
    weight = nn.Parameter(torch.zeros(2))
    start = 8.0 if minimum else 2.0**-148
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = zero.LossScaler(zero.LossScale(start, minimum=minimum), "cpu")
    assert feed(scaler, weight, optimizer, True) == start / 2
    with pytest.raises(zero.UsageError, match="overflow at the smallest loss scale"):
        feed(scaler, weight, optimizer, True)
