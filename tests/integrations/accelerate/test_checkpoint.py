"""`ZeroAccelerator.save_state` and `load_state`: a loop that stops and goes on equals one that never stopped."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.checkpoint.files.manifest import MANIFEST, read_manifest
from hf_zero.checkpoint.files.model_plan import NotMovedError, plan_model
from hf_zero.checkpoint.files.tensor_file import read_layout
from hf_zero.integrations.accelerate.places import remove_old
from tests.checkpoint.reads import counting_reads
from tests.models import CASES, LENGTH, VOCAB, make_model
from tests.ranks import run_alone, run_ranks

NUM_ROWS, BATCH, EPOCHS = 24, 2, 2


class Counter:
    """A registered object with a state of plain values."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


class Odd:
    """A value that no restricted pickle may make."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)


@dataclass(frozen=True)
class Setup:
    """What a loop is made of; `seed` is of weights and random states."""

    stage: int = 3
    micro_batches: int = 1
    mixed_precision: str = "no"
    seed: int = 0
    case: str = "llama"
    data_seed: int = 5
    is_seedable: bool = True


class Loop:
    """A prepared loop with dropout, a shuffling loader, a scheduler, and a registered counter."""

    def __init__(self, setup: Setup, project: ProjectConfiguration | None = None) -> None:
        random.seed(setup.seed)
        torch.manual_seed(100 * setup.seed + 10 + rank())
        self.accelerator = zero.ZeroAccelerator(
            zero_plugin=zero.ZeroPlugin(stage=setup.stage, collectives="pairwise"),
            gradient_accumulation_steps=setup.micro_batches,
            mixed_precision=setup.mixed_precision,
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=setup.is_seedable, data_seed=setup.data_seed
            ),
            project_config=project,
        )
        model = with_adapters(setup.seed) if setup.case == "adapters" else make_model(CASES[setup.case], setup.seed)
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.2
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = DataLoader(numbered_rows(), batch_size=BATCH, shuffle=True)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.counter = Counter(steps=0)
        self.accelerator.register_for_checkpointing(self.counter)
        self.seen: list[list[int]] = []
        self.losses: list[float] = []

    def steps(self, batches: Any) -> Iterator[int]:
        """Train on batches; yields after each how many there have been."""
        for number, batch in enumerate(batches, start=1):
            self.seen.append(batch.pop("number").tolist())
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.counter.values["steps"] += 1
            yield number


def with_adapters(seed: int) -> nn.Module:
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
    return peft.get_peft_model(make_model(CASES["llama"], seed), config)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def numbered_rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (NUM_ROWS, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row, "number": number} for number, row in enumerate(ids)]


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone() if isinstance(value, Tensor) else value


@dataclass
class State:
    """Everything that decides how a loop goes on, as whole tensors."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    rates: list[float]
    counter: dict[str, Any]


def state_of(loop: Loop) -> State:
    model = loop.accelerator.unwrap_model(loop.model)
    names = {id(param): name for name, param in model.named_parameters()}
    optimizer = {
        f"{names[id(param)]}.{key}": whole(value)
        for param, state in loop.optimizer.state.items()
        for key, value in state.items()
    }
    weights = {name: value.clone() for name, value in whole_state_dict(model).items()}
    rates = [group["lr"] for group in loop.optimizer.param_groups]
    return State(weights, optimizer, loop.scheduler.state_dict(), rates, dict(loop.counter.values))


def assert_equal(left: State, right: State) -> None:
    assert left.weights.keys() == right.weights.keys()
    assert all(torch.equal(value, right.weights[name]) for name, value in left.weights.items())
    assert left.optimizer and left.optimizer.keys() == right.optimizer.keys()
    for name, value in left.optimizer.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(right.optimizer[name])), name
    assert (left.scheduler, left.rates, left.counter) == (right.scheduler, right.rates, right.counter)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trained(setup: Setup, steps: int = 2, **options: Any) -> Loop:
    """A loop whose epoch has been cut after some steps."""
    loop = Loop(setup, **options)
    for number in loop.steps(loop.loader):
        if number == steps:
            break
    loop.accelerator.gradient_state.dataloader_references = [None]  # the broken-off epoch is forgotten
    return loop


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


