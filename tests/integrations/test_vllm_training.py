"""TRL's trainers with `use_vllm`, unchanged: an engine gets the weights, and writes the text, that it does without ZeRO."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hf_zero as zero
from hf_zero.changes import Changes
from tests.engine.twins import whole
from tests.integrations.trainer.runs import logged, undone
from tests.integrations.trl_inputs import config, length_reward, text, tokenizer
from tests.integrations.vllm_engine import vllm
from tests.ranks import by_hand, next_turn, on_ranks, run_ranks

_STEPS = 3
_ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"r": 3, "target_modules": ["q_proj", "down_proj"]},
    "saved": {"r": 3, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "dora": {"r": 3, "target_modules": ["o_proj"], "use_dora": True},
}


ArgsOf = Callable[[type], Callable[..., Any]]  # makes arguments of a class, with a configuration or without


@dataclass(frozen=True)
class Case:
    """What to train: with which of TRL's trainers, where the engine is, which adapters there are."""

    trainer: str
    mode: str
    kind: str
    tied: bool = False
    sleeps: bool = False

    def __str__(self) -> str:
        words = [self.trainer, self.mode, self.kind, "tied" if self.tied else "", "sleeps" if self.sleeps else ""]
        return "-".join(filter(None, words))


@dataclass(frozen=True)
class Outcome:
    """Of one rank; in server mode the first one has the engine."""

    losses: list[float]
    texts: list[list[int]]
    hand_overs: list[dict[str, Tensor]] = field(repr=False)
    names: list[str] = field(repr=False)
    weights: dict[str, Tensor] = field(repr=False)


def _prompts() -> Dataset:
    return Dataset.from_dict({"prompt": [text(i) for i in range(32)]})


def _in_groups(kind: str, folder: str, args_of: ArgsOf, shared: dict[str, Any], **options: Any) -> Any:
    import trl

    args = args_of(getattr(trl, f"{kind}Config"))(num_generations=2, max_completion_length=5, **shared)
    make = getattr(trl, f"{kind}Trainer")
    return make(folder, args=args, reward_funcs=length_reward, train_dataset=_prompts(), **options)


def _distillation(folder: str, args_of: ArgsOf, shared: dict[str, Any], **options: Any) -> Any:
    from trl import DistillationConfig, DistillationTrainer

    args = args_of(DistillationConfig)(max_completion_length=5, **shared)
    torch.manual_seed(9)
    with zero.disabled():
        teacher = AutoModelForCausalLM.from_config(config(False))
    return DistillationTrainer(folder, teacher_model=teacher, args=args, train_dataset=_prompts(), **options)


def _online_dpo(folder: str, args_of: ArgsOf, shared: dict[str, Any], **options: Any) -> Any:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    args = args_of(OnlineDPOConfig)(max_new_tokens=5, max_length=32, **shared)
    model = AutoModelForCausalLM.from_pretrained(folder)
    kept = {"train_dataset": _prompts(), "processing_class": tokenizer()}
    return OnlineDPOTrainer(model, reward_funcs=length_reward, args=args, **kept, **options)


_TRAINERS: dict[str, Callable[..., Any]] = {
    "grpo": functools.partial(_in_groups, "GRPO"),
    "rloo": functools.partial(_in_groups, "RLOO"),
    "distillation": _distillation,
    "online_dpo": _online_dpo,
}


@contextmanager
def _unchanged_by_hand_overs(model: nn.Module) -> Iterator[None]:
    """Within: each hand-over leaves the model as it was, to the last bit."""
    from trl.experimental.online_dpo import OnlineDPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration

    def checked(original: Callable[[Any], None], self: Any) -> None:
        before = {name: whole(value).clone() for name, value in model.state_dict().items()}
        original(self)
        assert all(torch.equal(whole(value), before[name]) for name, value in model.state_dict().items())

    with Changes() as changes:
        changes.wrap(VLLMGeneration, "sync_weights", checked)
        changes.wrap(OnlineDPOTrainer, "_move_model_to_vllm", checked)
        yield


