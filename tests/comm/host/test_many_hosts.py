"""Ranks of one machine that believe to be on several hosts: the same numbers, fewer bytes, errors that name a rank."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hf_zero as zero
from hf_zero.comm.collectives import Collectives, Rows
from hf_zero.comm.groups import cells_of
from hf_zero.comm.host import memory as host_memory
from hf_zero.comm.host.many_hosts import SeveralHostsCollectives
from hf_zero.comm.host.one_host import connect
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.select import make_collectives
from hf_zero.errors import CollectiveError
from hf_zero.layout import RowLayout
from hf_zero.plan.summary import model_states, summary
from tests.comm.test_faults import Training, delays
from tests.engine.twins import Net, Twins, square_loss
from tests.models import Stack, stack_batch
from tests.ranks import RankFailure, run_ranks

_RANKS = 4
_HOSTS = [(0, 0, 1, 1), (0, 1, 0, 1)]
_SHAPES = [(7, 3), (1, 4), (6,), (0, 5), (2, 2, 2), (401, 40)]  # rows that do not divide, fewer than ranks, none; large
_ANY_HOSTS = pytest.mark.parametrize("hosts", _HOSTS)


@contextlib.contextmanager
def _on(hosts: Sequence[int]) -> Iterator[None]:
    """Within: rank r takes itself for one of host `hosts[r]`."""
    with mock.patch.object(host_memory, "host_number", lambda: hosts[dist.get_rank()]):
        yield


def _make(hosts: Sequence[int], timeout_s: float = 20.0) -> Collectives:
    dist.barrier()  # a worker that imports for the first time is late, and some tests wait for a short time only
    with _on(hosts):
        collectives = make_collectives(
            "host", [rank for (rank,) in cells_of(None, 1)[0]], torch.device("cpu"), timeout_s, Ledger()
        )
    return collectives


# --- exchanges --------------------------------------------------------------------------------------------------------


def _values(rank: int, index: int, layout: RowLayout, dtype: torch.dtype) -> Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(10 * rank + index)).to(dtype)


def _gather(hosts: Sequence[int], is_shared: bool) -> tuple[list[Tensor], int, int]:
    """Whole tensors of which every rank had its rows, the bytes that came over the network, and those of this rank's rows."""
    collectives = _make(hosts)
    assert isinstance(collectives, SeveralHostsCollectives)
    layouts = [RowLayout(shape, _RANKS) for shape in _SHAPES]
    sizes = [layout.padded_numel for layout in layouts]
    memory = torch.zeros(sum(sizes))
    if is_shared:
        memory = torch.empty(0).set_(collectives.allocate(4 * sum(sizes), "a test"))
    items = []
    for index, (layout, flat) in enumerate(zip(layouts, memory.split(sizes), strict=True)):
        values = _values(0, index, layout, torch.float32)
        layout.elements_of(flat, collectives.rank).copy_(layout.elements_of(values, collectives.rank))
        items.append(Rows(flat, layout))
    collectives.before_write("rows are in place")  # who is late would clear what others have written
    for _ in range(2):
        collectives.gather(items, "unit").wait()
    own = sum(item.layout.local_numel(collectives.rank) for item in items)
    received = [each.ledger.total("gather").bytes for each in (collectives._to_column, collectives._to_all)]
    assert sum(received) == collectives.ledger.total("gather").bytes
    return [item.flat[: item.layout.numel].clone() for item in items], sum(received), 4 * own


@_ANY_HOSTS
@pytest.mark.parametrize("is_shared", [True, False])
def test_gathered_rows_are_those_of_their_owners(hosts: Sequence[int], is_shared: bool) -> None:
    for whole, _, _ in run_ranks(_gather, _RANKS, hosts, is_shared):
        for index, (shape, found) in enumerate(zip(_SHAPES, whole, strict=True)):
            assert torch.equal(found, _values(0, index, RowLayout(shape, _RANKS), torch.float32)), shape


