"""A partitioned model behaves as the plain one does, or says why it cannot: passes, errors, edits, other libraries."""

import copy
import gc
import itertools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import hf_zero as zero
from tests.ranks import RankFailure, run_alone, run_ranks

_ALL = pytest.mark.parametrize("stage", [0, 1, 2, 3])
_SHORT_S = 2.5  # how long ranks wait for a peer in tests where it never comes

# ---- what is trained, and the unsharded model beside it --------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks between two layers; 5 and 3 rows do not divide by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    """All parameters are equal, up to the order in which two ranks' gradients are added."""
    for (name, left), (_, right) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(whole(left), right.detach(), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


class Twins:
    """A partitioned model, and the unsharded one that is trained beside it on all ranks' batches."""

    def __init__(
        self,
        stage: int,
        make: Callable[[], nn.Module] = Net,
        loss: Callable[[nn.Module, Any], Tensor] = square_loss,
        draw: Callable[[int, int], Any] = batch,
        **config: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model, self.loss, self.draw = make(), loss, draw
        self.reference = copy.deepcopy(self.model)
        if dist.is_initialized():
            dist.barrier()  # a worker that imports for the first time is late, and some tests wait for a short time only
        self.engine = zero.shard_model(self.model, zero.ZeroConfig(stage=stage, **config))
        self.rank, self.num_ranks = self.engine.world.rank, self.engine.world.num_ranks
        self.optimizers = [
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
            for model in (self.model, self.reference)
        ]
        self.steps_done = 0

    def own(self) -> Any:
        """This rank's next batch."""
        return self.draw(self.rank, self.steps_done)

    def backward_reference(self) -> None:
        for rank in range(self.num_ranks):
            (self.loss(self.reference, self.draw(rank, self.steps_done)) / self.num_ranks).backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.steps_done += 1
        assert_same(self.model, self.reference)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.loss(self.model, self.own()).backward()
            self.backward_reference()
            self.update()

    def assert_same_output(self) -> None:
        x = batch(9, 9)
        with torch.no_grad():
            torch.testing.assert_close(self.model(x), self.reference(x))


# ---- passes ----------------------------------------------------------------------------------------------------------


def _two_models(stage: int) -> None:
    first, second = Twins(stage), Twins(stage)
    first.step()
    second.step(2)
    for left, right in ((first.model, second.model), (first.reference, second.reference)):
        ranks = range(2) if left is first.reference else [first.rank]
        for rank in ranks:
            (right(left(batch(rank, 7))).pow(2).mean() / len(ranks)).backward()
    first.update()
    second.update()


@_ALL
def test_two_models_train_apart_and_through_each_other(stage: int) -> None:
    run_ranks(_two_models, 2, stage)


def _evaluate_first(stage: int) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        twins, x = Twins(stage), batch(0, 99)
        for _ in range(2):
            with mode():
                torch.testing.assert_close(twins.model(x), twins.reference(x))
            twins.step(2)
    twins.model.eval()
    with torch.no_grad():
        pending = twins.model(x)
    assert not pending.requires_grad


@_ALL
def test_evaluation_before_and_between_steps(stage: int) -> None:
    run_ranks(_evaluate_first, 2, stage)


def _many_forwards(stage: int) -> None:
    twins = Twins(stage)
    for _ in range(2):
        losses = [square_loss(twins.model, batch(twins.rank, 50 + i)) for i in range(3)]
        with torch.no_grad():
            twins.model(batch(0, 1))
        sum(losses).backward()
        for rank in range(2):
            (sum(square_loss(twins.reference, batch(rank, 50 + i)) for i in range(3)) / 2).backward()
        twins.update()


@_ALL
def test_several_forwards_before_one_backward(stage: int) -> None:
    run_ranks(_many_forwards, 2, stage)


def _retain_graph(stage: int) -> None:
    twins = Twins(stage)
    for _ in range(2):
        for model in (twins.model, twins.reference):
            ranks = range(2) if model is twins.reference else [twins.rank]
            for rank in ranks:
                loss = square_loss(model, batch(rank, 3)) / len(ranks)
                loss.backward(retain_graph=True)
                loss.backward()
        twins.update()


@_ALL
def test_retain_graph_adds_both_backwards(stage: int) -> None:
    run_ranks(_retain_graph, 2, stage)


def _create_graph(stage: int) -> None:
    twins = Twins(stage)
    for _ in range(2):
        with pytest.raises(zero.UsageError, match="create_graph"):
            square_loss(twins.model, twins.own()).backward(create_graph=True)
        twins.optimizers[0].zero_grad()
        twins.step()


@_ALL
def test_create_graph_is_refused_on_all_ranks(stage: int) -> None:
    run_ranks(_create_graph, 2, stage)


def _input_gradients(stage: int) -> None:
    twins = Twins(stage)
    for _ in range(2):
        x = twins.own().requires_grad_()
        (found,) = torch.autograd.grad(square_loss(twins.model, x), x)
        (expected,) = torch.autograd.grad(square_loss(twins.reference, x), x)
        torch.testing.assert_close(found, expected)
        assert all(p.grad is None for p in twins.model.parameters())
        twins.step()
        twins.assert_same_output()


@_ALL
def test_gradient_of_inputs_alone_leaves_fresh_weights_to_the_next_step(stage: int) -> None:
    run_ranks(_input_gradients, 2, stage)


def _late_backward(stage: int) -> None:
    twins = Twins(stage)
    late = square_loss(twins.model, batch(0, 77))
    twins.step()
    with pytest.raises(zero.UsageError, match="run the forward again"):
        late.backward()
    twins.optimizers[0].zero_grad()
    twins.step(2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backward_after_a_step_since_its_forward_raises(stage: int) -> None:
    run_ranks(_late_backward, 2, stage)


def _deepcopy(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    average = copy.deepcopy(twins.model)
    expected = copy.deepcopy(twins.reference)
    assert_same(average, expected)
    x = batch(0, 5)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(average(x), expected(x))
        twins.step()
    assert_same(average, expected)
    optimizer = torch.optim.SGD(average.parameters(), lr=0.5)
    square_loss(average, batch(twins.rank, 6)).backward()
    optimizer.step()
    for rank in range(2):
        (square_loss(expected, batch(rank, 6)) / 2).backward()
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    assert_same(average, expected)
    twins.step()


@_ALL
def test_deep_copy_runs_and_trains_by_itself(stage: int) -> None:
    run_ranks(_deepcopy, 2, stage)


def _deepcopy_in_bfloat16(stage: int) -> None:
    model = Net().bfloat16()
    engine = zero.shard_model(model, zero.ZeroConfig(stage=stage))
    average = copy.deepcopy(model)
    x = batch(0, 0).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(average(x), model(x), rtol=0, atol=0)
    with average.no_sync():
        pass
    assert average.no_sync.__self__ is not engine


@_ALL
def test_deep_copy_keeps_compute_dtype_and_has_its_own_no_sync(stage: int) -> None:
    run_ranks(_deepcopy_in_bfloat16, 2, stage)


def _copy_loads(stage: int) -> None:
    twins = Twins(stage)
    average, expected = copy.deepcopy(twins.model), Net()
    average.load_state_dict(expected.state_dict())
    assert_same(average, expected)
    with torch.no_grad():
        torch.testing.assert_close(average(batch(0, 0)), expected(batch(0, 0)))
    twins.step()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_deep_copy_loads_a_state_dict_before_its_first_forward(stage: int) -> None:
    run_ranks(_copy_loads, 2, stage)


def _ema(stage: int) -> None:
    twins = Twins(stage)
    average, expected = copy.deepcopy(twins.model), copy.deepcopy(twins.reference)
    for _ in range(2):
        twins.step()
        for mean, model in ((average, twins.model), (expected, twins.reference)):
            with torch.no_grad():
                for left, right in zip(mean.parameters(), model.parameters(), strict=True):
                    left.lerp_(right, 0.5)
        zero.mark_dirty(average)
        with torch.no_grad():
            torch.testing.assert_close(average(batch(0, 1)), expected(batch(0, 1)))


@_ALL
def test_deep_copy_as_a_moving_average_has_the_right_values(stage: int) -> None:
    run_ranks(_ema, 2, stage)


def _one_rank_evaluates(stage: int) -> None:
    twins = Twins(stage, timeout_s=_SHORT_S)
    for _ in range(2):
        if twins.rank == 0:
            twins.assert_same_output()
        twins.step()
    if twins.rank == 1:
        twins.assert_same_output()
    twins.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_forward_on_one_rank_only_works_where_parameters_stay_whole(stage: int) -> None:
    run_ranks(_one_rank_evaluates, 2, stage)


def _freeze_and_thaw(stage: int) -> None:
    twins = Twins(stage)
    for blocks, trains in (((0,), False), ((0, 1), False), ((0,), True), ((1,), True)):
        for model, index in itertools.product((twins.model, twins.reference), blocks):
            model.blocks[index].requires_grad_(trains)
        twins.step(2)


@_ALL
def test_parameters_are_frozen_and_thawed_between_steps(stage: int) -> None:
    run_ranks(_freeze_and_thaw, 2, stage)


def _partly_frozen() -> nn.Module:
    net = Net()
    for module in (net.enter, net.blocks[1], net.blocks[2].up):
        module.requires_grad_(False)
    return net


def _thaw(stage: int) -> None:
    twins = Twins(stage, _partly_frozen)
    twins.step(3)
    assert all(p.grad is None for p in twins.model.blocks[1].parameters())
    for model, optimizer in zip((twins.model, twins.reference), twins.optimizers, strict=True):
        model.blocks[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.blocks[1].parameters())})
    twins.step(2)


@_ALL
def test_parameters_frozen_from_the_start_are_thawed_later(stage: int) -> None:
    run_ranks(_thaw, 2, stage)


# ---- failures --------------------------------------------------------------------------------------------------------


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, net: "Fragile") -> Tensor:
        ctx.net = net
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.net.breaks_in == "backward":
            raise ZeroDivisionError("a fault in backward")
        return gradient, None


class Fragile(Net):
    """Breaks between its second and third block where `breaks_in` says so."""

    breaks_in = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.enter(x)))
        if self.breaks_in == "forward":
            raise ZeroDivisionError("a fault in forward")
        return self.head(self.blocks[2](_Fuse.apply(x, self)))


