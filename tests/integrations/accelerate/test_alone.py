"""What scripts do behind `if accelerator.is_main_process:`, and folders that differ between ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import hf_zero as zero
from tests.models import CASES, make_model
from tests.ranks import by_hand, on_ranks

CASE = CASES["llama"]


def prepared(
    stage: int, collectives: str, kind: str = "AdamW", **kwargs: Any
) -> tuple[zero.ZeroAccelerator, nn.Module, Any]:
    plugin = zero.ZeroPlugin(stage=stage, collectives=collectives)
    accelerator = zero.ZeroAccelerator(zero_plugin=plugin, **kwargs)
    model = make_model(CASE)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def step(accelerator: zero.ZeroAccelerator, model: nn.Module, optimizer: Any, number: int) -> float:
    loss = CASE.loss(model, CASE.batch(number, accelerator.process_index))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def tensors_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@on_ranks(2, stage=[1, 2, 3], collectives=["pairwise", "host"], kind=["AdamW", "Adafactor"])
def test_rank_0_saves_alone_while_others_go_on(stage: int, collectives: str, kind: str, tmp_path: Path) -> None:
    """State, model and weights; the state is that which all ranks save, and all ranks go on from it."""
    folder = tmp_path / f"{stage}{collectives}{kind}"
    accelerator, model, optimizer = prepared(stage, collectives, kind)
    for number in range(2):
        step(accelerator, model, optimizer, number)
    accelerator.save_state(str(folder / "together"))
    if accelerator.is_main_process:
        accelerator.save_state(str(folder / "alone"))
        accelerator.save_model(model, str(folder / "model"))
        accelerator.unwrap_model(model).save_pretrained(str(folder / "pretrained"))
        assert tensors_in(folder / "alone") == tensors_in(folder / "together")
        assert len(tensors_in(folder / "alone")) == 2
        names = {path.name for path in (folder / "together").iterdir()} - {"random_states_1.pkl"}
        assert {path.name for path in (folder / "alone").iterdir()} == names
        weights = load_file(folder / "together" / "model.safetensors")
        for name in ("model", "pretrained"):
            found = load_file(folder / name / "model.safetensors")
            assert all(torch.equal(found[key], value) for key, value in weights.items())
    losses = [step(accelerator, model, optimizer, number) for number in (2, 3)]  # the others are here
    accelerator.load_state(str(folder / "alone"))
    assert [step(accelerator, model, optimizer, number) for number in (2, 3)] == losses
    accelerator.wait_for_everyone()


@on_ranks(2, stage=[1, 3, *by_hand(2)], collectives=["pairwise", *by_hand("host")], optimizers=[1, 2])
def test_rank_0_saves_two_models_alone(stage: int, collectives: str, optimizers: int, tmp_path: Path) -> None:
    """As a script does that trains a text encoder, too: with one optimizer for both models, or one each."""
    folder = tmp_path / f"{stage}{collectives}{optimizers}"
    accelerator, model, optimizer = prepared(stage, collectives)
    other = make_model(CASES["gpt2"])
    if optimizers == 1:
        other = accelerator.prepare(other)
        optimizer = accelerator.prepare(torch.optim.AdamW([*model.parameters(), *other.parameters()], lr=0.01))
        accelerator._optimizers = [optimizer]
        steps = [optimizer]
    else:
        other, second = accelerator.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.01))
        steps = [optimizer, second]

    def train(number: int) -> float:
        batch = CASE.batch(number, accelerator.process_index)
        loss = CASE.loss(model, batch) + CASE.loss(other, batch)
        accelerator.backward(loss)
        for each in steps:
            each.step()
            each.zero_grad()
        return loss.item()

    for number in range(2):
        train(number)
    accelerator.save_state(str(folder / "together"))
    if accelerator.is_main_process:
        accelerator.save_state(str(folder / "alone"))
        assert tensors_in(folder / "alone") == tensors_in(folder / "together")
        assert len(tensors_in(folder / "alone")) == 2 + optimizers
    losses = [train(number) for number in (2, 3)]
    accelerator.load_state(str(folder / "alone"))
    assert [train(number) for number in (2, 3)] == losses
    accelerator.wait_for_everyone()


@on_ranks(2, stage=[1, 3])
def test_a_hook_of_save_state_saves_on_the_main_process_as_diffusers_scripts_do(stage: int, tmp_path: Path) -> None:
    folder = tmp_path / str(stage)
    accelerator, model, optimizer = prepared(stage, "auto")
    step(accelerator, model, optimizer, 0)

    def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            for each in models:
                accelerator.unwrap_model(each).save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()

    accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(str(folder / "state"))
    model.save_pretrained(folder / "together")
    wanted = load_file(folder / "together" / "model.safetensors")
    found = load_file(folder / "state" / "unet" / "model.safetensors")
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    accelerator.wait_for_everyone()


@on_ranks(2, stage=[1, 3, *by_hand(2)])
def test_folder_of_rank_0_counts_for_all(stage: int, tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(stage, "pairwise")
    step(accelerator, model, optimizer, 0)
    own = tmp_path / f"{stage} {dist.get_rank()}"
    model.save_pretrained(own / "weights")
    accelerator.save_state(str(own / "state"))
    accelerator.wait_for_everyone()
    assert not (tmp_path / f"{stage} 1").exists()
    first = tmp_path / f"{stage} 0"
    weights = load_file(first / "weights" / "model.safetensors")
    wanted = accelerator.get_state_dict(model)
    assert all(torch.equal(wanted[key], value) for key, value in weights.items())
    loss = step(accelerator, model, optimizer, 1)
    accelerator.load_state(str(first / "state"))
    assert step(accelerator, model, optimizer, 1) == loss
