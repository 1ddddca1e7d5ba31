"""When a unit's parameters are whole: kept whole, resharded or not, gathered ahead; seen in the ledger and in memory."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from hf_zero.engine.units.storage.residency import Residency
from hf_zero.engine.units.unit import Unit
from hf_zero.layout import place
from tests.engine.twins import SHARDED, Net, Twins, batch, square_loss
from tests.ranks import on_ranks

_NUM_UNITS = 5  # enter, three blocks, head


def _gathers(twins: Twins) -> dict[str, int]:
    return {
        unit: entry.calls
        for (kind, unit), entry in twins.engine.world.ledger.entries.items()
        if kind == "gather" and unit != "whole parameters"
    }


@on_ranks(
    2,
    case=[
        (0, (0, 0, 0, 1)),  # one bucket at the last micro-batch
        (1, (0, _NUM_UNITS, _NUM_UNITS, 0)),  # gathered at the step, reduced at the last micro-batch
        (2, (0, _NUM_UNITS, 2 * _NUM_UNITS, 0)),  # reduced at every micro-batch
        (3, (4 * _NUM_UNITS, 0, 2 * _NUM_UNITS, 0)),  # gathered for each forward and each backward
    ],
)
def test_exchanges_of_two_micro_batches_and_a_step(case: tuple[int, tuple[int, int, int, int]]) -> None:
    stage, expected = case
    twins = Twins(stage, prefetch_bytes=0, reshard_after_forward=True)
    twins.step()
    ledger = twins.engine.world.ledger
    ledger.reset()
    with twins.model.no_sync():
        twins.backward()
    twins.backward()
    before_step = ledger.total("gather").calls
    for optimizer in twins.optimizers:
        optimizer.step()
    reduced = ledger.total("reduce_scatter").calls
    found = before_step, ledger.total("gather").calls - before_step, reduced, ledger.total("all_reduce").calls
    assert found == expected


_BLOCK = place([4 * numel for numel in (5, 5, 11 * 5, 11, 5 * 11, 5)])[1]  # bytes; the head is smaller


@on_ranks(
    2,
    case=[
        (1, {}, 0),  # whole for good
        (2, {}, 0),
        (3, {"prefetch_bytes": 0}, 0),
        (3, {"prefetch_bytes": 1}, 1),  # one at least
        (3, {"prefetch_bytes": 2 * _BLOCK}, 2),  # a block and the head: the backward would gather them at once
        (3, {"prefetch_bytes": 0, "reshard_after_forward": False}, _NUM_UNITS),
    ],
)
def test_units_that_backward_needs_first_stay_whole_within_the_budget(case: tuple[int, dict[str, Any], int]) -> None:
    stage, config, num_kept = case
    twins = Twins(stage, **({"reshard_after_forward": True} | config))
    units, memory = twins.engine.units, twins.engine.memory
    for _ in range(2):
        loss = square_loss(twins.model, twins.own())
        kept = units[_NUM_UNITS - num_kept :]
        assert [unit.residency is Residency.KEPT for unit in units] == [unit in kept for unit in units]
        assert [unit.num_leases for unit in units] == [0] * _NUM_UNITS
        if stage == 3:
            assert memory.bytes == sum(unit.buffer_nbytes for unit in kept)
        loss.backward()
        assert not any(unit.residency is Residency.KEPT or unit.num_leases for unit in units)
        if stage == 3:
            assert memory.bytes == 0
            assert all(unit._storage.nbytes() == 0 for unit in units)
        twins.backward_reference()
        twins.update()


@on_ranks(2)
def test_peak_of_gathered_bytes_is_one_unit_or_with_prefetch_more_or_without_resharding_all() -> None:
    def peak(reshard: bool, prefetch_bytes: int) -> float:
        twins = Twins(3, reshard_after_forward=reshard, prefetch_bytes=prefetch_bytes)
        twins.step(2)
        twins.engine.memory.reset_peak()
        twins.step(2)
        return twins.engine.memory.peak_bytes / sum(unit.buffer_nbytes for unit in twins.engine.units)

    # A block is 28% of the model. Without prefetch one unit is whole at a time, or two where backward passes a border.
    assert peak(True, 0) < 0.6
    assert peak(True, 2**20) > 0.9
    assert peak(False, 0) == 1.0


@on_ranks(2)
def test_reshard_after_forward_false_saves_one_gather_of_each_unit() -> None:
    counts = {}
    for reshard in (True, False):
        twins = Twins(3, reshard_after_forward=reshard, prefetch_bytes=0)
        twins.step()
        twins.engine.world.ledger.reset()
        twins.step()
        counts[reshard] = _gathers(twins)
    assert set(counts[True].values()) == {2} and set(counts[False].values()) == {1}


@on_ranks(2)
def test_units_kept_for_a_dropped_graph_come_back_with_the_next_forward_or_step() -> None:
    twins = Twins(3, reshard_after_forward=False)
    twins.step()
    memory, ledger = twins.engine.memory, twins.engine.world.ledger
    with torch.no_grad():
        twins.model(twins.own())
    assert memory.bytes == 0
    whole = sum(unit.buffer_nbytes for unit in twins.engine.units)
    twins.model(twins.own())  # its graph goes, at a time of its own on each rank
    gc.collect()
    assert memory.bytes == whole
    with torch.no_grad():
        twins.model(twins.own())
    assert memory.bytes == 0
    loss = square_loss(twins.model, twins.own())
    ledger.reset()
    loss.backward()
    assert memory.bytes == 0 and not _gathers(twins)
    twins.model(twins.own())
    twins.backward_reference()
    twins.update()
    assert memory.bytes == 0
    twins.step()


@on_ranks(2, config=[{}, {"reshard_after_forward": False}, {"prefetch_bytes": 0}])
def test_training_goes_on_after_a_forward_that_fails_on_one_rank(config: dict[str, Any]) -> None:
    """A forward that fails on one rank alone leaves its units released, while those of the others wait for a backward."""
    twins = Twins(3, timeout_s=5.0, **config)
    twins.step()
    if twins.rank == 1:
        fails = twins.model.head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            twins.model(twins.own())
        fails.remove()
    else:
        twins.model(twins.own())
    twins.step(2)
    twins.assert_same_output()


@on_ranks(2)
def test_unit_that_one_ranks_loss_leaves_out_is_released_on_all() -> None:
    """Rank 1's loss leaves out a unit that was kept for its backward."""
    twins = Twins(3, timeout_s=5.0)
    for _ in range(3):
        hidden: list[torch.Tensor] = []
        hook = twins.model.blocks[2].register_forward_hook(lambda *args: hidden.append(args[-1]))
        loss = square_loss(twins.model, twins.own())
        hook.remove()
        (hidden[0].pow(2).mean() if twins.rank == 1 else loss).backward()


