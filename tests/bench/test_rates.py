"""What is measured for `hf-zero plan --measure`, on trainings and exchanges whose times are made up."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.bench.rates import worker
from tests.ranks import on_ranks


def _training(under_way: list[int], slower: float) -> Any:
    """One that takes a second, and `slower` more for each exchange beside it."""
    return SimpleNamespace(seconds=lambda times: times + slower * len(under_way))


@on_ranks(2)
def test_what_an_exchange_takes_is_measured_beside_a_training() -> None:
    collectives: Any = SimpleNamespace(meet=lambda label: dist.barrier(), settle=lambda: None)
    under_way: list[int] = []
    begun: list[int] = []

    def begin() -> Any:
        begun.append(1)
        under_way.append(1)
        return SimpleNamespace(wait=under_way.pop)

    # The ranks have measured other times: they begin as many exchanges all the same, which end within the training.
    for slower, taken in ((0.05, 0.05), (-0.05, 0.0), (9.0, 0.3)):
        begun.clear()
        found = worker._taken(collectives, begin, 0.2 + 0.1 * dist.get_rank(), _training(under_way, slower))
        assert found == pytest.approx(taken)
        assert len(begun) == worker._PAIRS * int(1 / (worker._BESIDE * 0.3))
        assert not under_way


@on_ranks(2)
def test_the_slowest_rank_of_each_run_counts() -> None:
    mine = [[1.0, 5.0], [4.0, 2.0]] if dist.get_rank() else [[3.0, 1.0], [2.0, 6.0]]
    assert worker._of_the_slowest(mine).tolist() == [[3.0, 5.0], [4.0, 6.0]]