@_ANY_HOSTS
def test_a_row_comes_to_a_host_once(hosts: Sequence[int]) -> None:
    found = run_ranks(_gather, _RANKS, hosts, True)
    for host in (0, 1):
        received = sum(found[rank][1] for rank in range(_RANKS) if hosts[rank] == host)
        assert received == 2 * sum(found[rank][2] for rank in range(_RANKS) if hosts[rank] != host)  # gathered twice


def _reduce_scatter(hosts: Sequence[int], dtype: torch.dtype) -> tuple[list[Tensor], int]:
    collectives = _make(hosts)
    assert isinstance(collectives, SeveralHostsCollectives)
    layouts = [RowLayout(shape, _RANKS) for shape in _SHAPES]
    items = [Rows(_values(collectives.rank, i, layout, dtype), layout) for i, layout in enumerate(layouts)]
    outputs = [torch.full((layout.local_numel(collectives.rank),), 9.0) for layout in layouts]
    for _ in range(2):
        collectives.reduce_scatter(items, outputs, "unit", divisor=_RANKS).wait()
    collectives.settle()
    return outputs, collectives.ledger.total("reduce_scatter").bytes


@_ANY_HOSTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduced_rows_are_sums_of_the_hosts_sums(hosts: Sequence[int], dtype: torch.dtype) -> None:
    by_host = [[rank for rank in range(_RANKS) if hosts[rank] == host] for host in (0, 1)]
    for rank, (found, received) in enumerate(run_ranks(_reduce_scatter, _RANKS, hosts, dtype)):
        for index, shape in enumerate(_SHAPES):
            layout = RowLayout(shape, _RANKS)
            sums = [sum(_values(mate, index, layout, dtype).float() for mate in mates) for mates in by_host]
            expected = (sums[0] + sums[1]) / _RANKS
            assert torch.equal(found[index], expected[slice(*layout.span(rank))]), shape
        column = [mates[by_host[hosts[rank]].index(rank)] for mates in by_host]
        from_mate = sum(RowLayout(shape, _RANKS).local_numel(owner) for shape in _SHAPES for owner in column)
        assert received == 2 * (dtype.itemsize * from_mate + 4 * sum(len(rows) for rows in found))


# --- training ---------------------------------------------------------------------------------------------------------


def _train(hosts: Sequence[int], stage: int) -> None:
    with _on(hosts):
        twins = Twins(stage, collectives="host")
    assert isinstance(twins.engine.world.shards, SeveralHostsCollectives)
    twins.step(2)
    with twins.model.no_sync():
        square_loss(twins.model, twins.own()).backward()
    twins.backward_reference()
    twins.steps_done += 1
    twins.step(2)
    twins.assert_same_output()


@_ANY_HOSTS
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_equals_that_of_the_unsharded_model(hosts: Sequence[int], stage: int) -> None:
    run_ranks(_train, _RANKS, hosts, stage)


class _Skipping(Net):
    """Leaves out a block where it is told to."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.enter(x))
        return self.head(self.blocks[2](x if self.skips else self.blocks[1](x)))


def _skip(stage: int) -> None:
    """Rank 3 never needs a block that its host's other rank waits for, nor has a gradient for it."""
    with _on(_HOSTS[0]):
        twins = Twins(stage, _Skipping, collectives="host", timeout_s=10.0)
    twins.model.skips = dist.get_rank() == 3
    for _ in range(3):
        square_loss(twins.model, twins.own()).backward()
        for rank in range(_RANKS):
            twins.reference.skips = rank == 3
            (square_loss(twins.reference, twins.draw(rank, twins.steps_done)) / _RANKS).backward()
        twins.update()


@pytest.mark.parametrize("stage", [1, 2])
def test_rank_that_leaves_out_a_unit_keeps_no_other_waiting(stage: int) -> None:
    run_ranks(_skip, _RANKS, stage)


def _race(stage: int, compute_dtype: str | None) -> list[float]:
    trained = []
    for is_delayed in (False, True):
        with _on(_HOSTS[0]):
            training = Training("host", stage, compute_dtype)
        with delays(training) if is_delayed else contextlib.nullcontext():
            for _ in range(12):
                training.step()
        trained.append((training.losses, training.rows()))
    (expected_losses, expected_rows), (losses, rows) = trained
    assert losses == expected_losses
    assert all(torch.equal(left, right) for left, right in zip(rows, expected_rows, strict=True))
    return losses


