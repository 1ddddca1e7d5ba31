"""Whole weights that somebody keeps beyond their module's call."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import torch_compat
from hf_zero.engine.units.storage.residency import Tenure
from tests.engine.twins import EXCHANGES, SHARDED, Net, Twins
from tests.ranks import on_ranks


def _keep_forward(module: nn.Module, kept: list[Tensor]) -> Any:
    return module.register_forward_hook(lambda module, args, output: kept.append(module.weight))


def _keep_backward(module: nn.Module, kept: list[Tensor]) -> Any:
    return module.register_full_backward_hook(lambda module, given, got: kept.append(module.weight))


def _keep_in_attribute(module: nn.Module, kept: list[Tensor]) -> Any:
    def keep(module: nn.Module, args: Any) -> None:
        module.last = [module.weight]
        kept.append(module.weight)

    return module.register_forward_pre_hook(keep)


@pytest.mark.parametrize("keep", [_keep_forward, _keep_backward, _keep_in_attribute])
@on_ranks(2, stage=SHARDED, collectives=EXCHANGES, prefetch_bytes=[0, 2**20])
def test_a_weight_that_somebody_keeps_can_be_read_after_its_call(
    keep: Any, stage: int, collectives: str, prefetch_bytes: int
) -> None:
    twins = Twins(stage, collectives=collectives, prefetch_bytes=prefetch_bytes)
    before = twins.reference.blocks[1].up.weight.detach().clone()
    kept: list[Tensor] = []
    handle = keep(twins.model.blocks[1].up, kept)
    twins.backward()
    twins.backward_reference()
    assert len(kept) == 1 and torch.equal(kept[0].detach(), before)
    twins.update()
    twins.step()
    handle.remove()
    twins.step()
    assert all(torch.isfinite(weight.detach()).all() for weight in kept)


@on_ranks(2, prefetch_bytes=[0, 2**20])
def test_memory_is_released_where_nobody_keeps_a_weight(prefetch_bytes: int) -> None:
    twins = Twins(3, Net, collectives="pairwise", prefetch_bytes=prefetch_bytes)
    twins.step(2)
    twins.assert_same_output()
    twins.assert_same_output()
    assert not [unit for unit in twins.engine.units if unit.tenure is Tenure.PINNED]


class Rows(nn.Module):
    """Returns a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self) -> Tensor:
        return self.weight[1:]


class UsesRows(nn.Module):
    """Computes with what a block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.rows()


@on_ranks(2)
def test_memory_is_released_where_the_first_forward_of_a_process_was_one_of_inference() -> None:
    torch_compat._counts_itself.cache_clear()
    torch_compat._no_memory.cache_clear()
    twins = Twins(3, UsesRows)
    with torch.inference_mode():
        twins.model(twins.own())
    twins.step(2)
    assert not [unit for unit in twins.engine.units if unit.tenure is Tenure.PINNED]


@on_ranks(2)
def test_memory_is_released_after_a_compilation_has_failed() -> None:
    torch.compiler.reset()  # or the code of an earlier job may be run
    model = torch.compile(lambda x: torch._dynamo.graph_break() or x + 1, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.ones(2))  # from then on, torch runs every frame of Python itself, and passes arguments differently
    twins = Twins(3)
    twins.step(2)
    assert not [unit for unit in twins.engine.units if unit.tenure is Tenure.PINNED]