def _all_ranks_break(stage: int, where: str) -> None:
    twins = Twins(stage, Fragile)
    for _ in range(2):
        twins.model.breaks_in = where
        with pytest.raises(ZeroDivisionError):
            square_loss(twins.model, twins.own()).backward()
        twins.model.breaks_in = ""
        twins.optimizers[0].zero_grad()
        twins.step(2)
    assert twins.engine.memory.bytes == 0


@pytest.mark.parametrize("where", ["forward", "backward"])
@_ALL
def test_step_after_an_exception_on_all_ranks_is_clean(stage: int, where: str) -> None:
    run_ranks(_all_ranks_break, 2, stage, where)


def _one_rank_breaks(stage: int, where: str) -> None:
    twins = Twins(stage, Fragile, timeout_s=20.0)
    twins.step()
    if twins.rank == 1:
        twins.model.breaks_in = where
    square_loss(twins.model, twins.own()).backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
@_ALL
def test_exception_on_one_rank_is_a_named_error_on_the_other(stage: int, where: str) -> None:
    left, right = run_ranks(_one_rank_breaks, 2, stage, where, expect_failure=True)
    assert isinstance(right, RankFailure) and right.type_name == "ZeroDivisionError"
    assert isinstance(left, RankFailure) and left.type_name == "CollectiveError"
    assert "rank 1" in left.message


