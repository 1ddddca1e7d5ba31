"""ZeRO under the plain Trainer, against plain DDP with the same seed and data."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.integrations.trainer import arguments as ours
from hf_zero.integrations.trainer.arguments import ZeroCallback
from tests.integrations.trainer.runs import (
    COLLECTIVES,
    Build,
    Values,
    arguments,
    collate,
    dataset,
    from_config,
    gpt2,
    loaded,
    logged,
    plain_module,
    t5,
    trained,
    trainer_of,
    undone,
    with_adapters,
    with_dropout,
)
from tests.models import CASES, make_model
from tests.ranks import EVERY_TURN, by_hand, on_ranks


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
    build: Build = loaded
    options: Values = field(default_factory=dict)
    num_rows: int = 16
    tolerance: float = 2e-6
    weight_tolerance: float | None = 1e-5

    @property
    def everyday_stages(self) -> tuple[int, ...]:
        """One of them, which differs from scenario to scenario; by hand all."""
        if os.environ.get(EVERY_TURN):
            return self.stages
        return (self.stages[zlib.crc32(self.name.encode()) % len(self.stages)],)


# Compute in bfloat16 against autocast, which keeps norms and the residual stream in fp32: 8 bits of mantissa.
BF16: Values = {"tolerance": 5e-3, "weight_tolerance": None}

SCENARIOS = [
    Scenario("basic", (0, 1, 2, 3)),
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
    Scenario("sgd_no_clipping", (1, 2, 3), options={"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0}),
    Scenario(
        "checkpointing_not_reentrant",
        options={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    Scenario("adapters", (0, 2, 3), with_adapters),
    Scenario("neftune", options={"neftune_noise_alpha": 5.0}),
    Scenario("auto_find_batch_size", (3,), options={"auto_find_batch_size": True}),
    Scenario("plain_module", (0, 1, 2, 3), plain_module),
    Scenario("tied", (0, 2, 3), gpt2, {"optim": "sgd", "learning_rate": 0.3}),
    Scenario("bf16", (1, 2, 3), options={"bf16": True}, **BF16),
    *by_hand(
        Scenario("no_clipping", (1, 2, 3), options={"max_grad_norm": 0.0}),
        Scenario("encoder_decoder", (3,), t5, {"optim": "sgd", "learning_rate": 0.3}),
        Scenario("from_config", (0, 3), from_config),
        Scenario("adamw_torch", options={"optim": "adamw_torch"}),
        Scenario(
            "checkpointing_reentrant",
            options={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        ),
        Scenario(
            "adapters_checkpointing",
            (3,),
            with_adapters,
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        ),
        Scenario("label_smoothing", options={"label_smoothing_factor": 0.1}),
        Scenario(
            "compiled_eager",
            (3,),
            plain_module,
            {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2},
        ),
        Scenario("bf16_of_ddp", (0,), options={"bf16": True}),
        Scenario("checkpointing_bf16", (3,), options={"bf16": True, "gradient_checkpointing": True}, **BF16),
    ),
]


@dataclass
class Outcome:
    """What a training left on a rank."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    wrapper: str


def train(scenario: Scenario, folder: str, stage: int | None) -> Outcome:
    args = arguments(folder, stage, **{"max_steps": 3, **scenario.options})
    torch.manual_seed(3)
    model = scenario.build(folder)
    trainer = trainer_of(model, args, train_dataset=dataset(scenario.num_rows), callbacks=[])
    losses = trained(trainer)
    weights = {name: value.clone() for name, value in whole_state_dict(model).items()}
    weights = {name: value for name, value in weights.items() if name.split(".")[-1] != "inv_freq"}
    wrapper = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
    return Outcome(losses, logged(trainer, "grad_norm"), weights, type(wrapper).__name__)


def worst(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(left, right, strict=True))


