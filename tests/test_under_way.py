"""What is under way, on which thread: see [Note: under way]."""

import importlib
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hf_zero.under_way import calls_of, is_function_running, is_method_running
from tests.engine.twins import SHARDED, Twins, assert_same
from tests.ranks import on_ranks


class Asking(nn.Module):
    """Calls `ask` in its forward, and itself as often as `depth` says."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, depth: int) -> None:
        if depth:
            self(depth - 1)
        else:
            self.ask()


def elsewhere(ask: Callable[[], None]) -> None:
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()


def test_calls_are_counted_on_the_thread_that_is_named() -> None:
    found: list[int] = []
    main = threading.get_ident()

    def ask() -> None:
        found.append(calls_of(module))
        elsewhere(lambda: found.extend([calls_of(module), calls_of(module, main)]))

    module = Asking(ask)
    module(2)
    assert found == [3, 0, 3]
    assert calls_of(module) == calls_of(module, main) == 0


def test_a_thread_that_has_ended_runs_nothing() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert calls_of(nn.Identity(), thread.ident) == 0 and not is_method_running(thread, thread.ident)


def test_a_function_is_found_by_its_name() -> None:
    def functional_call() -> bool:
        return is_function_running("functional_call")

    assert functional_call() and not is_function_running("functional_call")


@on_ranks(2, stage=SHARDED, collectives=("pairwise", "host"))
def test_a_closure_may_run_its_backward_on_another_thread_as_autograd_does_on_a_device(
    stage: int, collectives: str
) -> None:
    twins = Twins(stage, collectives=collectives)
    for _ in range(2):

        def closure() -> torch.Tensor:
            twins.optimizers[0].zero_grad()
            loss = twins.loss(twins.model, twins.own())
            elsewhere(loss.backward)
            return loss

        twins.optimizers[0].step(closure)
        twins.backward_reference()
        twins.optimizers[1].step()
        twins.optimizers[1].zero_grad()
        twins.steps_done += 1
        assert_same(twins.model, twins.reference)


@on_ranks(2, stage=SHARDED, collectives=("pairwise", "host"))
def test_a_forward_finds_what_a_step_has_changed_that_raised(stage: int, collectives: str) -> None:
    twins, module = Twins(stage, collectives=collectives), importlib.import_module("torch.optim.sgd")
    step = module.sgd

    def breaks(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        raise ArithmeticError

    for _ in range(2):
        twins.loss(twins.model, twins.own()).backward()
        twins.backward_reference()
        for optimizer in twins.optimizers:
            with mock.patch.object(module, "sgd", breaks), pytest.raises(ArithmeticError):
                optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found = twins.loss(twins.model, twins.own())
            assert torch.allclose(found, twins.loss(twins.reference, twins.own()))
        twins.steps_done += 1
