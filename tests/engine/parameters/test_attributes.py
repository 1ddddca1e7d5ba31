"""What users set on a parameter (`weight.mask = ...`) is found on whatever stands for it, and back."""

import copy

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED
from tests.ranks import on_ranks


class Scaled(nn.Linear):
    """Reads what its weight was given, and gives it something; names with underscores are users', too."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.calls = getattr(self.weight, "calls", 0) + 1
        self.weight._times = self.weight.calls * 0.5
        return nn.functional.linear(x, self.weight * getattr(self.weight, "mask", 1.0), self.bias)


class Parent(nn.Module):
    """Reads and sets attributes of weights of its parts, before, between and after their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(4, 4), Scaled(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.second.weight
        scale = weight.scale * getattr(weight, "calls", 0) + getattr(self.first.weight, "_times", 0)
        self.second.weight.mask = torch.arange(12.0).view(3, 4) % 3
        weight.seen = [*getattr(weight, "seen", []), scale]
        y = self.second(self.first(x)) * (1 + scale)
        if hasattr(self.first.weight, "once"):
            del self.first.weight.once
        return y + self.second.weight.calls + weight._times


def _pair(stage: int, collectives: str, **config: object) -> tuple[Parent, Parent]:
    model = Parent()
    reference = copy.deepcopy(model)
    zero.shard_model(model, {"stage": stage, "collectives": collectives, "timeout_s": 20, **config})
    return model, reference


def _attributes(param: nn.Parameter) -> dict[str, object]:
    return {key: value for key, value in vars(param).items() if not key.startswith(("_zero", "_is_param"))}


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_attributes_are_one_for_all_that_stands_for_a_parameter(stage: int, collectives: str) -> None:
    model, reference = _pair(stage, collectives)
    x = torch.randn(2, 4)
    for each in (model, reference):
        each.second.weight.scale = 0.25
        each.first.weight.once = True
    for is_training in (True, False, True):
        with torch.set_grad_enabled(is_training):
            found, expected = model(x), reference(x)
        torch.testing.assert_close(found, expected)
        if is_training:
            found.sum().backward()
            expected.sum().backward()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert str(_attributes(one)) == str(_attributes(other))
    assert not hasattr(model.first.weight, "once")
    torch.testing.assert_close(model.second.weight.grad.full_tensor(), reference.second.weight.grad)


@on_ranks(2, stage=SHARDED)
def test_attributes_set_inside_gathered_parameters_are_found_outside(stage: int) -> None:
    model, _ = _pair(stage, "pairwise")
    weight = model.second.weight
    weight.mask, weight.gone = 1.0, 1.0
    with zero.GatheredParameters(model.second):
        model.second.weight.mask = (model.second.weight > 0).float()
        model.second.weight._mine = 2
        weight.outside = 3
        assert model.second.weight.outside == 3
        del model.second.weight.gone
    assert model.second.weight is weight
    assert weight.mask.shape == (3, 4)
    assert weight._mine == 2
    assert not hasattr(weight, "gone")


@on_ranks(2, stage=SHARDED)
def test_attributes_that_nobody_has_set_are_missed_as_on_any_tensor(stage: int) -> None:
    model, _ = _pair(stage, "pairwise")
    seen = []
    model.second.weight.k = 1

    def look(module: Scaled, args: tuple[Tensor]) -> None:
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = module.weight.nothing
        with pytest.raises(AttributeError):
            del module.weight.nothing
        module.weight.requires_grad_()  # attributes of torch's own stay the tensor's
        assert isinstance(module.weight, nn.Parameter)
        other = nn.Module()  # of no sharded model
        other.weight = module.weight
        assert other.weight is module.weight and not other._parameters
        seen.append(module.weight)

    model.second.register_forward_pre_hook(look)
    model.second.weight.scale = 1.0
    model(torch.randn(2, 4))
    assert seen[0].k == 1  # also what somebody has kept


@pytest.mark.slow  # a compiler starts
@on_ranks(2, stage=SHARDED)
def test_attributes_are_seen_by_compiled_code(stage: int) -> None:
    model, reference = _pair(stage, "pairwise")
    x = torch.randn(2, 4)
    for each in (model, reference):
        each.second.weight.scale = 0.25
        compiled = torch.compile(each, backend="eager")
        compiled(x).sum().backward()
        compiled(x).sum().backward()
    torch.testing.assert_close(model.second.weight.grad.full_tensor(), reference.second.weight.grad)
