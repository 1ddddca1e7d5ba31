"""Who may read a rank's memory."""

import gc
import os
from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero.comm.groups import cells_of
from hf_zero.comm.host import memory
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.select import make_collectives
from tests.ranks import on_ranks


@pytest.mark.parametrize(
    ("parents", "reader"),
    [({10: 5, 11: 5, 12: 5}, 5), ({10: 5, 11: 6}, 11), ({10: 1, 11: 1}, 11), ({10: 5, 11: 6, 12: 5}, None)],
)
def test_reader_is_the_launcher_or_the_only_peer(parents: dict[int, int], reader: int | None) -> None:
    assert memory.reader_of(10, parents) == reader


@on_ranks(2)
def test_leave_to_read_is_given_to_the_peers_and_taken_back() -> None:
    given: list[int] = []

    def let_read(pid: int) -> Any:
        given.append(pid)

    with mock.patch.object(memory, "let_read", let_read):
        made = make_collectives("host", [rank for (rank,) in cells_of(None, 1)[0]], torch.device("cpu"), 20.0, Ledger())
        assert made.name == "host" and given == [os.getppid()]
        del made
        gc.collect()
    assert given == [os.getppid(), 0]