def _one_rank_dies(stage: int) -> None:
    twins = Twins(stage, timeout_s=20.0)
    twins.step()
    if twins.rank == 1:
        os._exit(3)
    square_loss(twins.model, twins.own()).backward()


@pytest.mark.parametrize("stage", [1, 3])
def test_rank_that_dies_is_named_by_those_that_wait(stage: int) -> None:
    left, right = run_ranks(_one_rank_dies, 2, stage, expect_failure=True)
    assert isinstance(right, RankFailure) and right.type_name == "RankDied"
    assert isinstance(left, RankFailure) and left.type_name == "CollectiveError"
    assert "lost rank 1" in left.message


def _one_rank_alone(what: str) -> str:
    twins = Twins(3, timeout_s=_SHORT_S)
    twins.step()
    if twins.rank == 0:
        with pytest.raises(zero.CollectiveError, match="rank 1") as caught:
            twins.model(twins.own()) if what == "forward" else twins.model.load_state_dict(twins.reference.state_dict())
        return str(caught.value)
    return ""


@pytest.mark.parametrize("what", ["forward", "load_state_dict"])
def test_call_on_one_rank_only_names_the_missing_rank(what: str) -> None:
    message, _ = run_ranks(_one_rank_alone, 2, what)
    assert ("load_state_dict" if what == "load_state_dict" else "gather of 'enter'") in message


