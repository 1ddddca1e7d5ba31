"""What users' code does to a model, beside the same code on the unsharded one: edits, hooks, reads, interrupts."""

import contextlib
import copy
import dataclasses
import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import hf_zero as zero
from hf_zero.engine.units.unit import Tenure
from tests.engine.twins import ALL_STAGES, Block, Net, Twins, assert_same, batch, square_loss, whole
from tests.ranks import on_ranks, run_ranks

_SHARDED = pytest.mark.parametrize("stage", [1, 2, 3])
_EXCHANGES = pytest.mark.parametrize("collectives", ["pairwise", "host"])


def _both(twins: Twins, code: Callable[[nn.Module], None]) -> None:
    """Run a user's code on both models."""
    code(twins.model)
    code(twins.reference)
    assert_same(twins.model, twins.reference)


# ---- edits -----------------------------------------------------------------------------------------------------------


def _mul(model: nn.Module) -> None:
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(0.5)
        model.head.bias.fill_(1.0)


def _data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(0.9)
        param.data.add_(param.detach(), alpha=0.1)


def _foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


def _assign_data(model: nn.Module) -> None:
    model.head.weight.data = model.head.weight.data * 0.5
    model.head.bias.data = torch.arange(3.0)


def _vector(model: nn.Module) -> None:
    if all(isinstance(param, DTensor) for param in model.parameters()):
        vector = torch.cat([whole(param).reshape(-1) for param in model.parameters()])
    else:
        vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector * 0.5, model.parameters())


def _alias_kept(model: nn.Module) -> None:
    aliases = model.__dict__.setdefault("aliases", [param.data for param in model.parameters()])
    for alias in aliases:
        alias.mul_(0.95)


def _rows_of_the_other_dim(model: nn.Module) -> None:
    with torch.no_grad():
        model.head.weight[:, 1:].zero_()
        model.head.weight.view(3, 5).add_(0.1)


_EDITS = [_mul, _data, _foreach, _assign_data, _vector, _alias_kept, _rows_of_the_other_dim]


@_EXCHANGES
@ALL_STAGES
@on_ranks(2)
def test_edits_by_hand_mean_what_they_mean_on_the_plain_model(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives, timeout_s=20)
    for edit in _EDITS:
        for mode in (contextlib.nullcontext(), torch.device("cpu")):  # which sees torch's functions first
            with mode:
                _both(twins, edit)
            twins.assert_same_output()
            twins.step()


@_EXCHANGES
@ALL_STAGES
@on_ranks(2)
def test_an_optimizer_written_by_hand_trains(stage: int, collectives: str) -> None:
    def step(model: nn.Module) -> None:
        for param in model.parameters():
            param.data.add_(param.grad, alpha=-0.1)
            param.grad = None

    twins = Twins(stage, collectives=collectives, timeout_s=20)
    for _ in range(3):
        twins.loss(twins.model, twins.own()).backward()
        twins.backward_reference()
        _both(twins, step)
        twins.steps_done += 1


@_SHARDED
@on_ranks(2)
def test_edits_that_would_be_lost_raise(stage: int) -> None:
    twins = Twins(stage)
    weight = twins.model.head.weight
    with torch.no_grad(), pytest.raises(zero.UsageError, match=r"slice of parameter 'head.weight' is a copy.*Gathered"):
        weight[0].add_(1.0)
    for wrong in (torch.zeros(4, 5), torch.zeros(3, 5, dtype=torch.float64)):
        with pytest.raises(zero.UsageError, match=r"'head.weight' is partitioned as"):
            weight.data = wrong
    with pytest.raises(zero.UsageError, match="share_memory_"):
        twins.model.share_memory()
    with pytest.raises(zero.UsageError, match=r"'enter.weight'.*save_pretrained"):
        torch.save(twins.model.state_dict(), io.BytesIO())
    twins.step()
    twins.model.half()
    with pytest.raises(zero.PartitionError, match=r"cast from torch.float32 to torch.float16"):
        twins.model(twins.own())


