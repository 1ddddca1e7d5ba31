"""What users' modules hand out and how models change, beside the same code on the unsharded model."""

import contextlib
import copy
import dataclasses
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from hf_zero.engine.parameters import records
from hf_zero.engine.units.storage.residency import Tenure
from tests.engine.twins import EXCHANGES, SHARDED, STAGES, Block, Net, Twins, batch, square_loss
from tests.ranks import on_ranks

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


@on_ranks(2, stage=SHARDED, prefetch_bytes=[0, 2**20])
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


@on_ranks(2)
def test_a_view_kept_on_one_rank_only_changes_no_exchange() -> None:
    twins = Twins(3, prefetch_bytes=0, timeout_s=10)
    kept: list[Tensor] = []
    if twins.rank == 0:
        twins.model.blocks[1].up.register_forward_hook(lambda module, *_: kept.append(module.weight.detach()[0]))
    twins.step(3)


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


@on_ranks(2, stage=SHARDED)
def test_training_goes_on_after_ctrl_c_in_a_forward(stage: int) -> None:
    twins = Twins(stage, _interrupted)
    twins.step()
    twins.model.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        twins.model(twins.own())
    assert all(isinstance(param, DTensor) for param in twins.model.parameters())
    twins.model.interrupts = False
    twins.step(2)


@on_ranks(2, stage=SHARDED)
def test_training_goes_on_after_ctrl_c_while_parameters_are_put_back(stage: int) -> None:
    twins, install = Twins(stage), records._install
    twins.step()

    def interrupted(moves: list[tuple[records.ZeroParameter, Tensor, Tensor]]) -> None:
        if any(tensor is p.param for p, tensor, _ in moves):
            raise KeyboardInterrupt
        install(moves)

    with mock.patch.object(records, "_install", interrupted), pytest.raises(KeyboardInterrupt):
        twins.model(twins.own())
    assert all(isinstance(param, DTensor) for param in twins.model.parameters())
    twins.step(2)


@contextlib.contextmanager
def _new_optimizers(twins: Twins) -> Iterator[None]:
    yield
    with torch.no_grad():
        twins.model(twins.own())  # a forward notices what has changed
    twins.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (twins.model, twins.reference)]


@on_ranks(2, stage=STAGES)
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


@on_ranks(2, stage=SHARDED)
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


