"""Context parallelism: queries of slices, and the keys of all, against whole sequences in one process."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_zero as zero
from hf_zero.engine.modules.sequence import Swap, places_of
from hf_zero.errors import PartitionError, UsageError
from hf_zero.sharding.sequence.context import over_all_keys
from hf_zero.sharding.sequence.passes import joined_outputs
from tests.engine.twins import whole
from tests.ranks import by_hand, on_ranks
from tests.sequence_axis import BATCH, BATCHES, LENGTH, Pair, loss_of, make, packed, plain, ragged
from tests.sharding.sequence.test_attention import saved_bytes

_AXES: dict[str, dict[str, Any]] = {
    "dp2 x cp2": {"cp_size": 2},
    "sp2 x cp2": {"sp_size": 2, "cp_size": 2},
    "cp2 x replicate2": {"cp_size": 2, "replicate": 2},
    "cp4": {"cp_size": 4},
}
_STRATEGIES = ["allgather", "alltoall"]
_LAYERS, _SHARED, _WIDTH, _FLOAT = 2, 2, 6, 4


@on_ranks(2, name=["llama", "gpt2", "gemma2", *by_hand("qwen3", "mistral", "gemma")], strategy=_STRATEGIES)
def test_models_train_as_in_one_process(name: str, strategy: str) -> None:
    way = ("eager", "allgather") if name == "gemma2" else ("sdpa", strategy)
    config = {"stage": 3, "collectives": "pairwise", "cp_size": 2, "cp_comm_strategy": way[1]}
    Pair(make(name, way[0]), **config).steps(BATCHES["ragged"])


@on_ranks(
    2,
    batch=["one_sided", "left_padded", "packed", *by_hand("plain", "ragged")],
    way=[("sdpa", "allgather"), ("eager", "allgather"), ("sdpa", "alltoall")],
)
def test_batches_of_every_kind_train_as_in_one_process(batch: str, way: tuple[str, str]) -> None:
    config = {"stage": 2, "collectives": "pairwise", "cp_size": 2, "cp_comm_strategy": way[1]}
    Pair(make("qwen3", way[0]), **config).steps(BATCHES[batch])


@on_ranks(
    4,
    axes=[*list(_AXES)[:3], *by_hand("cp4")],  # three ranks on one axis are below
    name=["llama", "qwen3"],
    batch=["ragged", "packed"],
    strategy=_STRATEGIES,
)
def test_axes_together_train_as_one_process(axes: str, name: str, batch: str, strategy: str) -> None:
    config = {"stage": 3, "collectives": "pairwise", "cp_comm_strategy": strategy, **_AXES[axes]}
    Pair(make(name), **config).steps(BATCHES[batch])


@on_ranks(3, name=["llama", "gpt2"], strategy=_STRATEGIES)
def test_numbers_of_ranks_that_do_not_divide_heads_train_as_one_process(name: str, strategy: str) -> None:
    config = {"stage": 3, "collectives": "pairwise", "cp_size": 3, "cp_comm_strategy": strategy}
    Pair(make(name), **config).steps(ragged)


def _prefixed(step: int, group: int) -> dict[str, Any]:
    """The first tokens see each other, by a mask of the user's own."""
    batch = plain(step, group, 12)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[:5, :5] = True
    return {**batch, "attention_mask": mask.expand(BATCH, 1, -1, -1)}


@on_ranks(2, strategy=_STRATEGIES)
def test_masks_of_the_users_own_show_tokens_that_come_later(strategy: str) -> None:
    config = {"stage": 2, "collectives": "pairwise", "cp_size": 2, "cp_comm_strategy": strategy}
    Pair(make("llama"), **config).steps(_prefixed)


@on_ranks(2, is_reentrant=[True, False], strategy=_STRATEGIES)
def test_checkpointed_layers_and_adapters_train_as_in_one_process(is_reentrant: bool, strategy: str) -> None:
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    config = {"stage": 3, "collectives": "pairwise", "cp_size": 2, "cp_comm_strategy": strategy}
    pair = Pair(peft.get_peft_model(make("llama"), adapters), **config)
    for model in (pair.model, pair.reference):
        model.enable_input_require_grads()  # type: ignore[operator]
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})  # type: ignore[operator]
    pair.steps(packed)


@on_ranks(2, strategy=_STRATEGIES, by_autocast=[True, False])
def test_half_precision_is_as_near_as_that_of_one_process(strategy: str, by_autocast: bool) -> None:
    model, one, exact = make("qwen3"), make("qwen3"), make("qwen3")
    dtype = {"stage": 0} if by_autocast else {"stage": 3, "compute_dtype": "bfloat16"}
    config = {**dtype, "cp_size": 2, "cp_comm_strategy": strategy, "collectives": "pairwise"}
    zero.shard_model(model, zero.ZeroConfig.from_dict(config))
    losses = []
    for each, is_half in ((model, by_autocast), (one, True), (exact, False)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half):
            loss = loss_of(each, ragged(0, 0))
        loss.backward()
        losses.append(loss.item())
    gradients = [
        [whole(p.grad).float() for p in each.parameters() if p.grad is not None] for each in (model, one, exact)
    ]
    ours, theirs = (
        max(float((left - right).norm() / right.norm()) for left, right in zip(each, gradients[2], strict=True))
        for each in gradients[:2]
    )
    assert losses[0] == pytest.approx(losses[2], rel=2e-2)
    assert ours < 1.5 * theirs + 1e-2, (ours, theirs)