def furthest(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest difference of two sets of weights, relative to the largest weight of its parameter."""
    assert weights.keys() == others.keys()
    pairs = [(value.double(), others[name].double()) for name, value in weights.items()]
    return max(((left - right).abs().max() / right.abs().max().clamp_min(1e-12)).item() for left, right in pairs)


@on_ranks(2, scenario=SCENARIOS)
@undone
def test_training_equals_ddp(scenario: Scenario, folder: str) -> None:
    oracle = train(scenario, folder, None)
    assert oracle.wrapper == "DistributedDataParallel"
    for stage in scenario.everyday_stages:
        found = train(scenario, folder, stage)
        assert found.wrapper != "DistributedDataParallel", stage
        loss, norm = worst(found.losses, oracle.losses), worst(found.norms, oracle.norms)
        weight = furthest(found.weights, oracle.weights)
        assert loss <= scenario.tolerance, (stage, loss, found.losses, oracle.losses)
        assert norm <= 10 * scenario.tolerance, (stage, norm, found.norms, oracle.norms)
        assert scenario.weight_tolerance is None or weight <= scenario.weight_tolerance, (stage, weight)


@on_ranks(1, stage=[1, 3])
@undone
def test_one_launched_rank_adds_up_micro_batches_in_half_precision(folder: str, stage: int) -> None:
    scenario = Scenario("one", options={"gradient_accumulation_steps": 2, "bf16": True})
    oracle, found = train(scenario, folder, None), train(scenario, folder, stage)
    assert (oracle.wrapper == "DistributedDataParallel") > (found.wrapper == "DistributedDataParallel")
    assert worst(found.norms, oracle.norms) <= 10 * BF16["tolerance"], (found.norms, oracle.norms)


@on_ranks(2)
@undone
def test_bf16_computes_in_bfloat16_on_fp32_masters(folder: str) -> None:
    args = arguments(folder, 3, bf16=True, use_cpu=torch.accelerator.is_available())  # else found out by itself
    assert args.zero_config.compute_dtype == "bfloat16"
    model = loaded(folder)
    seen = []
    layer = model.model.layers[0].mlp
    layer.register_forward_hook(lambda module, args, output: seen.append(module.up_proj.weight.dtype))
    trainer = trainer_of(model, args)
    trainer.train()
    assert seen[0] == torch.bfloat16
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    states = [value for state in trainer.optimizer.state.values() for value in state.values() if value.ndim]
    assert {state.dtype for state in states} == {torch.float32}
    assert all(isinstance(state, DTensor) for state in states)


class Overflowing(Trainer):
    """Rank 1 has an infinite loss in the second step."""

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        loss = super().compute_loss(*given, **named)
        return loss * (float("inf") if (self.state.global_step, dist.get_rank()) == (1, 1) else 1.0)


class WatchScale(TrainerCallback):
    """Takes down the loss scale after every step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.scales: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.scales.append(self.trainer.accelerator.scaler.get_scale())


@on_ranks(2, stage=[1, 3])
@undone
def test_fp16_scales_the_loss_skips_on_all_ranks_and_resumes_with_its_scale(stage: int, folder: str) -> None:
    """With an overflow at the second step, and again from a checkpoint after the third."""
    half = {"stage": stage, "collectives": COLLECTIVES, "compute_dtype": "float16"}
    half["loss_scale"] = {"initial": 1024, "window": 2}
    out = f"{folder}/half{stage}"
    args = arguments(folder, stage, zero=half, max_steps=6, output_dir=out, save_strategy="steps", save_steps=3)
    assert (args.fp16, args.zero_config.compute_dtype) == (True, "float16")
    runs = []
    for checkpoint in (None, f"{out}/checkpoint-3"):
        watch = WatchScale()
        watch.trainer = trainer_of(loaded(folder), args, Overflowing, callbacks=[watch])
        losses = trained(watch.trainer, resume_from_checkpoint=checkpoint)
        runs.append((watch.scales, losses, logged(watch.trainer, "grad_norm")))
    (scales, losses, norms), (scales_again, losses_again, norms_again) = runs
    assert scales == [1024.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0]
    assert scales_again == scales[3:]
    assert losses_again[-3:] == losses[3:] and norms_again[-3:] == norms[3:]
    assert not math.isfinite(norms[1]) and max(norms[2:]) < 100


@on_ranks(2)
@undone
def test_bfloat16_model_gets_fp32_masters(folder: str) -> None:
    """Steps of 1e-4 on weights of 1e-2 would be lost in bfloat16 itself."""
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        args = arguments(folder, 3, max_steps=8, learning_rate=1e-4)
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/llama", dtype=dtype)
        losses[dtype] = trained(trainer_of(model, args))
        assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert worst(losses[torch.bfloat16], losses[torch.float32]) < 5e-3


@on_ranks(2, stage=[0, 1, 2])
@undone
def test_gradients_are_reduced_once_a_step_or_once_a_micro_batch(stage: int, folder: str) -> None:
    """The Trainer finds `no_sync`; and in stage 0 it leaves the averaging of plain parameters to the engine."""
    num_bytes = []
    for micro_batches in (1, 4):
        args = arguments(folder, stage, gradient_accumulation_steps=micro_batches, max_steps=1, max_grad_norm=0.0)
        model = loaded(folder)
        trainer = trainer_of(model, args)
        ledger = zero.engine_of(model).world.ledger
        ledger.reset()
        trainer.train()
        num_bytes.append(sum(ledger.total(kind).bytes for kind in ("reduce_scatter", "all_reduce")))
    once, accumulated = num_bytes
    assert once > 0
    assert accumulated == once * (4 if stage == 2 else 1)
    if stage == 0:
        assert {len(param._post_accumulate_grad_hooks or ()) for param in model.parameters()} == {1}


# ---- other ways to a Trainer ----------------------------------------------------------------------------------------


class CustomTrainer(Trainer):
    """With arguments of its own, as TRL's trainers have."""

    def __init__(self, model: nn.Module, beta: float, *args: Any, **kwargs: Any) -> None:
        self.beta = beta
        super().__init__(model, *args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * self.beta


def made_quietly() -> nn.Module:
    with torch.random.fork_rng():  # the Trainer has set the seed for the order of its data
        return make_model(CASES["llama"])


def own_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@contextmanager
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


def trained_by_us(trainer: Trainer) -> list[float]:
    losses = trained(trainer)
    assert type(trainer.model_wrapped).__name__ != "DistributedDataParallel"
    return losses


@on_ranks(2)
@undone
def test_every_way_to_a_trainer_gives_the_same_training(folder: str) -> None:
    found: dict[str, list[float]] = {}

    def train(name: str, model: nn.Module | None, **options: Any) -> None:
        found[name] = trained_by_us(trainer_of(model, args, **options))

    with warnings_of("hf_zero.integrations.trainer.arguments") as messages:
        args = arguments(folder, 3, max_steps=2)
        train("usual", loaded(folder))
        assert messages == []
        train("late", make_model(CASES["llama"]))
        assert messages == []  # it is small
        with mock.patch.object(ours, "_LARGE_BYTES", 1):
            train("late and large", make_model(CASES["llama"]))
        assert ["every rank has held all of Llama" in each for each in messages] == [True][dist.get_rank() :]
    found["positional"] = trained_by_us(CustomTrainer(loaded(folder), 1.0, args, collate, dataset()))
    train("model_init", None, model_init=lambda: loaded(folder))
    train("model_init late", None, model_init=made_quietly)
    for name, model in (("optimizer", loaded(folder)), ("optimizer late", make_model(CASES["llama"]))):
        train(name, model, optimizers=(own_optimizer(model), None))
    zero.undo()
    config = {"stage": 3, "collectives": COLLECTIVES}
    args = arguments(folder, None, max_steps=2)
    with zero.Init(config):
        model = loaded(folder)
    train("callback", model, callbacks=[ZeroCallback()])
    model = make_model(CASES["llama"])
    train("callback with a configuration", model, callbacks=[ZeroCallback(config)])
    assert all(isinstance(param, DTensor) for param in model.parameters())
    for name, losses in found.items():
        # A user's optimizer also decays biases and norms.
        assert worst(losses, found["usual"]) < (1e-3 if "optimizer" in name else 2e-6), name
    assert found["optimizer"] == pytest.approx(found["optimizer late"], rel=2e-6)


@on_ranks(2)
@undone
def test_what_is_not_ours_trains_under_ddp(folder: str) -> None:
    """Models and Trainers that hf_zero must leave alone, in a process where it is active."""
    usual: list[float] = []

    def check(name: str, model: nn.Module, args: Any, *, may_have_callback: bool = False) -> None:
        trainer = trainer_of(model, args)
        has_callback = any(isinstance(each, ZeroCallback) for each in trainer.callback_handler.callbacks)
        assert may_have_callback or not has_callback, name
        losses = trained(trainer)
        usual[:] = usual or losses
        assert losses == usual, name
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel", name
        assert not any(isinstance(param, DTensor) for param in model.parameters()), name

    plain = arguments(folder, None, max_steps=2)
    check("untouched", loaded(folder), plain)
    args = arguments(folder, 3, max_steps=2)
    check("plain arguments", make_model(CASES["llama"]), plain)
    with zero.disabled():
        model = loaded(folder)
    check("disabled", model, args, may_have_callback=True)
    check("leave_whole", zero.leave_whole(make_model(CASES["llama"])), args, may_have_callback=True)
    zero.undo()
    check("undone", loaded(folder), args)
    values = {entry.name: getattr(plain, entry.name) for entry in dataclasses.fields(plain) if entry.init}
    check("none", loaded(folder), zero.ZeroTrainingArguments(**values, zero=None))


# ---- evaluation and generation --------------------------------------------------------------------------------------


def evaluate(folder: str, stage: int | None, **options: Any) -> dict[str, Any]:
    args = arguments(folder, stage, **options)
    held_out = dataset(7, seed=9)
    trainer = trainer_of(loaded(folder), args, eval_dataset=held_out)
    results: dict[str, Any] = {"before": trainer.evaluate()["eval_loss"]}
    if stage is None:  # a plain Trainer that has evaluated is never wrapped in DDP any more
        trainer = trainer_of(loaded(folder), args, eval_dataset=held_out)
    results["losses"] = trained(trainer)
    results["during"] = logged(trainer, "eval_loss")[-2:]
    results["after"] = trainer.evaluate()["eval_loss"]
    results["predictions"] = torch.from_numpy(trainer.predict(held_out).predictions)
    return results


@on_ranks(2)
@undone
def test_evaluation_before_during_and_after_training_equals_ddp(folder: str) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2}
    oracle = evaluate(folder, None, **options)
    predictions = oracle.pop("predictions")
    assert len(oracle["during"]) == 2
    for stage in (0, 1, 3):
        found = evaluate(folder, stage, **options)
        torch.testing.assert_close(found["predictions"], predictions, rtol=1e-4, atol=1e-5)
        for name, value in oracle.items():
            assert found[name] == pytest.approx(value, rel=1e-6 if name == "before" else 2e-6), (stage, name)


@on_ranks(2)
@undone
def test_evaluation_in_bfloat16_is_close_to_autocast(folder: str) -> None:
    oracle, found = evaluate(folder, None, bf16=True), evaluate(folder, 3, bf16=True)
    assert evaluate(folder, 0, bf16=True)["after"] == oracle["after"]
    assert found["before"] == pytest.approx(oracle["before"], rel=2e-3)
    assert found["after"] == pytest.approx(oracle["after"], rel=5e-3)


@on_ranks(2)
@undone
def test_evaluation_under_bf16_full_eval_computes_in_it(folder: str) -> None:
    losses = []
    for stage in (None, 0, 3):
        args = arguments(folder, stage, bf16=True, bf16_full_eval=True)
        losses.append(trainer_of(loaded(folder), args, eval_dataset=dataset()).evaluate()["eval_loss"])
    assert losses[0] == losses[1] == losses[2]


@dataclass
class ZeroSeq2SeqArguments(zero.ZeroTrainingArguments, Seq2SeqTrainingArguments):
    """Both kinds of arguments in one."""


def translations(num_rows: int) -> list[dict[str, list[int]]]:
    rows = dataset(num_rows, seed=4)
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"][:3] + [1] * 2} for row in rows]


def predict(folder: str, stage: int | None) -> tuple[list[float], Tensor]:
    """The losses of a training, and what the model generates afterwards."""
    options: Values = {"predict_with_generate": True, "per_device_eval_batch_size": 1}
    kind = Seq2SeqTrainingArguments if stage is None else ZeroSeq2SeqArguments
    args = arguments(folder, stage, kind, learning_rate=0.3, optim="sgd", max_steps=2, **options)
    model = transformers.T5ForConditionalGeneration.from_pretrained(f"{folder}/t5")
    trainer = trainer_of(model, args, Seq2SeqTrainer, train_dataset=translations(16))
    losses = trained(trainer)
    return losses, torch.from_numpy(trainer.predict(translations(5), max_new_tokens=5, do_sample=False).predictions)


@on_ranks(2)
@undone
def test_generation_with_other_lengths_on_each_rank_equals_plain(folder: str) -> None:
    losses, predicted = predict(folder, None)
    for stage in (1, 3):
        found_losses, found = predict(folder, stage)
        assert found_losses == pytest.approx(losses, rel=1e-5), stage
        assert torch.equal(found, predicted), stage
    zero.undo()
    rank = dist.get_rank()
    ids, length = torch.full((1, 3 + 2 * rank), 5), 3 + 4 * rank
    steps = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    oracle = loaded(folder).eval().generate(ids, **steps)
    assert oracle.shape[1] == 6 + 6 * rank
    for stage in (2, 3):
        arguments(folder, stage)
        model = loaded(folder).eval()
        assert torch.equal(model.generate(ids, **steps), oracle), stage
        if stage == 2 and rank == 0:  # every rank has whole parameters, so one may generate alone
            assert torch.equal(model.generate(ids, **steps), oracle)
