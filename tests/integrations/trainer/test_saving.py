"""What a Trainer saves of a partitioned model is what plain libraries load; the best checkpoint comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Trainer

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from tests.integrations.trainer.runs import (
    COLLECTIVES,
    Build,
    PlainModule,
    arguments,
    dataset,
    gpt2,
    loaded,
    plain_module,
    trained,
    trainer_of,
    undone,
    with_adapters,
)
from tests.ranks import by_hand, on_ranks, run_ranks

LOAD_WITHOUT_US = """
import sys
sys.modules["hf_zero"] = None  # importing it would raise
import torch
from transformers import AutoModelForCausalLM
for name in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/llama" if name == "adapters" else f"{sys.argv[1]}/{name}")
    if name == "adapters":
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, f"{sys.argv[1]}/{name}")
    torch.save(model.state_dict(), f"{sys.argv[1]}/{name}.pt")
"""


@undone
def save_all(folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train and save models; their whole weights."""
    weights = {}
    for name, build, stage in (
        ("saved_stage3", loaded, 3),
        ("saved_stage1", loaded, 1),
        ("saved_tied", gpt2, 3),
        ("adapters", with_adapters, 3),
        ("plain_module", plain_module, 3),
    ):
        args = arguments(folder, stage, max_steps=2)
        model = build(folder)
        trainer = trainer_of(model, args)
        trainer.train()
        ledger = zero.engine_of(model).world.ledger
        ledger.reset()
        trainer.save_model(f"{folder}/{name}")
        gathered = ledger.total("gather").bytes
        if name == "adapters":
            assert 0 < gathered < 1000  # bytes: frozen weights are not gathered
        elif stage == 3:
            assert gathered == 0, name  # every rank writes its rows
        weights[name] = whole_state_dict(model)
    return weights


@pytest.mark.slow
def test_saved_folders_load_without_hf_zero(folder: str) -> None:
    weights = run_ranks(save_all, 2, folder)[0]
    plain = weights.pop("plain_module")
    command = [sys.executable, "-c", LOAD_WITHOUT_US, folder, *weights]
    subprocess.run(command, cwd=folder, check=True, timeout=120, env=os.environ | {"PYTHONPATH": ""})
    for name, oracle in weights.items():
        found = torch.load(f"{folder}/{name}.pt", weights_only=True)
        assert found.keys() == oracle.keys(), name
        assert all(torch.equal(found[key], oracle[key]) for key in oracle), name
    files = {path.name for path in Path(folder, "adapters").iterdir()}
    assert "adapter_model.safetensors" in files
    assert not any(name.startswith("model") for name in files)
    size = Path(folder, "adapters", "adapter_model.safetensors").stat().st_size
    assert size < Path(folder, "saved_stage3", "model.safetensors").stat().st_size
    module = PlainModule()
    module.load_state_dict(load_file(f"{folder}/plain_module/model.safetensors"))
    assert all(torch.equal(value, plain[name]) for name, value in module.state_dict().items())
    args = torch.load(f"{folder}/saved_stage3/training_args.bin", weights_only=False)
    assert args.zero_config == zero.ZeroConfig(stage=3, collectives=COLLECTIVES)


@on_ranks(2, kind=[(1, loaded), (3, gpt2), *by_hand((3, loaded), (0, loaded))])
@undone
def test_the_best_of_the_checkpoints_of_weights_is_loaded_at_the_end(kind: tuple[int, Build], folder: str) -> None:
    stage, build = kind
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options |= {"save_only_model": True, "load_best_model_at_end": True, "save_total_limit": 2}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True}  # so it is not the last one
    out = f"{folder}/best{stage}_{build.__name__}"
    args = arguments(folder, stage, output_dir=out, **options)
    model = build(folder)
    trainer = trainer_of(model, args, eval_dataset=dataset(6, seed=2))
    trainer.train()
    best = trainer.state.best_metric
    assert abs(best - trainer.evaluate()["eval_loss"]) < 1e-6 * best
    assert trainer.state.best_model_checkpoint == f"{out}/checkpoint-2"
    weights = whole_state_dict(model)
    dist.barrier()
    assert sorted(os.listdir(out)) == ["checkpoint-2", "checkpoint-4"]
    saved = load_file(f"{out}/checkpoint-2/model.safetensors")
    assert saved and all(torch.equal(weights[name], value) for name, value in saved.items())
    assert not Path(out, "checkpoint-2", "optimizer.pt").exists()


@on_ranks(2)
@undone
def test_a_model_left_whole_saves_and_resumes_as_ever(folder: str) -> None:
    args = arguments(folder, 3, output_dir=f"{folder}/whole", save_strategy="steps", save_steps=2)
    losses = []
    for checkpoint in (None, f"{folder}/whole/checkpoint-2"):
        with zero.disabled():
            model = loaded(folder)
        losses.append(trained(trainer_of(model, args), resume_from_checkpoint=checkpoint)[-1])
    assert losses[0] == losses[1]


@on_ranks(2, stage=[1, 3], build=[loaded, with_adapters, plain_module])
@undone
def test_rank_0_saves_the_model_alone(stage: int, build: Build, folder: str) -> None:
    out = Path(folder, f"alone{stage}{build.__name__}")
    trainer = trainer_of(build(folder), arguments(folder, stage, output_dir=str(out), max_steps=2))
    trainer.train()
    trainer.save_model(str(out / "together"))
    if dist.get_rank() == 0:
        trainer.save_model(str(out / "alone"))
        (wanted,) = (out / "together").glob("*model.safetensors")
        found, weights = load_file(out / "alone" / wanted.name), load_file(wanted)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], value) for key, value in weights.items())
    dist.barrier()


class _SavesAlone(Trainer):
    """Its main process saves, and the others return at once."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save:
            self.model.save_pretrained(output_dir)


@on_ranks(2, stage=[3, 1], build=[loaded, with_adapters])
@undone
def test_a_subclass_that_saves_on_the_main_process_alone_resumes_from_it(stage: int, build: Build, folder: str) -> None:
    args = arguments(folder, stage, output_dir=f"{folder}/saves alone {stage}", save_strategy="steps", save_steps=2)
    trainer = trainer_of(build(folder), args, _SavesAlone)
    losses = trained(trainer)
    again = trainer_of(build(folder), args, _SavesAlone)
    assert trained(again, resume_from_checkpoint=f"{args.output_dir}/checkpoint-2") == losses
    found, expected = whole_state_dict(again.model), whole_state_dict(trainer.model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@on_ranks(2, stage=[3, *by_hand(1)])
@undone
def test_output_folder_of_rank_0_counts_for_all(stage: int, folder: str) -> None:
    def out(rank: int) -> str:
        return f"{folder}/of rank {rank} in stage {stage}"

    own = out(dist.get_rank())
    args = arguments(folder, stage, output_dir=own, save_strategy="steps", save_steps=2)
    trainer = trainer_of(loaded(folder), args)
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    dist.barrier()
    assert not Path(out(1)).exists()
    assert trainer.args.output_dir == out(0)
    assert {"checkpoint-2", "checkpoint-4", "model.safetensors"} <= {path.name for path in Path(out(0)).iterdir()}
    again = trainer_of(loaded(folder), arguments(folder, stage, output_dir=own))
    again.train(resume_from_checkpoint=f"{own}/checkpoint-2")
    assert [entry["loss"] for entry in again.state.log_history if "loss" in entry] == losses
