"""What is measured for `hf-zero plan --measure`, on trainings and exchanges whose times are made up."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

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


@on_ranks(2)
@pytest.mark.parametrize(("layer_numel", "layers"), [(2**26, 2), (2**23, 5), (2**20, 12)])
def test_what_a_layer_takes_is_measured_of_as_many_as_are_quickly_computed(layer_numel: int, layers: int) -> None:
    class Training:
        """Passes of 1 s and 2 s, 0.1 s and 0.2 s for each layer, and 0.05 s more on the slower rank."""

        device = None

        def __init__(self, config: Any, num_layers: int, given: dict[str, Any], device: Any) -> None:
            self.numel, made = 1000 + layer_numel * num_layers, num_layers
            self.once = lambda: (1 + (0.1 + late) * made, 2 + 0.2 * made)
            numbers.append(num_layers)

    numbers: list[int] = []
    late = 0.05 * dist.get_rank()
    with mock.patch.object(worker, "_Training", Training):
        one, layer = worker._passes(Training(None, 1, {}, None), SimpleNamespace(num_hidden_layers=12), {})
    assert numbers[-1] == layers
    assert one == pytest.approx([1.15, 2.2])
    assert layer == pytest.approx([0.15, 0.2])