def go_on(folder: str, setup: Setup, other: Setup) -> list[Rest]:
    """One loop never stops; the second goes on where that saved, the third where the second saved, in the same epoch."""
    straight = Loop(setup)
    for epoch in range(EPOCHS):
        for number in straight.steps(straight.loader):
            if (epoch, number) == (0, 2):
                straight.accelerator.save_state(folder)
    ends = [rest_of(straight)]
    for done in (2, 4):
        resumed = Loop(other)
        resumed.accelerator.load_state(folder)
        assert resumed.accelerator.step == done
        for number in resumed.steps(resumed.accelerator.skip_first_batches(resumed.loader, done)):
            if done + number == 4:
                resumed.accelerator.save_state(folder)  # in the place of the first
        for _ in range(EPOCHS - 1):
            for _ in resumed.steps(resumed.loader):
                pass
        ends.append(rest_of(resumed))
    return ends


SETUPS = [
    *(Setup(stage=stage) for stage in (0, 3)),
    Setup(stage=1, case="adapters"),
    Setup(stage=2, micro_batches=2, mixed_precision="bf16"),
    Setup(stage=3, case="mixtral"),
]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: "-".join(str(value) for value in vars(setup).values()))
def test_going_on_equals_never_having_stopped(setup: Setup, tmp_path: Path) -> None:
    other = replace(setup, seed=1, data_seed=99)
    orders = []
    for straight, *resumed in run_ranks(go_on, 2, str(tmp_path / "state"), setup, other):
        for end, skipped in zip(resumed, (2, 4), strict=True):
            assert len(end.seen) == 6 * EPOCHS - skipped
            assert straight.seen[skipped:] == end.seen
            assert straight.losses[skipped:] == end.losses
            assert (straight.draws, straight.step) == (end.draws, end.step)
            assert_equal(straight.state, end.state)
        orders.append(straight.seen)
    assert orders[0] != orders[1]
    assert os.listdir(tmp_path) == ["state"]
    manifest = read_manifest(tmp_path / "state")
    assert (manifest.step, manifest.world_size, manifest.stage) == (4 // setup.micro_batches, 2, setup.stage)


def next_epoch(folder: str) -> list[tuple[list[list[int]], list[Any]]]:
    """A state saved between two epochs, with accelerate's sampler that cannot be repeated within one."""
    ends = []
    for is_first in (True, False):
        loop = Loop(Setup(is_seedable=False, seed=int(not is_first)))
        if is_first:
            for _ in loop.steps(loop.loader):
                pass
            loop.accelerator.save_state(folder)
        else:
            with logged() as lines:
                loop.accelerator.load_state(folder)
            assert len([line for line in lines if "use_seedable_sampler=True" in line]) == int(rank() == 0)
        loop.seen = []
        for _ in loop.steps(loop.loader):
            pass
        ends.append((loop.seen, [loop.losses[-1], torch.rand(1).item()]))
    return ends


def test_next_epoch_has_its_order_without_a_seedable_sampler(tmp_path: Path) -> None:
    for straight, resumed in run_ranks(next_epoch, 2, str(tmp_path / "state")):
        assert straight == resumed


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


@contextmanager
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    ours = logging.getLogger("hf_zero")
    level = ours.level
    ours.setLevel(logging.INFO)
    ours.addHandler(handler)
    try:
        yield lines
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)


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
    saved = {
        "random_states_0.pkl",
        "random_states_1.pkl",
        "scheduler.bin",
        "custom_checkpoint_0.pkl",
        "data_order.json",
    }
    saved |= {"model.safetensors", "config.json", "generation_config.json", "optimizer.safetensors", "optimizer.json"}
    assert set(os.listdir(folder)) == {*saved, MANIFEST}


def save_in_shards(folder: str, is_computed: bool) -> list[State]:
    def refuse(*args: Any, **options: Any) -> None:
        plan_model(*args, **options)
        raise NotMovedError("computed")

    loop, other = trained(Setup()), Loop(Setup(seed=1))
    with mock.patch("hf_zero.integrations.accelerate.checkpoint.plan_model", refuse if is_computed else plan_model):
        loop.accelerator.save_state(folder, max_shard_size="20KB")
        other.accelerator.load_state(folder)
    return [state_of(loop), state_of(other)]


@pytest.mark.parametrize("is_computed", [False, True])
def test_weights_are_in_files_of_a_size_or_if_they_are_not_merely_moved_in_one(
    is_computed: bool, tmp_path: Path
) -> None:
    for left, right in run_ranks(save_in_shards, 2, str(tmp_path / "state"), is_computed):
        assert_equal(left, right)
    names = {path.name for path in (tmp_path / "state").glob("model*")}
    shards = {"model.safetensors.index.json", *(f"model-0000{number}-of-00002.safetensors" for number in (1, 2))}
    assert names == ({"model.safetensors"} if is_computed else shards)