class Slow(Net):
    """Takes its time between reading the first and the last parameters."""

    delay_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            time.sleep(self.delay_s)
            x = block(x)
        return self.head(x)


def _swap(model: nn.Module, others: dict[str, Tensor]) -> None:
    """Exchange the values of a model with `others`, as averages are swapped in and out; no rank meets another here."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            before = param.detach().clone()
            param.data.copy_(others[name])
            others[name] = before


@_SHARDED
@on_ranks(2, timeout_s=120)
def test_averages_swapped_in_and_out_never_reach_a_peer_that_still_computes(stage: int) -> None:
    twins = Twins(stage, Slow, collectives="host", timeout_s=30)
    models = (twins.model, twins.reference)
    averages = [{name: param.detach().clone().mul_(2) for name, param in model.named_parameters()} for model in models]
    for late_rank in (0, 1):
        twins.model.delay_s = 0.1 if twins.rank == late_rank else 0.0
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(twins.model(batch(9, 9)), twins.reference(batch(9, 9)))
            for model, others in zip(models, averages, strict=True):
                _swap(model, others)
        twins.step()


@ALL_STAGES
@on_ranks(2)
def test_frozen_parameters_changed_inside_gathered_parameters_are_new_on_every_rank(stage: int) -> None:
    def make() -> nn.Module:
        model = Net()
        model.enter.requires_grad_(False)
        return model

    twins = Twins(stage, make)
    twins.step()
    with zero.GatheredParameters(list(twins.model.enter.parameters())), torch.no_grad():
        twins.model.enter.weight.mul_(2)
    with torch.no_grad():
        twins.reference.enter.weight.mul_(2)
    twins.assert_same_output()
    twins.step()


# ---- gradients -------------------------------------------------------------------------------------------------------


def _accumulate(twins: Twins, order: str, between: Callable[[nn.Module], None] | None = None) -> None:
    """Backward passes with (s) and without (n) a reduction; the reference does what DDP does with `.grad`."""
    sums = [[torch.zeros_like(p) for p in twins.reference.parameters()] for _ in range(twins.num_ranks)]
    for letter in order:
        with twins.model.no_sync() if letter == "n" else contextlib.nullcontext():
            twins.loss(twins.model, twins.own()).backward()
        for rank, own in enumerate(sums):
            twins.reference.zero_grad()
            twins.loss(twins.reference, twins.draw(rank, twins.steps_done)).backward()
            for total, param in zip(own, twins.reference.parameters(), strict=True):
                total.add_(param.grad)
        if letter == "s":
            for each in zip(*sums, strict=True):
                mean = sum(each) / len(each)
                for total in each:
                    total.copy_(mean)
        if between is not None:
            between(twins.model)
            for own in sums:
                for param, total in zip(twins.reference.parameters(), own, strict=True):
                    param.grad = total
                between(twins.reference)
        twins.steps_done += 1
    for param, total in zip(twins.reference.parameters(), sums[0], strict=True):
        param.grad = total.clone()
    for left, right in zip(twins.model.parameters(), twins.reference.parameters(), strict=True):
        grad = left.grad.full_tensor() if isinstance(left.grad, DTensor) else left.grad
        torch.testing.assert_close(grad, right.grad, rtol=1e-5, atol=1e-6)
    twins.update()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("order", ["ns", "snns", "nsns", "ssnnns"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_order_of_sync_and_no_sync_accumulates_as_ddp_does(num_ranks: int, order: str, stage: int) -> None:
    run_ranks(_accumulates, num_ranks, order, stage)


def _accumulates(order: str, stage: int) -> None:
    twins = Twins(stage, compute_dtype="float32")
    _accumulate(twins, order)
    _accumulate(twins, order, _halve_gradients)


def _halve_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.mul_(0.5)


@_SHARDED
@on_ranks(2)
def test_hooks_of_parameters_see_and_change_gradients(stage: int) -> None:
    twins = Twins(stage)
    calls: list[str] = []

    def hook(model: nn.Module, kind: str) -> None:
        def halve(grad: Tensor) -> Tensor:
            calls.append(kind)
            assert grad.shape == model.head.weight.shape and not isinstance(grad, DTensor)
            return grad * 0.5

        model.head.weight.register_hook(halve)
        handle = model.enter.bias.register_hook(lambda grad: grad * 100)
        handle.remove()

    hook(twins.model, "own")
    hook(twins.reference, "reference")
    twins.step(2)
    assert calls.count("own") == 2 and calls.count("reference") == 2 * twins.num_ranks


@_SHARDED
@on_ranks(2)
def test_optimizer_in_backward_trains(stage: int) -> None:
    twins = Twins(stage)

    def attach(model: nn.Module) -> None:
        optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

        def step(param: Tensor) -> None:
            optimizers[param].step()
            param.grad = None

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)

    attach(twins.model)
    for _ in range(3):
        twins.loss(twins.model, twins.own()).backward()
        for param in twins.model.parameters():
            assert param.grad is None
        twins.backward_reference()
        with torch.no_grad():
            for param in twins.reference.parameters():
                param.sub_(0.1 * param.grad)
                param.grad = None
        twins.steps_done += 1
        assert_same(twins.model, twins.reference)


@_SHARDED
@on_ranks(2)
def test_backward_gives_gradients_to_the_inputs_named_and_grad_is_refused(stage: int) -> None:
    twins = Twins(stage)
    for _ in range(2):
        square_loss(twins.model, twins.own()).backward(inputs=[twins.model.head.weight, twins.model.blocks[0].up.bias])
        assert [name for name, p in twins.model.named_parameters() if p.grad is not None] == [
            "blocks.0.up.bias",
            "head.weight",
        ]
        twins.model.zero_grad()
    twins.step()
    loss = square_loss(twins.model, twins.own())
    with pytest.raises(
        zero.UsageError, match=r"autograd.grad does not work for the partitioned parameter 'head.weight'"
    ):
        torch.autograd.grad(loss, [twins.model.head.weight])
    twins.step()


@_SHARDED
@on_ranks(2)
def test_whole_states_of_a_plain_adam_are_cut_when_they_are_loaded(stage: int) -> None:
    twins = Twins(stage)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (twins.model, twins.reference)]
    optimizers[1] = torch.optim.AdamW(twins.reference.parameters(), lr=0.01, fused=True)
    twins.optimizers = optimizers
    twins.backward_reference()
    optimizers[1].step()
    twins.model.load_state_dict(twins.reference.state_dict())
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    twins.reference.zero_grad()
    twins.step(2)
    state = optimizers[0].state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(9, 3)
    optimizers[0].load_state_dict(state)
    twins.loss(twins.model, twins.own()).backward()
    with pytest.raises(zero.PartitionError, match=r"'exp_avg' of 'enter.weight'"):
        optimizers[0].step()


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
@_EXCHANGES
@_SHARDED
@on_ranks(2)
def test_parameters_read_outside_their_modules_are_whole_and_trained(
    stage: int, collectives: str, prefetch_bytes: int, checkpointing: str
) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, checkpointing).pow(2).mean() * 0.01 + model(x * 2).abs().mean() * 0.01

    twins = Twins(stage, Reading, loss, collectives=collectives, prefetch_bytes=prefetch_bytes)
    twins.step(3)
    twins.assert_same_output()
    loss(twins.model, twins.own())  # a graph that is dropped
    twins.step()
    assert isinstance(twins.model.head.weight, DTensor)  # at rest


@_SHARDED
@on_ranks(2)
def test_full_tensor_outside_a_forward_is_reduced_and_other_uses_say_what_to_do(stage: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model.blocks(x) if isinstance(model.blocks, nn.Sequential) else model(x)
        weight = model.head.weight
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        penalty = model.enter.weight.pow(2).sum()
        penalty = penalty.full_tensor() if isinstance(penalty, DTensor) else penalty
        return (hidden @ weight).pow(2).mean() + penalty

    twins = Twins(stage, loss=loss)
    twins.step(3)
    with pytest.raises(zero.UsageError, match=r"parameter 'head.weight', which hf_zero has partitioned.*Gathered"):
        nn.functional.linear(torch.ones(2, 5), twins.model.head.weight)
    with pytest.raises(zero.UsageError, match=r"value computed from a parameter.*full_tensor"):
        twins.model(twins.own()).sum() + twins.model.head.weight.pow(2)
    twins.step()


def _penalised(model: nn.Module, x: Tensor) -> Tensor:
    loss = square_loss(model, x) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())
    loss += 0.01 * sum(p.abs().mean() for name, p in model.named_parameters() if "bias" not in name)
    norms = torch.stack([torch.linalg.vector_norm(p) for p in model.parameters()])
    return torch.add(loss, norms[0], alpha=0.1) * (1 + 0.01 * model.head.weight.norm())


def _train_penalised(stage: int, **config: Any) -> None:
    # The penalties are large, and so is what the order of their additions leaves in float32.
    twins = Twins(stage, loss=_penalised, make=lambda: Net().double(), draw=lambda *at: batch(*at).double(), **config)
    twins.step(2)
    for micro in range(2):  # and while gradients are kept
        with twins.model.no_sync() if micro == 0 else contextlib.nullcontext():
            _penalised(twins.model, batch(twins.rank, 50 + micro).double()).backward()
        for rank in range(twins.num_ranks):
            (_penalised(twins.reference, batch(rank, 50 + micro).double()) / twins.num_ranks).backward()
    twins.update()
    weight = twins.model.head.weight
    large = torch.outer(*[twins.model.enter.weight.full_tensor().flatten().repeat(5)] * 2).sum()
    large.backward()  # computed from a whole parameter
    with pytest.raises(zero.UsageError, match=r"param.full_tensor\(\)"):
        weight.repeat(300, 1).full_tensor()


@_SHARDED
@on_ranks(2)
def test_regulariser_over_all_parameters_is_part_of_the_loss(stage: int) -> None:
    _train_penalised(stage)


@on_ranks(4)
def test_regulariser_counts_once_among_replicas() -> None:
    _train_penalised(3, replicate=2)


class _Penalising(Net):
    """Regularises in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).pow(2).mean() + 0.1 * sum(p.pow(2).sum() for p in self.blocks.parameters())


