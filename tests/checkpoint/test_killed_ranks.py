"""Training goes on after ranks were killed as if they had not been."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

from hf_zero.checkpoint.files import disk
from tests.checkpoint.runs import make_trainer
from tests.integrations.trainer.runs import undone, with_dropout
from tests.ranks import RankFailure, close_pool, run_ranks


@dataclass(frozen=True)
class Kill:
    """When a rank ends itself: at its n-th change of the disk, or at its n-th event of a step."""

    rank: int
    kind: str
    number: int


class Events(TrainerCallback):
    """Calls `act` at every event of a step."""

    def __init__(self, act: Callable[[str], None]) -> None:
        self._act = act

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._act("step")

    on_pre_optimizer_step = on_optimizer_step = on_step_end = on_step_begin


@undone
def train_rank(folder: str, run: str, kill: Kill | None) -> None:
    """One rank of a training, which goes on from the newest checkpoint if there is one."""
    rank, counts = dist.get_rank(), {"change": 0, "step": 0}

    def act(kind: str) -> None:
        counts[kind] += 1
        if kill is not None and (kill.rank, kill.kind, kill.number) == (rank, kind, counts[kind]):
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = make_trainer(folder, run, with_dropout, max_steps=4)
    trainer.add_callback(Events(act))
    with mock.patch.object(disk, "on_change", lambda what, path: act("change")):
        trainer.train(resume_from_checkpoint=any(Path(run).glob("checkpoint-*")))
    Path(run, f"counts{rank}").write_text(json.dumps(counts))


@pytest.fixture(scope="module")
def straight(folder: str) -> str:
    """The folder of a training that nothing interrupts."""
    run_ranks(train_rank, 2, folder, f"{folder}/straight", None)
    return f"{folder}/straight"


def drawn_kill(seed: int, straight: str) -> Kill:
    rng = random.Random(seed)
    rank, kind = rng.randrange(2), rng.choice(["change", "step"])
    return Kill(rank, kind, rng.randint(1, json.loads(Path(straight, f"counts{rank}").read_text())[kind]))


_EVERYDAY = 8  # rank 0 ends as step 4 begins, after a checkpoint


@pytest.mark.parametrize(
    "seed", [seed if seed == _EVERYDAY else pytest.param(seed, marks=pytest.mark.slow) for seed in range(23)]
)
def test_training_goes_on_after_sigkill_as_if_it_had_not_been(seed: int, straight: str, folder: str) -> None:
    run, kill = f"{folder}/killed{seed}", drawn_kill(seed, straight)
    replies = run_ranks(train_rank, 2, folder, run, kill, expect_failure=True)
    killed, other = replies[kill.rank], replies[1 - kill.rank]
    assert isinstance(killed, RankFailure) and "SIGKILL" in killed.message, kill
    assert other is None or other.type_name != "RankDied", kill  # the other one gets an error, or had finished
    close_pool()  # both ranks go on in new processes
    run_ranks(train_rank, 2, folder, run, None)
    final = sorted({*os.listdir(run)} - {"counts0", "counts1"})
    assert final == ["checkpoint-2", "checkpoint-4"]
    for name in ("model.safetensors", "optimizer.safetensors", "optimizer.json", "scheduler.pt"):
        assert Path(run, "checkpoint-4", name).read_bytes() == Path(straight, "checkpoint-4", name).read_bytes(), kill
