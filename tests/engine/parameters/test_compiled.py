"""Functions of a user's own under `torch.compile`, given what is at rest."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import SHARDED, Net, Twins, batch, whole
from tests.ranks import by_hand, on_ranks


def _loss(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (nn.functional.linear(h, weight) + bias).pow(2).mean()


def _decay(params: list[Tensor]) -> None:
    for param in params:
        param.mul_(0.9)


def _penalty(model: nn.Module) -> Any:
    return sum(param.pow(2).sum() for param in model.parameters())


class _Short(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:1]


@on_ranks(2, stage=SHARDED, backend=["aot_eager", *by_hand("eager")])
def test_compiled_functions_compute_with_the_whole(stage: int, backend: str) -> None:
    torch.compiler.reset()
    loss, decay, penalty = (torch.compile(each, backend=backend) for each in (_loss, _decay, _penalty))

    def total(model: nn.Module, x: Tensor) -> Tensor:
        h = model.enter(x)
        for block in model.blocks:
            h = block(h)
        return loss(h, model.head.weight, model.head.bias) + 0.1 * penalty(model)

    twins = Twins(stage, _Short, loss=total, timeout_s=20)
    for _ in range(2):
        twins.step()
        with torch.no_grad():
            decay(list(twins.model.parameters()))
            decay(list(twins.reference.parameters()))
    with torch.no_grad():
        x = batch(0, 0)
        torch.testing.assert_close(total(twins.model, x), total(twins.reference, x))
    torch.compiler.reset()


@on_ranks(2, stage=SHARDED)
def test_blocks_are_compiled_anew_for_other_lengths_while_there_are_gradients(stage: int) -> None:
    torch.compiler.reset()
    twins = Twins(stage, timeout_s=20)
    for block in twins.model.blocks:
        block.forward = torch.compile(block.forward, backend="eager")
    for length in (4, 6, 9):
        x = torch.randn(length, 3, generator=torch.Generator().manual_seed(length))
        for model in (twins.model, twins.reference):
            model(x).pow(2).mean().backward()
    for param, other in zip(twins.model.parameters(), twins.reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), other.grad)
    torch.compiler.reset()


@on_ranks(2, stage=SHARDED)
def test_compiled_functions_without_a_break_say_so(stage: int) -> None:
    twins = Twins(stage, timeout_s=20)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="PartitionedTensor"):
        torch.compile(_loss, backend="eager", fullgraph=True)(torch.ones(2, 5), *twins.model.head.parameters())
    with pytest.raises(zero.UsageError, match=r"torch\.jit\.script cannot compile the hooks"):
        torch.jit.script(twins.model)
