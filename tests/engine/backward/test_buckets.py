"""Stage 0: gradients are averaged in buckets while the backward goes on, whatever order they come in."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hf_zero as zero
from hf_zero.engine.backward.buckets import WholeReducer
from tests.engine.twins import Net, Twins, batch, square_loss
from tests.ranks import on_ranks

_SMALL = {"stage": 0, "bucket_bytes": 40}  # several buckets


class Tied(nn.Module):
    """One layer runs several times, each time under a checkpoint of its own."""

    def __init__(self, times: int = 3) -> None:
        super().__init__()
        self.enter, self.shared, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(self.times):
            x = checkpoint(self.shared, x, use_reentrant=True).tanh()
        return self.head(x)


class TiedAlone(nn.Module):
    """One matrix, a bucket by itself, runs three times, each time under a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.shared, self.times = nn.Linear(3, 5), nn.Linear(5, 5, bias=False), 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(self.times):
            x = checkpoint(self.shared, x, use_reentrant=True).tanh()
        return x


class Choosing(nn.Module):
    """Which of four layers are used, the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, which: tuple[int, ...]) -> Tensor:
        for index in which:
            x = self.layers[index](x).tanh()
        return x


Chosen = tuple[Tensor, tuple[int, ...]]


def _chosen_loss(model: nn.Module, own: Chosen) -> Tensor:
    return model(*own).pow(2).mean()


def _draw_choice(step: int, rank: int) -> Chosen:
    return batch(step, rank), ((rank + step // 2) % 3 if step < 6 else step % 2,)


def _draw_crossing(step: int, rank: int) -> Chosen:
    """Rank 0 has used the last bucket and not the next, the others the next ones and not the last."""
    return batch(step, rank), (0, 1, 3) if step < 2 else (2, 3) if rank == 0 else (0, 1)


_KINDS = [
    *("plain", "several times", "several times later", "other layers", "crossing", "several backwards"),
    *("hooked several times", "dropped several times", "dropped by a hook"),
]


@on_ranks(2, 3, kind=_KINDS)
def test_trains_as_one_process(kind: str) -> None:
    match kind:
        case "plain":
            Twins(make=Net, **_SMALL).step(4)
        case "several times":
            Twins(make=Tied, **_SMALL).step(4)
        case "several times later":
            twins = Twins(make=partial(Tied, 1), **_SMALL)
            twins.step(2)
            twins.model.times = twins.reference.times = 3
            twins.step(2)
        case "other layers":
            twins = Twins(make=Choosing, loss=_chosen_loss, draw=_draw_choice, **_SMALL)
            twins.step(9)
            assert all(p.grad is None for p in twins.model.layers[3].parameters())
        case "crossing":
            Twins(make=Choosing, loss=_chosen_loss, draw=_draw_crossing, **_SMALL).step(4)
        case "several backwards":
            _accumulate()
        case "hooked several times":
            _halve()
        case "dropped several times":
            twins = Twins(make=TiedAlone, **_SMALL)
            twins.step(2)
            for model in (twins.model, twins.reference):
                model.shared.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            twins.step(2)
        case "dropped by a hook":
            twins = Twins(make=Net, **_SMALL)
            twins.step(2)
            for model in (twins.model, twins.reference):
                model.head.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            twins.backward()
            twins.backward_reference()
            assert twins.model.head.bias.grad is None
            twins.update()
            twins.step(2)


def _accumulate() -> None:
    """Micro-batches with and without an exchange, in several orders."""
    twins = Twins(make=Net, **_SMALL)
    twins.step()
    for pattern in ("ss", "ns", "sns", "nns"):
        for place, kind in enumerate(pattern):
            with twins.engine.no_sync() if kind == "n" else contextlib.nullcontext():
                square_loss(twins.model, batch(10 * place, twins.rank)).backward()
            for rank in range(twins.num_ranks):
                (square_loss(twins.reference, batch(10 * place, rank)) / twins.num_ranks).backward()
        twins.update()


def _halve() -> None:
    """A hook sees what has been added up so far, as in a process alone; the mean is over what it leaves."""

    def halve(p: nn.Parameter) -> None:
        p.grad.mul_(0.5)  # type: ignore[union-attr]

    twins = Twins(make=TiedAlone, **_SMALL)
    twins.model.times = 1
    for step in range(2):  # in a bucket, until it has a hook
        twins.loss(twins.model, batch(step, twins.rank)).backward()
        twins.model.zero_grad()
    twins.model.times = 3
    twins.model.shared.weight.register_post_accumulate_grad_hook(halve)
    for step in range(3):
        twins.loss(twins.model, batch(step, twins.rank)).backward()
        alone = []
        for rank in range(twins.num_ranks):
            model = TiedAlone()
            model.load_state_dict(twins.reference.state_dict())
            model.shared.weight.register_post_accumulate_grad_hook(halve)
            twins.loss(model, batch(step, rank)).backward()
            alone.append(model.shared.weight.grad)
        torch.testing.assert_close(twins.model.shared.weight.grad, torch.stack(alone).mean(0))
        twins.model.zero_grad()


@on_ranks(2)
def test_exchanges_begin_while_gradients_still_come() -> None:
    twins = Twins(make=Net, **_SMALL)
    twins.step(2)
    events: list[str] = []
    sizes: list[int] = []
    arrived, all_reduce = WholeReducer.arrived, twins.engine.world.data.all_reduce

    def note_arrival(self: WholeReducer, *args: Any) -> None:
        events.append("gradient")
        arrived(self, *args)

    def note_exchange(tensors: list[Tensor], unit: str, divisor: int) -> Any:
        events.append("exchange")
        sizes.append(len(tensors))
        return all_reduce(tensors, unit, divisor)

    with (
        mock.patch.object(WholeReducer, "arrived", note_arrival),
        mock.patch.object(twins.engine.world.data, "all_reduce", note_exchange),
    ):
        twins.step()
    num_parameters = len(list(Net().parameters()))
    assert events.count("gradient") == sum(sizes) == num_parameters and len(sizes) > 3
    assert events.index("exchange") < num_parameters / 2
    after_the_last = events[len(events) - events[::-1].index("gradient") :]
    assert len(after_the_last) <= 2


@on_ranks(2)
def test_gradients_have_the_bits_of_ddp() -> None:
    twins = Twins(make=Net, **_SMALL)
    ddp = DistributedDataParallel(twins.reference)
    for step in range(3):
        for model in (twins.model, ddp):
            square_loss(model, batch(step, twins.rank)).backward()
        for left, right in zip(twins.model.parameters(), twins.reference.parameters(), strict=True):
            assert torch.equal(left.grad, right.grad)


def _fail(_: Tensor) -> None:
    raise ValueError("broken")


@on_ranks(2, 3, where=["here", "elsewhere", "on one rank"])
def test_a_backward_that_broke_off_leaves_nothing_behind(where: str) -> None:
    twins = Twins(make=Net, **_SMALL, timeout_s=20)
    twins.step(2)
    place = twins.rank if where == "elsewhere" else 0
    if where != "on one rank" or twins.rank == 0:
        handle = twins.model.blocks[place].up.weight.register_hook(_fail)
        with pytest.raises(ValueError, match="broken"):
            square_loss(twins.model, twins.own()).backward()
        handle.remove()
        assert twins.model.head.weight.grad.isnan().all()  # its bucket had begun
    if where == "on one rank":
        twins.optimizers[0].zero_grad()
        with pytest.raises(zero.CollectiveError, match=r"broke off on ranks \[0\]"):
            square_loss(twins.model, twins.own()).backward()
    twins.optimizers[0].zero_grad()
    twins.step(2)


@on_ranks(2)
def test_training_goes_on_after_ranks_have_trained_other_parameters() -> None:
    twins = Twins(make=Net, **_SMALL)
    twins.step(2)
    frozen = twins.model.blocks[twins.rank]
    frozen.requires_grad_(False)
    with pytest.raises(zero.PartitionError, match="requires_grad"):
        square_loss(twins.model, twins.own()).backward()
    frozen.requires_grad_(True)
    twins.optimizers[0].zero_grad()
    twins.step(2)
