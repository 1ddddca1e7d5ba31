"""Agreements among many ranks: what they cost, and whom they name when a rank is missing."""

import functools
import operator
import os
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm import agreements
from hf_zero.comm.agreements import Agreements, Combined
from hf_zero.comm.alone import AloneCollectives
from hf_zero.comm.beside import roll_call
from hf_zero.comm.groups.process_groups import cells_of
from hf_zero.comm.groups.select import make_collectives
from hf_zero.comm.ledger import Ledger
from hf_zero.errors import CollectiveError
from tests.ranks import ENVIRONMENT, RankFailure, run_ranks


class _Post:
    """Messages between the threads of this process, as gloo's between processes."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self.sent: dict[int, list[int]] = defaultdict(list)  # by rank, the bytes of each message


class _Group:
    """One rank's end of a `_Post`."""

    def __init__(self, post: _Post, rank: int) -> None:
        self._post, self._rank = post, rank
        self.group_name = "fake"

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "gloo")

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._post.sent[self._rank].append(tensors[0].nbytes)
        self._post.boxes[self._rank, peer, tag].put(tensors[0].clone())
        return SimpleNamespace(wait=lambda timeout: None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        box = self._post.boxes[peer, self._rank, tag]
        return SimpleNamespace(wait=lambda timeout: tensors[0].copy_(box.get(timeout=60)))


def _in_threads(num_ranks: int, num_values: int, how: Callable[..., Any] = Agreements.agree) -> tuple[list[Any], _Post]:
    """What every rank hears of an agreement, and what was sent for it."""
    post, found = _Post(), {}

    def run(rank: int) -> None:
        group: Any = _Group(post, rank)
        axis: Any = SimpleNamespace(
            ranks=tuple(range(num_ranks)), rank=rank, mesh=None, group=group, gather_group=group, control_group=group,
            device=torch.device("cpu"), timeout_s=60.0, ledger=Ledger(),
        )  # fmt: skip
        found[rank] = how(Agreements(axis), range(rank, rank + num_values), "numbers")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[rank] for rank in range(num_ranks)], post


@pytest.mark.parametrize(
    ("num_ranks", "messages"),
    [(2, 1), (8, 7), (9, 4), (13, 4), (64, 6), pytest.param(1024, 10, marks=pytest.mark.slow)],
)
def test_agreement_sends_a_message_for_each_doubling_of_many_ranks(num_ranks: int, messages: int) -> None:
    heard, post = _in_threads(num_ranks, 12)
    expected = [list(range(rank, rank + 12)) for rank in range(num_ranks)]
    assert all(rows == expected for rows in heard)
    assert {len(sent) for sent in post.sent.values()} == {messages} == {agreements.messages_of(num_ranks, 12)}
    if num_ranks > agreements.FEW_RANKS:  # of 32 numbers for each other rank, no more
        assert {sum(sent) for sent in post.sent.values()} == {256 * (num_ranks - 1)}


def test_values_that_do_not_fit_beside_the_label_follow() -> None:
    heard, _ = _in_threads(11, 100)
    assert all(rows == [list(range(rank, rank + 100)) for rank in range(11)] for rows in heard)


@pytest.mark.parametrize("num_values", [0, 12, 100])
@pytest.mark.parametrize("num_ranks", [2, 8, 9, 13, 64, pytest.param(1024, marks=pytest.mark.slow)])
def test_numbers_are_combined_of_all_ranks(num_ranks: int, num_values: int) -> None:
    heard, post = _in_threads(num_ranks, num_values, Agreements.combine)
    rows = [range(rank, rank + num_values) for rank in range(num_ranks)]
    any_bits = [functools.reduce(operator.or_, column) for column in zip(*rows, strict=True)]
    assert heard == [Combined(list(rows[0]), list(rows[-1]), any_bits)] * num_ranks
    assert {len(sent) for sent in post.sent.values()} == {agreements.messages_of(num_ranks, num_values)}
    if num_ranks > agreements.FEW_RANKS:  # three for each number, however many ranks there are
        assert max(each for sent in post.sent.values() for each in sent) == 3 * 8 * max(32, num_values - 30)


def test_one_rank_agrees_with_itself() -> None:
    alone = AloneCollectives(3, torch.device("cpu"), Ledger())
    alone.meet("here")
    alone.meet("here", 5.0)
    assert alone.agree([1, 2], "numbers") == [[1, 2]]
    assert alone.agree_on_floats([0.5], "numbers") == [[0.5]]
    assert alone.combine([1, 2], "numbers") == Combined([1, 2], [1, 2], [1, 2])