class Branching(Net):
    """Calls its blocks in the order given."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


def _calls_differ(order: tuple[int, ...], prefetch_bytes: int) -> str:
    twins = Twins(3, Branching, timeout_s=_SHORT_S, prefetch_bytes=prefetch_bytes)
    twins.step(2)  # so that there is an order to prefetch in
    orders = ((0, 1, 2), order)
    twins.model.order = orders[twins.rank]
    try:
        square_loss(twins.model, twins.own()).backward()
    except zero.CollectiveError as error:
        return str(error)
    for rank in range(2):
        twins.reference.order = orders[rank]
        (square_loss(twins.reference, twins.draw(rank, twins.steps_done)) / 2).backward()
    twins.update()
    return "right"


_ORDERS = pytest.mark.parametrize("order", [(0, 2), (1, 0, 2), (0, 1, 2, 2)], ids=["skipped", "swapped", "twice"])


@_ORDERS
def test_ranks_that_call_other_units_name_each_other(order: tuple[int, ...]) -> None:
    messages = run_ranks(_calls_differ, 2, order, 0)
    assert "rank 1 in gather of " in messages[0] and "rank 0 in gather of " in messages[1]


@_ORDERS
def test_ranks_that_call_other_units_never_see_other_weights_where_all_are_prefetched(order: tuple[int, ...]) -> None:
    messages = run_ranks(_calls_differ, 2, order, 2**20)
    assert messages == ["right", "right"] or "right" not in messages


# ---- values from outside ---------------------------------------------------------------------------------------------


def _state_dict(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    calls = twins.engine.world.ledger.total().calls
    state = twins.model.state_dict()
    assert twins.engine.world.ledger.total().calls == calls
    assert list(state) == list(twins.reference.state_dict())
    for name, expected in twins.reference.state_dict().items():
        assert isinstance(state[name], DTensor) == (stage > 0)
        torch.testing.assert_close(whole(state[name]), expected)


@_ALL
def test_state_dict_holds_rows_without_communication(stage: int) -> None:
    run_ranks(_state_dict, 2, stage)


def _load_state_dict(stage: int) -> None:
    torch.manual_seed(1)
    other = Net()
    twins = Twins(stage)
    twins.step()
    sharded = copy.deepcopy(other)
    zero.shard_model(sharded, zero.ZeroConfig(stage=stage))
    for state in (other.state_dict(), sharded.state_dict()):
        twins.model.load_state_dict(state)
        twins.reference.load_state_dict(other.state_dict())
        assert_same(twins.model, twins.reference)
        twins.assert_same_output()
        twins.step(2)


@_ALL
def test_load_state_dict_takes_whole_and_sharded_values(stage: int) -> None:
    run_ranks(_load_state_dict, 2, stage)


def _load_wrong_state(stage: int) -> list[str]:
    twins = Twins(stage)
    messages = []
    for key, value in (("blocks.0.up.weight", torch.zeros(12, 5)), ("no.such", torch.zeros(1)), ("head.bias", None)):
        state = twins.reference.state_dict()
        state.pop(key, None)
        if value is not None:
            state[key] = value
        with pytest.raises(RuntimeError) as caught:
            twins.model.load_state_dict(state)
        assert key in str(caught.value)
        messages.append(str(caught.value))
    twins.step()
    return messages


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_load_state_dict_with_mistakes_raises_alike_on_all_ranks(stage: int) -> None:
    left, right = run_ranks(_load_wrong_state, 2, stage)
    assert left == right


def _load_with_assign(stage: int) -> None:
    twins = Twins(stage)
    state = {name: torch.zeros_like(value) for name, value in twins.reference.state_dict().items()}
    with pytest.raises(zero.UsageError, match="assign"):
        twins.model.load_state_dict(state, assign=True)
    twins.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_load_state_dict_with_assign_is_refused(stage: int) -> None:
    run_ranks(_load_with_assign, 2, stage)


def _edit_in_place(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    for model in (twins.model, twins.reference):
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(0.5)
            model.head.bias.fill_(1.0)
    if stage in (1, 2):
        with pytest.raises(zero.PartitionError, match=r"'blocks.1.up.weight'.*mark_dirty"):
            twins.model(twins.own())
    zero.mark_dirty(twins.model)
    twins.assert_same_output()
    twins.step(2)


@_ALL
def test_edit_in_place_needs_mark_dirty_and_then_has_the_right_values(stage: int) -> None:
    run_ranks(_edit_in_place, 2, stage)


def test_mark_dirty_of_a_plain_model_raises() -> None:
    with pytest.raises(zero.PartitionError, match="shard_model"):
        zero.mark_dirty(Net())


def _early_optimizer(stage: int) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    square_loss(model, batch(dist.get_rank(), 0)).backward()
    with pytest.raises(zero.PartitionError, match=r"enter\.weight"):
        optimizer.step()
    other = nn.Linear(2, 2)  # an optimizer of somebody else is left alone
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=1.0).step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_made_before_partitioning_raises_at_its_first_step(stage: int) -> None:
    run_ranks(_early_optimizer, 2, stage)


# ---- models that cannot be partitioned -------------------------------------------------------------------------------


class DeepSpeedEngine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = Net()


def _complex(trains: bool) -> nn.Module:
    net = Net()
    net.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=trains)
    return net


def _on_two_devices() -> nn.Module:
    net = Net()
    net.head.to("meta")
    return net


def _quantised() -> nn.Module:
    net = Net()
    net.is_quantized = True
    return net


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (DeepSpeedEngine, "DeepSpeedEngine"),
        (lambda: nn.DataParallel(Net()), "DataParallel"),
        (lambda: Net().to("meta"), "meta"),
        (_on_two_devices, "several devices"),
        (lambda: _complex(True), "phase is complex"),
        (_quantised, "quantised"),
    ],
    ids=["deepspeed", "data_parallel", "meta", "two_devices", "complex", "quantised"],
)
def test_model_that_cannot_be_partitioned_raises(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    before = list(model.parameters())
    with pytest.raises(zero.PartitionError, match=message):
        zero.shard_model(model, zero.ZeroConfig(stage=3))
    assert all(left is right for left, right in zip(before, model.parameters(), strict=True))


def _wrapped() -> None:
    for model in (DistributedDataParallel(Net()), fully_shard(Net())):
        with pytest.raises(zero.PartitionError, match=r"DistributedDataParallel|FSDPModule"):
            zero.shard_model(model, zero.ZeroConfig(stage=3))


def test_model_wrapped_by_ddp_or_fsdp_raises() -> None:
    run_ranks(_wrapped, 2)


class Phased(Net):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.exp(1j * torch.arange(3.0)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * self.phase).real)


def _frozen_complex(stage: int) -> None:
    twins = Twins(stage, Phased)
    twins.step(2)


@_ALL
def test_frozen_complex_parameter_works(stage: int) -> None:
    run_ranks(_frozen_complex, 2, stage)


def _wrong_config(changes: dict[str, Any]) -> str:
    model = Net()
    with pytest.raises(zero.ConfigError) as caught:
        zero.shard_model(model, zero.ZeroConfig(stage=3, **changes))
    assert not any(isinstance(p, DTensor) for p in model.parameters()), "the model was left half partitioned"
    zero.shard_model(model, zero.ZeroConfig(stage=3))
    square_loss(model, batch(0, 0)).backward()
    return str(caught.value)


def test_other_number_of_ranks_than_expected_raises() -> None:
    assert all("expected_world_size is 4, but 2" in m for m in run_ranks(_wrong_config, 2, {"expected_world_size": 4}))


def test_unknown_unit_class_raises_and_names_those_there_are() -> None:
    for message in run_ranks(_wrong_config, 2, {"units": ["NoSuchClass"]}):
        assert "NoSuchClass" in message and "Block" in message
        assert "ModuleList" not in message  # which cannot be a unit


def _configs_differ() -> None:
    with pytest.raises(zero.ConfigError, match="rank"):
        zero.shard_model(Net(), zero.ZeroConfig(stage=2 + dist.get_rank(), timeout_s=_SHORT_S))


def test_ranks_with_different_configs_raise() -> None:
    run_ranks(_configs_differ, 2)


def _models_differ() -> None:
    model = Net()
    if dist.get_rank() == 1:
        model.blocks = model.blocks[:2]
    with pytest.raises(zero.PartitionError, match="rank"):
        zero.shard_model(model, zero.ZeroConfig(stage=3, timeout_s=_SHORT_S))


def test_ranks_with_different_models_raise() -> None:
    run_ranks(_models_differ, 2)


def _requires_grad_differs(stage: int, when: str) -> None:
    model = Net()
    frozen = model.blocks[dist.get_rank()]  # as many parameters, with names as long, on both ranks
    if when == "before":
        frozen.requires_grad_(False)
    with pytest.raises(zero.PartitionError, match="requires_grad"):
        zero.shard_model(model, zero.ZeroConfig(stage=stage, timeout_s=_SHORT_S))
        if when == "after":
            frozen.requires_grad_(False)
        square_loss(model, batch(dist.get_rank(), 0)).backward()


@pytest.mark.parametrize("when", ["before", "after"])
@_ALL
def test_requires_grad_that_differs_between_ranks_raises_on_all(stage: int, when: str) -> None:
    run_ranks(_requires_grad_differs, 2, stage, when)


# ---- one rank --------------------------------------------------------------------------------------------------------


def _alone(stage: int) -> None:
    assert not dist.is_initialized()
    twins = Twins(stage)
    assert twins.engine.units == []
    assert all(type(p) is nn.Parameter for p in twins.model.parameters())
    assert not any(module._forward_pre_hooks for module in twins.model.modules() if module is not twins.model)
    twins.step(3)
    assert twins.engine.world.ledger.total().calls == 0


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_needs_no_group_and_no_units(stage: int) -> None:
    run_alone(_alone, stage)


def _alone_in_bfloat16(stage: int) -> None:
    torch.manual_seed(0)
    model = Net()
    engine = zero.shard_model(model, zero.ZeroConfig(stage=stage, compute_dtype="bfloat16"))
    assert engine.units
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for _ in range(20):
        output = model(batch(0, 0).bfloat16())
        assert output.dtype == torch.bfloat16
        loss = output.float().pow(2).mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_rank_computes_in_bfloat16_over_float32_masters(stage: int) -> None:
    run_alone(_alone_in_bfloat16, stage)


# ---- modules and libraries with habits of their own -----------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 5)
        self.lstm = nn.LSTM(5, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.enter(x)[None])[0])


def _ran(model: nn.Module, operator: str) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(batch(0, 0))
    return any(event.key == operator for event in profile.key_averages())


def _habits(stage: int, make: Callable[[], nn.Module], config: dict[str, Any], operator: str = "") -> None:
    twins = Twins(stage, make, **config)
    twins.step(2)
    for model in (twins.model, twins.reference):
        model.eval()
    twins.assert_same_output()
    with torch.inference_mode():
        torch.testing.assert_close(twins.model(batch(0, 0)), twins.reference(batch(0, 0)))
        assert not operator or _ran(twins.model, operator)
    for model in (twins.model, twins.reference):
        model.train()
    twins.step()


@_ALL
def test_lstm_with_flat_weights_trains(stage: int) -> None:
    run_ranks(_habits, 2, stage, Recurrent, {})


class Attentive(nn.Module):
    """An encoder of torch's own; its attention reads `out_proj` without calling it, in evaluation on a fast path."""

    num_layers = 2

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, dim_feedforward=9, dropout=0.0, batch_first=True)
        self.enter = nn.Linear(3, 6)
        self.encoder = nn.TransformerEncoder(layer, self.num_layers) if self.num_layers > 1 else layer
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.enter(x)[None])
        return self.head(self.attention(x, x, x)[0])


