"""A base of 4 bits with an adapter beside it (QLoRA): numbers for an engine, or the bytes that TRL hands over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import hf_zero as zero
from tests.checkpoint.handover.test_stream import assert_same, taken
from tests.engine.twins import SHARDED, whole
from tests.models import CASES, make_model
from tests.ranks import on_ranks

bitsandbytes: Any = pytest.importorskip("bitsandbytes.functional")
KINDS: dict[str, dict[str, Any]] = {
    "4bit": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "in_floats": {"bnb_4bit_quant_storage": torch.float32},
}


def adapted(folder: Path, kind: str) -> Any:
    config = BitsAndBytesConfig(load_in_4bit=True, **KINDS[kind])
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
    )
    torch.manual_seed(3)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=3,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        modules_to_save=["lm_head"],
    )
    return peft.get_peft_model(model, lora).train()  # in evaluation, bitsandbytes packs weights of some sizes only


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Packed bytes may be floats, of which some are no number."""
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def numbers(model: nn.Module, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the base without adapters would hold as numbers, computed in one process."""
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, module in model.get_base_model().named_modules():  # type: ignore[operator]
            base = getattr(module, "base_layer", module)
            weight = base._parameters.get("weight")
            if type(weight).__name__ != "Params4bit" or name.endswith(".base_layer"):
                continue
            value = bitsandbytes.dequantize_4bit(weight.data, weight.quant_state)
            found[f"{name}.weight"] = value + module.get_delta_weight("default") if base is not module else value
    saved = {name.partition("modules_to_save.default.")[2]: value for name, value in model.named_parameters()}
    head = {"lm_head.weight": saved["weight"].detach().clone()}
    return {name: value.clone() for name, value in start.items()} | found | head


@on_ranks(2, stage=SHARDED, kind=list(KINDS))
def test_numbers_are_those_of_one_process(stage: int, kind: str, tmp_path: Path) -> None:
    folder, start = saved_llama(tmp_path / f"{stage}{kind}")
    ours, reference = adapted(folder, kind), adapted(folder, kind)
    wanted = numbers(reference, start)
    zero.shard_model(ours, {"stage": stage, "collectives": "pairwise"})
    before = {name: whole(value).clone() for name, value in ours.named_parameters()}
    assert_same(taken(ours, bucket_bytes=3000), wanted)
    halves = taken(ours, bucket_bytes=3000, dtype=torch.bfloat16)
    assert_same(halves, {name: value.to(torch.bfloat16) for name, value in wanted.items()})
    assert all(same_bits(whole(value), before[name]) for name, value in ours.named_parameters())


@on_ranks(2, stage=SHARDED, kind=list(KINDS))
def test_bytes_are_those_that_peft_merges_in_one_process(stage: int, kind: str, tmp_path: Path) -> None:
    folder, _ = saved_llama(tmp_path / f"{stage}{kind}")
    ours, reference = adapted(folder, kind), adapted(folder, kind)
    zero.shard_model(ours, {"stage": stage, "collectives": "pairwise"})
    before = {name: whole(value).clone() for name, value in ours.named_parameters()}
    found = taken(ours, bucket_bytes=3000, names="model")
    assert all(same_bits(whole(value), before[name]) for name, value in ours.named_parameters())
    reference.merge_adapter()
    wanted = {}
    for name, param in reference.named_parameters():  # as TRL does
        short = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if reference.prefix not in short and "original_module" not in short:
            wanted[short.replace("modules_to_save.default.", "")] = param.data
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and same_bits(found[name], value), name


def saved_llama(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A Llama in a folder, and its weights."""
    model = make_model(CASES["llama"])
    if dist.get_rank() == 0:
        model.save_pretrained(folder)  # type: ignore[operator]
    dist.barrier()
    return folder, {name: value.detach().clone() for name, value in model.named_parameters()}
