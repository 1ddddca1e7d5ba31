"""Methods beside `forward` that compute with parameters."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import Block, Twins, batch
from tests.ranks import alone, on_ranks


def _twice(method: Any) -> Any:
    def decorated(*args: Any) -> Tensor:  # without `functools.wraps`
        return 2 * method(*args)

    return decorated


class Encoder(nn.Module):
    """`encode` reads parameters of the model itself and calls its blocks; `project` belongs to a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 5))
        self.blocks = nn.ModuleList(Block(5) for _ in range(2))
        self.head = Projection()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))

    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Docstring of encode."""
        x = x @ self.table * scale
        for block in self.blocks:
            x = block(x)
        return x

    def fail(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError(str(float((x @ self.table).sum())))


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def project(self, x: Tensor) -> Tensor:
        return x @ self.weight

    alias = project
    decorated = _twice(project)


class Overriding(Projection):
    def project(self, x: Tensor) -> Tensor:
        raise AssertionError("another method of the alias's name")


def _loss(model: Encoder, x: Tensor) -> Tensor:
    return model.head.project(model.encode(x, scale=0.5)).pow(2).mean() + model(x).mean()


@on_ranks(2, stage=[0, 1, 3], when=["before", "after"])
def test_registered_method_trains_as_forward_does(stage: int, when: str) -> None:
    def make() -> nn.Module:
        model = Encoder()
        if when == "before":
            _register(model)
        return model

    twins = Twins(stage, make, _loss)
    if when == "after":
        _register(twins.model)
    twins.step(3)
    with torch.no_grad():
        torch.testing.assert_close(twins.model.encode(batch(0, 0)), twins.reference.encode(batch(0, 0)))
    assert "forward" not in twins.model.__dict__


def _register(model: Encoder) -> None:
    for _ in range(2):  # a second registration does nothing
        zero.register_forward_method(model, "encode")
        zero.register_forward_method(model.head, "project")


@on_ranks(2, stage=[1, 3])
def test_method_that_is_not_registered_gathers_what_it_reads(stage: int) -> None:
    twins = Twins(stage, Encoder, _loss)
    twins.step(2)
    with torch.no_grad():
        torch.testing.assert_close(twins.model.encode(batch(0, 0)), twins.reference.encode(batch(0, 0)))


@on_ranks(2, stage=[1, 3])
def test_registered_method_that_raises_leaves_forward_as_it_was(stage: int) -> None:
    twins = Twins(stage, Encoder, _loss)
    _register(twins.model)
    zero.register_forward_method(twins.model, "fail")
    with pytest.raises(ZeroDivisionError):
        twins.model.fail(twins.own())
    assert "forward" not in twins.model.__dict__
    twins.step(2)


@on_ranks(2, stage=[0, 1, 3])
def test_registered_method_of_a_deep_copy_runs_the_copy(stage: int) -> None:
    twins = Twins(stage, Encoder, _loss)
    _register(twins.model)
    average, expected = copy.deepcopy(twins.model), copy.deepcopy(twins.reference)
    twins.step(2)
    with torch.no_grad():
        torch.testing.assert_close(average.encode(batch(0, 0)), expected.encode(batch(0, 0)))
        torch.testing.assert_close(average.head.project(torch.ones(5)), expected.head.project(torch.ones(5)))


@alone()
def test_registered_method_works_on_one_rank() -> None:
    twins = Twins(3, Encoder, _loss)
    _register(twins.model)
    twins.step(2)


def test_name_that_is_no_method_raises() -> None:
    for name in ("no_such", "blocks", "training"):
        with pytest.raises(zero.UsageError, match=name):
            zero.register_forward_method(Encoder(), name)


def test_registered_method_keeps_its_name_and_docstring() -> None:
    model = Encoder()
    zero.register_forward_method(model, "encode")
    assert model.encode.__name__ == "encode" and model.encode.__doc__ == "Docstring of encode."


@on_ranks(2, name=["alias", "decorated", "function"])
def test_what_is_registered_runs_whatever_its_own_name(name: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Block(3), nn.Linear(3, 5), Overriding())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return getattr(model[2], name)(model[1](model[0](x))).pow(2).mean()

    twins = Twins(3, make, loss)
    for model in (twins.model, twins.reference):
        model[2].function = lambda x, head=model[2]: x @ head.weight * 3
    zero.register_forward_method(twins.model[2], name)
    twins.step(2)
    if name != "function":  # which is bound to the first model by its closure
        average, expected = copy.deepcopy(twins.model), copy.deepcopy(twins.reference)
        twins.step()
        with torch.no_grad():
            average(batch(0, 0))  # starts the copy's engine
            torch.testing.assert_close(loss(average, batch(0, 0)), loss(expected, batch(0, 0)))
