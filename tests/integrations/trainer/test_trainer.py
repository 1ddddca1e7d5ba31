"""ZeRO under the plain Trainer, against plain DDP with the same seed and data; and its arguments."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import json
import logging
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import compare_versions
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.integrations.trainer.arguments import ZeroCallback
from tests.models import CASES, LENGTH, VOCAB, make_model
from tests.ranks import run_alone, run_ranks

Values = dict[str, Any]
COLLECTIVES = "pairwise"  # alike on every machine, whether its processes can share memory or not


# ---- data, models, arguments ----------------------------------------------------------------------------------------


def dataset(num_rows: int = 16, seed: int = 0) -> list[dict[str, list[int]]]:
    """Rows of 3 to 6 tokens, so that batches are padded and ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (num_rows,), generator=generator).tolist()
    rows = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, filler: int) -> Tensor:
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": mask}


class PlainModule(nn.Module):
    """Nothing of transformers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, VOCAB)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        assert labels is not None
        return {
            "loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100),
            "logits": logits,
        }


def loaded(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(f"{folder}/llama")


def with_dropout(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(f"{folder}/llama", attention_dropout=0.3)


def with_adapters(folder: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = loaded(folder)
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "v_proj"]))


def from_config(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(f"{folder}/llama"))


def gpt2(folder: str) -> nn.Module:
    return make_model(CASES["gpt2"])


def t5(folder: str) -> nn.Module:
    return make_model(CASES["t5"])


def plain_module(folder: str) -> nn.Module:
    return PlainModule()


def arguments(
    folder: str, stage: int | None, kind: type[TrainingArguments] | None = None, **options: Any
) -> TrainingArguments:
    values: Values = {
        "output_dir": f"{folder}/out",
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    } | options
    if stage is None:
        return (kind or TrainingArguments)(**values)
    values.setdefault("zero", {"stage": stage, "collectives": COLLECTIVES})
    return (kind or zero.ZeroTrainingArguments)(**values)


def undone(job: Callable[..., Any]) -> Callable[..., Any]:
    """A job that leaves transformers as it was, since the next one runs in the same process."""

    @functools.wraps(job)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return job(*args, **kwargs)
        finally:
            zero.undo()
            _clear_sharding_prop_cache()  # it refers to the groups of this job

    return wrapped


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trainer")
    make_model(CASES["llama"]).save_pretrained(path / "llama")
    make_model(CASES["t5"]).save_pretrained(path / "t5")
    return str(path)


# ---- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A training that gives the same numbers under DDP and under ZeRO.

    Attributes:
        name: for the test id.
        stages: those that it runs in.
        build: makes the model, in a folder with what can be loaded.
        options: arguments beside the usual ones.
        num_rows: of the training set.
        tolerance: relative, of losses and norms. Two ranks' gradients add up alike in either order, so what differs is
            the order of additions in norms and over micro-batches, and fused kernels on tensors of other lengths.
        weight_tolerance: relative to the largest weight of a parameter; None where Adam makes a step of a rounding error.
    """

    name: str
    stages: tuple[int, ...] = (2, 3)
    build: Callable[[str], nn.Module] = loaded
    options: Values = field(default_factory=dict)
    num_rows: int = 16
    tolerance: float = 2e-6
    weight_tolerance: float | None = 1e-5


# Compute in bfloat16 against autocast, which keeps norms and the residual stream in fp32: 8 bits of mantissa.
BF16: Values = {"tolerance": 5e-3, "weight_tolerance": None}