# ---- registered objects ---------------------------------------------------------------------------------------------


def register_odd(folder: str) -> dict[str, Any]:
    loop = Loop(Setup())
    loop.accelerator.register_for_checkpointing(Counter(odd=Odd(), numbers=torch.arange(3)))
    loop.accelerator.save_state(folder)
    errors = {"count": error_of(lambda: Loop(Setup()).accelerator.load_state(folder))}
    other = Loop(Setup(seed=1))
    found = Counter()
    other.accelerator.register_for_checkpointing(found)
    before = state_of(other)
    errors["refused"] = error_of(lambda: other.accelerator.load_state(folder))
    assert_same_weights(before, state_of(other))
    other.accelerator.load_state(folder, allow_pickle=True)
    assert_same_weights(state_of(loop), state_of(other))
    return {**errors, "found": found.values["odd"] == Odd(), "numbers": found.values["numbers"].tolist()}


def assert_same_weights(left: State, right: State) -> None:
    assert all(torch.equal(value, right.weights[name]) for name, value in left.weights.items())
    assert left.counter == right.counter


def test_registered_objects_are_pickles_only_if_asked_for(tmp_path: Path) -> None:
    first, second = run_ranks(register_odd, 2, str(tmp_path / "state"))
    assert first == second
    assert "states of 2 registered objects, but 1 are registered" in first["count"]
    assert first["refused"].startswith("CheckpointError")
    assert "custom_checkpoint_1.pkl" in first["refused"] and "load_state(..., allow_pickle=True)" in first["refused"]
    assert (first["found"], first["numbers"]) == (True, [0, 1, 2])


# ---- what is wrong --------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no_folder": (shutil.rmtree, "there is no such folder"),
    "no_manifest": (lambda folder: (folder / MANIFEST).unlink(), f"it has no {MANIFEST}"),
    "flipped_manifest": (lambda folder: flip(folder / MANIFEST), f"{MANIFEST} is damaged"),
    "flipped_weights": (lambda folder: flip(folder / "model.safetensors"), "model.safetensors was altered"),
    "cut_optimizer": (lambda folder: cut(folder / "optimizer.safetensors"), "optimizer.safetensors has"),
    "no_optimizer": (lambda folder: (folder / "optimizer.json").unlink(), "optimizer.json is missing"),
    "flipped_random": (lambda folder: flip(folder / "random_states_1.pkl"), "random_states_1.pkl was altered"),
    "no_scheduler": (lambda folder: (folder / "scheduler.bin").unlink(), "scheduler.bin is missing"),
    "foreign": (lambda folder: (folder / "notes.txt").write_text("x"), "notes.txt does not belong to it"),
}


def refuse_faulty(folder: str) -> dict[str, str]:
    """What each fault makes `load_state` say; nothing has changed after all of them."""
    trained(Setup()).accelerator.save_state(folder)
    no_optimizer = Loop(Setup())
    no_optimizer.accelerator._optimizers, no_optimizer.accelerator._schedulers = [], []
    no_optimizer.accelerator.save_state(f"{folder}_weights")
    loop = trained(Setup(seed=1))
    accelerator, before, draws = loop.accelerator, state_of(loop), torch.get_rng_state()
    errors = {}
    for name, (fault, _) in FAULTS.items():
        broken = Path(f"{folder}_{name}")
        if rank() == 0:
            shutil.copytree(folder, broken)
            fault(broken)
        meet()
        errors[name] = error_of(lambda: accelerator.load_state(broken))
    errors["weights_alone"] = error_of(lambda: accelerator.load_state(f"{folder}_weights"))
    errors["nowhere"] = error_of(lambda: accelerator.load_state())
    errors["strict"] = error_of(lambda: accelerator.load_state(folder, strict=False))
    errors["pickled_weights"] = error_of(lambda: accelerator.save_state(folder, safe_serialization=False))
    errors["nowhere_to"] = error_of(lambda: accelerator.save_state())
    assert_equal(before, state_of(loop))
    assert torch.equal(draws, torch.get_rng_state())
    other = Loop(Setup(case="gpt2"))
    whole_before = state_of(other).weights
    other.accelerator._optimizers, other.accelerator._schedulers = [], []
    errors["other_model"] = error_of(lambda: other.accelerator.load_state(folder))
    assert all(torch.equal(value, whole_before[name]) for name, value in state_of(other).weights.items())
    sgd = Loop(Setup(seed=1))
    sgd.accelerator._optimizers = [torch.optim.SGD(sgd.model.parameters(), lr=0.1)]
    before = state_of(sgd)
    errors["other_optimizer"] = error_of(lambda: sgd.accelerator.load_state(folder))
    assert_same_weights(before, state_of(sgd))
    return errors


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    first, second = run_ranks(refuse_faulty, 2, str(tmp_path / "state"))
    assert first == second
    words = {name: ("CheckpointError", text) for name, (_, text) in FAULTS.items()}
    words["weights_alone"] = ("CheckpointError", "optimizer.safetensors is missing")
    words["nowhere"] = ("UsageError", "load_state needs a folder")
    words["strict"] = ("UsageError", "load_state does not know 'strict'")
    words["pickled_weights"] = ("UsageError", "safetensors only")
    words["nowhere_to"] = ("UsageError", "save_state needs a folder")
    words["other_model"] = ("CheckpointError", "of another model")
    words["other_optimizer"] = ("CheckpointError", "is the state of AdamW, but this is SGD")
    assert first.keys() == words.keys()
    for name, (kind, text) in words.items():
        assert first[name].startswith(f"{kind}: ") and text in first[name], (name, first[name])


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


