"""Parameters that somebody has kept from before the model was partitioned: every use is one of what the model holds now."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hf_zero as zero
from hf_zero.engine.parameters.replaced import current, is_replaced
from hf_zero.errors import PartitionError
from tests.engine.twins import EXCHANGES, SHARDED, Net, Twins, assert_same, batch, square_loss, whole
from tests.ranks import on_ranks

Kept = Callable[[], nn.Parameter]


def _in_a_private_list(model: nn.Module, weight: nn.Parameter) -> Kept:
    model._kept = [weight]
    return lambda: model._kept[0]


def _in_a_private_dict(model: nn.Module, weight: nn.Parameter) -> Kept:
    model._kept = {"weight": weight}
    return lambda: model._kept["weight"]


def _beside_the_parameters(model: nn.Module, weight: nn.Parameter) -> Kept:
    object.__setattr__(model, "kept", weight)
    return lambda: model.kept


def _in_a_partial(model: nn.Module, weight: nn.Parameter) -> Kept:
    partial = functools.partial(nn.functional.linear, weight=weight)
    return lambda: partial.keywords["weight"]


def _in_a_closure(model: nn.Module, weight: nn.Parameter) -> Kept:
    return lambda: weight


WAYS = [_in_a_private_list, _in_a_private_dict, _beside_the_parameters, _in_a_partial, _in_a_closure]


def _stepped(weight: nn.Parameter) -> Tensor:
    weight.grad = torch.ones(5, 3)
    torch.optim.SGD([weight], lr=0.1, momentum=0.9).step()
    return weight.detach()


def _registered(weight: nn.Parameter) -> list[Any]:
    module = nn.Linear(3, 5, bias=False)
    module.weight = weight
    return [module(torch.ones(1, 3)), repr(module.weight)]


def _gathered(weight: nn.Parameter) -> Tensor:
    with zero.GatheredParameters([weight]):
        return weight.detach().clone()


USES: list[Callable[[nn.Parameter], Any]] = [
    lambda w: nn.functional.linear(torch.ones(1, 3), w),
    lambda w: w.sum(),
    lambda w: 1 + w,
    lambda w: w[0],
    lambda w: w.data,
    lambda w: setattr(w, "grad", torch.ones(5, 3)),
    lambda w: w.grad,
    lambda w: nn.utils.clip_grad_norm_([w], 1.0),
    lambda w: (w.grad, delattr(w, "grad"), w.grad),
    lambda w: w.detach(),
    lambda w: (w.requires_grad, w.is_leaf, w.shape, w.dtype, w.numel(), len(w), w.itemsize),
    lambda w: w.tolist(),
    lambda w: w.data.mul_(2),
    lambda w: setattr(w, "data", torch.ones(5, 3)),
    lambda w: torch._foreach_mul([w], 2.0),
    lambda w: _stepped(w),
    lambda w: _registered(w),
    lambda w: nn.init.constant_(w, 3.0),
    lambda w: copy.copy(w),
    lambda w: copy.deepcopy(w),
    lambda w: _gathered(w),
    lambda w: setattr(w, "mask", 3),
    lambda w: w.mask,
    lambda w: w.full_tensor(),
    lambda w: w.no_such_attribute,
    lambda w: torch.autograd.grad(w.sum(), [w]),
]


class _Tied(nn.Module):
    """Uses the weight of its first layer a second time, as it has kept it."""

    def __init__(self, keep: Callable[[nn.Module, nn.Parameter], Kept]) -> None:
        super().__init__()
        self.net = Net()
        self._keep = keep
        self._kept_weight = keep(self, self.net.enter.weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        new = _Tied(self._keep)
        new.load_state_dict(self.state_dict())
        return new

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + nn.functional.linear(self.net.enter(x), self._kept_weight().T)


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES, keep=WAYS)
def test_a_parameter_kept_from_before_is_the_models_own(
    stage: int, collectives: str, keep: Callable[[nn.Module, nn.Parameter], Kept]
) -> None:
    twins = Twins(stage, make=lambda: _Tied(keep), collectives=collectives)
    assert is_replaced(twins.model._kept_weight())
    twins.step(2)


@on_ranks(2, stage=SHARDED)
def test_lists_made_before_are_clipped_and_stepped_on(stage: int) -> None:
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    kept = [[*each.parameters()] for each in (model, reference)]
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    optimizers = [torch.optim.AdamW(params, lr=0.1) for params in kept]
    for step in range(3):
        square_loss(model, batch(step, 0)).backward()
        square_loss(reference, batch(step, 0)).backward()
        norms = [nn.utils.clip_grad_norm_(params, 0.1) for params in kept]
        torch.testing.assert_close(*norms)
        for optimizer, params in zip(optimizers, kept, strict=True):
            optimizer.step()
            for param in params:
                param.grad = None
        assert_same(model, reference)


def _outcome(use: Callable[[nn.Parameter], Any], weight: nn.Parameter) -> list[Any]:
    try:
        leaves = pytree.tree_leaves(use(weight))
    except (RuntimeError, AttributeError) as error:
        return [f"{type(error).__name__}: {error}"]
    return [whole(leaf) if isinstance(leaf, Tensor) else f"{leaf}" for leaf in leaves]


@on_ranks(2, stage=SHARDED)
def test_every_use_of_what_was_replaced_is_one_of_what_is_current(stage: int) -> None:
    torch.manual_seed(0)
    models = [Net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    kept = models[0].enter.weight
    for model in models:
        zero.shard_model(model, zero.ZeroConfig(stage=stage))
    assert is_replaced(kept)
    for number, use in enumerate(USES):
        for actual, expected in zip(_outcome(use, kept), _outcome(use, models[1].enter.weight), strict=True):
            assert type(actual) is type(expected), (number, actual, expected)
            if isinstance(actual, Tensor):
                torch.testing.assert_close(actual, expected, msg=lambda text, number=number: f"use {number}: {text}")
            else:
                assert actual == expected, number
        torch.testing.assert_close(*(whole(model.enter.weight) for model in models))


@on_ranks(2, stage=SHARDED)
def test_what_was_replaced_is_held_compared_printed_and_copied(stage: int) -> None:
    model = Net()
    kept, key = model.enter.weight, hash(model.enter.weight)
    model._kept = [kept]
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    assert kept is model._kept[0] and kept in [kept] and {kept: 1}[kept] == 1 and hash(kept) == key
    assert isinstance(kept, nn.Parameter) and kept is not model.enter.weight and current(kept) is model.enter.weight
    assert (kept.shape, kept.dtype, kept.numel(), kept.size(1)) == ((5, 3), torch.float32, 15, 3)
    assert "enter.weight" in repr(kept) and "enter.weight" in f"{kept}"
    copied = copy.deepcopy(model)
    assert copied._kept[0] is copied.enter.weight is not model.enter.weight
    torch.testing.assert_close(copied(batch(0, 0)), model(batch(0, 0)))


@on_ranks(2, stage=SHARDED)
def test_what_was_replaced_gives_its_memory_back(stage: int) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    kept = [*model.parameters()]
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    with torch._C.DisableTorchFunctionSubclass():
        assert [param.untyped_storage().nbytes() for param in kept] == [4] * 4
    assert [param.numel() for param in kept] == [10_000, 100] * 2


@on_ranks(2, stage=SHARDED)
def test_a_graph_from_before_has_no_gradient_to_give(stage: int) -> None:
    model = Net()
    loss = square_loss(model, batch(0, 0))
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    with pytest.raises(PartitionError, match="a graph that was made before the model was partitioned"):
        loss.backward()


@on_ranks(2, stage=SHARDED)
def test_hooks_of_what_was_replaced_stay_those_of_the_parameter(stage: int) -> None:
    model, seen = Net(), []
    handle = model.enter.weight.register_hook(lambda grad: seen.append(grad.shape))
    kept = model.enter.weight
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    square_loss(model, batch(0, 0)).backward()
    handle.remove()
    square_loss(model, batch(0, 0)).backward()
    assert seen == [(5, 3)] and repr(kept)


class _KeptInItsConstructor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        weight = nn.Parameter(torch.empty(3, 5))
        self.weight = weight
        nn.init.normal_(weight)  # the constructor may go on with what it has made
        self.apply_weight = functools.partial(nn.functional.linear, weight=weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.apply_weight(self.net.enter(x))


@on_ranks(2, stage=SHARDED)
def test_a_parameter_kept_by_a_constructor_is_the_models_own(stage: int) -> None:
    with zero.Init(zero.ZeroConfig(stage=stage)):
        model = _KeptInItsConstructor()
    reference = _KeptInItsConstructor()
    reference.load_state_dict(model.state_dict())
    for each in (model, reference):
        square_loss(each, batch(0, 0)).backward()
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), other.grad, msg=name)
