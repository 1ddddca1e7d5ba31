"""Expert parallelism: some experts on each rank, each with its own batch, against one process with all of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hf_zero as zero
from hf_zero.errors import ConfigError, PartitionError, UsageError
from tests.engine.twins import NEAR, SHARDED, assert_same, whole
from tests.experts import make
from tests.ranks import by_hand, on_ranks, run_alone
from tests.sequence_axis import BATCHES, Batch, Pair, loss_of, plain
from tests.sequence_axis import make as make_dense

_KERNELS = ("eager", "grouped_mm", "batched_mm")
_AXES = {
    "ep4": {"ep_size": 4},
    "replicate2 x ep2": {"ep_size": 2, "replicate": 2},
    "efsdp2 x ep2, sp2": {"ep_size": 2, "sp_size": 2},
    "efsdp2 x ep2": {"ep_size": 2},
}
_FROZEN = {
    "experts": lambda name: "experts" in name,
    "all but experts": lambda name: "experts" not in name,
    "all but the last router": lambda name: "layers.1.mlp.gate" not in name,
}


def _pair(model: nn.Module | str, **config: Any) -> Pair:
    made = make(model) if isinstance(model, str) else model
    return Pair(made, **{"stage": 3, "ep_size": 2, "collectives": "pairwise", **config})


def _partitioned(**config: Any) -> Any:
    model = make("qwen3_moe")
    zero.shard_model(model, zero.ZeroConfig(**{"stage": 3, "ep_size": 2, "collectives": "pairwise", **config}))
    return model


def _own(step: int) -> Batch:
    return plain(step, dist.get_rank())


@on_ranks(
    2,
    name=["mixtral", "deepseek_v3", "gpt_oss", *by_hand("qwen3_moe", "olmoe")],  # which the tests below train
    experts=_KERNELS,
    collectives=["pairwise", "host"],
)
def test_models_train_as_in_one_process(name: str, experts: str, collectives: str) -> None:
    _pair(make(name, experts), collectives=collectives).steps(BATCHES["ragged"])


@on_ranks(4, axes=[*list(_AXES)[:3], *by_hand("efsdp2 x ep2")], stage=SHARDED)
def test_axes_train_as_one_process(axes: str, stage: int) -> None:
    _pair("qwen3_moe", stage=stage, **_AXES[axes]).steps(BATCHES["ragged"], range(2))


def _of_the_first_rank(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    return output[0], output[1], output[2] % 2


@on_ranks(2, stage=SHARDED)
def test_ranks_without_tokens_and_experts_that_nobody_uses_train_as_in_one_process(stage: int) -> None:
    model = make("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(_of_the_first_rank)
    _pair(model, stage=stage).steps(plain, range(2))


@on_ranks(2, reentrant=[False, True])
def test_checkpointed_layers_with_a_loss_of_routers_train_as_in_one_process(reentrant: bool) -> None:
    model = make("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    _pair(model).steps(BATCHES["ragged"], range(2))


@on_ranks(2, stage=SHARDED)
def test_accumulated_and_clipped_gradients_are_those_of_one_process(stage: int) -> None:
    pair = _pair("olmoe", stage=stage)
    for step in range(2):
        with pair.model.no_sync():
            pair.accumulate(plain, 2 * step)
        kept = pair.model.model.layers[0].mlp.experts.down_proj.grad
        assert kept is not None and kept.placements[0].is_shard()  # reduced at once, also in stage 1
        pair.backward(plain, 2 * step + 1)
        norms = [whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) for model in (pair.model, pair.reference)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0.0)
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(pair.model, pair.reference, NEAR)


@on_ranks(2, frozen=list(_FROZEN))
def test_frozen_weights_stay_and_the_others_train_as_in_one_process(frozen: str) -> None:
    model = make("qwen3_moe")
    for name, param in model.named_parameters():
        param.requires_grad_(not _FROZEN[frozen](name))
    _pair(model).steps(BATCHES["ragged"], range(2))


def _write(folder: str) -> None:
    make("mixtral").save_pretrained(folder)


@on_ranks(2)
def _load_and_save(folder: str) -> None:
    with zero.Init(zero.ZeroConfig(stage=3, ep_size=2)):
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.model.layers[0].mlp.experts.down_proj.to_local().shape[0] == 2  # of four
    expected = AutoModelForCausalLM.from_pretrained(folder)
    assert_same(model, expected, NEAR)
    loss = loss_of(model, _own(0))
    torch.testing.assert_close(loss, loss_of(expected, _own(0)), rtol=1e-6, atol=0.0)
    model.save_pretrained(f"{folder}/again")


def test_ranks_load_their_own_experts_and_files_are_those_of_one_process(tmp_path: Path) -> None:
    run_alone(_write, str(tmp_path))
    _load_and_save(folder=str(tmp_path))
    written, again = (folder / "model.safetensors" for folder in (tmp_path, tmp_path / "again"))
    assert written.read_bytes() == again.read_bytes()


@on_ranks(2, stage=SHARDED)
def test_ranks_generate_texts_of_other_lengths(stage: int) -> None:
    model, reference = _partitioned(stage=stage).eval(), make("qwen3_moe").eval()
    ids, rank = _own(0)["input_ids"], dist.get_rank()
    options = {"max_new_tokens": 2 + 3 * rank, "do_sample": False, "use_cache": True}
    assert torch.equal(model.generate(input_ids=ids, **options), reference.generate(input_ids=ids, **options))


@on_ranks(2, stage=[2, 3])
def test_experts_are_whole_for_who_edits_reads_or_copies_them(stage: int) -> None:
    model, reference = _partitioned(stage=stage), make("qwen3_moe")
    loss_of(model, _own(0)).backward()
    ours, theirs = (each.model.layers[0].mlp.experts for each in (model, reference))
    with zero.GatheredParameters(list(model.parameters())), torch.no_grad():
        torch.testing.assert_close(loss_of(model, _own(0)), loss_of(reference, _own(0)))
        ours.down_proj.mul_(2.0)  # a rank's part of it is seen by the next forward
    with torch.no_grad():
        theirs.down_proj.mul_(2.0)
        ours.gate_up_proj.mul_(0.5)
        theirs.gate_up_proj.mul_(0.5)
    assert_same(model, reference, NEAR)
    for each in (model, copy.deepcopy(model)):
        torch.testing.assert_close(loss_of(each, _own(1)), loss_of(reference, _own(1)), rtol=1e-6, atol=0.0)


class _Reads(nn.Module):
    def __init__(self, model: nn.Module, in_graph: bool) -> None:
        super().__init__()
        self.model, self.in_graph = model, in_graph

    def forward(self, **batch: Any) -> Tensor:
        with torch.set_grad_enabled(self.in_graph):
            size = self.model.model.layers[0].mlp.experts.down_proj.pow(2).sum()  # type: ignore[union-attr, index]
        return loss_of(self.model, batch) + size


@on_ranks(2)
def test_weights_of_experts_are_differentiated_in_their_own_forward_only() -> None:
    config = zero.ZeroConfig(stage=3, ep_size=2, collectives="pairwise")
    model = _Reads(make("qwen3_moe"), in_graph=False)
    expected = model(**_own(0))
    zero.shard_model(model, config)
    torch.testing.assert_close(model(**_own(0)), expected)  # whoever reads gets the whole
    model.in_graph = True
    with pytest.raises(UsageError, match=r"down_proj' is read outside its module's call: each rank computes with"):
        model(**_own(0))
    model = _partitioned()
    weight = model.model.layers[0].mlp.experts.down_proj
    with pytest.raises(UsageError, match=r"a loss is computed from '.*experts.down_proj' itself"):
        (loss_of(model, _own(0)) + weight.pow(2).sum()).backward()
    model.zero_grad()
    weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UsageError, match=r"the gradient of '.*experts.down_proj' has a hook"):
        loss_of(model, _own(0)).backward()


@on_ranks(2)
def test_a_choice_that_is_no_expert_is_named() -> None:
    model = _partitioned()
    model.model.layers[0].mlp.gate.register_forward_hook(lambda _, args, output: (*output[:2], output[2] + 8))
    with pytest.raises(UsageError, match="has chosen an expert that is none of its 8"):
        loss_of(model, _own(0))


def _refuses(model: nn.Module, kind: type[Exception], match: str, **config: Any) -> None:
    with pytest.raises(kind, match=match):
        zero.shard_model(model, zero.ZeroConfig(**{"stage": 2, "ep_size": 2, "collectives": "pairwise", **config}))


@on_ranks(2)
def test_models_and_numbers_that_do_not_fit_are_named(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    _refuses(make_dense("llama"), PartitionError, "LlamaForCausalLM has no experts as transformers 5.23 marks them")
    _refuses(make("mixtral"), ConfigError, "ep_size is 3, but 2 processes run: it must divide the 2", ep_size=3)
    three = make("mixtral", num_local_experts=3)
    _refuses(three, ConfigError, r"experts' has 3 experts, which the 2 ranks .* do not divide: use another ep_size")
    if dist.get_rank() == 0:
        three.save_pretrained(tmp_path)
    dist.barrier()
    with pytest.raises(ConfigError, match="has 3 experts"), zero.Init(zero.ZeroConfig(stage=3, ep_size=2)):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    lora = LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"], r=2)
    _refuses(get_peft_model(make("mixtral"), lora), PartitionError, "is an adapter on the weights of experts")
    _pair(get_peft_model(make("mixtral"), LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))).steps(
        plain, range(1)
    )
