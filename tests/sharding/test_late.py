"""Engines that come late or come anew: what optimizers hold stays what the model holds, or the step says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import BertModel

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, STAGES, Net, Twins, batch, square_loss, whole
from tests.models import CASES, make_model, train
from tests.ranks import on_ranks


class Library(nn.Module):
    """As libraries do that have a model in one of theirs: not the model is called, but its `forward`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs: Any) -> Any:
        return self.inner.forward(**kwargs)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _pooled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["input_ids"]).last_hidden_state.pow(2).mean()


def assert_holds_all(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    held = [id(param) for group in optimizer.param_groups for param in group["params"]]
    assert held == [id(param) for param in model.parameters()]


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_model_inside_a_librarys_keeps_the_parameters_that_the_optimizer_holds(stage: int, collectives: str) -> None:
    """It was partitioned as it was made, and its first part is called while an engine has its tensors whole."""
    config = make_model(CASES["bert"]).config
    reference = Library(BertModel(config))
    with zero.Init({"stage": stage, "collectives": collectives}):
        inner = BertModel(config)
    inner.load_state_dict(reference.inner.state_dict())
    model = Library(inner)
    zero.shard_model(model)
    optimizer, ranks = sgd(model), range(dist.get_world_size())
    losses, _ = train(model, optimizer, _pooled, CASES["bert"].batch)
    wanted, _ = train(reference, sgd(reference), _pooled, CASES["bert"].batch, ranks=ranks)
    assert_holds_all(optimizer, model)
    assert losses == pytest.approx(wanted[dist.get_rank() :: len(ranks)], rel=1e-5)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q.detach(), rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)


@on_ranks(2, stage=SHARDED)
def test_parts_run_no_more_hooks_than_those_of_a_model_that_was_made_whole(stage: int) -> None:
    """A hook on each part waits for an engine until there is one; then each call of a part would pay for it."""

    def num_hooks(model: nn.Module) -> list[int]:
        model(**CASES["llama"].batch(0, dist.get_rank()))
        return [len(part._forward_pre_hooks) for part in model.modules() if part is not model]

    with zero.Init({"stage": stage}):
        early = make_model(CASES["llama"])
    late = make_model(CASES["llama"])
    for model in (early, late):
        zero.shard_model(model, {"stage": stage})
    assert num_hooks(early) == num_hooks(late)


# --- inside GatheredParameters --------------------------------------------------------------------------------------


@on_ranks(2, stage=SHARDED)
def test_partitioning_again_while_parameters_are_whole_for_a_while_changes_nothing(stage: int) -> None:
    model = Net()
    engine = zero.shard_model(model, {"stage": stage})
    optimizer = sgd(model)
    with zero.GatheredParameters(model):
        assert zero.shard_model(model) is engine
    assert_holds_all(optimizer, model)


@on_ranks(2, stage=SHARDED)
def test_new_modules_wait_until_parameters_are_at_rest_again(stage: int) -> None:
    for some in (slice(None), slice(2)):
        model = Net()
        engine = zero.shard_model(model, {"stage": stage})
        optimizer = sgd(model)
        with zero.GatheredParameters(list(model.parameters())[some]), torch.no_grad():
            model.more = nn.Linear(2, 2)
            model(batch(0, 0))
        assert zero.engine_of(model) is engine
        square_loss(model, batch(0, dist.get_rank())).backward()
        assert zero.engine_of(model) is not engine
        optimizer.add_param_group({"params": list(model.more.parameters())})
        assert_holds_all(optimizer, model)


@on_ranks(2, stage=SHARDED)
def test_first_forward_while_some_parameters_are_whole_is_refused_and_may_come_later(stage: int) -> None:
    with zero.Init({"stage": stage}):
        model = Net()
    optimizer = sgd(model)
    with zero.GatheredParameters(model.head), pytest.raises(zero.UsageError, match=r"'head\.weight' is whole"):
        model(batch(0, 0))
    square_loss(model, batch(0, dist.get_rank())).backward()
    assert zero.engine_of(model) is not None
    assert_holds_all(optimizer, model)


@on_ranks(2, stage=[1, 3])
def test_whole_tensors_of_a_call_are_never_partitioned(stage: int) -> None:
    model, config = Net(), {"stage": stage}
    zero.shard_model(model, config)
    model.enter.register_forward_pre_hook(lambda module, _: zero.shard_model(module, config) and None)
    with pytest.raises(zero.UsageError, match=r"'weight' is whole for the length of a call"):
        model(batch(0, 0))


# --- what the model no longer has -----------------------------------------------------------------------------------


def _new_head(model: Net) -> None:
    torch.manual_seed(1)
    model.head = nn.Linear(5, 3)


def _new_weight(model: Net) -> None:
    torch.manual_seed(1)
    model.head.weight = nn.Parameter(torch.randn(3, 5))


def _resized_inside(model: Net) -> None:
    with zero.GatheredParameters(model.head):
        model.head.weight.data = torch.ones(4, 5)
        model.head.bias.data = torch.ones(4)


@on_ranks(2, stage=STAGES, change=[_new_head, _new_weight, _resized_inside])
def test_step_tells_of_a_parameter_that_no_optimizer_holds_any_more(stage: int, change: Callable[[Net], None]) -> None:
    model = Net()
    zero.shard_model(model, {"stage": stage})
    optimizer = sgd(model)
    for step in range(2):
        if step:
            change(model)
        optimizer.zero_grad()
        square_loss(model, batch(step, dist.get_rank())).backward()
        if step == 0:
            optimizer.step()
    if stage == 0 and change is _resized_inside:
        return  # plain parameters have other data, and are the same
    with pytest.raises(zero.PartitionError, match=r"'head\.weight' .* has taken its place"):
        optimizer.step()


