"""Tensor parallelism x ZeRO: 2 x 2 ranks against transformers' tensor parallelism alone on 2, and one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import Concatenate, WeightConverter
from transformers.distributed import DistributedConfig

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor
from hf_zero.engine.units.storage.residency import Tenure
from hf_zero.errors import ConfigError, PartitionError, UsageError
from hf_zero.plan.summary import summary
from hf_zero.sharding.axes.tensor_parallel import refuse_mixed_parts
from tests.models import train
from tests.ranks import by_hand, on_ranks, run_ranks
from tests.tensor_axis import CONFIGS, load, loss_of, saved, shared_folder, tokens

Values = dict[str, Tensor]


def _partitioned(folder: str, stage: int, **config: Any) -> tuple[Any, ZeroEngine]:
    with zero.Init({"stage": stage, "tp_size": 2, "collectives": "pairwise", **config}):
        model = load(folder)
    return model, zero.shard_model(model)


def _gradients(model: nn.Module) -> Values:
    found = {}
    for name, param in model.named_parameters():
        grad = param.grad
        assert grad is not None
        if isinstance(param, PartitionedTensor):
            world = param._zero_world  # type: ignore[attr-defined]
            found[name] = world.gather_parameter(grad._local_tensor, world.cut_of(param), "a gradient")  # type: ignore[attr-defined]
        else:
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


# --- one step -------------------------------------------------------------------------------------------------------


def _of_transformers_alone(folder: str) -> tuple[list[float], Values]:
    """Two ranks of tensor parallelism as transformers has it, which run the batches of both cells."""
    model = load(folder, distributed_config=DistributedConfig(tp_size=2))
    losses, total = [], Values()
    for cell in range(2):
        loss = loss_of(model, tokens(0, cell)) / 2
        loss.backward()
        losses.append(2 * loss.item())
        for key, grad in _gradients(model).items():
            total[key] = total[key] + grad if key in total else grad
        model.zero_grad()  # it would add the norms of heads up over the ranks again, with what they had before
    return losses, total


def _of_two_axes(folder: str) -> list[tuple[float, Values]]:
    found = []
    for stage, is_checkpointed in ((1, False), *by_hand((2, False), (3, False)), (3, True)):
        model, engine = _partitioned(folder, stage)
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        loss = loss_of(model, tokens(0, engine.world.data.rank))
        loss.backward()
        found.append((loss.item(), _gradients(model)))
    return found


_EVERY_DAY = ("heads",)


@pytest.mark.parametrize(
    "name", [name if name in _EVERY_DAY else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_gradients_have_the_bits_of_tensor_parallelism_alone(name: str) -> None:
    losses, gradients = run_ranks(_of_transformers_alone, 2, saved(name))[0]
    for rank, stages in enumerate(run_ranks(_of_two_axes, 4, saved(name))):
        for loss, found in stages:
            assert loss == losses[rank // 2]
            assert found.keys() == gradients.keys()
            for key, grad in found.items():
                assert torch.equal(grad, gradients[key]), key


# --- several steps --------------------------------------------------------------------------------------------------


def _assert_like_one_process(stage: int, **config: Any) -> None:
    """Losses, norms of raw `clip_grad_norm_`, and weights: sums over the tensor axis are added in another order."""
    folder = shared_folder("llama")
    plain = load(folder)
    model, engine = _partitioned(folder, stage, **config)
    data, found = engine.world.data, []
    share = 2 // data.num_ranks
    for each, cells in ((plain, range(2)), (model, range(data.rank * share, (data.rank + 1) * share))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9)
        found.append(train(each, optimizer, loss_of, tokens, range(2), cells, clip=0.5))
    (losses, norms), (ours, our_norms) = found
    assert ours == pytest.approx(losses[data.rank :: data.num_ranks], rel=1e-6)
    assert our_norms == pytest.approx(norms, rel=1e-6)
    for key, value in whole_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-5, atol=1e-6, msg=key)


@on_ranks(4)
def test_training_on_two_axes_equals_one_process() -> None:
    _assert_like_one_process(1)


@on_ranks(3)
def test_training_on_a_tensor_axis_alone_equals_one_process() -> None:
    _assert_like_one_process(3, tp_size=3)


@pytest.mark.slow
@on_ranks(4, config=[{"collectives": "host"}, {"keep_whole_numel": 24}])
def test_training_by_shared_memory_or_with_whole_norms_equals_one_process(config: dict[str, Any]) -> None:
    _assert_like_one_process(3, **config)


@pytest.mark.slow
@on_ranks(2)
def test_training_on_a_tensor_axis_of_two_equals_one_process() -> None:
    _assert_like_one_process(2)


@on_ranks(4)
def test_replicas_of_tensor_parallel_models_take_one_step_together() -> None:
    folder = shared_folder("llama")
    expected: Values = {}
    for config in ({"stage": 3}, {"stage": 2, "tp_size": 1, "replicate": 2}):
        model, engine = _partitioned(folder, **config)
        for step in range(2):
            batch = tokens(step, engine.world.data.rank // (engine.world.data.num_ranks // 2))
            loss_of(model, batch).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        found = whole_state_dict(model)
        expected = expected or found
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)


# --- what lies where ------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_rank_holds_its_part_of_both_axes_and_the_ledger_tells_them_apart() -> None:
    model, engine = _partitioned(shared_folder("llama"), 3)
    world = engine.world
    assert (world.num_ranks, world.num_shards, world.tensor.num_ranks, world.data.num_ranks) == (4, 2, 2, 2)
    planned, whole = 0, whole_state_dict(model)
    for param in model.parameters():
        assert isinstance(param, PartitionedTensor)
        assert param.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
        is_planned = param.ndim == 2
        planned += is_planned
        fair = param.numel() / (4 if is_planned else 2)
        assert abs(param.to_local().numel() - fair) <= math.prod(param.shape[1:])  # a row more or less
        assert torch.equal(param.full_tensor(), whole[engine.find(param).name])  # type: ignore[union-attr]
    assert planned == 16
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, tokens(0, world.data.rank)).backward()
    optimizer.step()
    for param, state in optimizer.state.items():
        assert state["exp_avg"].to_local().shape == param.to_local().shape
    world.ledger.reset()
    loss_of(model, tokens(0, world.data.rank)).backward()
    padded = sum(p.whole_nbytes for p in engine.parameters)  # of what the tensor axis has left
    assert world.ledger.total("reduce_scatter").bytes <= padded / 2
    assert padded / 4 < world.ledger.total("gather").bytes <= padded / 2  # once: it is small enough to be kept
    assert world.ledger.total("all_reduce (tensor axis)").bytes == 0
    assert "2 shards x 2 (tensor axis)" in summary(engine)


@on_ranks(4)
def test_gathered_parts_are_gone_between_forward_and_backward() -> None:
    model, engine = _partitioned(shared_folder("heads"), 3, prefetch_bytes=0)
    loss = loss_of(model, tokens(0, engine.world.data.rank))
    assert [unit._storage.nbytes() for unit in engine.units] == [0] * len(engine.units)
    assert not any(
        unit.tenure is Tenure.PINNED for unit in engine.units
    )  # what autograd keeps of a weight is its place
    loss.backward()


@on_ranks(4)
def test_users_see_whole_parameters_and_edit_them() -> None:
    model, engine = _partitioned(shared_folder("heads"), 2)
    layer = model.model.layers[0]
    for param in (layer.self_attn.o_proj.weight, layer.self_attn.q_norm.weight, model.lm_head.weight):
        before = param.full_tensor().detach().clone()
        with zero.GatheredParameters(param, modifier_rank=1):
            if dist.get_rank() == 1:
                param.data[0] += 1
        after = param.full_tensor().detach()
        before[0] += 1
        assert torch.equal(after, before)
        param.data.mul_(2)
        assert torch.equal(param.full_tensor().detach(), 2 * before)
        param.data = before  # whole, or not
        assert torch.equal(param.full_tensor().detach(), before)
    whole = {name: value.clone() for name, value in whole_state_dict(model).items()}
    model.load_state_dict({name: 3 * value for name, value in whole.items()})
    assert all(torch.equal(value, 3 * whole[name]) for name, value in whole_state_dict(model).items())
    loss = sum(param.full_tensor().pow(2).sum() for param in model.parameters())
    loss.backward()  # type: ignore[union-attr]
    for name, grad in _gradients(model).items():
        torch.testing.assert_close(grad, 6 * whole[name])
    assert engine_of(model) is engine


# --- whole models ---------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_whole_model_is_shared_over_the_tensor_axis_with_the_values_of_rank_0() -> None:
    torch.manual_seed(dist.get_rank())
    folder = shared_folder("tied")
    reference, _ = _partitioned(folder, 3)
    expected = whole_state_dict(reference)
    meshes = (None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp")))
    for mesh, size in zip(meshes, (2, 1), strict=True):
        model = load(folder)
        if dist.get_rank():
            torch.nn.init.zeros_(model.model.embed_tokens.weight)
        engine = zero.shard_model(model, {"stage": 3, "tp_size": size, "collectives": "pairwise"}, mesh=mesh)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert all(param.untyped_storage().nbytes() < 2**14 for param in model.parameters())
        found = whole_state_dict(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
        ours, theirs = (loss_of(each, tokens(0, engine.world.data.rank)) for each in (model, reference))
        assert torch.equal(ours, theirs)
    with zero.Init({"stage": 2, "tp_size": 2, "collectives": "pairwise"}):
        made = type(reference)(reference.config)
    assert all(isinstance(param, PartitionedTensor) for param in made.parameters())
    loss_of(made, tokens(0, 0)).backward()


def _descend(model: Any, cells: Iterable[int]) -> list[float]:
    return train(model, torch.optim.SGD(model.parameters(), lr=0.5), loss_of, tokens, range(2), list(cells))[0]


def _assert_resized(name: str, size: int, is_late: bool) -> None:
    """A model with a larger vocabulary, and a copy of it."""
    folder = shared_folder(name)
    plain = load(folder)
    with zero.Init({"stage": 3, "tp_size": 2, "collectives": "pairwise"}):
        model = load(folder)
    if is_late:
        zero.shard_model(model)
    for each in (plain, model):
        each.resize_token_embeddings(size, mean_resizing=False)
        ends = [each.get_input_embeddings(), each.get_output_embeddings()]
        with zero.GatheredParameters([end.weight for end in ends]):
            for end in ends:
                end.weight.data[67:] = 0.01
    data = zero.shard_model(model).world.data
    assert _descend(model, [data.rank]) == pytest.approx(_descend(plain, range(2))[data.rank :: 2], rel=1e-6)
    assert all(isinstance(param, PartitionedTensor) for param in model.parameters())
    copied = copy.deepcopy(model)
    batch = tokens(9, data.rank)
    before = loss_of(model, batch).item()
    assert loss_of(copied, batch).item() == before
    for param in copied.parameters():
        param.data.mul_(0.5)
    assert loss_of(copied, batch).item() != before == loss_of(model, batch).item()


@on_ranks(4, is_late=[True, *by_hand(False)])
def test_resized_tied_embeddings_and_copies_of_models_compute_with_their_own_weights(is_late: bool) -> None:
    _assert_resized("tied", 72, is_late)


@pytest.mark.slow
@on_ranks(4, is_late=[False, True])
def test_resized_embeddings_and_copies_of_models_compute_with_their_own_weights(is_late: bool) -> None:
    _assert_resized("llama", 70, is_late)


@pytest.mark.slow
@on_ranks(4)
def test_modules_that_an_adapter_saves_are_trained() -> None:
    folder, models = shared_folder("llama"), []
    for config in ({"stage": 3, "tp_size": 2, "collectives": "pairwise"}, {}):
        with zero.Init(config, enabled=bool(config)):
            model = load(folder)
        torch.manual_seed(1)
        saves = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "o_proj"], "init_lora_weights": False}
        models.append(peft.get_peft_model(model, peft.LoraConfig(**saves)))
    rank = zero.shard_model(models[0]).world.data.rank
    assert _descend(models[0], [rank]) == pytest.approx(_descend(models[1], range(2))[rank::2], rel=1e-5)


# --- bad input ------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_what_does_not_fit_is_refused_by_name_on_all_ranks() -> None:
    folder = shared_folder("llama")

    def refuses(kind: type[Exception], match: str, config: dict[str, Any], **options: Any) -> None:
        with pytest.raises(kind, match=match), zero.Init({"collectives": "pairwise", **config}):
            load(folder, **options)

    refuses(ConfigError, "tp_size is 3, but 4 processes run", {"tp_size": 3})
    refuses(
        ConfigError, r"tp_size is 4, which does not divide the 6 num_attention_heads .* \[1, 2, 3, 6\]", {"tp_size": 4}
    )
    refuses(ConfigError, r"DistributedConfig\(tp_size=4\), but the ranks are 1 x 2 x 2", {"tp_size": 2}, distributed_config=
            DistributedConfig(tp_size=4))  # fmt: skip
    refuses(
        ConfigError, "expert parallelism", {"tp_size": 2}, distributed_config=DistributedConfig(tp_size=2, ep_size=2)
    )
    refuses(
        ConfigError, "recipes/pipeline.py", {"tp_size": 2}, distributed_config=DistributedConfig(tp_size=2, pp_size=2)
    )
    refuses(ConfigError, "replicate is 2, but 4 processes run, 2 of them", {"tp_size": 2, "replicate": 2})
    with pytest.raises(PartitionError, match="Linear is not a model of transformers"):
        zero.shard_model(nn.Linear(4, 4), {"tp_size": 2, "collectives": "pairwise"})
    from transformers import BertConfig, BertForMaskedLM

    bert = BertForMaskedLM(BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(PartitionError, match=r"BertForMaskedLM.* has no `tp_plan`"):
        zero.shard_model(bert, {"tp_size": 2, "collectives": "pairwise"})
    model, _ = _partitioned(folder, 2)
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1)
    loss_of(model, tokens(0, 0)).backward()
    with pytest.raises(UsageError, match=r"Muon .* tp_size"):
        muon.step()
    heads = shared_folder("heads")
    with mock.patch(
        "hf_zero.sharding.axes.tensor_parallel.sum_gradients_over_tensor_axis"
    ):  # as if the plan did not say so
        incomplete, _ = _partitioned(heads, 3)
    with pytest.raises(UsageError, match=r"q_norm\.weight' differ between ranks that share its layer"):
        loss_of(incomplete, tokens(0, dist.get_rank() // 2)).backward()
    other, engine = _partitioned(folder, 2)
    mixed = WeightConverter("a", "down_proj.weight", operations=[Concatenate(dim=1)])
    with pytest.raises(PartitionError, match=r"down_proj\.weight' is put together of several tensors on dim 1"):
        refuse_mixed_parts(other, [mixed], engine.world)
    with pytest.raises(UsageError, match=r"ranks \[2, 3\] share every layer"):
        loss_of(other, tokens(0, max(dist.get_rank(), 2)))


@on_ranks(2)
def test_a_model_that_transformers_has_shared_by_itself_is_refused() -> None:
    model = load(shared_folder("heads"), distributed_config=DistributedConfig(tp_size=2))
    for config in ({"tp_size": 2}, {}):
        with pytest.raises(PartitionError, match=r"DistributedConfig of its own: load it under zero\.Init"):
            zero.shard_model(model, {"stage": 3, "collectives": "pairwise", **config})


@on_ranks(2)
def test_exchanges_of_transformers_wait_as_long_as_ours() -> None:
    _, engine = _partitioned(shared_folder("llama"), 3, timeout_s=61.0)
    assert engine.world.grid is not None
    group = engine.world.grid["tp"].get_group()
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 61


def test_stage_0_and_wrong_degrees_are_refused() -> None:
    with pytest.raises(ConfigError, match="key 'tp_size': 2 cannot be had in stage 0"):
        zero.ZeroConfig(stage=0, tp_size=2)
    config = zero.ZeroConfig.load({"stage": 2, "dp_degree": 4, "mp_degree": 2, "pp_degree": 1})
    assert (config.tp_size, config.expected_world_size) == (2, 8)
    with pytest.raises(ConfigError, match=r"key 'tp_size': 4, but .*mp_degree"):
        zero.ZeroConfig.load({"mp_degree": 2, "tp_size": 4})
    with pytest.raises(ConfigError, match=r"pp_degree.*recipes/pipeline\.py"):
        zero.ZeroConfig.load({"pp_degree": 2})
    with pytest.raises(ConfigError, match="key 'mp_degree': 0 is not a number of ranks"):
        zero.ZeroConfig.load({"mp_degree": 0})