@on_ranks(2)
def test_forward_after_a_step_is_fresh_while_an_older_graph_holds_its_units() -> None:
    twins = Twins(3, reshard_after_forward=False)
    twins.step()
    kept = twins.model(batch(40, 0))
    twins.step(2)
    twins.assert_same_output()
    del kept
    twins.step()
    assert twins.engine.memory.bytes == 0


@on_ranks(2, stage=SHARDED)
def test_small_parameters_stay_whole_and_train_right(stage: int) -> None:
    twins = Twins(stage, keep_whole_numel=11)
    for name, p in twins.model.named_parameters():
        assert isinstance(p, DTensor)
        assert (p.placements == (Replicate(),)) == (p.numel() <= 11), name
    twins.step(3)
    ledger = twins.engine.world.ledger
    small = sum(p.nbytes for p in twins.reference.parameters() if p.numel() <= 11)
    assert ledger.total("all_reduce").bytes == 3 * small  # 2 * bytes * (ranks - 1) / ranks, three times
    twins.assert_same_output()


@on_ranks(2, stage=SHARDED)
def test_nothing_is_gathered_where_all_parameters_stay_whole(stage: int) -> None:
    twins = Twins(stage, keep_whole_numel=10**6)
    twins.step(3)
    assert twins.engine.world.ledger.total("gather").calls == 0


def _events(prefetch_bytes: int, act: Callable[[Twins], None]) -> list[tuple[str, int]]:
    """The order in which gathers were started and waited for while `act` ran."""
    twins = Twins(3, prefetch_bytes=prefetch_bytes, reshard_after_forward=True)
    events: list[tuple[str, int]] = []
    originals = Unit.start_gather, Unit.acquire

    def start_gather(self: Unit, *args: Any) -> None:
        events.append(("start", self.index))
        originals[0](self, *args)

    def acquire(self: Unit) -> Any:
        events.append(("use", self.index))
        return originals[1](self)

    twins.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "start_gather", start_gather)
        patch.setattr(Unit, "acquire", acquire)
        act(twins)
    return events