class AttentiveOnce(Attentive):
    num_layers = 1


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("make", "config"),
    [(Attentive, {}), (AttentiveOnce, {}), (Attentive, {"units": {"min_numel": 30}})],
    ids=["repeated", "by_size", "min_numel"],
)
def test_torchs_attention_trains_and_evaluates_on_its_fast_path(
    stage: int, make: Callable[[], nn.Module], config: dict[str, Any]
) -> None:
    run_ranks(_habits, 2, stage, make, config, "aten::_native_multi_head_attention")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.enter(x))


def _buffers(stage: int) -> tuple[Tensor, Tensor]:
    model = Normed()
    model.norm.running_mean.fill_(1.0 + dist.get_rank())
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    before = model.norm.running_mean.clone()
    square_loss(model, batch(dist.get_rank(), 0)).backward()
    return before, model.norm.running_mean.clone()


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_start_as_those_of_rank_0_and_are_then_each_ranks_own(stage: int) -> None:
    (first, first_after), (second, second_after) = run_ranks(_buffers, 2, stage)
    assert torch.equal(first, torch.ones(5)) and torch.equal(second, first)
    assert not torch.equal(first_after, second_after)


def _values_of_rank_0(stage: int) -> None:
    torch.manual_seed(dist.get_rank())
    model = Net()
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    torch.manual_seed(0)
    assert_same(model, Net())


