"""What `save_state` and `load_state` refuse, and the names that accelerate gives to checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ProjectConfiguration
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hf_zero.checkpoint.files.manifest import MANIFEST
from hf_zero.integrations.accelerate.places import remove_old
from tests.integrations.accelerate.loops import Counter, Loop, Setup, logged, meet, rank, state_of, trained
from tests.integrations.refusals import refused
from tests.integrations.states import assert_same_state, assert_same_weights, flip
from tests.ranks import on_ranks

# ---- registered objects ---------------------------------------------------------------------------------------------


class Odd:
    """A value that no restricted pickle may make."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)


@on_ranks(2)
def test_registered_objects_are_pickles_only_if_asked_for(tmp_path: Path) -> None:
    folder, loop = tmp_path / "state", Loop(Setup())
    loop.accelerator.register_for_checkpointing(Counter(odd=Odd(), numbers=torch.arange(3)))
    loop.accelerator.save_state(folder)
    few = Loop(Setup()).accelerator
    refused(lambda: few.load_state(folder), "CheckpointError", "states of 2 registered objects, but 1 are registered")
    other, found = Loop(Setup(seed=1)), Counter()
    other.accelerator.register_for_checkpointing(found)
    before = state_of(other)
    texts = "custom_checkpoint_1.pkl", "load_state(..., allow_pickle=True)"
    refused(lambda: other.accelerator.load_state(folder), "CheckpointError", *texts)
    assert_same_weights(before, state_of(other))
    assert before.rest[1] == other.counter.values
    other.accelerator.load_state(folder, allow_pickle=True)
    assert_same_weights(state_of(loop), state_of(other))
    assert loop.counter.values == other.counter.values
    assert found.values["odd"] == Odd() and found.values["numbers"].tolist() == [0, 1, 2]