SCENARIOS = [
    Scenario("basic", (0, 1, 2, 3)),
    Scenario("from_config", (0, 3), from_config),
    Scenario("no_clipping", (1, 2, 3), options={"max_grad_norm": 0.0}),
    Scenario("accumulation_tokens_of_all_ranks", (0, 1, 2, 3), options={"gradient_accumulation_steps": 2}),
    Scenario(
        "accumulation_tokens_of_own_rank",
        (1, 2, 3),
        options={"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
    ),
    Scenario(
        "ragged_batches",
        options={"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2},
        num_rows=13,
    ),
    Scenario("dropout", (0, 3), with_dropout),
    Scenario("adamw_torch", options={"optim": "adamw_torch"}),
    Scenario("sgd", (1, 3), options={"optim": "sgd", "learning_rate": 0.3}),
    Scenario(
        "checkpointing_reentrant",
        options={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    Scenario(
        "checkpointing_not_reentrant",
        options={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    Scenario("adapters", (0, 2, 3), with_adapters),
    Scenario(
        "adapters_checkpointing",
        (3,),
        with_adapters,
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    Scenario("label_smoothing", options={"label_smoothing_factor": 0.1}),
    Scenario("neftune", options={"neftune_noise_alpha": 5.0}),
    Scenario(
        "compiled_eager", (3,), plain_module, {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2}
    ),
    Scenario("auto_find_batch_size", (3,), options={"auto_find_batch_size": True}),
    Scenario("plain_module", (0, 1, 2, 3), plain_module),
    Scenario("tied", (0, 2, 3), gpt2, {"optim": "sgd", "learning_rate": 0.3}),
    Scenario("encoder_decoder", (3,), t5, {"optim": "sgd", "learning_rate": 0.3}),
    Scenario("bf16", (0, 1, 2, 3), options={"bf16": True}, **BF16),
    Scenario("checkpointing_bf16", (3,), options={"bf16": True, "gradient_checkpointing": True}, **BF16),
]


@dataclass
class Outcome:
    """What a training left on a rank."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    wrapper: str


def train(scenario: Scenario, folder: str, stage: int | None) -> Outcome:
    args = arguments(folder, stage, **scenario.options)
    torch.manual_seed(3)
    model = scenario.build(folder)
    trainer = Trainer(
        model=model, args=args, train_dataset=dataset(scenario.num_rows), data_collator=collate, callbacks=[]
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = whole_state_dict(model)
    return Outcome(
        [entry["loss"] for entry in logs],
        [entry["grad_norm"] for entry in logs],
        {name: value.clone() for name, value in weights.items() if name.split(".")[-1] != "inv_freq"},
        type(getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)).__name__,
    )


@undone
def train_all(scenario: Scenario, folder: str) -> dict[int | None, Outcome]:
    outcomes = {None: train(scenario, folder, None)}
    for stage in scenario.stages:
        outcomes[stage] = train(scenario, folder, stage)
    return outcomes


def worst(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_training_equals_ddp(scenario: Scenario, folder: str) -> None:
    for outcomes in run_ranks(train_all, 2, scenario, folder):
        oracle = outcomes.pop(None)
        assert oracle.wrapper == "DistributedDataParallel"
        for stage, outcome in outcomes.items():
            assert outcome.wrapper != "DistributedDataParallel"
            loss, norm = worst(outcome.losses, oracle.losses), worst(outcome.norms, oracle.norms)
            weight = furthest(outcome.weights, oracle.weights)
            print(f"{scenario.name} stage {stage}: loss {loss:.1e} norm {norm:.1e} weights {weight:.1e}")
            assert loss <= scenario.tolerance, (stage, outcome.losses, oracle.losses)
            assert norm <= 10 * scenario.tolerance, (stage, outcome.norms, oracle.norms)
            assert scenario.weight_tolerance is None or weight <= scenario.weight_tolerance, stage


def furthest(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest difference of two sets of weights, relative to the largest weight of its parameter."""
    assert weights.keys() == others.keys()
    pairs = [(value.double(), others[name].double()) for name, value in weights.items()]
    return max(((left - right).abs().max() / right.abs().max().clamp_min(1e-12)).item() for left, right in pairs)


@undone
def train_in_bfloat16(folder: str) -> dict[str, Any]:
    args = arguments(folder, 3, bf16=True, use_cpu=torch.accelerator.is_available())  # else found out by itself
    model = loaded(folder)
    seen = []
    layer = model.model.layers[0].mlp
    layer.register_forward_hook(lambda module, args, output: seen.append(module.up_proj.weight.dtype))
    trainer = Trainer(model=model, args=args, train_dataset=dataset(), data_collator=collate)
    trainer.train()
    states = [value for state in trainer.optimizer.state.values() for value in state.values() if value.ndim]
    return {
        "config": args.zero_config.compute_dtype,
        "compute": seen[0],
        "rest": {param.dtype for param in model.parameters()},
        "states": {state.dtype for state in states},
        "are_rows": all(isinstance(state, DTensor) for state in states),
    }


def test_bf16_computes_in_bfloat16_on_fp32_masters(folder: str) -> None:
    for seen in run_ranks(train_in_bfloat16, 2, folder):
        assert seen == {
            "config": "bfloat16",
            "compute": torch.bfloat16,
            "rest": {torch.float32},
            "states": {torch.float32},
            "are_rows": True,
        }


@undone
def train_in_float16(folder: str, stage: int) -> dict[str, Any]:
    """With an overflow at the second step, and again from a checkpoint after the third."""
    half = {
        "stage": stage,
        "collectives": COLLECTIVES,
        "compute_dtype": "float16",
        "loss_scale": {"initial": 1024, "window": 2},
    }
    out = f"{folder}/half{stage}"
    args = arguments(folder, stage, zero=half, max_steps=6, output_dir=out, save_strategy="steps", save_steps=3)
    runs = []
    for checkpoint in (None, f"{out}/checkpoint-3"):
        scales = []

        class Watch(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                scales.append(trainer.accelerator.scaler.get_scale())

        class Overflowing(Trainer):
            def compute_loss(self, *given: Any, **named: Any) -> Any:
                loss = super().compute_loss(*given, **named)
                return loss * (float("inf") if (self.state.global_step, dist.get_rank()) == (1, 1) else 1.0)

        model = loaded(folder)
        trainer = Overflowing(
            model=model, args=args, train_dataset=dataset(), data_collator=collate, callbacks=[Watch()]
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        runs.append((scales, [entry["loss"] for entry in logs], [entry["grad_norm"] for entry in logs]))
    return {"fp16": args.fp16, "config": args.zero_config.compute_dtype, "runs": runs}


@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_scales_the_loss_skips_on_all_ranks_and_resumes_with_its_scale(folder: str, stage: int) -> None:
    (first, second) = run_ranks(train_in_float16, 2, folder, stage)
    assert first["runs"][0][0] == second["runs"][0][0] == [1024.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0]
    for seen in (first, second):
        assert (seen["fp16"], seen["config"]) == (True, "float16")
        (scales, losses, norms), (scales_again, losses_again, norms_again) = seen["runs"]
        assert scales_again == scales[3:]
        assert losses_again[-3:] == losses[3:] and norms_again[-3:] == norms[3:]
        assert not math.isfinite(norms[1]) and max(norms[2:]) < 100


@undone
def train_bfloat16_model(folder: str) -> list[tuple[set[torch.dtype], list[float]]]:
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        args = arguments(folder, 3, max_steps=12, learning_rate=1e-4)
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/llama", dtype=dtype)
        trainer = Trainer(model=model, args=args, train_dataset=dataset(), data_collator=collate)
        trainer.train()
        logs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append(({param.dtype for param in model.parameters()}, logs))
    return results


def test_bfloat16_model_gets_fp32_masters(folder: str) -> None:
    """Steps of 1e-4 on weights of 1e-2 would be lost in bfloat16 itself."""
    for (_, oracle), (dtypes, losses) in run_ranks(train_bfloat16_model, 2, folder):
        assert dtypes == {torch.float32}
        assert worst(losses, oracle) < 5e-3


@undone
def count_reductions(folder: str, stage: int) -> tuple[list[int], set[int]]:
    num_bytes = []
    for micro_batches in (1, 4):
        args = arguments(folder, stage, gradient_accumulation_steps=micro_batches, max_steps=2, max_grad_norm=0.0)
        model = loaded(folder)
        trainer = Trainer(model=model, args=args, train_dataset=dataset(), data_collator=collate)
        engine = zero.engine_of(model)
        assert engine is not None
        engine.world.ledger.reset()
        trainer.train()
        num_bytes.append(sum(engine.world.ledger.total(kind).bytes for kind in ("reduce_scatter", "all_reduce")))
    num_hooks = {len(param._post_accumulate_grad_hooks or ()) for param in model.parameters()} if stage == 0 else {1}
    return num_bytes, num_hooks


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_are_reduced_once_a_step_or_once_a_micro_batch(stage: int, folder: str) -> None:
    """The Trainer finds `no_sync`; and in stage 0 it leaves the averaging of plain parameters to the engine."""
    for (once, accumulated), num_hooks in run_ranks(count_reductions, 2, folder, stage):
        assert once > 0
        assert accumulated == once * (4 if stage == 2 else 1)
        assert num_hooks == {1}


# ---- other ways to a Trainer ----------------------------------------------------------------------------------------


class CustomTrainer(Trainer):
    """With arguments of its own, as TRL's trainers have."""

    def __init__(self, model: nn.Module, beta: float, *args: Any, **kwargs: Any) -> None:
        self.beta = beta
        super().__init__(model, *args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * self.beta


def losses_of(trainer: Trainer) -> list[float]:
    trainer.train()
    assert type(trainer.model_wrapped).__name__ != "DistributedDataParallel"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def made_quietly() -> nn.Module:
    with torch.random.fork_rng():  # the Trainer has set the seed for the order of its data
        return make_model(CASES["llama"])


@undone
def train_other_ways(folder: str) -> dict[str, Any]:
    rows = dataset()
    results: dict[str, Any] = {}
    with warnings_of("hf_zero.integrations.trainer.arguments") as messages:
        args = arguments(folder, 3)
        results["usual"] = losses_of(
            Trainer(model=loaded(folder), args=args, train_dataset=rows, data_collator=collate)
        )
        results["warnings_usual"] = list(messages)
        model = make_model(CASES["llama"])
        results["late"] = losses_of(Trainer(model=model, args=args, train_dataset=rows, data_collator=collate))
        results["warnings_late"] = list(messages)
    results["positional"] = losses_of(CustomTrainer(loaded(folder), 1.0, args, collate, rows))
    trainer = Trainer(model_init=lambda: loaded(folder), args=args, train_dataset=rows, data_collator=collate)
    results["model_init"] = losses_of(trainer)
    trainer = Trainer(model_init=made_quietly, args=args, train_dataset=rows, data_collator=collate)
    results["model_init_late"] = losses_of(trainer)
    model = loaded(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    trainer = Trainer(model, args, collate, rows, optimizers=(optimizer, None))
    results["optimizer"] = losses_of(trainer)
    model = make_model(CASES["llama"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    trainer = Trainer(model, args, collate, rows, optimizers=(optimizer, None))
    results["optimizer_late"] = losses_of(trainer)
    zero.undo()
    config = {"stage": 3, "collectives": COLLECTIVES}
    plain = arguments(folder, None)
    with zero.Init(config):
        model = loaded(folder)
    trainer = Trainer(model=model, args=plain, train_dataset=rows, data_collator=collate, callbacks=[ZeroCallback()])
    results["callback"] = losses_of(trainer)
    callback = ZeroCallback(config)
    model = make_model(CASES["llama"])
    trainer = Trainer(model=model, args=plain, train_dataset=rows, data_collator=collate, callbacks=[callback])
    results["callback_with_config"] = losses_of(trainer)
    results["is_partitioned"] = all(isinstance(param, DTensor) for param in model.parameters())
    return results


@contextlib.contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """Messages that a logger gives out, at WARNING or above."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(name).removeHandler(handler)


def test_every_way_to_a_trainer_gives_the_same_training(folder: str) -> None:
    for results in run_ranks(train_other_ways, 2, folder):
        usual = results.pop("usual")
        assert results.pop("warnings_usual") == []
        (warning,) = results.pop("warnings_late")
        assert "the model was made before its ZeroTrainingArguments" in warning
        assert results.pop("is_partitioned")
        for name, losses in results.items():
            # A user's optimizer also decays biases and norms.
            assert worst(losses, usual) < (1e-3 if "optimizer" in name else 2e-6), name
        assert results["optimizer"] == pytest.approx(results["optimizer_late"], rel=2e-6)


@undone
def train_what_is_not_ours(folder: str) -> dict[str, list[Any]]:
    """Models and Trainers that hf_zero must leave alone, in a process where it is active."""
    rows = dataset()
    results: dict[str, list[Any]] = {}

    def note(name: str, model: nn.Module, args: TrainingArguments) -> None:
        trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collate)
        has_callback = any(isinstance(each, ZeroCallback) for each in trainer.callback_handler.callbacks)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        is_whole = not any(isinstance(param, DTensor) for param in model.parameters())
        results[name] = [type(trainer.model_wrapped).__name__, is_whole, has_callback, losses]

    plain = arguments(folder, None)
    note("untouched", loaded(folder), plain)
    args = arguments(folder, 3)
    note("plain_arguments", make_model(CASES["llama"]), plain)
    with zero.disabled():
        model = loaded(folder)
    note("disabled", model, args)
    note("leave_whole", zero.leave_whole(make_model(CASES["llama"])), args)
    zero.undo()
    note("undone", loaded(folder), args)
    args = zero.ZeroTrainingArguments(**{**plain_values(plain), "zero": None})
    note("none", loaded(folder), args)
    return results


def plain_values(args: TrainingArguments) -> Values:
    return {entry.name: getattr(args, entry.name) for entry in dataclasses.fields(args) if entry.init}


def test_what_is_not_ours_trains_under_ddp(folder: str) -> None:
    for results in run_ranks(train_what_is_not_ours, 2, folder):
        losses = results["untouched"][-1]
        for name, (wrapper, is_whole, _, found) in results.items():
            assert (wrapper, is_whole, found) == ("DistributedDataParallel", True, losses), name
        assert not any(results[name][2] for name in ("untouched", "plain_arguments", "undone", "none"))


# ---- evaluation and generation --------------------------------------------------------------------------------------


def evaluate_one(folder: str, stage: int | None, **options: Any) -> dict[str, Any]:
    args = arguments(folder, stage, **options)
    held_out = dataset(7, seed=9)

    def make() -> Trainer:
        return Trainer(
            model=loaded(folder), args=args, train_dataset=dataset(), eval_dataset=held_out, data_collator=collate
        )

    # A plain Trainer that has evaluated is never wrapped in DDP any more, so the oracle trains another one.
    results: dict[str, Any] = {}
    trainer = make()
    results["before"] = trainer.evaluate()["eval_loss"]
    trainer = make() if stage is None else trainer
    trainer.train()
    results["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    results["during"] = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry][-2:]
    results["after"] = trainer.evaluate()["eval_loss"]
    results["predictions"] = torch.from_numpy(trainer.predict(held_out).predictions)
    return results


@undone
def evaluate_all(folder: str, stages: tuple[int, ...], options: Values) -> dict[int | None, dict[str, Any]]:
    return {stage: evaluate_one(folder, stage, **options) for stage in (None, *stages)}


def test_evaluation_before_during_and_after_training_equals_ddp(folder: str) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2}
    for results in run_ranks(evaluate_all, 2, folder, (0, 1, 3), options):
        oracle = results.pop(None)
        assert len(oracle["during"]) == 2
        for stage, result in results.items():
            assert result["before"] == pytest.approx(oracle["before"], rel=1e-6), stage
            assert result["losses"] == pytest.approx(oracle["losses"], rel=2e-6), stage
            assert result["during"] == pytest.approx(oracle["during"], rel=2e-6), stage
            assert result["after"] == pytest.approx(oracle["after"], rel=2e-6), stage
            torch.testing.assert_close(result["predictions"], oracle["predictions"], rtol=1e-4, atol=1e-5)


def test_evaluation_in_bfloat16_is_close_to_autocast(folder: str) -> None:
    for results in run_ranks(evaluate_all, 2, folder, (3,), {"bf16": True}):
        assert results[3]["before"] == pytest.approx(results[None]["before"], rel=2e-3)
        assert results[3]["after"] == pytest.approx(results[None]["after"], rel=5e-3)


@dataclass
class ZeroSeq2SeqArguments(zero.ZeroTrainingArguments, Seq2SeqTrainingArguments):
    """Both kinds of arguments in one."""


def translations(num_rows: int) -> list[dict[str, list[int]]]:
    rows = dataset(num_rows, seed=4)
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"][:3] + [1] * 2} for row in rows]


def generate_with(folder: str, stage: int | None) -> tuple[list[float], Tensor]:
    options: Values = {
        "predict_with_generate": True,
        "per_device_eval_batch_size": 1,
        "learning_rate": 0.3,
        "optim": "sgd",
    }
    kind = Seq2SeqTrainingArguments if stage is None else ZeroSeq2SeqArguments
    args = arguments(folder, stage, kind, **options)
    model = transformers.T5ForConditionalGeneration.from_pretrained(f"{folder}/t5")
    trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=translations(16), data_collator=collate)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    predicted = trainer.predict(translations(5), max_new_tokens=5, do_sample=False).predictions
    return losses, torch.from_numpy(predicted)


@undone
def generate_all(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    ids, length = torch.full((1, 3 + 2 * rank), 5), 3 + 4 * rank
    steps = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    results: dict[str, Any] = {"predicted": {stage: generate_with(folder, stage) for stage in (None, 1, 3)}}
    zero.undo()
    whole = loaded(folder).eval()
    results["oracle"] = whole.generate(ids, **steps)
    for stage in (2, 3):
        arguments(folder, stage)
        model = loaded(folder).eval()
        results[f"stage{stage}"] = model.generate(ids, **steps)
        if stage == 2:  # every rank has whole parameters
            results["alone"] = model.generate(ids, **steps) if rank == 0 else None
    return results


def test_generation_with_other_lengths_on_each_rank_equals_plain(folder: str) -> None:
    for rank, results in enumerate(run_ranks(generate_all, 2, folder)):
        losses, predicted = results["predicted"].pop(None)
        for stage, (found_losses, found) in results["predicted"].items():
            assert found_losses == pytest.approx(losses, rel=1e-5), stage
            assert torch.equal(found, predicted), stage
        assert results["oracle"].shape[1] == 6 + 6 * rank
        for name in ("stage2", "stage3"):
            assert torch.equal(results[name], results["oracle"]), name
        assert rank or torch.equal(results["alone"], results["oracle"])


# ---- saving ---------------------------------------------------------------------------------------------------------

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
def save_all(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {"weights": {}}
    for name, build, stage in (
        ("saved_stage3", loaded, 3),
        ("saved_stage1", loaded, 1),
        ("saved_tied", gpt2, 3),
        ("adapters", with_adapters, 3),
        ("plain_module", plain_module, 3),
    ):
        args = arguments(folder, stage, max_steps=2)
        model = build(folder)
        trainer = Trainer(model=model, args=args, train_dataset=dataset(), data_collator=collate)
        trainer.train()
        engine = zero.engine_of(model)
        assert engine is not None
        engine.world.ledger.reset()
        trainer.save_model(f"{folder}/{name}")
        results[name] = engine.world.ledger.total("gather").bytes
        results["weights"][name] = whole_state_dict(model)
    return results


@pytest.mark.slow
def test_saved_folders_load_without_hf_zero(folder: str) -> None:
    results = run_ranks(save_all, 2, folder)[0]
    weights = results["weights"]
    assert (
        results["saved_stage3"] == results["saved_tied"] == results["plain_module"] == 0
    )  # every rank writes its rows
    assert 0 < results["adapters"] < 1000  # bytes: frozen weights are not gathered
    plain = weights.pop("plain_module")
    command = [sys.executable, "-c", LOAD_WITHOUT_US, folder, *weights]
    subprocess.run(command, cwd=folder, check=True, timeout=120, env=os.environ | {"PYTHONPATH": ""})
    for name, oracle in weights.items():
        found = torch.load(f"{folder}/{name}.pt")
        assert found.keys() == oracle.keys(), name
        assert all(torch.equal(found[key], oracle[key]) for key in oracle), name
    files = {path.name for path in Path(folder, "adapters").iterdir()}
    assert "adapter_model.safetensors" in files
    assert not any(name.startswith("model") for name in files)
    size = Path(folder, "adapters", "adapter_model.safetensors").stat().st_size
    assert size < Path(folder, "saved_stage3", "model.safetensors").stat().st_size
    module = PlainModule()
    module.load_state_dict(load_safetensors(f"{folder}/plain_module/model.safetensors"))
    assert all(torch.equal(value, plain[name]) for name, value in module.state_dict().items())
    args = torch.load(f"{folder}/saved_stage3/training_args.bin", weights_only=False)
    assert args.zero_config == zero.ZeroConfig(stage=3, collectives=COLLECTIVES)


@undone
def keep_best(folder: str, stage: int, build: Callable[[str], nn.Module]) -> tuple[str, dict[str, Tensor], list[str]]:
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options |= {"save_only_model": True, "load_best_model_at_end": True, "save_total_limit": 2}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True}  # so it is not the last one
    args = arguments(folder, stage, output_dir=f"{folder}/best{stage}_{build.__name__}", **options)
    model = build(folder)
    trainer = Trainer(
        model=model, args=args, train_dataset=dataset(), eval_dataset=dataset(6, seed=2), data_collator=collate
    )
    trainer.train()
    best, after = trainer.state.best_metric, trainer.evaluate()["eval_loss"]
    assert abs(best - after) < 1e-6 * best, (best, after)
    assert trainer.state.best_model_checkpoint is not None
    return trainer.state.best_model_checkpoint, whole_state_dict(model), sorted(os.listdir(args.output_dir))


@pytest.mark.parametrize(("stage", "build"), [(1, loaded), (3, loaded), (3, gpt2), (0, loaded)])
def test_checkpoints_of_weights_and_the_best_of_them(
    stage: int, build: Callable[[str], nn.Module], folder: str
) -> None:
    (best, weights, files), other = run_ranks(keep_best, 2, folder, stage, build)
    assert other[0] == best
    assert files == ["checkpoint-2", "checkpoint-4"]
    assert best.endswith("checkpoint-2")
    saved = load_safetensors(f"{best}/model.safetensors")
    assert saved
    assert all(torch.equal(weights[name], value) for name, value in saved.items())
    assert not Path(best, "optimizer.pt").exists()


def load_safetensors(path: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


# ---- what is refused ------------------------------------------------------------------------------------------------


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@undone
def resume_what_is_whole(folder: str) -> list[float]:
    args = arguments(folder, 3, output_dir=f"{folder}/whole", save_strategy="steps", save_steps=2)
    losses = []
    for checkpoint in (None, f"{folder}/whole/checkpoint-2"):
        with zero.disabled():
            model = loaded(folder)
        trainer = Trainer(model=model, args=args, train_dataset=dataset(), data_collator=collate)
        trainer.train(resume_from_checkpoint=checkpoint)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1])
    return losses


@undone
def evaluate_in_bfloat16(folder: str, stage: int | None) -> float:
    args = arguments(folder, stage, bf16=True, bf16_full_eval=True)
    trainer = Trainer(model=loaded(folder), args=args, eval_dataset=dataset(), data_collator=collate)
    return float(trainer.evaluate()["eval_loss"])


def test_evaluation_in_bfloat16_computes_in_it(folder: str) -> None:
    assert run_ranks(evaluate_in_bfloat16, 2, folder, 3) == run_ranks(evaluate_in_bfloat16, 2, folder, None)


def test_a_model_left_whole_saves_and_resumes_as_ever(folder: str) -> None:
    for straight, resumed in run_ranks(resume_what_is_whole, 2, folder):
        assert straight == resumed


@undone
def refuse_combinations(folder: str) -> dict[str, tuple[str, str]]:
    config: Values = {"stage": 3, "collectives": COLLECTIVES}
    cases: dict[str, Values] = {
        "world_size": {"zero": config | {"expected_world_size": 4}},
        "fp16": {"bf16": True, "zero": config | {"compute_dtype": "float16"}},
        "fsdp": {"fsdp": "full_shard"},
        "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 2}}},
        "lomo": {"optim": "lomo"},
        "bf16_full_eval": {"bf16_full_eval": True},
        "fp16_full_eval": {"fp16_full_eval": True},
        "unknown_key": {"zero": config | {"prefetch_byte": 1}},
        "no_file": {"zero": f"{folder}/nothing.yaml"},
    }
    return {name: error_of(lambda values=values: arguments(folder, 3, **values)) for name, values in cases.items()}


def test_what_cannot_be_combined_is_a_config_error_on_all_ranks(folder: str) -> None:
    words = {
        "world_size": "expected_world_size is 4, but 2 processes run",
        "fp16": "compute_dtype is float16, but mixed precision is 'bf16'",
        "fsdp": "cannot be combined with fsdp or deepspeed",
        "deepspeed": "cannot be combined with fsdp or deepspeed",
        "lomo": "while the backward runs",
        "bf16_full_eval": "set bf16=True",
        "fp16_full_eval": "set fp16=True",
        "unknown_key": "did you mean 'prefetch_bytes'?",
        "no_file": "nothing.yaml",
    }
    first, second = run_ranks(refuse_combinations, 2, folder)
    assert first == second
    assert {name: kind for name, (kind, _) in first.items()} == dict.fromkeys(words, "ConfigError")
    assert {name: text for name, (_, text) in first.items() if words[name] not in text} == {}


# ---- the arguments themselves ---------------------------------------------------------------------------------------

CONFIG: Values = {"stage": 2, "prefetch_bytes": 1024, "collectives": COLLECTIVES}


@undone
def read_arguments(folder: str) -> dict[str, Any]:
    path = Path(folder, "zero2.yaml")
    path.write_text("".join(f"{key}: {value}\n" for key, value in CONFIG.items()))
    common = {"output_dir": f"{folder}/out", "use_cpu": True, "report_to": "none"}
    Path(folder, "args.yaml").write_text(
        f"output_dir: {folder}/out\nuse_cpu: true\nreport_to: none\nzero: {{stage: 2, prefetch_bytes: 1024, "
        f"collectives: {COLLECTIVES}}}\n"
    )
    Path(folder, "args.json").write_text(json.dumps(common | {"zero": str(path)}))
    parser = HfArgumentParser(zero.ZeroTrainingArguments)
    words = ["--output_dir", f"{folder}/out", "--use_cpu", "--report_to", "none", "--zero"]
    make = zero.ZeroTrainingArguments
    ways = {
        "dict": make(**common, zero=dict(CONFIG)),
        "path": make(**common, zero=str(path)),
        "inline": make(**common, zero=json.dumps(CONFIG)),
        "command_line_path": parser.parse_args_into_dataclasses([*words, str(path)])[0],
        "command_line_inline": parser.parse_args_into_dataclasses([*words, json.dumps(CONFIG)])[0],
        "parse_dict": parser.parse_dict(common | {"zero": dict(CONFIG)})[0],
        "parse_yaml": parser.parse_yaml_file(f"{folder}/args.yaml")[0],
        "parse_json": parser.parse_json_file(f"{folder}/args.json")[0],
    }
    args = ways["dict"]
    ways["pickle"] = pickle.loads(pickle.dumps(args))
    buffer = io.BytesIO()
    torch.save(args, buffer)
    buffer.seek(0)
    ways["torch_save"] = torch.load(buffer, weights_only=False)
    ways["deepcopy"] = copy.deepcopy(args)
    ways["replace"] = dataclasses.replace(args, learning_rate=0.5)
    os.environ["HF_ZERO_CONFIG"] = str(path)
    ways["variable"] = make(**common)
    del os.environ["HF_ZERO_CONFIG"]
    none = make(**common)
    return {
        "configs": {name: each.zero_config for name, each in ways.items()},
        "types": {type(each) for each in ways.values()},
        "to_dict": args.to_dict()["zero"],
        "to_json": json.loads(args.to_json_string())["zero"],
        "sanitized": args.to_sanitized_dict()["zero"],
        "has_no_config": "zero_config" not in args.to_dict(),
        "none": (none.zero_config, none.to_dict()["zero"]),
        "parent_fields": list(TrainingArguments._VALID_DICT_FIELDS),
    }


def test_arguments_are_read_from_everywhere(folder: str) -> None:
    found = run_alone(read_arguments, folder)
    wanted = zero.ZeroConfig(**CONFIG)
    assert {name for name, config in found["configs"].items() if config != wanted} == set()
    assert found["types"] == {zero.ZeroTrainingArguments}
    assert found["to_dict"] == found["to_json"] == CONFIG
    assert "stage" in str(found["sanitized"])
    assert found["has_no_config"]
    assert found["none"] == (None, None)
    assert "zero" not in found["parent_fields"]


def surface() -> dict[tuple[str, str, str], Any]:
    """Every attribute of every module and class of transformers and accelerate that is loaded."""
    found: dict[tuple[str, str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("transformers", "accelerate") or module is None:
            continue
        for key, value in list(vars(module).items()):
            if not isinstance(value, type):
                found[name, key, ""] = value
            elif value.__module__ == name:
                found.update({(name, key, inner): item for inner, item in vars(value).items()})
    return found


def is_changed(key: tuple[str, str, str], before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    is_cache = key[2] in ("__abstractmethods__", "_abc_impl", "__doc__", "__dict__", "__weakref__")
    return key in before and not is_cache and after.get(key) is not before[key] and callable_like(before[key])


def callable_like(value: Any) -> bool:
    return callable(value) or isinstance(value, (staticmethod, classmethod, property, functools.cached_property))


@undone
def patch_and_undo(folder: str) -> dict[str, Any]:
    loaded(folder)
    Trainer(model=loaded(folder), args=arguments(folder, None), train_dataset=dataset())
    before = surface()
    arguments(folder, None)
    none = zero.ZeroTrainingArguments(output_dir=folder, use_cpu=True, report_to="none")
    after_none = surface()
    args = arguments(folder, 3)
    once = surface()
    again = arguments(folder, 3)
    twice = surface()
    with zero.disabled():
        is_whole = not any(isinstance(param, DTensor) for param in loaded(folder).parameters())
    is_cut = all(isinstance(param, DTensor) for param in loaded(folder).parameters())
    zero.undo()
    undone_once = surface()
    zero.undo()
    is_whole_after = not any(isinstance(param, DTensor) for param in loaded(folder).parameters())
    assert none.zero_config is None and args.zero_config == again.zero_config
    changed = [key for key in before if is_changed(key, before, once)]
    return {
        "by_none": [key for key in before if is_changed(key, before, after_none)],
        "by_us": sorted({(key[1], key[2]) for key in changed}),
        "by_twice": [key for key in once if is_changed(key, once, twice)],
        "left": [key for key in before if is_changed(key, before, undone_once)],
        "scopes": (is_whole, is_cut, is_whole_after),
    }


def test_undo_puts_back_all_that_the_arguments_change(folder: str) -> None:
    for found in run_ranks(patch_and_undo, 2, folder):
        assert found["by_none"] == found["by_twice"] == found["left"] == []
        assert found["by_us"] == [
            ("PreTrainedModel", "_finalize_model_loading"),
            ("PreTrainedModel", "_from_config"),
            ("PreTrainedModel", "_load_pretrained_model"),
            ("Trainer", "__init__"),
            ("Trainer", "_load_best_model"),
            ("Trainer", "_load_from_checkpoint"),
            ("Trainer", "_load_optimizer_and_scheduler"),
            ("Trainer", "_load_rng_state"),
            ("Trainer", "_save"),
            ("Trainer", "_save_checkpoint"),
            ("Trainer", "_save_optimizer_and_scheduler"),
            ("Trainer", "call_model_init"),
            *([("Trainer", "save_model")] if compare_versions("transformers", "<", "5.23") else []),
            ("Trainer", "train"),
        ]
        assert found["scopes"] == (True, True, True)


DEEPSPEED: Values = {
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.25,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.02}},
}


@undone
def read_deepspeed(folder: str) -> dict[str, Any]:
    path = Path(folder, "deepspeed.json")
    path.write_text(json.dumps(DEEPSPEED))

    def make(**options: Any) -> TrainingArguments:
        common = {"output_dir": f"{folder}/out", "use_cpu": True, "report_to": "none"}
        return zero.ZeroTrainingArguments(**common, zero=str(path), **options)

    args = make()
    names = ("bf16", "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm")
    names += ("learning_rate", "weight_decay")
    return {
        "values": {name: getattr(args, name) for name in names},
        "stage": args.zero_config.stage,
        "dtype": args.zero_config.compute_dtype,
        "agrees": make(learning_rate=0.003, gradient_accumulation_steps=3).learning_rate,
        "buffers": [make(ddp_broadcast_buffers=each).zero_config.broadcast_buffers for each in (None, True, False)],
        "contradicts": error_of(lambda: make(learning_rate=0.1)),
    }


def test_a_deepspeed_file_sets_the_arguments_that_it_names(folder: str) -> None:
    found = run_alone(read_deepspeed, folder)
    assert found["values"] == {
        "bf16": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "max_grad_norm": 0.25,
        "learning_rate": 0.003,
        "weight_decay": 0.02,
    }
    assert (found["stage"], found["dtype"], found["agrees"]) == (2, "bfloat16", 0.003)
    assert found["buffers"] == [True, True, False]
    kind, text = found["contradicts"]
    assert kind == "ConfigError"
    assert "learning_rate is 0.003 in the DeepSpeed configuration but 0.1 in the arguments" in text


@undone
def train_alone(folder: str) -> tuple[list[float], list[float], bool]:
    losses = []
    for stage in (None, 3):
        args = arguments(folder, stage)
        trainer = Trainer(model=loaded(folder), args=args, train_dataset=dataset(), data_collator=collate)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return losses[0], losses[1], any(isinstance(param, DTensor) for param in trainer.model.parameters())


def test_one_process_trains_as_without_us(folder: str) -> None:
    plain, ours, is_cut = run_alone(train_alone, folder)
    assert (plain, is_cut) == (ours, False)