@undone
def _train(folder: str, case: Case, stage: int | None) -> Outcome:
    import peft

    num_ranks = dist.get_world_size()
    shared = {
        "output_dir": f"{folder}/out{dist.get_rank()}",
        "per_device_train_batch_size": 4 // num_ranks,
        "max_steps": _STEPS,
        "logging_steps": 1,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "bf16": False,
        "use_vllm": True,
        "vllm_mode": case.mode,
        "vllm_enable_sleep_mode": case.sleeps,
    }
    args_of: ArgsOf = lambda made: made  # noqa: E731
    if stage is not None:
        settings = {"stage": stage, "collectives": "pairwise"}
        args_of = lambda made: functools.partial(zero.with_zero(made), zero=settings)  # noqa: E731
    adapters = _ADAPTERS[case.kind]
    peft_config = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", **adapters)} if adapters else {}
    with vllm(folder) as engines:
        torch.manual_seed(1)
        made = _TRAINERS[case.trainer](folder, args_of, shared, **peft_config)
        with _unchanged_by_hand_overs(made.model) if stage is not None else Changes():
            made.train()
        weights = {name: whole(value).detach().clone() for name, value in made.model.state_dict().items()}
        engine = engines[0] if engines else None
        assert len(engines) <= 1 and (engine is None) == (case.mode == "server" and dist.get_rank() > 0)
        if engine is None:
            return Outcome(logged(made), [], [], [], weights)
        return Outcome(logged(made), engine.texts, engine.hand_overs, engine.loader.loaded, weights)


def _assert_same(actual: Outcome, expected: Outcome) -> None:
    assert actual.texts == expected.texts
    assert actual.names == expected.names
    assert actual.losses == pytest.approx(expected.losses, rel=1e-3, abs=2e-4)
    assert len(actual.hand_overs) == len(expected.hand_overs)
    for found, wanted in zip(
        [*actual.hand_overs, actual.weights], [*expected.hand_overs, expected.weights], strict=True
    ):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def _folder(path: str, tied: bool) -> str:
    """A model in a folder, which every rank of a job may write."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tokenizer().save_pretrained(path)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config(tied)).save_pretrained(path)
    if dist.is_initialized():
        dist.barrier()
    return path


CASES = [
    Case("grpo", "colocate", "saved"),
    Case("grpo", "server", "plain", tied=True),
]
SLOW_CASES = [
    Case("grpo", "colocate", "plain", tied=True, sleeps=True),
    Case("grpo", "colocate", "lora", tied=True),
    Case("grpo", "colocate", "dora"),
    Case("grpo", "server", "lora"),
    Case("grpo", "server", "saved"),
    Case("rloo", "colocate", "lora"),
    Case("rloo", "server", "plain"),
    Case("distillation", "colocate", "plain"),
    Case("distillation", "server", "lora"),
    Case("online_dpo", "colocate", "plain", tied=True),
    Case("online_dpo", "colocate", "saved"),
    Case("online_dpo", "server", "plain"),
    Case("online_dpo", "server", "lora"),
]


def _compare(case: Case, folder: str, stages: Sequence[int]) -> None:
    expected = _train(_folder(folder, case.tied), case, None)
    if expected.hand_overs:
        first, last = expected.hand_overs[0], expected.hand_overs[-1]
        assert len(expected.hand_overs) == _STEPS
        assert any(not torch.equal(value, last[name]) for name, value in first.items())
    for stage in stages:
        next_turn()
        _assert_same(_train(folder, case, stage), expected)


@on_ranks(2, timeout_s=150, case=CASES)
def test_text_and_weights_are_those_of_plain_ranks(case: Case, tmp_path: Path) -> None:
    _compare(case, f"{tmp_path}/{case}", (*by_hand(1), 3))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + SLOW_CASES, ids=str)
@on_ranks(2, timeout_s=300)
def test_text_and_weights_are_those_of_plain_ranks_in_all_stages(case: Case, tmp_path: Path) -> None:
    _compare(case, f"{tmp_path}/{case}", (1, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_text_and_weights_are_those_of_one_process(case: Case, tmp_path: Path) -> None:
    folder = _folder(f"{tmp_path}/{case}", case.tied)
    expected = run_ranks(_train, 1, folder, case, None, timeout_s=120)[0]
    for stage in (1, 3):
        actual = run_ranks(_train, 2, folder, case, stage, timeout_s=120)
        if case.mode == "colocate":  # each rank's engine writes what its own prompts ask for
            per_step = [outcome.texts for outcome in actual]
            size = len(per_step[0]) // _STEPS
            texts = [t for step in range(_STEPS) for each in per_step for t in each[step * size : (step + 1) * size]]
            actual = [replace(outcome, texts=texts) for outcome in actual]
        _assert_same(actual[0], expected)
