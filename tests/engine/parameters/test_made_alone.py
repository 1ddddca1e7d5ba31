"""Values that one rank alone computes from parameters, and keeps over steps, beside the same code on the unsharded model."""

import copy
import gc
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hf_zero as zero
from hf_zero.engine.parameters.at_rest.known import values
from hf_zero.engine.ranks import apart
from tests.engine.twins import EXCHANGES, SHARDED, Twins
from tests.ranks import on_ranks

_Kept = Callable[[], Any]  # what there is to save by now
_Way = Callable[[nn.Module], Iterator[_Kept]]  # is moved on after each step


def _best(model: nn.Module) -> Iterator[_Kept]:
    """A copy of the first step's weights, and from the third step on of that one's."""
    best: dict[str, Tensor] = {}
    for step in range(6):
        if step in (0, 2):
            best = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        yield lambda kept=best: kept  # type: ignore[misc]


def _deep_copies(model: nn.Module) -> Iterator[_Kept]:
    """All weights so far."""
    history = []
    while True:
        history.append(copy.deepcopy(model.state_dict()))
        yield lambda: history


def _by_hand(model: nn.Module) -> Iterator[_Kept]:
    """An average in the place of the last one, in another dtype in between."""
    means = {name: param.detach().clone() for name, param in model.named_parameters()}
    while True:
        yield lambda: means
        for name, param in model.named_parameters():
            means[name] = 0.75 * means[name] + param.detach().to(torch.bfloat16).float() * torch.tensor(0.25)


def _in_place(model: nn.Module) -> Iterator[_Kept]:
    """A model's copy that is moved on in place."""
    average = copy.deepcopy(model)
    while True:
        yield average.state_dict
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.5).add_(param, alpha=0.5)


def _lists(model: nn.Module) -> Iterator[_Kept]:
    """As libraries do, by lists: of two averages the second one begins later, and both end in one value."""
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))]
    for step in range(9):
        yield lambda: [average.state_dict() for average in averages]
        if step == 2:
            averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        for average in averages:
            average.update_parameters(model)


_WAYS: dict[str, _Way] = {
    "best": _best, "deep copies": _deep_copies, "by hand": _by_hand, "in place": _in_place, "lists": _lists
}  # fmt: skip


def _saved(kept: _Kept) -> Any:
    file = io.BytesIO()
    torch.save(kept(), file)
    file.seek(0)
    return torch.load(file)


@on_ranks(2, 3, stage=SHARDED, way=list(_WAYS), collectives=EXCHANGES)
def test_what_one_rank_keeps_over_steps_is_there(stage: int, way: str, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives)
    alone = dist.get_world_size() - 1
    ways = [_WAYS[way](model) for model in (twins.model, twins.reference)]
    for step in range(5):
        twins.step()
        expected = _saved(next(ways[1]))
        if twins.rank != alone:
            continue
        kept = next(ways[0])
        if step in (0, 3, 4):  # right after it was made, and after others that nobody has read
            torch.testing.assert_close(_saved(kept), expected)
    dist.barrier()


@on_ranks(2, stage=[1, 3])
def test_an_average_of_one_rank_is_swapped_in_saved_and_swapped_out(stage: int) -> None:
    twins = Twins(stage, collectives="pairwise")
    averages = [[p.detach().clone() for p in model.parameters()] for model in (twins.model, twins.reference)]
    for _ in range(3):
        twins.step()
        for means, model in zip(averages, (twins.model, twins.reference), strict=True):
            if twins.rank and model is twins.model:
                continue
            for mean, param in zip(means, model.parameters(), strict=True):
                mean.lerp_(param.detach(), 0.5)
        if twins.rank == 0:
            before = [param.detach().clone() for param in twins.model.parameters()]
            for param, mean in zip(twins.model.parameters(), averages[0], strict=True):
                param.data.copy_(mean)
            torch.testing.assert_close([*_saved(twins.model.state_dict).values()], averages[1])
            for param, old in zip(twins.model.parameters(), before, strict=True):
                param.data.copy_(old)
    dist.barrier()


