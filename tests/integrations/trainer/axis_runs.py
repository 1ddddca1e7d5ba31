"""One training by the plain Trainer with an axis of its own, which is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_zero as zero
from tests.sequence_axis import LENGTH, VOCAB

STEPS = 4


def rows(num_rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows of which a prompt is no target, of another length each."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, VOCAB, (num_rows, LENGTH + 1), generator=generator)
    found = []
    for number, row in enumerate(rows):
        labels = row.clone()
        labels[: 1 + number % 8] = -100
        found.append({"input_ids": row, "labels": labels})
    return found


class _Losses(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.seen.append((logs["loss"], logs["grad_norm"]))


def _correct(predicted: Any) -> dict[str, float]:
    """Of the tokens that follow, over whole sequences."""
    guesses, labels = predicted.predictions.argmax(-1)[:, :-1], predicted.label_ids[:, 1:]
    return {"correct": float((guesses == labels)[labels != -100].mean())}


def train(
    make: Callable[[], nn.Module], out: str, batch: int, zero_config: dict[str, Any] | None, **options: Any
) -> dict[str, Any]:
    """Train, evaluate, and tell what is logged.

    Args:
        make: the model.
        out: folder.
        batch: of a rank that has one of its own.
        zero_config: None: plain transformers.
        options: of the arguments; and `resume`, a checkpoint, and `saves`, whether there are any.
    """
    resume = options.pop("resume", None)
    values = {
        "output_dir": out,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 2 * batch,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "save_strategy": "steps" if options.pop("saves", False) else "no",
        "save_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    if zero_config is None:
        args = TrainingArguments(**values)
    else:
        args = zero.ZeroTrainingArguments(zero={"collectives": "pairwise", **zero_config}, **values, **options)
    losses = _Losses()
    # Whole batches, since accelerate fills up others; of as many rows over all ranks, whose targets the Trainer counts.
    data, rest = rows(19, 0), rows(8, 1)
    trainer = Trainer(make(), args, train_dataset=data, eval_dataset=rest, compute_metrics=_correct, callbacks=[losses])
    trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()
    zero.undo()
    return {
        "losses": losses.seen,
        "eval": (evaluated["eval_loss"], evaluated["eval_correct"]),
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
    }


def assert_equal(found: dict[str, Any], reference: dict[str, Any], first: int = 0) -> None:
    """Raise if a training, which began after `first` steps, is not the reference."""
    assert (found["step"], found["epoch"]) == (STEPS, reference["epoch"])
    for ours, theirs in zip(found["losses"], reference["losses"][first:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert found["eval"] == pytest.approx(reference["eval"], rel=1e-5)