@pytest.mark.parametrize(("stage", "compute_dtype"), [(1, None), (2, "bfloat16"), (3, None), (3, "bfloat16")])
def test_training_with_ranks_out_of_step_has_the_same_bits(stage: int, compute_dtype: str | None) -> None:
    run_ranks(_race, _RANKS, stage, compute_dtype)


def _summarise(stage: int) -> tuple[str, int, int, int]:
    torch.manual_seed(0)
    model = Stack(16)
    model.blocks[0].requires_grad_(False)
    model.blocks[0].norm.requires_grad_(True)  # a unit of which some rows change
    with _on(_HOSTS[0]):
        engine = zero.shard_model(model, {"stage": stage, "collectives": "host"})
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        model(**stack_batch(step, dist.get_rank(), 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            engine.world.ledger.reset()
    ledger, states = engine.world.ledger, model_states(engine)
    moved = ledger.total("gather").bytes + ledger.total("reduce_scatter").bytes
    return summary(engine), states.parameters, states.traffic, moved


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_summary_tells_what_a_host_holds_and_what_comes_over_the_network(stage: int) -> None:
    model = Stack(16)
    numel = sum(p.numel() for p in model.parameters())
    trained = numel - sum(p.numel() for part in (model.blocks[0].up, model.blocks[0].down) for p in part.parameters())
    for text, parameters, traffic, moved in run_ranks(_summarise, _RANKS, stage):
        assert "host on gloo, hosts of 2 ranks" in text
        assert parameters == 4 * numel // 2
        assert traffic == moved == 4 * trained // 4 + 4 * trained * 3 // 4  # a gather over the network; a reduction


# --- what cannot be, and ranks that stall or die ----------------------------------------------------------------------


def _chosen(hosts: Sequence[int]) -> tuple[str, object]:
    collectives = _make(hosts)
    with _on(hosts):
        return collectives.name, connect(collectives)


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [((0, 0, 1), "hosts have different numbers of ranks"), ((0, 1), "every host has one rank only")],
)
def test_hosts_of_unequal_or_single_ranks_exchange_pairwise(hosts: Sequence[int], reason: str) -> None:
    assert run_ranks(_chosen, len(hosts), hosts) == [("pairwise", reason)] * len(hosts)


def _stall(kind: str, dies: bool) -> str:
    collectives = _make(_HOSTS[0])
    layout = RowLayout((4,), _RANKS)
    memory = torch.empty(0).set_(collectives.allocate(16, "a test"))
    collectives.meet("all are there")
    collectives.timeout_s = 1.5
    if collectives.rank == 3:
        if dies:
            os._exit(1)
        time.sleep(4.0)
        return ""
    with pytest.raises(CollectiveError) as caught:
        if kind == "gather":
            collectives.gather([Rows(memory, layout)], "unit").wait()
        else:
            collectives.reduce_scatter([Rows(torch.ones(4), layout)], [torch.empty(1)], "unit").wait()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["gather", "reduce_scatter"])
def test_rank_that_stalls_is_named_by_its_host_and_by_its_column(kind: str) -> None:
    messages = run_ranks(_stall, _RANKS, kind, False)
    for rank in (1, 2):  # the other host's rank of its column, and its host's other rank
        assert f"rank {rank} waited 1.5 s for rank 3 in {kind} of 'unit'" in messages[rank]
    assert "rank 0 waited 1.5 s for rank" in messages[0]  # for one of those who waited for rank 3


@pytest.mark.parametrize("kind", ["gather", "reduce_scatter"])
def test_rank_that_dies_is_named(kind: str) -> None:
    *messages, failure = run_ranks(_stall, _RANKS, kind, True, expect_failure=True)
    assert isinstance(failure, RankFailure)
    assert all(f"in {kind} of 'unit'" in str(message) for message in messages)
    assert any("rank 3" in str(message) for message in messages)
