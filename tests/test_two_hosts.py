"""Ranks on two hosts: training, replicas, checkpoints with and without a folder that both see, a host that dies."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hf_zero.checkpoint.commit import verify
from tests.hosts import ADDRESS, Hosts, two_hosts, why_not
from tests.integrations.trainer.runs import undone
from tests.ranks import run_ranks

TRAIN = """
import json, socket, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer
import hf_zero as zero

out, steps, resumed = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "resumed"
args = zero.ZeroTrainingArguments(out, max_steps=steps, per_device_train_batch_size=1, report_to=[],
    logging_steps=1 if steps < 10 else steps, save_steps=2, save_strategy="steps", use_cpu=True, disable_tqdm=True,
    lr_scheduler_type="constant")
torch.manual_seed(0)
shape = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**shape))
generator = torch.Generator().manual_seed(0)
data = [{"input_ids": (x := torch.randint(0, 64, (8,), generator=generator)), "labels": x} for _ in range(32)]
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train(resume_from_checkpoint=resumed or None)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print("found", json.dumps([socket.gethostname(), args.process_index, losses]), flush=True)
"""
_REASON = why_not()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def _launch(
    hosts: Hosts, folder: Path, zero: dict[str, Any], *argv: str, ranks: int = 2, own: bool = False
) -> list[subprocess.Popen[str]]:
    """Start the script on both hosts; `own`: what each calls `folder / "run"` is its own `folder / "0"` or `folder / "1"`."""
    (folder / "script.py").write_text(TRAIN)
    (folder / "zero.json").write_text(json.dumps(zero))
    (folder / "run").mkdir(exist_ok=True)
    common = ["--num_machines", "2", "--num_processes", str(ranks), "--main_process_ip", ADDRESS.format(1)]
    started = []
    for host in (0, 1):
        (folder / str(host)).mkdir(exist_ok=True)
        command = [sys.executable, "-m", "hf_zero.cli.main", "launch", *common, "--machine_rank", str(host)]
        command += ["--main_process_port", "29500", "--zero", "zero.json", "script.py", "run", *argv]
        started.append(hosts.start(host, command, folder, {folder / "run": folder / str(host)} if own else None))
    return started


def _found(running: list[subprocess.Popen[str]]) -> dict[int, tuple[str, list[float]]]:
    """The host and the losses of each rank."""
    told = [process.communicate(timeout=100)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(told)
    # Wherever it stands: ranks of a host, and their progress bars, write into one stream.
    found = [each for text in told for each in re.findall(r'found (\["[^"]*", \d+, \[[^]]*\]\])', text)]
    return {rank: (host, losses) for host, rank, losses in map(json.loads, found)}


@undone
def _train_here(folder: str, zero: str) -> list[float]:
    """The same in a rank of one host: its losses."""
    printed = io.StringIO()
    arguments = mock.patch.object(sys, "argv", ["script.py", f"{folder}/here", "4", "new"])
    environment = mock.patch.dict("os.environ", {"HF_ZERO_CONFIG": zero})
    with arguments, environment, contextlib.redirect_stdout(printed):
        exec(compile(TRAIN, "script.py", "exec"), {"__name__": "__main__"})
    line = next(line for line in printed.getvalue().splitlines() if line.startswith("found "))
    losses: list[float] = json.loads(line.removeprefix("found "))[2]
    return losses


@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hosts_without_a_common_folder_train_as_one_and_save_all(hosts: Hosts, tmp_path: Path, resumes: bool) -> None:
    zero = {"stage": 3, "collectives": "pairwise"}
    expected = run_ranks(_train_here, 2, str(tmp_path), json.dumps(zero))[0]
    found = _found(_launch(hosts, tmp_path, zero, "2" if resumes else "4", "new", own=True))
    assert {rank: host for rank, (host, _) in found.items()} == {0: "host0", 1: "host1"}
    assert [losses for _, losses in found.values()] == [expected[: 2 if resumes else 4]] * 2
    checkpoint = tmp_path / "0" / "checkpoint-2"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(verify(checkpoint, None).files)
    assert not any((tmp_path / "1").iterdir())
    if resumes:
        told = [each.communicate(timeout=100)[0] for each in _launch(hosts, tmp_path, zero, "4", "resumed", own=True)]
        assert all("hosts that share none need a copy each" in text for text in told), told
        shutil.copytree(checkpoint, tmp_path / "1" / "checkpoint-2")
        found = _found(_launch(hosts, tmp_path, zero, "4", "resumed", own=True))
        assert [losses for _, losses in found.values()] == [expected] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"replicate": 2, "collectives": "pairwise"},
        {"replicate": 2, "collectives": "host"},
        {"wire": {"secondary": 2}, "collectives": "pairwise"},
    ],
    ids=["replicas", "replicas in shared memory", "second copies"],
)
def test_two_ranks_on_each_host_train_as_four_on_one(hosts: Hosts, tmp_path: Path, more: dict[str, Any]) -> None:
    zero = {"stage": 3, **more}
    expected = run_ranks(_train_here, 4, str(tmp_path), json.dumps(zero | {"collectives": "pairwise"}))[0]
    found = _found(_launch(hosts, tmp_path, zero, "4", "new", ranks=4))
    assert {rank: host for rank, (host, _) in found.items()} == {0: "host0", 1: "host0", 2: "host1", 3: "host1"}
    assert [losses for _, losses in found.values()] == [pytest.approx(expected, abs=1e-6)] * 4
    assert verify(tmp_path / "run" / "checkpoint-4", None).world_size == 4


@pytest.mark.slow
def test_ranks_of_the_other_host_say_which_one_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    running = _launch(hosts, tmp_path, {"stage": 3, "collectives": "pairwise", "timeout_s": 20}, "100000", "new")
    folder = tmp_path / "run"
    while not (folder / "checkpoint-2").exists():
        assert running[0].poll() is None, running[0].communicate()[0]
        time.sleep(0.1)
    running[1].kill()
    began = time.monotonic()
    told = running[0].communicate(timeout=60)[0]
    assert running[0].returncode != 0 and "rank 0 lost rank 1" in told, told[-3000:]
    assert time.monotonic() - began < 40
    newest = max((path for path in folder.glob("checkpoint-*")), key=lambda path: int(path.name.split("-")[1]))
    verify(newest, None)
