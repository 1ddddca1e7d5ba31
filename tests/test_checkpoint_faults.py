"""Checkpoints under faults: processes that die, full disks, damaged files; the old or the new one is always whole."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Trainer, TrainerCallback

from hf_zero.checkpoint import cooperative, disk
from hf_zero.checkpoint.commit import StagedCheckpoint, latest, verify
from hf_zero.checkpoint.cooperative import read_files
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.checkpoint.manifest import MANIFEST, Manifest, damages, extents_of, read_manifest, record_of
from hf_zero.checkpoint.model_plan import model_sources
from hf_zero.checkpoint.model_state import read_model, write_model
from hf_zero.checkpoint.optimizer_state import LoadedState, capture, state_files
from hf_zero.config import ZeroConfig
from hf_zero.engine.engine import engine_of
from hf_zero.engine.torch_compat import local_of
from hf_zero.engine.world import World
from hf_zero.errors import CheckpointError
from hf_zero.trainer_checkpoint import _remove_old, step_of
from tests.models import CASES, make_model
from tests.ranks import run_ranks
from tests.test_trainer import arguments, collate, dataset, loaded, plain_module, undone, with_adapters, with_dropout
from tests.test_trainer_checkpoint import mixtral

Values = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("faults")
    make_model(CASES["llama"]).save_pretrained(path / "llama")
    make_model(CASES["mixtral"]).save_pretrained(path / "mixtral")
    return str(path)


def make_trainer(folder: str, run: str, build: Callable[[str], nn.Module] = loaded, **options: Any) -> Trainer:
    saving = {"output_dir": run, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    settings = {"stage": 3, "collectives": "pairwise", "timeout_s": 10}
    args = arguments(folder, 3, zero=settings, **saving | options)
    torch.manual_seed(3)
    return Trainer(model=build(folder), args=args, train_dataset=dataset(), data_collator=collate)


# ---- one process dies at every change -------------------------------------------------------------------------------


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
        plan, sources = LoadedState(folder, "optimizer", self.optimizer, self.model).install()
        read_files([file.name for file in plan.files], plan.pieces, sources, folder, 0)
        found: list[Tensor] = list(self.model.parameters())
        found += [value for state in self.optimizer.state.values() for value in state.values()]
        (number,) = {number for tensor in found for number in tensor.detach().reshape(-1).tolist()}
        return float(number)

    def newest(self, run: Path) -> float | None:
        """The number of the newest checkpoint; no folder with the name of one may be anything but whole."""
        path, skipped = latest(run, step_of)
        assert skipped == []
        return None if path is None else self.load(path)


def count_changes(act: Callable[[], None]) -> None:
    """Call `act` before every change of the disk from now on, by `hf_zero.checkpoint.disk` or around it."""
    for name in ("fsync", "pwrite", "posix_fallocate"):  # which no audit event announces
        setattr(os, name, _noticed(getattr(os, name), act))

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


# ---- ranks are killed -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """When a rank ends itself: at its n-th change of the disk, or at its n-th event of a step."""

    rank: int
    kind: str
    number: int


class Events(TrainerCallback):
    """Calls `act` at every event of a step."""

    def __init__(self, act: Callable[[str], None]) -> None:
        self._act = act

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._act("step")

    on_pre_optimizer_step = on_optimizer_step = on_step_end = on_step_begin


def train_rank(rank: int, folder: str, run: str, kill: Kill | None, store: str) -> None:
    """One rank of a training, in a process of its own, which goes on from the newest checkpoint if there is one."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    counts = {"change": 0, "step": 0}

    def act(kind: str) -> None:
        counts[kind] += 1
        if kill is not None and (kill.rank, kill.kind, kill.number) == (rank, kind, counts[kind]):
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = make_trainer(folder, run, with_dropout)
    trainer.add_callback(Events(act))
    disk.on_change = lambda what, path: act("change")
    trainer.train(resume_from_checkpoint=any(Path(run).glob("checkpoint-*")))
    Path(run, f"counts{rank}").write_text(json.dumps(counts))


