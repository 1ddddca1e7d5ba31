"""Training in float16 with a `GradScaler`, against one process with float32 masters that adds up the ranks' gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.torch_compat import local_of
from tests.engine.twins import SAME_BITS, STAGES, Block, Near, Twins, batch, whole
from tests.ranks import on_ranks

Scaler = torch.amp.GradScaler
NUM_STEPS = 16
# Step -> the ranks whose loss is infinite, None for all; beside what overflows by itself, as the scale grows.
INJECTED: dict[int, tuple[int, ...] | None] = {5: (1,), 6: (0,), 8: None, 13: (1,), 14: (1,)}


def torch_scaler() -> Scaler:
    return Scaler("cpu", init_scale=2.0**15, growth_interval=4)


def patient_scaler() -> Scaler:
    return zero.LossScaler(zero.LossScale(initial=2.0**15, window=4, hysteresis=2, minimum=2.0**8), "cpu")


Batch = tuple[Tensor, bool]


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), Block(5), nn.Linear(5, 3))


def draw(step: int, rank: int) -> Batch:
    ranks = INJECTED.get(step, ())
    return batch(step, rank).half(), ranks is None or rank in ranks


def loss_of(model: nn.Module, own: Batch) -> Tensor:
    x, overflows = own
    loss = model(x).float().pow(2).mean()
    return loss * float("inf") if overflows else loss


def follow(
    stage: int, scaler: Callable[[], Scaler], near: Near = SAME_BITS, fused: bool = False, **config: Any
) -> tuple[list[float], list[bool]]:
    """Train beside one process: losses, weights, scales, and which steps are skipped, are the same in each step."""
    kind = {"fused": True} if fused else {"foreach": False}
    adamw = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, **kind)  # noqa: E731
    options = {"optimizer": adamw, "dtype": "float16", "scaler": scaler, "near": near}
    twins, skipped, scales = Twins(stage, make_net, loss_of, draw, **options, **config), [], []
    models = (twins.model, twins.reference)
    for step in range(NUM_STEPS):
        before = [[local_of(param).clone() for param in model.parameters()] for model in models]
        twins.step()
        ours, theirs = [
            all(torch.equal(old, local_of(param)) for old, param in zip(values, model.parameters(), strict=True))
            for values, model in zip(before, models, strict=True)
        ]
        assert ours == theirs, step
        skipped.append(ours)
        scales.append(twins.scalers[0].get_scale())
        assert scales[-1] == twins.scalers[1].get_scale(), step
    return scales, skipped


def assert_skips_what_overflows(scales: list[float], skipped: list[bool]) -> None:
    assert all(skipped[step] for step in INJECTED) and not all(skipped)
    assert max(scales) > 2.0**15 > min(scales)


@on_ranks(2, stage=STAGES)
def test_scale_losses_and_weights_are_those_of_one_process(stage: int) -> None:
    assert_skips_what_overflows(*follow(stage, torch_scaler))


@on_ranks(3, stage=STAGES)
def test_scale_losses_and_weights_are_those_of_one_process_on_three_ranks(stage: int) -> None:
    # The sums are made in another order, and so is a mean over them: the last bits of float32, which a rounding to
    # float16 can make a last bit of that.
    assert_skips_what_overflows(*follow(stage, torch_scaler, Near(2e-3, 2e-3)))


@on_ranks(
    2,
    config=[
        {"stage": 3, "fused": True},  # unscales inside the step, and is called also where it is skipped
        {"stage": 1, "fused": True},
        {"stage": 3, "keep_whole_numel": 5, "collectives": "native"},
        {"stage": 2, "collectives": "host"},
    ],
)
def test_kinds_of_steps_and_exchanges_are_those_of_one_process(config: dict[str, Any]) -> None:
    # A fused step on rows differs from one on the whole in the last bit.
    follow(scaler=torch_scaler, near=Near(1e-6, 1e-6) if "fused" in config else SAME_BITS, **config)


@on_ranks(2, stage=[1, 3])
def test_patient_scaler_is_that_of_one_process(stage: int) -> None:
    scales, _ = follow(stage, patient_scaler)
    assert scales[5] == scales[4] and scales[6] == scales[5] / 2


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


def test_scales_on_this_machine_s_device_by_default() -> None:
    scaler = zero.LossScaler()
    assert scaler.is_enabled()  # also without an accelerator, where torch's own would do nothing
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert scaler.scale(torch.ones(())).device.type == (accelerator.type if accelerator else "cpu")


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
