"""A process that dies at any change on disk leaves the older or the newer checkpoint whole."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.checkpoint.commit import StagedCheckpoint, latest
from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import Manifest
from hf_zero.checkpoint.model_state import read_model, write_model
from hf_zero.checkpoint.optimizer_state import LoadedState, capture, read_state, state_files
from hf_zero.checkpoint.ranks.cooperative import read_files
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError
from hf_zero.integrations.trainer.checkpoint import _remove_old, step_of
from tests.checkpoint.files.test_manifest import damage_of


@dataclass
class Tiny:
    """A module and its optimizer in which every number is the same: what was loaded says which save it is of."""

    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def make(cls) -> Tiny:
        model = nn.Linear(5, 3)
        world = World.create(ZeroConfig(stage=3), torch.device("cpu"))
        return cls(world, model, torch.optim.AdamW(model.parameters()))

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.fill_(value)
                state = {"step": torch.tensor(value), "exp_avg": param.clone(), "exp_avg_sq": param.clone()}
                self.optimizer.state[param] = state

    def save(self, final: Path, value: float) -> None:
        self.fill(value)
        staged = StagedCheckpoint(final, self.world)
        write_model(self.model, staged.folder, self.world)
        plan, sources, content = capture(self.optimizer, self.model, "optimizer")
        staged.write(plan, sources)
        disk.write_file(staged.folder / state_files("optimizer")[1], json.dumps(content).encode())
        staged.commit(Manifest(step=step_of(final) or 0, world_size=1, stage=3))

    def load(self, folder: Path) -> float:
        """The number of which a checkpoint consists."""
        self.fill(-1.0)
        read_model(self.model, folder, self.world)
        plan, sources = LoadedState(read_state(folder, "optimizer"), self.optimizer, self.model).install()
        read_files([file.name for file in plan.files], plan.pieces, sources, folder, 0)
        found: list[Tensor] = list(self.model.parameters())
        found += [value for state in self.optimizer.state.values() for value in state.values()]
        (number,) = {number for tensor in found for number in tensor.detach().reshape(-1).tolist()}
        return float(number)

    def newest(self, run: Path) -> float | None:
        """The number of the newest checkpoint; no folder with the name of one may be anything but whole."""
        path, _, skipped = latest(run, step_of)
        assert skipped == []
        return None if path is None else self.load(path)


def count_changes(act: Callable[[], None]) -> None:
    """Call `act` before every change of the disk from now on, by `hf_zero.checkpoint.files.disk` or around it."""
    for owner, name in ((os, "fsync"), (os, "pwrite"), (disk, "_reserve")):  # which no audit event announces
        setattr(owner, name, _noticed(getattr(owner, name), act))

    def audit(event: str, args: tuple[Any, ...]) -> None:
        is_writing = event == "open" and isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        if is_writing or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
            act()

    sys.addaudithook(audit)


def _noticed(function: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        act()
        return function(*args)

    return call


def dies_at(number: int, work: Callable[[], None]) -> bool:
    """Run `work` in a fork that ends before its change `number`; False if it made fewer."""
    pid = os.fork()
    if pid == 0:
        left = itertools.count(number - 1, -1)
        code = 3
        try:
            count_changes(lambda: os._exit(2) if next(left) == 0 else None)
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 2)
    return code == 2


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk: what a process wrote outlives it, and the machine stays up."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@dataclass(frozen=True)
class Save:
    """A save that is cut off: the steps of the checkpoints that are there, and of the new one."""

    name: str
    there: tuple[int, ...]
    step: int


SAVES = [Save("first", (), 2), Save("later", (2,), 4), Save("replacing", (2, 4), 4)]


@pytest.mark.parametrize("save", SAVES, ids=lambda save: save.name)
def test_a_whole_checkpoint_is_found_after_death_at_every_change(save: Save, tmp_path: Path, unsynced: None) -> None:
    tiny, base = Tiny.make(), tmp_path / "base"
    base.mkdir()
    for step in save.there:
        tiny.save(base / f"checkpoint-{step}", 1.0)
    found = []
    for number in itertools.count(1):
        run = shutil.copytree(base, tmp_path / f"run{number}")
        died = dies_at(number, lambda run=run: tiny.save(run / f"checkpoint-{save.step}", 2.0))
        found.append(tiny.newest(shutil.copytree(run, tmp_path / f"seen{number}")))
        assert_next_save_works(tiny, run, save)  # without a look-up before
        if not died:
            break
    old, new = [1.0 if save.there else None], [2.0]
    turn = found.index(2.0)
    assert found == old * turn + new * (len(found) - turn)
    assert turn > 25 and len(found) - turn > 2


@pytest.mark.parametrize("is_first", [True, False])
def test_files_of_the_program_outlive_death_at_every_change(is_first: bool, tmp_path: Path, unsynced: None) -> None:
    tiny, name = Tiny.make(), "checkpoint-2"
    base, own = tmp_path / "base" / name, {"args.json": "1", "deep/er/events": "2"}
    if not is_first:
        tiny.save(base, 1.0)

    def put(final: Path) -> None:
        for each, content in own.items():
            (final / each).parent.mkdir(parents=True, exist_ok=True)
            (final / each).write_text(content)

    put(base)
    base.chmod(0o700)
    for number in itertools.count(1):
        run = shutil.copytree(base.parent, tmp_path / f"run{number}")
        died = dies_at(number, lambda run=run: tiny.save(run / name, 2.0))
        own["args.json"] = str(number)
        (run / name).mkdir(exist_ok=True)
        (run / name / "args.json").write_text(own["args.json"])  # as the program does when it starts again
        tiny.save(run / name, 3.0)
        assert {each: (run / name / each).read_text() for each in own} == own
        assert tiny.newest(run) == 3.0
        assert os.listdir(run) == [name]
        shutil.rmtree(run)
        if not died:
            break
    tiny.save(base, 4.0)
    assert base.stat().st_mode & 0o777 == 0o700


def assert_next_save_works(tiny: Tiny, run: Path, save: Save) -> None:
    tiny.save(run / f"checkpoint-{save.step}", 3.0)
    assert tiny.newest(run) == 3.0
    assert sorted(os.listdir(run)) == [f"checkpoint-{step}" for step in sorted({*save.there, save.step})]
    shutil.rmtree(run)


def test_death_in_the_save_after_a_death_leaves_a_whole_checkpoint(tmp_path: Path, unsynced: None) -> None:
    tiny, final = Tiny.make(), "checkpoint-2"
    tiny.save(tmp_path / "base" / final, 1.0)
    tiny.save(tmp_path / "new" / final, 2.0)
    between, after = tmp_path / "between", tmp_path / "after"  # the renames of a save that replaces
    for run in (between, after):
        shutil.copytree(tmp_path / "base" / final, run / f".{final}.replaced")
    shutil.copytree(tmp_path / "new" / final, between / f".{final}.staged" / final)
    shutil.copytree(tmp_path / "new" / final, after / final)
    (after / f".{final}.staged").mkdir()
    for run, before in ((between, 1.0), (after, 2.0)):
        assert_next_save_works(tiny, shutil.copytree(run, tmp_path / "second"), Save("", (2,), 2))
        for number in range(1, 15):  # until it is as any other save
            second = shutil.copytree(run, tmp_path / "second")
            assert dies_at(number, lambda second=second: tiny.save(second / final, 3.0))
            assert tiny.newest(second) == before
            assert_next_save_works(tiny, second, Save("", (2,), 2))


def test_an_older_checkpoint_has_its_name_again_when_the_new_one_cannot_get_it(
    tmp_path: Path, unsynced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, final, rename = Tiny.make(), tmp_path / "checkpoint-2", disk.rename
    tiny.save(final, 1.0)

    def fails(old: Path, new: Path) -> None:
        if old.parent.name.endswith(".staged"):
            raise OSError("no leave")
        rename(old, new)

    with monkeypatch.context() as within:
        within.setattr(disk, "rename", fails)
        with pytest.raises(CheckpointError, match="no leave"):
            tiny.save(final, 2.0)
    assert os.listdir(tmp_path) == [final.name]
    assert tiny.load(final) == 1.0


def test_rotation_that_was_cut_off_leaves_whole_checkpoints_and_is_made_good(tmp_path: Path, unsynced: None) -> None:
    tiny, base = Tiny.make(), tmp_path / "base"
    for step in (2, 4, 6):
        tiny.save(base / f"checkpoint-{step}", float(step))
    trainer = SimpleNamespace(
        args=SimpleNamespace(save_total_limit=1), state=SimpleNamespace(best_model_checkpoint=None)
    )
    for number in itertools.count(1):
        run = shutil.copytree(base, tmp_path / f"run{number}")
        died = dies_at(number, lambda run=run: _remove_old(trainer, run))
        assert tiny.newest(run) == 6.0
        assert all(damage_of(path) == [] for path in run.glob("checkpoint-*"))
        shutil.copytree(base / "checkpoint-2", run / "checkpoint-2", dirs_exist_ok=True)  # trained once more
        _remove_old(trainer, run)
        assert os.listdir(run) == ["checkpoint-6"]
        if not died:
            break
