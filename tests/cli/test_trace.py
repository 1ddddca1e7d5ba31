"""`hf-zero trace`: what it launches, what it reads, and what it says to bad input."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_zero.cli import trace as command
from hf_zero.cli.main import main
from hf_zero.trace.timeline import Timeline
from tests.ranks import ENVIRONMENT
from tests.trace.test_report import made

_SCRIPT = """
import torch, transformers
from accelerate import Accelerator
accelerator = Accelerator()
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(6):
    ids = torch.randint(0, 32, (2, 8))
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_trace_is_read_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    made().save(tmp_path / "t.json")
    assert main(["trace", "--plot", str(tmp_path / "t.png"), str(tmp_path / "t.json")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("trace of 1 step of 2 ranks") and f"drawn to {tmp_path / 't.png'}" in said
    assert (tmp_path / "t.png").exists()


def test_what_stands_behind_two_dashes_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []

    def launch(argv: list[str]) -> int:
        launched.extend([argv, os.environ["HF_ZERO_TRACE"]])
        made().save(Path(os.environ["HF_ZERO_TRACE"]))
        return 0

    monkeypatch.setenv("HF_ZERO_TRACE", "")  # put back afterwards
    monkeypatch.setattr(command, "launch", launch)
    assert main(["trace", "--file", str(tmp_path / "t.json"), "--", "--zero", "3", "s.py", "--", "x"]) == 0
    assert launched == [["--zero", "3", "s.py", "--", "x"], str(tmp_path / "t.json")]
    monkeypatch.setattr(command, "launch", lambda argv: 0)
    assert main(["trace", "--file", str(tmp_path / "t.json"), "--", "s.py"]) == 1  # it has not been written again


@pytest.mark.parametrize(
    ("words", "said"),
    [(["none.json"], "none.json: No such file"), (["--"], "name a script behind --"), (["."], "Is a directory")],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.slow
def test_a_launched_script_leaves_a_trace(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    words = ["trace", "--", "--zero", "3", "--num_processes", "2", "script.py"]
    done = subprocess.run(
        [sys.executable, "-m", "hf_zero.cli.main", *words],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "trace of 3 steps of 2 ranks, stage 3" in done.stderr
    assert len(Timeline.read(tmp_path / "trace.json").lanes) == 2
