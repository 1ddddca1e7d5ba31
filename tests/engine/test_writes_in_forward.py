"""What a module writes into its own weights during its forward, beside the same code on the unsharded model."""

import copy
import io
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, assert_same
from tests.ranks import on_ranks


class Codebook(nn.Module):
    """Moves its codes while it trains; they get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            nearest = (x @ self.codes.T).argmax(-1)
        found = self.codes[nearest]
        if self.training:
            self.codes.data.mul_(0.9).add_(torch.arange(4.0), alpha=0.1)
            self.codes.data[1] = 0.25
        return x + 0.1 * (found + self.codes.sum(0))


class Normalised(nn.Module):
    """Keeps its rows at length 1, by assigning them, and its temperature below a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.temperature = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        self.temperature.data.clamp_(max=1.5)
        self.weight.data = F.normalize(self.weight.data, dim=-1)
        return F.linear(x, self.weight).tanh() @ self.weight * self.temperature


class Scaled(nn.Module):
    """Writes in place under `no_grad`, by a method, by an index, and by a function of `nn.init`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(4, 4), nn.Parameter(torch.randn(7, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.copy_(self.linear.weight / self.linear.weight.norm())
            self.linear.bias.data[1:3] *= 0.5
            self.linear.bias[0] = 0.5
            nn.init.constant_(self.shift, 0.125)
        return self.linear(x) + self.shift.sum(0)


class Reading(nn.Module):
    """Writes into a table that it does not call before it does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.table.weight.data.mul_(0.5).add_(0.25)
        here = self.table.weight[1]
        rows = self.table(torch.arange(3))
        self.table.weight.data[5] = self.table.weight.data[0] * 0.5
        return x + here + rows.sum(0) + self.table.weight[5]


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 4), nn.Linear(4, 2)
        self.parts = nn.ModuleList([Codebook(), Normalised(), Scaled(), Reading()])
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for part in self.parts:
            is_repeatable = isinstance(part, Normalised) and self.checkpoints
            x = checkpoint(part, x, use_reentrant=False) if is_repeatable else part(x)
        return self.leave(x)


def draw(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


class Pair:
    """A partitioned model, and the unsharded one, whose forward sees all ranks' batches at once."""

    def __init__(self, make: Any = Writing, **config: Any) -> None:
        torch.manual_seed(0)
        self.reference = make()
        self.model = copy.deepcopy(self.reference)
        zero.shard_model(self.model, {"timeout_s": 20, **config})
        self.ranks = range(dist.get_world_size())
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (self.model, self.reference)]

    def step(self, count: int = 1) -> None:
        for step in range(count):
            batches = [draw(step, rank) for rank in self.ranks]
            self.model(batches[dist.get_rank()]).square().mean().backward()
            self.reference(torch.cat(batches)).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same(self.model, self.reference)

    def evaluate(self) -> None:
        x = draw(9, 9)
        for model in (self.model, self.reference):
            model.eval()
        with torch.no_grad():
            torch.testing.assert_close(self.model(x), self.reference(x))
        assert_same(self.model, self.reference)
        with torch.inference_mode():
            torch.testing.assert_close(self.model(x), self.reference(x))
        assert_same(self.model, self.reference)
        for model in (self.model, self.reference):
            model.train()


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_what_a_forward_writes_into_its_weights_stays(stage: int, collectives: str) -> None:
    pair = Pair(stage=stage, collectives=collectives, prefetch_bytes=2**20 if stage == 3 else 0)
    pair.step()
    pair.evaluate()
    pair.model.checkpoints = pair.reference.checkpoints = True
    pair.step()


@on_ranks(3, collectives=EXCHANGES)
def test_what_a_forward_writes_into_its_weights_stays_on_three_ranks(collectives: str) -> None:
    pair = Pair(stage=3, collectives=collectives, prefetch_bytes=0)
    pair.step(2)
    pair.evaluate()


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_rank_0_reads_alone_while_the_other_waits_in_a_forward_that_writes(stage: int, collectives: str) -> None:
    pair = Pair(stage=stage, collectives=collectives)
    pair.step()
    if dist.get_rank() == 0:
        time.sleep(0.3)  # until the other has written into its whole tensors
        weights, expected = (
            torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (pair.model, pair.reference)
        )
        torch.testing.assert_close(weights, expected)
        states, expected_states = (each.state_dict()["state"] for each in pair.optimizers)
        torch.testing.assert_close(states, expected_states)
    pair.step()


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_masters_keep_the_digits_that_a_forward_did_not_write(stage: int, collectives: str) -> None:
    """Modules compute in bfloat16, and write what fits into it."""
    torch.manual_seed(0)
    model = Writing()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero.shard_model(model, {"stage": stage, "collectives": collectives, "compute_dtype": "bfloat16", "timeout_s": 20})
    with torch.no_grad():
        model(draw(0, 0).bfloat16())
    after = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    assert torch.equal(after["enter.weight"], before["enter.weight"])
    codes, moved = after["parts.0.codes"], before["parts.0.codes"].bfloat16()
    moved.mul_(0.9).add_(torch.arange(4.0), alpha=0.1)[1] = 0.25
    assert torch.equal(
        codes, torch.where(moved == before["parts.0.codes"].bfloat16(), before["parts.0.codes"], moved.float())
    )
    assert after["parts.1.temperature"] == 1.5
    torch.testing.assert_close(after["parts.1.weight"].norm(dim=-1), torch.ones(5), rtol=1e-2, atol=0)


