"""Several adapters of one partitioned model: trained in turn, combined, removed, saved in folders of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.integrations.test_peft_methods import logits, trained, values
from tests.models import CASES, make_model
from tests.ranks import by_hand, on_ranks, run_alone, run_ranks

LLAMA = CASES["llama"]
Partition = Callable[[nn.Module], object]


def lora(r: int = 3, **options: object) -> peft.LoraConfig:
    return peft.LoraConfig(r=r, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian", **options)


def base_of(stage: int | None) -> nn.Module:
    if stage is None:
        return make_model(LLAMA)
    with zero.Init({"stage": stage, "collectives": "pairwise"}):
        return make_model(LLAMA)


def partition(model: nn.Module, stage: int | None) -> None:
    if stage is not None:
        zero.shard_model(model)


def ranks_of(stage: int | None) -> list[int]:
    return [0, 1] if stage is None else [dist.get_rank()]


def train_in_turn(stage: int | None) -> nn.Module:
    torch.manual_seed(0)
    base = base_of(stage)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, lora())
    partition(model, stage)
    trained(model, LLAMA, ranks_of(stage))
    torch.manual_seed(2)
    model.add_adapter("second", lora(5, use_dora=True))
    model.set_adapter("second")
    partition(model, stage)
    trained(model, LLAMA, ranks_of(stage))
    torch.manual_seed(3)
    model.add_adapter("third", lora(5))
    model.set_adapter("default")
    partition(model, stage)
    trained(model, LLAMA, ranks_of(stage))
    return model


def same(ours: nn.Module, reference: nn.Module) -> None:
    found, expected = values(ours), values(reference)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2, stage=[3, *by_hand(1)])
def test_adapters_are_trained_in_turn_combined_and_removed(stage: int) -> None:
    ours, reference = train_in_turn(stage), train_in_turn(None)
    same(ours, reference)
    for model in (ours, reference):
        model.add_weighted_adapter(["default", "third"], [0.7, 0.4], "both", combination_type="svd", svd_rank=4)
        model.add_weighted_adapter(["default", "third"], [0.7, 0.4], "joined", combination_type="cat")
        model.set_adapter("both")
        partition(model, stage if model is ours else None)
    same(ours, reference)
    torch.testing.assert_close(logits(ours, LLAMA), logits(reference, LLAMA), rtol=0, atol=1e-6)
    for model in (ours, reference):
        model.train()
        model.delete_adapter("default")
        model.set_adapter("joined")
    torch.testing.assert_close(logits(ours, LLAMA), logits(reference, LLAMA), rtol=0, atol=1e-6)
    for model in (ours, reference):
        model.merge_adapter(["joined"])
    same(ours, reference)
    for model in (ours, reference):
        model.unmerge_adapter()
        with model.disable_adapter(), torch.no_grad():
            model(**LLAMA.batch(0, 0))
    same(ours, reference)
    left, right = ours.merge_and_unload(adapter_names=["both"]), reference.merge_and_unload(adapter_names=["both"])
    torch.testing.assert_close(logits(left, LLAMA), logits(right, LLAMA), rtol=0, atol=1e-6)


def save_several(stage: int | None, folder: str) -> Tensor:
    model = train_in_turn(stage)
    model.save_pretrained(folder)
    return logits(model, LLAMA)


def load_several(stage: int | None, folder: str) -> Tensor:
    model = peft.PeftModel.from_pretrained(base_of(stage), folder)
    model.load_adapter(f"{folder}/second", "second")
    model.load_adapter(f"{folder}/third", "third")
    model.set_adapter("third")
    logits(model, LLAMA)
    model.set_adapter("default")
    return logits(model, LLAMA)


def test_adapters_are_saved_in_folders_of_their_own(tmp_path: Path) -> None:
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    expected = run_alone(save_several, None, str(plain))
    found = run_ranks(save_several, 2, 3, str(ours))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    names = sorted(str(path.relative_to(plain)) for path in plain.rglob("adapter_model.safetensors"))
    assert names == sorted(str(path.relative_to(ours)) for path in ours.rglob("adapter_model.safetensors"))
    assert len(names) == 3
    for each in (run_alone(load_several, None, str(ours)), run_ranks(load_several, 2, 3, str(ours))[1]):
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-6)


def adalora(stage: int | None) -> tuple[nn.Module, dict[str, object]]:
    config = peft.AdaLoraConfig(
        target_modules=["q_proj", "v_proj"], init_r=4, target_r=2, total_step=6, tinit=1, tfinal=2, deltaT=1
    )
    base = base_of(stage)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, config)
    partition(model, stage)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    for step in range(6):
        optimizer.zero_grad()
        losses = [LLAMA.loss(model, LLAMA.batch(step, rank)) for rank in ranks_of(stage)]
        (torch.stack(losses).sum() / len(losses)).backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)
    return model, model.peft_config["default"].rank_pattern


@on_ranks(2, stage=[1, *by_hand(3)])
def test_adalora_allocates_ranks_by_whole_gradients(stage: int) -> None:
    (ours, pattern), (reference, expected) = adalora(stage), adalora(None)
    assert pattern == expected
    same(ours, reference)


def xlora(stage: int | None, folder: str) -> nn.Module:
    base = base_of(stage)
    torch.manual_seed(1)
    config = peft.XLoraConfig(
        task_type="CAUSAL_LM",
        hidden_size=16,
        adapters={"0": folder, "1": f"{folder}/third"},
        use_trainable_adapters=True,
    )
    model = peft.get_peft_model(base, config)
    partition(model, stage)
    return model


@on_ranks(2)
def _train_xlora(stage: int, folder: str) -> None:
    ours, reference = xlora(stage, folder), xlora(None, folder)
    trained(ours, LLAMA, ranks_of(stage))
    trained(reference, LLAMA, [0, 1])
    same(ours, reference)


def test_mixture_of_adapters(tmp_path: Path) -> None:
    run_alone(save_several, None, str(tmp_path))
    _train_xlora(stage=3, folder=str(tmp_path))
