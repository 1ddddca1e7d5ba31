"""Floating inputs under a compute dtype: cast at the entry of the model and of its units, as FSDP2 does by default."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import hf_zero as zero
from hf_zero.engine.modules import inputs as inputs_of_calls
from tests.ranks import on_ranks

BF16 = torch.bfloat16


@dataclass
class Sample:
    """A container that torch's trees do not know."""

    x: Tensor
    ids: Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: list[Tensor]) -> Tensor:
        return x + self.linear(x) * scale[0]


class Net(nn.Module):
    """Takes its inputs in every kind of container, and hands its units float32 again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.seen: list[Any] = []

    def forward(
        self, x: Tensor, pair: tuple[Tensor, Tensor], *, extra: dict[str, list[Tensor]], sample: Sample
    ) -> Tensor:
        given = (x, *pair, *extra["more"], sample.x, sample.ids)
        self.seen.append([tensor.dtype for tensor in given])
        x = self.first(x + pair[0] + extra["more"][0] + sample.x)
        for block in self.blocks:
            x = block(x.float(), scale=[torch.full((), 0.5)])
        return self.norm(x.float()).square().mean()


def inputs(rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    x, *others = (torch.randn(3, 4, generator=generator) for _ in range(4))
    sample = Sample(others[2], torch.arange(3))
    return (x, (others[0], torch.arange(4))), {"extra": {"more": [others[1].double()]}, "sample": sample}


def by_hand(model: Net, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a plain model in bfloat16, whose units cast by hand."""
    (x, pair), given = inputs(rank)
    model = copy.deepcopy(model).to(BF16)
    for module in (*model.blocks, model.norm):
        module.register_forward_pre_hook(
            lambda module, args, kwargs: (
                tuple(each.to(BF16) for each in args),
                {name: [each.to(BF16) for each in value] for name, value in kwargs.items()},
            ),
            with_kwargs=True,
        )
    sample = Sample(given["sample"].x.to(BF16), given["sample"].ids)
    loss = model(
        x.to(BF16), (pair[0].to(BF16), pair[1]), extra={"more": [given["extra"]["more"][0].to(BF16)]}, sample=sample
    )
    loss.backward()
    return loss.detach(), {
        name: param.grad.float() for name, param in model.named_parameters() if param.grad is not None
    }


@on_ranks(2, stage=[0, 1, 2, 3], exchange=["pairwise", "host"], prefetch=[0])
def test_inputs_are_cast_in_every_container(stage: int, exchange: str, prefetch: int) -> None:
    torch.manual_seed(0)
    model = Net()
    wanted = [by_hand(model, rank) for rank in range(dist.get_world_size())]
    units = ["Block", "Linear", "LayerNorm"]
    config = {
        "stage": stage,
        "compute_dtype": "bfloat16",
        "units": units,
        "collectives": exchange,
        "prefetch_bytes": prefetch,
    }
    zero.shard_model(model, config)
    args, kwargs = inputs(dist.get_rank())
    loss = model(*args, **kwargs)
    assert model.seen == [[BF16, BF16, torch.int64, BF16, BF16, torch.int64]]
    assert kwargs["sample"].x.dtype == torch.float32  # the caller's own stays as it is
    assert loss.item() == wanted[dist.get_rank()][0].item()
    loss.backward()
    for name, param in model.named_parameters():
        found = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
        mean = torch.stack([gradients[name] for _, gradients in wanted]).mean(0)
        torch.testing.assert_close(found, mean, rtol=1e-6, atol=1e-7, msg=name)


class Pair(NamedTuple):
    """One that torch's trees know."""

    x: Tensor
    other: int


class Own:
    """What nobody looks into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    "contain",
    [
        lambda x: x,
        lambda x: nn.Parameter(x),
        lambda x: (None, [x]),
        lambda x: {"a": [x, 1], "b": "c"},
        lambda x: OrderedDict(a=x),
        lambda x: Pair(x, 3),
        lambda x: {"a": Sample(torch.arange(3), x)},
        lambda x: pack_padded_sequence(x, torch.tensor([2, 1]), batch_first=True),
        lambda x: [Own(x)],
    ],
)
def test_a_container_is_looked_into_where_it_would_be_changed(contain: Callable[[Tensor], Any]) -> None:
    given = contain(torch.randn(2, 3, 4))
    changed: list[Tensor] = []

    def change(tensor: Tensor) -> Tensor:
        if is_float(tensor):
            changed.append(tensor)
        return tensor

    inputs_of_calls._map_tensors(change, (given,))
    assert inputs_of_calls._any(is_float, (given,)) is bool(changed)
    assert inputs_of_calls._any(lambda tensor: False, (given,)) is False


def is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: PackedSequence) -> Tensor:
        return self.lstm(x)[0].data.float().mean()


@on_ranks(2, stage=[1, 3])
def test_packed_sequences_and_switching_off(stage: int) -> None:
    packed = pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    half = {"stage": stage, "compute_dtype": "bfloat16"}
    model = Packed()
    zero.shard_model(model, half)
    model(packed).backward()
    model = Packed()
    zero.shard_model(model, {**half, "cast_forward_inputs": False})
    with pytest.raises((RuntimeError, ValueError)):
        model(packed)


@on_ranks(2, stage=[1, 3])
def test_modules_in_float32_and_calls_under_autocast_get_what_they_were_given(stage: int) -> None:
    for is_autocast in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        kept = {} if is_autocast else {"keep_fp32": ["0"]}
        zero.shard_model(model, {"stage": stage, "compute_dtype": "bfloat16", "units": ["Linear"], **kept})
        seen: list[torch.dtype] = []
        for module in model:
            module.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].dtype))
        with torch.autocast("cpu", BF16, enabled=is_autocast):
            (model if is_autocast else model[0])(torch.randn(2, 4)).sum().backward()
        assert seen == ([torch.float32, BF16] if is_autocast else [torch.float32])
