"""Tensor parallelism as it is planned, beside the engine's own count, what ranks exchange, and the memory of a run."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_zero as zero
from hf_zero.cli.main import main
from hf_zero.cli.planning.sequences import activations_of
from hf_zero.cli.planning.tensor_axis import shared_among
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.plan.memory import Setting, predict
from hf_zero.plan.shapes import shapes_of
from hf_zero.plan.summary import model_states
from hf_zero.plan.tensor_axis import Receiving
from tests.ranks import run_ranks
from tests.tensor_axis import CONFIGS, NEEDS_TENSOR_PARALLELISM, saved

pytestmark = NEEDS_TENSOR_PARALLELISM

_STAGES = (1, 2, 3)
_TOKENS = 4096  # so many that gradients of weights are small beside activations


def _config(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "tp_size": 2, "collectives": "pairwise", "prefetch_bytes": 0, **more}


def _resharding(stage: int) -> dict[str, Any]:
    return {"reshard_after_forward": True} if stage == 3 else {}  # else as memory allows, which no plan knows


def _counted(name: str) -> list[tuple[int, ...]]:
    found = []
    for stage in _STAGES:
        model = AutoModelForCausalLM.from_config(CONFIGS[name]())
        states = model_states(zero.shard_model(model, _config(stage, **_resharding(stage))))
        found.append((states.parameters, states.gradients, states.optimizer, states.traffic))
    return found


@pytest.mark.parametrize("name", ["tied", "heads", "experts"])
def test_states_of_shared_layers_are_those_that_the_engine_counts(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    with shared_among(2, model):
        shape = shapes_of(model)
    for rank, counted in enumerate(run_ranks(_counted, 4, name)):
        if rank % 2:
            continue  # the last of two that share layers may have less
        for stage, seen in zip(_STAGES, counted, strict=True):
            setting = Setting(ZeroConfig(**_config(stage, **_resharding(stage))), 2)
            held = predict(shape, setting, rank=rank // 2)
            assert (held.parameters, held.gradients, held.optimizer, held.in_replica) == seen, (rank, stage)


def _make() -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 64, "use_cache": False}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)
    return AutoModelForCausalLM.from_config(config).train()


def _run(checkpoints: bool) -> tuple[int, int]:
    """The peak of activations, and what is received of the ranks that share layers, of a forward and backward."""
    model = _make()
    if checkpoints:
        model.gradient_checkpointing_enable()
    zero.shard_model(model, _config(1))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)  # there before, as what is counted is activations
    tokens = torch.randint(0, 64, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    with Receiving() as receiving:
        model(input_ids=tokens, labels=tokens).loss.backward()
    peaks = []
    for _ in range(8):  # the least counts: threads of gloo hold what they have sent until they come to run again
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            model(input_ids=tokens, labels=tokens).loss.backward()
        events = recorded.profiler.kineto_results.events()
        peaks.append(max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]")))
    return min(peaks), receiving.num_bytes


def test_activations_and_traffic_of_shared_layers_are_those_of_a_run() -> None:
    with torch.device("meta"):
        model = _make()
    given = argparse.Namespace(sp=1, cp=1, batch_size=1, tile_mlp=0, dtype="float32")
    with shared_among(2, model):
        planned = activations_of(model, given, _TOKENS, 0)
    for checkpoints, kept in planned.items():
        for peak, received in run_ranks(_run, 2, checkpoints):
            assert kept.received == received
            assert 0.9 < (kept.total + kept.largest) / peak < 1.1


def _plan(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = main(["plan", saved("llama"), "--ranks", "4", "--tp", "2", *options])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_layers_are_planned_as_shared_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "zero.yaml"
    code, text = _plan(capsys, "--seq-len", "64", "--memory", "1GiB", "--write", str(out))
    assert code == 0, text
    rows = [line.split("  ")[1] for line in text.splitlines() if line.startswith("  stage")]
    assert "stage 1" in rows and "stage 0" not in rows
    assert "Longest sequence of stage 3: " in text and "with tile_tokens" not in text
    assert yaml.safe_load(out.read_text())["tp_size"] == ZeroConfig.from_file(out).tp_size == 2


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--tp 3 does not divide the 4 ranks", ["--tp", "3"]),
        ("tp_size is 16, which does not divide the 6 num_attention_heads", ["--ranks", "16", "--tp", "16"]),
        ("--ep is not planned together with --tp: its experts are shared either way", ["--ep", "2"]),
        ("--sp is not planned together with --tp", ["--sp", "2"]),
        ("--lora is not planned together with --tp", ["--lora", "8"]),
        ("--tile-tokens is not planned together with --tp", ["--tile-tokens", "64"]),
        ("is not predicted with --tp", ["--gpu", "h100", "--seq-len", "64"]),
    ],
)
def test_what_is_not_planned_with_shared_layers_is_named(
    words: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = _plan(capsys, *options)
    assert (code, words in text) == (1, True), text