@on_ranks(2, stage=[1, 3])
def test_a_registered_average_of_a_partitioned_model_is_saved_whole(tmp_path: Path, stage: int) -> None:
    loop, other = Loop(Setup(stage)), Loop(Setup(stage, seed=1))
    averages = [AveragedModel(each.model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in (loop, other)]
    for each, average in zip((loop, other), averages, strict=True):
        each.accelerator.register_for_checkpointing(average)
    for number in loop.steps(loop.loader):
        averages[0].update_parameters(loop.model)
        if number == 2:
            break
    folder = tmp_path / f"state{stage}"
    loop.accelerator.save_state(folder)
    saved = torch.load(folder / "custom_checkpoint_1.pkl")
    assert {type(value) for value in saved.values()} == {torch.Tensor}
    assert saved["n_averaged"].item() == len(loop.losses)
    other.accelerator.load_state(folder)
    for before, after in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(next(averages[0].parameters()), next(loop.model.parameters()))


# ---- what is wrong --------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


FAULTS: list[tuple[Callable[[Path], Any], str]] = [
    (shutil.rmtree, "there is no such folder"),
    (lambda folder: (folder / MANIFEST).unlink(), f"it has no {MANIFEST}"),
    (lambda folder: flip(folder / MANIFEST), f"{MANIFEST} is damaged"),
    (lambda folder: flip(folder / "model.safetensors"), "model.safetensors was altered"),
    (lambda folder: cut(folder / "optimizer.safetensors"), "optimizer.safetensors has"),
    (lambda folder: (folder / "optimizer.json").unlink(), "optimizer.json is missing"),
    (lambda folder: flip(folder / "random_states_1.pkl"), "random_states_1.pkl was altered"),
    (lambda folder: (folder / "scheduler.bin").unlink(), "scheduler.bin is missing"),
]


@on_ranks(2)
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    trained(Setup()).accelerator.save_state(folder)
    no_optimizer = Loop(Setup())
    no_optimizer.accelerator._optimizers, no_optimizer.accelerator._schedulers = [], []
    no_optimizer.accelerator.save_state(tmp_path / "weights")
    loop = trained(Setup(seed=1))
    accelerator, before, draws = loop.accelerator, state_of(loop), torch.get_rng_state()
    for number, (fault, text) in enumerate(FAULTS):
        broken = tmp_path / f"broken{number}"
        if rank() == 0:
            shutil.copytree(folder, broken)
            fault(broken)
        meet()
        refused(lambda broken=broken: accelerator.load_state(broken), "CheckpointError", text)
    missing = "optimizer.safetensors is missing"
    refused(lambda: accelerator.load_state(tmp_path / "weights"), "CheckpointError", missing)
    refused(accelerator.load_state, "UsageError", "load_state needs a folder")
    refused(lambda: accelerator.load_state(folder, strict=False), "UsageError", "load_state does not know 'strict'")
    refused(lambda: accelerator.save_state(folder, safe_serialization=False), "UsageError", "safetensors only")
    refused(accelerator.save_state, "UsageError", "save_state needs a folder")
    assert before.optimizer
    assert_same_state(before, state_of(loop))
    assert torch.equal(draws, torch.get_rng_state())
    other = Loop(Setup(case="gpt2"))
    before = state_of(other)
    other.accelerator._optimizers, other.accelerator._schedulers = [], []
    refused(lambda: other.accelerator.load_state(folder), "CheckpointError", "of another model")
    assert_same_weights(before, state_of(other))
    sgd = Loop(Setup(seed=1))
    sgd.accelerator._optimizers = [torch.optim.SGD(sgd.model.parameters(), lr=0.1)]
    before = state_of(sgd)
    text = "is the state of AdamW, but this is SGD"
    refused(lambda: sgd.accelerator.load_state(folder), "CheckpointError", text)
    first, *others = sgd.model.parameters()
    sgd.accelerator._optimizers = [torch.optim.AdamW([{"params": others}, {"params": [first]}], lr=0.1)]
    text = "group 0 holds other parameters than this optimizer's"
    refused(lambda: sgd.accelerator.load_state(folder), "CheckpointError", text)
    assert_same_weights(before, state_of(sgd))
    assert before.rest[1] == sgd.counter.values


class Failing:
    """A registered object that one rank cannot save, or load."""

    def __init__(self, saves: bool) -> None:
        self._saves = saves

    def state_dict(self) -> dict[str, Any]:
        if not self._saves and rank() == 1:
            raise ValueError("nothing to save")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if rank() == 1:
            raise ValueError("nothing to load")


@on_ranks(2)
def test_a_save_that_fails_on_one_rank_leaves_the_older_one(tmp_path: Path) -> None:
    loop, place = trained(Setup(), project=ProjectConfiguration(project_dir=str(tmp_path))), tmp_path / "state"
    accelerator = loop.accelerator

    def save_fails(folder: Path, text: str) -> None:
        refused(lambda: accelerator.save_state(folder), "CheckpointError", text)

    accelerator.save_state(place)
    before = state_of(loop)
    accelerator.register_for_checkpointing(Failing(saves=False))
    save_fails(place, "rank 1: ValueError: nothing to save")
    assert accelerator.save_iteration == 1
    other = Loop(Setup(seed=1))
    other.accelerator.load_state(place)  # the older one is whole
    assert before.optimizer
    assert_same_state(before, state_of(other))
    accelerator._custom_objects[1] = Failing(saves=True)
    accelerator.save_state(place)
    refused(lambda: accelerator.load_state(place), "CheckpointError", "rank 1: ValueError: nothing to load")
    if rank() == 0:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "random_states_0.pkl").write_text("x")
        (tmp_path / "file").write_text("x")
    meet()
    save_fails(tmp_path / "mine", "mine exists already, and is no checkpoint of hf_zero (it has random_states_0.pkl)")
    save_fails(tmp_path / "file", "file is not a folder")
    save_fails(Path.cwd(), "programs run in it, and a save replaces the folder")
    assert sorted(os.listdir(tmp_path)) == ["file", "mine", "state"]
    assert os.listdir(tmp_path / "mine") == ["random_states_0.pkl"]