@_SHARDED
@on_ranks(2)
def test_regulariser_inside_the_forward_is_part_of_the_loss(stage: int) -> None:
    Twins(stage, _Penalising, lambda model, x: model(x)).step(3)


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


@_SHARDED
@on_ranks(3)
def test_regulariser_of_parameters_with_fewer_rows_than_ranks_is_part_of_the_loss(stage: int) -> None:
    twins = Twins(stage, _Few, _penalised_few)
    twins.step(2)
    with twins.engine.no_sync():
        twins.loss(twins.model, twins.own()).backward()
    twins.backward_reference()
    twins.step()


# ---- what leaves a call ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Plain:
    """An output that torch's trees do not know."""

    value: Tensor
    weight: Tensor


class Positions(nn.Module):
    """Hands out slices of its parameter, as learned positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 5))

    def forward(self, count: int) -> Tensor:
        return self.table if count == 4 else self.table[:count]


class Leaking(nn.Module):
    """A block whose values leave it in every way but an ordinary return."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(5)
        self.scale = nn.Parameter(torch.ones(5))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Plain:
        hidden = self.inner(x)
        self.kept = (hidden * self.scale).tanh()
        return Plain(hidden * self.scale, self.scale)


class Escaping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.enter = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(Leaking() for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.positions(4) * 2 + self.positions(1)
        for block in self.blocks:
            output = block(x)
            x = output.value + output.weight
        return self.head(x)


@pytest.mark.parametrize("prefetch_bytes", [0, 2**20])
@_SHARDED
@on_ranks(2)
def test_values_that_leave_a_call_by_any_way_are_never_read_from_released_memory(
    stage: int, prefetch_bytes: int
) -> None:
    caught: dict[int, Tensor] = {}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total = model(x).pow(2).mean()
        return total + sum(block.kept.sum() for block in model.blocks) + caught[id(model)].sum()

    twins = Twins(stage, Escaping, loss, prefetch_bytes=prefetch_bytes)
    for model in (twins.model, twins.reference):
        model.blocks[0].inner.up.register_forward_hook(
            lambda module, args, output, model=model: caught.__setitem__(id(model), output.tanh())
        )
    with torch.no_grad():
        twins.model(twins.own())
    twins.step(3)
    hidden = twins.model.blocks[1].kept  # of a graph whose outputs are never used
    hidden.sum().backward() if hidden.requires_grad and twins.steps_done < 0 else None
    if stage == 3:
        assert not any(unit.tenure is Tenure.PINNED for unit in twins.engine.units)


class Holding(nn.Module):
    """Leaves a view of its weight in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        self.transposed = self.weight.t()
        return x @ self.transposed


class Held(Net):
    def __init__(self) -> None:
        super().__init__()
        self.holding = Holding()

    def forward(self, x: Tensor) -> Tensor:
        x = self.holding(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.holding.transposed.sum(0))


@on_ranks(2)
def test_a_view_kept_by_a_module_keeps_its_unit_whole() -> None:
    twins = Twins(3, Held, prefetch_bytes=0)
    twins.step(3)
    twins.assert_same_output()
    assert [unit.name for unit in twins.engine.units if unit.tenure is Tenure.PINNED] == ["holding"]


# ---- interrupts and changed models -----------------------------------------------------------------------------------


class Interrupted(Net):
    interrupts = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.interrupts = self.interrupts
        return super().forward(x)


class InterruptedBlock(Block):
    interrupts = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.interrupts:
            raise KeyboardInterrupt
        return x


def _interrupted() -> nn.Module:
    model = Interrupted()
    model.blocks[1] = InterruptedBlock(5)
    return model


@_SHARDED
@on_ranks(2)
def test_training_goes_on_after_ctrl_c_in_a_forward(stage: int) -> None:
    twins = Twins(stage, _interrupted)
    twins.step()
    twins.model.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        twins.model(twins.own())
    assert all(isinstance(param, DTensor) for param in twins.model.parameters())
    twins.model.interrupts = False
    twins.step(2)


@contextlib.contextmanager
def _new_optimizers(twins: Twins) -> Iterator[None]:
    yield
    with torch.no_grad():
        twins.model(twins.own())  # a forward notices what has changed
    twins.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (twins.model, twins.reference)]


@ALL_STAGES
@on_ranks(2)
def test_new_heads_children_and_ties_are_noticed_at_the_next_forward(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    with _new_optimizers(twins):
        torch.manual_seed(1 + twins.rank)
        for model in (twins.model, twins.reference):
            torch.manual_seed(1)
            model.head = nn.Linear(5, 3)
    twins.step(2)
    with _new_optimizers(twins):
        for model in (twins.model, twins.reference):
            torch.manual_seed(2)
            model.blocks.append(Block(5))
    twins.step(2)
    with _new_optimizers(twins):
        for model in (twins.model, twins.reference):
            model.blocks[0].up.weight = model.blocks[1].up.weight
    twins.step(2)


class InPlace(nn.Module):
    """A frozen block that changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.up(x)


@_SHARDED
@on_ranks(2)
def test_a_frozen_block_may_change_its_input_in_place(stage: int) -> None:
    def make() -> nn.Module:
        model = Net()
        model.blocks = nn.ModuleList([InPlace(), InPlace()])
        model.blocks.requires_grad_(False)
        return model

    Twins(stage, make, prefetch_bytes=0).step(3)


@on_ranks(2)
def test_sparse_embeddings_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3))
    with pytest.raises(zero.PartitionError, match=r"'0' is an Embedding with sparse=True"):
        zero.shard_model(model, {"stage": 3})


