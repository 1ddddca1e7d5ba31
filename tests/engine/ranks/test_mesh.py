"""Models over some of the program's ranks, and models that are held several times."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import hf_zero as zero
from hf_zero.errors import CollectiveError, ConfigError, UsageError
from hf_zero.plan.summary import summary
from tests.engine.twins import EXCHANGES, SHARDED, SHORT_S, Net, Twins, batch, square_loss, whole
from tests.ranks import on_ranks, run_ranks


def _half() -> DeviceMesh:
    """This rank's row of two."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "rank"))["rank"]


# --- parts of the program -------------------------------------------------------------------------------------------


@on_ranks(4, stage=[1, 3], collectives=EXCHANGES)
def test_two_halves_train_two_models_at_the_same_time(stage: int, collectives: str) -> None:
    """Each half of the ranks has a model of its own; one takes more steps."""
    half = dist.get_rank() // 2
    draw = lambda step, rank: batch(step, 10 * half + rank)  # noqa: E731
    twins = Twins(stage, draw=draw, mesh=_half(), collectives=collectives)
    assert (twins.engine.world.num_ranks, twins.rank) == (2, dist.get_rank() % 2)
    twins.step(1 + 2 * half)
    for p in twins.model.parameters():
        assert isinstance(p, DTensor) and p.device_mesh.mesh.tolist() == [2 * half, 2 * half + 1]
    assert len({float(whole(p).sum()) for p in twins.model.parameters()}) > 1


@on_ranks(4)
def test_groups_of_models_that_are_gone_are_closed_by_their_ranks_alone() -> None:
    half, mesh = dist.get_rank() // 2, _half()
    for number in range(3 + half):
        model = Net()
        zero.shard_model(model, {"stage": 1 + number % 3, "collectives": "pairwise"}, mesh=mesh)
        square_loss(model, batch(0, 0)).backward()
        del model
    everyone = Net()
    zero.shard_model(everyone, {"stage": 2})
    square_loss(everyone, batch(0, 0)).backward()


@on_ranks(4)
def test_errors_name_ranks_of_the_program() -> None:
    half = dist.get_rank() // 2
    model = Net()
    zero.shard_model(model, {"stage": 2, "collectives": "pairwise", "timeout_s": SHORT_S}, mesh=_half())
    if dist.get_rank() == 2:  # skips the backward
        dist.barrier()
        return
    if half:
        with pytest.raises(CollectiveError, match=r"rank 3 waited .* for rank 2 "):
            square_loss(model, batch(0, 0)).backward()
    else:
        square_loss(model, batch(0, 0)).backward()
    dist.barrier()


@on_ranks(4)
def test_wrong_meshes_are_refused() -> None:
    four = init_device_mesh("cpu", (4,))
    three = init_device_mesh("cpu", (1, 2, 2))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    alone = init_device_mesh("cpu", (4, 1))
    with pytest.raises(UsageError, match="has 3 axes"):
        zero.shard_model(Net(), {"stage": 1}, mesh=three)
    with pytest.raises(ConfigError, match="replicate is 3, but 4 processes run"):
        zero.shard_model(Net(), {"stage": 1, "replicate": 3})
    with pytest.raises(ConfigError, match="replicate is 4, but 4 processes run"):
        zero.shard_model(Net(), {"stage": 1, "replicate": 4}, mesh=four)
    with pytest.raises(ConfigError, match="replicate is 4, but the mesh has 2 replicas"):
        zero.shard_model(Net(), {"stage": 1, "replicate": 4}, mesh=pairs)
    with pytest.raises(ConfigError, match="has one rank only"):
        zero.shard_model(Net(), {"stage": 1}, mesh=alone)
    with pytest.raises(ConfigError, match="expected_world_size is 4, but 2 processes"):
        zero.shard_model(Net(), {"stage": 1, "expected_world_size": 4}, mesh=pairs["shard"])
    other = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(UsageError, match="is not in the mesh"):
            zero.shard_model(Net(), {"stage": 1}, mesh=other)


# --- replicas -------------------------------------------------------------------------------------------------------


def _bytes(twins: Twins, kind: str) -> int:
    return twins.engine.world.ledger.total(kind).bytes