class Renormalised(nn.Module):
    """Shortens the rows that its batch asks for: every rank others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, max_norm=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class OfOwnBatch(Codebook):
    def forward(self, x: Tensor) -> Tensor:
        self.codes.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + self.codes.sum(0)


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_what_ranks_write_of_their_own_batches_is_an_error_on_all(stage: int, collectives: str) -> None:
    config = {"stage": stage, "collectives": collectives, "timeout_s": 20}
    model = OfOwnBatch()
    zero.shard_model(model, config)
    with pytest.raises(zero.UsageError, match="different values into 'codes'"):
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank())))
    table = Renormalised()
    zero.shard_model(table, config)
    with pytest.raises(zero.UsageError, match=r"'table.weight'"):
        table(torch.tensor([dist.get_rank(), 2]))


class InGraph(Codebook):
    """Writes where torch lets no parameter be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.codes.requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        self.codes.mul_(0.5)
        return x + self.codes.sum(0)


@on_ranks(2, stage=SHARDED)
def test_a_write_in_the_graph_is_an_error(stage: int) -> None:
    model = InGraph()
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    with pytest.raises(zero.UsageError, match="'codes' was changed in place"):
        model(torch.ones(3, 4))


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_writes_while_all_is_held_stay(stage: int, collectives: str) -> None:
    """As in generation, where modules see whole weights through many forwards."""
    pair = Pair(stage=stage, collectives=collectives)
    pair.step()
    x = draw(5, 5)
    with torch.no_grad(), zero.engine_of(pair.model).gathering.holding_all():
        for _ in range(3):
            torch.testing.assert_close(pair.model(x), pair.reference(x))
    assert_same(pair.model, pair.reference)
    pair.step()


@on_ranks(2, stage=SHARDED)
def test_weights_are_copied_and_pickled_inside_a_forward_as_plain_tensors(stage: int) -> None:
    kept: list[Any] = []

    def keep(module: nn.Module, args: Any) -> None:
        file = io.BytesIO()
        torch.save(module.weight, file)
        kept.extend(
            [torch.load(io.BytesIO(file.getvalue())), copy.deepcopy(module.weight.detach()), module.weight.data.clone()]
        )

    torch.manual_seed(0)
    model = Writing()
    before = model.leave.weight.detach().clone()
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    model.leave.register_forward_pre_hook(keep)
    with torch.no_grad():
        model(draw(0, 0))
    assert all(type(each) is Tensor and torch.equal(each, before) for each in kept)


class Edited(nn.Module):
    """Writes through views, or `.data`, of the weight of a part that it does not call before it has."""

    def __init__(self, by_data: bool = False) -> None:
        super().__init__()
        self.part, self.by_data = nn.Linear(3, 4), by_data

    def forward(self, x: Tensor) -> Tensor:
        weight = self.part.weight
        if self.by_data:
            weight.data.mul_(0.5)  # which autograd does not count
            return self.part(x) + self.part.weight.sum() + self.part.bias.sum()
        with torch.no_grad():
            weight[0].mul_(0.5)
            weight.view(-1)[3:5] = 0.25
            weight.t().add_(0.125)
            weight.detach().mul_(0.5)
        return self.part(x) + weight.sum()


@on_ranks(2, stage=SHARDED, prefetch_bytes=[0, 2**20], by_data=[False, True])
def test_views_of_another_modules_weight_are_written(stage: int, prefetch_bytes: int, by_data: bool) -> None:
    pair = Pair(lambda: Edited(by_data), stage=stage, collectives="pairwise", prefetch_bytes=prefetch_bytes)
    pair.step(3)
    pair.evaluate()


@on_ranks(2, stage=SHARDED)
def test_views_of_another_modules_shared_weight_are_told_how_to_write(stage: int) -> None:
    pair = Pair(Edited, stage=stage, collectives="host")
    with pytest.raises(zero.UsageError, match="write under"):
        pair.model(draw(0, 0))


class InNumPy(nn.Linear):
    """Reads its weight in NumPy, and writes there."""

    def __init__(self, way: str, writes: bool) -> None:
        super().__init__(3, 4)
        self.way, self.writes, self.seen = way, writes, 0.0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            array = {
                "itself": lambda: self.weight.numpy(),
                "detached": lambda: self.weight.detach().numpy(),
                "data": lambda: self.weight.data.cpu().numpy(),
                "copied": lambda: self.weight.detach().numpy().copy(),
            }[self.way]()
        self.seen = float(array.sum())
        if self.writes:
            array[:] *= 0.5
        return super().forward(x)


def _in_numpy(way: str, writes: bool) -> Any:
    return lambda: nn.Sequential(InNumPy(way, writes), nn.Linear(4, 4), nn.Linear(4, 2))


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES, way=["itself", "detached", "data", "copied"])
def test_what_numpy_reads_in_a_forward_is_right(stage: int, collectives: str, way: str) -> None:
    pair = Pair(_in_numpy(way, writes=False), stage=stage, collectives=collectives)
    for _ in range(3):
        pair.step()
        assert pair.model[0].seen == pytest.approx(pair.reference[0].seen, abs=1e-5)
    pair.evaluate()


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_what_numpy_writes_into_a_weight_itself_stays(stage: int, collectives: str) -> None:
    pair = Pair(_in_numpy("itself", writes=True), stage=stage, collectives=collectives)
    pair.step(3)
    pair.evaluate()


@on_ranks(2, prefetch_bytes=[0, 2**20], way=["detached", "data"])
def test_what_numpy_writes_unseen_is_told(prefetch_bytes: int, way: str) -> None:
    pair = Pair(_in_numpy(way, writes=True), stage=3, collectives="pairwise", prefetch_bytes=prefetch_bytes)
    before = [p.full_tensor() for p in pair.model.parameters()]
    with pytest.raises(zero.UsageError, match=r"through an array of NumPy.*`weight\.numpy\(\)`"):
        pair.model(draw(0, 0))
    torch.testing.assert_close([p.full_tensor() for p in pair.model.parameters()], before)