def serve_trainings() -> None:
    """Fork both ranks of one training after the other, so that they need not import transformers each; by its stdin."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the Trainer prints
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, run, kill, store = json.loads(line)
        ranks = [
            get_context("fork").Process(target=train_rank, args=(rank, folder, run, kill and Kill(*kill), store))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
        replies.write(json.dumps(codes) + "\n")
        replies.flush()


Train = Callable[..., list[int | None]]


@pytest.fixture(scope="module")
def train(folder: str) -> Iterator[Train]:
    """Runs a training on two fresh processes; returns their exit codes."""
    variables = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    code = "from tests.test_checkpoint_faults import serve_trainings; serve_trainings()"
    with (
        open(f"{folder}/log", "wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env=os.environ | variables,
            text=True,
        ) as server,
    ):
        numbers = itertools.count()

        def ask(run: str, kill: Kill | None = None) -> list[int | None]:
            values = None if kill is None else [kill.rank, kill.kind, kill.number]
            server.stdin.write(json.dumps([folder, run, values, f"{folder}/store{next(numbers)}"]) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        try:
            yield ask
        finally:
            server.stdin.close()
            server.wait(60)


@pytest.fixture(scope="module")
def straight(train: Train, folder: str) -> str:
    """The folder of a training that nothing interrupts."""
    assert train(f"{folder}/straight") == [0, 0], Path(folder, "log").read_text()[-3000:]
    return f"{folder}/straight"


def drawn_kill(seed: int, straight: str) -> Kill:
    rng = random.Random(seed)
    rank, kind = rng.randrange(2), rng.choice(["change", "step"])
    return Kill(rank, kind, rng.randint(1, json.loads(Path(straight, f"counts{rank}").read_text())[kind]))


def goes_on_after_kill(seed: int, train: Train, straight: str, folder: str) -> None:
    run, kill = f"{folder}/killed{seed}", drawn_kill(seed, straight)
    codes = train(run, kill)
    assert codes[kill.rank] == -signal.SIGKILL, Path(folder, "log").read_text()[-3000:]
    assert codes[1 - kill.rank] in (0, 1)  # the other one gets an error, or had finished
    assert train(run) == [0, 0], Path(folder, "log").read_text()[-3000:]
    final = sorted({*os.listdir(run)} - {"counts0", "counts1"})
    assert final == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for name in ("model.safetensors", "optimizer.safetensors", "optimizer.json", "scheduler.pt"):
        assert Path(run, "checkpoint-6", name).read_bytes() == Path(straight, "checkpoint-6", name).read_bytes(), kill


@pytest.mark.parametrize("seed", range(3))
def test_training_goes_on_after_sigkill_as_if_it_had_not_been(
    seed: int, train: Train, straight: str, folder: str
) -> None:
    goes_on_after_kill(seed, train, straight, folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 23))
def test_training_goes_on_after_many_sigkills(seed: int, train: Train, straight: str, folder: str) -> None:
    goes_on_after_kill(seed, train, straight, folder)


# ---- the disk is full -----------------------------------------------------------------------------------------------


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


DISK = "hf_zero.checkpoint.disk."
FAULTS = [
    Fault("staging", 0, DISK + "make_folder", "*checkpoint-4.staged"),
    Fault("inner folder", 0, DISK + "make_folder", "*staged/checkpoint-4"),
    Fault("configuration", 0, "builtins.open", "*config.json"),
    Fault("header", 0, DISK + "write_file", "*.model.safetensors.partial"),
    Fault("probe", 0, DISK + "write_file", "*.hf_zero_*"),
    Fault("end of probe", 0, DISK + "remove_file", "*.hf_zero_*"),
    Fault("reserving", 0, "os.posix_fallocate"),
    Fault("rows of rank 0", 0, DISK + "write_at", "*.model.safetensors.partial"),
    Fault("rows of rank 1", 1, DISK + "write_at", "*.model.safetensors.partial"),
    Fault("optimizer of rank 1", 1, DISK + "write_at", "*.optimizer.safetensors.partial"),
    Fault("memory", 1, "hf_zero.checkpoint.tensor_file._bytes_of", error=RuntimeError("can't allocate memory")),
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
def save_on_full_disk(folder: str, faults: list[Fault], build: Callable[[str], nn.Module]) -> list[tuple[str, Any]]:
    """For every fault the error, and what is in the run's folder afterwards; then training goes on."""
    run = f"{folder}/full_{build.__name__}"
    trainer = make_trainer(folder, run, build, max_steps=2)
    trainer.train()
    before, found = verify(Path(run, "checkpoint-2"), None), []
    for fault in faults:
        trainer.state.global_step = fault.step
        with injected(fault):
            try:
                trainer._save_checkpoint(trainer.model, None)
                message = ""
            except CheckpointError as error:
                message = str(error)
        dist.barrier()
        found.append((message, sorted(os.listdir(run))))
        assert verify(Path(run, "checkpoint-2"), None) == before
        dist.barrier()
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    found.append(("", sorted(os.listdir(run))))
    dist.barrier()
    return found


