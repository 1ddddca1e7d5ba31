"""Expert parallelism as it is planned, beside the engine's own count, what moves in a step, and the memory of a run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.cli.main import main
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.parameters.experts import mark_experts
from hf_zero.plan.activations import Kept, activations
from hf_zero.plan.memory import Holding, Setting, predict
from hf_zero.plan.shapes import ModelShape, shapes_of
from hf_zero.plan.summary import model_states
from hf_zero.sharding.axes.experts import find_experts
from tests.experts import make
from tests.plan.test_memory import peak_of
from tests.ranks import run_ranks

_AXES = {
    "ep2": (2, {"ep_size": 2}),
    "ep4": (4, {"ep_size": 4}),
    "efsdp2 x ep2": (4, {"ep_size": 2}),
    "replicate2 x ep2": (4, {"ep_size": 2, "replicate": 2}),
}
_MIXED = {"compute_dtype": "bfloat16", "master_dtype": "float32"}
# Wide enough that no matrix is packed with others into a message, for which an exchange takes memory that no plan knows.
_WIDE = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}


def _config(stage: int, axes: str, **more: Any) -> dict[str, Any]:
    reshards = {"reshard_after_forward": True} if stage == 3 else {}  # else as memory allows, which no plan knows
    return {"stage": stage, "collectives": "pairwise", "prefetch_bytes": 0, **reshards, **_AXES[axes][1], **more}


def _shape(model: nn.Module, config: dict[str, Any], num_ranks: int) -> ModelShape:
    """Of a model whose experts ranks divide, which is the same in all stages."""
    setting = Setting(ZeroConfig(**config), num_ranks)
    for experts in find_experts(model, setting.config.ep_size, setting.num_shards).values():
        mark_experts(experts)
    return shapes_of(model)


def _predicted(shape: ModelShape, config: dict[str, Any], num_ranks: int, kept: Kept, rank: int = 0) -> Holding:
    return predict(shape, Setting(ZeroConfig(**config), num_ranks), kept, rank)


def _counted(name: str, configs: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    found = []
    for config in configs:
        states = model_states(zero.shard_model(make(name), config))
        found.append((states.parameters, states.gradients, states.optimizer, states.traffic, states.largest_unit))
    return found


@pytest.mark.parametrize("axes", list(_AXES))
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_model_states_are_those_that_the_engine_counts(name: str, axes: str) -> None:
    num_ranks = _AXES[axes][0]
    configs = [_config(stage, axes, **more) for stage, more in ((1, {}), (2, _MIXED), (3, {}), (3, _MIXED))]
    shape = _shape(make(name), configs[0], num_ranks)
    for rank, found in enumerate(run_ranks(_counted, num_ranks, name, configs)):
        for values, (parameters, gradients, optimizer, traffic, _) in zip(configs, found, strict=True):
            place = rank % (num_ranks // values.get("replicate", 1))
            held = _predicted(shape, values, num_ranks, Kept(0, 0), place)
            assert (held.parameters, held.gradients, held.optimizer) == (parameters, gradients, optimizer), values
            assert held.in_replica + held.between_replicas == pytest.approx(traffic, abs=500), values


def _batch(device: str = "cpu") -> dict[str, Tensor]:
    tokens = torch.randint(1, 60, (2, 64), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": tokens, "labels": tokens}


def _evenly(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Every expert gets as many tokens."""
    places = torch.arange(output[2].numel(), device=output[2].device).view_as(output[2])
    return output[0], output[1], places % 8


def _model(checkpoints: bool) -> Any:
    model = make("qwen3_moe", "grouped_mm", **_WIDE)
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(_evenly)
    if checkpoints:
        model.gradient_checkpointing_enable()
    return model