# ---- found by others -------------------------------------------------------------------------------------------------


@_SHARDED
@on_ranks(2)
def test_functional_call_is_refused_and_leaves_the_model_alone(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    other = nn.Parameter(torch.randn(3, 5))
    before = other.detach().clone()
    with pytest.raises(zero.UsageError, match="functional_call"):
        torch.func.functional_call(twins.model, {"head.weight": other}, (twins.own(),))
    assert torch.equal(other, before)
    twins.step(2)


@_SHARDED
@on_ranks(2)
def test_random_edits_draw_what_the_plain_model_would_draw(stage: int) -> None:
    def redraw(model: nn.Module) -> None:
        torch.manual_seed(3)
        nn.init.xavier_uniform_(model.blocks[1].up.weight)
        model.enter.weight.data.normal_(0, 0.5)
        with torch.no_grad():
            model.head.weight.add_(torch.randn_like(model.head.weight), alpha=0.1)

    twins = Twins(stage)
    _both(twins, redraw)
    twins.step()


@_EXCHANGES
@_SHARDED
@on_ranks(2)
def test_steps_that_change_other_parameters_or_run_the_model_are_seen(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives, timeout_s=20)
    twins.optimizers = []
    for model in (twins.model, twins.reference):
        optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_, model=model: model.head.weight.data.mul_(0.5))
        twins.optimizers.append(optimizer)
    twins.step(2)
    twins.assert_same_output()
    for optimizer, model in zip(twins.optimizers, (twins.model, twins.reference), strict=True):

        def closure(model: nn.Module = model) -> Tensor:
            with torch.no_grad():
                model(batch(5, 5))
                return model(batch(6, 6)).sum()

        optimizer.zero_grad()
        twins.loss(model, batch(1, 1)).backward()
        optimizer.step(closure)
        model.zero_grad()
    assert_same(twins.model, twins.reference)