def assert_all_failed_alike(folder: str, faults: list[Fault], build: Callable[[str], nn.Module]) -> None:
    left, right = run_ranks(save_on_full_disk, 2, folder, faults, build)
    assert left == right
    for fault, (message, names) in zip(faults, left):
        assert f"rank {fault.rank}: " in message and str(fault.error) in message, (fault.name, message)
        assert names == ["checkpoint-2"], fault.name
    assert left[-1] == ("", ["checkpoint-2", "checkpoint-4"])


def test_save_on_a_full_disk_fails_on_all_ranks_and_leaves_the_old_checkpoint(folder: str) -> None:
    assert_all_failed_alike(folder, FAULTS, loaded)


@pytest.mark.parametrize("build", [plain_module, with_adapters])
def test_save_on_a_full_disk_fails_alike_where_rank_0_writes_alone(
    build: Callable[[str], nn.Module], folder: str
) -> None:
    faults = [Fault("arguments", 0, "torch.save", "*training_args.bin", FULL_IN_TORCH)]
    if build is with_adapters:
        faults.append(Fault("adapters", 0, "builtins.open", "*adapter_config.json"))
    assert_all_failed_alike(folder, faults, build)


@undone
def train_over_full_disk(folder: str, fault: Fault | None) -> dict[str, Tensor]:
    """Train for 6 steps with checkpoints; where one cannot be saved, go on from the last one."""
    run = f"{folder}/over_{fault is None}"
    trainer = make_trainer(folder, run, with_dropout)
    if fault is not None:
        trainer.add_callback(Injecting(fault))
        with pytest.raises(CheckpointError, match="No space left"):
            trainer.train()
        trainer.remove_callback(Injecting)
    trainer.train(resume_from_checkpoint=fault is not None)
    return whole_state_dict(trainer.model)


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


def test_training_that_met_a_full_disk_goes_on_as_if_it_had_not(folder: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "rows of rank 1")
    straight, after = (run_ranks(train_over_full_disk, 2, folder, value) for value in (None, fault))
    for left, right in zip(straight, after):
        assert all(torch.equal(value, right[name]) for name, value in left.items())


# ---- damaged files --------------------------------------------------------------------------------------------------


@undone
def train_for_checkpoints(folder: str) -> None:
    """Checkpoints of steps 2 and 4, with an index of several files of weights, some of which are of one size."""
    trainer = make_trainer(folder, f"{folder}/run", max_steps=4)
    trainer.model.save_pretrained = functools.partial(trainer.model.save_pretrained, max_shard_size="3KB")
    trainer.train()


@pytest.fixture(scope="module")
def checkpoint(folder: str) -> Path:
    run_ranks(train_for_checkpoints, 2, folder)
    return Path(folder, "run", "checkpoint-4")


def damage_of(path: Path) -> list[str]:
    try:
        return damages(path, read_manifest(path))
    except CheckpointError as error:
        return [str(error)]


def test_each_of_1000_flipped_bits_is_detected_and_its_file_named(checkpoint: Path, tmp_path: Path) -> None:
    path, rng = shutil.copytree(checkpoint, tmp_path / "copy"), random.Random(0)
    files = sorted(path.iterdir())
    sizes = [file.stat().st_size for file in files]
    by_size = rng.choices(range(len(files)), sizes, k=500)
    detected = 0
    for which in (*by_size, *(number % len(files) for number in range(500))):
        with files[which].open("r+b", buffering=0) as file:
            at, bit = rng.randrange(sizes[which]), 1 << rng.randrange(8)
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ bit]), at)
            (found,) = damage_of(path)
            detected += files[which].name in found
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert detected == 1000
    assert damage_of(path) == []


def test_manifest_is_read_as_it_was_written_whatever_its_keys(tmp_path: Path) -> None:
    config = {10: 1, 2: {"b": Path("x"), "a": [1.5, None]}}
    (tmp_path / MANIFEST).write_text(Manifest(step=1, world_size=1, stage=3, config=config).to_json())
    assert read_manifest(tmp_path).config == {"10": 1, "2": {"b": "x", "a": [1.5, None]}}


def test_manifest_with_other_spaces_or_order_is_damaged(checkpoint: Path, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "copy")
    content = json.loads((path / MANIFEST).read_text())
    reordered = dict(reversed(content.items()))
    for text in (
        json.dumps(content) + "\n",
        json.dumps(content, indent=1),
        json.dumps(reordered, separators=(",", ":")),
    ):
        (path / MANIFEST).write_text(text)
        (found,) = damage_of(path)
        assert MANIFEST in found and "digest" in found


@dataclass(frozen=True)
class Damage:
    """Something that happens to a checkpoint.

    Attributes:
        what: is done, see `damage`.
        name: of the file.
        is_sealed: the manifest is made to fit, as somebody would who means harm.
    """

    what: str
    name: str
    is_sealed: bool = False


