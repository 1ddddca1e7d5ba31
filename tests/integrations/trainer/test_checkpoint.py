"""Checkpoints of the plain Trainer: training that stops and goes on equals training that never stopped."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import tempfile
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import MANIFEST, read_manifest
from hf_zero.checkpoint.files.tensor_file import read_layout
from hf_zero.checkpoint.offline.export import export
from hf_zero.checkpoint.offline.inspection import check
from hf_zero.checkpoint.ranks.background import background_of
from tests.checkpoint.files.test_windows import small_windows
from tests.checkpoint.reads import counting_reads
from tests.integrations import states
from tests.integrations.refusals import assert_alike, refused
from tests.integrations.states import State, assert_read_once, assert_same_state, flip
from tests.integrations.trainer.runs import (
    COLLECTIVES,
    Build,
    Values,
    arguments,
    collate,
    dataset,
    gpt2,
    loaded,
    logged,
    make_trainer,
    mixtral,
    plain_module,
    trainer_of,
    undone,
    with_adapters,
    with_dropout,
)
from tests.ranks import by_hand, on_ranks, run_alone, run_ranks

SAVING: Values = {"save_strategy": "steps", "save_steps": 2}
SHORT: Values = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
MOMENTS_ON_DISK = {"optimizer": "disk", "path": tempfile.gettempdir()}
DISK = {**MOMENTS_ON_DISK, "parameters": "disk"}


def zero_of(stage: int, **config: Any) -> Values:
    """The argument `zero` with more than the stage in it."""
    return {"zero": {"stage": stage, "collectives": COLLECTIVES, **config}}


def partly_frozen(folder: str) -> nn.Module:
    model = loaded(folder)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def state_of(trainer: Any, since: int = 0) -> State:
    draws = [random.random(), torch.rand(3).tolist()]
    losses = logged(trainer, since=since)
    return states.state_of(trainer.model, trainer.optimizer, trainer.lr_scheduler, losses, draws)


# ---- the same number of ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A training that is interrupted."""

    name: str
    stage: int
    build: Build = loaded
    options: Values = field(default_factory=dict)


RUNS = [
    Run("mixtral", 3, mixtral),
    Run("plain_module_per_writer", 3, plain_module, zero_of(3, checkpoint_files="per_writer")),
    Run("adafactor_async", 1, with_dropout, {"optim": "adafactor", **zero_of(1, async_save=True)}),
    Run("disk_mixed", 2, options={"bf16": True, **zero_of(2, offload=MOMENTS_ON_DISK)}),
    Run("async_accumulation", 3, with_dropout, {"gradient_accumulation_steps": 2, **zero_of(3, async_save=True)}),
    *by_hand(
        *(Run(f"stage{stage}", stage, with_dropout) for stage in (0, 1, 2, 3)),
        Run("adapters", 3, with_adapters),
        Run("per_writer", 3, with_dropout, zero_of(3, checkpoint_files="per_writer")),
        Run("async", 3, with_dropout, zero_of(3, async_save=True)),
        Run("fused", 3, options={"optim": "adamw_torch_fused"}),
        Run("accumulation", 3, options={"gradient_accumulation_steps": 2}),
        Run("tied", 3, gpt2),
        Run("frozen", 2, partly_frozen),
        Run("bf16", 3, options={"bf16": True}),
        Run("sgd", 2, options={"optim": "sgd"}),
        Run("adafactor", 3, options={"optim": "adafactor"}),
        Run("disk", 3, with_dropout, zero_of(3, offload=DISK)),
        Run("async_stage1", 1, options=zero_of(1, async_save=True)),
    ),
]


@undone
def stop_and_go_on(run: Run, folder: str) -> None:
    place = f"{folder}/run_{run.name}"
    with small_windows(1024) if "per_writer" in run.name else nullcontext():
        straight = make_trainer(folder, run.stage, run.build, output_dir=place, **SHORT, **run.options)
        straight.train()
        before = state_of(straight, since=1)
        if dist.get_rank() == 0:
            shutil.rmtree(f"{place}/checkpoint-2")
        dist.barrier()
        resumed = make_trainer(folder, run.stage, run.build, output_dir=place, **SHORT, **run.options)
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert_same_state(before, state_of(resumed, since=1))
    assert sorted(os.listdir(place)) == ["checkpoint-1", "checkpoint-2"]
    manifest = read_manifest(Path(place, "checkpoint-2"))
    assert (manifest.step, manifest.world_size, manifest.stage) == (2, 2, run.stage)


