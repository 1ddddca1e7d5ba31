"""A launch that heals: processes that died are started again, and the training ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero.cli import healing
from hf_zero.cli import main as cli
from hf_zero.cli.healing import Healing
from hf_zero.host import progress
from tests.hosts import ADDRESS, two_hosts, why_not
from tests.ranks import ENVIRONMENT

# Each place in argv ("step:rank:how") kills, once or always, the rank that comes to it, fills the disk, or tells the launcher
# to end; the number of all steps is the end of the training. "host" and "cut" tell only who watches the folder. The samples
# of each step are noted, see `samples`.
SCRIPT = """
import contextlib, hashlib, json, os, signal, sys, time, torch
from pathlib import Path
from accelerate.utils import broadcast_object_list
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

out, *places = sys.argv[1:]
Path(out, "filler").unlink(missing_ok=True)

class Noting(Trainer):
    start = None

    def training_step(self, model, inputs, *rest):
        if self.start is None:
            self.start = broadcast_object_list([time.time()])[0]
        with open(f"{out}.samples-{os.getpid()}-{os.uname().nodename}", "a") as file:
            print(json.dumps([self.state.global_step, self.start, inputs["input_ids"].tolist()]), file=file)
        return super().training_step(model, inputs, *rest)

class Killing(TrainerCallback):
    def strike(self, args, state, control, **_):
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
        for place in places:
            step, rank, how = place.split(":")
            done = Path(out, f"done-{step}-{rank}-{how}")
            if (state.global_step, os.environ["RANK"]) == (int(step), rank) and not done.exists():
                if how == "raise":
                    raise RuntimeError("on purpose")
                done.touch()
                if how == "once":
                    raise RuntimeError("once")
                if how == "full":
                    with contextlib.suppress(OSError), open(Path(out, "filler"), "wb", buffering=0) as file:
                        for _ in range(1 << 14):
                            file.write(bytes(4096))
                elif how == "end":
                    os.kill(os.getppid(), signal.SIGTERM)
                elif how not in ("host", "cut"):
                    os.kill(os.getpid(), getattr(signal, how))

    on_step_begin = on_train_end = strike

torch.manual_seed(0)
shape = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**shape, attention_dropout=0.1))
generator = torch.Generator().manual_seed(0)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (40, 8), generator=generator)]
args = TrainingArguments(out, max_steps=int(os.environ.get("STEPS", "8")), per_device_train_batch_size=4, save_steps=2,
    logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2)
trainer = Noting(model, args, train_dataset=data, callbacks=[Killing()])
trainer.train()
trainer.save_model(out)
if args.process_index == 0:
    print("weights", hashlib.sha256(Path(out, "model.safetensors").read_bytes()).hexdigest()[:16])