INDEX = "model.safetensors.index.json"
CONTENTS = {
    "leaves upwards": b'{"weight_map": {"x": "../x.safetensors"}}',
    "leaves to the root": b'{"weight_map": {"x": "/x.safetensors"}}',
    "leaves downwards": b'{"weight_map": {"x": "a/x.safetensors"}}',
    "list": b"[]",
    "number": b"1",
    "nothing in it": b"{}",
    "other kinds": b'{"weight_map": 1, "optimizer": "AdamW", "groups": 1, "numbers": 1}',
    "deeply nested": b"[" * 100_000,
    "header of a list": (2).to_bytes(8, "little") + b"[]",
    "header of other kinds": (7).to_bytes(8, "little") + b'{"x":1}',
    "header of a negative shape": b"",  # made below
}
_HEADER = b'{"x":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}'
CONTENTS["header of a negative shape"] = len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(4)


def damage(path: Path, damage: Damage) -> None:
    file, other, manifest = path / damage.name, path.parent / "aside", read_manifest(path)
    if damage.what == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif damage.what == "emptied":
        os.truncate(file, 0)
    elif damage.what == "deleted":
        file.unlink()
    elif damage.what == "longer":
        os.truncate(file, file.stat().st_size + 1)
    elif damage.what == "swapped":
        twin = twin_of(file)
        file.rename(other)
        twin.rename(file)
        other.rename(twin)
    elif damage.what == "of another step":
        shutil.copy(path.parent / "run" / "checkpoint-2" / damage.name, file)
    elif damage.what == "foreign":
        file.write_text("x")
    elif damage.what == "foreign folder":
        file.mkdir()
    elif damage.what == "link":
        file.rename(other)
        file.symlink_to(other)
    elif damage.what == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(CONTENTS[damage.what])
    if damage.is_sealed:
        files = {each.name: record_of(each, extents_of(each)) for each in path.iterdir() if each.name != MANIFEST}
        (path / MANIFEST).write_text(replace(manifest, files=files).to_json())


def twin_of(file: Path) -> Path:
    """Another file of the same size and other content."""
    alike = [other for other in sorted(file.parent.iterdir()) if other.stat().st_size == file.stat().st_size]
    return next(other for other in alike if other.read_bytes() != file.read_bytes())


def all_damages(checkpoint: Path) -> list[Damage]:
    names = sorted(os.listdir(checkpoint))
    weights = sorted(checkpoint.glob("model*.safetensors"), key=lambda path: path.stat().st_size)
    sizes = [path.stat().st_size for path in weights]
    twin = next(path.name for path in weights if sizes.count(path.stat().st_size) > 1)
    found = [Damage(what, name) for name in names for what in ("cut", "emptied", "deleted", "longer", "link", "folder")]
    found += [Damage("swapped", twin), Damage("foreign", "notes.txt"), Damage("foreign folder", "notes")]
    found += [
        Damage("of another step", name) for name in (twin, "optimizer.safetensors", "trainer_state.json", MANIFEST)
    ]
    found += [Damage(what, name) for name in (INDEX, MANIFEST, "optimizer.json") for what in CONTENTS]
    return found


def sealed_damages(checkpoint: Path) -> dict[str, list[Damage]]:
    """Those that the manifest does not tell, and that what reads a kind of files has to find itself."""
    shard = min(path.name for path in checkpoint.glob("model-*.safetensors"))
    weights = [Damage(what, INDEX, True) for what in CONTENTS]
    weights += [Damage(what, shard, True) for what in ("emptied", "deleted", "link", *CONTENTS)]
    optimizer = [Damage(what, "optimizer.json", True) for what in ("emptied", "deleted", *CONTENTS)]
    optimizer += [Damage(what, "optimizer.safetensors", True) for what in ("emptied", "deleted", *CONTENTS)]
    return {"weights": weights, "optimizer": optimizer}


@undone
def load_damaged(folder: str, damages: list[Damage], load: str) -> list[str]:
    """The error of loading after each damage; no number of the model or the optimizer may have changed."""
    trainer = make_trainer(folder, f"{folder}/loading")
    trainer.create_optimizer()
    engine = engine_of(trainer.model)
    assert engine is not None
    before = [local_of(param).clone() for param in trainer.model.parameters()]
    errors = []
    for number, each in enumerate(damages):
        path = Path(folder, f"damaged{number}")
        if dist.get_rank() == 0:
            shutil.copytree(Path(folder, "run", "checkpoint-4"), path)
            damage(path, each)
        dist.barrier()
        try:
            if load == "trainer":
                trainer.train(resume_from_checkpoint=str(path))
            elif load == "weights":
                read_model(trainer.model, path, engine.world)
            else:
                LoadedState(path, "optimizer", trainer.optimizer, trainer.model)
            errors.append("")
        except CheckpointError as error:
            errors.append(str(error))
        assert all(torch.equal(local_of(p), b) for p, b in zip(trainer.model.parameters(), before)), each
        assert not trainer.optimizer.state
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
            Path(folder, "aside").unlink(missing_ok=True)
    return errors