@on_ranks(2, stage=[1, 3])
def test_peers_keep_what_a_rank_keeps_and_no_longer(stage: int) -> None:
    twins = Twins(stage)
    kept = values._values_of(twins.engine.world.serving)
    mine: list[Any] = []
    for step in range(4):
        twins.step()
        if twins.rank == 0 and step < 2:
            mine[:] = [param.detach() * (step + 2) for param in twins.model.parameters()]
        if twins.rank == 1:
            assert len(kept._adopted) == (len([*twins.model.parameters()]) if step else 0)
    mine.clear()
    gc.collect()
    twins.step()
    assert not kept._adopted and not kept.recipes


def _said_in_a_step(twins: Twins) -> int:
    counts = twins.engine.world.everyone.counts.by_kind
    before = counts["agreement"]
    twins.step()
    return counts["agreement"] - before


@on_ranks(2)
def test_what_cannot_be_made_is_told_where_it_is_read_and_nowhere_else() -> None:
    """One of two values is of weights that an edit has changed since; ranks speak of it once."""
    twins = Twins(3)
    usual = _said_in_a_step(twins)
    assert _said_in_a_step(twins) == usual
    kept = []
    if twins.rank == 0:
        kept = [twins.model.head.weight.detach() * 2]
    with zero.GatheredParameters(twins.model.head), torch.no_grad():
        twins.model.head.weight.mul_(0.5)
        twins.reference.head.weight.mul_(0.5)
    expected = twins.reference.head.weight.detach() * 3
    if twins.rank == 0:
        kept.append(twins.model.head.weight.detach() * 3)
    assert _said_in_a_step(twins) > usual
    assert _said_in_a_step(twins) == usual
    if twins.rank == 0:
        torch.testing.assert_close(kept[1].full_tensor(), expected)
        with pytest.raises(zero.CollectiveError, match="it has no such value"):
            kept[0].tolist()
    dist.barrier()


@on_ranks(2, stage=[1, 3])
def test_what_is_computed_after_a_swap_is_kept(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank swaps values in and out alone, and computes from what it has then; while they are in, each rank has its own."""
    monkeypatch.setattr(apart, "_ticks", itertools.count(1))  # ranks count alike
    twins = Twins(stage, collectives="pairwise")
    twins.step()
    weight, expected = twins.model.head.weight, twins.reference.head.weight.detach().clone()
    dist.barrier()
    kept: list[Tensor] = []
    with torch.no_grad():
        for alone in range(2):  # one after the other, so that each changes it alone
            if twins.rank == alone:
                before = weight.detach().clone()
                weight.copy_((2 + alone) * before)
                kept.append(weight.detach() * 1.0)
                weight.copy_(before)
                kept += [weight.detach() * 3.0, twins.model.head.bias.detach() * 3.0]
            dist.barrier()
        if twins.rank == 0:
            with pytest.raises(zero.CollectiveError, match="it has no such value"):
                kept[0].tolist()
            torch.testing.assert_close(kept[1].full_tensor(), expected * 3)
    twins.step()
    if twins.rank == 0:
        torch.testing.assert_close(kept[1].full_tensor(), expected * 3)
    dist.barrier()


@on_ranks(2)
def test_values_may_be_no_numbers(stage: int = 3) -> None:
    twins = Twins(stage)
    with zero.GatheredParameters(twins.model.head), torch.no_grad():
        twins.model.head.weight.fill_(torch.nan)
    kept = [twins.model.head.weight.detach().clone() for _ in range(2)]
    if twins.rank == 0:
        assert kept[0].full_tensor().isnan().all()
    dist.barrier()


@on_ranks(2)
def test_what_a_rank_cannot_make_is_an_error_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(3)
    twins.step()
    kept = twins.model.head.weight.detach() * 2 if twins.rank == 0 else None

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(values.Recipe, "make", fail)
    twins.step()
    monkeypatch.undo()
    twins.step()
    if kept is not None:
        with pytest.raises(zero.CollectiveError, match="it has no such value"):
            kept.tolist()
    dist.barrier()


@on_ranks(2)
def test_calls_beyond_the_limit_are_forgotten_but_for_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_MOST_RECIPES", 10)
    twins = Twins(3)
    twins.step()
    kept = None
    if twins.rank == 0:
        kept = twins.model.head.weight.detach() * 2
        for number in range(25):
            twins.model.head.weight.detach() * number
    expected = twins.reference.head.weight.detach() * 2
    twins.step()
    if kept is not None:
        torch.testing.assert_close(kept.full_tensor(), expected)
    dist.barrier()