class InPlace(nn.Module):
    """A frozen block that changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.up(x)


@on_ranks(2, stage=SHARDED)
def test_a_frozen_block_may_change_its_input_in_place(stage: int) -> None:
    def make() -> nn.Module:
        model = Net()
        model.blocks = nn.ModuleList([InPlace(), InPlace()])
        model.blocks.requires_grad_(False)
        return model

    Twins(stage, make, prefetch_bytes=0).step(2)


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


@on_ranks(2, stage=SHARDED)
def test_changes_of_what_a_backward_needs_are_errors(stage: int) -> None:
    """As in torch: what was saved for it has another version then."""
    for how in ("weight", "activation"):
        twins = Twins(stage, _careless, prefetch_bytes=0)
        for model in (twins.model, twins.reference):
            model.blocks[0].how = how
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                square_loss(model, twins.own()).backward()


@on_ranks(2)
def test_sparse_embeddings_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3))
    with pytest.raises(zero.PartitionError, match=r"'0' is an Embedding with sparse=True"):
        zero.shard_model(model, {"stage": 3})


# ---- the default device ----------------------------------------------------------------------------------------------


def _on_host(step: int, rank: int) -> Tensor:
    with torch.device("cpu"):
        return batch(step, rank)


def _net_on_host() -> nn.Module:
    with torch.device("cpu"):
        return Net()


@on_ranks(2, stage=STAGES, collectives=EXCHANGES)
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


# ---- gradients and weights in unusual memory -----------------------------------------------------------------------------


class Complex(nn.Module):
    """Its parameters' gradients lie in memory with strides of 0 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5, 3))
        self.left, self.right = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
        self.bias = nn.Parameter(torch.randn(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.complex(self.real, self.imaginary)
        pair = torch.stack([self.left, self.right], -1)
        return (x.to(weight.dtype) @ weight.mT).abs().sum() + (x @ pair).tanh().sum() + self.bias.sum() * x.mean()


@on_ranks(3, stage=SHARDED, collectives=EXCHANGES, prefetch_bytes=[0, 2**20])
def test_gradients_that_are_not_contiguous_are_reduced_as_they_are_read(
    stage: int, collectives: str, prefetch_bytes: int
) -> None:
    twins = Twins(stage, Complex, lambda m, x: m(x) / 30, collectives=collectives, prefetch_bytes=prefetch_bytes)
    twins.step(3)


class Functional(nn.Module):
    """Calls a block with weights that it computes, as hypernetworks and meta learning do, and then as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.ones(5, 1))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        scaled = {"weight": self.block.weight * self.scale, "bias": self.block.bias + 1}
        total = torch.func.functional_call(self.block, scaled, (x,))
        total = total + torch.func.functional_call(self.block, {"bias": self.scale[:, 0]}, (x,))
        return self.head(total * self.block(x))


@on_ranks(3, stage=SHARDED, collectives=EXCHANGES, prefetch_bytes=[0, 2**20])
def test_a_block_called_with_other_weights_in_a_forward_has_its_own_afterwards(
    stage: int, collectives: str, prefetch_bytes: int
) -> None:
    config = {"collectives": collectives, "prefetch_bytes": prefetch_bytes, "units": {"min_numel": 1}}
    twins = Twins(stage, Functional, **config)
    held = list(twins.model.parameters())
    twins.step(3)
    twins.assert_same_output()
    assert all(now is then for now, then in zip(twins.model.parameters(), held, strict=True))


class _Collecting(nn.Module):
    """Takes parameters from lists and dicts of them in its forward, and makes new ones of them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.scales = nn.ParameterList([torch.randn(6) for _ in range(3)])
        self.shifts = nn.ParameterDict({key: torch.randn(6) for key in "ab"})
        self.frozen = nn.ParameterList([nn.Parameter(torch.randn(6), requires_grad=False) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for scale in self.scales[1:]:
            x = x * scale
        for shift in nn.ParameterList([self.shifts.copy()["a"], (self.shifts | {"c": torch.ones(6)})["b"]]):
            x = x + shift
        for frozen in self.frozen[:1]:
            assert not frozen.requires_grad
            x = x * frozen
        copy = nn.Parameter(self.enter.weight)
        with torch.enable_grad():
            copy.square().sum().backward()
        assert copy.is_leaf and isinstance(copy, nn.Parameter) and torch.equal(copy.grad, 2 * copy.detach())
        return x + copy.grad.sum()


@on_ranks(2, stage=[1, 3], collectives=["pairwise", "host"])
def test_a_forward_may_collect_parameters_and_make_new_ones_of_them(stage: int, collectives: str) -> None:
    twins = Twins(
        stage,
        _Collecting,
        lambda model, x: model(x).square().mean(),
        lambda step, rank: torch.randn(3, 6, generator=torch.Generator().manual_seed(7 * step + rank)),
        collectives=collectives,
    )
    for _ in range(2):
        twins.step()


class _Masked(nn.Linear):
    """Reads what its weight was given outside, and gives it something inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.calls = getattr(self.weight, "calls", 0) + 1
        return nn.functional.linear(x, self.weight * getattr(self.weight, "mask", 1.0), self.bias)


@on_ranks(2, stage=[1, 2, 3])
def test_attributes_of_parameters_are_seen_inside_a_forward_and_kept_after_it(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Masked(4, 3))
    reference = copy.deepcopy(model)
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    x = torch.randn(2, 4)
    for each in (model, reference):
        each[0].weight.mask = torch.arange(12.0).view(3, 4) % 3
        each(x).pow(2).sum().backward()
        each(x).sum().backward()
        assert each[0].weight.calls == 2
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), reference[0].weight.grad)


class _Tying(Net):
    """Ties weights of two blocks in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks[0].up, self.blocks[1].up
        if self.way == "assigned":
            second.weight = first.weight
        elif self.way == "registered":
            second.register_parameter("weight", first.weight)
        elif self.way == "put":
            second._parameters["weight"] = first.weight
        return super().forward(x)


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_ties_made_in_a_forward_are_told_where_to_be_made(stage: int, collectives: str) -> None:
    twins = Twins(stage, _Tying, collectives=collectives, timeout_s=20)
    twins.step()
    for way in ("assigned", "registered"):
        twins.model.way = way
        with pytest.raises(zero.UsageError, match="tie weights before shard_model, or between forwards"):
            twins.model(batch(0, 0))
    twins.model.way = ""
    twins.step(2)
    for model in (twins.model, twins.reference):
        model.way = "put"
    twins.step(2)


class PolicyAndAverage(nn.Module):
    """Says that its parameters are the policy's, as trainers of preferences do, in a method that takes no argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.average = copy.deepcopy(self.policy).requires_grad_(False)

    def parameters(self) -> Iterator[nn.Parameter]:  # type: ignore[override]
        return self.policy.parameters()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            base = self.average(x)
        out: Tensor = self.policy(x) - base
        return out

    @torch.no_grad()
    def move(self) -> None:
        """Let the average follow the policy."""
        for mean, param in zip(self.average.parameters(), self.policy.parameters(), strict=True):
            mean.lerp_(param, 0.5)


@on_ranks(2, stage=STAGES)
def test_a_model_may_have_a_method_parameters_of_its_own(stage: int) -> None:
    models = [PolicyAndAverage(), PolicyAndAverage()]
    zero.shard_model(models[1], {"stage": stage, "keep_whole_numel": 0})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in models]
    for step in range(3):
        for rank in range(2):
            (models[0](batch(step, rank)) - 1).square().mean().div(2).backward()
        (models[1](batch(step, dist.get_rank())) - 1).square().mean().backward()
        for each, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            each.move()
    for name, value in models[1].state_dict().items():
        torch.testing.assert_close(value, models[0].state_dict()[name], msg=name)


def _rebuilt(kind: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    module = kind.__new__(kind)
    vars(module).update(state)
    return module


class _HandsStateOn(Net):
    """Its copies are made of its state, as those of models that keep their own source text."""

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), super().__reduce__()[2])


@on_ranks(2, stage=SHARDED, kind=[Net, _HandsStateOn])
def test_a_copy_calls_its_own_methods_however_its_class_makes_it(stage: int, kind: type[nn.Module]) -> None:
    twins = Twins(stage, kind)
    twins.step()
    copied = copy.deepcopy(twins.model)
    bound = [value.__self__ for value in vars(copied).values() if isinstance(value, types.MethodType)]
    assert bound and all(owner is copied for owner in bound)
    shallow = copy.copy(twins.model)
    shallow.note = "its own"
    assert copy.deepcopy(shallow).note == "its own"
    copied.to(torch.float64)
    assert twins.model.head.weight.dtype == torch.float32
    with torch.no_grad():
        found, expected = copied(batch(9, 9).double()), copy.deepcopy(twins.reference).double()(batch(9, 9).double())
    torch.testing.assert_close(found, expected)
    twins.step()
