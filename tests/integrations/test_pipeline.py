"""Stages of a pipeline, each under ZeRO over two ranks, against one process; their files; what cannot be cut."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

import hf_zero as zero
from hf_zero.checkpoint.files import disk
from hf_zero.engine.engine import engine_of
from hf_zero.errors import PartitionError
from hf_zero.integrations.pipeline import Passed, ZeroStage, clip_grad_norm_, keep_stage, save_stages
from hf_zero.layout import PlacedLayout
from tests.ranks import run_alone, run_ranks

_STEPS, _MICRO, _LENGTH, _VOCAB = 3, 4, 7, 37
_SIZES = {
    "vocab_size": _VOCAB,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def _config(name: str) -> PretrainedConfig:
    if name == "qwen3":  # it looks up what kind of attention a layer has by the layer's number
        kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"], "sliding_window": 3}
        return transformers.Qwen3Config(**_SIZES, head_dim=8, use_sliding_window=True, **kinds)
    return transformers.LlamaConfig(**_SIZES)


def _saved(name: str, folder: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(_config(name)).save_pretrained(folder)
    return str(folder)


def _batch(step: int, pipeline: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + pipeline)
    return torch.randint(0, _VOCAB, (_MICRO, _LENGTH), generator=generator)


def _loss(logits: Tensor, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def _train(folder: str, out: str, stage: int, chunks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "rank"))
    config = {"stage": stage, "collectives": "pairwise"}
    parts = 2 * chunks
    indices = range(mesh["stage"].get_local_rank(), parts, 2)
    models = []
    for index in indices:
        with zero.Init(config, mesh=mesh["rank"]):
            model = AutoModelForCausalLM.from_pretrained(folder)
        models.append(keep_stage(model.train(), index, parts))
        zero.shard_model(model)
    group = mesh.get_group("stage")
    stages = [ZeroStage(m, i, parts, torch.device("cpu"), group=group) for i, m in zip(indices, models, strict=True)]
    schedule = Schedule1F1B(stages[0], _MICRO, _loss) if chunks == 1 else ScheduleInterleaved1F1B(stages, _MICRO, _loss)
    optimizer = torch.optim.AdamW([param for model in models for param in model.parameters()], lr=1e-2)
    is_first, is_last = (index in indices for index in (0, parts - 1))
    found, norms, moved = [], [], []
    for step in range(_STEPS):
        rows = _batch(step, mesh["rank"].get_local_rank())
        losses: list[Tensor] = []
        for model in models:
            engine_of(model).world.ledger.reset()  # type: ignore[union-attr]
        schedule.step(*[rows] if is_first else [], target=rows if is_last else None, losses=losses if is_last else None)
        norms.append(clip_grad_norm_(models, 0.5, group).item())
        moved = [engine_of(model).world.ledger.total("reduce_scatter").calls for model in models]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.stack(losses).mean().item() if is_last else None)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    save_stages(models, whole, out)
    names = [name for model in models for name, _ in model.named_parameters()]
    units = [len(engine_of(model).units) for model in models]  # type: ignore[union-attr]
    return {"losses": found, "norms": norms, "moved": moved, "units": units, "names": names}


def _train_whole(folder: str, out: str) -> tuple[list[list[float]], list[float], list[str]]:
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(_STEPS):
        of_step = []
        for pipeline in range(2):
            rows = _batch(step, pipeline)
            of_micro = [_loss(model(row[None]).logits, row[None]) for row in rows]
            loss = torch.stack(of_micro).mean()
            (loss / 2).backward()
            of_step.append(loss.item())
        losses.append(of_step)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)
    return losses, norms, [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("name", "stage", "chunks"),
    [
        ("llama", 1, 1),
        pytest.param("llama", 3, 2, marks=pytest.mark.slow),
        pytest.param("qwen3", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_two_stages_of_two_ranks_train_as_one_process(tmp_path: Path, name: str, stage: int, chunks: int) -> None:
    folder = _saved(name, tmp_path / "start")
    losses, norms, names = run_alone(_train_whole, folder, str(tmp_path / "whole"))
    ranks = run_ranks(_train, 4, folder, str(tmp_path / "stages"), stage, chunks)
    for rank, found in enumerate(ranks):
        assert found["norms"] == pytest.approx(norms, rel=1e-4)
        if rank >= 2:  # the last stage has the losses, of the batches of its place in the stage
            assert found["losses"] == pytest.approx([each[rank - 2] for each in losses], rel=1e-6)
        # Stage 1 reduces once a step, the others each of the four micro-batches.
        assert found["moved"] == [units * (1 if stage == 1 else _MICRO) for units in found["units"]]
    assert sorted(ranks[0]["names"] + ranks[2]["names"]) == sorted(names)
    assert not set(ranks[0]["names"]) & set(ranks[2]["names"])
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / each).state_dict() for each in ("stages", "whole"))
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-4, msg=key)


def _save_untrained(folder: str, out: str, checkpoint_files: str) -> set[str]:
    """Returns the files that this rank wrote to."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "rank"))
    config = {"stage": 3, "collectives": "pairwise", "checkpoint_files": checkpoint_files}
    with zero.Init(config, mesh=mesh["rank"]):
        model = AutoModelForCausalLM.from_pretrained(folder)
    zero.shard_model(keep_stage(model, dist.get_rank() // 2, 2))
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with mock.patch.object(disk, "write_at", wraps=disk.write_at) as writes:
        save_stages([model], whole, out)
    return {path.name for _, (_, path, *_), _ in writes.mock_calls}


@pytest.mark.parametrize("checkpoint_files", ["shared", "per_writer"])
def test_files_are_those_of_the_whole_model_byte_for_byte(tmp_path: Path, checkpoint_files: str) -> None:
    folder = _saved("llama", tmp_path / "start")
    written = run_ranks(_save_untrained, 4, folder, str(tmp_path / "out"), checkpoint_files)
    names = sorted(path.name for path in Path(folder).iterdir())
    assert filecmp.cmpfiles(folder, tmp_path / "out", names, shallow=False)[0] == names
    assert list(map(len, written)) == ([1] * 4 if checkpoint_files == "shared" else [1, 0, 0, 0])


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    def make(config: PretrainedConfig) -> Any:
        return AutoModelForCausalLM.from_config(config)

    tied = make(transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True))
    with pytest.raises(PartitionError, match=r"ties model\.embed_tokens\.weight and lm_head\.weight"):
        keep_stage(tied, 0, 2)
    scaled = make(transformers.GraniteConfig(**_SIZES, embedding_multiplier=2.0, tie_word_embeddings=False))
    with pytest.raises(PartitionError, match="changes hidden states outside of its layers"):
        keep_stage(scaled, 1, 2)
    without = make(transformers.GPT2Config(vocab_size=_VOCAB, n_embd=8, n_layer=2, n_head=2))
    with pytest.raises(PartitionError, match="GPT2LMHeadModel has no plan for a pipeline"):
        keep_stage(without, 0, 2)
    with pytest.raises(PartitionError, match=r"stage 0 of 6 .* 5 layers"):
        keep_stage(make(_config("llama")), 0, 6)


def test_a_stage_keeps_names_and_numbers_of_the_whole_model() -> None:
    model = keep_stage(AutoModelForCausalLM.from_config(_config("llama")), 1, 3)
    held = {name.split(".")[2] for name, _ in model.named_parameters()}
    assert held == {"1", "2"}  # of five layers: 1, 2 and 2
    assert isinstance(model.model.layers[0], Passed) and isinstance(model.lm_head, Passed)
    layout = PlacedLayout((5, 2), 6, (3, 4))
    assert [layout.span(rank) for rank in range(6)] == [(0, 0), (0, 0), (0, 0), (0, 6), (6, 10), (0, 0)]
