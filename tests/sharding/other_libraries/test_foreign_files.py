"""What others write of a partitioned model's tensors with safetensors is what they write of a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_model
from safetensors.torch import load, load_file, save, save_file, save_model
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import STAGES
from tests.models import CASES, AwkwardMLP, make_model
from tests.ranks import on_ranks


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def twins(case: str, config: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    model, reference = make_model(CASES[case]), make_model(CASES[case])
    zero.shard_model(model, {"timeout_s": 10, **config})
    return model, reference


@on_ranks(2, 3, stage=STAGES, collectives=["pairwise", "host"])
def test_safetensors_gets_whole_tensors(stage: int, collectives: str, tmp_path: Path) -> None:
    model, reference = twins("mlp", {"stage": stage, "collectives": collectives})
    path = tmp_path / f"{stage}{collectives}{dist.get_world_size()}{dist.get_rank()}"
    wanted = reference.state_dict()
    for state in (
        model.state_dict(),
        dict(model.named_parameters()),
        {k: v.data.cpu() for k, v in model.state_dict().items()},
    ):
        save_file(state, path)
        assert_same(load_file(path), wanted if len(state) == len(wanted) else dict(reference.named_parameters()))
    assert_same(
        load(save({"a": next(iter(model.parameters())).detach().clone()})), {"a": next(iter(reference.parameters()))}
    )


@on_ranks(2, stage=STAGES)
def test_tied_tensors_are_written_as_those_of_a_whole_model(stage: int, tmp_path: Path) -> None:
    model, reference = twins("gpt2", {"stage": stage})
    place = tmp_path / f"{stage}{dist.get_rank()}"
    place.mkdir()
    for name, each in (("ours", model), ("theirs", reference)):
        with pytest.raises(RuntimeError, match="share memory"):
            save_file(each.state_dict(), place / "refused")
        save_model(each, str(place / name))
        (place / f"{name} by hub").mkdir()
        save_torch_model(each, place / f"{name} by hub")
    assert_same(load_file(place / "ours"), load_file(place / "theirs"))
    whole = (load_file(place / f"{name} by hub" / "model.safetensors") for name in ("ours", "theirs"))
    assert_same(*whole)


@on_ranks(2)
def test_saving_on_one_rank_alone_writes_the_whole_model(tmp_path: Path) -> None:
    model, reference = AwkwardMLP(), AwkwardMLP()
    model.load_state_dict(reference.state_dict())
    zero.shard_model(model, {"stage": 3, "collectives": "pairwise"})
    if dist.get_rank() == 0:
        save_file(model.state_dict(), tmp_path / "file")
        assert_same(load_file(tmp_path / "file"), reference.state_dict())
    dist.barrier()


@on_ranks(2)
def test_undo_puts_safetensors_back(tmp_path: Path) -> None:
    import safetensors.torch

    zero.undo()
    before = safetensors.torch._flatten_as_ptr, safetensors.torch._remove_duplicate_names
    zero.shard_model(AwkwardMLP(), {"stage": 3})
    assert safetensors.torch._flatten_as_ptr is not before[0]
    zero.undo()
    assert (safetensors.torch._flatten_as_ptr, safetensors.torch._remove_duplicate_names) == before