# --- among processes, as if four were many --------------------------------------------------------------------------


def _make(timeout_s: float) -> Agreements:
    dist.barrier()
    ranks = [rank for (rank,) in cells_of(None, 1)[0]]
    return make_collectives("pairwise", ranks, torch.device("cpu"), timeout_s, Ledger())


def _agree() -> list[list[list[int]]]:
    with mock.patch.object(agreements, "FEW_RANKS", 1):
        made = _make(20.0)
        return [made.agree([made.rank - 7] * count, f"{count} numbers") for count in (0, 1, 30, 31, 200)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_processes_hear_of_each_other(num_ranks: int) -> None:
    expected = [[[rank - 7] * count for rank in range(num_ranks)] for count in (0, 1, 30, 31, 200)]
    assert run_ranks(_agree, num_ranks) == [expected] * num_ranks


def _message(made: Agreements, label: str) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        made.meet(label)
    return str(caught.value), time.monotonic() - began


def _differ() -> str:
    with mock.patch.object(agreements, "FEW_RANKS", 1):
        made = _make(20.0)
        return _message(made, "load" if made.rank == 1 else "save")[0]


def test_processes_at_different_calls_name_each_other() -> None:
    for rank, message in enumerate(run_ranks(_differ, 4)):
        own, other, at = ("load", "save", 0) if rank == 1 else ("save", "load", 1)
        assert f"rank {rank} is at {own!r} (0 values), but rank {at} is at {other!r} (0 values)" in message


def _miss(late: int, how: str, timeout_s: float) -> tuple[str, float]:
    with mock.patch.object(agreements, "FEW_RANKS", 1), mock.patch.object(roll_call, "_GRACE_S", 1.0):
        made = _make(20.0)
        made.meet("of all")
        made.timeout_s = timeout_s
        if made.rank != late:
            time.sleep(0.3 * made.rank)  # they come one after another, so that the first ones give up first
            return _message(made, "the end of backward")
        if how == "dies":
            time.sleep(1)
            os._exit(1)
        return "", 0.0


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_process_that_does_not_come_is_named_by_all(late: int) -> None:
    for rank, (message, seconds) in enumerate(run_ranks(_miss, 4, late, "stays away", 2.0)):
        if rank != late:
            assert f"rank {rank} waited 2 s for rank {late} in agreement" in message or (
                f"rank {rank} lost rank {late} in agreement" in message
            )
            assert seconds < 2 + 4, (rank, seconds)


def test_process_that_dies_is_named_by_all_long_before_the_timeout() -> None:
    found = run_ranks(_miss, 4, 3, "dies", 60.0, expect_failure=True, timeout_s=30.0)
    for rank, each in enumerate(found[:3]):
        assert not isinstance(each, RankFailure), each
        message, seconds = each
        assert f"rank {rank} lost rank 3 in agreement of 'the end of backward'" in message
        assert seconds < 2 + 4, (rank, seconds)


# --- among as many processes as take the long way by themselves -------------------------------------------------------

_MANY = """
import os, sys, time, torch, torch.distributed as dist
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.groups.select import make_collectives
from hf_zero.errors import CollectiveError

rank, count, store, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count)
made = make_collectives("pairwise", range(count), torch.device("cpu"), 60.0, Ledger())
assert made.agree([rank], "all") == [[each] for each in range(count)]
made.timeout_s = 60.0 if how == "dies" else 5.0
if rank == 5:
    time.sleep(1 if how == "dies" else 20)
    os._exit(0)
try:
    made.meet("the end of backward")
except CollectiveError as error:
    print(str(error).split(".")[0], flush=True)
time.sleep(8)  # else others see the end of this process
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "stays away"])
def test_missing_one_of_twelve_is_named_by_all_others(how: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", _MANY]
    processes = [
        subprocess.Popen(
            [*words, str(rank), "12", str(tmp_path / "store"), how], stdout=subprocess.PIPE, env=ENVIRONMENT, text=True
        )
        for rank in range(12)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    what = "lost" if how == "dies" else "waited 5 s for"
    for rank, text in enumerate(said):
        if rank != 5:
            assert f"rank {rank} {what} rank 5 in agreement" in text or f"rank {rank} lost rank 5 in" in text, said