"""


@dataclass
class _Failed:
    """What the agent knows of a process that has failed."""

    local_rank: int
    exitcode: int
    timestamp: int = 0

    def signal_name(self) -> str:
        return signal.Signals(-self.exitcode).name


@dataclass
class _Result:
    failures: dict[int, Any] = field(default_factory=dict)


def _fails(healing: Healing, rank: int, step: int, saved: int | None) -> int:
    """One failure; returns how many starts are left of three."""
    with healing.file.open("r+b") as file:
        file.seek(progress._SLOT.size * rank)
        file.write(progress._SLOT.pack(step, progress._NOTHING if saved is None else saved, 0))
    return healing.on_failure(_Result({rank: _Failed(rank, -signal.SIGKILL)}), 3)


def test_what_would_be_in_vain_is_not_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    healing = Healing(tmp_path)
    assert _fails(healing, 1, 7, None) == 0
    assert (
        "rank 1 failed at step 7 (SIGKILL): not started again, since it failed before the first"
        in capfd.readouterr().err
    )
    healing = Healing(tmp_path)
    assert [_fails(healing, 0, step, 10) for step in (12, 13)] == [3, 3]
    assert "start 2 of at most 4 more, from the checkpoint of step 10: 3 steps are done again" in capfd.readouterr().err
    assert _fails(healing, 1, 13, 10) == 3, "another rank"
    assert _fails(healing, 1, 13, 12) == 0
    assert "not started again, since it failed there before" in capfd.readouterr().err


def test_processes_save_where_a_host_comes_and_end_soon_where_one_has_left() -> None:
    def group(num_here: int) -> Any:
        state = SimpleNamespace(participants=dict.fromkeys(range(num_here)))
        handler = SimpleNamespace(_state_holder=SimpleNamespace(state=state))
        return SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler), group_world_size=2)

    assert healing._has_lost_a_host(group(1)) and not healing._has_lost_a_host(group(2))
    assert not healing._has_lost_a_host(
        SimpleNamespace(spec=SimpleNamespace(rdzv_handler=object()), group_world_size=1)
    )


def test_steps_are_forgotten_between_starts_and_what_is_saved_is_not(tmp_path: Path) -> None:
    healing = Healing(tmp_path)
    assert not healing.has_saved_all(1)
    _fails(healing, 2, 12, 10)
    assert progress.read(healing.file, 2) == progress.Progress(0, 10)


class _Thing:
    """What a step is of."""


def test_a_step_is_counted_once_whatever_number_of_optimizers_and_models_it_has() -> None:
    first, second, one, other = (_Thing() for _ in range(4))
    progress.note_begin(5)
    for _ in range(3):
        progress.note_step(first, one)
        progress.note_step(first, other)
        progress.note_step(second, one)
    assert progress._steps.newest == 8
    progress.note_step(second, one)
    assert progress._steps.newest == 9
    assert (progress.steps_of([first]), progress.steps_of([first, second])) == (3, 4)
    progress.note_begin(3, [first])
    progress.note_step(first, one)
    assert (progress.steps_of([first]), progress.steps_of([second]), progress._steps.newest) == (4, 0, 4)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--min_processes", "2"], "give --max_restarts, too"),
        (
            ["--min_processes", "2", "--max_restarts", "1"],
            "with one machine: its processes are all started again, or none",
        ),
        (["--min_processes", "5", "--max_restarts", "1", "--num_machines", "2"], "--min_processes is 5: give 1 to 2"),
    ],
)
def test_what_cannot_heal_is_refused(
    words: list[str], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert cli.main(["launch", "--num_processes", "2", *words, "--zero", "2", str(script)]) == 1
    assert match in capsys.readouterr().err


def _launch(folder: Path, out: str, *places: str, num_processes: int = 2, **variables: str) -> tuple[int, str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "zero.yaml").write_text("stage: 2\ntimeout_s: 15\n")
    options = f"--max_restarts 3 --num_processes {num_processes} --zero zero.yaml"
    words = ["launch", *options.split(), "train.py", out, *places]
    done = subprocess.run(
        [sys.executable, "-m", "hf_zero.cli.main", *words],
        cwd=folder,
        env=ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def _weights(said: str) -> str:
    found = re.search("weights (.*)", said)
    assert found, said
    return found[1]


def samples(folder: Path, out: str) -> dict[int, list[list[int]]]:
    """Of each step of a run of `SCRIPT`, as it was done last; in the order of their tokens."""
    found = dict[int, dict[float, list[list[int]]]]()
    for file in folder.glob(f"{out}.samples-*"):
        for step, start, rows in map(json.loads, file.read_text().splitlines()):
            found.setdefault(step, {}).setdefault(start, []).extend(rows)
    return {step: sorted(starts[max(starts)]) for step, starts in sorted(found.items())}


def _check_samples(found: dict[int, list[list[int]]], num_steps: int) -> None:
    """Each epoch of 5 steps has every one of the 40 samples once."""
    assert list(found) == list(range(num_steps))
    epochs = [sorted(row for step in range(at, at + 5) for row in found[step]) for at in range(0, num_steps, 5)]
    assert all(len(epoch) == 40 for epoch in epochs) and epochs[1:] == epochs[:-1]


@pytest.mark.slow
def test_a_run_that_is_killed_hangs_and_is_queued_again_has_the_same_bits(tmp_path: Path) -> None:
    _, undisturbed = _launch(tmp_path, "a")
    code, ended = _launch(tmp_path, "b", "3:0:SIGKILL", "5:1:end", SLURM_JOB_ID="7", PAUSE_S="2")
    assert code == 0 and "told to end, and all is saved" in ended, ended
    assert "weights" not in ended
    code, healed = _launch(tmp_path, "b", "3:0:SIGKILL", "5:1:end", SLURM_JOB_ID="7")
    assert code == 0 and "going on from" in healed, healed
    assert _weights(healed) == _weights(undisturbed)
    code, healed = _launch(tmp_path, "c", "3:0:SIGSTOP", "8:1:once")
    assert code == 0 and "start 2 of" in healed and "step 8: 0 steps are done again" in healed, healed
    assert _weights(healed) == _weights(undisturbed)
    assert samples(tmp_path, "c") == samples(tmp_path, "a")  # no step is made after the last


# Two optimizers, of which none counts its steps; told to end in the middle, by the launcher, or killed once. It needs no
# transformers, whose import takes most of the time of a start.
_LOOP = """
import hashlib, os, signal, sys, torch
import hf_zero as zero

