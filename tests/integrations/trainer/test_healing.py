"""A Trainer in a run that heals goes on from what that run has saved, and from nothing else, at the same global batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback

import hf_zero as zero
from hf_zero.errors import CheckpointError, ConfigError, UsageError
from hf_zero.host.progress import RUN_VARIABLE
from hf_zero.integrations.trainer import healing
from tests.integrations.trainer.runs import collate, dataset
from tests.models import CASES, make_model
from tests.ranks import on_ranks, run_ranks


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Counts those of this start."""

    count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count += 1


def _train(run: str, out: str, steps: int, batch: int, twice: bool = False) -> tuple[int, list[float]]:
    """Train one start of a run; how many steps it did, and the losses since the run's beginning."""
    healing._trained_in.clear()  # what another process would have
    with mock.patch.dict(os.environ, {RUN_VARIABLE: run}):
        args = zero.ZeroTrainingArguments(
            out,
            zero={"stage": 2, "collectives": "pairwise"},
            max_steps=steps,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=2,
            save_steps=2,
            logging_steps=1,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        model, done = make_model(CASES["llama"]), _Steps()
        trainer = Trainer(model, args, collate, dataset(24), callbacks=[done])
        trainer.train()
        if twice:
            trainer.train()
    zero.undo()
    return done.count, [each["loss"] for each in trainer.state.log_history if "loss" in each]


def test_each_start_goes_on_from_what_its_own_run_has_saved(tmp_path: Path) -> None:
    out = str(tmp_path)
    expected = run_ranks(_train, 2, "another", out, 5, 1)[0][1]
    assert run_ranks(_train, 2, "this", out, 3, 1)[0] == (3, expected[:3]), "not from what another run has left there"
    fewer = run_ranks(_train, 1, "this", out, 4, 1)[0]  # twice as many micro-batches
    more = run_ranks(_train, 2, "this", out, 5, 1)[0]
    assert (fewer[0], more[0]) == (1, 1)
    assert (fewer[1], more[1]) == (pytest.approx(expected[:4], rel=1e-5), pytest.approx(expected, rel=1e-5))


@on_ranks(2)
def test_saves_take_the_share_of_the_time_that_they_may(tmp_path: Path) -> None:
    clock = [0.0]
    saved = []

    class Timed(TrainerCallback):  # type: ignore[misc]
        """A step takes 1 s, and a save 3 s on rank 0, whose clock counts."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock[0] += 1 + dist.get_rank()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved.append(state.global_step)

    def save(*_: Any) -> None:
        clock[0] += 3

    few = {"max_steps": 24, "per_device_train_batch_size": 1}
    args = zero.ZeroTrainingArguments(
        str(tmp_path), zero=2, zero_save_every="20%", report_to=[], use_cpu=True, disable_tqdm=True, **few
    )
    model = make_model(CASES["llama"])
    trainer = Trainer(model, args, collate, dataset(24), callbacks=[Timed()])
    with (
        mock.patch("hf_zero.integrations.trainer.pace.time.monotonic", lambda: clock[0]),
        mock.patch("hf_zero.integrations.trainer.checkpoint.save_checkpoint", save),
    ):
        trainer.train()
    zero.undo()
    assert saved == [10, 22, 24], saved
    for wrong in ("2", "0%", "100%", "often"):
        with pytest.raises(ConfigError, match="share of the time that saving may take, such as 2%"):
            zero.ZeroTrainingArguments(str(tmp_path), zero=2, zero_save_every=wrong, use_cpu=True)


@on_ranks(2)
def test_what_cannot_go_on_right_is_refused(tmp_path: Path) -> None:
    _train("run", str(tmp_path), 2, 1)
    with pytest.raises(
        UsageError, match="4 samples a step, which the 6 samples of a micro-batch on 2 ranks do not divide"
    ):
        _train("run", str(tmp_path), 4, 3)
    zero.undo()
    with pytest.raises(UsageError, match="two trainings of a run with --max_restarts have the folder"):
        _train("run", str(tmp_path / "b"), 1, 1, twice=True)
    zero.undo()
    with (
        mock.patch("hf_zero.host.progress.last_saved", lambda folder: 4 if dist.get_rank() else None),
        pytest.raises(
            CheckpointError, match=r"this run has saved step 4 in .*, and rank 0 finds no whole checkpoint of it"
        ),
    ):
        _train("new", str(tmp_path), 4, 1)
    zero.undo()


@on_ranks(2)
def test_a_loop_of_ones_own_goes_on_from_its_newest_state(tmp_path: Path) -> None:
    def start() -> tuple[Any, nn.Module, Any]:
        accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=3, collectives="pairwise"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train(found: tuple[Any, nn.Module, Any], steps: range) -> list[float]:
        accelerator, model, optimizer = found
        losses = []
        for step in steps:
            loss = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state(tmp_path / f"step_{step + 1}")
            losses.append(float(loss))
        return losses

    first = start()
    assert zero.resume_or_start(first[0], tmp_path) is None
    expected = train(first, range(4))
    (tmp_path / "step_4" / "model.safetensors").unlink(missing_ok=True)  # what a disk has lost
    again = start()
    assert zero.resume_or_start(again[0], tmp_path) == tmp_path / "step_3"
    assert train(again, range(3, 4)) == expected[3:]
    with pytest.raises(UsageError, match="needs a partitioned model: call it after"):
        zero.resume_or_start(zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=3)), tmp_path)
    for step in range(1, 5):
        (tmp_path / f"step_{step}" / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"no state in .* is whole"):
        zero.resume_or_start(start()[0], tmp_path)