@pytest.mark.parametrize("load", ["trainer", "weights", "optimizer"])
def test_damaged_checkpoint_is_refused_on_all_ranks_before_anything_changes(
    load: str, checkpoint: Path, folder: str
) -> None:
    sealed = sealed_damages(checkpoint)
    damages = {"trainer": all_damages(checkpoint) + sealed["weights"], **sealed}[load]
    left, right = run_ranks(load_damaged, 2, folder, damages, load)
    assert left == right
    for each, message in zip(damages, left, strict=True):
        is_of_another = each == Damage("of another step", MANIFEST)  # then it is the others that do not fit
        assert ("trainer_state.json" if is_of_another else each.name) in message, (each, message)


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", "", "a\\b", "a\0b"])
def test_manifest_that_names_a_file_elsewhere_is_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "copy")
    manifest = read_manifest(path)
    record = next(iter(manifest.files.values()))
    (path / MANIFEST).write_text(replace(manifest, files={**manifest.files, name: record}).to_json())
    with pytest.raises(CheckpointError, match="leaves the folder"):
        verify(path, None)


def test_newest_whole_checkpoint_is_found_and_damaged_ones_are_listed(checkpoint: Path, tmp_path: Path) -> None:
    run = shutil.copytree(checkpoint.parent, tmp_path / "run")
    damage(run / "checkpoint-4", Damage("cut", "optimizer.safetensors"))
    (run / "checkpoint-6").mkdir()
    path, skipped = latest(run, step_of)
    assert path == run / "checkpoint-2"
    assert [("checkpoint-6" in text, "optimizer.safetensors" in text) for text in skipped] == [
        (True, False),
        (False, True),
    ]


# ---- ranks that do not share the folder -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Streamed:
    """What a rank had in memory and on disk while rows were streamed."""

    peak_bytes: int
    largest_bytes: int
    messages: int
    changes: int


BUILDS = {"llama": loaded, "mixtral": mixtral}


@undone
def save_streamed(folder: str, name: str) -> Streamed:
    """Write weights in both ways; in the second one, rank 1 does not see what rank 0 writes."""
    model = make_trainer(folder, f"{folder}/streaming", BUILDS[name]).model
    engine = engine_of(model)
    assert engine is not None and engine.world.collectives is not None
    world, collectives = engine.world, engine.world.collectives
    write_model(model, Path(folder, f"{name}_shared"), world)
    alive: list[tuple[StorageWeakRef, int]] = []
    peak, changes, gather, is_file = 0, itertools.count(), collectives.gather, Path.is_file

    def watched(items: Any, unit: str) -> Any:
        nonlocal peak
        alive.extend((StorageWeakRef(item.flat.untyped_storage()), item.flat.nbytes) for item in items)
        peak = max(peak, sum(size for storage, size in alive if not storage.expired()))
        return gather(items, unit)

    def blind(path: Path) -> bool:
        return not path.name.startswith(".hf_zero_") and is_file(path)

    with (
        mock.patch.object(collectives, "gather", watched),
        mock.patch.object(Path, "is_file", blind if dist.get_rank() == 1 else is_file),
        mock.patch.object(disk, "on_change", lambda what, path: next(changes)),
        mock.patch.object(cooperative.logger, "info") as info,
    ):
        write_model(model, Path(folder, f"{name}_streamed"), world)
    sizes = [s.layout.padded_numel * s.rows.itemsize for s in model_sources(model).values() if s.layout.num_ranks > 1]
    return Streamed(peak, max(sizes), info.call_count, next(changes))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_streamed_files_are_the_same_and_one_tensor_is_whole_at_a_time(name: str, folder: str) -> None:
    first, second = run_ranks(save_streamed, 2, folder, name)
    left, right = (
        {p.name: p.read_bytes() for p in Path(folder, f"{name}_{k}").iterdir()} for k in ("shared", "streamed")
    )
    assert left == right
    assert first.peak_bytes == first.largest_bytes == second.peak_bytes
    assert (first.messages, second.messages, second.changes) == (1, 0, 0)