out, end_at, killed_at = sys.argv[1], *map(int, sys.argv[2:])
accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=2))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
loader = torch.utils.data.DataLoader(torch.arange(160.0).reshape(40, 4) / 160, batch_size=2, shuffle=True)
model, loader, *optimizers = accelerator.prepare(model, loader, *optimizers)
state = zero.resume_or_start(accelerator, out)
done = int(state.name) if state else 0
signal.signal(signal.SIGTERM, lambda *_: accelerator.set_trigger())
for step, batch in enumerate(accelerator.skip_first_batches(loader, done), done + 1):
    accelerator.backward(model(batch).square().mean())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if step == killed_at and not done:
        accelerator.save_state(f"{out}/{step}")
    if step == killed_at + 1 and not done and accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == end_at and accelerator.process_index == 1:
        os.kill(os.getppid(), signal.SIGTERM)
        signal.sigtimedwait([], 2)
    if accelerator.check_trigger():
        accelerator.save_state(f"{out}/{step}")
        break
else:
    with zero.GatheredParameters(model):
        found = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    if accelerator.is_main_process:
        print("from", done, "at", step, "weights", hashlib.sha256(found).hexdigest()[:16])
"""


def _loop(folder: Path, out: str, end_at: int = -1, killed_at: int = -1) -> tuple[int, str]:
    (folder / "loop.py").write_text(_LOOP)
    words = f"launch --max_restarts 1 --num_processes 2 --zero 2 loop.py {out} {end_at} {killed_at}".split()
    done = subprocess.run(
        [sys.executable, "-m", "hf_zero.cli.main", *words],
        cwd=folder,
        env=ENVIRONMENT | {"SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_training_whose_rank_is_killed_goes_on_to_its_end(tmp_path: Path) -> None:
    code, healed = _loop(tmp_path, "b", killed_at=2)
    assert code == 0, healed
    assert "hf-zero: rank 1 failed at step 3 (SIGKILL): start 1 of at most 1 more" in healed
    assert "from the checkpoint of step 2: 1 steps are done again" in healed
    assert "from 2 at 10 weights" in healed


@pytest.mark.slow
def test_a_loop_of_ones_own_that_is_told_to_end_saves_and_goes_on(tmp_path: Path) -> None:
    _, undisturbed = _loop(tmp_path, "a")
    code, ended = _loop(tmp_path, "b", 4)
    assert code == 0 and "told to end, and all is saved" in ended and "weights" not in ended, ended
    code, gone_on = _loop(tmp_path, "b")
    assert code == 0 and _weights(gone_on) == _weights(undisturbed), gone_on
    assert "from 4 at 10 weights" in gone_on


@pytest.mark.slow
def test_one_process_is_started_again(tmp_path: Path) -> None:
    _, undisturbed = _launch(tmp_path, "a", num_processes=1)
    code, healed = _launch(tmp_path, "b", "3:0:SIGKILL", "5:0:once", num_processes=1)
    assert code == 0 and healed.count("going on from") == 2, healed
    assert _weights(healed) == _weights(undisturbed)


@pytest.mark.slow
def test_an_error_that_comes_again_is_what_the_user_reads(tmp_path: Path) -> None:
    code, said = _launch(tmp_path, "a", "5:1:raise")
    assert code == 1
    assert said.count("RuntimeError: on purpose") == 2
    assert "not started again, since it failed there before" in said


@pytest.mark.slow
def test_a_run_goes_on_without_a_lost_host_and_again_with_it(tmp_path: Path) -> None:
    if why_not():
        pytest.skip(why_not())
    (tmp_path / "train.py").write_text(SCRIPT)
    names = tmp_path / "names"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{ADDRESS.format(each + 1)} host{each}\n" for each in (0, 1)))
    words = (
        f"--max_restarts 3 --min_processes 1 --num_machines 2 --num_processes 2 --main_process_ip {ADDRESS.format(1)}"
    )
    ended = f"{words} --main_process_port 29411 --zero 2 train.py out"

    with two_hosts() as hosts, contextlib.ExitStack() as stack:

        def start(host: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "hf_zero.cli.main", "launch", "--machine_rank", str(host), *ended.split()]
            process = hosts.start(host, command, tmp_path, {Path("/etc/hosts"): names}, STEPS="60", PAUSE_S="1")
            stack.callback(process.kill)
            return process

        def wait_for(step: int) -> None:
            late = time.monotonic() + 200
            while not (tmp_path / "out" / f"checkpoint-{step}").exists():
                assert time.monotonic() < late, step
                time.sleep(0.2)

        first, second = start(0), start(1)
        wait_for(6)
        second.kill()
        wait_for(20)
        second = start(1)
        said, _ = first.communicate(timeout=300)
        assert (first.returncode, second.wait(60)) == (0, 0), said
    assert "1 ranks: 2 micro-batches a step keep the 8 samples" in said
    at = [int(step) for step in re.findall(r"going on from out/checkpoint-(\d+)", said)]
    assert len(at) == 2 and at[1] >= 20
    _check_samples(samples(tmp_path, "out"), 60)
