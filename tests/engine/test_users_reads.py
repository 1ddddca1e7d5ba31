"""What users' code reads and computes from parameters, beside the same code on the unsharded model."""

import contextlib
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, STAGES, Net, Twins, batch, square_loss
from tests.ranks import on_ranks, run_ranks

# ---- reads -----------------------------------------------------------------------------------------------------------


class Reading(Net):
    """Reads parameters of modules that it does not call, in the root's forward, in another module, in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.extra = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.reader = Reader(self.table)

    def forward(self, x: Tensor, checkpointing: str = "") -> Tensor:
        x = self.enter(x) @ self.extra[0].weight + self.extra[1].bias + self.frozen.weight.sum(0)
        x = x + self.table.weight[:4].mean(0)
        for block in self.blocks:
            x = self._run(block, x, checkpointing)
        x = self._run(self.reader, x, checkpointing)
        weight = self.head.weight
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        return nn.functional.linear(x, weight, self.head.bias) + weight.sum()

    def _run(self, module: nn.Module, x: Tensor, checkpointing: str) -> Tensor:
        if not checkpointing:
            return module(x)
        return checkpoint(module, x, use_reentrant=checkpointing == "reentrant")


class Reader(nn.Module):
    """Reads the weight of a module that lies elsewhere."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.tables = [table]  # not its child
        self.mix = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) + (x @ self.tables[0].weight.t()).tanh().sum(-1, keepdim=True)


