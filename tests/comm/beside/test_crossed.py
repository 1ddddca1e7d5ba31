"""Ranks that wait for each other for good are told so in seconds, and ranks that merely take long are not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.comm.beside import crossed
from hf_zero.errors import CollectiveError
from tests.engine.twins import SHARDED
from tests.ranks import by_hand, on_ranks

_OFTEN_S = 0.1


class _Seeing(nn.Module):
    """A model that leaves a part out where there is no image."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.text = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        return self.text(text if image is None else text + self.tower(image))


@contextlib.contextmanager
def _looking_often() -> Iterator[None]:
    with mock.patch.multiple(crossed, LOOKS_EVERY_S=_OFTEN_S, PATIENCE=1):
        yield


def _sharded(stage: int, collectives: str) -> Any:
    torch.manual_seed(0)
    model = _Seeing()
    zero.shard_model(model, {"stage": stage, "collectives": collectives})
    return model


@on_ranks(3, collectives=["pairwise", "native", "host"])
def test_ranks_that_run_other_units_are_told_on_all_of_them(collectives: str) -> None:
    model, rank = _sharded(3, collectives), dist.get_rank()
    with _looking_often(), pytest.raises(CollectiveError) as caught:
        model(torch.randn(2, 6), torch.randn(2, 6) if rank != 1 else None).sum().backward()
    said = str(caught.value)
    assert "is at gather of" in said, said
    if collectives != "native":  # gloo's own gathers of equal sizes meet, and one rank comes to the end of its backward
        assert "'tower'" in said and "'text'" in said, said
        assert "let that part stay whole (units: {whole: [its name]})" in said


@on_ranks(2, stage=SHARDED, collectives=["pairwise", "host"], in_a_group=[False, True])
def test_a_rank_with_a_batch_less_that_waits_in_a_barrier_ends_the_wait(
    stage: int, collectives: str, in_a_group: bool
) -> None:
    model, rank = _sharded(stage, collectives), dist.get_rank()
    group = dist.new_group() if in_a_group else None
    caught = None
    with _looking_often():
        for _ in range(2 - rank):
            try:
                model(torch.randn(2, 6), torch.randn(2, 6)).sum().backward()
            except CollectiveError as error:
                caught = error
        dist.barrier(group)
    if rank == 0:
        assert "but rank 1 is at torch.distributed.barrier, and each waits for the other" in str(caught)
    else:
        assert caught is None


def _broadcast() -> None:
    dist.broadcast(torch.ones(2), 0)


def _scatter() -> None:
    dist.scatter(torch.ones(2), [torch.ones(2)] * 2 if dist.get_rank() == 0 else None, 0)


def _reduce_scatter() -> None:
    dist.reduce_scatter(torch.ones(1), [torch.ones(1)] * 2)


def _all_to_all() -> None:
    dist.all_to_all_single(torch.ones(2), torch.ones(2))


@on_ranks(2, call=[_broadcast, _reduce_scatter, *by_hand(_scatter, _all_to_all)])
def test_a_rank_with_a_batch_less_that_waits_for_the_other_in_any_call_of_torch_ends_the_wait(
    call: Callable[[], None],
) -> None:
    model, rank = _sharded(3, "pairwise"), dist.get_rank()
    with _looking_often():
        if rank == 0:
            with pytest.raises(CollectiveError, match=r"but rank 1 is at torch.distributed.\w+, and each waits for"):
                model(torch.randn(2, 6), torch.randn(2, 6)).sum().backward()
        call()


@on_ranks(2, stage=SHARDED, collectives=["pairwise", "host"])
def test_a_rank_that_takes_long_is_waited_for(stage: int, collectives: str) -> None:
    model, rank = _sharded(stage, collectives), dist.get_rank()
    with _looking_often():
        for turn in range(2):
            if rank == turn:
                time.sleep(1 + 3 * _OFTEN_S)  # the thread may be in a longer sleep before
            loss = model(torch.randn(2, 6), torch.randn(2, 6)).sum()
            if rank == turn:
                time.sleep(5 * _OFTEN_S)
            loss.backward()


@on_ranks(2)
def test_a_rank_that_steps_while_another_runs_the_model_ends_the_wait() -> None:
    model, rank = _sharded(3, "host"), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 6), torch.randn(2, 6)).sum().backward()
    with (
        _looking_often(),
        pytest.raises(CollectiveError, match="each waits for the other: every rank must make the same"),
    ):
        if rank:
            model(torch.randn(2, 6), torch.randn(2, 6)).sum().backward()
        optimizer.step()
        model(torch.randn(2, 6), torch.randn(2, 6)).sum().backward()


@on_ranks(3, collectives=["pairwise", "host"])
def test_a_rank_that_waits_for_a_message_of_a_third_is_waited_for(collectives: str) -> None:
    model, rank, box = _sharded(3, collectives), dist.get_rank(), torch.zeros(1)
    with _looking_often():
        if rank == 1:
            dist.recv(box, 2)
        elif rank == 2:
            time.sleep(1 + 10 * _OFTEN_S)
            dist.send(box, 1)
        model(torch.randn(2, 6), torch.randn(2, 6)).sum().backward()


@on_ranks(2)
def test_frozen_parts_that_are_ignored_may_be_left_out_by_some_ranks() -> None:
    torch.manual_seed(0)
    model, plain = _Seeing(), _Seeing()
    model.tower.requires_grad_(False)
    plain.load_state_dict(model.state_dict())
    zero.shard_model(model, {"stage": 3, "collectives": "pairwise"}, ignored_params=model.tower.parameters())
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        text, image = (torch.randn(2, 6, generator=generator) for _ in range(2))
        given = (text, image) if dist.get_rank() == step else (text,)
        out = model(*given)
        torch.testing.assert_close(out, plain(*given))
        out.sum().backward()
