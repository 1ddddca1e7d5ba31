"""Ranks that are slow, stall, die or cannot share memory: equal bits, an error that says who and where, nothing left."""

import contextlib
import errno
import gc
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from hf_zero.engine import host_memory
from hf_zero.engine.collectives import Collectives, Rows
from hf_zero.engine.exchange import Exchange
from hf_zero.engine.host import _HostExchange
from hf_zero.engine.layout import RowLayout
from hf_zero.engine.transport import make_collectives
from hf_zero.errors import CollectiveError
from hf_zero.ledger import Ledger
from tests.models import Stack, stack_batch
from tests.ranks import RankFailure, _workers, run_ranks

_CHOICES = ("native", "pairwise", "host")
_ANY_CHOICE = pytest.mark.parametrize("choice", _CHOICES)
_WIDTH = 5  # rows that two ranks cannot share alike
_NUM_STEPS = {"native": 20, "pairwise": 30, "host": 100}  # most where ranks see each other's memory
_LONG_S = 60.0  # a rank that waits this long is killed by the pool, and the test fails


def _make(choice: str, timeout_s: float = _LONG_S) -> Collectives:
    collectives = make_collectives(choice, torch.device("cpu"), timeout_s, Ledger())
    assert collectives is not None and collectives.name == choice
    return collectives


@dataclass
class _Training:
    """A tiny model in training on this rank.

    `evaluate` runs between backward and step: a rank that is early must not change what others still read.
    """

    choice: str
    stage: int
    compute_dtype: str | None = None
    timeout_s: float = _LONG_S
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Stack(_WIDTH, num_blocks=2)
        options = {} if self.compute_dtype is None else {"compute_dtype": self.compute_dtype}
        config = {"stage": self.stage, "collectives": self.choice, "timeout_s": self.timeout_s, **options}
        engine = zero.shard_model(self.model, config)
        assert engine.world.collectives is not None and engine.world.collectives.name == self.choice
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def backward(self) -> None:
        loss = self.model(**stack_batch(len(self.losses), dist.get_rank(), _WIDTH))
        loss.backward()
        self.losses.append(loss.item())

    def evaluate(self) -> None:
        with torch.no_grad():
            self.losses.append(self.model(**stack_batch(len(self.losses), dist.get_rank(), _WIDTH)).item())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.evaluate()
        self.update()

    def rows(self) -> list[Tensor]:
        return [p.to_local().clone() if isinstance(p, DTensor) else p.detach().clone() for p in self.model.parameters()]


# --- races ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _delays(training: _Training) -> Iterator[None]:
    """Random pauses, others on every rank, wherever ranks could get out of step."""
    chance = random.Random(dist.get_rank())

    def pause(*_: object) -> None:
        if chance.random() < 0.15:
            time.sleep(chance.uniform(0, 2e-3))

    def paused(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            pause()
            result = call(*args, **kwargs)
            pause()
            return result

        return wrapper

    def pause_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
        pause()
        if output.requires_grad:
            output.register_hook(pause)

    made = training.model.__dict__["_zero_engine"].world.collectives
    seams = [(type(made), name) for name in ("gather", "reduce_scatter", "before_write", "settle")]
    seams += [(Exchange, "wait"), (_HostExchange, "wait")]
    with contextlib.ExitStack() as stack:
        for owner, name in seams:
            stack.enter_context(mock.patch.object(owner, name, paused(getattr(owner, name))))
        stack.enter_context(mock.patch.object(training.optimizer, "step", paused(training.optimizer.step)))
        for module in training.model.modules():
            if not list(module.children()):
                stack.enter_context(contextlib.closing(_Closing(module.register_forward_hook(pause_in_backward))))
        yield


@dataclass
class _Closing:
    handle: Any

    def close(self) -> None:
        self.handle.remove()


def _train(choice: str, stage: int, compute_dtype: str | None, is_delayed: bool) -> tuple[list[float], list[Tensor]]:
    training = _Training(choice, stage, compute_dtype)
    with _delays(training) if is_delayed else contextlib.nullcontext():
        for _ in range(_NUM_STEPS[choice]):
            training.step()
    return training.losses, training.rows()


def _race(choice: str, stage: int, compute_dtype: str | None) -> None:
    expected_losses, expected_rows = _train(choice, stage, compute_dtype, is_delayed=False)
    losses, rows = _train(choice, stage, compute_dtype, is_delayed=True)
    differing = [step for step, pair in enumerate(zip(losses, expected_losses, strict=True)) if pair[0] != pair[1]]
    assert not differing, f"first at loss {differing[0]} of {len(losses)}"
    assert all(torch.equal(left, right) for left, right in zip(rows, expected_rows, strict=True))
    assert losses[-2] < losses[0]


@_ANY_CHOICE
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_with_ranks_out_of_step_has_the_same_bits(choice: str, stage: int) -> None:
    run_ranks(_race, 2, choice, stage, None)


def test_training_with_ranks_out_of_step_has_the_same_bits_when_rows_are_cast() -> None:
    run_ranks(_race, 2, "host", 3, "bfloat16")