@on_ranks(2, stage=[0, 1, 3], how=["another optimizer", "a new one", "frozen", "fewer layers"])
def test_step_trains_what_has_changed_as_one_process_does(stage: int, how: str) -> None:
    models = reference, model = [Net(), Net()]
    model.load_state_dict(reference.state_dict())
    zero.shard_model(model, {"stage": stage})
    ranks = range(dist.get_world_size())
    for each in models:
        own = None if each is model else ranks
        optimizers = [sgd(each)]

        def step(each: nn.Module, first: int, optimizers: list[Any], own: Any) -> None:
            for number in range(first, first + 2):
                train(each, optimizers[0], square_loss, batch, [number], own)
                for more in optimizers[1:]:
                    more.step()
                    more.zero_grad()

        step(each, 0, optimizers, own)
        if how == "fewer layers":
            each.blocks = each.blocks[1:]
        else:
            _new_head(each)
        if how == "another optimizer":
            each(batch(0, 0))  # partitions the new head
            optimizers.append(sgd(each.head))
        elif how == "a new one":
            each(batch(0, 0))
            optimizers = [sgd(each)]
        elif how == "frozen":
            each.head.requires_grad_(False)
        step(each, 2, optimizers, own)
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(
            whole(p), q[1].detach(), rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text
        )


@on_ranks(2, stage=[1, 3])
def test_part_that_is_called_by_itself_sees_what_the_model_has_got(stage: int) -> None:
    """`model.forward`, and a module of blocks, run the hooks of inner modules only."""
    models = reference, model = [nn.Sequential(Net(), Net()), nn.Sequential(Net(), Net())]
    model.load_state_dict(reference.state_dict())
    zero.shard_model(model, {"stage": stage})
    rank = dist.get_rank()
    for each in models:
        _new_head(each[0])
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model.forward(batch(0, rank)), reference(batch(0, rank)))
    model.forward(batch(0, rank)).pow(2).mean().backward()
    (sum(reference(batch(0, each)).pow(2).mean() for each in range(2)) / 2).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-6)


# --- lazy modules ---------------------------------------------------------------------------------------------------


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.Linear(5, 3))


def test_what_is_no_model_is_refused() -> None:
    for given in ([nn.Linear(2, 2)], nn.Linear(2, 2).parameters(), None):
        with pytest.raises(zero.PartitionError, match=r"shard_model takes a model, a torch.nn.Module, and not"):
            zero.shard_model(given, 3)


@on_ranks(2, stage=[0, 1, 3])
def test_lazy_modules_see_an_example_before_they_are_partitioned(stage: int) -> None:
    reference, model = _lazy(), _lazy()
    with pytest.raises(zero.PartitionError, match=r"0\.weight of Sequential has no shape yet"):
        zero.shard_model(model, {"stage": stage})
    with zero.Init({"stage": stage}):
        constructed = _lazy()
    with pytest.raises(zero.PartitionError, match="no shape yet"):
        constructed(batch(0, 0))
    with torch.no_grad():
        for each in (reference, model, constructed):
            each(batch(0, 0))
    zero.shard_model(model, {"stage": stage})
    ranks = range(dist.get_world_size())
    for each in (model, constructed):
        each(batch(0, 0))  # makes the engine
        each.load_state_dict(reference.state_dict())
        oracle = copy.deepcopy(reference)
        train(each, sgd(each), square_loss, batch)
        train(oracle, sgd(oracle), square_loss, batch, ranks=ranks)
        for p, q in zip(each.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(whole(p), q.detach(), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_block_compiled_as_one_graph_is_told_what_to_compile() -> None:
    torch.compiler.reset()  # code that an earlier job has compiled, with breaks, would be run
    model = Net()
    reference = copy.deepcopy(model)
    zero.shard_model(model, {"stage": 3})
    model.blocks[1].compile(fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"block\.forward = torch\.compile"):
        model(batch(0, 0))
    model.blocks[1]._compiled_call_impl = None
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="eager")
    torch.testing.assert_close(model(batch(0, 0)), reference(batch(0, 0)))


class _Dropped(nn.Module):
    """Computes a weight of its part in each forward, as weight dropout does."""

    def __init__(self, is_attribute: bool) -> None:
        super().__init__()
        self.raw, self.part, self.head = nn.Parameter(torch.randn(4, 3)), nn.Linear(3, 4), nn.Linear(4, 3)
        self.part._parameters["weight"] = None
        self.is_attribute = is_attribute
        if is_attribute:
            del self.part._parameters["weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        computed = self.raw * torch.tensor([1.0, 0.0, 2.0])
        if self.is_attribute:
            self.part.weight = computed
        else:
            self.part._parameters["weight"] = computed
        return self.head(self.part(x))


@on_ranks(2, stage=SHARDED)
def test_a_computed_tensor_among_parameters_is_named_and_works_as_an_attribute(stage: int) -> None:
    model = _Dropped(is_attribute=False)
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    square_loss(model, batch(0, 0)).backward()
    told = r"'part\.weight' of _Dropped is no parameter.*del module\._parameters\['weight'\]"
    with pytest.raises(zero.UsageError, match=told):
        model(batch(0, 0))
    twins = Twins(stage, lambda: _Dropped(is_attribute=True))
    twins.step(3)