@_ALL
def test_initial_values_are_those_of_rank_0(stage: int) -> None:
    run_ranks(_values_of_rank_0, 2, stage)


def _compiled(backend: str) -> None:
    twins = Twins(3)
    compiled = torch.compile(twins.model, backend=backend)
    for _ in range(3):
        square_loss(compiled, twins.own()).backward()
        twins.backward_reference()
        twins.update()
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch(0, 0)), twins.reference(batch(0, 0)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_trains_with_hooks_outside_its_graphs(backend: str) -> None:
    run_ranks(_compiled, 2, backend)


def _lora_llama() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=33, num_key_value_heads=2, **sizes))
    model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    return model


def _tokens(rank: int, step: int) -> Tensor:
    return torch.randint(0, 33, (2, 7), generator=torch.Generator().manual_seed(100 * step + rank))


def _language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def _lora(stage: int, checkpointing: bool) -> None:
    twins = Twins(stage, _lora_llama, _language_loss, _tokens)
    if checkpointing:
        for model in (twins.model, twins.reference):
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
    twins.step()
    ledger = twins.engine.world.ledger
    ledger.reset()
    released_in_backward = _watch_release(twins, "lm_head")
    computed = _watch_gradients(twins)
    twins.step()
    assert computed and all("lora_" in name for name in computed)
    assert released_in_backward == ([True] if stage == 3 else [])
    trainable = [p for p in twins.model.parameters() if p.requires_grad]
    reduced = {unit for kind, unit in ledger.entries if kind in ("reduce_scatter", "all_reduce")}
    assert all("layers." in unit for unit in reduced)
    assert ledger.total("reduce_scatter").bytes == sum(p.to_local().nbytes for p in trainable)
    assert all(p.grad is None for p in twins.model.parameters() if not p.requires_grad)
    assert twins.engine.memory.bytes == 0 or stage < 3


