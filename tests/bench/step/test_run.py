"""`hf-zero bench step`: what it makes of its figures, and that a run of it works."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf_zero.bench.figures import Ratio, Spread, ratio
from hf_zero.bench.processes import BenchError
from hf_zero.bench.step import engines
from hf_zero.bench.step import run as step
from hf_zero.bench.step.run import Result, Run, StepBenchmark
from hf_zero.bench.step.shapes import Shape
from hf_zero.cli.main import main
from hf_zero.errors import UsageError

_TINY: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "vocab_size": 100,
}
_PLAN = StepBenchmark("llama-10m", 2, 1, 8, 10, 3, "float32", False, ("local", "ddp", "zero3"))


def _run(seconds: float, losses: tuple[float, ...] = (2.0, 1.0)) -> Run:
    return Run(seconds, 64 * 2**20, None, losses)


def test_ratio_is_taken_round_by_round_and_its_interval_tells_ahead_from_behind() -> None:
    slow, fast = [1.0, 2.0, 4.0, 8.0], [0.5, 1.0, 2.0, 4.0]
    assert ratio(fast, slow) == Ratio(0.5, 0.5, 0.5) and ratio(fast, slow).verdict == "ahead"
    assert ratio(slow, fast).verdict == "behind"
    mixed = ratio([1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0])
    assert (mixed.low, mixed.high, mixed.verdict) == (0.5, 2.0, "")
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_other_losses_than_ddps_are_marked_invalid_in_the_table() -> None:
    runs = {"local": [_run(1.0)], "ddp": [_run(2.0)], "zero3": [_run(1.5), _run(1.5, (2.0, 1.001))]}
    result = Result(_PLAN, runs, {"deepspeed1": "pip install deepspeed"})
    assert [step.is_valid(result, engine) for engine in runs] == [None, True, False]
    runs["local"], runs["ddp"] = [_run(1.0)] * 2, [_run(2.0)] * 2
    text = step.table(result)
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "INVALID" in lines["zero3"] and "0.750 [0.750, 0.750] ahead" in lines["zero3"]
    assert "1.500 [1.500, 1.500] behind" in lines["zero3"] and "64 (64-64)" in lines["zero3"]
    assert "INVALID" not in lines["ddp"] and text.endswith("skipped: deepspeed1 (pip install deepspeed)")


def test_packages_that_are_absent_are_named_with_their_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names = ("ddp", "zero3", "fairscale-sdp", "deepspeed2")
    assert [engines.missing_package(name) for name in names] == [
        None,
        None,
        "pip install fairscale",
        "pip install deepspeed",
    ]
    result = step.measure(dataclasses.replace(_PLAN, engines=("deepspeed2",)))
    assert result.skipped == {"deepspeed2": "pip install deepspeed"} and not result.runs


@pytest.mark.parametrize(
    "engine",
    [
        *("zero4", "zero3:quantum", "ddp:pairwise", "zero-redundancy-optimizer:host", ""),
        *("zero3:keep=", "zero3:keep=much", "zero3:keep=0", "zero2:keep=all", "zero3:tp2:keep=all", "fsdp2:keep=all"),
        *("zero0:sp2", "fsdp2:cp2", "zero3:sp1", "deepspeed3:tp2", "ddp:sp2"),
    ],
)
def test_unknown_engines_and_models_are_refused_before_anything_runs(engine: str) -> None:
    with pytest.raises(BenchError, match="is not known; choose from local, ddp, zero0"):
        dataclasses.replace(_PLAN, engines=(engine,))
    with pytest.raises(UsageError, match="llama-34m"):
        dataclasses.replace(_PLAN, model="llama-9000b")
    with pytest.raises(BenchError, match="rounds must be at least 1"):
        dataclasses.replace(_PLAN, rounds=0)


def test_how_much_stays_for_the_backward_is_part_of_an_engines_name() -> None:
    names = ["zero3:keep=none", "zero3:pairwise:keep=all", "zero3:none:keep=auto", "zero3:native:keep=1.5MiB"]
    assert all(map(engines.known, names))
    found = [engines._reshards(engines._split_kept(name)[1] or "") for name in names]
    assert found == [True, False, "auto", 3 * 2**19]
    assert engines._split_kept("zero3:pairwise") == ("zero3:pairwise", None)


def test_engines_in_turn_have_a_figure_of_each_round_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(
        module: str, num_ranks: int, options: dict[str, Any], folder: Path, limit_s: float
    ) -> list[dict[str, Any]]:
        assert (options["together"], options["rounds_in_turn"]) == (["ddp", "zero3"], 3)
        assert limit_s == 6 * _PLAN.limit_s  # two engines, three rounds
        found = {"seconds": [1.0, 2.0, 3.0], "peak_bytes": None, "moved_bytes": None, "losses": [2.0, 1.0]}
        slower = found | {"seconds": [1.0, 1.0, 4.0], "moved_bytes": 7.0}
        return [{"ddp": found, "zero3": found | {"moved_bytes": 5.0}}, {"ddp": found, "zero3": slower}]

    monkeypatch.setattr(step, "run_ranks", ranks)
    result = step.measure(dataclasses.replace(_PLAN, engines=("ddp", "zero3"), in_turn=True))
    assert [run.seconds for run in result.runs["zero3"]] == [1.0, 2.0, 4.0]
    assert result.runs["zero3"][0].moved_bytes == 7.0 and result.runs["ddp"][0].peak_bytes is None
    text = step.table(result)
    assert "engines in turn in the same processes" in text and "1.000 [1.000, 1.333]" in text, text


def test_engines_whose_ranks_share_sequences_are_compared_with_such() -> None:
    assert all(map(engines.known, ["zero1:sp2", "zero3:cp2", "deepspeed3:sp2", "zero2:tp2", "fsdp2:tp2"]))

    def told(*names: str) -> list[str]:
        runs = {name: [step.Run(1.0, None, None, (2.0 if name == "ddp" else 3.0,))] for name in names}
        result = step.Result(dataclasses.replace(_PLAN, engines=names), runs, {})
        return [line for line in step.table(result).splitlines() if line.startswith("|")]

    heads, _, *rows = told("local", "zero1:sp2", "deepspeed1:sp2")
    assert "over zero1:sp2" in heads and "as zero1:sp2" in rows[-1]
    heads, _, *rows = told("ddp", "zero1:sp2")
    assert "over ddp" in heads and "ahead" not in rows[-1] and "INVALID" not in rows[-1]


@pytest.mark.slow
def test_a_run_trains_every_engine_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**_TINY).save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--batch-size", "1", "--seq-len", "8", "--steps", "2", "--rounds", "1"]
    file = tmp_path / "runs.json"
    code = main(
        ["bench", "step", *words, "--engines", "ddp,zero3:host,zero3:none", "--checkpointing", "--json", str(file)]
    )
    table = capsys.readouterr().out
    assert code == 0 and table.count("as ddp") == 2 and table.count("INVALID") == 1
    content = json.loads(file.read_text())
    runs = content["runs"]
    assert len(runs["ddp"][0]["losses"]) == 5 and runs["zero3:host"][0]["moved_bytes"] > 0
    assert content["plan"]["steps"] == 2
    assert main(["bench", "step", *words, "--engines", "ddp,fsdp2,zero1,zero3:host", "--in-turn"]) == 0
    table = capsys.readouterr().out
    assert table.count("as ddp") == 4 and "in turn" in table
    assert main(["bench", "step", *words, "--in-turn", "--plot", str(tmp_path / "plot.png")]) == 1


def test_shapes_have_batches_of_what_they_take_and_change_what_is_asked_for(tmp_path: Path) -> None:
    device = torch.device("cpu")
    images = next(Shape("vit-small").batches(2, 7, 0, device))
    assert images["pixel_values"].shape == (2, 3, 128, 128) and images["labels"].shape == (2,)
    tokens = next(Shape("gpt2-tied").batches(2, 7, 0, device))
    assert tokens["input_ids"].shape == (2, 7) and tokens["labels"] is tokens["input_ids"]
    assert Shape("qwen3-moe-64").config().num_experts == 64
    LlamaConfig(**_TINY).save_pretrained(tmp_path)
    model = Shape(str(tmp_path), checkpointing=True, lora=True).make()
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trained and all("lora_" in name for name in trained) and model.is_gradient_checkpointing
    blocks = [each for each in Shape(str(tmp_path), compiles=True).make().modules() if each._compiled_call_impl]
    assert [type(each).__name__ for each in blocks] == ["LlamaDecoderLayer"] * 2
    with pytest.raises(UsageError, match=r"llama-34m.*gpt2-tied"):
        Shape("gpt3")


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--lora"], ["--accumulation", "3"]], ids=["lora", "accumulation"])
def test_a_run_of_adapters_or_micro_batches_trains_every_engine_alike(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(**_TINY).save_pretrained(tmp_path)
    words += ["--model", str(tmp_path), "--batch-size", "1", "--seq-len", "8", "--steps", "2", "--rounds", "1"]
    engines = "ddp,zero0,zero1,zero2,zero3,fsdp2"
    assert main(["bench", "step", *words, "--engines", engines, "--in-turn"]) == 0
    table = capsys.readouterr().out
    assert table.count("as ddp") == 6 and ("LoRA" in table or "in each of 3 micro-batches" in table)


@pytest.mark.slow
def test_every_exchange_is_measured_at_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "comm.json"
    assert main(["bench", "comm", "--sizes", "0.1,1", "--repeats", "1", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert all([each[0] for each in timings] == [104856, 2**20] for timings in found["timings"].values())
    assert set(found["timings"]) >= {"pairwise", "native"} and found["chosen"] in found["timings"]
    assert f"auto takes {found['chosen']}" in capsys.readouterr().out
    assert main(["bench", "comm", "--ranks", "1"]) == 1
