"""`hf-zero bench load` measures what engines do when they load, and checks what they loaded."""

import importlib.util
import json
from pathlib import Path
from unittest import mock

import pytest
from transformers import LlamaConfig

from hf_zero.bench.load import run as load
from hf_zero.bench.load.run import LoadBenchmark
from hf_zero.cli.main import main
from hf_zero.errors import ZeroError


def _rank(loss: float) -> dict[str, float]:
    return {
        "seconds": 1.0,
        "ready_seconds": 5.0,
        "load_bytes": 2,
        "step_bytes": 3,
        "used_bytes": 3,
        "read_bytes": 4,
        "loss": loss,
    }


@pytest.mark.slow
def test_every_engine_is_measured_and_hf_zero_asks_for_its_rows_only(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    LlamaConfig(num_attention_heads=2, **sizes).save_pretrained(tmp_path / "model")
    plan = LoadBenchmark(str(tmp_path / "model"), 2, 1, "float32", ("plain", "fsdp2", "hf_zero"))
    lines = load.run(plan, tmp_path / "found.json").splitlines()
    assert [line.split("  ")[0] for line in lines[2:8]] == [*plan.engines, "ratio to plain", "fsdp2", "hf_zero"]
    assert lines[-1].endswith("0.500 [0.500, 0.500] ahead")
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert found["fsdp2"]["is_valid"] and found["hf_zero"]["is_valid"]
    assert found["hf_zero"]["ratio_to_plain"]["read_bytes"] == [0.5]
    assert [set(rank) for rank in found["plain"]["ranks"][0]] == 2 * [set(_rank(1.0))]
    assert all(rank["ready_seconds"] > rank["seconds"] > 0 for rank in found["plain"]["ranks"][0])


def test_engine_with_another_loss_than_plain_is_invalid() -> None:
    found = {
        "plain": [[_rank(2.0), _rank(2.0)]],
        "near": [[_rank(2.0001), _rank(2.0)]],
        "far": [[_rank(2.0), _rank(2.001)]],
        "nan": [[_rank(2.0), _rank(float("nan"))]],
    }
    assert load.wrong_losses(found, 1e-4).keys() == {"far", "nan"}
    shown = load.summary(LoadBenchmark("llama-10m", 2, 1, "float32", tuple(found)), found)
    assert "\nfar INVALID " in shown and "far is INVALID: its first loss was 2.0005, not 2\n" in shown
    assert "near INVALID" not in shown
    assert "INVALID" not in load.summary(
        LoadBenchmark("llama-10m", 2, 1, "bfloat16", ("plain", "far")), dict(list(found.items())[:3])
    )


def test_values_are_not_said_to_be_right_without_plain() -> None:
    assert load.wrong_losses({"far": [[_rank(2.0)]]}, 1e-4) == {}
    assert "not compared" in load.summary(
        LoadBenchmark("llama-10m", 1, 1, "float32", ("far",)), {"far": [[_rank(2.0)]]}
    )


def test_deepspeed_is_skipped_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with mock.patch.object(load, "_measure", side_effect=lambda plan, engines: {each: [] for each in engines}):
        lines = load.run(LoadBenchmark("llama-10m", 2, 1, "float32", ("plain", "deepspeed"))).splitlines()
    assert lines[-1] == "deepspeed: skipped; pip install deepspeed"
    assert not any(line.startswith("deepspeed ") for line in lines)


@pytest.mark.parametrize(
    ("model", "engine", "dtype"),
    [("a", "plain", "float32"), ("llama-10m", "a", "float32"), ("llama-10m", "plain", "a")],
)
def test_unknown_names_list_the_known(model: str, engine: str, dtype: str) -> None:
    with pytest.raises(ZeroError, match=r"'a' is not known.*choose from"):
        load.run(LoadBenchmark(model, 2, 1, dtype, (engine,)))


def test_command_line_makes_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(load, "run", return_value="the table") as run:
        assert (
            main(["bench", "load", "--model", "m", "--dtype", "bfloat16", "--engines", "plain,hf_zero", "--json", "f"])
            == 0
        )
    run.assert_called_once_with(LoadBenchmark("m", 2, 5, "bfloat16", ("plain", "hf_zero")), Path("f"))
    assert capsys.readouterr().out == "the table\n"
