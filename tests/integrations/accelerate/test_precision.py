"""float16 under accelerate, on CPU ranks: the scale and what is learned, against one process; checkpoints of the scale."""

from __future__ import annotations

import copy
import math
import os
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.utils import GradScalerKwargs
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.errors import CheckpointError
from tests.models import CASES, make_model
from tests.ranks import run_alone, run_ranks

CASE = CASES["llama"]
NUM_STEPS, RANKS, MAX_NORM = 12, 2, 0.5
INJECTED = {3: (1,), 8: (0, 1)}  # step -> the ranks whose loss is infinite
SCALE = {"initial": 2.0**14, "window": 3, "hysteresis": 1, "minimum": 1}


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    loss = CASE.loss(model, CASE.batch(step, rank))
    return loss * float("inf") if rank in INJECTED.get(step, ()) else loss


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def make(stage: int, **options: Any) -> tuple[zero.ZeroAccelerator, Any, Any]:
    plugin = zero.ZeroPlugin(stage=stage, compute_dtype="float16", loss_scale=SCALE)
    accelerator = zero.ZeroAccelerator(zero_plugin=plugin, **options)
    model = make_model(CASE)
    return accelerator, *accelerator.prepare(model, make_optimizer(model))


Facts = list[tuple[float, float, bool]]  # by step: the scale, this rank's loss, whether the step was skipped


def run(accelerator: Any, model: Any, optimizer: Any, steps: range) -> Facts:
    facts = []
    for step in steps:
        loss = loss_of(model, accelerator.process_index, step)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        facts.append((accelerator.scaler.get_scale(), loss.item(), optimizer.step_was_skipped))
    return facts


def train(stage: int) -> tuple[Facts, dict[str, Tensor]]:
    accelerator, model, optimizer = make(stage)
    assert accelerator.mixed_precision == "fp16"
    facts = run(accelerator, model, optimizer, range(NUM_STEPS))
    return facts, accelerator.get_state_dict(model)


def oracle() -> tuple[list[Facts], dict[str, Tensor]]:
    model, facts = make_model(CASE), [[] for _ in range(RANKS)]
    worker, optimizer = copy.deepcopy(model), make_optimizer(model)
    for param in worker.parameters():
        param.data = param.data.half()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE["initial"], growth_interval=SCALE["window"])
    for step in range(NUM_STEPS):
        losses = []
        for rank in range(RANKS):
            worker.zero_grad()
            with torch.autocast("cpu", torch.float16):
                losses.append(loss_of(worker, rank, step))
            scaler.scale(losses[-1]).backward()
            for master, param in zip(model.parameters(), worker.parameters(), strict=True):
                master.grad = param.grad.float() + (0 if master.grad is None else master.grad)
        for master in model.parameters():
            master.grad /= RANKS
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for rank, loss in enumerate(losses):
            facts[rank].append((scaler.get_scale(), loss.item(), not norm.isfinite().item()))
        for master, param in zip(model.parameters(), worker.parameters(), strict=True):
            param.data.copy_(master.data)
    return facts, {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_scale_losses_and_weights_are_those_of_one_process(stage: int) -> None:
    wanted, weights = run_alone(oracle)
    for rank, (facts, found) in enumerate(run_ranks(train, RANKS, stage)):
        for (scale, loss, skipped), (scale2, loss2, skipped2) in zip(facts, wanted[rank], strict=True):
            # The norm that clips is added up in another order: the last bit of float32, seldom one of float16.
            assert (scale, skipped) == (scale2, skipped2)
            assert loss == pytest.approx(loss2, rel=1e-3, nan_ok=True)
        assert [step for step, (_, _, skipped) in enumerate(facts) if skipped] >= [3, 8]
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3, msg=name)


def save_and_go_on(folder: str) -> tuple[Facts, Facts]:
    accelerator, model, optimizer = make(3)
    run(accelerator, model, optimizer, range(5))
    accelerator.save_state(folder)
    rest = run(accelerator, model, optimizer, range(5, NUM_STEPS))
    again = make(3)
    again[0].load_state(folder)
    return rest, run(*again, range(5, NUM_STEPS))


def test_scale_is_in_checkpoints(tmp_path: Any) -> None:
    for rest, again in run_ranks(save_and_go_on, RANKS, str(tmp_path / "state")):
        assert [(scale, skipped) for scale, _, skipped in again] == [(scale, skipped) for scale, _, skipped in rest]
        losses = [(left, right) for (_, left, _), (_, right, _) in zip(rest, again, strict=True)]
        assert all(left == right or (math.isinf(left) and math.isinf(right)) for left, right in losses)


def load_what_has_no_scale(folder: str) -> str:
    accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=3, compute_dtype="float16"))
    model = make_model(CASE)
    accelerator.prepare(model, make_optimizer(model))
    scaler, accelerator.scaler = accelerator.scaler, None
    accelerator.save_state(folder)
    accelerator.scaler = scaler
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder)
    return str(caught.value)


def test_checkpoint_without_a_scale_is_named(tmp_path: Any) -> None:
    for text in run_ranks(load_what_has_no_scale, RANKS, str(tmp_path / "state")):
        assert "scaler.pt is missing" in text and "without loss scaling" in text


def scalers() -> list[Any]:
    kwargs = GradScalerKwargs(init_scale=8.0)
    plain = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=1), mixed_precision="fp16", kwargs_handlers=[kwargs])
    errors = []
    plugin = zero.ZeroPlugin(stage=1, loss_scale=128)
    for options in ({"kwargs_handlers": [kwargs]}, {}):
        with pytest.raises(zero.ConfigError) as caught:
            bad = zero.ZeroPlugin(stage=1, compute_dtype="bfloat16") if not options else plugin
            zero.ZeroAccelerator(zero_plugin=bad, mixed_precision="fp16", **options)
        errors.append(str(caught.value))
    ours = zero.ZeroAccelerator(zero_plugin=plugin, mixed_precision="fp16")
    return [plain.scaler.get_scale(), type(plain.scaler).__name__, ours.scaler.get_scale(), errors]


def test_scalers_are_those_asked_for_once() -> None:
    first, name, second, errors = run_alone(scalers)
    assert (first, name, second) == (8.0, "GradScaler", 128.0)
    assert "GradScalerKwargs" in errors[0] and "compute_dtype is bfloat16" in errors[1]


def test_mixed_precision_of_the_launcher_is_not_overruled() -> None:
    assert "mixed precision is 'bf16'" in run_alone(refused_under_bf16)


def refused_under_bf16() -> str:
    with mock.patch.dict(os.environ, {"ACCELERATE_MIXED_PRECISION": "bf16"}), pytest.raises(zero.ConfigError) as caught:
        zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(compute_dtype="float16"))
    return str(caught.value)
