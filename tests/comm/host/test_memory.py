"""Who may read a rank's memory."""

import gc
import itertools
import os
from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero.comm.groups.process_groups import cells_of
from hf_zero.comm.groups.select import make_collectives
from hf_zero.comm.host import memory
from hf_zero.comm.ledger import Ledger
from tests.ranks import on_ranks


@pytest.mark.parametrize(
    ("parents", "reader"),
    [({10: 5, 11: 5, 12: 5}, 5), ({10: 5, 11: 6}, 11), ({10: 1, 11: 1}, 11), ({10: 5, 11: 6, 12: 5}, None)],
)
def test_reader_is_the_launcher_or_the_only_peer(parents: dict[int, int], reader: int | None) -> None:
    assert memory.reader_of(10, parents) == reader


@pytest.mark.parametrize("at_once", [3001, 2**20])
def test_all_pieces_are_read_however_few_bytes_the_system_copies_at_once(at_once: int) -> None:
    source, target = torch.arange(12000, dtype=torch.int32), torch.zeros(12000, dtype=torch.int32)
    sizes = [4 * (number % 4) for number in range(5000)]  # some have none, and more than one call takes
    sizes[1000] = 8000  # more than the system copies at once
    places = list(itertools.accumulate(sizes, initial=0))
    moves = [
        (source.data_ptr() + place, target.data_ptr() + place, size) for place, size in zip(places, sizes, strict=False)
    ]
    libc = memory._libc()

    def read(pid: int, here: Any, num_here: int, there: Any, num_there: int, flags: int) -> int:
        size, taken = 0, 0
        while taken < num_there and size + there[taken].num_bytes <= at_once:
            size, taken = size + there[taken].num_bytes, taken + 1
        if not taken:  # a part of one
            here[0].num_bytes = there[0].num_bytes = at_once
            taken = 1
        return int(libc.process_vm_readv(pid, here, taken, there, taken, flags))

    with mock.patch.object(memory, "_libc", lambda: mock.Mock(process_vm_readv=read)):
        memory.read(os.getpid(), moves)
    assert torch.equal(target[: places[-1] // 4], source[: places[-1] // 4]) and not target[places[-1] // 4 :].any()


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