@on_ranks(2, run=RUNS)
def test_resumed_training_equals_one_that_never_stopped(run: Run, folder: str) -> None:
    stop_and_go_on(run, folder)


def last_of(name: str, folder: str) -> Path:
    """The last checkpoint of one of the runs above, which takes place now if it has not yet."""
    path = Path(folder, f"run_{name}", "checkpoint-2")
    if not path.exists():
        run_ranks(stop_and_go_on, 2, next(run for run in RUNS if run.name == name), folder)
    return path


def test_checkpoint_is_an_export(folder: str) -> None:
    """Plain transformers loads what stage 3 saved."""
    path = last_of("async_accumulation", folder)
    model, saved = AutoModelForCausalLM.from_pretrained(path), load_file(path / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", [*by_hand("per_writer"), "plain_module_per_writer"])
def test_files_with_one_writer_each_are_joined_by_an_export(folder: str, tmp_path: Path, name: str) -> None:
    checkpoint = last_of(name, folder)
    names = sorted(path.name for path in checkpoint.iterdir() if "safetensors" in path.name)
    parts = [f"{name}.safetensors.0000{number}-of-00002" for name in ("model", "optimizer") for number in (1, 2)]
    assert names == parts
    joined = b"".join((checkpoint / name).read_bytes() for name in parts[:2])
    export(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == joined
    assert load_file(tmp_path / "out" / "model.safetensors")
    with (checkpoint / parts[3]).open("r+b") as file:
        file.truncate(5)
    assert "optimizer.safetensors.00002-of-00002 has 5 bytes" in check(checkpoint).problems[0]


# ---- another number of ranks, another stage -------------------------------------------------------------------------

GLOBAL_BATCH = 12


class Recorder:
    """A collator that remembers the rows it was given, by their contents; the loader asks for one batch too many."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        self.rows += [tuple(row["input_ids"]) for row in rows]
        return collate(rows)


def elsewhere(folder: str, stage: int, build: Build, name: str, **options: Any) -> Any:
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    options = {"per_device_train_batch_size": GLOBAL_BATCH // num_ranks, "seed": 7} | SAVING | options
    args = arguments(folder, stage, output_dir=f"{folder}/{name}", **options)
    torch.manual_seed(3)
    return trainer_of(build(folder), args, train_dataset=dataset(60, seed=4), data_collator=Recorder())


class StateAtSave(TrainerCallback):
    """Takes down what the first checkpoint is of."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.state: State | None = None

    def on_save(self, *_: Any, **__: Any) -> None:
        self.state = self.state or state_of(self.trainer)


@undone
def save_there(folder: str, stage: int, build: Build, name: str, **options: Any) -> tuple[State, list[Any]]:
    trainer = elsewhere(folder, stage, build, name, max_steps=4, **options)
    at_save = StateAtSave(trainer)
    trainer.add_callback(at_save)
    trainer.train()
    assert at_save.state is not None
    return at_save.state, trainer.data_collator.rows[: 4 * GLOBAL_BATCH // dist.get_world_size()]


class StateAtStart(TrainerCallback):
    """Takes down what a resumed training starts from."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.state: State | None = None
        self.is_in_memory = True

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.state = state_of(self.trainer)
        states = [value for state in self.trainer.optimizer.state.values() for value in state.values()]
        locals_ = [value.to_local() for value in states if isinstance(value, DTensor)]
        self.is_in_memory = any(value.numel() and value.untyped_storage().resizable() for value in locals_)


@undone
def resume_here(folder: str, stage: int, build: Build, name: str, **options: Any) -> tuple[State, list[Any]]:
    trainer = elsewhere(folder, stage, build, f"{name}_here", max_steps=4, save_strategy="no", **options)
    at_start = StateAtStart(trainer)
    trainer.add_callback(at_start)
    trainer.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-2")
    assert at_start.state is not None
    is_offloaded = isinstance(options.get("zero"), dict) and "offload" in options["zero"]
    assert not at_start.is_in_memory or not is_offloaded
    return at_start.state, trainer.data_collator.rows[: 2 * trainer.args.per_device_train_batch_size]


@pytest.mark.parametrize(
    ("build", "from_stage", "to"),
    [
        (loaded, 3, {1: 3, 3: 2, **dict(by_hand((2, 1)))}),
        (mixtral, 1, {2: 3}),
        (gpt2, 3, {3: 0}),
        (partly_frozen, 0, {2: 3}),
    ],
    ids=["llama", "mixtral", "tied", "frozen"],
)
def test_state_is_the_same_on_other_ranks_and_stages(
    build: Build, from_stage: int, to: dict[int, int], folder: str
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
            assert_same_state(saved[0][0], state, but_rest=True)
        gone_through = sorted(row for _, rows in resumed for row in rows)
        assert len(gone_through) == 2 * GLOBAL_BATCH
        first_two = {row for _, rows in saved for row in rows[: 2 * GLOBAL_BATCH // 4]}
        assert set(gone_through) == set(seen) - first_two  # no repeats, no gaps


def test_state_goes_to_a_disk_and_comes_back_on_other_ranks(folder: str) -> None:
    on_disk = zero_of(3, offload=DISK)
    for name, there, here in (("to_disk", {}, on_disk), ("from_disk", on_disk, {})):
        saved = run_ranks(save_there, 3, folder, 3, loaded, name, **there)
        for state, _ in run_ranks(resume_here, 2, folder, 3, loaded, name, **here):
            assert_same_state(saved[0][0], state, but_rest=True)


# ---- the life of checkpoints in a run -------------------------------------------------------------------------------


@on_ranks(2)
@undone
def test_another_global_batch_is_refused_unless_asked_for(folder: str) -> None:
    path = f"{folder}/batch"
    make_trainer(folder, 3, output_dir=path, max_steps=2, **SAVING).train()
    options: Values = {"output_dir": path, "per_device_train_batch_size": 1, "max_steps": 3}
    resumed = make_trainer(folder, 3, **options)
    texts = "written with 4 samples a step, and now it would be 2", "gradient_accumulation_steps", "zero_any_batch"
    refused(lambda: resumed.train(resume_from_checkpoint=True), "UsageError", *texts)
    trainer = make_trainer(folder, 3, zero_any_batch=True, **options)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


@on_ranks(2)
@undone
def test_latest_is_the_newest_that_verifies(folder: str) -> None:
    path = f"{folder}/broken"
    make_trainer(folder, 3, output_dir=path, **SAVING).train()
    if dist.get_rank() == 0:
        flip(Path(path, "checkpoint-4", "optimizer.safetensors"))
        shutil.copytree(f"{path}/checkpoint-4", f"{path}/checkpoint-6")
        Path(path, "checkpoint-6", MANIFEST).unlink()
    dist.barrier()
    trainer = make_trainer(folder, 3, output_dir=path, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert len(logged(trainer)) == 3  # two of checkpoint-2 and one more
    for out, checkpoint, text in (
        (path, f"{path}/checkpoint-4", "optimizer.safetensors was altered"),
        (f"{folder}/nothing", True, "no valid checkpoint"),
    ):
        trainer = make_trainer(folder, 3, output_dir=out)
        refused(lambda: trainer.train(resume_from_checkpoint=checkpoint), "CheckpointError", text)


@on_ranks(2)
@undone
def test_old_checkpoints_go_after_newer_ones_and_the_best_stays(folder: str) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"load_best_model_at_end": True, "save_total_limit": 2, "metric_for_best_model": "loss"}
    args = arguments(folder, 3, output_dir=f"{folder}/kept", greater_is_better=True, **options)
    trainer = trainer_of(loaded(folder), args, eval_dataset=dataset(6, seed=2))
    if dist.get_rank() == 0:
        Path(args.output_dir, "checkpoint-0").mkdir(parents=True)  # without a manifest it is not ours to remove
    trainer.train()
    best = f"{folder}/kept/checkpoint-1"
    assert trainer.state.best_model_checkpoint == best
    assert sorted(os.listdir(args.output_dir)) == ["checkpoint-0", "checkpoint-1", "checkpoint-4"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)
    assert json.loads(Path(best, "trainer_state.json").read_text())["best_model_checkpoint"] == best


@on_ranks(2)
@undone
def test_weights_alone_are_never_taken_for_a_whole_checkpoint_unless_asked_for(folder: str) -> None:
    path = f"{folder}/weights"
    make_trainer(folder, 3, output_dir=path, max_steps=2, save_only_model=True, **SAVING).train()
    resumed = make_trainer(folder, 3, output_dir=path)
    texts = "optimizer.safetensors is missing", "zero_weights_only=True"
    refused(lambda: resumed.train(resume_from_checkpoint=True), "CheckpointError", *texts)
    options: Values = {"output_dir": f"{path}/anew", "max_steps": 1, "learning_rate": 0.0, "zero_weights_only": True}
    anew = make_trainer(folder, 3, **options)
    anew.train(resume_from_checkpoint=f"{path}/checkpoint-2")
    assert anew.state.global_step == 1
    files = os.listdir(f"{path}/checkpoint-2")
    assert "model.safetensors" in files and MANIFEST in files and "optimizer.safetensors" not in files
    weights = whole_state_dict(anew.model)
    saved = load_file(f"{path}/checkpoint-2/model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in saved.items())


@on_ranks(2)
@undone
def test_failure_in_the_background_is_raised_on_all_ranks(folder: str) -> None:
    """Rank 1 cannot write its rows of the second checkpoint."""
    out = f"{folder}/background"
    trainer = make_trainer(
        folder, 3, output_dir=out, save_strategy="steps", save_steps=1, **zero_of(3, async_save=True)
    )

    def fail(what: str, path: Path) -> None:
        if what == "write_at" and "checkpoint-2" in str(path) and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")

    with mock.patch.object(disk, "on_change", fail):
        refused(trainer.train, "CheckpointError", "rank 1", "No space left")
    assert os.listdir(out) == ["checkpoint-1"]
    assert_alike(trainer.evaluate(dataset(4))["eval_loss"])


@on_ranks(2)
@undone
def test_what_was_copied_for_a_save_goes_with_its_trainer(folder: str) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, **zero_of(3, async_save=True)}
    trainer = make_trainer(folder, 3, output_dir=f"{folder}/let_go", **options)
    trainer.train()
    saves = background_of(zero.engine_of(trainer.model).world)  # type: ignore[union-attr]
    assert saves is not None and saves.kept_bytes
    kept = weakref.ref(saves)
    del saves, trainer
    zero.undo()  # models load partitioned until then
    AcceleratorState._reset_state(reset_partial_state=True)  # which keeps the plugins of the last accelerator
    for _ in range(2):
        gc.collect()
    assert kept() is None


@on_ranks(2)
@undone
def test_a_folder_that_others_wrote_is_told_of_before_the_training(folder: str) -> None:
    place = Path(folder, "foreign")
    trainer = make_trainer(folder, 3, output_dir=str(place), **SAVING)
    for name in ("checkpoint-3", "checkpoint-6"):  # where nothing is saved
        Path(place, name).mkdir(parents=True, exist_ok=True)
        Path(place, name, "model.safetensors").touch()
    trainer.train()
    again = make_trainer(folder, 3, output_dir=str(place), **SAVING)
    Path(place, "checkpoint-4", MANIFEST).unlink(missing_ok=True)
    dist.barrier()
    with pytest.raises(zero.CheckpointError, match=r"checkpoint-4 exists already, and is no checkpoint of hf_zero"):
        again.train()
    assert again.state.global_step == 0


class _Adds(TrainerCallback):
    """Adds to a checkpoint that has been saved."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            inner = Path(args.output_dir, f"checkpoint-{state.global_step}", "further", "deep")
            inner.mkdir(parents=True)
            (inner / "metrics.json").write_text(str(state.global_step))


class _Copying(Trainer):
    """Writes into its checkpoint's folder before it saves, and copies what lies beside it."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        Path(folder, "own.json").write_text("1")
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        beside = Path(output_dir).parent
        shutil.copy(beside / "args.json", output_dir)
        Path(beside, "newest.txt").write_text(Path(output_dir).name)
        Path(beside, "new").write_text(Path(output_dir).name)
        os.replace(beside / "new", beside / "replaced.txt")


@on_ranks(2)
@undone
def test_what_a_trainer_puts_into_and_beside_its_checkpoint_is_there(folder: str) -> None:
    place = Path(folder, "copying")
    trainer = make_trainer(folder, 3, output_dir=str(place), **SAVING)
    trainer.__class__ = _Copying
    trainer.add_callback(_Adds())
    if dist.get_rank() == 0:
        place.mkdir(exist_ok=True)
        Path(place, "args.json").write_text("{}")
    dist.barrier()
    trainer.train()
    dist.barrier()  # rank 0 has added its last
    saved = sorted(path for path in place.glob("checkpoint-*"))
    assert saved and all((path / "own.json").read_text() == "1" for path in saved)
    assert all((path / "args.json").read_text() == "{}" for path in saved)
    assert (place / "newest.txt").read_text() == (place / "replaced.txt").read_text() == saved[-1].name
    assert not list(place.glob(".checkpoint*"))
    assert all((path / "further/deep/metrics.json").read_text() == path.name.split("-")[1] for path in saved)
    resumed = make_trainer(folder, 3, output_dir=str(place), **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == trainer.state.global_step


class _Plainly(TrainerCallback):
    """Makes a checkpoint what the plain Trainer would have written."""

    def on_save(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        place = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if state.is_world_process_zero:
            torch.save(optimizer.state_dict(), place / "optimizer.pt")
            for name in (MANIFEST, "optimizer.safetensors", "optimizer.json"):
                (place / name).unlink()


@on_ranks(2, stage=[1, 3])
@undone
def test_a_checkpoint_of_the_plain_trainer_goes_on_in_any_stage(folder: str, stage: int) -> None:
    place = Path(folder, f"plain{stage}")
    straight = make_trainer(folder, stage, output_dir=str(place), **SHORT)
    straight.add_callback(_Plainly())
    straight.train()
    before = state_of(straight, since=1)
    resumed = make_trainer(folder, stage, output_dir=f"{place}_on", **SHORT)
    resumed.train(resume_from_checkpoint=str(place / "checkpoint-1"))
    assert_same_state(before, state_of(resumed, since=1))
    again = make_trainer(folder, stage, output_dir=str(place), **{**SHORT, "max_steps": 3})
    again.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in again.state.log_history if "loss" in entry] == [1, 2, 3]
    again.state.best_model_checkpoint = f"{place}/checkpoint-9"
    again._load_best_model()  # which a callback has removed
    again._load_from_checkpoint(f"{place}/checkpoint-1")
    with pytest.raises(zero.CheckpointError, match=r"scheduler\.pt is missing"):
        if dist.get_rank() == 0:
            (place / "checkpoint-1" / "scheduler.pt").unlink()
        dist.barrier()
        again.train(resume_from_checkpoint=str(place / "checkpoint-1"))


@on_ranks(2)
@undone
def test_text_that_was_edited_after_a_save_counts_as_it_is(folder: str) -> None:
    place = Path(folder, "edited")
    make_trainer(folder, 3, output_dir=str(place), **SHORT).train()
    last = place / "checkpoint-2"

    def edit(name: str, **values: Any) -> None:
        if dist.get_rank() == 0:
            content = json.loads((last / name).read_text())
            (last / name).write_text(json.dumps({**content, **values}))
        dist.barrier()

    edit("trainer_state.json", save_steps=7)
    edit("config.json", mine="v2")
    longer = make_trainer(folder, 3, output_dir=str(place), **{**SHORT, "max_steps": 3})
    longer.train(resume_from_checkpoint=str(last))
    assert longer.state.global_step == 3
    for name, text in (("trainer_state.json", "is of step 9"), ("optimizer.json", "optimizer.json has")):
        edit(name, global_step=9)
        with pytest.raises(zero.CheckpointError, match=text):
            longer.train(resume_from_checkpoint=str(last))
        edit("trainer_state.json", global_step=2)


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


@on_ranks(2)
@undone
def test_signal_to_one_rank_saves_on_all_at_the_same_step(folder: str) -> None:
    place = f"{folder}/signal"
    straight = make_trainer(folder, 3, output_dir=place)
    straight.train()
    before = state_of(straight, since=2)
    was = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(folder, 3, output_dir=place, enable_jit_checkpoint=True, save_strategy="no")
    trainer.add_callback(SignalAtStep(trainer))
    make_trainer(folder, 3, output_dir=place, enable_jit_checkpoint=True)  # of another training, which comes later
    trainer.callback_handler.on_train_begin(
        trainer.args, trainer.state, trainer.control
    )  # as `auto_find_batch_size` may
    trainer.train()
    assert_alike(trainer.state.global_step)
    assert os.listdir(place) == ["checkpoint-2"]
    assert signal.getsignal(signal.SIGTERM) is was
    resumed = make_trainer(folder, 3, output_dir=place)
    resumed.train(resume_from_checkpoint=True)
    assert_same_state(before, state_of(resumed, since=2))


# ---- what is read ----------------------------------------------------------------------------------------------------


@undone
def count_what_resuming_reads(folder: str) -> list[tuple[int, int, int]]:
    """For a checkpoint that is named, and for the newest one."""
    found = []
    path = f"{folder}/counted"
    make_trainer(folder, 3, output_dir=path, max_steps=2, **SAVING).train()
    for by_name in (True, False):
        trainer = make_trainer(folder, 3, output_dir=path, max_steps=3)
        files = [read_layout(each) for each in Path(path, "checkpoint-2").glob("*.safetensors")]
        with counting_reads() as sizes:
            trainer.train(resume_from_checkpoint=f"{path}/checkpoint-2" if by_name else True)
        found.append((sum(sizes), sum(file.nbytes for file in files), sum(len(file.header) for file in files)))
    return found


def test_resuming_verifies_each_byte_once_and_reads_only_own_rows(folder: str) -> None:
    for by_rank in zip(*run_ranks(count_what_resuming_reads, 2, folder), strict=True):
        assert_read_once(by_rank)
