"""Parameters that somebody has kept from before the model was partitioned: every use raises, holding them does not."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.engine.parameters.replaced import current
from hf_zero.errors import PartitionError
from tests.engine.twins import EXCHANGES, SHARDED, Net, batch, square_loss
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
USES: list[Callable[[nn.Parameter], Any]] = [
    lambda w: nn.functional.linear(torch.ones(1, 3), w),
    lambda w: w.sum(),
    lambda w: w + 1,
    lambda w: w[0],
    lambda w: w.data,
    lambda w: w.grad,
    lambda w: w.detach(),
    lambda w: w.requires_grad,
    lambda w: w.tolist(),
    lambda w: w.mul_(2),
    lambda w: setattr(w, "data", torch.ones(5, 3)),
    lambda w: torch._foreach_mul_([w], 2.0),
    lambda w: nn.utils.clip_grad_norm_([w], 1.0),
    lambda w: torch.optim.SGD([w], lr=0.1),
    lambda w: setattr(nn.Linear(3, 5), "weight", w),
    lambda w: nn.init.normal_(w),
    lambda w: copy.copy(w),
    lambda w: zero.GatheredParameters([w]),
]


class _Tied(nn.Module):
    """Uses the weight of its first layer a second time, as it has kept it."""

    def __init__(self, keep: Callable[[nn.Module, nn.Parameter], Kept]) -> None:
        super().__init__()
        self.net = Net()
        self._kept_weight = keep(self, self.net.enter.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + nn.functional.linear(self.net.enter(x), self._kept_weight().T)


@on_ranks(2, 3, stage=SHARDED, collectives=EXCHANGES, keep=WAYS)
def test_a_parameter_kept_from_before_is_not_used_silently(
    stage: int, collectives: str, keep: Callable[[nn.Module, nn.Parameter], Kept]
) -> None:
    model = _Tied(keep)
    zero.shard_model(model, zero.ZeroConfig(stage=stage, collectives=collectives))
    with pytest.raises(
        PartitionError, match=r"'net\.enter\.weight' is used as it was before the model was partitioned"
    ):
        square_loss(model, batch(0, 0)).backward()
    square_loss(model.net, batch(0, 0)).backward()  # what does not use it goes on


@on_ranks(2, stage=SHARDED)
def test_no_use_of_what_was_replaced_is_silent(stage: int) -> None:
    model = Net()
    kept = model.enter.weight
    zero.shard_model(model, zero.ZeroConfig(stage=stage))
    silent = []
    for number, use in enumerate(USES):
        try:
            use(kept)
        except PartitionError as error:
            assert "enter" in str(error), number
        else:
            silent.append(number)
    assert silent == []


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
def test_a_parameter_kept_by_a_constructor_is_not_used_silently(stage: int) -> None:
    with zero.Init(zero.ZeroConfig(stage=stage)):
        model = _KeptInItsConstructor()
    with pytest.raises(PartitionError, match="'weight' is used as it was before the model was partitioned"):
        square_loss(model, batch(0, 0)).backward()
