"""Bytes that a rank holds, per element of the model: what each stage promises, counted in the tensors that are really there.

Counted are the bytes of live storages (each byte once, however many tensors share it), so a whole copy that somebody forgot
to drop shows, wherever it hides.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from tests.engine.twins import STAGES
from tests.models import Stack, stack_batch
from tests.ranks import alone, close_pool, on_ranks

# Rows and rows' bytes divide by 2, 3 and the alignment of parameters in a unit's memory, so nothing is padded.
WIDTH = 384
# Bytes an element, here for scalars such as the one that all graphs hang on: below the smallest parameter's share, 0.0026.
SLACK = 0.001
BF16 = {"compute_dtype": "bfloat16", "master_dtype": "float32", "reduce_dtype": "float32"}


@pytest.fixture(scope="module", autouse=True)
def _fresh_ranks() -> None:
    """Count in new processes: what other tests have left in theirs would go, and be missed, while these run."""
    close_pool()


# --- counting -------------------------------------------------------------------------------------------------------


def live_bytes(engine: ZeroEngine | None = None) -> int:
    """Bytes of all storages of this process that a tensor in Python or a unit of the engine refers to.

    gloo's threads let go of a tensor some time after the exchange has been waited for: counted is what stays.
    """
    before, now = -1, _live_bytes_now(engine)
    while now != before:
        time.sleep(0.05)
        before, now = now, _live_bytes_now(engine)
    return now


def _live_bytes_now(engine: ZeroEngine | None) -> int:
    gc.collect()
    spans = set()
    for tensor in _live_tensors():
        if (
            not isinstance(tensor, DTensor) and tensor.device.type == "cpu"
        ):  # a DTensor's rows are a tensor of their own
            storage = tensor.untyped_storage()
            spans.add((storage.data_ptr(), storage.nbytes()))
    for unit in engine.units if engine is not None else ():
        spans.add((unit._storage.data_ptr(), unit._storage.nbytes()))
    return _covered(spans)


def _live_tensors() -> Iterable[Tensor]:
    for thing in gc.get_objects():
        # `type`, since isinstance asks an object for its class, which lazy modules answer with an import.
        if issubclass(type(thing), Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Bytes in the union of (address, length) ranges."""
    total = end = 0
    for start, length in sorted(spans):
        total += max(0, start + length - max(start, end))
        end = max(end, start + length)
    return total


@alone()
def test_covered_counts_shared_bytes_once() -> None:
    whole = torch.zeros(100)
    before = live_bytes()
    half, other = whole[50:], torch.zeros(10)
    alias = torch.empty(0).set_(whole.untyped_storage()[0:40], 0, (10,))
    assert live_bytes() - before == other.nbytes
    assert half.nbytes and alias.nbytes


def test_covered_unites_overlapping_ranges() -> None:
    assert _covered([(0, 10), (5, 10), (20, 5), (21, 2)]) == 20


# --- model states ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class States:
    """Bytes an element of the model that a rank holds.

    Attributes:
        accumulating: between the micro-batches of a step, under `no_sync`.
        stepped: after a step, before gradients are zeroed.
        zeroed: after `zero_grad`.
    """

    accumulating: float
    stepped: float
    zeroed: float