@on_ranks(2)
def test_dropout_is_the_same_when_attention_is_computed_again() -> None:
    world = zero.shard_model(make("llama"), zero.ZeroConfig(stage=1, cp_size=2, collectives="pairwise")).world
    attend = over_all_keys(Swap(world, lambda: None), sdpa_attention_forward, "sdpa", "attention")
    query, key, value = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3))
    output, _ = attend(nn.Identity(), query, key, value, None, dropout=0.5)
    torch.manual_seed(7)
    output.sum().backward()
    assert value.grad is not None
    sums = torch.stack([output.detach().sum(), (value.grad * value.detach()).sum()])
    world.everyone.all_reduce([sums], "sums").wait()
    assert sums[0].item() == pytest.approx(sums[1].item(), rel=1e-5)  # it is linear in values


@on_ranks(2)
def test_traffic_is_two_gathers_and_a_reduction_of_keys_and_values_a_layer() -> None:
    model, tokens = make("llama"), (LENGTH + 2) // 2
    engine = zero.shard_model(model, zero.ZeroConfig(stage=2, cp_size=2, collectives="pairwise"))
    engine.world.ledger.reset()
    loss_of(model, plain(0, 0)).backward()
    slices = BATCH * tokens * 2 * _SHARED * _WIDTH * _FLOAT
    gathers = engine.world.ledger.total("gather (sequence axis)")
    sums = engine.world.ledger.total("reduce_scatter (sequence axis)")
    assert (gathers.calls, gathers.bytes) == (2 * _LAYERS, 2 * _LAYERS * slices)
    assert (sums.calls, sums.bytes) == (_LAYERS, _LAYERS * slices)
    assert not engine.world.ledger.total("all_to_all (sequence axis)").calls


@on_ranks(2)
def test_traffic_of_a_ring_is_each_slice_of_keys_once_and_its_gradients_too() -> None:
    model, tokens = make("llama"), (LENGTH + 2) // 2
    config = zero.ZeroConfig(stage=2, cp_size=2, cp_comm_strategy="alltoall", collectives="pairwise")
    engine = zero.shard_model(model, config)
    engine.world.ledger.reset()
    loss_of(model, plain(0, 0)).backward()
    found = engine.world.ledger.total("all_to_all (sequence axis)")
    slices = BATCH * tokens * 2 * _SHARED * _WIDTH * _FLOAT
    assert (found.calls, found.bytes) == ((1 + 1 + 2) * _LAYERS, (1 + 1 + 2) * _LAYERS * slices)


@on_ranks(2, strategy=_STRATEGIES)
def test_activations_halve_on_two_ranks(strategy: str) -> None:
    batch = plain(0, 0, 32)
    in_one = saved_bytes(make("llama"), batch)
    model = make("llama")
    config = {"stage": 1, "cp_size": 2, "cp_comm_strategy": strategy, "collectives": "pairwise"}
    engine = zero.shard_model(model, zero.ZeroConfig.from_dict(config))
    gathered = sum(unit.buffer_nbytes for unit in engine.units)
    assert 0.4 * in_one <= saved_bytes(model, batch) <= 0.55 * in_one + gathered


@on_ranks(2)
def test_generation_and_joined_outputs_are_of_whole_sequences() -> None:
    reference, model = make("llama").eval(), make("llama").eval()
    zero.shard_model(model, zero.ZeroConfig(stage=3, cp_size=2, collectives="pairwise"))
    batch = ragged(0, 0)
    with torch.no_grad(), joined_outputs():
        torch.testing.assert_close(model(**batch).logits, reference(**batch).logits)
    prompt = {"input_ids": batch["input_ids"][1:], "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(**prompt), reference.generate(**prompt))


@on_ranks(2)
def test_what_cannot_be_given_to_queries_of_slices_is_named() -> None:
    config = zero.ZeroConfig(stage=2, cp_size=2, collectives="pairwise")
    with pytest.raises(
        PartitionError, match="cp_size is 2, but LlamaForCausalLM computes attention by 'flex_attention'"
    ):
        zero.shard_model(make("llama", "flex_attention"), config)
    model = make("llama")
    zero.shard_model(model, config)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UsageError, match="cp_size: queries of slices cannot be given to 'flex_attention'"):
        model(**plain(0, 0))
    model.set_attn_implementation("eager")
    learned = torch.zeros(BATCH, 1, 12, 12, requires_grad=True)
    with pytest.raises(UsageError, match="cp_size: LlamaAttention learns its mask"):
        model(**{**plain(0, 0, 12), "attention_mask": learned})
    with pytest.raises(UsageError, match="cp_size: output_attentions"):
        model(**plain(0, 0), output_attentions=True)


@on_ranks(2)
def test_what_cannot_go_around_a_ring_is_named() -> None:
    config = zero.ZeroConfig(stage=2, cp_size=2, cp_comm_strategy="alltoall", collectives="pairwise")
    with pytest.raises(PartitionError, match="computes attention by 'eager', not by 'sdpa'"):
        zero.shard_model(make("llama", "eager"), config)
    model, batch = make("llama"), plain(0, 0, 12)
    zero.shard_model(model, config)
    with pytest.raises(UsageError, match=r"alltoall, but LlamaAttention has a mask of torch\.float32"):
        model(**{**batch, "attention_mask": torch.zeros(BATCH, 1, 12, 12)})
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(UsageError, match="alltoall, but LlamaAttention drops out weights of attention"):
        model(**batch)


def test_each_context_has_as_much_work() -> None:
    places = places_of(24, 3, torch.device("cpu"))
    assert sorted(places.tolist()) == list(range(24))
    assert {int(each.sum()) for each in places.chunk(3)} == {sum(range(24)) // 3}
