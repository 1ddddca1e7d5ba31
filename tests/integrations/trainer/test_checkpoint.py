"""Checkpoints of the plain Trainer: training that stops and goes on equals training that never stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import MANIFEST, read_manifest
from hf_zero.checkpoint.files.tensor_file import read_layout
from hf_zero.checkpoint.offline.export import export
from hf_zero.checkpoint.offline.inspection import check
from tests.checkpoint.files.test_windows import small_windows
from tests.checkpoint.reads import counting_reads
from tests.integrations.trainer.test_trainer import (
    COLLECTIVES,
    arguments,
    collate,
    dataset,
    error_of,
    gpt2,
    load_safetensors,
    loaded,
    plain_module,
    undone,
    with_adapters,
    with_dropout,
)
from tests.models import CASES, make_model
from tests.ranks import run_alone, run_ranks

Values = dict[str, Any]
MOMENTS_ON_DISK = {"optimizer": "disk", "path": tempfile.gettempdir()}
DISK = {**MOMENTS_ON_DISK, "parameters": "disk"}
SAVING: Values = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("checkpoints")
    make_model(CASES["llama"]).save_pretrained(path / "llama")
    make_model(CASES["mixtral"]).save_pretrained(path / "mixtral")
    return str(path)


def mixtral(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(f"{folder}/mixtral")


def partly_frozen(folder: str) -> nn.Module:
    model = loaded(folder)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


# ---- state ----------------------------------------------------------------------------------------------------------


@dataclass
class State:
    """Everything that decides how a training goes on, as whole tensors on one rank."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor | float]
    scheduler: dict[str, Any]
    losses: list[float]
    random: list[Any]


def state_of(trainer: Trainer, since: int = 0) -> State:
    model, names = trainer.model, {id(param): name for name, param in trainer.model.named_parameters()}
    optimizer = {}
    for param, state in trainer.optimizer.state.items():
        for key, value in state.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            optimizer[f"{names[id(param)]}.{key}"] = whole.clone() if isinstance(whole, Tensor) else whole
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e and e["step"] > since]
    weights = {name: value.clone() for name, value in whole_state_dict(model).items()}
    draws = [random.random(), torch.rand(3).tolist()]
    return State(weights, optimizer, trainer.lr_scheduler.state_dict(), losses, draws)


def assert_equal(left: State, right: State, *, but_random: bool = False) -> None:
    assert left.weights.keys() == right.weights.keys()
    assert all(torch.equal(value, right.weights[name]) for name, value in left.weights.items())
    assert left.optimizer.keys() == right.optimizer.keys()
    for name, value in left.optimizer.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(right.optimizer[name])), name
    assert left.losses == right.losses
    assert but_random or (left.scheduler, left.random) == (right.scheduler, right.random)


def make_trainer(folder: str, stage: int, build: Callable[[str], nn.Module], **options: Any) -> Trainer:
    args = arguments(folder, stage, **options)
    torch.manual_seed(3)
    return Trainer(model=build(folder), args=args, train_dataset=dataset(), data_collator=collate)


# ---- the same number of ranks ---------------------------------------------------------------------------------------


PER_WRITER: Values = {"stage": 3, "collectives": COLLECTIVES, "checkpoint_files": "per_writer"}


@dataclass(frozen=True)
class Run:
    """A training that is interrupted."""

    name: str
    stage: int
    build: Callable[[str], nn.Module] = loaded
    options: Values = field(default_factory=dict)


RUNS = [
    *(Run(f"stage{stage}", stage, with_dropout) for stage in (0, 1, 2, 3)),
    Run("tied", 3, gpt2),
    Run("mixtral", 3, mixtral),
    Run("frozen", 2, partly_frozen),
    Run("adapters", 3, with_adapters),
    Run("plain_module_per_writer", 3, plain_module, {"zero": PER_WRITER}),
    Run("bf16", 3, options={"bf16": True}),
    Run("fused", 3, options={"optim": "adamw_torch_fused"}),
    Run("sgd", 2, options={"optim": "sgd"}),
    Run("adafactor", 3, options={"optim": "adafactor"}),
    Run(
        "adafactor_async",
        1,
        options={"optim": "adafactor", "zero": {"stage": 1, "collectives": COLLECTIVES, "async_save": True}},
    ),
    Run("disk", 3, with_dropout, {"zero": {"stage": 3, "collectives": COLLECTIVES, "offload": DISK}}),
    Run(
        "disk_mixed",
        2,
        options={"bf16": True, "zero": {"stage": 2, "collectives": COLLECTIVES, "offload": MOMENTS_ON_DISK}},
    ),
    Run("async", 3, with_dropout, {"zero": {"stage": 3, "collectives": COLLECTIVES, "async_save": True}}),
    Run("async_stage1", 1, options={"zero": {"stage": 1, "collectives": COLLECTIVES, "async_save": True}}),
    Run(
        "per_writer",
        3,
        with_dropout,
        {"zero": PER_WRITER},
    ),
    Run("accumulation", 3, options={"gradient_accumulation_steps": 2, "max_steps": 4}),
]


