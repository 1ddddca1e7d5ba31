"""`ZeroAccelerator.save_state` and `load_state`: a loop that stops and goes on equals one that never stopped."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.checkpoint.files.manifest import MANIFEST, read_manifest
from hf_zero.checkpoint.files.model_plan import NotMovedError, plan_model
from hf_zero.checkpoint.files.tensor_file import read_layout
from tests.checkpoint.reads import counting_reads
from tests.engine.twins import whole
from tests.integrations.accelerate.loops import BATCH, NUM_ROWS, Loop, Setup, logged, rank, state_of, trained
from tests.integrations.refusals import refused
from tests.integrations.states import State, assert_read_once, assert_same_state, assert_same_weights
from tests.models import CASES, make_model
from tests.ranks import alone, by_hand, on_ranks, run_ranks

EPOCHS, NUM_BATCHES = 2, NUM_ROWS // BATCH // 2  # of a rank, in an epoch


def assert_equal(left: State, right: State) -> None:
    assert left.optimizer
    assert_same_state(left, right)


# ---- the same number of ranks ---------------------------------------------------------------------------------------


@dataclass
class Rest:
    """How a loop went on since its third batch."""

    state: State
    seen: list[list[int]]
    losses: list[float]
    draws: list[Any]
    step: int


def rest_of(loop: Loop) -> Rest:
    draws = [random.random(), torch.rand(2).tolist()]
    return Rest(state_of(loop), loop.seen, loop.losses, draws, loop.accelerator.step)


SETUPS = [
    Setup(stage=0),
    Setup(stage=1, case="adapters"),
    Setup(stage=3, case="mixtral"),
    *by_hand(Setup(stage=2, micro_batches=2, mixed_precision="bf16"), Setup(stage=3)),
]


@on_ranks(2, setup=SETUPS)
def test_going_on_equals_never_having_stopped(setup: Setup, tmp_path: Path) -> None:
    """One loop never stops; the second goes on where that saved, the third where the second saved, in the same epoch."""
    folder = tmp_path / f"{SETUPS.index(setup)}" / "state"
    straight = Loop(setup)
    for epoch in range(EPOCHS):
        for number in straight.steps(straight.loader):
            if (epoch, number) == (0, 2):
                straight.accelerator.save_state(folder)
    never_stopped = rest_of(straight)
    for done, last in ((2, 4), (4, None)):
        resumed = Loop(replace(setup, seed=1, data_seed=99))
        resumed.accelerator.load_state(folder)
        assert resumed.accelerator.step == done
        for number in resumed.steps(resumed.accelerator.skip_first_batches(resumed.loader, done)):
            if done + number == last:
                resumed.accelerator.save_state(folder)  # in the place of the first
                resumed.accelerator.gradient_state.dataloader_references = [None]  # this epoch is broken off
                break
        assert never_stopped.seen[done : done + number] == resumed.seen
        assert never_stopped.losses[done : done + number] == resumed.losses
    for _ in range(EPOCHS - 1):
        for _ in resumed.steps(resumed.loader):
            pass
    end = rest_of(resumed)
    assert len(end.seen) == NUM_BATCHES * EPOCHS - done
    assert never_stopped.seen[done:] == end.seen
    assert never_stopped.losses[done:] == end.losses
    assert (never_stopped.draws, never_stopped.step) == (end.draws, end.step)
    assert_equal(never_stopped.state, end.state)
    orders: list[Any] = [None, None]
    dist.all_gather_object(orders, never_stopped.seen)
    assert orders[0] != orders[1]
    assert os.listdir(folder.parent) == ["state"]
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.world_size, manifest.stage) == (4 // setup.micro_batches, 2, setup.stage)


@on_ranks(2)
def test_next_epoch_has_its_order_without_a_seedable_sampler(tmp_path: Path) -> None:
    """A state saved between two epochs; within one, see `test_data_order`."""
    straight = Loop(Setup(is_seedable=False))
    for _ in straight.steps(straight.loader):
        pass
    straight.accelerator.save_state(tmp_path / "state")
    ends = [straight.second_epoch()]
    resumed = Loop(Setup(is_seedable=False, seed=1))
    resumed.accelerator.load_state(tmp_path / "state")
    ends.append(resumed.second_epoch())
    assert ends[0] == ends[1]


# ---- another number of ranks, another stage -------------------------------------------------------------------------


def save_somewhere(folder: str, setup: Setup, source: str = "") -> State:
    loop = trained(setup)
    if source:
        loop.accelerator.load_state(source)
    assert loop.accelerator.save_state(folder) == Path(folder)
    return state_of(loop)


def load_elsewhere(folder: str, stage: int) -> tuple[State, list[str], int]:
    loop = Loop(Setup(stage=stage, seed=1))
    with logged() as lines:
        loop.accelerator.load_state(folder)
    return state_of(loop), [line for line in lines if "random states" in line], loop.loader.iteration


def test_state_is_the_same_on_any_number_of_ranks_and_stage(tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    state = run_ranks(save_somewhere, 3, first, Setup(stage=3))[0]
    for num_ranks, stage in ((1, 1), (2, 3)):
        found = run_ranks(load_elsewhere, num_ranks, first, stage)
        for other, _, _ in found:
            assert_equal(state, other)
        assert [len(lines) for _, lines, _ in found] == [1] + [0] * (num_ranks - 1)
        assert f"saved by 3 ranks, and {num_ranks} load it" in found[0][1][0]
    assert_equal(state, run_ranks(save_somewhere, 1, second, Setup(stage=1), source=first)[0])
    assert_equal(state, run_ranks(save_somewhere, 3, third, Setup(stage=3), source=second)[2])
    for name in ("model.safetensors", "optimizer.safetensors", "optimizer.json"):
        assert Path(first, name).read_bytes() == Path(third, name).read_bytes()


def test_weights_are_what_from_pretrained_loads(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    state = run_ranks(save_somewhere, 2, folder, Setup(stage=3))[0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(value, state.weights[name]) for name, value in model.state_dict().items())
    saved = {"random_states_0.pkl", "random_states_1.pkl", "scheduler.bin", "custom_checkpoint_0.pkl"}
    saved |= {"model.safetensors", "config.json", "generation_config.json", "optimizer.safetensors", "optimizer.json"}
    assert set(os.listdir(folder)) == {*saved, "data_order.json", MANIFEST}


@on_ranks(2, is_computed=[False, True])
def test_weights_are_in_files_of_a_size_or_if_they_are_not_merely_moved_in_one(
    is_computed: bool, tmp_path: Path
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        plan_model(*args, **options)
        raise NotMovedError("computed")

    folder = tmp_path / str(is_computed)
    loop, other = trained(Setup()), Loop(Setup(seed=1))
    with mock.patch("hf_zero.integrations.accelerate.weight_files.plan_model", refuse if is_computed else plan_model):
        loop.accelerator.save_state(folder, max_shard_size="20KB")
        other.accelerator.load_state(folder)
    assert_equal(state_of(loop), state_of(other))
    shards = {"model.safetensors.index.json", *(f"model-0000{number}-of-00002.safetensors" for number in (1, 2))}
    assert {path.name for path in folder.glob("model*")} == ({"model.safetensors"} if is_computed else shards)


def count_what_loading_reads(folder: str) -> tuple[int, int, int]:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    saved = trained(Setup(), project=project).accelerator.save_state()
    files = [read_layout(each) for each in Path(saved).glob("*.safetensors")]
    other = Loop(Setup(seed=1), project=project)
    with counting_reads() as sizes:
        other.accelerator.load_state()
    return sum(sizes), sum(file.nbytes for file in files), sum(len(file.header) for file in files)


def test_loading_verifies_each_byte_once_and_reads_only_own_rows(tmp_path: Path) -> None:
    assert_read_once(run_ranks(count_what_loading_reads, 2, str(tmp_path)))


# ---- several models, hooks, plain models ----------------------------------------------------------------------------


@on_ranks(2)
def test_several_models_and_optimizers(tmp_path: Path) -> None:
    """Two trained models with an optimizer each, one over both, and a frozen one with a buffer, all loaded again."""
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=3, collectives="pairwise"))
        models = [make_model(CASES[name], seed) for name in ("llama", "gpt2")]
        frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
        params = [list(model.parameters()) for model in models]
        optimizers = [torch.optim.AdamW(params[0][:4]), torch.optim.SGD(params[1][:3], lr=0.1, momentum=0.9)]
        optimizers.append(torch.optim.AdamW([*params[0][4:], *params[1][3:]]))
        prepared = accelerator.prepare(*models, frozen, *optimizers)
        if seed == 0:
            frozen(torch.randn(8, 3))
            for model, case in zip(models, ("llama", "gpt2"), strict=True):
                accelerator.backward(CASES[case].loss(model, CASES[case].batch(0, rank())))
            for optimizer in prepared[3:]:
                optimizer.step()
            accelerator.save_state(tmp_path / "state")
        else:
            accelerator.load_state(tmp_path / "state")
        found = [list(whole_state_dict(model).values()) for model in prepared[:3]]
        for optimizer in optimizers:
            steps = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
            found.append([whole(value).clone() for state in steps for _, value in sorted(state.items())])
        states.append(found)
    for left, right in zip(*states, strict=True):
        assert left and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    names = {f"{kind}{number}.safetensors" for kind in ("model", "optimizer") for number in ("", "_1", "_2")}
    assert {path.name for path in (tmp_path / "state").glob("*.safetensors")} == names
    assert load_file(tmp_path / "state" / "model_2.safetensors")["1.num_batches_tracked"] == 1


@on_ranks(2)
def test_hooks_take_models_out(tmp_path: Path) -> None:
    loop, folder = trained(Setup()), tmp_path / "state"

    def save_hook(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        if rank() == 0:
            Path(output_dir, "note.json").write_text("1")
            weights.pop()

    handle = loop.accelerator.register_save_state_pre_hook(save_hook)
    loop.accelerator.save_state(folder)
    handle.remove()
    loop.accelerator.register_save_state_pre_hook(lambda models, weights, place: weights[0].popitem())
    with pytest.raises(Exception, match="a pre-hook of save_state changed weights"):
        loop.accelerator.save_state(folder)
    other = Loop(Setup(seed=1))
    before = state_of(other)
    refused(lambda: other.accelerator.load_state(folder), "CheckpointError", "has no model.safetensors")
    other.accelerator.register_load_state_pre_hook(lambda models, place: models.clear())
    other.accelerator.load_state(folder)
    assert_same_weights(before, state_of(other))
    assert other.counter.values == {"steps": 2}
    assert "note.json" in os.listdir(folder) and not list(folder.glob("model*"))


@alone()
def test_without_a_partitioned_model_it_is_accelerates_own(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=3))
    model = accelerator.prepare(nn.Linear(2, 2).requires_grad_(False))
    before = model.weight.clone()
    accelerator.save_state(folder)
    model.weight.zero_()
    accelerator.load_state(folder)
    assert torch.equal(model.weight, before)
    assert sorted(os.listdir(folder)) == ["model.safetensors", "random_states_0.pkl"]
