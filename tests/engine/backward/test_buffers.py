"""Buffers that forwards change, beside DDP, which gives every rank those of rank 0."""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_zero as zero
from tests.engine.twins import STAGES
from tests.ranks import on_ranks


class Normaliser(nn.Module):
    """Divides by a running mean; its buffers are of several types, and change in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("has_begun", torch.tensor(False))
        self.register_buffer("squares", torch.zeros(2, dtype=torch.float64).t())
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.data.mul_(0.5).add_(x.detach().abs().mean(0) + 0.5)  # unseen by version counters
            self.squares = self.squares + float(x.detach().pow(2).mean())  # type: ignore[has-type]
            self.seen += len(x)
            self.has_begun.fill_(True)
        return x / (self.mean + self.squares.sum().float())


def _make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), Normaliser(), nn.Linear(3, 2))


def _losses(model: nn.Module, num_micros: int) -> list[float]:
    """Of training, and of an evaluation of the same samples on every rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw, found = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(4):
        for micro in range(num_micros):
            is_last = micro + 1 == num_micros
            with contextlib.nullcontext() if is_last else model.no_sync():  # type: ignore[operator]
                loss = model(torch.randn(6, 5, generator=draw) * (1 + dist.get_rank())).pow(2).mean()
                loss.backward()
            found.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    found += [float(buffer.double().sum()) for buffer in model.buffers()]  # each rank's own until the next forward
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm1d)):
        for buffer in (norm.running_mean, norm.running_var):  # as scripts do, of which the next forward leaves it
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
    model.eval()
    with torch.no_grad():
        found.append(float(model(torch.linspace(-1, 1, 20).view(4, 5)).sum()))
    return found


@on_ranks(2, stage=STAGES, case=[(1, True), (2, True), (1, False)])
def test_buffers_are_those_of_ddp(stage: int, case: tuple[int, bool]) -> None:
    num_micros, broadcasts = case
    expected = _losses(DistributedDataParallel(_make(), broadcast_buffers=broadcasts), num_micros)
    model = _make()
    engine = zero.shard_model(model, {"stage": stage, "broadcast_buffers": broadcasts})
    engine.world.ledger.reset()
    found = _losses(model, num_micros)
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6), (found, expected)
    evaluations = [each for (each,) in engine.world.everyone.agree_on_floats([found[-1]], "evaluations")]
    assert (evaluations[0] == evaluations[1]) is broadcasts
    assert engine.world.ledger.total("broadcast").calls == (4 + 3 if broadcasts else 0)  # and at forwards that train


class Centred(nn.Module):
    """Moves a buffer on after each step, by what its last forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x)
        self.last.copy_(found.detach().mean(0))
        return found - self.centre

    def move(self) -> None:
        self.centre.lerp_(self.last, 0.5)


@on_ranks(2, stage=STAGES)
def test_buffers_that_are_moved_on_after_a_step_are_those_of_rank_0_in_the_next(stage: int) -> None:
    found: list[list[float]] = []
    for wrap in (DistributedDataParallel, lambda model: zero.shard_model(model, stage) and None):
        torch.manual_seed(0)
        inner = Centred()
        model = wrap(inner) or inner
        optimizer, draw = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(dist.get_rank())
        losses = []
        for _ in range(4):
            loss = model(torch.randn(6, 5, generator=draw)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [float(loss), float(inner.centre.sum())]
            inner.move()
        found.append(losses)
    assert torch.allclose(*map(torch.tensor, found), rtol=1e-5, atol=1e-6), found


@on_ranks(2)
def test_nothing_is_sent_where_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model.register_buffer("table", torch.arange(4.0), persistent=False)
    model.register_buffer("packed", torch.zeros(2**20 + 1, dtype=torch.uint8))
    engine = zero.shard_model(model, {"stage": 2})
    engine.world.ledger.reset()
    model(torch.ones(2, 5)).sum().backward()
    assert engine.world.ledger.total("broadcast").calls == 0


@on_ranks(2, stage=[1, 3])
def test_a_forward_that_was_interrupted_on_one_rank_does_not_part_the_next(stage: int) -> None:
    model = _make()
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    model(torch.ones(6, 5)).sum().backward()
    hook = model[-1].register_forward_pre_hook(_interrupt) if dist.get_rank() else None
    with torch.no_grad(), contextlib.suppress(KeyboardInterrupt):
        model(torch.ones(6, 5))
    if hook is not None:
        hook.remove()
    model(torch.ones(6, 5)).sum().backward()


def _interrupt(module: nn.Module, args: object) -> None:
    raise KeyboardInterrupt