def fail_to_save(folder: str) -> dict[str, str]:
    project = ProjectConfiguration(project_dir=folder)
    loop = trained(Setup(), project=project)
    place = f"{folder}/state"
    loop.accelerator.save_state(place)
    before = state_of(loop)
    loop.accelerator.register_for_checkpointing(Failing(saves=False))
    errors = {"save": error_of(lambda: loop.accelerator.save_state(place))}
    loop.accelerator._custom_objects[1] = Counter(partitioned=[loop.model.lm_head.weight])
    errors["partitioned"] = error_of(lambda: loop.accelerator.save_state(place))
    assert loop.accelerator.save_iteration == 1
    other = Loop(Setup(seed=1))
    other.accelerator.load_state(place)  # the older one is whole
    assert_equal(before, state_of(other))
    loop.accelerator._custom_objects[1] = Failing(saves=True)
    loop.accelerator.save_state(place)
    errors["load"] = error_of(lambda: loop.accelerator.load_state(place))
    mine = f"{folder}/mine"
    if rank() == 0:
        os.makedirs(mine)
        Path(mine, "thesis.tex").write_text("x")
        Path(folder, "file").write_text("x")
    meet()
    errors["foreign"] = error_of(lambda: loop.accelerator.save_state(mine))
    errors["file"] = error_of(lambda: loop.accelerator.save_state(f"{folder}/file"))
    return errors


def test_a_save_that_fails_on_one_rank_leaves_the_older_one(tmp_path: Path) -> None:
    first, second = run_ranks(fail_to_save, 2, str(tmp_path))
    assert first == second
    words = {
        "save": "rank 1: ValueError: nothing to save",
        "partitioned": "the registered Counter has a partitioned tensor",
        "load": "rank 1: ValueError: nothing to load",
        "foreign": "mine holds 'thesis.tex'",
        "file": "file is not a folder",
    }
    assert first.keys() == words.keys()
    for name, text in words.items():
        assert first[name].startswith("CheckpointError: ") and text in first[name], (name, first[name])
    assert sorted(os.listdir(tmp_path)) == ["file", "mine", "state"]
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


# ---- names of accelerate --------------------------------------------------------------------------------------------


def name_and_rotate(folder: str) -> dict[str, Any]:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    loop = Loop(Setup(), project=project)
    parent = Path(folder, "checkpoints")
    if rank() == 0:
        for name in ("checkpoint_mine", "checkpoint_77"):
            Path(parent, name).mkdir(parents=True)
    meet()
    names, states = [], []
    for number in loop.steps(loop.loader):
        if number <= 3:
            returned = loop.accelerator.save_state("ignored")
            states.append(state_of(loop))
            names.append((returned.name, sorted(os.listdir(parent))))
            meet()
    project.iteration = 2
    again = error_of(lambda: loop.accelerator.save_state())
    other = Loop(Setup(seed=1), project=project)
    other.accelerator.load_state()
    newest = other.loader.iteration, state_of(other)
    if rank() == 0:
        flip(parent / "checkpoint_2" / "optimizer.safetensors")
    meet()
    with logged() as lines:
        other.accelerator.load_state()
    assert_equal(states[2], newest[1])
    assert_equal(states[1], state_of(other))
    if rank() == 0:
        cut(parent / "checkpoint_1" / "optimizer.safetensors")
    meet()
    none = error_of(lambda: other.accelerator.load_state())
    return {"names": names, "again": again, "lines": [line for line in lines if "skipped:" in line], "none": none}