@undone
def stop_and_go_on(folder: str, run: Run) -> tuple[State, State]:
    with small_windows(1024) if "per_writer" in run.name else nullcontext():
        return _stop_and_go_on(folder, run)


def _stop_and_go_on(folder: str, run: Run) -> tuple[State, State]:
    place = f"{folder}/run_{run.name}"
    straight = make_trainer(folder, run.stage, run.build, output_dir=place, **SAVING, **run.options)
    straight.train()
    before = state_of(straight, since=2)
    if dist.get_rank() == 0:
        shutil.rmtree(f"{place}/checkpoint-4")
    dist.barrier()
    resumed = make_trainer(folder, run.stage, run.build, output_dir=place, **SAVING, **run.options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    return before, state_of(resumed, since=2)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_resumed_training_equals_one_that_never_stopped(run: Run, folder: str) -> None:
    for before, after in run_ranks(stop_and_go_on, 2, folder, run):
        assert_equal(before, after)
    assert sorted(os.listdir(f"{folder}/run_{run.name}")) == ["checkpoint-2", "checkpoint-4"]
    manifest = read_manifest(Path(f"{folder}/run_{run.name}/checkpoint-4"))
    assert (manifest.step, manifest.world_size, manifest.stage) == (4, 2, run.stage)


# ---- another number of ranks, another stage -------------------------------------------------------------------------

GLOBAL_BATCH = 12


class Recorder:
    """A collator that remembers the rows it was given, by their contents; the loader asks for one batch too many."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        self.rows += [tuple(row["input_ids"]) for row in rows]
        return collate(rows)


def elsewhere(folder: str, stage: int, build: Callable[[str], nn.Module], name: str, **options: Any) -> Trainer:
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    options = {"per_device_train_batch_size": GLOBAL_BATCH // num_ranks, "seed": 7} | SAVING | options
    args = arguments(folder, stage, output_dir=f"{folder}/{name}", **options)
    torch.manual_seed(3)
    rows = dataset(60, seed=4)
    return Trainer(model=build(folder), args=args, train_dataset=rows, data_collator=Recorder())


@undone
def save_there(
    folder: str, stage: int, build: Callable[[str], nn.Module], name: str, **options: Any
) -> tuple[State, list[Any]]:
    trainer = elsewhere(folder, stage, build, name, max_steps=2, **options)
    trainer.train()
    at_save = state_of(trainer)
    trainer = elsewhere(folder, stage, build, f"{name}_straight", max_steps=4, **options)
    trainer.train()
    return at_save, trainer.data_collator.rows[: 4 * GLOBAL_BATCH // dist.get_world_size()]


class StateAtStart(TrainerCallback):
    """Takes down what a resumed training starts from."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.state: State | None = None
        self.is_in_memory = True

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        self.state = state_of(self.trainer)
        states = [value for state in self.trainer.optimizer.state.values() for value in state.values()]
        locals_ = [value.to_local() for value in states if isinstance(value, DTensor)]
        self.is_in_memory = any(value.numel() and value.untyped_storage().resizable() for value in locals_)


@undone
def resume_here(
    folder: str, stage: int, build: Callable[[str], nn.Module], name: str, **options: Any
) -> tuple[State, list[Any]]:
    trainer = elsewhere(folder, stage, build, f"{name}_here", max_steps=4, save_strategy="no", **options)
    at_start = StateAtStart()
    at_start.trainer = trainer
    trainer.add_callback(at_start)
    trainer.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-2")
    assert at_start.state is not None
    is_offloaded = isinstance(options.get("zero"), dict) and "offload" in options["zero"]
    assert not at_start.is_in_memory or not is_offloaded
    return at_start.state, trainer.data_collator.rows[: 2 * trainer.args.per_device_train_batch_size]


@pytest.mark.parametrize(
    ("build", "from_stage", "to"),
    [
        (loaded, 3, {1: 3, 2: 1, 3: 2}),
        (mixtral, 1, {2: 3}),
        (gpt2, 3, {3: 0}),
        (partly_frozen, 0, {2: 3}),
    ],
    ids=["llama", "mixtral", "tied", "frozen"],
)
def test_state_is_the_same_on_other_ranks_and_stages(
    build: Callable[[str], nn.Module], from_stage: int, to: dict[int, int], folder: str
) -> None:
    name = f"ranks_{build.__name__}"
    saved = run_ranks(save_there, 4, folder, from_stage, build, name)
    seen = sorted(row for _, rows in saved for row in rows)
    assert len(seen) == len(set(seen)) == 4 * GLOBAL_BATCH
    for num_ranks, stage in to.items():
        resumed = (
            [run_alone(resume_here, folder, stage, build, name)]
            if num_ranks == 1
            else run_ranks(resume_here, num_ranks, folder, stage, build, name)
        )
        for state, _ in resumed:
            state.losses = saved[0][0].losses
            assert_equal(saved[0][0], state, but_random=True)
        gone_through = sorted(row for _, rows in resumed for row in rows)
        assert len(gone_through) == 2 * GLOBAL_BATCH
        first_two = {row for _, rows in saved for row in rows[: 2 * GLOBAL_BATCH // 4]}
        assert set(gone_through) == set(seen) - first_two  # no repeats, no gaps


def test_state_goes_to_a_disk_and_comes_back_on_other_ranks(folder: str) -> None:
    on_disk: Values = {"zero": {"stage": 3, "collectives": COLLECTIVES, "offload": DISK}}
    for name, there, here in (("to_disk", {}, on_disk), ("from_disk", on_disk, {})):
        saved = run_ranks(save_there, 3, folder, 3, loaded, name, **there)
        for state, _ in run_ranks(resume_here, 2, folder, 3, loaded, name, **here):
            state.losses = saved[0][0].losses
            assert_equal(saved[0][0], state, but_random=True)


# ---- the life of checkpoints in a run -------------------------------------------------------------------------------


@undone
def other_batch(folder: str) -> list[tuple[str, str]]:
    path = f"{folder}/batch"
    make_trainer(folder, 3, loaded, output_dir=path, max_steps=2, **SAVING).train()
    options: Values = {"output_dir": path, "per_device_train_batch_size": 1, "max_steps": 3}
    refused = error_of(lambda: make_trainer(folder, 3, loaded, **options).train(resume_from_checkpoint=True))
    trainer = make_trainer(folder, 3, loaded, zero_any_batch=True, **options)
    trainer.train(resume_from_checkpoint=True)
    return [refused, ("step", str(trainer.state.global_step))]


def test_another_global_batch_is_refused_unless_asked_for(folder: str) -> None:
    first, second = run_ranks(other_batch, 2, folder)
    assert first == second and first[1] == ("step", "3")
    kind, text = first[0]
    assert kind == "UsageError"
    assert "written with 4 samples a step, and now it would be 2" in text and "zero_any_batch" in text


@undone
def skip_the_broken(folder: str) -> tuple[int, tuple[str, str], tuple[str, str]]:
    path, is_first = f"{folder}/broken", dist.get_rank() == 0
    make_trainer(folder, 3, loaded, output_dir=path, **SAVING).train()
    if is_first:
        flip(Path(path, "checkpoint-4", "optimizer.safetensors"))
        shutil.copytree(f"{path}/checkpoint-4", f"{path}/checkpoint-6")
        Path(path, "checkpoint-6", MANIFEST).unlink()
    dist.barrier()
    trainer = make_trainer(folder, 3, loaded, output_dir=path, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    num_logs = len([entry for entry in trainer.state.log_history if "loss" in entry])
    named = error_of(
        lambda: make_trainer(folder, 3, loaded, output_dir=path).train(resume_from_checkpoint=f"{path}/checkpoint-4")
    )
    none = error_of(
        lambda: make_trainer(folder, 3, loaded, output_dir=f"{folder}/nothing").train(resume_from_checkpoint=True)
    )
    return num_logs, named, none


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_latest_is_the_newest_that_verifies(folder: str) -> None:
    for num_logs, named, none in run_ranks(skip_the_broken, 2, folder):
        assert num_logs == 3  # two of checkpoint-2 and one more
        assert named[0] == none[0] == "CheckpointError"
        assert "optimizer.safetensors was altered" in named[1]
        assert "no valid checkpoint" in none[1]


@undone
def keep_two(folder: str) -> tuple[list[str], str | None, float, float]:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"load_best_model_at_end": True, "save_total_limit": 2, "metric_for_best_model": "loss"}
    args = arguments(folder, 3, output_dir=f"{folder}/kept", greater_is_better=True, **options)
    trainer = Trainer(
        model=loaded(folder),
        args=args,
        train_dataset=dataset(),
        eval_dataset=dataset(6, seed=2),
        data_collator=collate,
    )
    foreign = Path(args.output_dir, "checkpoint-0")
    if dist.get_rank() == 0:
        foreign.mkdir(parents=True)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    return sorted(os.listdir(args.output_dir)), best, trainer.state.best_metric, trainer.evaluate()["eval_loss"]


def test_old_checkpoints_go_after_newer_ones_and_the_best_stays(folder: str) -> None:
    first, second = run_ranks(keep_two, 2, folder)
    assert first == second
    names, best, metric, after = first
    assert names == ["checkpoint-0", "checkpoint-1", "checkpoint-4"]  # without a manifest it is not ours to remove
    assert best == f"{folder}/kept/checkpoint-1"
    assert after == pytest.approx(metric, rel=1e-6)
    state = json.loads(Path(folder, "kept", "checkpoint-1", "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == best


@undone
def weights_alone(folder: str) -> tuple[list[str], tuple[str, str], dict[str, Tensor]]:
    path = f"{folder}/weights"
    make_trainer(folder, 3, loaded, output_dir=path, max_steps=2, save_only_model=True, **SAVING).train()
    resumed = error_of(lambda: make_trainer(folder, 3, loaded, output_dir=path).train(resume_from_checkpoint=True))
    args: Values = {"output_dir": f"{path}/anew", "max_steps": 1, "learning_rate": 0.0, "zero_weights_only": True}
    anew = make_trainer(folder, 3, loaded, **args)
    anew.train(resume_from_checkpoint=f"{path}/checkpoint-2")
    assert anew.state.global_step == 1
    return sorted(os.listdir(f"{path}/checkpoint-2")), resumed, whole_state_dict(anew.model)


def test_weights_alone_are_never_taken_for_a_whole_checkpoint_unless_asked_for(folder: str) -> None:
    for files, (kind, text), weights in run_ranks(weights_alone, 2, folder):
        assert "model.safetensors" in files and MANIFEST in files and "optimizer.safetensors" not in files
        assert kind == "CheckpointError"
        assert "optimizer.safetensors is missing" in text and "zero_weights_only=True" in text
        saved = load_safetensors(f"{folder}/weights/checkpoint-2/model.safetensors")
        assert all(torch.equal(weights[name], value) for name, value in saved.items())


def test_checkpoint_is_an_export(folder: str) -> None:
    """Runs after the runs above: plain transformers loads what stage 3 saved."""
    run_ranks(stop_and_go_on, 2, folder, Run("export", 3, loaded))
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/run_export/checkpoint-4")
    saved = load_safetensors(f"{folder}/run_export/checkpoint-4/model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["per_writer", "plain_module_per_writer"])
def test_files_with_one_writer_each_are_joined_by_an_export(folder: str, tmp_path: Path, name: str) -> None:
    """Runs after the runs above, of which two have such files."""
    run = next(each for each in RUNS if each.name == name)
    if not Path(folder, f"run_{name}").exists():
        run_ranks(stop_and_go_on, 2, folder, run)
    checkpoint = Path(folder, f"run_{name}", "checkpoint-4")
    names = sorted(path.name for path in checkpoint.iterdir() if "safetensors" in path.name)
    parts = [f"{name}.safetensors.0000{number}-of-00002" for name in ("model", "optimizer") for number in (1, 2)]
    assert names == parts
    joined = b"".join((checkpoint / name).read_bytes() for name in parts[:2])
    export(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == joined
    assert load_safetensors(tmp_path / "out" / "model.safetensors")
    with (checkpoint / parts[3]).open("r+b") as file:
        file.truncate(5)
    assert "optimizer.safetensors.00002-of-00002 has 5 bytes" in check(checkpoint).problems[0]


# ---- in the background ----------------------------------------------------------------------------------------------

ASYNC: Values = {"zero": {"stage": 3, "collectives": COLLECTIVES, "async_save": True}}


@undone
def fail_in_the_background(folder: str) -> tuple[tuple[str, str], list[str], float]:
    """Rank 1 cannot write its rows of the second checkpoint."""
    args = {"output_dir": f"{folder}/background", "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(folder, 3, loaded, **args, **ASYNC)

    def fail(what: str, path: Path) -> None:
        if what == "write_at" and "checkpoint-2" in str(path) and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")

    with mock.patch.object(disk, "on_change", fail):
        error = error_of(trainer.train)
    names = sorted(os.listdir(args["output_dir"]))
    return error, names, trainer.evaluate(dataset(4))["eval_loss"]


def test_failure_in_the_background_is_raised_on_all_ranks(folder: str) -> None:
    first, second = run_ranks(fail_in_the_background, 2, folder)
    assert first == second
    (kind, text), names, _ = first
    assert kind == "CheckpointError"
    assert "rank 1" in text and "No space left" in text
    assert names == ["checkpoint-1"]


# ---- by a signal ----------------------------------------------------------------------------------------------------


class SignalAtStep(TrainerCallback):
    """SIGTERM for one rank alone."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1 and dist.get_rank() == 1:
            jit = next(c.jit_manager for c in self.trainer.callback_handler.callbacks if hasattr(c, "jit_manager"))
            jit.kill_wait = 0
            os.kill(os.getpid(), signal.SIGTERM)
            while not jit._enable_checkpoint.__self__._is_requested:
                time.sleep(0.01)


@undone
def save_by_signal(folder: str) -> tuple[list[str], int, State, State]:
    place = f"{folder}/signal"
    straight = make_trainer(folder, 3, loaded, output_dir=place)
    straight.train()
    before = state_of(straight, since=2)
    trainer = make_trainer(folder, 3, loaded, output_dir=place, enable_jit_checkpoint=True, save_strategy="no")
    trainer.add_callback(SignalAtStep(trainer))
    trainer.train()
    names = sorted(os.listdir(place))
    resumed = make_trainer(folder, 3, loaded, output_dir=place)
    resumed.train(resume_from_checkpoint=True)
    return names, trainer.state.global_step, before, state_of(resumed, since=2)


def test_signal_to_one_rank_saves_on_all_at_the_same_step(folder: str) -> None:
    first, second = run_ranks(save_by_signal, 2, folder)
    assert first[:2] == second[:2] and first[0] == ["checkpoint-2"]
    for _, _, straight, resumed in (first, second):
        assert_equal(straight, resumed)


# ---- what is read ----------------------------------------------------------------------------------------------------


@undone
def count_what_resuming_reads(folder: str, by_name: bool) -> tuple[int, int, int]:
    path = f"{folder}/counted_{by_name}"
    make_trainer(folder, 3, loaded, output_dir=path, max_steps=2, **SAVING).train()
    trainer = make_trainer(folder, 3, loaded, output_dir=path, max_steps=3)
    files = [read_layout(each) for each in Path(path, "checkpoint-2").glob("*.safetensors")]
    with counting_reads() as sizes:
        trainer.train(resume_from_checkpoint=f"{path}/checkpoint-2" if by_name else True)
    return sum(sizes), sum(file.nbytes for file in files), sum(len(file.header) for file in files)


@pytest.mark.parametrize("by_name", [True, False])
def test_resuming_verifies_each_byte_once_and_reads_only_own_rows(folder: str, by_name: bool) -> None:
    found = run_ranks(count_what_resuming_reads, 2, folder, by_name)
    _, size, headers = found[0]
    read = sum(each for each, _, _ in found)
    assert 2 * size - headers <= read <= 2 * size + 5 * headers, (read, size, headers)  # headers are read by each rank