# ---- files of the program ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_a_program_keeps_in_its_folder_stays_whatever_is_saved_there(tmp_path: Path) -> None:
    loop, place = trained(Setup()), tmp_path / "last"
    kept = {"args.json": "before", "thesis.tex": "before", "runs/day/1/events": "before"}
    kept |= {"pytorch_model.bin": "between", "tokenizer/vocab": "between"}

    def put(when: str) -> None:
        if rank() == 0:
            for name, content in kept.items():
                if content == when:
                    (place / name).parent.mkdir(parents=True, exist_ok=True)
                    (place / name).write_text(content)
        meet()

    put("before")
    for _ in range(3):
        loop.accelerator.save_state(place)
        loop.accelerator.load_state(place)
        put("between")
        assert {name: (place / name).read_text() for name in kept} == kept
        meet()
    loop.accelerator.load_state(place)
    if rank() == 0:
        (place / "args.json").write_text("after")  # what is not the checkpoint's may change
        (place / "thesis.tex").unlink()
    meet()
    loop.accelerator.load_state(place)
    assert sorted(os.listdir(tmp_path)) == ["last"]


# ---- names of accelerate --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_automatic_names_rotate_and_the_newest_whole_one_is_loaded(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    loop, parent, states = Loop(Setup(), project=project), tmp_path / "checkpoints", []
    foreign = ["checkpoint_77", "checkpoint_mine"]
    if rank() == 0:
        for name in foreign:
            (parent / name).mkdir(parents=True)
    meet()
    left = [["checkpoint_0"], ["checkpoint_0", "checkpoint_1"], ["checkpoint_1", "checkpoint_2"]]
    for number in loop.steps(loop.loader):
        if number <= 3:
            assert loop.accelerator.save_state("ignored").name == f"checkpoint_{number - 1}"
            states.append(state_of(loop))
            assert sorted(os.listdir(parent)) == [*left[number - 1], *foreign]
            meet()
    project.iteration = 2
    refused(loop.accelerator.save_state, "CheckpointError", "checkpoint_2 exists already", "iteration")
    other = Loop(Setup(seed=1), project=project)
    other.accelerator.load_state()
    assert_same_state(states[2], state_of(other))
    if rank() == 0:
        flip(parent / "checkpoint_2" / "optimizer.safetensors")
    meet()
    with logged() as lines:
        other.accelerator.load_state()
    assert_same_state(states[1], state_of(other))
    skipped = [line for line in lines if "skipped:" in line]
    assert len(skipped) == (2 if rank() == 0 else 0)
    assert rank() or "checkpoint_2 is damaged: optimizer.safetensors was altered" in skipped[1]
    if rank() == 0:
        cut(parent / "checkpoint_1" / "optimizer.safetensors")
    meet()
    refused(other.accelerator.load_state, "CheckpointError", "no valid checkpoint", "optimizer.safetensors")


def test_rotation_keeps_what_the_limit_allows_and_the_newest(tmp_path: Path) -> None:
    def rotated(limit: int, newest: int) -> list[str]:
        shutil.rmtree(tmp_path)
        for number in (2, 9, 10):
            (tmp_path / f"checkpoint_{number}").mkdir(parents=True)
            (tmp_path / f"checkpoint_{number}" / MANIFEST).write_text("{}")
        remove_old(tmp_path / f"checkpoint_{newest}", limit)
        return sorted(os.listdir(tmp_path))

    everything = ["checkpoint_10", "checkpoint_2", "checkpoint_9"]
    assert rotated(4, 10) == rotated(3, 10) == everything
    assert rotated(2, 10) == ["checkpoint_10", "checkpoint_9"]
    assert rotated(2, 2) == ["checkpoint_10", "checkpoint_2"]
    assert rotated(0, 9) == ["checkpoint_9"]
