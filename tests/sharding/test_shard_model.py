"""Models, configurations and ranks that cannot be partitioned together raise on all ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.sharding import shard_model as sharding
from hf_zero.sharding.whole_window import is_mapped
from tests.engine.twins import SHORT_S, STAGES, Net, Twins, batch, square_loss
from tests.ranks import on_ranks


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (DeepSpeedEngine, "DeepSpeedEngine"),
        (lambda: nn.DataParallel(Net()), "DataParallel"),
        (lambda: Net().to("meta"), "meta"),
        (_on_two_devices, "several devices"),
        (lambda: _complex(True), "phase is complex"),
    ],
    ids=["deepspeed", "data_parallel", "meta", "two_devices", "complex"],
)
def test_model_that_cannot_be_partitioned_raises(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    before = list(model.parameters())
    with pytest.raises(zero.PartitionError, match=message):
        zero.shard_model(model, zero.ZeroConfig(stage=3))
    assert all(left is right for left, right in zip(before, model.parameters(), strict=True))


@on_ranks(2)
def test_model_wrapped_by_ddp_or_fsdp_raises() -> None:
    for model in (DistributedDataParallel(Net()), fully_shard(Net())):
        with pytest.raises(zero.PartitionError, match=r"DistributedDataParallel|FSDPModule"):
            zero.shard_model(model, zero.ZeroConfig(stage=3))


@on_ranks(2, stage=[0, 1, 3])
def test_wrappers_of_torch_around_a_partitioned_child_are_refused_by_name(stage: int) -> None:
    model = nn.Sequential(Net(), nn.Linear(3, 3))
    zero.shard_model(model[0], {"stage": stage})
    by_hooks = (DistributedDataParallel, lambda each: replicate(each)(batch(0, 0)))
    for wrap in (*by_hooks, fully_shard, replicate_with_fsdp.replicate, FullyShardedDataParallel):
        with pytest.raises(zero.PartitionError, match=r"around (DDP)?Sequential, of which Net '0' is partitioned"):
            wrap(nn.Sequential(*model))
    with pytest.raises(zero.PartitionError, match="DistributedDataParallel around Net"):
        DistributedDataParallel(model[0])
    DistributedDataParallel(model[1])(batch(0, 0)).sum().backward()


@on_ranks(1)
def test_a_wrapper_around_one_rank_that_casts_is_refused() -> None:
    plain, cast = Net(), Net()
    zero.shard_model(plain, {"stage": 1})
    zero.shard_model(cast, {"stage": 1, "compute_dtype": "bfloat16"})
    DistributedDataParallel(plain)(batch(0, 0)).sum().backward()
    with pytest.raises(zero.PartitionError, match="DistributedDataParallel around Net"):
        DistributedDataParallel(cast)


class Phased(Net):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.exp(1j * torch.arange(3.0)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * self.phase).real)


@on_ranks(2, stage=STAGES)
def test_frozen_complex_parameter_works(stage: int) -> None:
    twins = Twins(stage, Phased)
    twins.step(2)


def refused(match: str, **changes: Any) -> None:
    """The model stays as it was, and can be partitioned otherwise."""
    model = Net()
    with pytest.raises(zero.ConfigError, match=match):
        zero.shard_model(model, zero.ZeroConfig(stage=3, **changes))
    assert not any(isinstance(p, DTensor) for p in model.parameters()), "the model was left half partitioned"
    zero.shard_model(model, zero.ZeroConfig(stage=3))
    square_loss(model, batch(0, 0)).backward()


@on_ranks(2)
def test_other_number_of_ranks_than_expected_raises() -> None:
    refused("expected_world_size is 4, but 2", expected_world_size=4)


@on_ranks(2)
def test_unknown_unit_class_raises_and_names_those_there_are() -> None:
    refused("^(?!.*ModuleList).*NoSuchClass.*Block", units=["NoSuchClass"])  # a ModuleList cannot be a unit


@on_ranks(2)
def test_ranks_with_different_configs_raise() -> None:
    with pytest.raises(zero.ConfigError, match="rank"):
        zero.shard_model(Net(), zero.ZeroConfig(stage=2 + dist.get_rank(), timeout_s=SHORT_S))


@on_ranks(2)
def test_ranks_with_different_models_raise() -> None:
    model = Net()
    if dist.get_rank() == 1:
        model.blocks = model.blocks[:2]
    with pytest.raises(zero.PartitionError, match="rank"):
        zero.shard_model(model, zero.ZeroConfig(stage=3, timeout_s=SHORT_S))


@on_ranks(2)
def test_buffers_of_all_kinds_are_those_of_rank_0() -> None:
    model = Net()
    kinds = (
        torch.bool,
        torch.uint16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint64,
        torch.complex64,
        torch.bfloat16,
    )
    for kind in kinds:
        values = torch.arange(6.0).view(2, 3).t() + 10 * dist.get_rank()
        model.register_buffer(f"as_{str(kind)[6:]}", values.to(kind))
    model.register_buffer("count", torch.tensor(dist.get_rank() + 3))
    model.register_buffer("nothing", torch.zeros(0))
    zero.shard_model(model, zero.ZeroConfig(stage=3))
    for kind in kinds:
        found = model.get_buffer(f"as_{str(kind)[6:]}")
        assert found.dtype == kind and torch.equal(
            found.to(torch.float64), torch.arange(6.0).view(2, 3).t().to(kind).double()
        )
    assert model.count == 3


@on_ranks(2, stage=STAGES, when=["before", "after", "after a step"])
def test_requires_grad_that_differs_between_ranks_raises_on_all(stage: int, when: str) -> None:
    model = Net()
    frozen = model.blocks[dist.get_rank()]  # as many parameters, with names as long, on both ranks
    if when == "before":
        frozen.requires_grad_(False)
    with pytest.raises(zero.PartitionError, match="requires_grad"):
        zero.shard_model(model, zero.ZeroConfig(stage=stage, timeout_s=SHORT_S))
        if when == "after a step":
            square_loss(model, batch(0, dist.get_rank())).backward()
        if when != "before":
            frozen.requires_grad_(False)
        square_loss(model, batch(0, dist.get_rank())).backward()


@pytest.mark.parametrize(
    ("backend", "expected"), [("gloo", "cpu"), ("nccl", "cuda:1"), ("cpu:gloo,cuda:nccl", "cuda:1"), (None, "cpu")]
)
def test_model_on_the_cpu_goes_to_the_accelerator_unless_its_ranks_are_cpus(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, expected: str
) -> None:
    monkeypatch.setattr(sharding, "default_group", lambda: None if backend is None else object())
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert sharding._device_of(Net()) == torch.device(expected)


@on_ranks(4)
def test_model_that_is_cut_over_other_ranks_is_refused() -> None:
    net = Net()
    zero.shard_model(net, {"stage": 3, "timeout_s": 20}).close()
    with pytest.raises(zero.PartitionError, match=r"is cut over 4 ranks, but .* over 2: make or load the model anew"):
        zero.shard_model(net, {"stage": 3, "replicate": 2, "timeout_s": 20})
    zero.shard_model(net, {"stage": 2, "timeout_s": 20})
    square_loss(net, batch(0, dist.get_rank())).backward()


_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@on_ranks(2, stage=[1, 3])
def test_what_is_mapped_from_a_file_is_not_written_when_it_is_cut(stage: int, tmp_path: Path) -> None:
    folders = [tmp_path / f"{stage}_{rank}" for rank in range(2)]  # other values on each rank: rank 0's count
    if dist.get_rank() == 0:  # where there are ranks, transformers writes on the first alone
        for seed, folder in enumerate(folders):
            torch.manual_seed(seed)
            LlamaForCausalLM(LlamaConfig(**_SHAPE)).save_pretrained(folder)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(folders[dist.get_rank()])
    pages = {name: param.data for name, param in model.named_parameters()}
    assert all(map(is_mapped, pages.values()))  # transformers leaves it in the file, which ranks of a host share
    before = {name: value.clone() for name, value in pages.items()}
    zero.shard_model(model, {"stage": stage, "collectives": "pairwise"})
    assert all(torch.equal(value, before[name]) for name, value in pages.items())
    first = load_file(folders[0] / "model.safetensors")
    assert all(torch.equal(value, first[name]) for name, value in whole_state_dict(model).items())
