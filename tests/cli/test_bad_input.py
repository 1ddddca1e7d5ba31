"""Bad or odd input to the commands ends in one line that says what to do."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from hf_zero.cli.main import main

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
