"""A loop on `ZeroAccelerator` with everything that a state has to hold, for the tests of its checkpoints."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import hf_zero as zero
from tests.integrations import states
from tests.integrations.states import State
from tests.models import CASES, LENGTH, VOCAB, make_model

NUM_ROWS, BATCH = 20, 2


class Counter:
    """A registered object with a state of plain values."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


@dataclass(frozen=True)
class Setup:
    """What a loop is made of; `seed` is of weights and random states."""

    stage: int = 3
    micro_batches: int = 1
    mixed_precision: str = "no"
    seed: int = 0
    case: str = "llama"
    data_seed: int = 5
    is_seedable: bool = True


class Loop:
    """A prepared loop with dropout, a shuffling loader, a scheduler, and a registered counter."""

    def __init__(self, setup: Setup, project: ProjectConfiguration | None = None) -> None:
        random.seed(setup.seed)
        torch.manual_seed(100 * setup.seed + 10 + rank())
        self.accelerator = zero.ZeroAccelerator(
            zero_plugin=zero.ZeroPlugin(stage=setup.stage, collectives="pairwise"),
            gradient_accumulation_steps=setup.micro_batches,
            mixed_precision=setup.mixed_precision,
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=setup.is_seedable, data_seed=setup.data_seed
            ),
            project_config=project,
        )
        model = with_adapters(setup.seed) if setup.case == "adapters" else make_model(CASES[setup.case], setup.seed)
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.2
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = DataLoader(numbered_rows(), batch_size=BATCH, shuffle=True)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.counter = Counter(steps=0)
        self.accelerator.register_for_checkpointing(self.counter)
        self.seen: list[list[int]] = []
        self.losses: list[float] = []

    def steps(self, batches: Any) -> Iterator[int]:
        """Train on batches; yields after each how many there have been."""
        for number, batch in enumerate(batches, start=1):
            self.seen.append(batch.pop("number").tolist())
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.counter.values["steps"] += 1
            yield number

    def second_epoch(self) -> tuple[list[list[int]], list[float]]:
        """Train on all batches; the rows that were seen, the last loss, and a random number after it."""
        self.seen = []
        for _ in self.steps(self.loader):
            pass
        return self.seen, [self.losses[-1], torch.rand(1).item()]


def with_adapters(seed: int) -> nn.Module:
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
    return peft.get_peft_model(make_model(CASES["llama"], seed), config)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def numbered_rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (NUM_ROWS, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row, "number": number} for number, row in enumerate(ids)]


def state_of(loop: Loop) -> State:
    model = loop.accelerator.unwrap_model(loop.model)
    rates = [group["lr"] for group in loop.optimizer.param_groups]
    return states.state_of(model, loop.optimizer, loop.scheduler, rates, dict(loop.counter.values))


def trained(setup: Setup, steps: int = 2, **options: Any) -> Loop:
    """A loop whose epoch has been cut after some steps."""
    loop = Loop(setup, **options)
    for number in loop.steps(loop.loader):
        if number == steps:
            break
    loop.accelerator.gradient_state.dataloader_references = [None]  # the broken-off epoch is forgotten
    return loop


@contextmanager
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    ours = logging.getLogger("hf_zero")
    level = ours.level
    ours.setLevel(logging.INFO)
    ours.addHandler(handler)
    try:
        yield lines
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
