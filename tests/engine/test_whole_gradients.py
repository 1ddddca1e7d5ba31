"""Stage 0: gradients are averaged in buckets while the backward goes on, whatever order they come in."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hf_zero.engine.whole_gradients import WholeReducer
from tests.engine.twins import Net, Twins, square_loss
from tests.ranks import run_ranks

_SMALL = {"stage": 0, "bucket_bytes": 40}  # several buckets


class Tied(nn.Module):
    """One layer runs three times, each time under a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.shared, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(3):
            x = checkpoint(self.shared, x, use_reentrant=True).tanh()
        return self.head(x)


class Choosing(nn.Module):
    """Which of three layers is used, the caller says; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)


def _chosen_loss(model: nn.Module, own: tuple[Tensor, int]) -> Tensor:
    x, which = own
    return model(x, which).pow(2).mean()


def _draw_choice(rank: int, step: int) -> tuple[Tensor, int]:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, (rank + step // 2) % 3 if step < 6 else step % 2


def _train(kind: str) -> None:
    match kind:
        case "plain":
            Twins(make=Net, **_SMALL).step(4)
        case "several times":
            Twins(make=Tied, **_SMALL).step(4)
        case "other layers":
            twins = Twins(make=Choosing, loss=_chosen_loss, draw=_draw_choice, **_SMALL)
            twins.step(9)
            assert all(p.grad is None for p in twins.model.layers[3].parameters())
        case "several backwards":
            _accumulate()
        case "dropped by a hook":
            twins = Twins(make=Net, **_SMALL)
            twins.step(2)
            for model in (twins.model, twins.reference):
                model.head.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            twins.loss(twins.model, twins.own()).backward()
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
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * place + twins.rank))
            if kind == "n":
                with twins.engine.no_sync():
                    square_loss(twins.model, x).backward()
            else:
                square_loss(twins.model, x).backward()
            for rank in range(twins.num_ranks):
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * place + rank))
                (square_loss(twins.reference, x) / twins.num_ranks).backward()
        twins.update()


@pytest.mark.parametrize("kind", ["plain", "several times", "other layers", "several backwards", "dropped by a hook"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_trains_as_one_process(kind: str, num_ranks: int) -> None:
    run_ranks(_train, num_ranks, kind)


def _order() -> tuple[list[str], list[int]]:
    """What happened in the third backward, in order, and how many gradients each exchange had."""
    twins = Twins(make=Net, **_SMALL)
    twins.step(2)
    events: list[str] = []
    sizes: list[int] = []
    arrived, all_reduce = WholeReducer.arrived, twins.engine.world.data.all_reduce

    def note_arrival(self: WholeReducer, *args: Any) -> None:
        events.append("gradient")
        arrived(self, *args)

    def note_exchange(tensors: list[Tensor], unit: str) -> Any:
        events.append("exchange")
        sizes.append(len(tensors))
        return all_reduce(tensors, unit)

    with (
        mock.patch.object(WholeReducer, "arrived", note_arrival),
        mock.patch.object(twins.engine.world.data, "all_reduce", note_exchange),
    ):
        twins.step()
    return events, sizes


def test_exchanges_begin_while_gradients_still_come() -> None:
    for events, sizes in run_ranks(_order, 2):
        num_parameters = len(list(Net().parameters()))
        assert events.count("gradient") == sum(sizes) == num_parameters and len(sizes) > 3
        assert events.index("exchange") < num_parameters / 2
        after_the_last = events[len(events) - events[::-1].index("gradient") :]
        assert len(after_the_last) <= 2


def _like_ddp() -> bool:
    """The bits of gradients, beside DDP's, on two ranks."""
    twins = Twins(make=Net, **_SMALL)
    ddp = DistributedDataParallel(twins.reference)
    for step in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for model in (twins.model, ddp):
            square_loss(model, x).backward()
        pairs = zip(twins.model.parameters(), twins.reference.parameters(), strict=True)
        if not all(torch.equal(left.grad, right.grad) for left, right in pairs):
            return False
    return True


def test_gradients_have_the_bits_of_ddp() -> None:
    assert run_ranks(_like_ddp, 2) == [True] * 2


def _break_off() -> None:
    """A backward that raises on all ranks leaves nothing behind that the next one could trip over."""
    twins = Twins(make=Net, **_SMALL)
    twins.step(2)

    def fail(_: Tensor) -> None:
        raise ValueError("broken")

    handle = twins.model.blocks[0].up.weight.register_hook(fail)
    with pytest.raises(ValueError, match="broken"):
        square_loss(twins.model, twins.own()).backward()
    handle.remove()
    assert twins.model.head.weight.grad is not None  # its bucket had begun
    twins.optimizers[0].zero_grad()
    twins.step(2)


def test_a_backward_that_broke_off_leaves_nothing_behind() -> None:
    run_ranks(_break_off, 2)
