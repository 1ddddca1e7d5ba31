"""Bad or odd input to the commands ends in one line that says what to do."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_zero.cli.main import main
from tests.ranks import ENVIRONMENT

_LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 100},
}


def _one_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that fails says: one line."""
    assert main(list(words)) == 1
    err = capsys.readouterr().err
    *before, said = err.splitlines()  # before it may be what other libraries log
    assert said.startswith("hf-zero: ") and "hf-zero" not in "".join(before), err
    return said


@pytest.mark.parametrize(
    "words",
    [
        ["config", "--num-processes", "0"],
        ["config", "--num-processes", "-3"],
        ["doctor", "--num-processes", "-1"],
    ],
)
def test_a_number_of_processes_that_cannot_be_is_wrong_usage(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n\n"))
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert f"{words[-1]!r} is not a whole number of at least" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("answers", "option"), [("", "--stage"), ("2\n", "--num-processes")])
def test_config_at_the_end_of_its_input_names_the_option(
    answers: str, option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(answers))
    assert f"give {option}" in _one_line(capsys, "config")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hidden_size": "big"}, "'hidden_size'"),
        ({"hidden_size": -16}, "hidden_size is -16"),
        ({"vocab_size": -100}, "vocab_size is -100"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"num_attention_heads": 0}, "division"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": None}, "'n_embd'"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": -3}, "n_embd is -3"),
        ({"architectures": ["LlamaConfig"]}, "cannot make"),
    ],
)
def test_a_folder_whose_sizes_are_no_sizes_cannot_be_planned(
    given: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(given if "model_type" in given else {**_LLAMA, **given}))
    said = _one_line(capsys, "plan", str(tmp_path))
    assert words in said and len(said) < 500 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--zero", "typo.yaml", "fine.py"], "did you mean 'stage'?"),
        (["--zero", "none.yaml", "fine.py"], "no such file"),
        (["--zero", "7", "fine.py"], "7 is not a stage; use 0, 1, 2 or 3"),
        (["--zero", "zero7", "fine.py"], "'zero7' is not a configuration; use a stage"),
        (
            ["--zero", "two.yaml", "--num_processes", "3", "fine.py"],
            "expected_world_size is 2, but --num_processes is 3",
        ),
        (["--zero", "zero.yaml", "--num_processes", "-2", "fine.py"], "--num_processes is -2"),
        (["--zero", "zero.yaml", "none.py"], "none.py: no such script"),
        (["--zero", "zero.yaml", "wrong.py"], "wrong.py, line 2: is not Python"),
        (["--zero", "zero.yaml", "-m", "no_such_module.train"], "there is no module 'no_such_module.train'"),
        (["--zero", "zero.yaml", "--config_file", "none.yaml", "fine.py"], "--config_file none.yaml: no such file"),
    ],
)
def test_launch_looks_before_it_starts_processes(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("accelerate.commands.launch.launch_command", lambda args: pytest.fail("processes were started"))
    for name, text in {"typo": "stgae: 3", "zero": "stage: 3", "two": "expected_world_size: 2"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "fine.py").write_text("")
    (tmp_path / "wrong.py").write_text("a = 1\nif a\n")
    assert words in _one_line(capsys, "launch", *options)


def test_launch_ends_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import os\nif os.environ['RANK'] == '1': raise KeyError('mine')\n")
    words = ["launch", "--num_processes", "2", "--zero", "3", "fails.py"]
    command = [sys.executable, "-m", "hf_zero.cli.main", *words]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert "were not passed to `accelerate launch`" not in done.stderr
    assert "ChildFailedError" not in done.stderr and "elastic" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hf-zero: rank ")
