"""float16 under accelerate, on CPU ranks: the scale and what is learned, against one process; checkpoints of the scale."""

from __future__ import annotations

import copy
import functools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradScalerKwargs
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import STAGES
from tests.integrations.refusals import refused
from tests.models import CASES, make_model
from tests.ranks import alone, on_ranks

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


@functools.cache
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


@on_ranks(RANKS, stage=STAGES)
def test_scale_losses_and_weights_are_those_of_one_process(stage: int) -> None:
    wanted, weights = oracle()
    accelerator, model, optimizer = make(stage)
    assert accelerator.mixed_precision == "fp16"
    facts = run(accelerator, model, optimizer, range(NUM_STEPS))
    for (scale, loss, skipped), (scale2, loss2, skipped2) in zip(facts, wanted[dist.get_rank()], strict=True):
        # The norm that clips is added up in another order: the last bit of float32, seldom one of float16.
        assert (scale, skipped) == (scale2, skipped2)
        assert loss == pytest.approx(loss2, rel=1e-3, nan_ok=True)
    assert [step for step, (_, _, skipped) in enumerate(facts) if skipped] >= [3, 8]
    found = accelerator.get_state_dict(model)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3, msg=name)


@on_ranks(RANKS)
def test_scale_is_in_checkpoints(tmp_path: Path) -> None:
    accelerator, model, optimizer = make(3)
    run(accelerator, model, optimizer, range(5))
    accelerator.save_state(tmp_path / "state")
    rest = run(accelerator, model, optimizer, range(5, NUM_STEPS))
    again = make(3)
    again[0].load_state(tmp_path / "state")
    for (scale, loss, skipped), (scale2, loss2, skipped2) in zip(rest, run(*again, range(5, NUM_STEPS)), strict=True):
        assert (scale, skipped) == (scale2, skipped2)
        assert loss == loss2 or (math.isinf(loss) and math.isinf(loss2))


@on_ranks(RANKS)
def test_checkpoint_without_a_scale_is_named(tmp_path: Path) -> None:
    accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=3, compute_dtype="float16"))
    model = make_model(CASE)
    accelerator.prepare(model, make_optimizer(model))
    scaler, accelerator.scaler = accelerator.scaler, None
    accelerator.save_state(tmp_path / "state")
    accelerator.scaler = scaler
    texts = "scaler.pt is missing", "without loss scaling"
    refused(lambda: accelerator.load_state(tmp_path / "state"), "CheckpointError", *texts)


@alone()
def test_scalers_are_those_asked_for_once() -> None:
    kwargs = GradScalerKwargs(init_scale=8.0)
    plain = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=1), mixed_precision="fp16", kwargs_handlers=[kwargs])
    assert plain.scaler.get_scale() == 8.0 and type(plain.scaler).__name__ == "GradScaler"
    plugin = zero.ZeroPlugin(stage=1, loss_scale=128)
    with pytest.raises(zero.ConfigError, match="GradScalerKwargs"):
        zero.ZeroAccelerator(zero_plugin=plugin, mixed_precision="fp16", kwargs_handlers=[kwargs])
    with pytest.raises(zero.ConfigError, match="compute_dtype is bfloat16"):
        half = zero.ZeroPlugin(stage=1, compute_dtype="bfloat16")
        zero.ZeroAccelerator(zero_plugin=half, mixed_precision="fp16")
    assert zero.ZeroAccelerator(zero_plugin=plugin, mixed_precision="fp16").scaler.get_scale() == 128.0


@alone()
def test_mixed_precision_of_the_launcher_is_not_overruled() -> None:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    with pytest.raises(zero.ConfigError, match="mixed precision is 'bf16'"):
        zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(compute_dtype="float16"))


# ---- stage 0 is data parallelism ------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Norms, a buffer, and a loss of the model's own: what autocast treats in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)), ids.roll(1))


def losses_and_weights(accelerator: Any, scaler: Any = None) -> tuple[list[float], dict[str, Tensor]]:
    """Of some steps on two ranks, whose sums have one order; `scaler` is accelerate's own, which there is on GPUs only."""
    torch.manual_seed(0)
    model, losses = Normed(), []
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    for step in range(4):
        ids = torch.randint(8, (12,), generator=torch.Generator().manual_seed(RANKS * step + dist.get_rank()))
        if scaler is None:
            loss = model(ids)
            accelerator.backward(loss)
            optimizer.step()
        else:
            with torch.autocast("cpu", torch.float16):
                loss = model(ids)
            scaler.scale(loss).backward()
            scaler.step(optimizer.optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in accelerator.unwrap_model(model).named_parameters()}


@on_ranks(RANKS, mixed_precision=["bf16", "fp16"])
def test_stage_0_has_the_bits_of_ddp_under_autocast(mixed_precision: str) -> None:
    scaling = GradScalerKwargs(init_scale=2.0**10)
    if mixed_precision == "bf16":
        wanted = losses_and_weights(Accelerator(cpu=True, mixed_precision="bf16"))
    else:
        wanted = losses_and_weights(Accelerator(cpu=True), torch.amp.GradScaler("cpu", **scaling.to_kwargs()))
    AcceleratorState._reset_state(reset_partial_state=False)
    plugin = zero.ZeroPlugin(stage=0, collectives="pairwise")
    options = {} if mixed_precision == "bf16" else {"kwargs_handlers": [scaling]}
    ours = zero.ZeroAccelerator(zero_plugin=plugin, mixed_precision=mixed_precision, **options)
    found = losses_and_weights(ours)
    assert found[0] == wanted[0]
    for name, value in wanted[1].items():
        assert torch.equal(found[1][name], value), name