@_SHARDED
@on_ranks(2)
def test_what_is_assigned_frozen_or_converted_between_passes_stays(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    loss = twins.loss(twins.model, twins.own())
    twins.model.head.requires_grad_(False)
    loss.backward()
    twins.model.head.requires_grad_(True)
    twins.model.zero_grad()
    twins.step()
    calls: list[int] = []
    twins.model.head.weight.register_hook(lambda grad: calls.append(1))
    twins.model.head.weight.no_decay = True
    twins.model.float().to("cpu")
    twins.step()
    assert calls == [1] and twins.model.head.weight.no_decay
    loss = twins.loss(twins.model, twins.own())
    new = nn.Parameter(torch.ones(3, 5))
    twins.model.head.weight = new
    loss.backward()
    assert twins.model.head.weight is new


class Careless(Net):
    """Changes what autograd needs, or its own weights, inside its forward."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.head(self.blocks[0](x))


class CarelessBlock(Block):
    how = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).sigmoid()
        y = self.down(hidden)
        if self.how == "activation":
            hidden.mul_(2)
        if self.how == "weight":
            with torch.no_grad():
                self.up.weight.mul_(0.5)
        return y


def _careless() -> nn.Module:
    model = Careless()
    model.blocks = nn.ModuleList(CarelessBlock(5) for _ in range(2))
    return model


@_SHARDED
@on_ranks(2)
def test_changes_inside_a_forward_are_errors(stage: int) -> None:
    twins = Twins(stage, _careless, prefetch_bytes=0)
    twins.model.blocks[0].how = "weight"
    with pytest.raises(zero.UsageError, match=r"'blocks.0.up.weight' was changed in place inside"):
        twins.model(twins.own())
    twins.model.blocks[0].how = "activation"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square_loss(twins.model, twins.own()).backward()


@on_ranks(2)
def test_a_view_kept_on_one_rank_only_changes_no_exchange() -> None:
    twins = Twins(3, prefetch_bytes=0, timeout_s=10)
    kept: list[Tensor] = []
    if twins.rank == 0:
        twins.model.blocks[1].up.register_forward_hook(lambda module, *_: kept.append(module.weight.detach()[0]))
    twins.step(3)


@on_ranks(2)
def test_gradients_under_no_sync_are_cleared_by_fused_optimizers() -> None:
    twins = Twins(1)
    optimizer = torch.optim.AdamW(twins.model.parameters(), fused=True)
    with twins.model.no_sync():
        twins.loss(twins.model, twins.own()).backward()
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.grad.to_local().any() for param in twins.model.parameters())
    twins.step()


# ---- the default device ----------------------------------------------------------------------------------------------


def _on_host(rank: int, step: int) -> Tensor:
    with torch.device("cpu"):
        return batch(rank, step)


def _net_on_host() -> nn.Module:
    with torch.device("cpu"):
        return Net()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@_EXCHANGES
@on_ranks(2)
def test_tensors_that_say_no_device_are_the_users_only(stage: int, collectives: str) -> None:
    with torch.device("meta"):
        twins = Twins(stage, _net_on_host, draw=_on_host, collectives=collectives)
        twins.step(2)
        torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0)
        with zero.GatheredParameters(twins.model.head, modifier_rank=0):
            if twins.rank == 0:
                twins.model.head.weight.data.mul_(2)
        with torch.no_grad():
            twins.reference.head.weight.mul_(2)
        twins.step()
        twins.model.load_state_dict(twins.model.state_dict())
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


@ALL_STAGES
@on_ranks(2)
def test_numbers_are_those_of_the_whole_tensor(stage: int) -> None:
    twins = Twins(stage, timeout_s=20)
    for _ in range(2):
        twins.loss(twins.model, twins.own()).backward()
        twins.backward_reference()
        expected = _numbers(twins.reference)
        assert _numbers(twins.model) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        twins.update()


def _ask_alone() -> None:
    twins = Twins(3, timeout_s=2.5)
    twins.loss(twins.model, twins.own()).backward()
    if twins.rank == 0:
        twins.model.head.weight.grad.norm().item()
    time.sleep(3.5)


def test_a_number_that_one_rank_asks_for_is_an_error_that_says_so() -> None:
    failure, _ = run_ranks(_ask_alone, 2, expect_failure=True)
    assert "waited 2.5 s for rank 1 in agreement of 'a number computed from partitioned tensors" in failure.message


# ---- lists of parameters and buffers ---------------------------------------------------------------------------------


def _with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def _values_of(model: nn.Module) -> list[Tensor]:
    return [value for value in model.state_dict().values() if value.is_floating_point()]


@ALL_STAGES
@on_ranks(2)
def test_averages_of_parameters_and_buffers_together(stage: int) -> None:
    torch.manual_seed(0)
    plain = _with_statistics()
    model = copy.deepcopy(plain)
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    pairs = [(each, copy.deepcopy(each)) for each in (plain, model)]
    for each, average in pairs:
        with torch.no_grad():
            torch._foreach_mul_(_values_of(each), 1.5)
            torch._foreach_lerp_(_values_of(average), _values_of(each), 0.25)
            torch._foreach_add_(_values_of(average), torch._foreach_mul(_values_of(each), 2.0), alpha=0.5)
    for left, right in zip(_values_of(pairs[0][1]), _values_of(pairs[1][1]), strict=True):
        torch.testing.assert_close(whole(right), left)


@_SHARDED
@on_ranks(2)
def test_what_needs_whole_tensors_says_so(stage: int) -> None:
    model = _with_statistics()
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    weight = model[0].weight.detach()
    for code in (lambda: torch.allclose(weight, weight), lambda: weight.flatten()):
        with pytest.raises(zero.UsageError, match=r"needs the whole of parameter '0.weight'.*full_tensor"):
            code()