def _forward(twins: Twins) -> None:
    square_loss(twins.model, twins.own())


def _ahead(events: list[tuple[str, int]]) -> list[int]:
    """For each use, how many gathers had been started that were not used yet, itself included."""
    return [
        sum(kind == "start" for kind, _ in events[:position]) - sum(kind == "use" for kind, _ in events[:position])
        for position, (kind, _) in enumerate(events)
        if kind == "use"
    ]


@on_ranks(2)
def test_gathers_start_ahead_in_the_recorded_order_within_the_budget() -> None:
    in_time = _events(0, _forward)
    assert in_time == [event for index in range(_NUM_UNITS) for event in (("start", index), ("use", index))]
    one_ahead = _events(2 * _BLOCK, _forward)
    assert [index for kind, index in one_ahead if kind == "start"] == list(range(_NUM_UNITS))
    assert _ahead(one_ahead)[:2] == [2, 2]
    all_ahead = _events(2**20, _forward)
    assert all_ahead[:_NUM_UNITS] == [("start", index) for index in range(_NUM_UNITS)]


@on_ranks(2)
def test_gathers_start_ahead_in_backward_too() -> None:
    events = _events(2 * _BLOCK, Twins.step)
    assert [index for kind, index in events if kind == "start"] == [*range(_NUM_UNITS), 2, 1, 0]
    backward = events[len(events) - 1 - events[::-1].index(("use", _NUM_UNITS - 1)) :]
    assert backward.index(("start", 2)) < backward.index(("use", 3))


def _in_sight(events: list[tuple[str, int]]) -> int:
    """How many gathers have no use of another unit, and so no compute, between their start and their own use."""
    starts = [position for position, (kind, _) in enumerate(events) if kind == "start"]
    between = [events[start + 1 : events.index(("use", events[start][1]), start)] for start in starts]
    return sum(not any(kind == "use" for kind, _ in each) for each in between)


@on_ranks(2)
def test_only_the_first_gather_of_a_step_has_no_compute_beside_it_however_small_the_budget() -> None:
    for budget, num_in_sight, most_ahead in ((1, 1, 2), (0, 2 * _NUM_UNITS, 1)):  # with none, none has
        events = _events(budget, Twins.step)
        assert _in_sight(events) == num_in_sight
        assert max(_ahead(events)) <= most_ahead


def _counts(prefetch_bytes: int) -> dict[tuple[str, str], tuple[int, int]]:
    twins = Twins(3, prefetch_bytes=prefetch_bytes, reshard_after_forward=True)
    for _ in range(2):
        twins.step()
        twins.assert_same_output()
        square_loss(twins.model, twins.own())  # never goes back
    return {key: (entry.calls, entry.bytes) for key, entry in twins.engine.world.ledger.entries.items()}


@on_ranks(2)
def test_prefetch_moves_no_byte_more() -> None:
    without, ahead = _counts(0), _counts(2**20)
    assert without.keys() == ahead.keys()
    assert all(ahead[key] <= counts for key, counts in without.items())


class Skipping(Net):
    """Leaves out a block when told to."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.enter(x))
        return self.head(self.blocks[2](x if self.skips else self.blocks[1](x)))


@on_ranks(2)
def test_units_gathered_ahead_but_skipped_give_their_memory_back() -> None:
    twins = Twins(3, Skipping, prefetch_bytes=2**20)
    for skips in (False, False, True, True, False):
        twins.model.skips = twins.reference.skips = skips
        loss = square_loss(twins.model, twins.own())
        kept = [unit.buffer_nbytes for index, unit in enumerate(twins.engine.units) if not (skips and index == 2)]
        assert twins.engine.memory.bytes == sum(kept)
        loss.backward()
        assert twins.engine.memory.bytes == 0
        twins.backward_reference()
        twins.update()


@on_ranks(2, reshard=[True, False])
def test_released_memory_is_never_read(reshard: bool) -> None:
    twins = Twins(3, reshard_after_forward=reshard)
    twins.engine.memory.poison = True
    twins.step(3)
    twins.assert_same_output()


@on_ranks(2)
def test_what_somebody_reads_is_not_gathered_over() -> None:
    unit = Twins(3).engine.units[0]
    lease = unit.acquire()
    with pytest.raises(AssertionError, match="gathered over what others read"):
        unit.start_gather()
    lease.give_back()
    assert unit.residency is Residency.RELEASED
    with pytest.raises(AssertionError, match="goes from released to whole"):
        unit._become(Residency.WHOLE)
