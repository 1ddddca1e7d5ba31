"""Adapters on a partitioned model: what PEFT makes, merges and writes is what it is on the plain one."""

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

import hf_zero as zero
from tests.integrations.test_peft_methods import logits, trained, values
from tests.models import CASES, make_model
from tests.ranks import by_hand, on_ranks, run_alone, run_ranks


def _lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian", **options)


def _with_lora() -> nn.Module:
    return get_peft_model(make_model(CASES["llama"]), _lora())


def _with_resized_embeddings() -> nn.Module:
    model = make_model(CASES["llama"])
    model.resize_token_embeddings(model.config.vocab_size + 3)
    return get_peft_model(model, _lora())


def _with_a_second_frozen_adapter() -> nn.Module:
    model = get_peft_model(make_model(CASES["llama"]), _lora())
    model.add_adapter("second", LoraConfig(r=5, target_modules=["q_proj"], init_lora_weights="gaussian"))
    return model


def _on_embeddings() -> nn.Module:
    return get_peft_model(make_model(CASES["llama"]), LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]))


def _with_saved_modules() -> nn.Module:
    return get_peft_model(make_model(CASES["llama"]), _lora(modules_to_save=["lm_head"]))


_MODELS = [_with_lora, _with_resized_embeddings, _with_a_second_frozen_adapter, _on_embeddings, _with_saved_modules]


def _save(folder: Path, stage: int | None) -> None:
    for make in _MODELS:
        torch.manual_seed(0)
        model = make()
        if stage is not None:
            zero.shard_model(model, {"stage": stage})
        model.save_pretrained(folder / make.__name__, save_embedding_layers="auto")


@on_ranks(2, stage=[3, *by_hand(1)])
def test_saved_adapters_are_byte_for_byte_those_of_the_plain_model(stage: int, tmp_path: Path) -> None:
    plain, ours = tmp_path / f"plain{stage}", tmp_path / f"ours{stage}"
    if dist.get_rank() == 0:
        _save(plain, None)
    _save(ours, stage)
    dist.barrier()
    for make in _MODELS:
        files = sorted(path.relative_to(plain) for path in (plain / make.__name__).rglob("*.safetensors"))
        assert files == sorted(path.relative_to(ours) for path in (ours / make.__name__).rglob("*.safetensors"))
        assert files, make.__name__
        for file in files:
            assert (plain / file).read_bytes() == (ours / file).read_bytes(), file
            assert load_file(ours / file).keys()


def _merged(model: nn.Module) -> dict[str, Tensor]:
    for name, param in model.named_parameters():
        if "ia3" in name:
            param.data.mul_(1.5)
    assert isinstance(model, PeftModel)
    model.merge_adapter()
    return values(model)


def _ia3() -> nn.Module:
    return get_peft_model(
        make_model(CASES["llama"]),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    )


@on_ranks(2, stage=[1, 3])
def test_merging_ia3_into_the_rows_is_merging_it_into_the_whole(stage: int) -> None:
    plain, ours = _ia3(), _ia3()
    ours.load_state_dict(plain.state_dict())
    zero.shard_model(ours, {"stage": stage})
    _same(_merged(ours), _merged(plain))


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(left[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def _adapters_of_kind(kind: str, model: nn.Module) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=kind))


@on_ranks(2, kind=["olora", "pissa"])
def test_initialisations_that_need_whole_weights_work_inside_gathered_parameters(kind: str) -> None:
    torch.manual_seed(0)
    plain, ours = make_model(CASES["llama"]), make_model(CASES["llama"])
    ours.load_state_dict(plain.state_dict())
    zero.shard_model(ours, {"stage": 3})
    with zero.GatheredParameters(ours):
        adapted = _adapters_of_kind(kind, ours)
    reference = _adapters_of_kind(kind, plain)
    zero.shard_model(adapted, {"stage": 3})
    ids = CASES["llama"].batch(0, 0)
    with torch.no_grad():
        torch.testing.assert_close(adapted(**ids).logits, reference(**ids).logits, rtol=1e-4, atol=1e-4)


def _pissa(stage: int | None, folder: str) -> Tensor:
    base = make_model(CASES["llama"])
    if stage is not None:
        zero.shard_model(base, {"stage": stage})
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    model = get_peft_model(base, config)
    config.init_lora_weights = True
    model.save_pretrained(f"{folder}/first")
    config.init_lora_weights = "pissa"
    if stage is not None:
        zero.shard_model(model)
    trained(model, CASES["llama"], [0, 1])  # the same on all ranks
    model.save_pretrained(f"{folder}/converted", path_initial_model_for_weight_conversion=f"{folder}/first")
    return logits(model, CASES["llama"])


def _logits_with(folder: str) -> Tensor:
    return logits(PeftModel.from_pretrained(make_model(CASES["llama"]), folder), CASES["llama"])


def test_pissa_is_saved_as_a_lora_of_the_model_as_it_was(tmp_path: Path) -> None:
    expected = run_alone(_pissa, None, str(tmp_path / "plain"))
    found = run_ranks(_pissa, 2, 3, str(tmp_path / "ours"))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(_logits_with(f"{tmp_path}/ours/converted"), expected, rtol=0, atol=1e-6)


def _loaded_late(stage: int | None, folder: Path) -> Tensor:
    base = make_model(CASES["llama"])
    if stage is not None:
        zero.shard_model(base, {"stage": stage})
    return logits(PeftModel.from_pretrained(base, folder, low_cpu_mem_usage=True), CASES["llama"])


@on_ranks(2, stage=[1, 3])
def test_adapters_without_values_take_those_of_a_file(stage: int, tmp_path: Path) -> None:
    model = get_peft_model(make_model(CASES["llama"]), _lora(use_dora=True))
    trained(model, CASES["llama"], [0, 1])
    folder = tmp_path / f"{stage}-{dist.get_rank()}"
    model.save_pretrained(folder)
    assert torch.equal(_loaded_late(stage, folder), _loaded_late(None, folder))


def _native(stage: int | None, folder: Path) -> Tensor:
    model = make_model(CASES["llama"])
    if stage is not None:
        zero.shard_model(model, {"stage": stage})
    torch.manual_seed(1)
    model.add_adapter(_lora(use_dora=True))
    if stage is not None:
        zero.shard_model(model)
    trained(model, CASES["llama"], [0, 1])
    model.save_pretrained(folder)
    return logits(model, CASES["llama"])


def _transformers_refuses_the_installed_peft() -> bool:
    """transformers 5.24 asks for a release of PEFT that came after it."""
    from transformers.integrations import peft as of_transformers

    return Version(metadata.version("peft")) < Version(of_transformers.MIN_PEFT_VERSION)


@pytest.mark.skipif(_transformers_refuses_the_installed_peft(), reason="transformers asks for a newer PEFT")
@on_ranks(2, stage=[1, 3])
def test_adapters_that_transformers_adds_itself(stage: int, tmp_path: Path) -> None:
    plain, ours = tmp_path / f"plain{stage}", tmp_path / f"ours{stage}"  # rank 0 writes both
    assert torch.equal(_native(None, plain), _native(stage, ours))
    dist.barrier()
    name = "adapter_model.safetensors"
    assert (plain / name).read_bytes() == (ours / name).read_bytes()