def count_what_loading_reads(folder: str) -> tuple[int, int, int]:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    saved = trained(Setup(), project=project).accelerator.save_state()
    files = [read_layout(each) for each in Path(saved).glob("*.safetensors")]
    other = Loop(Setup(seed=1), project=project)
    with counting_reads() as sizes:
        other.accelerator.load_state()
    return sum(sizes), sum(file.nbytes for file in files), sum(len(file.header) for file in files)


def test_loading_verifies_each_byte_once_and_reads_only_own_rows(tmp_path: Path) -> None:
    found = run_ranks(count_what_loading_reads, 2, str(tmp_path))
    _, size, headers = found[0]
    read = sum(each for each, _, _ in found)
    assert 2 * size - headers <= read <= 2 * size + 5 * headers, (read, size, headers)  # headers are read by each rank


def test_automatic_names_rotate_and_the_newest_whole_one_is_loaded(tmp_path: Path) -> None:
    first, second = run_ranks(name_and_rotate, 2, str(tmp_path))
    left = ["checkpoint_77", "checkpoint_mine"]
    wanted = [["checkpoint_0"], ["checkpoint_0", "checkpoint_1"], ["checkpoint_1", "checkpoint_2"]]
    for found in (first, second):
        assert found["names"] == [(f"checkpoint_{i}", [*names, *left]) for i, names in enumerate(wanted)]
        assert "checkpoint_2 exists already" in found["again"] and "iteration" in found["again"]
        assert "no valid checkpoint" in found["none"] and "optimizer.safetensors" in found["none"]
    assert [len(found["lines"]) for found in (first, second)] == [2, 0]
    assert "checkpoint_2 is damaged: optimizer.safetensors was altered" in first["lines"][1]


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


# ---- several models, hooks, plain models ----------------------------------------------------------------------------


def several(folder: str) -> list[bool]:
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
            accelerator.save_state(folder)
        else:
            accelerator.load_state(folder)
        weights = [whole_state_dict(model) for model in prepared[:3]]
        values = [
            [
                whole(value)
                for group in each.param_groups
                for p in group["params"]
                for _, value in sorted(each.state[p].items())
            ]
            for each in optimizers
        ]
        states.append([*(list(each.values()) for each in weights), *values])
    return [
        bool(left) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True)) for left, right in zip(*states)
    ]


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert run_ranks(several, 2, str(folder)) == [[True] * 6] * 2
    names = {f"{kind}{number}.safetensors" for kind in ("model", "optimizer") for number in ("", "_1", "_2")}
    assert {path.name for path in folder.glob("*.safetensors")} == names
    assert load_file(folder / "model_2.safetensors")["1.num_batches_tracked"] == 1


def hook_in(folder: str) -> list[Any]:
    loop = trained(Setup())

    def save_hook(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        if rank() == 0:
            Path(output_dir, "note.json").write_text("1")
            weights.pop()

    handle = loop.accelerator.register_save_state_pre_hook(save_hook)
    loop.accelerator.save_state(folder)
    handle.remove()
    handle = loop.accelerator.register_save_state_pre_hook(lambda models, weights, place: weights[0].popitem())
    changed = error_of(lambda: loop.accelerator.save_state(folder))
    other = Loop(Setup(seed=1))
    before = state_of(other)
    without = error_of(lambda: other.accelerator.load_state(folder))
    other.accelerator.register_load_state_pre_hook(lambda models, place: models.clear())
    other.accelerator.load_state(folder)
    after = state_of(other)
    kept = all(torch.equal(value, after.weights[name]) for name, value in before.weights.items())
    return [without, changed, kept, after.counter]


def test_hooks_take_models_out(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    for without, changed, kept, counter in run_ranks(hook_in, 2, str(folder)):
        assert "has no model.safetensors" in without
        assert "a pre-hook of save_state changed weights" in changed
        assert (kept, counter) == (True, {"steps": 2})
    assert "note.json" in os.listdir(folder) and not list(folder.glob("model*"))


def evaluate_only(folder: str) -> list[str]:
    accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=3))
    model = accelerator.prepare(nn.Linear(2, 2).requires_grad_(False))
    before = model.weight.clone()
    accelerator.save_state(folder)
    model.weight.zero_()
    accelerator.load_state(folder)
    assert torch.equal(model.weight, before)
    return sorted(os.listdir(folder))


def test_without_a_partitioned_model_it_is_accelerates_own(tmp_path: Path) -> None:
    assert run_alone(evaluate_only, str(tmp_path / "state")) == ["model.safetensors", "random_states_0.pkl"]