@on_ranks(4, stage=SHARDED)
def test_rows_stay_in_a_replica_and_sums_travel_between_them(stage: int) -> None:
    twins = Twins(stage, replicate=2, collectives="pairwise")
    world = twins.engine.world
    assert (world.num_ranks, world.num_shards, world.replicas.num_ranks) == (4, 2, 2)
    twins.step(2)
    world.ledger.reset()
    twins.backward()
    twins.backward_reference()
    own = sum(p.to_local().nbytes for p in twins.model.parameters() if isinstance(p, DTensor))
    assert _bytes(twins, "reduce_scatter") == own  # from the other rank of the replica
    assert _bytes(twins, "all_reduce") == own  # 2 (R - 1) / R of this rank's rows
    assert _bytes(twins, "gather") == 0 or stage == 3
    twins.update()
    for p in twins.model.parameters():
        rows = whole(p)
        both = [torch.empty_like(rows) for _ in range(4)]
        dist.all_gather(both, rows)
        assert all(torch.equal(rows, other) for other in both)


@on_ranks(4)
def test_ranks_of_a_mesh_may_stand_in_any_order() -> None:
    Twins(3, mesh=DeviceMesh("cpu", [[0, 1], [3, 2]]), collectives="pairwise").step(2)


@on_ranks(4)
def test_a_mesh_of_two_axes_means_replicas() -> None:
    twins = Twins(3, mesh=init_device_mesh("cpu", (2, 2)))
    assert (twins.engine.world.num_ranks, twins.engine.world.num_shards) == (4, 2)
    twins.step()
    assert "4 (2 replicas of 2 ranks)" in summary(twins.engine)
    with zero.GatheredParameters(twins.model.head, modifier_rank=3):
        if twins.rank == 3:
            torch.nn.init.zeros_(twins.model.head.weight)
    torch.nn.init.zeros_(twins.reference.head.weight)
    twins.step()


def _save(folder: str) -> None:
    torch.manual_seed(0)
    accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=3, replicate=2))
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(2):
        accelerator.backward(square_loss(model, batch(step, accelerator.process_index)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)


def _load(folder: str, config: dict[str, Any], num_batches: int) -> list[torch.Tensor]:
    accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(**config))
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.load_state(folder)
    share = num_batches // accelerator.num_processes
    for index in range(share):
        loss = square_loss(model, batch(2, accelerator.process_index * share + index)) / share
        with model.no_sync() if index < share - 1 else torch.enable_grad():
            accelerator.backward(loss)
    optimizer.step()
    return [whole(p) for p in model.parameters()]


def test_checkpoints_of_replicas_are_the_ordinary_ones(tmp_path: Path) -> None:
    run_ranks(_save, 4, str(tmp_path / "saved"))
    found = run_ranks(_load, 4, str(tmp_path / "saved"), {"stage": 2, "replicate": 2}, 4)
    found += run_ranks(_load, 2, str(tmp_path / "saved"), {"stage": 1}, 4)
    found += run_ranks(_load, 1, str(tmp_path / "saved"), {"stage": 0}, 4)
    for tensors in found:
        for left, right in zip(tensors, found[0], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_accelerates_parallelism_config_is_the_mesh() -> None:
    from accelerate.parallelism_config import ParallelismConfig

    plugin = zero.ZeroPlugin(stage=3)
    for config in ({"dp_replicate_size": 2, "dp_shard_size": 2}, {"dp_shard_size": 4}, None):
        _reset()
        options = {} if config is None else {"parallelism_config": ParallelismConfig(**config)}
        accelerator = zero.ZeroAccelerator(zero_plugin=plugin, **options)
        model = Net()
        reference = Net()
        reference.load_state_dict(model.state_dict())
        for p in reference.parameters():
            dist.broadcast(p.data, 0)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        model, own = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        shards = 2 if config is not None and "dp_replicate_size" in config else 4
        assert zero.engine_of(model).world.num_shards == shards
        accelerator.backward(square_loss(model, batch(0, dist.get_rank())))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
        for rank in range(4):
            (square_loss(reference, batch(0, rank)) / 4).backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        torch.testing.assert_close(norm, expected)
        for each in (own, optimizer):
            each.step()
            each.zero_grad()
        for left, right in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(left), right.detach(), rtol=1e-5, atol=1e-6)
    _reset()
    with pytest.raises(ConfigError, match="leaves no ranks to shard"):
        zero.ZeroAccelerator(zero_plugin=plugin, parallelism_config=ParallelismConfig(dp_replicate_size=4))
    _reset()


def _reset() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


@on_ranks(4)
def test_replicas_that_leave_nothing_to_cut_beside_a_tensor_axis_are_told_what_to_leave_out() -> None:
    with pytest.raises(ConfigError, match=r"which leaves 2: .*or leave replicate or tp_size out"):
        zero.shard_model(Net(), {"stage": 3, "replicate": 2, "tp_size": 2})
    with pytest.raises(ConfigError, match="for none, use stage 0"):
        zero.shard_model(Net(), {"stage": 3, "replicate": 4})
