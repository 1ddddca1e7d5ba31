"""Experts divided over the ranks that share every layer, against one process with all of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.distributed import DistributedConfig

import hf_zero as zero
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.plan.summary import summary
from hf_zero.sharding.axes.shared_experts import SharedExperts
from hf_zero.sharding.loading import checkpoint_shapes, names_to_read_whole
from tests.engine.twins import NEAR, SHARDED, assert_same, whole
from tests.experts import make
from tests.ranks import on_ranks, run_alone
from tests.sequence_axis import BATCHES, Pair, loss_of, plain
from tests.sequence_axis import make as make_dense

_BOTH = {"tp_size": 2, "ep_size": 2, "collectives": "pairwise"}
_MORE = {"ep_size": 4}


def _pair(name: str, experts: str = "eager", stage: int = 3, **more: Any) -> Pair:
    return Pair(make(name, experts), **{"stage": stage, **_BOTH, **more})


@on_ranks(4, name=["mixtral", "qwen3_moe"], stage=SHARDED, timeout_s=120)
def test_models_train_on_two_axes_as_in_one_process(name: str, stage: int) -> None:
    _pair(name, stage=stage).steps(BATCHES["ragged"])


@on_ranks(4, name=["mixtral", "qwen3_moe"], stage=SHARDED, timeout_s=120)
def test_models_whose_experts_more_ranks_divide_train_as_in_one_process(name: str, stage: int) -> None:
    pair = _pair(name, stage=stage, **_MORE)
    world = pair.engine.world
    assert (world.experts.num_ranks, world.same_experts.num_ranks, world.tensor.num_ranks) == (2, 1, 2)
    assert "2 shards x 2 (tensor axis, experts too)), all experts over 4 ranks" in summary(pair.engine)
    seen: set[tuple[int, ...]] = set()
    experts = pair.model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda module, _: seen.add(tuple(module.down_proj.shape)))
    pair.steps(BATCHES["ragged"])
    assert seen == {(experts.down_proj.shape[0] // 2, *experts.down_proj.shape[1:])}
    kinds = world.ledger.kinds()
    assert sum(world.ledger.total(kind).bytes for kind in kinds if "all_to_all" in kind) > 0


@pytest.mark.slow
@on_ranks(4, name=["olmoe", "deepseek_v3", "gpt_oss"], experts=["eager", "grouped_mm"], timeout_s=120)
def test_other_models_whose_experts_more_ranks_divide_train_as_in_one_process(name: str, experts: str) -> None:
    _pair(name, experts, **_MORE).steps(BATCHES["ragged"])


@pytest.mark.slow
@on_ranks(8, more=[{}, {"replicate": 2}], timeout_s=200)
def test_experts_on_all_axes_train_as_in_one_process(more: dict[str, Any]) -> None:
    pair = _pair("qwen3_moe", **_MORE, **more)
    assert pair.engine.world.same_experts.num_ranks == (1 if more else 2)
    pair.steps(BATCHES["ragged"], range(2))


@on_ranks(2, experts=["grouped_mm", "batched_mm"])
def test_kernels_for_experts_train_as_in_one_process(experts: str) -> None:
    _pair("qwen3_moe", experts).steps(BATCHES["ragged"], range(2))


@pytest.mark.slow
@on_ranks(2, name=["olmoe", "deepseek_v3", "gpt_oss"], experts=["eager", "grouped_mm"], timeout_s=120)
def test_other_models_train_as_in_one_process(name: str, experts: str) -> None:
    _pair(name, experts).steps(BATCHES["ragged"])


@pytest.mark.slow
@on_ranks(4, more=[{"sp_size": 2}, {"cp_size": 2}, {"keep_whole_numel": 24}, {"offload": {}}], timeout_s=120)
def test_what_goes_with_a_tensor_axis_trains_as_one_process(more: dict[str, Any], tmp_path: Path) -> None:
    if "offload" in more:
        more = {"offload": {"optimizer": "disk", "parameters": "disk", "path": str(tmp_path)}}
    Pair(make("qwen3_moe"), **{"stage": 3, **_BOTH, **more}).steps(BATCHES["ragged"], range(2))


@on_ranks(4, reentrant=[False, True], ep_size=[2, 4])
def test_checkpointed_layers_with_a_loss_of_routers_train_as_in_one_process(reentrant: bool, ep_size: int) -> None:
    model = make("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    Pair(model, stage=3, **{**_BOTH, "ep_size": ep_size}).steps(BATCHES["ragged"], range(2))


def _of_the_first_rank(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    return output[0], output[1], output[2] % 4


@on_ranks(4, stage=SHARDED, ep_size=[2, 4])
def test_a_rank_whose_experts_get_no_token_trains_as_in_one_process(stage: int, ep_size: int) -> None:
    model = make("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(_of_the_first_rank)
    Pair(model, stage=stage, **{**_BOTH, "ep_size": ep_size}).steps(plain, range(2))


@on_ranks(4, frozen=["experts", "all but experts"], ep_size=[2, 4])
def test_frozen_weights_stay_and_the_others_train_as_in_one_process(frozen: str, ep_size: int) -> None:
    model = make("qwen3_moe")
    for name, param in model.named_parameters():
        param.requires_grad_(("experts" in name) == (frozen == "all but experts"))
    Pair(model, stage=3, **{**_BOTH, "ep_size": ep_size}).steps(BATCHES["ragged"], range(2))


@on_ranks(4, ep_size=[2, 4])
def test_accumulated_and_clipped_gradients_are_those_of_one_process(ep_size: int) -> None:
    pair = _pair("qwen3_moe", stage=2, ep_size=ep_size)
    with pair.model.no_sync():
        pair.accumulate(plain, 0)
    pair.backward(plain, 1)
    norms = [whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) for model in (pair.model, pair.reference)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0.0)
    for optimizer in pair.optimizers:
        optimizer.step()
    assert_same(pair.model, pair.reference, NEAR)


@on_ranks(4)
def test_a_rank_has_its_experts_and_sends_no_tokens() -> None:
    pair = _pair("qwen3_moe")
    experts = pair.model.model.layers[0].mlp.experts
    assert isinstance(vars(experts)["forward"], SharedExperts)
    assert experts.down_proj.to_local().shape == (2, 24, 12)  # of eight
    world = pair.engine.world
    assert (world.experts.num_ranks, world.tensor.num_ranks, world.num_shards) == (1, 2, 2)
    assert "2 shards x 2 (tensor axis, experts too)" in summary(pair.engine)
    loss_of(pair.model, plain(0, pair.own)).backward()
    assert [world.ledger.total(kind).bytes for kind in ("all_to_all", "all_to_all (expert axis)")] == [0, 0]


@on_ranks(4, ep_size=[2, 4])
def test_copies_and_whole_experts_compute_with_their_own_weights(ep_size: int) -> None:
    pair = _pair("qwen3_moe", ep_size=ep_size)
    ours, theirs = (each.model.layers[0].mlp.experts for each in (pair.model, pair.reference))
    hidden, ids, weights = torch.randn(5, 24), torch.arange(10).view(5, 2) % 8, torch.rand(5, 2)
    with zero.GatheredParameters(list(ours.parameters())), torch.no_grad():
        torch.testing.assert_close(ours(hidden, ids, weights), theirs(hidden, ids, weights))
    copied = copy.deepcopy(pair.model)
    with torch.no_grad():
        ours.down_proj.mul_(0.5)
        theirs.down_proj.mul_(0.5)
    assert_same(pair.model, pair.reference, NEAR)
    assert loss_of(copied, plain(0, 0)) != loss_of(pair.model, plain(0, 0))
    torch.testing.assert_close(loss_of(pair.model, plain(0, 0)), loss_of(pair.reference, plain(0, 0)))


@on_ranks(4, ep_size=[2, 4])
def test_ranks_generate_what_one_process_does(ep_size: int) -> None:
    pair = _pair("qwen3_moe", ep_size=ep_size)
    ids = plain(0, pair.own)["input_ids"]
    options = {"max_new_tokens": 3, "do_sample": False, "use_cache": True}
    texts = [each.eval().generate(input_ids=ids, **options) for each in (pair.model, pair.reference)]
    assert torch.equal(*texts)


# --- files ----------------------------------------------------------------------------------------------------------


def _write(folder: str, name: str) -> None:
    make(name).save_pretrained(folder)


@on_ranks(4)
def _load_and_save(folder: str, ep_size: int) -> None:
    with zero.Init({"stage": 3, **_BOTH, "ep_size": ep_size}):
        model = AutoModelForCausalLM.from_pretrained(folder)
    expected = AutoModelForCausalLM.from_pretrained(folder)
    assert_same(model, expected, NEAR)
    mine = plain(0, dist.get_rank() // 2)
    torch.testing.assert_close(loss_of(model, mine), loss_of(expected, mine), rtol=1e-6, atol=0.0)
    shapes = checkpoint_shapes(None, [f"{folder}/model.safetensors"], None)
    world = zero.shard_model(model).world
    read_whole = names_to_read_whole(model, shapes, get_model_conversion_mapping(model), world)
    assert not any("experts" in name for name in read_whole)
    model.save_pretrained(f"{folder}/again")


@pytest.mark.parametrize(("name", "ep_size"), [("mixtral", 2), ("mixtral", 4), ("qwen3_moe", 2)])
def test_ranks_load_their_own_experts_and_files_are_those_of_one_process(
    name: str, ep_size: int, tmp_path: Path
) -> None:
    run_alone(_write, str(tmp_path), name)
    _load_and_save(folder=str(tmp_path), ep_size=ep_size)
    written, again = (folder / "model.safetensors" for folder in (tmp_path, tmp_path / "again"))
    assert written.read_bytes() == again.read_bytes()


# --- bad input ------------------------------------------------------------------------------------------------------


def test_numbers_of_ranks_that_do_not_fit_are_refused_before_anything_starts() -> None:
    for size in (2, 6):
        with pytest.raises(
            ConfigError, match=rf"'ep_size': {size} cannot be had .* tp_size: 4: .* use ep_size: 4 or a mu"
        ):
            zero.ZeroConfig(tp_size=4, ep_size=size)


@on_ranks(4)
def test_models_and_meshes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    def refuses(model: nn.Module, kind: type[Exception], match: str, mesh: Any = None, **config: Any) -> None:
        with pytest.raises(kind, match=match):
            zero.shard_model(model, {"stage": 2, **_BOTH, **config}, mesh=mesh)

    refuses(make_dense("llama"), PartitionError, "LlamaForCausalLM` has no `ep_plan`")
    refuses(make("mixtral", num_local_experts=3), PartitionError, "Cannot evenly shard 3 experts")
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("data", "tp"))
    refuses(make("mixtral"), ConfigError, "'ep_size': 2 cannot be had .* tp_size: 4", mesh, tp_size=1)
    if dist.get_rank() == 0:
        make("mixtral").save_pretrained(tmp_path)
    dist.barrier()
    for config, match in (({**_BOTH, "ep_size": 1}, "but ep_size is 1 in the zero"), (_BOTH, "but ep_size is 2")):
        size = 4 if config is _BOTH else 2
        given = DistributedConfig(tp_size=2, fsdp_size=2, ep_size=size)
        with pytest.raises(ConfigError, match=rf"ep_size={size}\), {match}"), zero.Init(config):
            AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=given)