@pytest.mark.parametrize("checkpointing", ["", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("prefetch_bytes", [0, pytest.param(2**20, marks=pytest.mark.slow)])
@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_parameters_read_outside_their_modules_are_whole_and_trained(
    stage: int, collectives: str, prefetch_bytes: int, checkpointing: str
) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, checkpointing).pow(2).mean() * 0.01 + model(x * 2).abs().mean() * 0.01

    twins = Twins(stage, Reading, loss, collectives=collectives, prefetch_bytes=prefetch_bytes)
    twins.step(2)
    twins.assert_same_output()
    loss(twins.model, twins.own())  # a graph that is dropped
    twins.step()
    assert isinstance(twins.model.head.weight, DTensor)  # at rest


@on_ranks(2, stage=SHARDED)
def test_full_tensor_and_computed_values_outside_a_forward_are_whole_and_reduced(stage: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model.blocks(x) if isinstance(model.blocks, nn.Sequential) else model(x)
        weight = model.head.weight
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        penalty = model.enter.weight.pow(2).sum()
        shrunk = 0.1 * model.enter.weight.t().exp() + torch.ones(3, 1)
        return (hidden @ weight).pow(2).mean() + penalty + shrunk.max() + model.head.weight[1:].norm()

    twins = Twins(stage, loss=loss)
    twins.step()
    given = torch.ones(2, twins.reference.head.weight.shape[1])
    here, there = (nn.functional.linear(given, model.head.weight) for model in (twins.model, twins.reference))
    torch.testing.assert_close(here, there)
    twins.step()


@on_ranks(2, stage=SHARDED)
def test_functional_call_is_refused_and_leaves_the_model_alone(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    other = nn.Parameter(torch.randn(3, 5))
    before = other.detach().clone()
    with pytest.raises(zero.UsageError, match="functional_call"):
        torch.func.functional_call(twins.model, {"head.weight": other}, (twins.own(),))
    assert torch.equal(other, before)
    twins.step(2)


# ---- regularisers ----------------------------------------------------------------------------------------------------


def _penalised(model: nn.Module, x: Tensor) -> Tensor:
    loss = square_loss(model, x) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())
    loss += 0.01 * sum(p.abs().mean() for name, p in model.named_parameters() if "bias" not in name)
    norms = torch.stack([torch.linalg.vector_norm(p) for p in model.parameters()])
    return torch.add(loss, norms[0], alpha=0.1) * (1 + 0.01 * model.head.weight.norm())


def _train_penalised(stage: int, **config: Any) -> None:
    # The penalties are large, and so is what the order of their additions leaves in float32.
    twins = Twins(stage, loss=_penalised, make=lambda: Net().double(), draw=lambda *at: batch(*at).double(), **config)
    twins.step()
    for micro in range(2):  # and while gradients are kept
        with twins.model.no_sync() if micro == 0 else contextlib.nullcontext():
            _penalised(twins.model, batch(50 + micro, twins.rank).double()).backward()
        for rank in range(twins.num_ranks):
            (_penalised(twins.reference, batch(50 + micro, rank).double()) / twins.num_ranks).backward()
    twins.update()
    large = torch.outer(*[twins.model.enter.weight.full_tensor().flatten().repeat(5)] * 2).sum()
    large.backward()  # computed from a whole parameter


@on_ranks(2, stage=SHARDED)
def test_regulariser_over_all_parameters_is_part_of_the_loss(stage: int) -> None:
    _train_penalised(stage)


@on_ranks(4)
def test_regulariser_counts_once_among_replicas() -> None:
    _train_penalised(3, replicate=2)


class _Penalising(Net):
    """Regularises in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).pow(2).mean() + 0.1 * sum(p.pow(2).sum() for p in self.blocks.parameters())


@on_ranks(2, stage=SHARDED)
def test_regulariser_inside_the_forward_is_part_of_the_loss(stage: int) -> None:
    Twins(stage, _Penalising, lambda model, x: model(x)).step(2)


class _Few(nn.Module):
    """Parameters with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.scale, self.shift = nn.Parameter(torch.tensor([0.5, 2.0])), nn.Parameter(torch.tensor([0.25]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enter(x).tanh() * self.scale.repeat(2) + self.shift)


def _penalised_few(model: nn.Module, x: Tensor) -> Tensor:
    return square_loss(model, x) + sum(0.1 * p.square().sum() for p in (model.scale, model.shift))


@on_ranks(3, stage=SHARDED)
def test_regulariser_of_parameters_with_fewer_rows_than_ranks_is_part_of_the_loss(stage: int) -> None:
    twins = Twins(stage, _Few, _penalised_few)
    twins.step(2)
    with twins.engine.no_sync():
        twins.backward()
    twins.backward_reference()
    twins.step()


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _numbers(model: nn.Module) -> list[float]:
    """As training loops log them."""
    found = []
    for param in model.parameters():
        found.append(param.grad.data.norm(2).item())
        found.append(float(param.abs().max()))
        found.append(param.detach().float().sum().item() + param.std().item() + float(param.grad.abs().max() > 0.01))
        with torch.no_grad():
            found.append((param.pow(2).sum() + 1).item())
    return found


@on_ranks(2, stage=STAGES)
def test_numbers_are_those_of_the_whole_tensor(stage: int) -> None:
    twins = Twins(stage, timeout_s=20)
    for _ in range(2):
        twins.backward()
        twins.backward_reference()
        expected = _numbers(twins.reference)
        assert _numbers(twins.model) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        twins.update()


def _ask_alone() -> None:
    twins = Twins(3, timeout_s=2.5)
    twins.backward()
    if twins.rank == 0:
        twins.model.head.weight.grad.norm().item()
    time.sleep(3.5)


def test_a_number_that_one_rank_asks_for_is_an_error_that_says_so() -> None:
    failure, _ = run_ranks(_ask_alone, 2, expect_failure=True)
    assert "waited 2.5 s for rank 1 in norms of a value computed from a parameter" in failure.message


def _with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@on_ranks(2, stage=SHARDED)
def test_what_needs_whole_tensors_gathers_them(stage: int) -> None:
    model, plain = _with_statistics(), _with_statistics()
    plain.load_state_dict(model.state_dict())
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    weight, whole = model[0].weight.detach(), plain[0].weight.detach()
    assert torch.allclose(weight, weight)
    assert torch.equal(weight.flatten(), whole.flatten())
    assert weight.tolist() == whole.tolist()
    assert (weight.numpy() == whole.numpy()).all()
