"""`hf-zero compare` says where two checkpoints or runs differ first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_zero.checkpoint.files.manifest import MANIFEST, Manifest
from hf_zero.cli.main import main


def _checkpoint(folder: Path, weights: dict[str, Tensor], losses: tuple[float, ...] = ()) -> Path:
    """A checkpoint as four ranks write it."""
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    (folder / MANIFEST).write_text(Manifest(step=2, world_size=4, stage=2).to_json())
    log = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    return folder


def _says(capsys: pytest.CaptureFixture[str], code: int, *words: Any) -> str:
    assert main(["compare", *map(str, words)]) == code
    return "".join(capsys.readouterr())


def test_runs_are_compared_up_to_the_first_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"a": torch.arange(24.0).reshape(6, 4), "b": torch.tensor([1.0, float("nan")]), "c": torch.ones(3)}
    other = {**weights, "a": weights["a"].clone()}
    other["a"][4, 1] += 0.5
    other["a"][0, 0] -= 0.25
    for run, later in (("x", weights), ("y", other)):
        _checkpoint(tmp_path / run / "checkpoint-2", weights, (3.0, 2.5))
        _checkpoint(tmp_path / run / "checkpoint-4", later, (3.0, 2.5, 2.25, 2.125 if run == "x" else 2.0))
    said = _says(capsys, 1, tmp_path / "x", tmp_path / "y")
    assert "logs: equal up to step 3; loss of step 4 is 2.125, and 2" in said
    assert "checkpoint-2: all tensors are equal" in said
    assert "checkpoint-4: 1 tensors differ" in said
    assert "2 of 24 elements" in said and "most by 0.5 at [4, 1], a row of rank 2" in said
    assert "all tensors are equal" in _says(capsys, 0, tmp_path / "x", tmp_path / "x")


def test_shapes_dtypes_and_what_is_missing_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = _checkpoint(tmp_path / "one", {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2)})
    two = _checkpoint(tmp_path / "two", {"a": torch.ones(3), "b": torch.ones(3).half(), "d": torch.ones(1)})
    said = _says(capsys, 1, one, two)
    for part in (
        "is float32 [2], and float32 [3]",
        "is float32 [3], and float16 [3]",
        f"is not in {two}",
        f"is not in {one}",
    ):
        assert part in said


def test_what_cannot_be_compared_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"a": torch.ones(2)}
    run = _checkpoint(tmp_path / "run" / "checkpoint-2", weights).parent
    other = _checkpoint(tmp_path / "other" / "checkpoint-3", weights).parent
    parts = _checkpoint(tmp_path / "parts", weights)
    (parts / "model.safetensors").rename(parts / "model.safetensors.00001-of-00002")
    (tmp_path / "empty").mkdir()
    for pair, match in (
        ((run, other), "have no step in common"),
        ((tmp_path / "none", other), "is not a folder"),
        ((parts, parts), "is a part of a file that several hosts have written"),
        ((tmp_path / "empty", tmp_path / "empty"), "has no safetensors files"),
    ):
        assert match in _says(capsys, 1, *pair)
