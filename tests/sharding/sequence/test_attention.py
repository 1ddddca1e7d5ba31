"""What slices save and what they cost: counted activations and traffic; adapters, checkpoints of activations, generation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.sharding.sequence.passes import joined_outputs
from tests.ranks import on_ranks
from tests.sequence_axis import BATCH, LENGTH, Pair, loss_of, make, packed, plain, ragged
from tests.tensor_axis import NEEDS_TENSOR_PARALLELISM

_LAYERS, _HEADS, _SHARED, _WIDTH, _FLOAT = 2, 4, 2, 6, 4


@on_ranks(2, stage=[2, 3], is_reentrant=[True, False])
def test_checkpointed_layers_train_as_in_one_process(stage: int, is_reentrant: bool) -> None:
    pair = Pair(make("llama"), stage=stage, collectives="pairwise", sp_size=2)
    for model in (pair.model, pair.reference):
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})  # type: ignore[operator]
    pair.steps(packed)


@on_ranks(2, stage=[1, 3])
def test_adapters_and_frozen_weights_train_as_in_one_process(stage: int) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    Pair(peft.get_peft_model(make("llama"), config), stage=stage, collectives="pairwise", sp_size=2).steps(ragged)


@on_ranks(2)
def test_parts_of_a_batch_add_up_as_in_one_process() -> None:
    pair = Pair(make("mistral"), stage=2, collectives="pairwise", sp_size=2, gradient_reduction="sum")
    ranks = pair.engine.world.num_batches
    for step in range(2):
        count = sum(int((ragged(part, 0)["labels"][:, 1:] != -100).sum()) for part in range(2))
        for part in range(2):
            losses = [model(**ragged(part, 0), num_items_in_batch=count).loss for model in (pair.model, pair.reference)]
            for loss in losses:
                loss.backward()
            assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert ranks == 1
    pair.steps(plain, [3])


def _traffic(rank_tokens: int, heads: int) -> int:
    """Bytes that a rank of two receives for so many heads over its peer's tokens."""
    return BATCH * rank_tokens * heads * _WIDTH * _FLOAT


@on_ranks(2)
def test_traffic_is_that_of_two_exchanges_a_layer_each_way() -> None:
    model = make("llama")
    engine = zero.shard_model(model, zero.ZeroConfig(stage=2, sp_size=2, collectives="pairwise"))
    engine.world.ledger.reset()
    loss_of(model, plain(0, 0)).backward()
    found = engine.world.ledger.total("all_to_all (sequence axis)")
    tokens = LENGTH // 2
    inward = _traffic(tokens, (_HEADS + 2 * _SHARED) // 2)  # queries, keys and values together: half of the heads
    outward = _traffic(tokens, _HEADS // 2)
    assert (found.calls, found.bytes) == (2 * 2 * _LAYERS, 2 * _LAYERS * (inward + outward))


def saved_bytes(model: Any, batch: dict[str, Tensor]) -> int:
    """Bytes that autograd keeps of one forward, parameters apart."""
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a node that saves its own output would hold itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**batch)
    assert output.loss is not None
    return sum(kept.values())


@on_ranks(2)
def test_activations_halve_on_two_ranks() -> None:
    batch = plain(0, 0, 32)
    whole = saved_bytes(make("llama"), batch)
    model = make("llama")
    zero.shard_model(model, zero.ZeroConfig(stage=1, sp_size=2, collectives="pairwise"))
    gathered = sum(unit.buffer_nbytes for unit in zero.engine_of(model).units)  # type: ignore[union-attr]
    assert 0.45 * whole <= saved_bytes(model, batch) <= 0.6 * whole + gathered


@on_ranks(2)
def test_generation_and_joined_outputs_are_of_whole_sequences() -> None:
    plain_model, model = make("llama").eval(), make("llama").eval()
    zero.shard_model(model, zero.ZeroConfig(stage=3, sp_size=2, collectives="pairwise"))
    batch = ragged(0, 0)
    with torch.no_grad(), joined_outputs():
        torch.testing.assert_close(model(**batch).logits, plain_model(**batch).logits)
    ids = batch["input_ids"][:, :5]
    for use_cache in (True, False):
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": use_cache}
        assert torch.equal(model.generate(ids, **options), plain_model.generate(ids, **options))


def _load(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).train()


@NEEDS_TENSOR_PARALLELISM
@on_ranks(4)
def test_a_tensor_axis_beside_it_trains_as_one_process(tmp_path: Path) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        make("qwen3").save_pretrained(folder[0])
    dist.barrier()
    reference = _load(folder[0])
    with zero.Init({"stage": 3, "tp_size": 2, "sp_size": 2, "collectives": "pairwise"}):
        model = _load(folder[0])
    engine = zero.shard_model(model)
    assert (engine.world.batch_rank, engine.world.num_batches) == (0, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (model, reference)]
    for step in range(3):
        losses = [loss_of(each, ragged(step, 0)) for each in (model, reference)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for name, value in whole_state_dict(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
@on_ranks(2, axis=["sp_size", "cp_size"])
def test_compiled_models_train_as_in_one_process(axis: str) -> None:
    pair = Pair(make("llama"), **{"stage": 3, axis: 2, "collectives": "pairwise"})
    torch._dynamo.utils.counters.clear()
    try:
        pair.model.compile(backend="eager")
        pair.steps(ragged, range(2))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2
    finally:
        torch.compiler.reset()


@on_ranks(2)
def test_a_copy_is_sliced_when_it_is_partitioned() -> None:
    model = make("llama")
    zero.shard_model(model, zero.ZeroConfig(stage=2, sp_size=2, collectives="pairwise"))
    copied = copy.deepcopy(model)
    engine = zero.shard_model(copied)
    engine.world.ledger.reset()
    torch.testing.assert_close(loss_of(copied, ragged(0, 0)), loss_of(make("llama"), ragged(0, 0)), rtol=1e-6, atol=0)
    assert engine.world.ledger.total("all_to_all (sequence axis)").calls == 2 * _LAYERS