def _received(config: dict[str, Any], checkpoints: bool) -> tuple[int, int]:
    """What comes in a step, in all and of tokens for experts, when all has been received before."""
    model = _model(checkpoints)
    engine = zero.shard_model(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        engine.world.ledger.reset()
        model(**_batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    agreed = engine.world.ledger.total("agree").bytes
    tokens = engine.world.ledger.total("all_to_all (expert axis)").bytes
    return engine.world.ledger.total().bytes - agreed, tokens


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("axes", ["ep2", "efsdp2 x ep2"])
def test_traffic_is_that_of_a_step(axes: str, checkpoints: bool) -> None:
    num_ranks = _AXES[axes][0]
    kept = activations(_of_shapes(num_ranks), _batch("meta"), checkpoints)
    routed = 2 * 2 * 64 * 2 * 256 * 4  # layers, tokens, experts of each, width, float32
    assert kept.routed == routed * (3 if checkpoints else 2)
    shape = _shape(_model(False), _config(1, axes), num_ranks)
    for stage in (1, 3):  # stage 2 receives what stage 1 does
        config = _config(stage, axes)
        held = _predicted(shape, config, num_ranks, kept)
        for total, tokens in run_ranks(_received, num_ranks, config, checkpoints):
            assert tokens == pytest.approx(kept.routed, rel=0.01)  # half of them, there and back; and how many they are
            assert held.in_replica == pytest.approx(total, rel=0.02), config


def _of_shapes(num_ranks: int) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = make("qwen3_moe", "grouped_mm", **_WIDE)
    for experts in find_experts(model, 2, num_ranks).values():
        mark_experts(experts)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("axes", ["ep2", "efsdp2 x ep2"])
def test_peak_is_within_a_tenth_of_that_of_a_run(axes: str, stage: int, checkpoints: bool) -> None:
    num_ranks, config = _AXES[axes][0], _config(stage, axes)
    kept = activations(_of_shapes(num_ranks), _batch("meta"), checkpoints)
    predicted = _predicted(_shape(_model(False), config, num_ranks), config, num_ranks, kept).peak
    measured = max(run_ranks(_peak, num_ranks, config, checkpoints))
    print(f"{axes}, stage {stage}: predicted over measured {predicted / measured:.3f}")
    assert predicted == pytest.approx(measured, rel=0.1)


def _peak(config: dict[str, Any], checkpoints: bool) -> int:
    model = _model(checkpoints)
    engine = zero.shard_model(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(**_batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return peak_of(engine, step)


# ---- the command -----------------------------------------------------------------------------------------------------


def _plan(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = main(["plan", str(folder), *options])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = make("qwen3_moe")
    model.config.architectures = ["Qwen3MoeForCausalLM"]
    model.config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_experts_are_planned_with_and_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "zero.yaml"
    options = ["--ranks", "4", "--seq-len", "32", "--dtype", "float32", "--memory", "8MiB", "--ep", "2"]
    code, text = _plan(folder, capsys, *options, "--write", str(out))
    assert code == 0, text
    rows = [line.split("  ")[1] for line in text.splitlines() if line.startswith("  stage")]
    assert "stage 1" in rows and "stage 0" not in rows
    assert yaml.safe_load(out.read_text())["ep_size"] == ZeroConfig.from_file(out).ep_size == 2


def test_experts_that_ranks_cannot_divide_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, *options in (
        ("--ep 3 does not divide the 4 ranks", "--ranks", "4", "--ep", "3"),
        ("has 8 experts, which the 16 ranks", "--ranks", "16", "--ep", "2"),
        ("'ep_size': 2 cannot be had together with cp_size", "--ranks", "4", "--ep", "2", "--cp", "2"),
        ("leave it, or --ep, out", "--ranks", "4", "--ep", "2", "--scale"),
    ):
        code, text = _plan(folder, capsys, *options)
        assert (code, words in text) == (1, True), text
    with contextlib.suppress(SystemExit):
        assert "has no experts" in _plan(Path("llama-125m"), capsys, "--ep", "2")[1]
