"""Adapters of PEFT under the plain Trainer: trained, saved, resumed on other numbers of ranks, loaded by plain PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, Trainer

import hf_zero as zero
from tests.integrations.adapters import METHODS, adapted
from tests.integrations.test_peft_methods import logits, values
from tests.integrations.trainer.runs import arguments, collate, dataset, undone
from tests.models import CASES, make_model
from tests.ranks import run_alone, run_ranks

_LOADER = {
    "llama": AutoModelForCausalLM,
    "gpt2": AutoModelForCausalLM,
    "mixtral": AutoModelForCausalLM,
    "bert": AutoModelForSequenceClassification,
    "t5": AutoModelForSeq2SeqLM,
}
# PEFT saves what the encoder of a prompt makes, not the encoder: training cannot go on from that, under DDP either.
ENCODED = {"p_tuning", "prefix_projection"}
# Their losses are means of a rank's batch; those of T5 over tokens, of which ranks have different numbers.
MEANS = {"bert", "t5"}
SEVERAL = "several"  # a second adapter beside the default one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("adapters")
    for name in _LOADER:
        make_model(CASES[name]).save_pretrained(path / name)
    return str(path)


def case_of(name: str) -> str:
    return "llama" if name == SEVERAL else METHODS[name].case


def rows(case: str) -> list[dict[str, Any]]:
    return [{**row, "labels": i % 3} for i, row in enumerate(dataset())] if case == "bert" else dataset()


def collated(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    if isinstance(batch[0]["labels"], list):
        return collate(batch)
    found = collate([{**row, "labels": row["input_ids"]} for row in batch])
    return {**found, "labels": torch.tensor([row["labels"] for row in batch])}


def base_of(name: str, folder: str) -> nn.Module:
    return _LOADER[case_of(name)].from_pretrained(f"{folder}/{case_of(name)}")


def with_adapter(name: str, folder: str) -> nn.Module:
    torch.manual_seed(3)
    if name != SEVERAL:
        return adapted(name, base_of(name, folder))
    model = adapted("lora", base_of(name, folder))
    model.add_adapter("second", METHODS["dora"].config())
    model.set_adapter("second")
    return model


def make_trainer(name: str, way: str, folder: str, stage: int | None, **options: Any) -> Trainer:
    """A Trainer of a model made before its arguments (so whole), or after them."""
    before = None
    if way == "before":
        with zero.disabled():
            before = with_adapter(name, folder)
    if case_of(name) in MEANS:
        options["average_tokens_across_devices"] = False  # it multiplies their losses by the number of ranks
    args = arguments(folder, stage, weight_decay=0.0, **options)
    model = before if before is not None else with_adapter(name, folder)
    return Trainer(model=model, args=args, train_dataset=rows(case_of(name)), data_collator=collated)


def numbers(trainer: Trainer, since: int = 0) -> list[tuple[float, float]]:
    """Losses and norms of the steps after `since`."""
    return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e and e["step"] > since]


Outcome = tuple[list[tuple[float, float]], dict[str, Tensor]]


@undone
def train(name: str, way: str, folder: str, stage: int | None, out: str) -> Outcome:
    trainer = make_trainer(name, way, folder, stage, output_dir=out, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model(f"{out}/final")
    return numbers(trainer), values(trainer.model)


@undone
def go_on(name: str, way: str, folder: str, stage: int | None, out: str, size: int) -> Outcome:
    trainer = make_trainer(name, way, folder, stage, output_dir=out, per_device_train_batch_size=size)
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-2")
    return numbers(trainer, since=2), values(trainer.model)


def load(name: str, folder: str, adapter: str) -> Tensor:
    model = peft.PeftModel.from_pretrained(base_of(name, folder), adapter)
    if name == SEVERAL:
        model.load_adapter(f"{adapter}/second", "second")
        model.set_adapter("second")
    return logits(model, CASES[case_of(name)])


def same(ours: Outcome, reference: Outcome, tolerance: float = 2e-6) -> None:
    """Norms add up squares in another order than DDP's, and clipping carries that into the weights."""
    assert ours[0] == [pytest.approx(step, rel=tolerance, abs=1e-8) for step in reference[0]]
    assert ours[1].keys() == reference[1].keys()
    for name, value in reference[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


CHOSEN = [("token_indices", "after", 3), ("prompt_tuning", "after", 3), (SEVERAL, "after", 3)]
EVERY = [
    pytest.param(name, way, stage, marks=pytest.mark.slow)
    for name in [*METHODS, SEVERAL]
    for way, stage in [("before", 1), ("before", 3), ("after", 1), ("after", 2), ("after", 3)]
]


@pytest.mark.parametrize(("name", "way", "stage"), [*CHOSEN, *EVERY])
def test_training_saving_and_going_on_equal_those_of_ddp(
    name: str, way: str, stage: int, folder: str, tmp_path: Path
) -> None:
    plain, ours = str(tmp_path / "ddp"), str(tmp_path / "zero")
    expected = run_ranks(train, 2, name, "after", folder, None, plain)[0]
    for found in run_ranks(train, 2, name, way, folder, stage, ours):
        same(found, expected)
    if name != "pissa_niter":
        saved = [run_alone(load, name, folder, f"{out}/final") for out in (plain, ours)]
        torch.testing.assert_close(*saved, rtol=0, atol=1e-5)
    if name not in ENCODED:
        rest = expected[0][2:], expected[1]
        for num_ranks in (2,) if case_of(name) == "t5" else (2, 1):
            same(run_ranks(go_on, num_ranks, name, way, folder, stage, ours, 4 // num_ranks)[0], rest, 1e-5)