def _watch_gradients(twins: Twins) -> set[str]:
    """The names of the parameters for which autograd computes a gradient."""
    names: set[str] = set()
    original = twins.engine.on_gradients

    def look(call: Any, gradients: tuple[Tensor | None, ...]) -> None:
        names.update(p.name for p, grad in zip(call.parameters, gradients, strict=True) if grad is not None)
        original(call, gradients)

    twins.engine.on_gradients = look
    return names


def _watch_release(twins: Twins, name: str) -> list[bool]:
    """Whether the frozen unit `name` had been released when a layer's first gradient came."""
    (unit,) = [unit for unit in twins.engine.units if unit.name.endswith(name)]
    seen: list[bool] = []
    last = twins.model.get_base_model().model.layers[0]

    def look(module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad and not seen:
            tensor.register_hook(lambda _: seen.append(not unit.is_leased) if not seen else None)

    if not unit.keeps_whole:
        last.register_forward_hook(look)
    return seen


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lora_reduces_only_adapters_and_equals_the_unsharded_run(stage: int, checkpointing: bool) -> None:
    run_ranks(_lora, 2, stage, checkpointing)


# ---- the end ---------------------------------------------------------------------------------------------------------


def _close(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    twins.engine.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twins.model.modules())
    assert_same(twins.model, twins.reference)
    assert zero.engine_of(twins.model) is None
    twins.engine = zero.shard_model(twins.model, zero.ZeroConfig(stage=stage))
    twins.step()


@_ALL
def test_close_removes_every_hook_and_the_model_can_be_run_again(stage: int) -> None:
    run_ranks(_close, 2, stage)


def _dropped(stage: int) -> list[bool]:
    twins = Twins(stage)
    twins.step(2)
    watched = [weakref.ref(each) for each in (twins.engine, twins.model, twins.engine.world)]
    watched += [weakref.ref(p) for p in twins.model.parameters()]
    del twins
    gc.collect()
    return [each() is None for each in watched]


@_ALL
def test_model_that_is_dropped_is_freed(stage: int) -> None:
    assert all(all(freed) for freed in run_ranks(_dropped, 2, stage))


def _twice(stage: int) -> None:
    twins = Twins(stage)
    assert zero.shard_model(twins.model, zero.ZeroConfig(stage=stage)) is twins.engine
    assert zero.shard_model(twins.model) is twins.engine
    with pytest.raises(zero.ZeroError):
        zero.shard_model(twins.model, zero.ZeroConfig(stage=3 - stage))


@_ALL
def test_second_shard_model_gives_the_same_engine_or_refuses_another_config(stage: int) -> None:
    run_ranks(_twice, 2, stage)


def _chosen(options: dict[str, Any], stage: int) -> Any:
    model = Net()
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    square_loss(model, batch(dist.get_rank(), 0)).backward()
    optimizer.step()
    return optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("options", "stage", "fused"),
    [({}, 3, True), ({}, 1, True), ({}, 0, None), ({"foreach": False}, 3, None), ({"fused": False}, 3, False)],
)
def test_adam_is_fused_where_parameters_are_partitioned_and_the_user_has_not_said_how(
    options: dict[str, Any], stage: int, fused: bool | None
) -> None:
    assert run_ranks(_chosen, 2, options, stage) == [fused, fused]