def states(config: dict[str, Any]) -> States:
    """Runs on a rank: the bytes of parameters, gradients and optimizer states in the second step."""
    before = live_bytes()
    torch.manual_seed(0)
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = Stack(WIDTH)
    # Where there is memory to spare, units stay whole between micro-batches.
    engine = hf_zero.shard_model(model, config | {"reshard_after_forward": True if config["stage"] == 3 else "auto"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        found = []
        with model.no_sync():
            model(**stack_batch(3 * step, rank, WIDTH)).backward()
            model(**stack_batch(3 * step + 1, rank, WIDTH)).backward()
        found.append(live_bytes(engine) - before if step else 0)
        model(**stack_batch(3 * step + 2, rank, WIDTH)).backward()
        optimizer.step()
        for unit in engine.units:
            unit.settle()  # the gathers that a step starts hold packed small parameters until they are waited for
        found.append(live_bytes(engine) - before if step else 0)
        optimizer.zero_grad()
        found.append(live_bytes(engine) - before if step else 0)
        assert engine.memory.bytes == 0
    counters = sum(state["step"].nbytes for state in optimizer.state.values())
    numel = sum(p.numel() for p in model.parameters())
    return States(*((num_bytes - counters) / numel for num_bytes in found))


def expected(stage: int, is_bf16: bool, num_ranks: int) -> States:
    """The table: parameters (and masters), gradients, Adam's two moments."""
    n = num_ranks
    whole_compute, masters = (2, 4) if is_bf16 else (4, 0)  # an fp32 shard lies in the whole copy
    if stage == 3:
        return States(16 / n, 16 / n, 12 / n)
    if stage == 2:
        at_rest = whole_compute + (masters + 8) / n
        return States(at_rest + 4 / n, at_rest + 4 / n, at_rest)
    if stage == 1:
        at_rest = whole_compute + (masters + 8) / n
        return States(at_rest + 4, at_rest + 4 / n, at_rest)
    at_rest = whole_compute + masters + 8
    return States(at_rest + 4, at_rest + 4, at_rest)


@pytest.mark.parametrize(
    ("stage", "is_bf16", "accumulating"),
    [
        (0, False, lambda n: 16),
        (1, False, lambda n: 8 + 8 / n),
        (2, False, lambda n: 4 + 12 / n),
        (3, False, lambda n: 16 / n),
        (0, True, lambda n: 18),
        (1, True, lambda n: 6 + 12 / n),
        (2, True, lambda n: 2 + 16 / n),
        (3, True, lambda n: 16 / n),
    ],
)
def test_expected_states_are_those_of_the_paper(stage: int, is_bf16: bool, accumulating: Any) -> None:
    for num_ranks in (2, 3):
        assert expected(stage, is_bf16, num_ranks).accumulating == pytest.approx(accumulating(num_ranks))


@on_ranks(2, 3, stage=STAGES, is_bf16=[False, True])
def test_rank_holds_the_bytes_of_its_stage(stage: int, is_bf16: bool) -> None:
    found = states({"stage": stage, **(BF16 if is_bf16 else {})})
    assert vars(found) == pytest.approx(vars(expected(stage, is_bf16, dist.get_world_size())), abs=SLACK)


@alone(stage=STAGES)
def test_world_of_one_holds_what_plain_training_holds(stage: int) -> None:
    assert vars(states({"stage": stage})) == pytest.approx(vars(expected(0, False, 1)), abs=SLACK)


# --- gathered parameters ---------------------------------------------------------------------------------------------

_WIDTH_OF_UNITS = 96  # what is counted here is exact


@dataclass(frozen=True)
class Gathered:
    """Bytes of gathered units in stage 3.

    Attributes:
        peaks: the most held at once, in each step and in an evaluation.
        units: of each unit.
    """

    peaks: tuple[int, ...]
    units: tuple[int, ...]


def gathered(config: dict[str, Any], is_checkpointed: bool = False) -> Gathered:
    """Runs on a rank: three steps, the first of which has no recorded order to prefetch by, and an evaluation."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = Stack(_WIDTH_OF_UNITS, num_blocks=5)
    if is_checkpointed:
        for block in model.blocks:
            _checkpoint(block)
    engine = hf_zero.shard_model(model, {"stage": 3, "reshard_after_forward": True, **config})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    peaks = []
    for step in range(5):
        engine.memory.reset_peak()
        with torch.set_grad_enabled(step < 3):
            loss = model(**stack_batch(step, rank, _WIDTH_OF_UNITS))
        if step < 3:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(engine.memory.peak_bytes)
        assert engine.memory.bytes == 0
        assert all(unit._storage.nbytes() == 0 for unit in engine.units)
    return Gathered(tuple(peaks), tuple(unit.buffer_nbytes for unit in engine.units))


def _checkpoint(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]


@on_ranks(2, is_checkpointed=[False, True])
def test_without_prefetching_one_unit_is_whole_at_a_time(is_checkpointed: bool) -> None:
    found = gathered({"prefetch_bytes": 0}, is_checkpointed)
    assert found.peaks == (max(found.units),) * len(found.peaks)


@on_ranks(2, 3, case=[(0, 1), (1, 1), (2, 2)])
def test_prefetching_holds_no_more_than_its_bytes_or_one_unit_beside_the_one_in_use(case: tuple[int, int]) -> None:
    fitting, ahead = case
    block = max(gathered({"prefetch_bytes": 0}).units)
    found = gathered({"prefetch_bytes": fitting * block + 64})
    assert max(found.peaks) <= max(found.units) + max(fitting * block + 64, block)
    assert found.peaks[1] == found.peaks[-1] == (1 + ahead) * block  # and it is used, from the second step on


@on_ranks(2)
def test_units_kept_from_forward_to_backward_are_all_whole_at_once() -> None:
    found = gathered({"prefetch_bytes": 0, "reshard_after_forward": False})
    assert found.peaks[0] == sum(found.units)
    assert found.peaks[-1] == max(found.units)  # an evaluation keeps none


# --- allocations ----------------------------------------------------------------------------------------------------

_LARGE = 2**20


@functools.cache
def large_allocations_of_plain_training() -> list[int]:
    return large_allocations(None)


def large_allocations(config: dict[str, Any] | None) -> list[int]:
    """Runs on a rank: how many tensors of more than a MiB the third and the fourth step allocate."""
    width, rank = 400, dist.get_rank()  # weights of 1.2 MiB, activations far below
    torch.manual_seed(0)
    model = Stack(width)
    if config is not None:
        hf_zero.shard_model(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found = []
    for step in range(4):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            model(**stack_batch(step, rank, width)).backward()
            optimizer.step()
            optimizer.zero_grad()
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        found.append(sum(event.nbytes() > _LARGE for event in events))
    return found[2:]


@on_ranks(2, case=[(1, "host"), (2, "host"), (3, "host"), (1, "pairwise"), (2, "pairwise")])
def test_engine_allocates_nothing_large_beyond_plain_training_but_its_rows_of_gradients(case: tuple[int, str]) -> None:
    stage, collectives = case
    # Whole weights and gradients take more than a MiB, a rank's rows of them less.
    assert large_allocations({"stage": stage, "collectives": collectives}) == large_allocations_of_plain_training()
