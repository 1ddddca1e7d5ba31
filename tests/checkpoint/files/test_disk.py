"""A disk that is full fails a save on all ranks, and leaves the old checkpoint."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_zero.checkpoint.commit import verify
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import MANIFEST
from hf_zero.errors import CheckpointError
from tests.checkpoint.runs import make_trainer
from tests.integrations.refusals import refused
from tests.integrations.trainer.runs import Build, loaded, plain_module, undone, with_adapters, with_dropout
from tests.ranks import by_hand, on_ranks, run_ranks

FULL = OSError(errno.ENOSPC, "No space left on device")
FULL_IN_TORCH = RuntimeError("PytorchStreamWriter failed writing file: No space left on device")


@dataclass(frozen=True)
class Fault:
    """A call that fails on one rank.

    Attributes:
        name: for the messages.
        rank: where.
        target: the function that raises.
        part: a pattern that one of its paths has; the first call with it fails.
        error: what is raised.
        step: of the checkpoint; 2 is there already.
    """

    name: str
    rank: int
    target: str
    part: str = ""
    error: Exception = FULL
    step: int = 4


DISK = "hf_zero.checkpoint.files.disk."
FAULTS = [
    Fault("staging", 0, DISK + "make_folder", "*checkpoint-4.staged"),
    Fault("inner folder", 0, DISK + "make_folder", "*staged/checkpoint-4"),
    Fault("configuration", 0, "builtins.open", "*config.json"),
    Fault("header", 0, DISK + "write_file", "*.model.safetensors.partial"),
    Fault("probe", 0, DISK + "write_file", "*.hf_zero_*"),
    Fault("end of probe", 0, DISK + "remove_file", "*.hf_zero_*"),
    Fault("reserving", 0, DISK + "_reserve"),
    Fault("rows of rank 0", 0, DISK + "write_at", "*.model.safetensors.partial"),
    Fault("rows of rank 1", 1, DISK + "write_at", "*.model.safetensors.partial"),
    Fault("optimizer of rank 1", 1, DISK + "write_at", "*.optimizer.safetensors.partial"),
    Fault("memory", 1, "hf_zero.checkpoint.files.tensor_file._bytes_of", error=RuntimeError("can't allocate memory")),
    Fault("sync", 1, "os.fsync"),
    Fault("name of a file", 0, DISK + "rename", "*model.safetensors"),
    Fault("numbers", 0, DISK + "write_file", "*optimizer.json"),
    Fault("arguments", 0, "torch.save", "*training_args.bin", FULL_IN_TORCH),
    Fault("scheduler", 0, "torch.save", "*scheduler.pt", FULL_IN_TORCH),
    Fault("random state of rank 0", 0, "torch.save", "*rng_state_0.pth", FULL_IN_TORCH),
    Fault("random state of rank 1", 1, "torch.save", "*rng_state_1.pth", FULL_IN_TORCH),
    Fault("state", 0, "builtins.open", "*trainer_state.json"),
    Fault("sync of small files", 0, DISK + "sync_file", "*config.json"),
    Fault("manifest", 0, DISK + "write_file", f"*{MANIFEST}"),
    Fault("commit", 0, DISK + "rename", "*staged/checkpoint-4"),
    Fault("moving the old one", 0, DISK + "rename", "*/.checkpoint-2.replaced", step=2),
    Fault("commit in place of the old one", 0, DISK + "rename", "*staged/checkpoint-2", step=2),
]


_LIKE_OTHERS = ("inner folder", "end of probe", "rows of rank 0", "scheduler", "random state of rank 0")


@contextlib.contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """Within: the fault happens once, on its rank."""
    if dist.get_rank() != fault.rank:
        yield
        return
    module, _, name = fault.target.rpartition(".")
    original = getattr(sys.modules[module], name)
    done: list[bool] = []

    @functools.wraps(original)
    def failing(*args: Any, **kwargs: Any) -> Any:
        paths = [str(arg) for arg in args if isinstance(arg, str | Path)]
        if not done and (not fault.part or any(fnmatch(path, fault.part) for path in paths)):
            done.append(True)
            raise fault.error
        return original(*args, **kwargs)

    with mock.patch(fault.target, failing):
        yield
    assert done, f"{fault.name} did not happen"


@undone
def save_on_full_disk(folder: str, faults: list[Fault], build: Build) -> None:
    """Every fault is the same error on both ranks, and leaves the folder of the run as it was; then training goes on."""
    run = f"{folder}/full_{build.__name__}"
    trainer = make_trainer(folder, run, build, max_steps=2)
    trainer.train()
    before = verify(Path(run, "checkpoint-2"), None)
    for fault in faults:
        trainer.state.global_step = fault.step
        with injected(fault):
            refused(
                lambda: trainer._save_checkpoint(trainer.model, None),
                "CheckpointError",
                f"rank {fault.rank}: ",
                str(fault.error),
            )
        assert os.listdir(run) == ["checkpoint-2"], fault.name
        assert verify(Path(run, "checkpoint-2"), None) == before, fault.name
        dist.barrier()
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    dist.barrier()
    assert sorted(os.listdir(run)) == ["checkpoint-2", "checkpoint-4"]
    dist.barrier()


def test_save_on_a_full_disk_fails_on_all_ranks_and_leaves_the_old_checkpoint(folder: str) -> None:
    faults = [fault for fault in FAULTS if fault.name not in _LIKE_OTHERS or by_hand(fault)]
    run_ranks(save_on_full_disk, 2, folder, faults, loaded)


@pytest.mark.parametrize("build", [plain_module, with_adapters])
def test_save_on_a_full_disk_fails_alike_where_rank_0_writes_alone(build: Build, folder: str) -> None:
    faults = [Fault("arguments", 0, "torch.save", "*training_args.bin", FULL_IN_TORCH)]
    if build is with_adapters:
        faults.append(Fault("adapters", 0, "builtins.open", "*adapter_config.json"))
    run_ranks(save_on_full_disk, 2, folder, faults, build)


class Injecting(TrainerCallback):
    """Lets a fault happen from step 4 on."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4 and dist.get_rank() == self._fault.rank:
            original = disk.write_at

            def failing(*values: Any) -> None:
                disk.write_at = original
                raise self._fault.error

            disk.write_at = failing


@on_ranks(2)
@undone
def test_training_that_met_a_full_disk_goes_on_as_if_it_had_not(folder: str) -> None:
    """Train for 4 steps with checkpoints; where one cannot be saved, go on from the last one."""
    straight = make_trainer(folder, f"{folder}/straight", with_dropout, max_steps=4)
    straight.train()
    trainer = make_trainer(folder, f"{folder}/over", with_dropout, max_steps=4)
    trainer.add_callback(Injecting(next(fault for fault in FAULTS if fault.name == "rows of rank 1")))
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.train()
    trainer.remove_callback(Injecting)
    trainer.train(resume_from_checkpoint=True)
    found = whole_state_dict(trainer.model)
    for name, value in whole_state_dict(straight.model).items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("code", [0, errno.EOPNOTSUPP, errno.ENOSPC])
def test_blocks_are_reserved_by_the_system_or_not_at_all(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fallocate64(*_: object) -> int:
        ctypes.set_errno(code)
        return -1

    if code:
        monkeypatch.setattr(disk, "_LIBC", SimpleNamespace(fallocate64=fallocate64))
    path = tmp_path / "file"
    with pytest.raises(OSError, match="No space") if code == errno.ENOSPC else contextlib.nullcontext():
        disk.write_file(path, b"head", 2**20)
        assert path.stat().st_size == 2**20
        assert (path.stat().st_blocks * 512 >= 2**20) == (code == 0)