def _step_with_a_plain_model() -> Any:
    model, other = Net(), torch.nn.Linear(3, 3)
    zero.shard_model(model, zero.ZeroConfig(stage=3))
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    (square_loss(model, batch(dist.get_rank(), 0)) + other.weight.square().sum()).backward()
    before = other.weight.detach().clone()
    optimizer.step()
    return optimizer.param_groups[0]["fused"], torch.equal(before, other.weight)


def test_adam_is_left_alone_where_it_also_holds_plain_parameters() -> None:
    assert run_ranks(_step_with_a_plain_model, 2) == [(None, False)] * 2


class _SubclassedAdam(torch.optim.Adam):
    pass


def _stepped_on(kind: str, options: dict[str, Any], edit: str = "") -> tuple[set[str], set[str], bool, bool]:
    """Types of the tensors with which Adam computes, and of its states; whether it can be copied, and is freed."""
    model = Net()
    zero.shard_model(model, zero.ZeroConfig(stage=3))
    make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "subclass": _SubclassedAdam}[kind]
    optimizer = make(model.parameters(), **options)
    square_loss(model, batch(dist.get_rank(), 0)).backward()
    if edit == "replicated":
        for p in model.parameters():
            assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
            p.grad = p.grad.redistribute(placements=[Replicate()])
    types: set[str] = set()
    functions = sys.modules[torch.optim.Adam.__module__]
    compute = functions.adam

    def spy(*lists: list[Tensor], **arguments: Any) -> None:
        types.update(type(tensor).__name__ for tensors in lists[:4] for tensor in tensors)
        compute(*lists, **arguments)

    with mock.patch.object(functions, "adam", spy):
        optimizer.step()
    states = {type(state["exp_avg"]).__name__ for state in optimizer.state.values()}
    copied = copy.deepcopy(optimizer)
    is_copied = copied.state_dict().keys() == optimizer.state_dict().keys()
    gone = weakref.ref(optimizer)
    gc.disable()  # a cycle would keep its states until some later collection
    try:
        del optimizer
        return types, states, is_copied, gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "options", "edit", "types"),
    [
        ("adamw", {}, "", {"Tensor"}),
        ("adam", {"foreach": False}, "", {"Tensor"}),
        ("adamw", {"foreach": False}, "replicated", {"DTensor"}),
        ("subclass", {}, "", {"DTensor"}),
    ],
)
def test_adam_computes_on_rows_where_that_is_the_same(
    kind: str, options: dict[str, Any], edit: str, types: set[str]
) -> None:
    assert run_ranks(_stepped_on, 2, kind, options, edit) == [(types, {"DTensor"}, True, True)] * 2
