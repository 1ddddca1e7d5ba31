"""The Trainer and TRL's trainers with logits of some tokens at a time give the numbers that they give without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

import hf_zero as zero
from tests.engine.tiles.models import LargestLogits
from tests.integrations.test_trl import TRAINERS
from tests.integrations.trainer.runs import arguments, dataset, gpt2, trainer_of, undone
from tests.integrations.trl_inputs import config, text, tokenizer
from tests.models import CASES, VOCAB, make_model
from tests.ranks import run_ranks

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing_factor": 0.1},
    "accumulated": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "per_device_train_batch_size": 1},
    "offloaded": {"gradient_checkpointing": True},
}


def with_adapted_head(folder: str) -> nn.Module:
    model = make_model(CASES["llama"])
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "lm_head"]))


def with_saved_head(folder: str) -> nn.Module:
    model = make_model(CASES["llama"])
    options: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=3, **options))


def llama(folder: str) -> nn.Module:
    return make_model(CASES["llama"])


def _accuracy(found: Any) -> dict[str, float]:
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    hits = (logits[:, :-1].argmax(-1) == found.label_ids[:, 1:]).mean()
    return {"hits": float(hits), "size": float(np.abs(logits).mean())}


@undone
def _trainer(folder: str, build: Callable[[str], nn.Module], stage: int, setting: str) -> None:
    numbers = []
    for tile in (0, 3):
        found = {"stage": stage, "collectives": "pairwise", "tile_tokens": tile, "tile_mlp": 2 * tile}
        found |= {"activations": {"offload": True}} if setting == "offloaded" else {}
        args = arguments(folder, stage, zero=found, max_steps=2, per_device_eval_batch_size=2, **SETTINGS[setting])
        torch.manual_seed(3)
        same = [row for row in dataset() if len(row["input_ids"]) == 5]
        trainer = trainer_of(build(folder), args, eval_dataset=same[:4], compute_metrics=_accuracy)
        with LargestLogits(VOCAB) as seen:
            trainer.train()
        evaluated = trainer.evaluate()
        logs = trainer.state.log_history
        losses = [entry[key] for entry in logs for key in ("loss", "grad_norm") if key in entry]
        numbers.append([*losses, *(evaluated[f"eval_{key}"] for key in ("loss", "hits", "size"))])
        if tile:
            assert seen.numel <= tile * VOCAB
        zero.undo()
    assert numbers[1] == pytest.approx(numbers[0], rel=2e-5), numbers


@pytest.mark.parametrize(
    ("build", "stage", "setting"),
    [
        (llama, 3, "plain"),
        (gpt2, 2, "smoothed"),
        (llama, 3, "smoothed"),
        (llama, 1, "accumulated"),
        (llama, 3, "offloaded"),
        (with_adapted_head, 3, "plain"),
        (with_saved_head, 3, "plain"),
    ],
)
def test_the_trainer(build: Callable[[str], nn.Module], stage: int, setting: str, tmp_path: Any) -> None:
    run_ranks(_trainer, 2, str(tmp_path), build, stage, setting, timeout_s=240)


def _sft(shared: dict[str, Any], **options: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    rows = {"text": [text(i) for i in range(32)]}
    if "completion_only_loss" in options:
        rows = {"prompt": rows["text"], "completion": [" " + text(100 + i) for i in range(32)]}
    args = SFTConfig(max_length=16, **shared, **options)
    return lambda model: SFTTrainer(model, args, train_dataset=Dataset.from_dict(rows))


def _dpo(shared: dict[str, Any], **options: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    rows = {
        "prompt": [text(i) for i in range(32)],
        "chosen": [" " + text(100 + i) for i in range(32)],
        "rejected": [" " + text(200 + i) for i in range(32)],
    }
    args = DPOConfig(max_length=32, **shared, **options)
    return lambda model: DPOTrainer(model, args=args, train_dataset=Dataset.from_dict(rows))


def _later(name: str, shared: dict[str, Any]) -> Any:
    return lambda model: TRAINERS[name](model, shared)


TRL: dict[str, Callable[..., Any]] = {
    "sft": _sft,
    "completions": functools.partial(_sft, completion_only_loss=True),
    "smoothed": functools.partial(_sft, label_smoothing_factor=0.1),
    "packed": functools.partial(_sft, packing=True, packing_strategy="wrapped"),
    "dpo": _dpo,
    **{name: functools.partial(_later, name) for name in ("kto", "grpo", "rloo")},
}


@undone
def _trl(folder: str, names: list[str]) -> None:
    import torch.distributed as dist

    for name in names:
        numbers = []
        for tile in (0, 3):
            shared = {
                "output_dir": f"{folder}/out{dist.get_rank()}",
                "per_device_train_batch_size": 2,
                "max_steps": 2,
                "logging_steps": 1,
                "report_to": "none",
                "save_strategy": "no",
                "disable_tqdm": True,
                "log_level": "error",
                "use_cpu": True,
                "bf16": False,
            }
            made = AutoModelForCausalLM.from_pretrained(folder)
            zero.shard_model(made, {"stage": 3, "collectives": "pairwise", "tile_tokens": tile})
            torch.manual_seed(1)
            trainer = TRL[name](shared)(made)
            trainer.add_callback(zero.ZeroCallback())
            trainer.train()
            logs = [entry for entry in trainer.state.log_history if "loss" in entry]
            keys = ("loss", "grad_norm", "mean_token_accuracy", "entropy")
            numbers.append([entry[key] for entry in logs for key in keys if key in entry])
        assert numbers[0] and numbers[1] == pytest.approx(numbers[0], rel=2e-5, abs=1e-6), (name, numbers)


@pytest.mark.parametrize(
    "names",
    [
        ["completions", "dpo"],
        pytest.param(["packed", "sft", "smoothed", "kto", "grpo", "rloo"], marks=pytest.mark.slow),
    ],
)
def test_trainers_of_trl(names: list[str], tmp_path: Any) -> None:
    tokenizer().save_pretrained(tmp_path)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(False)).save_pretrained(tmp_path)
    run_ranks(_trl, 2, str(tmp_path), names, timeout_s=300)
