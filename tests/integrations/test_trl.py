"""TRL's trainers on a partitioned model give the losses, norms and weights that they give in one process."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

import hf_zero as zero
from tests.integrations.trainer.runs import undone
from tests.integrations.trl_inputs import config, length_reward, text, tokenizer
from tests.ranks import by_hand, run_ranks


def _sft(model: PreTrainedModel, shared: dict[str, Any], **options: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_dict({"text": [text(i) for i in range(32)]})
    return SFTTrainer(model, SFTConfig(max_length=16, **shared, **options), train_dataset=rows)


def _preferences() -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [text(i) for i in range(32)],
            "chosen": [" " + text(100 + i) for i in range(32)],
            "rejected": [" " + text(200 + i) for i in range(32)],
        }
    )


def _dpo(model: PreTrainedModel, shared: dict[str, Any], **options: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(model, args=DPOConfig(max_length=32, beta=0.5, **shared, **options), train_dataset=_preferences())


def _reward(model: PreTrainedModel, shared: dict[str, Any], **options: Any) -> Any:
    from trl import RewardConfig, RewardTrainer

    rows = _preferences().remove_columns("prompt")
    return RewardTrainer(model, RewardConfig(max_length=32, **shared, **options), train_dataset=rows)


def _kto(model: PreTrainedModel, shared: dict[str, Any], **options: Any) -> Any:
    from trl import KTOConfig, KTOTrainer

    rows = Dataset.from_dict(
        {
            "prompt": [text(i) for i in range(32)],
            "completion": [" " + text(100 + i) for i in range(32)],
            "label": [i % 2 == 0 for i in range(32)],
        }
    )
    return KTOTrainer(model, args=KTOConfig(max_length=32, **shared, **options), train_dataset=rows)


def _online(kind: str, model: PreTrainedModel, shared: dict[str, Any], **options: Any) -> Any:
    import trl

    arguments, trainer = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")
    rows = Dataset.from_dict({"prompt": [text(i) for i in range(32)]})
    # As many tokens on every rank, so that all draw as many random numbers.
    lengths = {"max_completion_length": 6, "generation_kwargs": {"min_new_tokens": 6}}
    args = arguments(num_generations=2, **lengths, **shared, **options)
    return trainer(model, args=args, reward_funcs=length_reward, train_dataset=rows)


def _distillation(model: PreTrainedModel, shared: dict[str, Any], **options: Any) -> Any:
    from trl import DistillationConfig, DistillationTrainer

    torch.manual_seed(9)
    with zero.disabled():
        teacher = AutoModelForCausalLM.from_config(config(False))
    rows = Dataset.from_dict({"prompt": [text(i) for i in range(32)]})
    args = DistillationConfig(max_completion_length=6, generation_kwargs={"min_new_tokens": 6}, **shared, **options)
    return DistillationTrainer(model, teacher_model=teacher, args=args, train_dataset=rows)


TRAINERS: dict[str, Callable[..., Any]] = {
    "sft": _sft,
    "dpo": _dpo,
    "reward": _reward,
    "kto": _kto,
    "grpo": functools.partial(_online, "GRPO"),
    "rloo": functools.partial(_online, "RLOO"),
    "distillation": _distillation,
}


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor] = field(repr=False)


@undone
def _train(folder: str, name: str, stage: int | None, tied: bool, options: dict[str, Any], steps: int = 2) -> Outcome:
    import torch.distributed as dist

    num_ranks = dist.get_world_size()
    kind = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    made = kind.from_pretrained(folder)
    shared = {
        "output_dir": f"{folder}/out{dist.get_rank()}",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2 // num_ranks,
        "max_steps": steps,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "bf16": False,
    }
    if stage is not None:
        limit = {"prefetch_bytes": 0} if stage else {"bucket_bytes": 2000}  # several buckets
        zero.shard_model(made, {"stage": stage, "collectives": "pairwise", "timeout_s": 30, **limit})
    torch.manual_seed(1)
    trainer = TRAINERS[name](made, shared, **options)
    if stage is not None:
        trainer.add_callback(zero.ZeroCallback())
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = {}
    with torch.no_grad():
        for key, param in made.named_parameters():
            weights[key] = param.full_tensor() if hasattr(param, "full_tensor") else param.detach().clone()
    return Outcome([e["loss"] for e in logs], [e["grad_norm"] for e in logs], weights)


def _assert_same(actual: Outcome, expected: Outcome) -> None:
    # The sum over four rows is taken in another order by two ranks than by one process.
    assert actual.norms == pytest.approx(expected.norms, rel=1e-3, abs=1e-5)
    assert actual.losses == pytest.approx(expected.losses, rel=1e-3, abs=2e-4)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(
            actual.weights[name], weight, rtol=1e-2, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


# Stages 0 and 1 leave the model whole while it computes, as those of the others show.
EVERYDAY_IN_STAGE_3 = ("sft", "kto", "grpo", "distillation")


@pytest.mark.parametrize(
    ("name", "tied", "options"),
    [
        ("sft", False, {}),
        ("sft", True, {"gradient_checkpointing": False}),
        ("dpo", False, {}),
        ("reward", False, {}),
        ("kto", True, {}),
        ("grpo", False, {}),
        ("rloo", False, {}),
        ("distillation", False, {}),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, bool)) else "",
)
def test_trains_as_in_one_process(name: str, tied: bool, options: dict[str, Any], tmp_path: Any) -> None:
    tokenizer().save_pretrained(tmp_path)
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    kind.from_config(config(tied)).save_pretrained(tmp_path)
    # What is sampled depends on the rank, so online trainers are compared with DDP on as many ranks.
    num_plain = 2 if name in ("grpo", "rloo", "distillation") else 1
    expected = run_ranks(_train, num_plain, str(tmp_path), name, None, tied, options, timeout_s=120)[0]
    for stage in (*by_hand(0, 1), 3) if name in EVERYDAY_IN_STAGE_3 else (0, 1, 3):
        actual = run_ranks(_train, 2, str(tmp_path), name, stage, tied, options, timeout_s=120)
        for outcome in actual:
            _assert_same(outcome, expected)
