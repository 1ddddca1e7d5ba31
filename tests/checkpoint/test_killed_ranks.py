"""Training goes on after ranks were killed as if they had not been."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_zero.checkpoint.files import disk
from tests.checkpoint.runs import ROOT, make_trainer
from tests.integrations.trainer.runs import with_dropout


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


def train_rank(rank: int, folder: str, run: str, kill: Kill | None, store: str) -> None:
    """One rank of a training, in a process of its own, which goes on from the newest checkpoint if there is one."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    counts = {"change": 0, "step": 0}

    def act(kind: str) -> None:
        counts[kind] += 1
        if kill is not None and (kill.rank, kill.kind, kill.number) == (rank, kind, counts[kind]):
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = make_trainer(folder, run, with_dropout)
    trainer.add_callback(Events(act))
    disk.on_change = lambda what, path: act("change")
    trainer.train(resume_from_checkpoint=any(Path(run).glob("checkpoint-*")))
    Path(run, f"counts{rank}").write_text(json.dumps(counts))


def serve_trainings() -> None:
    """Fork both ranks of one training after the other, so that they need not import transformers each; by its stdin."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the Trainer prints
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, run, kill, store = json.loads(line)
        ranks = [
            get_context("fork").Process(target=train_rank, args=(rank, folder, run, kill and Kill(*kill), store))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
        replies.write(json.dumps(codes) + "\n")
        replies.flush()


Train = Callable[..., list[int | None]]


@pytest.fixture(scope="module")
def train(folder: str) -> Iterator[Train]:
    """Runs a training on two fresh processes; returns their exit codes."""
    variables = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    code = "from tests.checkpoint.test_killed_ranks import serve_trainings; serve_trainings()"
    with (
        open(f"{folder}/log", "wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env=os.environ | variables,
            text=True,
        ) as server,
    ):
        numbers = itertools.count()

        def ask(run: str, kill: Kill | None = None) -> list[int | None]:
            values = None if kill is None else [kill.rank, kill.kind, kill.number]
            server.stdin.write(json.dumps([folder, run, values, f"{folder}/store{next(numbers)}"]) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        try:
            yield ask
        finally:
            server.stdin.close()
            server.wait(60)


@pytest.fixture(scope="module")
def straight(train: Train, folder: str) -> str:
    """The folder of a training that nothing interrupts."""
    assert train(f"{folder}/straight") == [0, 0], Path(folder, "log").read_text()[-3000:]
    return f"{folder}/straight"


def drawn_kill(seed: int, straight: str) -> Kill:
    rng = random.Random(seed)
    rank, kind = rng.randrange(2), rng.choice(["change", "step"])
    return Kill(rank, kind, rng.randint(1, json.loads(Path(straight, f"counts{rank}").read_text())[kind]))


def goes_on_after_kill(seed: int, train: Train, straight: str, folder: str) -> None:
    run, kill = f"{folder}/killed{seed}", drawn_kill(seed, straight)
    codes = train(run, kill)
    assert codes[kill.rank] == -signal.SIGKILL, Path(folder, "log").read_text()[-3000:]
    assert codes[1 - kill.rank] in (0, 1)  # the other one gets an error, or had finished
    assert train(run) == [0, 0], Path(folder, "log").read_text()[-3000:]
    final = sorted({*os.listdir(run)} - {"counts0", "counts1"})
    assert final == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for name in ("model.safetensors", "optimizer.safetensors", "optimizer.json", "scheduler.pt"):
        assert Path(run, "checkpoint-6", name).read_bytes() == Path(straight, "checkpoint-6", name).read_bytes(), kill


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_training_goes_on_after_sigkill_as_if_it_had_not_been(
    seed: int, train: Train, straight: str, folder: str
) -> None:
    goes_on_after_kill(seed, train, straight, folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 23))
def test_training_goes_on_after_many_sigkills(seed: int, train: Train, straight: str, folder: str) -> None:
    goes_on_after_kill(seed, train, straight, folder)
